"""Who attacks, and how the others fare."""

import random
from typing import cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.federation.federation import Federation
from pfl_lightning.seeds import derive_seed


class Attack(FederatedCallback):
    """Makes some clients bad, and reports on the others apart.

    Who is bad is drawn from the run's seed: the same clients for every attack, method, server and engine, and more of
    them include those of a smaller fraction. The record gets all metrics over clients once more over the benign ones,
    as ``benign/test/acc``, and the share of a round's clients that are bad as ``attack/fraction``. A simulation: it
    changes what clients send or train on in this process.

    Args:
        fraction: the share of all clients that is bad, from 0 to below 1, rounded to whole clients; with 0 a run is
            what it is without.

    Raises:
        MisconfigurationException: if ``fraction`` is out of its range.
    """

    is_attack = True
    """Resuming knows by it what has to be the same as in the checkpoint's run."""

    def __init__(self, fraction: float) -> None:
        if not 0 <= fraction < 1:
            raise MisconfigurationException(
                f"{type(self).__name__}: fraction={fraction} must be 0 (nobody) or more and below 1, such as 0.2."
            )
        self.fraction = fraction

    def bad(self, federation: Federation) -> set[int]:
        """Ids of the bad clients."""
        clients = range(federation.data.num_clients)
        order = random.Random(derive_seed(cast(int, federation.seed), "malicious")).sample(clients, len(clients))
        return set(order[: round(self.fraction * len(clients))])

    def check(self, federation: Federation) -> None:
        """Refuses what it can't attack; a subclass adds to it.

        Raises:
            MisconfigurationException: if it can't.
        """
        if federation.data.at_sites:
            raise MisconfigurationException(
                f"trainer.callbacks: {type(self).__name__} simulates bad clients in this process, and the clients of "
                "these data are at sites; leave it out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws who is bad, when a resumed run has its seed."""
        federation = cast(Federation, pl_module)
        self.check(federation)
        self.set_apart(federation)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws who was bad."""
        self.set_apart(cast(Federation, pl_module))

    def set_apart(self, federation: Federation) -> None:
        """Has the benign clients summarised by themselves: those that no attack of the run has made bad."""
        groups = federation.evaluations.groups
        benign = groups.get("benign", set(range(federation.data.num_clients)))
        groups["benign"] = benign - self.bad(federation)

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Records how many of the round are bad."""
        if cohort:
            federation.metrics["attack/fraction"] = len(self.bad(federation).intersection(cohort)) / len(cohort)
