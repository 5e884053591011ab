"""FedAS: alignment of received features with the client's own, and client weights by the loss's slope.

Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from pfl_lightning.client import Batch, ClientSettings, Phase, in_body
from pfl_lightning.client.at_once import anyone, at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.class_vectors import ClassVectors, class_table
from pfl_lightning.methods.copies import copy_net
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.functional import value_and_gradient
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net, feature_size
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.server import Aggregator, WeightedAverage, client_weights
from pfl_lightning.settings import Unpack, check_least


class FedAS(PersonalNet, FedPer):
    r"""Trains as `FedPer`, after an alignment of the received feature extractor with the client's last one.

    .. math::

        \min_\theta \sum_c \mathrm{mean}_{i: y_i = c,\, j}\, (\theta(x_i)_j - \mu_{cj})^2, \qquad
        F_k = \sum_b \lVert \nabla \ell_b \rVert^2

    :math:`\mu_c` are the class means of features by the client's last trained feature extractor; in a client's first
    round nothing is aligned. After training, :math:`F_k` is the sum over batches of the squared length of the
    gradient of the batch's mean loss, in evaluation mode; it grows with the number of samples, and falls with the batch
    size. A client is evaluated by its last trained model, which stays with it.

    The alignment runs in evaluation mode, as in the official code from its second round on: it uses BatchNorm's running
    statistics, which also gave :math:`\mu_c`, and doesn't update them.

    The official code aligns the server's own model in place, client after client: each begins with a feature extractor
    that is already aligned with the clients before it, and the order of clients matters. Here each client aligns a copy
    of the server's model, as in the paper. In the official code all clients compute :math:`F_k` in each round, over
    shuffled batches without a smaller last one; FL-bench aligns means of batches. The settings behind the paper's
    tables could not be verified.
    Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS).

    Args:
        align_epochs: passes of the alignment, at least 0; 0 leaves it out.
        align_lr: learning rate of the alignment, with plain SGD, at least 0.
        align_batch_size: samples a batch of the alignment, at least 1.
        fisher_batch_size: samples a batch for :math:`F_k`, at least 1.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    requires = frozenset({"classes", "vector features"})
    sends = FedPer.sends | {"fisher"}
    personal: Net

    def __init__(
        self,
        *args: Any,
        align_epochs: int = 1,
        align_lr: float = 0.01,
        align_batch_size: int = 16,
        fisher_batch_size: int = 10,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_least(
            "model",
            align_epochs=(align_epochs, 0),
            align_lr=(align_lr, 0),
            align_batch_size=(align_batch_size, 1),
            fisher_batch_size=(fisher_batch_size, 1),
        )
        self.align_epochs, self.align_lr = align_epochs, align_lr
        self.align_batch_size, self.fisher_batch_size = align_batch_size, fisher_batch_size
        self.make_personal(self.net)
        # a copy to evaluate and to align with, which no phase trains
        self.personal.requires_grad_(False)
        self.aims = ClassVectors(self.num_classes, feature_size(self.net))  # mu_c

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the feature extractor, and before training compute the class means for the alignment."""
        super().on_download(payload, data)
        if not self.training_follows:
            return
        self.aims.take({})
        # in its first round a client has no last model: no class has an aim, and the alignment adds nothing
        if data is not None and anyone(self.has_personal) and anyone(torch.as_tensor(data.size("train")) > 0):
            means, present = class_table(self.personal.features, data, self.num_classes)
            self.aims.put(means, present & self.has_personal)

    def local_phases(self) -> list[Phase]:
        """Align the feature extractor, then train everything."""
        # not the personal copy, which is in the module too
        train = Phase("train", lambda name: name.startswith("net."))
        if not self.align_epochs:
            return [train]
        align = Phase(
            "align",
            trains=lambda name: name.startswith("net.") and in_body(name),
            epochs=self.align_epochs,
            batch_size=self.align_batch_size,
            scheduled=False,
        )
        return [align, train]

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the configured optimizer, or plain SGD for the alignment."""
        return (
            SGD(parameters, lr=self.align_lr) if phase.name == "align" else super().local_optimizer(phase, parameters)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the alignment's loss, or the task's."""
        if self.phase.name != "align":
            return super().training_step(batch, batch_idx)
        x, target = batch
        # running statistics are used and stand still; engines have the net in training mode here
        with kept_modes(self.net.features):
            self.net.features.eval()
            h = self.net.features(x)
        squares = (h - self.aims(target, default=h.detach())).square().mean(1)
        # each class counts the same, however many samples of the batch it has; in means over samples alone, in which
        # the filling of short batches can count for nothing
        shares = F.one_hot(target, self.num_classes).to(squares).mean(0)
        return {"loss": (squares / shares[target]).mean()}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the feature extractor and the slope of the loss; keep the trained model."""
        if self.steps_done:
            copy_net(self, "personal")
        return super().upload(data) | {"fisher": self.slope(data)}

    def slope(self, data: ClientData) -> Tensor:
        """Return :math:`F_k` of a client's training samples.

        Args:
            data: the client's data.
        """

        def objective(weights: StateDict, x: Any, y: Any) -> Tensor:
            return self.task_loss(functional_call(self.net, weights, (x,)), y)

        weights = {name: parameter.detach() for name, parameter in trained_parameters(self, "net").items()}
        # float64, since thousands of squares of very different size are added
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for x, y, own in data.marked_chunks(self.fisher_batch_size, ignored=True):
            _, slopes = value_and_gradient(objective, weights, x, y)
            squares = sum((g.double().square().sum() for g in slopes.values()), torch.zeros_like(total))
            # clients with fewer samples have fewer batches
            total = total + torch.where(own[0], squares, 0)
        return total

    def configure_aggregator(self) -> Aggregator:
        """Return FedAS' server."""
        return FisherAverage()


class FisherAverage(WeightedAverage):
    r"""Averages feature extractors by the clients' slopes, :math:`\theta \leftarrow \sum F_k \theta_k / \sum F_k`.

    If all slopes are 0 it is `WeightedAverage`. Slopes span orders of magnitude: the largest share is logged.
    Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS). Takes the arguments of `WeightedAverage`.
    """

    needs = WeightedAverage.needs | {"fisher"}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average by the slopes; log the largest weight."""
        if not updates:
            return {}
        slopes = {client: float(update["fisher"]) for client, update in updates.items()}
        total = sum(slopes.values())
        plain = client_weights(updates, self.weighting)
        # slopes of 0 throughout would divide by 0
        shares = {client: slope / total for client, slope in slopes.items()} if total > 0 else plain
        self.average(updates, shares)
        return {"max_share": max(shares.values())}
