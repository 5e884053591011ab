"""Prediction of the next token at each position of a text."""

from dataclasses import dataclass
from typing import Protocol

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_range, check_shape, described, log_mean


class Positions(Protocol):
    """Logits in another form than a tensor, such as in chunks, with the errors at each position."""

    def errors(self, target: Tensor, ignore_index: int) -> Tensor:
        """Return the cross-entropy at each position ``[n, T]``, 0 at ignored ones.

        Args:
            target: token numbers ``[n, T]``.
            ignore_index: target of positions that don't count.
        """


@dataclass(frozen=True)
class NextToken(Task):
    """The next token at each position: cross-entropy, with ``perplexity``, which selects, and ``token_acc``.

    In records ``perplexity`` is the exponential of the mean cross-entropy of all clients' counted positions, as in the
    literature, and ``perplexity_mean`` the mean of the clients' perplexities, each client alike.

    ``exact_match`` is the share of answers that greedy generation would give word for word. An answer is a run of
    counted positions. Greedy generation from the text before gives exactly that answer if each of its tokens is the
    most likely one behind the tokens before, so that one forward pass tells it.

    Targets are token numbers ``[n, T]``, int64: the inputs shifted by one position; outputs are logits ``[n, T,
    vocabulary]``.

    Args:
        vocabulary: number of tokens.
        ignore_index: target of positions that don't count, such as padding.
        exact_match: measure ``exact_match`` too.
        cut_padding: cut off the positions behind a batch's last counted one, before the net sees them, in evaluations
            and, but for the engine ``vectorised``, in training. Only for nets that take texts of any length, and
            whose outputs depend on earlier positions alone.
    """

    vocabulary: int
    ignore_index: int = -100
    exact_match: bool = False
    cut_padding: bool = False

    monitor = "perplexity"
    mode = "min"

    @property
    def outputs(self) -> int:
        """Number of logits per position."""
        return self.vocabulary

    def loss(self, outputs: Tensor | Positions, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the cross-entropy of the counted positions; see `Task.loss`."""
        if not isinstance(outputs, Tensor):
            total = outputs.errors(target, self.ignore_index).sum()
            return total / self.weight(target) if reduction == "mean" else total
        # cross_entropy wants classes in the second dimension: flat positions spare a transposed copy of all logits
        flat = outputs.flatten(0, -2), target.flatten()
        return F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction=reduction)

    def weight(self, target: Tensor) -> Tensor:
        """Return the number of counted positions."""
        return (target != self.ignore_index).sum()

    def length(self, target: Tensor) -> int | None:
        """Return the positions up to the last counted one of a batch, a multiple of 8; see `Task.length`."""
        # looked for on request alone, as it waits for a GPU
        if not self.cut_padding:
            return None
        counted = (target != self.ignore_index).flatten(0, -2).any(0).nonzero()
        # multiples of 8: few different shapes, which matrix products on GPUs prefer
        return -(-(int(counted[-1]) + 1) // 8) * 8 if len(counted) else 8

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(-1), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``perplexity``, the exponential of the mean cross-entropy, and ``token_acc``, the share of hits."""
        found: dict[str, Metric | MetricCollection] = {
            "perplexity": Perplexity(self.ignore_index),
            "token_acc": TokenAccuracy(self.ignore_index),
        }
        return MetricCollection(found | ({"exact_match": ExactMatch(self.ignore_index)} if self.exact_match else {}))

    def pooled(self) -> dict[str, Metric]:
        """Return ``perplexity`` of all clients' positions, which stands in place of a mean over clients."""
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
    of_all = True

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


class Hits(Ratio):
    """A share of texts' parts whose correct tokens are the most likely ones; NaN without any.

    Args:
        ignore_index: target of positions that don't count.
    """

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, ignore_index: int) -> None:
        super().__init__(torch.int64)
        self.ignore_index = ignore_index


class TokenAccuracy(Hits):
    """Share of counted positions with the correct token as the most likely one; NaN without any."""

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add texts; see `Perplexity.update`."""
        counted = target != self.ignore_index
        self.total += ((outputs.argmax(-1) == target) & counted).sum()
        self.count += counted.sum()


class ExactMatch(Hits):
    """Share of answers, runs of counted positions, with the correct token as the most likely one everywhere."""

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add texts; see `Perplexity.update`."""
        counted = target != self.ignore_index
        # a run begins behind a position that doesn't count; runs are numbered from 1 in each text
        begins = counted & ~F.pad(counted, (1, 0))[..., :-1]
        runs = begins.cumsum(-1) * counted
        missed = counted & (outputs.argmax(-1) != target)
        # no indices that depend on values: evaluations of many clients run this under vmap
        misses = F.pad(torch.zeros_like(runs), (0, 1)).scatter_add(-1, runs, missed.long())
        answers = begins.sum()
        self.total += answers - (misses[..., 1:] > 0).sum()
        self.count += answers
