"""A look at the first rounds of a run: whether anything was learned, and why not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.client.module import ClientModule
from pfl_lightning.engines import ClientState
from pfl_lightning.messages import StateDict, Updates

ROUNDING = 1e-6
"""Change of a number, as a part of it, that may be the rounding of a mean of equal numbers."""
ROUNDS = 3
"""Rounds after which a run is looked at: late enough for updates of slow clients, early enough to lose little."""


class FirstRounds:
    """The rows of a run's first rounds, after which one warning tells if nothing was learned in them.

    Nothing was learned if no update came, if the training loss was 0 in each round, or if no trained parameter of the
    server, of an update or of what clients keep is another one than at the start. A run that is resumed within these
    rounds isn't looked at.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def is_over(self, row: Mapping[str, Any]) -> bool:
        """Take a round's row, and return whether it was the last of the first rounds.

        Args:
            row: the round's row of the record, once its updates are aggregated.
        """
        # of a resumed run the first rounds may be missing, and the others don't show that nothing was learned
        if row["round"] > ROUNDS:
            return False
        self.rows.append({name: row.get(name) for name in ("clients", "cohort", "lr", "local/steps", "train/loss")})
        return len(self.rows) == ROUNDS

    def warn(self, without: list[str], min_clients: int, changed: bool) -> None:
        """Warn if nothing was learned, with the reason as far as it is known.

        Args:
            without: settings that may keep all updates from coming, with their values.
            min_clients: the setting ``trainer.min_clients``.
            changed: whether a trained parameter changed.
        """
        # from the outside in: without updates nothing else can be known
        if not any(row["clients"] for row in self.rows):
            reason = self._without_update(without, min_clients)
        elif all(row["train/loss"] == 0 for row in self.rows):
            reason = "train/loss was 0 in each of them; look at the targets, and at the loss of the client module"
        elif not changed:
            reason = f"no trained parameter changed: {self._still()}"
        else:
            return
        rank_zero_warn(f"rounds 1 to {ROUNDS}: nothing was learned, as {reason}.")

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


def any_changed(
    modules: list[ClientModule],
    initial: list[StateDict],
    shared: StateDict,
    now: StateDict,
    updates: Updates,
    states: Mapping[int, ClientState],
    architecture_of: Callable[[int], int],
) -> bool:
    """Return whether a trained parameter is another one than at the start; also True where none can be compared.

    Args:
        modules: a client module of each architecture.
        initial: initial personal entries, of each architecture.
        shared: initial shared entries.
        now: the server's model, which may be empty.
        updates: the round's updates by client id.
        states: the states of clients by id, or of some.
        architecture_of: returns the number of a client's architecture.
    """
    # frozen entries never change, and would make every run look still
    trained = [{name for name, each in module.named_parameters() if each.requires_grad} for module in modules]

    def pairs() -> Iterator[tuple[Mapping[str, Tensor], StateDict, set[str]]]:
        # the server's first: where it has changed, no state is read from disk and no update brought from a device
        yield now, shared, trained[0]
        for client, update in updates.items():
            number, state = architecture_of(client), states.get(client)
            if state is not None and state.kept is None:
                yield state.personal, initial[number], trained[number]
            elif initial[number].keys() & trained[number]:
                # at its site, or with another rank
                hidden.append(client)
            yield update.get("weights", {}), shared, trained[number]

    hidden: list[int] = []
    compared = 0
    for found, before, names in pairs():
        for name in before.keys() & names & found.keys():
            if not same(found[name], before[name]):
                return True
            compared += 1
    return bool(hidden) or not compared


def same(found: Tensor, before: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding, in the type and on the device of the second."""
    # a method may size an entry by the number of clients, known at the first download
    return found.shape == before.shape and torch.allclose(found.to(before), before, rtol=ROUNDING, atol=0.0)
