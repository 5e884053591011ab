"""pFedMe: the client's model moves towards a personal model, the proximal point of the client's loss.

Source: T Dinh, Tran and Nguyen, 2020 (https://arxiv.org/abs/2006.08848). Symbols: w is the global model, w_i client i's
model in training, theta_i its personal model, f_i its loss, lambda the weight of their distance, eta the learning rate
of w_i.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import grad_and_value

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.methods.copies import copy_net
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.methods.losses import proximal
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.settings import Unpack


class PFedMe(PersonalNet):
    r"""Finds a personal model near the client's model on each batch, and moves the client's model closer.

    .. math::

        \theta_i \approx \arg\min_\theta\; f_i(\theta) + \frac{\lambda}{2}\,\lVert \theta - w_i \rVert^2, \qquad
        w_i \leftarrow w_i - \eta\lambda\,(w_i - \theta_i)

    The first takes K steps :math:`\theta \leftarrow \theta - \alpha(\nabla f_i(\theta) + \lambda(\theta - w_i))`. The
    optimizer makes the second: :math:`\lambda(w_i - \theta_i)` is the gradient of the Moreau envelope of :math:`f_i`.
    The envelope's value, with :math:`f_i` before the last of the K steps, is the recorded loss. Any optimizer works;
    plain SGD is the paper's. The optimizer's weight decay draws :math:`w_i`, and not :math:`\theta_i`, to zero.

    A round starts from :math:`\theta_i = w_i = w`, and each batch from the last batch's :math:`\theta_i`, as in the
    official code; the paper leaves it open. The personal model stays with its client, whose state is as large as the
    net; until a client takes part, the received model is evaluated. BatchNorm's running statistics are those of the
    passes with :math:`\theta_i`, and are sent for :math:`w_i` too, which makes no pass.

    In the paper all clients train in each round, and the server receives some of their updates; here only these clients
    train. The official code and PFLlib add an L2 term with weight 0.001 to :math:`f_i`, and weight clients by their
    samples.

    The server's step is :math:`w \leftarrow (1 - \beta)\, w + \beta \sum_{i \in S} w_i / \lvert S \rvert`, where
    :math:`\beta` is the ``server_lr`` of `WeightedAverage`: 1 is the plain mean. In PFLlib its default is 0, with which
    the global model never moves.

    Source: T Dinh et al., 2020, Algorithm 1 (https://arxiv.org/abs/2006.08848). The defaults are those of its official
    code for neural networks, which go with 20 batches a round and the learning rate 0.005; with a larger one
    :math:`w_i` overshoots.

    Args:
        moreau_lambda: :math:`\lambda`, at least 0; 0 leaves the client's model where it is.
        personal_steps: K, the steps on each batch, at least 1.
        personal_lr: :math:`\alpha`, the learning rate of :math:`\theta`, above 0 and below :math:`2/\lambda`, from
            where on steps diverge; a schedule of the learning rate doesn't change it.
        predict: the evaluated model: ``personal`` is :math:`\theta_i` of the round's last batch; ``local`` is
            :math:`w_i`, as in the official code and PFLlib, whose list of :math:`\theta_i` holds the very tensors into
            which :math:`w_i` is written after training.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True

    personal: Net

    def __init__(
        self,
        *args: Any,
        moreau_lambda: float = 15.0,
        personal_steps: int = 5,
        personal_lr: float = 0.09,
        predict: Literal["personal", "local"] = "personal",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not moreau_lambda >= 0:
            raise MisconfigurationException(f"model.moreau_lambda={moreau_lambda} must be 0 or more, such as 15.")
        if personal_steps < 1:
            raise MisconfigurationException(f"model.personal_steps={personal_steps} must be 1 or more, such as 5.")
        if not (personal_lr > 0 and personal_lr * moreau_lambda < 2):
            raise MisconfigurationException(
                f"model.personal_lr={personal_lr} must be above 0, and below 2 when multiplied by model.moreau_lambda="
                f"{moreau_lambda}, or its steps lead away; take one such as {1.35 / max(moreau_lambda, 15):.2g}."
            )
        self.moreau_lambda = moreau_lambda
        self.personal_steps = personal_steps
        self.personal_lr = personal_lr
        self.predict = predict
        self.make_personal(self.net)  # theta_i
        self.personal.requires_grad_(False)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        r"""Move :math:`\theta_i`, and return a loss with gradient :math:`\lambda(w_i - \theta_i)` in :math:`w_i`."""
        if batch_idx == 0:
            copy_net(self, "personal")
        net = trained_parameters(self, "net")
        w = {name: parameter.detach() for name, parameter in net.items() if parameter.requires_grad}
        kept = dict(self.personal.named_parameters())
        theta: StateDict = {name: kept[name].detach() for name in w}
        buffers = dict(self.personal.named_buffers())
        pull = self.personal_lr * self.moreau_lambda

        def objective(theta: StateDict, buffers: StateDict) -> Tensor:
            # f_i(theta); running statistics move
            return loss_at(self, self.personal, theta | buffers, batch)

        for _ in range(self.personal_steps):
            slope, loss = grad_and_value(objective)(theta, buffers)
            # theta - alpha (slope + lambda (theta - w_i)), as a lerp: fewer passes over memory
            theta = {
                name: torch.lerp(entry, w[name], pull).sub(slope[name], alpha=self.personal_lr)
                for name, entry in theta.items()
            }
        for name, entry in theta.items():
            kept[name].copy_(entry)
        # detached from f_i's graph: the optimizer's gradient comes from this distance alone
        distance = proximal(net.values(), (kept[name] for name in net))
        return {"loss": loss + self.moreau_lambda * distance}

    @at_once
    def upload(self, data: ClientData) -> Message:
        r"""Return the client's model :math:`w_i`, with the running statistics of :math:`\theta_i`."""
        if self.steps_done:
            buffers = {f"net.{name}": buffer for name, buffer in self.personal.named_buffers()}
            # a buffer in no `state_dict` isn't the client's own
            self.assign({name: buffers[name] for name in buffers.keys() & self.state_dict().keys()})
            # `forward` evaluates `personal`, which here takes w_i
            if self.predict == "local":
                copy_net(self, "personal")
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return the unweighted mean of the clients' models."""
        return WeightedAverage(weighting="uniform")
