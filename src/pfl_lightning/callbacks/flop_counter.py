"""Count the floating-point operations of clients' training."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.client import ClientModule
from pfl_lightning.engines import Sequential
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.federation.federation import Federation


class FlopCounter(FederatedCallback):
    """Record the floating-point operations of each round's training as ``flops``.

    The first client of each architecture is trained once more, alone, to count its operations. Its operations per
    sample then hold for every client of the architecture and for every round, so the count is the same under every
    engine.

    Matrix products, convolutions and attention count, forwards and backwards, with one multiply-add as two operations
    and with everything that a method adds to a step. Optimizer steps, evaluation, the server, and the noise of
    ``trainer.example_privacy`` don't count. If a method's work changes from round to round, the first round's is
    recorded.
    """

    def __init__(self) -> None:
        self.per_sample: dict[int, float] = {}
        """Of each architecture, in a round."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return {"per_sample": self.per_sample}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts of a resumed run."""
        self.per_sample = dict(state_dict["per_sample"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse clients at sites: counting needs a client's training in this process.

        Raises:
            MisconfigurationException: if the data are at sites.
        """
        if cast(Federation, pl_module).data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: FlopCounter trains a client in this process, and the clients of these data are at "
                "sites; leave it out."
            )

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Count for architectures seen first in this round, and record the cohort's sum."""
        own = federation.engines[0].work.own_epochs
        # of other epochs a client makes as much more or less
        sizes = {client: size * own.get(client, 1) for client, size in federation.sizes(cohort, "train").items()}
        for client in cohort:
            architecture = federation.architecture_of(client)
            # a client without samples trains nothing; the next one of its architecture is counted
            if architecture not in self.per_sample and sizes[client]:
                self.per_sample[architecture] = self._counted(trainer, federation, client) / sizes[client]
        known = self.per_sample
        flops = [sizes[client] * known.get(federation.architecture_of(client), 0.0) for client in cohort]
        federation.metrics["flops"] = sum(flops)

    @staticmethod
    def _counted(trainer: Trainer, federation: Federation, client: int) -> float:
        """Return the operations of a client's training in this round."""
        modules = cast(Sequence[ClientModule], federation.architectures)
        work = federation.options.work(federation.data)
        # one client alone, on the plain engine: the count must be the same under every engine
        engine = Sequential(modules[federation.architecture_of(client)], work, trainer.precision_plugin)
        # the extra training must not move the run's random state
        with undisturbed(), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            list(engine.run([federation.job(client)]))
        return float(counter.get_total_flops())
