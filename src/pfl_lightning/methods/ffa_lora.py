"""FFA-LoRA: one random factor for all clients, which nobody trains; the other one is averaged."""

from pfl_lightning.methods.fedit import FedIT
from pfl_lightning.nets import Net
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.server.adapters import is_first


class FFALoRA(FedIT):
    r"""Freezes the factor A of each adapter at its initial values, and trains and averages B.

    With one A for all, the mean of B multiplies to the mean product exactly: :math:`\bar B A = \sum_k p_k B_k A`. Half
    of the adapters travels, and A is held once for all clients. The paper compares it with adapters of half the rank,
    which have as many trained numbers. With noise on B alone, as `DPAverage` adds it, the product's noise is linear.

    Takes the arguments of `FedIT`.
    Source: Sun et al., 2024 (https://arxiv.org/abs/2403.12313).
    """

    client_level = True
    example_level = True

    def new_net(self) -> Net:
        """Build a net, and freeze A."""
        net = super().new_net()
        # before the constructor looks for frozen parameters, which are common: frozen later, A would still travel
        for name, parameter in net.named_parameters():
            if is_first(name):
                parameter.requires_grad_(False)
        return net

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of B, weighted by numbers of training samples."""
        return WeightedAverage()
