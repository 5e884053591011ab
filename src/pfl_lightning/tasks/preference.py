"""Preference of one answer to another, by direct preference optimization (DPO)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from pfl_lightning.tasks.base import Ratio, Reduction, Task, check_range, check_shape, described, log_mean
from pfl_lightning.tasks.next_token import Positions

TOLERANCE = 0.02
"""Relative difference of log-probabilities up to which a net is taken for the reference, as bfloat16 rounds."""


@dataclass(frozen=True)
class Preference(Task):
    r"""A preferred answer beside a rejected one, by direct preference optimization.

    The reward of an answer y to a prompt x is :math:`r = \beta (\log \pi(y|x) - \log \pi_0(y|x))`: the logarithm of the
    answer's probability under the net, less that under the reference :math:`\pi_0`, the model before any training. The
    loss of a pair is :math:`-\log \sigma(r_{chosen} - r_{rejected})`, which is log 2 before training.

    Inputs are token numbers ``[n, 2, T]``, the chosen text first. Targets are a dict: ``tokens`` ``[n, 2, T]``, int64,
    the inputs shifted by one position, with ``ignore_index`` outside of the answers; and ``reference`` ``[n, 2]``, the
    answers' log-probabilities under the reference. Outputs are logits ``[n, 2, T, vocabulary]``.

    Metrics are ``reward_acc``, the share of pairs whose chosen answer has the higher reward, and ``reward_margin``, the
    mean of :math:`r_{chosen} - r_{rejected}`. The best round has the lowest ``loss``.

    Args:
        vocabulary: number of tokens.
        beta: how strongly the net is kept near the reference, above 0.
        ignore_index: target of positions that don't count.
        cut_padding: cut off the positions behind a batch's last counted one, as for `NextToken`.

    Raises:
        MisconfigurationException: if ``beta`` isn't above 0.

    Source: Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS
    2023, https://arxiv.org/abs/2305.18290.
    """

    vocabulary: int
    beta: float = 0.1
    ignore_index: int = -100
    cut_padding: bool = False

    monitor = "loss"
    mode = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < math.inf:
            raise MisconfigurationException(f"data.beta={self.beta} must be above 0, such as 0.1.")

    @property
    def outputs(self) -> int:
        """Number of logits per position."""
        return self.vocabulary

    def log_probabilities(self, outputs: Tensor | Positions, tokens: Tensor) -> Tensor:
        """Return the logarithms of the answers' probabilities ``[n, 2]``.

        Args:
            outputs: logits ``[n, 2, T, vocabulary]``.
            tokens: targets ``[n, 2, T]``.
        """
        # logits in chunks know their own errors
        if not isinstance(outputs, Tensor):
            return -outputs.errors(tokens, self.ignore_index).sum(-1)
        flat = outputs.flatten(0, -2), tokens.flatten()
        errors = F.cross_entropy(*flat, ignore_index=self.ignore_index, reduction="none")
        return -errors.view(tokens.shape).sum(-1)

    def margins(self, outputs: Tensor | Positions, target: dict[str, Tensor]) -> Tensor:
        """Return each pair's reward of the chosen answer less that of the rejected one ``[n]``.

        Args:
            outputs: logits ``[n, 2, T, vocabulary]``.
            target: ``tokens`` and ``reference``.
        """
        # differences first: sums over long answers are large, and the margin is small
        gains = self.log_probabilities(outputs, target["tokens"]) - target["reference"]
        return self.beta * (gains[:, 0] - gains[:, 1])

    def loss(self, outputs: Tensor | Positions, target: dict[str, Tensor], reduction: Reduction = "mean") -> Tensor:
        """Return the loss of the pairs; see `Task.loss`."""
        # not the logarithm of a sigmoid, which is 0 for large negative margins
        losses = -F.logsigmoid(self.margins(outputs, target))
        return losses.mean() if reduction == "mean" else losses.sum()

    def length(self, target: dict[str, Tensor]) -> int | None:
        """Return the positions up to the last counted one of a batch, a multiple of 8; see `Task.length`."""
        if not self.cut_padding:
            return None
        counted = (target["tokens"] != self.ignore_index).flatten(0, -2).any(0).nonzero()
        # multiples of 8: few different shapes, which matrix products on GPUs prefer
        return -(-(int(counted[-1]) + 1) // 8) * 8 if len(counted) else 8

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the logarithms of the mean probabilities; see `Task.combined`."""
        return log_mean(outputs.log_softmax(-1), shares)

    def configure_metrics(self) -> MetricCollection:
        """Return ``reward_acc`` and ``reward_margin``."""
        metrics: dict[str, Metric | MetricCollection] = {
            "reward_acc": RewardAccuracy(self),
            "reward_margin": RewardMargin(self),
        }
        return MetricCollection(metrics)

    def check(self, target: Any, owner: str) -> None:
        """Refuse all targets but a pair of texts, and a log-probability of each answer."""
        parts = target if isinstance(target, dict) else {}
        tokens, reference = parts.get("tokens"), parts.get("reference")
        if (
            not isinstance(tokens, Tensor)
            or tokens.shape[1:2] != (2,)
            or tokens.dim() != 3
            or tokens.dtype != torch.int64
        ):
            found = described(target if tokens is None else tokens)
            raise MisconfigurationException(
                f"{owner} has {found}; task {self} takes a dict of tokens, int64 [samples, 2, positions], and reference"
            )
        if (
            not isinstance(reference, Tensor)
            or reference.shape != tokens.shape[:2]
            or not reference.is_floating_point()
        ):
            raise MisconfigurationException(
                f"{owner} has as reference {described(reference)}; task {self} takes the answers' log-probabilities "
                "[samples, 2] under the model before training"
            )
        check_range(tokens, self.vocabulary, self.ignore_index, owner, self)

    def check_outputs(self, outputs: Tensor, target: dict[str, Tensor], net: str) -> None:
        """Refuse all outputs but one logit per position and token; warn of a net other than the reference."""
        check_shape(outputs, [*target["tokens"].shape, self.vocabulary], net, self)
        own, reference = self.log_probabilities(outputs.float(), target["tokens"]), target["reference"]
        # the loss of another reference has its minimum elsewhere, and nothing in a record would show it
        if bool(((own - reference).abs() > TOLERANCE * reference.abs() + TOLERANCE).any()):
            rank_zero_warn(
                f"before training, the first answer has the log-probability {float(own[0, 0]):.2f} under model.net="
                f"{net}, and {float(reference[0, 0]):.2f} under the reference of the data; unless the net was trained "
                "before, give the same model as data.reference and model.net.model."
            )

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return ``classes``, tokens by position, and ``probabilities``, as `NextToken` does."""
        return {"classes": outputs.argmax(-1), "probabilities": outputs.softmax(-1)}


class RewardMargin(Ratio):
    """Mean of the chosen answers' rewards less those of the rejected ones; NaN without pairs.

    Args:
        task: the task, which computes rewards.
    """

    higher_is_better = True
    # a mean of differences has no bound
    plot_lower_bound = None

    def __init__(self, task: Preference) -> None:
        super().__init__(torch.float64)
        self.task = task

    def update(self, outputs: Tensor, target: dict[str, Tensor]) -> None:
        """Add pairs.

        Args:
            outputs: logits ``[n, 2, T, vocabulary]``.
            target: ``tokens`` and ``reference``.
        """
        margins = self.task.margins(outputs, target)
        self.total += margins.double().sum()
        self.count += len(margins)


class RewardAccuracy(Ratio):
    """Share of pairs whose chosen answer has the higher reward; NaN without pairs.

    Args:
        task: the task, which computes rewards.
    """

    higher_is_better = True
    plot_upper_bound = 1.0

    def __init__(self, task: Preference) -> None:
        super().__init__(torch.int64)
        self.task = task

    def update(self, outputs: Tensor, target: dict[str, Tensor]) -> None:
        """Add pairs; see `RewardMargin.update`."""
        margins = self.task.margins(outputs, target)
        self.total += (margins > 0).sum()
        self.count += len(margins)
