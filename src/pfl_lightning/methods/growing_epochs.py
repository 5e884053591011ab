"""Growing epochs: longer local training from round to round."""

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings, Phase
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


class GrowingEpochs(FedAvg):
    """Trains one epoch in the first two rounds, two in the third, three in the fourth, and so on, up to a maximum.

    It is the schedule of KT-pFL's official code, whose first round is the initial training of all clients.

    Args:
        max_epochs: the largest number of local epochs; None takes the trainer's ``local_epochs`` or ``local_steps`` in
            every round, as `FedAvg` does.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``max_epochs`` is less than 1.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, max_epochs: int | None = 20, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if max_epochs is not None and max_epochs < 1:
            raise MisconfigurationException(
                f"model.max_epochs={max_epochs} must be 1 or more, or null for the Trainer's local_epochs."
            )
        self.max_epochs = max_epochs

    def local_phases(self) -> list[Phase]:
        """Train everything, for the round's number of epochs."""
        # rounds count from 0, and the first two have one epoch
        return [Phase(epochs=None if self.max_epochs is None else min(max(self.round, 1), self.max_epochs))]
