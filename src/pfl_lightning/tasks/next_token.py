"""Prediction of the next token at each position of a text."""

from dataclasses import dataclass

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_range, check_shape, described, log_mean


@dataclass(frozen=True)
class NextToken(Task):
    """The next token at each position: cross-entropy, with ``perplexity``, which selects, and ``token_acc``.

    Targets are token numbers ``[n, T]``, int64: the inputs shifted by one position; outputs are logits ``[n, T,
    vocabulary]``.

    Args:
        vocabulary: number of tokens.
        ignore_index: target of positions that don't count, such as padding.
    """

    vocabulary: int
    ignore_index: int = -100

    monitor = "perplexity"
    mode = "min"

    @property
    def outputs(self) -> int:
        """Number of logits per position."""
        return self.vocabulary

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of the counted positions; see `Task.loss`."""
        # cross_entropy wants classes in the second dimension: flat positions spare a transposed copy of all logits
        flat = outputs.flatten(0, -2), target.flatten()
        return F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction=reduction)

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of counted positions."""
        return (target != self.ignore_index).sum()

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(-1), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``perplexity``, the exponential of the mean cross-entropy, and ``token_acc``, the share of hits."""
        return MetricCollection(
            {"perplexity": Perplexity(self.ignore_index), "token_acc": TokenAccuracy(self.ignore_index)}
        )

    def pooled(self) -> dict[str, Metric]:
        """Return ``perplexity`` of all clients' positions."""
        # the mean over clients of an exponential isn't the exponential of the mean
        return {"perplexity": Perplexity(self.ignore_index)}

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but one token number in range per position."""
        if not isinstance(target, Tensor) or target.dim() != 2 or target.dtype != torch.int64:
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes int64 token numbers of shape [samples, positions]"
            )
        check_range(target, self.vocabulary, self.ignore_index, owner, self)

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but one logit per position and token."""
        check_shape(outputs, [*target.shape, self.vocabulary], net, self)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``classes``, tokens by position ``[n, T]``, and ``probabilities`` ``[n, T, vocabulary]``."""
        return {"classes": outputs.argmax(-1), "probabilities": outputs.softmax(-1)}


class Perplexity(Ratio):
    """Exponential of the mean cross-entropy of the counted positions; NaN without any.

    Args:
        ignore_index: target of positions that don't count.
    """

    higher_is_better = False
    plot_lower_bound = 1.0

    def __init__(self, ignore_index: int) -> None:
        # millions of positions: in single precision a sum of so many errors loses digits
        super().__init__(torch.float64)
        self.ignore_index = ignore_index

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add texts.

        Args:
            outputs: logits ``[n, T, vocabulary]``.
            target: token numbers ``[n, T]``.
        """
        flat = outputs.flatten(0, -2), target.flatten()
        self.total += F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction="sum").double()
        self.count += (target != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the exponential."""
        return super().compute().exp()


class TokenAccuracy(Ratio):
    """Share of counted positions with the correct token as the most likely one; NaN without any.

    Args:
        ignore_index: target of positions that don't count.
    """

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, ignore_index: int) -> None:
        super().__init__(torch.int64)
        self.ignore_index = ignore_index

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add texts; see `Perplexity.update`."""
        counted = target != self.ignore_index
        self.total += ((outputs.argmax(-1) == target) & counted).sum()
        self.count += counted.sum()
