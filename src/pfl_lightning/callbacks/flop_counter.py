"""Counts what clients' training computes."""

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
    """Records the floating-point operations of each round's training as ``flops``.

    The first client of each architecture to train is trained once more for it, by itself, so that engines don't matter;
    what it takes for a sample is then what every client takes for one, in all rounds. Counted are matrix products,
    convolutions and attention, a multiply-add as two, forwards and backwards, with all that a method adds to a step.
    Optimizers, evaluation and the server are not. Methods whose work changes from round to round are counted as in the
    first one; noise of ``trainer.example_privacy`` as none.
    """

    def __init__(self) -> None:
        self.per_sample: dict[int, float] = {}
        """Of each architecture, in a round."""

    def state_dict(self) -> dict[str, Any]:
        """What was counted, for resuming."""
        return {"per_sample": self.per_sample}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with what was counted."""
        self.per_sample = dict(state_dict["per_sample"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses data that aren't here.

        Raises:
            MisconfigurationException: if they are at sites.
        """
        if cast(Federation, pl_module).data.at_sites:
            raise MisconfigurationException(
                "trainer.callbacks: FlopCounter trains a client in this process, and the clients of these data are at "
                "sites; leave it out."
            )

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Counts what hasn't been counted yet, and records the round's sum."""
        sizes = federation.sizes(cohort, "train")
        for client in cohort:
            architecture = federation.architecture_of(client)
            if architecture not in self.per_sample and sizes[client]:
                self.per_sample[architecture] = self._counted(trainer, federation, client) / sizes[client]
        known = self.per_sample
        flops = [sizes[client] * known.get(federation.architecture_of(client), 0.0) for client in cohort]
        federation.metrics["flops"] = sum(flops)

    @staticmethod
    def _counted(trainer: Trainer, federation: Federation, client: int) -> float:
        """What a client's training of this round takes."""
        modules = cast(Sequence[ClientModule], federation.architectures)
        work = federation.options.work(federation.data)
        engine = Sequential(modules[federation.architecture_of(client)], work, trainer.precision_plugin)
        with undisturbed(), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            list(engine.run([federation.job(client)]))
        return float(counter.get_total_flops())
