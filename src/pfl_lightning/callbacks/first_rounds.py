"""A look at the first rounds of a run: whether anything was learned, and why not."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.engines import Outcome
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import StateDict

ROUNDING = 1e-6
"""Change of a number, as a part of it, that may be the rounding of a mean of equal numbers."""
ROUNDS = 3
"""Rounds after which a run is looked at: late enough for updates of slow clients, early enough to lose little."""


class FirstRounds(FederatedCallback):
    """Warns once, after the first rounds of a run, if nothing was learned in them.

    Nothing was learned if no update came, if the training loss was 0 in each round, or if no trained parameter of the
    server, of an update or of what clients keep is another one than at the start. A run that is resumed within these
    rounds isn't looked at. The Trainer adds this callback.
    """

    reads_updates = False

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.start: StateDict = {}
        self.changes: set[bool] = set()
        """Whether parameters in updates of the last of the first rounds are others than at the start."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin without any round."""
        self.rows, self.changes = [], set()
        federation = cast(Federation, pl_module)
        model = federation.aggregator.global_model()
        # the server may have more than clients share as weights, such as FedFed's generator; the rest isn't held here,
        # as a model would stay in memory for the whole run
        self.start = {name: tensor for name, tensor in model.items() if name not in federation.shared}

    def on_client_fit_end(self, trainer: Trainer, federation: Federation, client: int, outcome: Outcome) -> None:
        """Compare a client's update of the last of the first rounds, unless another one has changed."""
        # at once, as updates that are kept would all be in memory
        if len(self.rows) + 1 == ROUNDS == federation.round + 1 and True not in self.changes:
            names = trained_names(federation)[federation.architecture_of(client)]
            self.changes |= comparisons(outcome.update.get("weights", {}), federation.shared, names)

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Take a round's row, and look at the first rounds behind the last of them."""
        row = federation.metrics
        # of a resumed run the first rounds may be missing, and the others don't show that nothing was learned
        if row["round"] > ROUNDS:
            return
        self.rows.append({name: row.get(name) for name in ("clients", "cohort", "lr", "local/steps", "train/loss")})
        if len(self.rows) == ROUNDS and (reason := self._reason(federation)):
            rank_zero_warn(f"rounds 1 to {ROUNDS}: nothing was learned, as {reason}.")

    def _reason(self, federation: Federation) -> str:
        """Return why nothing was learned, as far as it is known; empty if something was."""
        # from the outside in: without updates nothing else can be known
        if not any(row["clients"] for row in self.rows):
            settings = federation.options.stages.values()
            without = [reason for setting in settings for reason in setting.without_updates()]
            return self._without_update(without, federation.options.min_clients)
        if all(row["train/loss"] == 0 for row in self.rows):
            return "train/loss was 0 in each of them; look at the targets, and at the loss of the client module"
        if True in self.changes or self._others_changed(federation):
            return ""
        return f"no trained parameter changed: {self._still()}"

    def _others_changed(self, federation: Federation) -> bool:
        """Return whether the server or a client has another parameter; also True where nothing can be compared."""
        trained, changes = trained_names(federation), self.changes
        before = self.start | federation.shared
        changes = changes | comparisons(federation.aggregator.global_model(), before, trained[0])
        for client, state in federation.clients.items() if True not in changes else ():
            number = federation.architecture_of(client)
            # what is at its site, or with another rank, can't be compared
            hidden = state.kept is not None
            changes = changes | (
                {True} if hidden else comparisons(state.personal, federation.initial[number], trained[number])
            )
        return True in changes or not changes

    def _without_update(self, without: list[str], min_clients: int) -> str:
        """Return why no update came, as far as that is known."""
        if not any(row["cohort"] for row in self.rows):
            return "trainer.cohort chose no client"
        reasons = [*([f"trainer.min_clients={min_clients}"] if min_clients > 1 else []), *without]
        return "no client's update counted" + (f"; look at {' and '.join(reasons)}" if reasons else "")

    def _still(self) -> str:
        """Return why no parameter changed, as far as that is known."""
        if not any(row["lr"] for row in self.rows):
            return "the learning rate was 0; take a larger one by model.optimizer or model.lr_scheduler"
        if not any(row["local/steps"] for row in self.rows):
            return "clients took no step; look at trainer.local_epochs and data.last_batch"
        return (
            f"steps at a learning rate of {self.rows[-1]['lr']:.3g} moved none; either it is too small, or the loss "
            "doesn't depend on them"
        )


def trained_names(federation: Federation) -> list[set[str]]:
    """Return the names of the parameters that each architecture trains."""
    # frozen entries never change, and would make every run look still
    modules = federation.client_modules
    return [{name for name, each in module.named_parameters() if each.requires_grad} for module in modules]


def comparisons(entries: Mapping[str, Tensor], before: StateDict, names: set[str]) -> set[bool]:
    """Return whether parameters are others than before: False for one that is the same, True for one that isn't.

    Args:
        entries: some entries.
        before: entries at the start.
        names: the parameters' names.
    """
    changes: set[bool] = set()
    for name in before.keys() & names & entries.keys():
        changes.add(not same(entries[name], before[name]))
        if True in changes:
            break
    return changes


def same(found: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding, in the type and on the device of the second."""
    # a method may size an entry by the number of clients, known at the first download
    return found.shape == before.shape and torch.allclose(found.to(before), before, rtol=ROUNDING, atol=0.0)
