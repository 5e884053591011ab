"""FedALA: an element-wise mix of the received model and the client's own, with learned weights."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import anyone, at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.data.trees import joined
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import value_and_gradient
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.settings import Unpack


class FedALA(FedAvg):
    r"""Starts each round from an element-wise mix of the received model and the client's own last one.

    .. math::

        \hat\Theta_i = \Theta_i + (\Theta - \Theta_i) \odot W_i, \qquad
        W_i \leftarrow \mathrm{clip}\big(W_i - \eta\,\nabla_{W_i} L(\hat\Theta_i),\, 0,\, 1\big)

    in the net's last layers; all lower layers are as received (:math:`W_i = 1`). The weights begin with 1 and are
    learned on a random share of the client's training samples, in batches: until the loss settles in a client's second
    round, and then in one pass a round. A client's first round has nothing to mix. Local training and the update are
    those of `FedAvg`.

    A client is evaluated by its mix, before it trains. The evaluation learns the same weights as the round after it, so
    that learning them takes its time twice; outside a federation, without data, the last weights are used. Weights and
    own layers stay with the client: twice the size of those layers. The net is in evaluation mode while weights are
    learned; in the official code it normalises by batches and uses dropout.

    Source: Zhang et al., 2023, Algorithm 1 (https://arxiv.org/abs/2212.01197). In the official code and PFLlib all
    clients mix in all rounds, so that a client that isn't drawn continues from its last mix; here it continues from its
    last trained model. They sample a block of neighbouring samples, whose smaller last batch their older versions left
    out, and count tensors in ``layer_idx``, a weight and a bias apiece, where the paper and ``layers`` count layers.

    Args:
        layers: the paper's p, the number of mixed layers at the net's end, at least 1; layers without parameters, or
            with frozen ones, don't count. 1 is the output layer.
        rand_percent: the paper's s, the share of the samples to learn from in percent, above 0 and up to 100.
        eta: :math:`\eta`, the learning rate of the weights, at least 0; 0 is `FedAvg` bit for bit.
        threshold: the loss has settled when the last passes' losses, each of its last batch, have a smaller standard
            deviation than this, above 0.
        num_pre_loss: number of these last passes, at least 1.
        max_passes: largest number of passes, at least 1; the official code has no limit.
        ala_batch_size: samples a batch while weights are learned, at least 1; the paper trains with the same 10.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    client_level = True

    rounds_trained: Tensor

    def __init__(
        self,
        *args: Any,
        layers: int = 1,
        rand_percent: float = 80.0,
        eta: float = 1.0,
        threshold: float = 0.1,
        num_pre_loss: int = 10,
        max_passes: int = 100,
        ala_batch_size: int = 10,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in trained_parameters(self, "net")))
        for name, value, allowed, advice in (
            ("layers", layers, 1 <= layers <= len(owners), f"from 1 to the net's {len(owners)} layers with parameters"),
            ("rand_percent", rand_percent, 0 < rand_percent <= 100, "above 0 and up to 100"),
            ("eta", eta, eta >= 0, "0 (which is FedAvg) or more, such as 1"),
            ("threshold", threshold, threshold > 0, "above 0, such as 0.1"),
            ("num_pre_loss", num_pre_loss, num_pre_loss >= 1, "1 or more, such as 10"),
            ("max_passes", max_passes, max_passes >= 1, "1 or more, such as 100"),
            ("ala_batch_size", ala_batch_size, ala_batch_size >= 1, "1 or more, such as 10"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        self.rand_percent, self.eta, self.threshold = rand_percent, eta, threshold
        self.num_pre_loss, self.max_passes, self.ala_batch_size = num_pre_loss, max_passes, ala_batch_size
        # with eta = 0 nothing is mixed, and the client keeps no copies
        top = owners[-layers:] if eta > 0 else []
        mixed = [(name, p) for name, p in trained_parameters(self, "net").items() if name.rpartition(".")[0] in top]
        self.names = [name for name, _ in mixed]
        self.own = Frozen(mixed, persistent=True)  # Theta_i
        self.weights = Frozen(((name, torch.ones_like(p)) for name, p in mixed), persistent=True)  # W_i
        self.register_buffer("rounds_trained", torch.tensor(0))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, learn the weights, and mix."""
        super().on_download(payload, data)
        if self.names and anyone(self.rounds_trained > 0):
            if data is not None:
                # a draw of its own, so that local training draws the same numbers as without
                drawn = data.drawn(self.rand_percent, "ala")
                self.weights.take(self.learn(self.weights.tensors(), *drawn).items())
            self.assign({f"net.{name}": tensor for name, tensor in self.mix(self.weights.tensors()).items()})

    def mix(self, weights: StateDict) -> StateDict:
        """Return the mixed layers, while the net holds the received model; weights of 1 and 0 give either bit for bit.

        Args:
            weights: :math:`W_i`, by name.
        """
        received = dict(self.net.named_parameters())
        return {
            name: torch.lerp(own, received[name].detach(), weights[name]) for name, own in self.own.tensors().items()
        }

    def learn(self, weights: StateDict, drawn: Samples, own: Tensor) -> StateDict:
        """Return weights after further training on some samples; a client without earlier training keeps its own.

        Args:
            weights: :math:`W_i`, by name.
            drawn: the samples.
            own: which of them are the client's ``[n]``, at least the first one.
        """
        net: nn.Module = self.net
        path = ""
        # a LightningModule gives no features, only its loss
        if all(name.startswith("classifier.") for name in self.names) and not isinstance(net, LightningNet):
            # only the classifier is mixed: features are computed once
            net, path = self.net.classifier, "classifier."
            drawn = Samples(joined([self.net.features(x) for x, _ in drawn.chunks()]), drawn.y)

        def objective(weights: StateDict, x: Any, target: Any) -> Tensor:
            mixed = {name.removeprefix(path): tensor for name, tensor in self.mix(weights).items()}
            return self.task_loss(functional_call(net, mixed, (x,)), target)

        losses: list[Tensor] = []
        last = torch.zeros((), device=own.device)
        # no branch by a client's values, as many clients learn at once, each until its own loss has settled
        learns = self.rounds_trained > 0
        for _ in range(self.max_passes):
            for (x, target), counted in zip(
                drawn.chunks(self.ala_batch_size), torch.split(own, self.ala_batch_size), strict=True
            ):
                loss, slopes = value_and_gradient(objective, weights, x, target)
                # clients with fewer samples have fewer batches
                steps = learns & counted[0]
                last = torch.where(steps, loss, last)
                weights = {
                    name: torch.where(steps, (w - self.eta * slopes[name]).clamp(0, 1), w)
                    for name, w in weights.items()
                }
            # the loss of the pass's last batch, as in the official code
            losses.append(last)
            # one pass alone after a client's second round
            learns = learns & (self.rounds_trained == 1)
            if len(losses) > self.num_pre_loss:
                learns = learns & ~(torch.stack(losses[-self.num_pre_loss :]).std(correction=0) < self.threshold)
            if not anyone(learns):
                break
        return weights

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the trained model, and keep the last layers as the client's own."""
        self.own.take(self.net.named_parameters())
        self.rounds_trained += 1
        return super().upload(data)
