"""kNN-Per: the global model's predictions, mixed with the targets of a client's nearest training samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import ClientSettings, Forward
from pfl_lightning.data import ClientData
from pfl_lightning.data.trees import joined
from pfl_lightning.messages import Message
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.functional import exact_squares, quick_squares
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import NextToken, Regression
from pfl_lightning.tasks.base import number_of_classes

INSTEAD = "take a task of classes, NextToken or Regression, or a method that needs no neighbours, such as APFL or Ditto"
"""Advice for tasks whose targets have no mixture."""

DISTANCES = 2**24
"""Largest number of distances held at a time: 64 MiB in single precision. A text has a query for each letter."""


class KNNPer(FedAvg):
    r"""Trains as `FedAvg`, and predicts by a mixture with the targets of the nearest training samples.

    .. math::

        p_c = \lambda\,p^{knn}_c + (1 - \lambda)\,\mathrm{softmax}(z)_c, \qquad
        p^{knn}_c \propto \sum_{i \in kNN(h):\, y_i = c} e^{-\lVert h - h_i \rVert^2 / (d s)}

    h are a sample's d features by the received model, and :math:`h_i` those of the client's training samples, computed
    on each download before an evaluation. Outputs are :math:`\log p`. Without data or training samples, predictions are
    the model's.

    The paper has classes alone. For `NextToken` each counted position is a sample and its token the class, as in the
    language models of Khandelwal et al., 2020 (https://arxiv.org/abs/1911.00172). For `Regression` the neighbours'
    weighted mean target is in place of :math:`p^{knn}`, and the model's output in that of the softmax; this form
    is ours. Other tasks are refused.

    The paper chooses :math:`\lambda` for each client on validation samples; here all clients have the same.
    Source: Marfoq et al., 2022 (https://arxiv.org/abs/2111.09360), whose official code's example has 7 neighbours.

    Args:
        share: :math:`\lambda`, in [0, 1]; 0 is `FedAvg` bit for bit.
        neighbours: number of nearest samples that count, at least 1; a client with fewer samples takes all.
        scale: s, above 0; an infinite one counts all neighbours alike.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the task has neither classes nor plain
            quantities.
    """

    client_level = True

    requires = frozenset({"vector features"})
    caches = frozenset({"known"})

    def __init__(
        self, *args: Any, share: float = 0.5, neighbours: int = 7, scale: float = 1.0, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed, advice in (
            ("share", share, 0 <= share <= 1, "from 0 (which is FedAvg) to 1, such as 0.5"),
            ("neighbours", neighbours, neighbours >= 1, "1 or more, such as 7"),
            ("scale", scale, scale > 0, "above 0, such as 1"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        self.share, self.neighbours, self.scale = share, neighbours, scale
        # not a subclass: outputs of Poisson are logarithms, and those of Quantile no means
        self.of_values = type(self.task) is Regression
        self.by_position = isinstance(self.task, NextToken)
        if not (self.of_values or self.by_position):
            number_of_classes(self.task, f"model {type(self).__name__}", INSTEAD)
        if self.by_position:
            # one vector a position, checked on each download
            self.requires = frozenset()  # type: ignore[misc]
        self.known: tuple[Tensor, Tensor] | None = None

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and before an evaluation compute the features of the client's training samples."""
        super().on_download(payload, data)
        self.known = None
        if self.share > 0 and data is not None and self.evaluation_follows and len(data.train):
            vectors, targets = joined([self.net.features(x) for x, _ in data.train.chunks()]), data.train.y
            if isinstance(self.task, NextToken):
                if vectors.dim() != 3 or vectors.shape[:2] != targets.shape:
                    raise MisconfigurationException(
                        "model KNNPer compares features of positions, [samples, positions, size], and the features of "
                        f"{type(self.net).__name__} are {list(vectors.shape)}; take a net with a vector for each "
                        "position, such as CharGRU."
                    )
                counted = targets != self.task.ignore_index
                vectors, targets = vectors[counted], targets[counted]
            elif self.of_values:
                targets = targets.view(len(targets), -1).to(vectors.dtype)
            self.known = vectors, targets

    def forward(self, x: Tensor) -> Tensor:
        """Return logarithms of the mixed probabilities, or mixed quantities; without training samples the model's."""
        if self.known is None or not len(self.known[0]):
            outputs: Tensor = self.net(x)
            return outputs
        rows = max(1, DISTANCES // len(self.known[0]))
        return self.mixed(x, lambda h: joined([self.near(chunk, exact_squares) for chunk in torch.split(h, rows)]))

    def predicting_module(self) -> nn.Module:
        """Return the mixture, with the features and targets of the client's training samples in it.

        Raises:
            MisconfigurationException: if the module hasn't met the client's samples.
        """
        if self.share and self.known is None:
            raise MisconfigurationException(
                f"model KNNPer predicts with share={self.share} by the client's training samples, and this module "
                "has none, as a checkpoint keeps no samples; export trainer.client(NAME), with the run's data."
            )
        if self.known is None or not len(self.known[0]):
            return self.net
        # all rows at once: formats for other programs have no loop over chunks
        return Forward(self, partial(self.mixed, near=partial(self.near, squares=quick_squares)))

    def mixed(self, x: Tensor, near: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logarithms of the mixed probabilities, or mixed quantities.

        Args:
            x: inputs ``[n, *input_shape]``.
            near: from features ``[n, d]`` to the neighbours' part ``[n, outputs]``.
        """
        features = self.net.features(x)
        outputs: Tensor = self.net.classifier(features)
        near_outputs = near(features.flatten(0, -2)).view_as(outputs)
        own = outputs if self.of_values else outputs.softmax(-1 if self.by_position else 1)
        mixed: Tensor = self.share * near_outputs + (1 - self.share) * own
        # log of 0 is -infinity, which would make losses infinite
        return mixed if self.of_values else mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()

    def near(self, h: Tensor, squares: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the mean of the neighbours' targets, ``[n, outputs]``.

        Args:
            h: features ``[n, d]``.
            squares: squared distances of features.
        """
        assert self.known is not None
        vectors, targets = self.known
        rows, weights = nearest(h, vectors, self.neighbours, self.scale, squares)
        if self.of_values:
            return (weights[:, :, None] * targets[rows]).sum(1)
        return shares(weights, targets[rows], self.task.outputs)


def nearest(
    h: Tensor,
    vectors: Tensor,
    count: int,
    scale: float,
    squares: Callable[[Tensor, Tensor], Tensor] = exact_squares,
) -> tuple[Tensor, Tensor]:
    """Return rows ``[n, k]`` and weights ``[n, k]`` of the nearest samples; weights of a query have the sum 1.

    Args:
        h: features ``[n, d]``.
        vectors: features of training samples ``[m, d]``.
        count: number of neighbours; k is at most m.
        scale: s.
        squares: squared distances of features.
    """
    least, rows = squares(h, vectors).topk(min(count, len(vectors)), dim=1, largest=False)
    # softmax subtracts the least distance, before all exponentials could vanish
    return rows, (-least / (h.shape[1] * scale)).softmax(1)


def shares(weights: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the shares ``[n, C]`` of the classes among neighbours.

    >>> shares(torch.tensor([[0.75, 0.25]]), torch.tensor([[1, 2]]), classes=3)
    tensor([[0.0000, 0.7500, 0.2500]])

    Args:
        weights: weights of the neighbours ``[n, k]``.
        labels: their classes ``[n, k]``.
        classes: C.
    """
    # no array of neighbours by classes, which a vocabulary would make large
    return weights.new_zeros(weights.shape[0], classes).scatter_add(1, labels, weights)
