"""How well one can tell by a model's losses which samples it was trained on."""

from collections.abc import Mapping
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

Losses = NDArray[np.float64]
"""Of some samples."""


def told_apart(members: Losses, others: Losses) -> dict[str, float]:
    r"""How well a threshold tells members, whose losses should be smaller, from others.

    >>> told_apart(np.array([0.0, 1.0, 2.0, 4.0]), np.array([3.0, 5.0]))
    {'auc': 0.875, 'advantage': 0.75, 'tpr_at_1': 0.75}

    Args:
        members: losses of samples that were trained on, at least one.
        others: losses of samples that weren't, at least one.

    Returns:
        ``auc``, the probability that a member's loss is below another's, equal ones counting half; ``advantage``, the
        largest difference of true and false positive rates over all thresholds; ``tpr_at_1``, the largest true
        positive rate with at most 1 % of false positives.
    """
    thresholds = np.unique(np.concatenate([members, others]))
    true = np.searchsorted(np.sort(members), thresholds, side="right") / len(members)
    false = np.searchsorted(np.sort(others), thresholds, side="right") / len(others)
    true, false = np.concatenate([[0.0], true]), np.concatenate([[0.0], false])
    return {
        "auc": float(np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2)),
        "advantage": float(np.max(true - false)),
        "tpr_at_1": float(np.max(true[false <= 0.01])),
    }


class MembershipAudit(FederatedCallback):
    """Attacks membership by a threshold on losses, which is an audit: a lower bound of what a model tells.

    Of each client, the losses of its own training samples are compared with those of its own test samples, all clients
    pooled, under two models. What it measures goes into the record of the round, see `told_apart`:

    * ``membership/model/auc``, ``…/advantage`` and ``…/tpr_at_1``: of the model that a client is evaluated by, so what
      somebody learns who holds it;
    * ``membership/upload/auc`` and so on: of the model that it sends, before noise of ``DPAverage`` and after attacks
      that stand before this callback, so what the server learns. It is of the clients of the round, and only where they
      send their whole net.

    An AUC of 0.5 and an advantage of 0 tell nothing; few samples have a larger advantage by chance. That this simple
    attack fails doesn't mean that another would. Works for every task, by its loss of single samples. Training samples
    are what clients train on, poisoned ones too. Source: Yeom et al., 2018 (https://arxiv.org/abs/1709.01604).

    Args:
        every: rounds between audits, at least 1; None audits the round of ``trainer.max_rounds`` alone.

    Raises:
        MisconfigurationException: if ``every`` is out of its range; at the start of ``fit``, if clients are at sites,
            if none has both training and test samples, or if it is None and there is no last round.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise MisconfigurationException(f"MembershipAudit: every={every} must be 1 or more, or left out.")
        self.every = every

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses what can't be audited."""
        data = cast(Federation, pl_module).data
        if data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: MembershipAudit looks at samples in this process, and the clients of these data "
                "are at sites; leave it out."
            )
        if self.every is None and trainer.max_epochs in (None, -1):
            raise MisconfigurationException(
                "MembershipAudit: every=None audits the last round, and trainer.max_rounds isn't given; set every."
            )
        if not any(data.size(client, "test") and data.size(client, "train") for client in range(data.num_clients)):
            raise MisconfigurationException(
                "MembershipAudit compares training with test samples, and no client has both; set data.test_fraction."
            )

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Audits what clients send."""
        if not self.due(trainer, trainer.current_epoch + 1):
            return
        sent = {client: update["weights"] for client, update in updates.items() if "weights" in update}
        whole = {f"net.{name}" for name, _ in federation.client.net.named_parameters()}
        if sent and all(whole <= weights.keys() for weights in sent.values()):
            self.audit(federation, "upload", sent)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Audits the models that clients are evaluated by."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self.due(trainer, trainer.current_epoch + 1):
            federation = cast(Federation, pl_module)
            self.audit(federation, "model", {client: {} for client in range(federation.data.num_clients)})

    def due(self, trainer: Trainer, round: int) -> bool:
        """Whether a round is to be audited.

        Args:
            trainer: the trainer.
            round: its number, from 1.
        """
        return round == trainer.max_epochs if self.every is None else round % self.every == 0

    def audit(self, federation: Federation, name: str, models: Mapping[int, StateDict]) -> None:
        """Writes into the round's record.

        Args:
            federation: the federation.
            name: of the models.
            models: by client id, entries that stand in the place of those that it is evaluated by.
        """
        found: dict[Split, list[Losses]] = {"train": [], "test": []}
        with torch.inference_mode(False), torch.no_grad(), isolate_rng():
            for client, weights in models.items():
                if not all(federation.data.size(client, split) for split in found):
                    continue
                engine = as_used(federation, client)
                engine.module.assign(weights)
                for split, losses in found.items():
                    losses.append(losses_of(engine, federation, client, split))
        if found["train"]:
            measured = told_apart(*(np.concatenate(losses) for losses in found.values()))
            federation.metrics |= {f"membership/{name}/{key}": value for key, value in measured.items()}


def losses_of(engine: Engine, federation: Federation, client: int, split: Split) -> Losses:
    """The loss of each sample of a client under the model that an engine's module is.

    Args:
        engine: the engine.
        federation: whose client it is.
        client: its id.
        split: which of its samples.
    """
    module = engine.module
    module.eval()
    part = federation.data.part(client, split).to(engine.device, cast(torch.dtype, module.dtype))
    losses: list[Tensor] = []
    for x, y in part.chunks():
        with engine.forward_context():
            outputs: Any = module(x)
        rows = zip(torch.split(outputs, 1), torch.split(cast(Tensor, y), 1), strict=True)
        losses += [module.task.loss(output.float(), target, "sum") for output, target in rows]
    return torch.stack(losses).double().cpu().numpy()
