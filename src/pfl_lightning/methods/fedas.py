"""FedAS: received features are aligned with a client's own ones, and clients count by the slope of their loss.

Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from pfl_lightning.aggregators import Aggregator, WeightedAverage, client_weights
from pfl_lightning.choices import check_least
from pfl_lightning.client import Batch, Phase, in_body
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.class_vectors import ClassVectors, class_means
from pfl_lightning.methods.copies import copy_net
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net, feature_size
from pfl_lightning.nets.modes import kept_modes


class FedAS(PersonalNet, FedPer):
    r"""Trains as `FedPer`, from a received body that is first brought near to the client's last one.

    .. math::

        \min_\theta \sum_c \mathrm{mean}_{i: y_i = c,\, j}\, (\theta(x_i)_j - \mu_{cj})^2, \qquad
        F_k = \sum_b \lVert \nabla \ell_b \rVert^2

    :math:`\mu_c` are the class means of features by the body that the client had after it last took part; who never did
    aligns nothing. After training, :math:`F_k` sums over batches of the client's samples the squared length of the
    gradient of their mean loss, in evaluation mode; it grows with the samples, and falls with the size of batches. A
    client is evaluated by the model that it trained last, which stays with it.

    The alignment runs in evaluation mode, as in the official code from its second round on: BatchNorm's running
    statistics, by which :math:`\mu_c` were computed, are used and stand still.

    The official code aligns the server's own model in place, client after client: each begins with a body that is
    already aligned with the clients before it, and the order of clients counts. Here each aligns a copy of what the
    server sent, as the paper has it. There all clients compute :math:`F_k` in each round, and batches are shuffled and
    whole; FL-bench aligns means of batches. The settings behind the paper's tables could not be verified.
    Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS).

    Args:
        align_epochs: passes of the alignment, at least 0; 0 leaves it out.
        align_lr: its learning rate, of plain SGD, at least 0.
        align_batch_size: samples of its batches, at least 1.
        fisher_batch_size: samples of the batches of :math:`F_k`, at least 1.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    requires = frozenset({"classes", "vector features"})
    sends = FedPer.sends | {"fisher"}
    personal: Net

    def __init__(
        self,
        align_epochs: int = 1,
        align_lr: float = 0.01,
        align_batch_size: int = 16,
        fisher_batch_size: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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
        self.personal.requires_grad_(False)
        self.aims = ClassVectors(self.num_classes, feature_size(self.net))  # mu_c

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Take the body, and before training the class means to align it with."""
        super().on_download(payload, data)
        if not self.training_follows:
            return
        known = data is not None and bool(self.has_personal) and len(data.train) > 0
        self.aims.take(
            class_means(self.personal.features, data.train, data.classes, self.num_classes) if known and data else {}
        )

    def local_phases(self) -> list[Phase]:
        """The alignment of the body, then training of all."""
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
        """The configured one, and plain SGD for the alignment."""
        return (
            SGD(parameters, lr=self.align_lr) if phase.name == "align" else super().local_optimizer(phase, parameters)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the alignment's loss, or the task's."""
        if self.phase.name != "align":
            return super().training_step(batch, batch_idx)
        x, target = batch
        with kept_modes(self.net.features):
            self.net.features.eval()
            h = self.net.features(x)
        squares = (h - self.aims(target, default=h.detach())).square().mean(1)
        counts = F.one_hot(target, self.num_classes).sum(0)
        return {"loss": (squares / counts[target]).sum()}

    def upload(self, data: ClientData) -> Message:
        """The body and the slope of the loss; keeps the model."""
        if self.steps_done:
            copy_net(self, "personal")
        return super().upload(data) | {"fisher": self.slope(data.train)}

    def slope(self, part: Samples) -> Tensor:
        """F_k of some samples."""

        def objective(weights: StateDict, x: Any, y: Any) -> Tensor:
            return self.task.loss(functional_call(self.net, weights, (x,)), y)

        weights = {name: parameter.detach() for name, parameter in trained_parameters(self, "net").items()}
        total = torch.zeros((), dtype=torch.float64)
        for x, y in part.chunks(self.fisher_batch_size):
            total += sum(float(g.double().square().sum()) for g in grad(objective)(weights, x, y).values())
        return total

    def configure_aggregator(self) -> Aggregator:
        """FedAS' server."""
        return FisherAverage()


class FisherAverage(WeightedAverage):
    r"""Averages bodies by the slopes of their clients' losses, :math:`\theta \leftarrow \sum F_k \theta_k / \sum F_k`.

    Where all slopes are 0 it is `WeightedAverage`. Slopes span orders of magnitude: the largest share is logged.
    Source: Yang, Huang and Ye, 2024 (https://github.com/xiyuanyang45/FedAS). Takes the arguments of `WeightedAverage`.
    """

    needs = WeightedAverage.needs | {"fisher"}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Moves the global body."""
        if not updates:
            return {}
        slopes = {client: float(update["fisher"]) for client, update in updates.items()}
        total = sum(slopes.values())
        plain = client_weights(updates, self.weighting)
        shares = {client: slope / total for client, slope in slopes.items()} if total > 0 else plain
        self.average(updates, shares)
        return {"max_share": max(shares.values())}
