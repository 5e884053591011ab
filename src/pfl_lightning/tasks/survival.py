"""Survival: the time until an event, of which some samples tell only that it hadn't come yet."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from pfl_lightning.tasks.base import Reduction, Task, check_shape, described, log_mean

ROWS = 1024
"""Samples compared with all others at once, which bounds the memory of comparisons."""


@dataclass(frozen=True)
class Survival(Task):
    r"""The time until an event, such as death, of samples that may be censored: ``c_index``, the concordance index.

    Targets are ``[n, 2]``, floating: a time t from 0 up, and 1 if the event happened then, or 0 if the sample is
    censored: the event hadn't happened until then. Without ``bins``, outputs are log risks s ``[n, 1]``, and the loss
    is Cox's negative partial log-likelihood within the batch of n samples,

    .. math:: \frac1n \sum_{i: \text{event}} \Bigl(\log \sum_{j: t_j \ge t_i} e^{s_j} - s_i\Bigr),

    with Breslow's risk sets, in which samples of one time are alike. A batch without an event has the loss 0.

    With ``bins`` time is discrete: outputs are logits ``[n, bins]`` of the hazards :math:`h_k`, the probability of the
    event within :math:`(b_{k-1}, b_k]` if it hasn't come before, where :math:`b_0 = 0`; the first interval has the time
    0 too. The loss is the negative log-likelihood: of an event in interval k, :math:`-\log h_k - \sum_{j<k} \log(1 -
    h_j)`; of all others, :math:`- \sum_{j: b_j \le t} \log(1 - h_j)`. An event after the last bin counts as survival of
    all bins.
    Source: Cox, 1972 (https://doi.org/10.1111/j.2517-6161.1972.tb00899.x); for discrete time Kvamme and Borgan, 2019
    (https://arxiv.org/abs/1910.06724).

    Args:
        bins: rising ends of intervals above 0, in the unit of the times; None is Cox's loss. They are to be known
            beforehand, as quantiles of all clients' times would tell of these.

    Raises:
        MisconfigurationException: if bins aren't rising finite numbers above 0, or are empty.
    """

    bins: tuple[float, ...] | None = None

    monitor = "c_index"
    mode = "max"

    def __post_init__(self) -> None:
        if self.bins is None:
            return
        ends = tuple(map(float, self.bins))
        if not ends or not all(low < high < math.inf for low, high in pairwise((0.0, *ends))):
            raise MisconfigurationException(
                f"task.bins={list(self.bins)} must be rising numbers above 0, such as [365, 730], or null for Cox's "
                "loss."
            )
        object.__setattr__(self, "bins", ends)

    @property
    def samples_meet(self) -> bool:
        """Whether the loss is Cox's, which compares samples."""
        return self.bins is None

    @property
    def outputs(self) -> int:
        """One log risk per sample, or a logit per bin."""
        return 1 if self.bins is None else len(self.bins)

    def loss(self, outputs: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Return the negative log-likelihood; see `Survival`."""
        target = target.to(outputs.dtype)
        errors = self._partial(outputs[:, 0], target) if self.bins is None else self._discrete(outputs, target)
        return errors.mean() if reduction == "mean" else errors.sum()

    def _partial(self, scores: Tensor, target: Tensor) -> Tensor:
        """Return each sample's share of Cox's negative partial log-likelihood ``[n]``.

        Args:
            scores: log risks ``[n]``.
            target: times and events ``[n, 2]``.
        """
        time, event = target.unbind(1)
        # In float32 the gradient of an event whose score is far above all others at risk is rounding, which adaptive
        # optimizers make large. Apple's devices have no float64.
        exact = scores if scores.device.type == "mps" else scores.double()
        # comparisons by rows and no sorting, so that vmap computes them for many clients; each sample is at risk at its
        # own time, so that no sum is empty
        at_risk = [exact.masked_fill(time < own[:, None], -math.inf).logsumexp(1) for own in torch.split(time, ROWS)]
        return (event * (torch.cat(at_risk) - exact)).to(scores.dtype)

    def _discrete(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each sample's negative log-likelihood in discrete time ``[n]``.

        Args:
            logits: logits of the hazards ``[n, bins]``.
            target: times and events ``[n, 2]``.
        """
        time, event = target[:, :1], target[:, 1:]
        ends = logits.new_tensor(self.bins)
        # the first bin begins below 0, so that an event at the time 0 lies in it
        begins = F.pad(ends[:-1], (1, 0), value=-1.0)
        # an event at the end of a bin lies in it, and a sample censored there has survived it
        came = event * (begins < time) * (time <= ends)
        survived = torch.where(event > 0, ends < time, ends <= time)
        return (came * F.softplus(-logits) + survived * F.softplus(logits)).sum(1)

    def risk(self, outputs: Tensor) -> Tensor:
        r"""Return a score that is larger for earlier events ``[n]``.

        It is the log risk; in discrete time :math:`-\sum_k (b_k - b_{k-1}) \prod_{j \le k} (1 - h_j)`, the negative sum
        of the widths of bins times the survival at their ends.

        Args:
            outputs: the net's outputs.
        """
        if self.bins is None:
            return outputs[:, 0]
        ends = outputs.new_tensor(self.bins, dtype=torch.float64)
        widths = ends.diff(prepend=ends.new_zeros(1))
        survival = -F.softplus(outputs.double()).cumsum(1)
        return -(survival.exp() * widths).sum(1)

    def combined(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Return the mean log risks, or the logits of hazards with the mean survival; see `Task.combined`."""
        if self.bins is None:
            return super().combined(outputs, shares)
        survival = log_mean((-F.softplus(outputs)).cumsum(2), shares)
        # the logarithms of 1 - h, which rounding may bring to 0
        stayed = survival.diff(dim=1, prepend=torch.zeros_like(survival[:, :1])).clamp(max=-1e-30)
        return (-stayed).expm1().log()

    def configure_metrics(self) -> MetricCollection:
        """Return ``c_index``, the concordance index."""
        return MetricCollection({"c_index": Concordance(self)})

    def check(self, target: Tensor, owner: str) -> None:
        """Refuse all targets but a time from 0 up and an event of 0 or 1 for each sample."""
        fits = isinstance(target, Tensor) and target.dim() == 2 and target.shape[1] == 2 and target.is_floating_point()
        if not fits:
            raise MisconfigurationException(
                f"{owner} has {described(target)}; task {self} takes two floating numbers a sample, its time and 1 for "
                "an event or 0 for none"
            )
        time, event = target.unbind(1)
        if bad := int((~(time >= 0) | ~time.isfinite()).sum()):
            raise MisconfigurationException(f"{owner} has {bad} times that are negative, NaN or infinite; mend them")
        if bad := int(((event != 0) & (event != 1)).sum()):
            raise MisconfigurationException(
                f"{owner} has {bad} events that are neither 0 nor 1, in the second column of its targets; name the "
                "time first, as in data.target=[T, E]"
            )

    def check_training(self, batch_size: int, targets: Iterable[Tensor] | None) -> None:
        """Refuse batches of one sample, and clients without any event, which have a loss of 0 under Cox's loss."""
        if self.bins is not None:
            return
        if batch_size < 2:
            raise MisconfigurationException(
                f"data.batch_size={batch_size} gives Cox's loss nothing to compare, and it is 0 for each batch; take "
                "some 64 samples with several events, or discrete time by task.bins, such as [365, 730]."
            )
        if targets is not None and not any(bool(target[:, 1].any()) for target in targets):
            raise MisconfigurationException(
                f"task={self}: no training sample of any client has an event, and Cox's loss is then 0; the second "
                "column of targets must be 1 for samples whose event was seen."
            )

    def check_outputs(self, outputs: Tensor, target: Tensor, net: str) -> None:
        """Refuse all outputs but a log risk per sample, or a logit per sample and bin."""
        check_shape(outputs, [len(target), self.outputs], net, self)


class Concordance(Metric):
    """Harrell's concordance index: the share of comparable pairs in which the earlier event has the larger risk.

    A pair is comparable if the sample of the smaller time has an event, or if at equal times exactly one sample has,
    which then counts as the earlier one. Equal risks count half. NaN without a comparable pair.
    Source: Harrell et al., 1982 (https://doi.org/10.1001/jama.1982.03320430047030).

    Args:
        task: the task, for `Survival.risk`.
    """

    full_state_update = False
    higher_is_better = True
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    risks: list[Tensor]
    targets: list[Tensor]

    def __init__(self, task: Survival) -> None:
        super().__init__()
        self.task = task
        for name in ("risks", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, target: Tensor) -> None:
        """Add samples.

        Args:
            outputs: the net's outputs ``[n, outputs]``.
            target: times and events ``[n, 2]``.
        """
        self.risks.append(self.task.risk(outputs))
        self.targets.append(target)

    def compute(self) -> Tensor:
        """Return the index."""
        risk, target = dim_zero_cat(self.risks), dim_zero_cat(self.targets)
        time, censored = target[:, 0], target[:, 1] == 0
        right, pairs = torch.zeros(2, dtype=torch.float64, device=risk.device)
        # samples with an event, against all others
        for rows in torch.split((~censored).nonzero()[:, 0], ROWS):
            own, score = time[rows, None], risk[rows, None]
            later = (own < time) | ((own == time) & censored)
            right += (later * ((score > risk).double() + (score == risk).double() / 2)).sum()
            pairs += later.sum()
        index: Tensor = right / pairs
        return index
