"""RoLoRA: clients train one factor of adapters in even rounds, and the other one in odd rounds."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Phase
from pfl_lightning.methods.fedit import AdapterSettings, FedIT
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.server.adapters import is_first, is_second
from pfl_lightning.settings import Unpack


class RoLoRA(FedIT):
    r"""Trains and sends B with A frozen in rounds 0, 2, 4, …, and A with B frozen in the rounds between.

    The frozen factor is the same for all clients, so that the mean of the other one multiplies to the mean product
    exactly: :math:`\bar B A = \sum_k p_k B_k A`. Both factors learn, and half of the adapters travels up; down travel
    both, since a client may have missed the round before. B comes first, as at B = 0 the gradient of A is 0. All else
    that the net trains is trained in each round, and newcomers train both factors. Takes the arguments of `FedIT` but
    for ``optimizer_lifetime: run``. Source: Chen et al., 2024 (https://arxiv.org/abs/2409.02346).

    Raises:
        MisconfigurationException: if optimizers are to live on.
    """

    def __init__(self, *args: Any, **kwargs: Unpack[AdapterSettings]) -> None:
        super().__init__(*args, **kwargs)
        # engines keep the optimizers of a round's own phases, and the next round trains the other factor
        if self.optimizer_lifetime == "run":
            raise MisconfigurationException(
                "model.optimizer_lifetime=run: RoLoRA trains another factor in each round, so that no optimizer could "
                "go on in the next; take round."
            )

    def stands(self, name: str) -> bool:
        """Return whether an entry is of the factor that stands still in this round.

        Args:
            name: the entry's name.
        """
        return is_second(name) if self.round % 2 else is_first(name)

    def local_phases(self) -> list[Phase]:
        """Train everything but the round's frozen factor."""
        return [Phase("A" if self.round % 2 else "B", trains=lambda name: not self.stands(name))]

    def joining_phases(self) -> list[Phase]:
        """Train both factors."""
        return [Phase("both")]

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the shared entries without the round's frozen factor, which the server has."""
        return {name: tensor for name, tensor in super().shared_state().items() if not self.stands(name)}

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of the trained factor, weighted by numbers of training samples."""
        return WeightedAverage()
