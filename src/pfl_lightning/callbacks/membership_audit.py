"""Attacks on membership: tell by losses and confidences which samples a model was trained on."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.feature_pictures import as_used
from pfl_lightning.data import Split
from pfl_lightning.engines import Engine
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.runs.report import write_rows
from pfl_lightning.tasks import Classification

Losses = NDArray[np.float64]
"""Of some samples."""
PER_SAMPLE = 64
"""Shadows from which on LiRA takes a variance for each sample, as its authors do."""
LEAST_VARIANCE = 1e-12


def told_apart(members: Losses, others: Losses) -> dict[str, float]:
    r"""Return how well a threshold tells members, with smaller losses, from further samples.

    >>> told_apart(np.array([0.0, 1.0, 2.0, 4.0]), np.array([3.0, 5.0]))
    {'auc': 0.875, 'advantage': 0.75, 'tpr_at_1': 0.75, 'tpr_at_01': 0.75}

    Args:
        members: losses of samples that were trained on, at least one.
        others: losses of samples that weren't, at least one.

    Returns:
        ``auc``, the probability that a member's loss is below another's, equal ones counting half; ``advantage``, the
        largest difference of true and false positive rates over all thresholds; ``tpr_at_1`` and ``tpr_at_01``, the
        largest true positive rates with at most 1 % and 0.1 % of false positives.
    """
    # each value as a threshold, so that equal losses count half and no bin hides a small rate
    thresholds = np.unique(np.concatenate([members, others]))
    true = np.searchsorted(np.sort(members), thresholds, side="right") / len(members)
    false = np.searchsorted(np.sort(others), thresholds, side="right") / len(others)
    true, false = np.concatenate([[0.0], true]), np.concatenate([[0.0], false])
    return {
        "auc": float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2)),
        "advantage": float(np.max(true - false)),
        "tpr_at_1": float(np.max(true[false <= 0.01])),
        "tpr_at_01": float(np.max(true[false <= 0.001])),
    }


def likelihood_ratios(confidences: NDArray[np.float64], members: NDArray[np.bool_], target: int) -> Losses:
    r"""Return logarithms of likelihood ratios (LiRA) of a run's samples by the other runs, the shadows.

    .. math::

        \Lambda = \log \mathcal{N}(\phi; \mu_{in}, \sigma_{in}^2) - \log \mathcal{N}(\phi; \mu_{out}, \sigma_{out}^2)

    where :math:`\phi` is a sample's confidence in the audited run, and :math:`\mu_{in}` and :math:`\mu_{out}` are means
    over the shadows that trained on the sample and over those that didn't. Variances are of each sample with 64 shadows
    or more, and else of all samples together. Source: Carlini et al., 2022 (https://arxiv.org/abs/2112.03570).

    Args:
        confidences: :math:`\phi` ``[runs, samples]``; NaN where a run didn't look at a sample.
        members: whether a run trained on a sample ``[runs, samples]``.
        target: the audited run, from 0.

    Returns:
        Numbers ``[samples]``, larger for members; NaN where no shadow trained on a sample, or all did.
    """
    audited, shadows = confidences[target], np.delete(confidences, target, axis=0)
    inside = np.delete(members, target, axis=0)
    likelihoods = []
    # under both hypotheses in turn: the sample was trained on, or it wasn't
    for chosen in (inside, ~inside):
        values = np.where(chosen, shadows, np.nan)
        known = ~np.isnan(values)
        counts = known.sum(0)
        means = np.divide(np.nansum(values, axis=0), counts, out=np.full(len(audited), np.nan), where=counts > 0)
        squares = np.nansum((values - means) ** 2, axis=0)
        if len(shadows) >= PER_SAMPLE:
            variances = np.divide(squares, counts - 1, out=np.full(len(audited), np.nan), where=counts > 1)
        else:
            # of few shadows a variance of each sample would be mostly chance
            variances = squares.sum() / max(int(np.maximum(counts - 1, 0).sum()), 1)
        # equal confidences of all shadows would divide by 0
        variances = np.maximum(variances, LEAST_VARIANCE)
        likelihoods.append(-((audited - means) ** 2) / (2 * variances) - np.log(variances) / 2)
    ratios: Losses = likelihoods[0] - likelihoods[1]
    return ratios


def scaled_confidences(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Return logit-scaled confidences :math:`\phi = \log \frac{p_y}{1 - p_y}` of classifications ``[n]``, in float64.

    Args:
        outputs: logits ``[n, classes]``.
        targets: class numbers y ``[n]``.
    """
    logits, places = outputs.double(), targets[:, None]
    # not by 1 - p, which is 0 in floating point for samples that a net knows by heart
    rest = logits.scatter(1, places, -math.inf).logsumexp(1)
    return logits.gather(1, places)[:, 0] - rest


class MembershipAudit(FederatedCallback):
    """Attacks membership by a threshold on losses: an audit, and so a lower bound of how much a model tells.

    Of each client, the losses of its own training samples are compared with those of its own test samples, all clients
    pooled, under two models. What it measures goes into the record of the round, see `told_apart`:

    * ``membership/model/auc``, ``…/advantage``, ``…/tpr_at_1`` and ``…/tpr_at_01``: of the model that a client is
      evaluated by, so what somebody learns who holds it;
    * ``membership/upload/auc`` and so on: of the model that it sends, before noise of ``DPAverage`` and after attacks
      that stand before this callback, so what the server learns. It is of the clients of the round, and only where they
      send their whole net.

    An AUC of 0.5 and an advantage of 0 tell nothing; few samples have a larger advantage by chance. That this simple
    attack fails doesn't mean that another would. Works for every task, by its loss of single samples. Training samples
    are what clients train on, poisoned ones too. Source: Yeom et al., 2018 (https://arxiv.org/abs/1709.01604).

    With ``scores`` each audited sample's logit-scaled confidence is written into a file of the run's folder, for an
    attack by likelihood ratios over several runs (`likelihood_ratios`, ``benchmarks/lira.py``).

    Args:
        every: rounds between audits, at least 1; None audits the round of ``trainer.max_rounds`` alone.
        scores: name of a CSV file for confidences of the last audited round, such as ``confidences.csv``: a row for
            each sample, by its position in the pool; classification alone has them. None writes none.

    Raises:
        MisconfigurationException: if a value is out of its range; at the start of ``fit``, if clients are at sites,
            if none has both training and test samples, or if it is None and there is no last round.
    """

    def __init__(self, every: int | None = None, scores: str | None = None) -> None:
        if every is not None and every < 1:
            raise MisconfigurationException(f"MembershipAudit: every={every} must be 1 or more, or left out.")
        if scores is not None and (Path(scores).name != scores or not scores.endswith(".csv")):
            raise MisconfigurationException(
                f"MembershipAudit: scores={scores!r} must be the name of a CSV file, such as confidences.csv."
            )
        self.every, self.scores = every, scores
        self._confidences: dict[int, dict[str, Any]] = {}
        self._of_round = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse settings and data without a way to an audit."""
        data = cast(Federation, pl_module).data
        if data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: MembershipAudit looks at samples in this process, and the clients of these data "
                "are at sites; leave it out."
            )
        if data.task.samples_meet:
            raise MisconfigurationException(
                f"MembershipAudit compares the losses of single samples, and the loss of task {data.task} compares "
                "samples of a batch; leave it out."
            )
        if self.every is None and trainer.max_epochs in (None, -1):
            raise MisconfigurationException(
                "MembershipAudit: every=None audits the last round, and trainer.max_rounds isn't given; set every."
            )
        if self.scores is not None and not isinstance(data.task, Classification):
            raise MisconfigurationException(
                f"MembershipAudit: scores={self.scores!r} are of classifications, and the task is {data.task}; leave "
                "them out."
            )
        if self.scores is not None and run_folder(trainer) is None:
            raise MisconfigurationException(
                f"MembershipAudit: scores={self.scores!r} go into the run's folder, and trainer.logger=false has none."
            )
        if not any(data.size(client, "test") and data.size(client, "train") for client in range(data.num_clients)):
            raise MisconfigurationException(
                "MembershipAudit compares training with test samples, and no client has both; set data.test_fraction."
            )

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Audit clients' updates."""
        if not self.due(trainer, trainer.current_epoch + 1):
            return
        sent = {client: update["weights"] for client, update in updates.items() if "weights" in update}
        # the server can compute losses only from whole nets, and so a part of one is not audited
        whole = {f"net.{name}" for name, _ in federation.client.net.named_parameters()}
        if sent and all(whole <= weights.keys() for weights in sent.values()):
            self.audit(federation, "upload", sent)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audit the models for clients' evaluation."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.due(trainer, trainer.current_epoch + 1):
            federation = cast(Federation, pl_module)
            self.audit(federation, "model", {client: {} for client in range(federation.data.num_clients)})

    def due(self, trainer: Trainer, round: int) -> bool:
        """Return True for a round with an audit.

        Args:
            trainer: the trainer.
            round: its number, from 1.
        """
        return round == trainer.max_epochs if self.every is None else round % self.every == 0

    def audit(self, federation: Federation, name: str, models: Mapping[int, StateDict]) -> None:
        """Write an audit into the round's record, and confidences into the file ``scores``.

        Args:
            federation: the federation.
            name: of the models.
            models: by client id, entries that stand in place of those that it is evaluated by.
        """
        by_split: dict[Split, list[Losses]] = {"train": [], "test": []}
        # two audits of a round, of uploads and of models, share their rows
        if self._of_round != federation.metrics["round"]:
            self._confidences, self._of_round = {}, federation.metrics["round"]
        with torch.inference_mode(False), torch.no_grad(), isolate_rng():
            # a client needs samples of both kinds, or its own difficulty would count as membership
            for client, weights in models.items():
                if not all(federation.data.size(client, split) for split in by_split):
                    continue
                engine = as_used(federation, client)
                engine.module.assign(weights)
                for split, losses in by_split.items():
                    of_client, confidences = looked_at(engine, federation, client, split)
                    losses.append(of_client)
                    rows = federation.data.division.clients[client][split].tolist()
                    # by position in the pool, which is the same in runs with other divisions
                    if self.scores is not None:
                        for row, value in zip(rows, confidences.tolist(), strict=True):
                            kept = self._confidences.setdefault(
                                row, {"client": client, "member": int(split == "train")}
                            )
                            kept[name] = value
        if by_split["train"]:
            measured = told_apart(*(np.concatenate(losses) for losses in by_split.values()))
            federation.metrics |= {f"membership/{name}/{key}": value for key, value in measured.items()}
        if self.scores is not None and (folder := run_folder(federation.trainer)):
            write_rows(
                folder / self.scores, [{"sample": row, **kept} for row, kept in sorted(self._confidences.items())]
            )


def looked_at(engine: Engine, federation: Federation, client: int, split: Split) -> tuple[Losses, Losses]:
    """Return the loss and the scaled confidence of each sample of a client, under the model in an engine's module.

    Args:
        engine: the engine.
        federation: the client's.
        client: the client's id.
        split: the split to look at.

    Returns:
        Losses ``[n]`` and confidences ``[n]``; of tasks other than classification no confidences.
    """
    module = engine.module
    module.eval()
    part = federation.data.part(client, split).to(engine.device, cast(torch.dtype, module.dtype))
    losses: list[Tensor] = []
    confidences: list[Tensor] = []
    for x, y in part.chunks():
        with engine.forward_context():
            outputs: Any = module(x)
        # sample by sample, as a task's loss of a batch is one number
        rows = zip(torch.split(outputs, 1), torch.split(cast(Tensor, y), 1), strict=True)
        losses += [module.task.loss(output.float(), target, "sum") for output, target in rows]
        if isinstance(module.task, Classification):
            confidences.append(scaled_confidences(outputs, cast(Tensor, y)).cpu())
    confidence = torch.cat(confidences).numpy() if confidences else np.empty(0)
    return torch.stack(losses).double().cpu().numpy(), confidence
