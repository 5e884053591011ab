"""FedBN: BatchNorm layers stay with their clients."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.client import ClientSettings
from pfl_lightning.internals.of_torch import BatchNorm
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.settings import Unpack


class FedBN(FedAvg):
    """Averages all layers but BatchNorm; the parameters and running statistics of BatchNorm stay with each client.

    Layers are recognised by type. A net without BatchNorm gives a warning, as the method then is `FedAvg`. A client has
    the common initial layers until it takes part; the paper's choice for such a client could not be verified. Clients
    count by their samples; in the official code, on five domains of equal size, they count equally
    (``aggregator.weighting: uniform``). Source: Li et al., 2021 (https://arxiv.org/abs/2102.07623). Takes the arguments
    of `FedAvg`.
    """

    client_level = True
    example_level = True

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        # by type and not by name: in a Sequential, a layer's name is a number
        layers = [(name, layer) for name, layer in self.net.named_modules() if isinstance(layer, BatchNorm)]
        self.normalising = frozenset(f"net.{name}.{own}" for name, layer in layers for own in layer.state_dict())
        if not layers:
            rank_zero_warn(f"model.net={type(self.net).__name__} has no BatchNorm layer, so that FedBN is FedAvg.")

    def is_shared(self, name: str) -> bool:
        """Share everything but BatchNorm layers."""
        return super().is_shared(name) and name not in self.normalising
