"""The base class of attacks: the choice of bad clients, and metrics of the benign ones."""

import random
from typing import cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.federation.federation import Federation
from pfl_lightning.seeds import derive_seed


class Attack(FederatedCallback):
    """Make some clients bad, and report on the benign clients apart.

    The bad clients are drawn from the run's seed: the same ones for every attack, method, server and engine, and a
    larger fraction includes those of a smaller one. The record gets all metrics over clients once more over the benign
    ones, as ``benign/test/acc``, and the bad share of a round's clients as ``attack/fraction``. An attack is a
    simulation: it changes updates or samples in this process.

    Args:
        fraction: the bad share of all clients, from 0 to below 1, rounded to whole clients; 0 leaves a run its bits.

    Raises:
        MisconfigurationException: if ``fraction`` is out of its range.
    """

    is_attack = True
    """A resumed run has to have the attacks of the checkpoint's run, which are known by this attribute."""

    def __init__(self, fraction: float) -> None:
        if not 0 <= fraction < 1:
            raise MisconfigurationException(
                f"{type(self).__name__}: fraction={fraction} must be 0 (nobody) or more and below 1, such as 0.2."
            )
        self.fraction = fraction

    def bad(self, federation: Federation) -> set[int]:
        """Return the ids of the bad clients.

        Args:
            federation: the federation.
        """
        # the first of one shuffled order of all clients: a larger fraction only adds to a smaller one
        clients = range(federation.data.num_clients)
        order = random.Random(derive_seed(cast(int, federation.seed), "malicious")).sample(clients, len(clients))
        return set(order[: round(self.fraction * len(clients))])

    def check(self, federation: Federation) -> None:
        """Refuse federations out of the attack's reach; a subclass adds to the reasons.

        Args:
            federation: the federation.

        Raises:
            MisconfigurationException: if the federation is out of reach.
        """
        if federation.data.at_sites:
            raise MisconfigurationException(
                f"trainer.callbacks: {type(self).__name__} simulates bad clients in this process, and the clients of "
                "these data are at sites; leave it out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the federation, and set the benign clients apart."""
        # not earlier: a resumed run has the seed of its checkpoint only now
        federation = cast(Federation, pl_module)
        self.check(federation)
        self.set_apart(federation)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the benign clients apart, as in the fit before."""
        self.set_apart(cast(Federation, pl_module))

    def set_apart(self, federation: Federation) -> None:
        """Have metrics over the clients that are bad by no attack of the run.

        Args:
            federation: the federation.
        """
        # several attacks of one run each take their own bad clients away
        groups = federation.evaluations.groups
        benign = groups.get("benign", set(range(federation.data.num_clients)))
        groups["benign"] = benign - self.bad(federation)

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Record the bad share of the round's clients."""
        if cohort:
            federation.metrics["attack/fraction"] = len(self.bad(federation).intersection(cohort)) / len(cohort)
