"""FedIT: clients train low-rank adapters, and the server averages both factors."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from pfl_lightning.client import ClientSettings, Phase
from pfl_lightning.messages import Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights
from pfl_lightning.server.adapters import Pair, is_second, pairs, product_error
from pfl_lightning.settings import Unpack


class AdapterSettings(ClientSettings, total=False):
    """Settings of `FedIT`, for the ``**kwargs`` of subclasses."""

    rate_ratio: float


class FedIT(FedAvg):
    r"""Trains and averages the factors A and B of all adapters, and whatever else the net trains.

    It is `FedAvg` of a net with low-rank adapters, bit for bit. The product of the means isn't the mean of the products
    (:math:`\bar B \bar A \ne \sum_k p_k B_k A_k`), by the factors' covariance over clients; the server side,
    `AdapterAverage`, measures the difference. The other methods of adapters differ in what they do about it.

    Source: Zhang et al., 2023 (https://arxiv.org/abs/2305.05644); the two rates: LoRA+, Hayou et al., 2024
    (https://arxiv.org/abs/2402.12354).

    Args:
        rate_ratio: learning rate of B over that of A and of all else, above 0. 1 is plain LoRA; LoRA+ has 16, beside a
            rate somewhat below that of plain LoRA.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``rate_ratio`` is out of its range.
    """

    client_level = True
    example_level = True

    requires = frozenset({"adapters"})

    def __init__(self, *args: Any, rate_ratio: float = 1.0, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not (isfinite(rate_ratio) and rate_ratio > 0):
            raise MisconfigurationException(
                f"model.rate_ratio={rate_ratio} must be above 0, such as 16, or 1 for one rate of both factors."
            )
        self.rate_ratio = rate_ratio

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the configured optimizer, with ``rate_ratio`` times its learning rate for each B."""
        optimizer = super().local_optimizer(phase, parameters)
        if self.rate_ratio != 1:
            # FedDPA has factors of the client's own under names with slashes
            seconds = {id(p) for name, p in self.named_parameters() if is_second(name.replace("/", "."))}
            optimizer.param_groups = [
                group | {"params": part, "lr": group["lr"] * factor}
                for group in optimizer.param_groups
                for factor, part in (
                    (1.0, [p for p in group["params"] if id(p) not in seconds]),
                    (self.rate_ratio, [p for p in group["params"] if id(p) in seconds]),
                )
                if part
            ]
        return optimizer

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of adapters, weighted by numbers of training samples."""
        return AdapterAverage()


class AdapterAverage(WeightedAverage):
    r"""Federated averaging which logs how far it is from the mean product.

    .. math:: \text{product\_error} = \frac{\lVert M - \bar B \bar A \rVert_F}{\lVert M \rVert_F}, \qquad
        M = \sum_k p_k B_k A_k

    over all layers with an adapter, each with its scale. It is of second order in the clients' drift, and 0 where all
    clients have one A or one B. It isn't measured where the server sees sums alone (``trainer.secure_sum``), nor with a
    rule in place of the mean. Takes the arguments of `WeightedAverage`. Source: as for `FedIT`.
    """

    example_level = True
    sums_only = True
    takes_mean = True
    takes_gamma = True

    def setup(self, server: Server) -> None:
        """Start from the common initial model, and find its adapters."""
        super().setup(server)
        self.scales = {pair: pair.scale(server.module) for pair in pairs(self.state["weights"])}
        # stand-ins are all alike, and would have no error
        self.measures = self.mean is None and not server.summed

    def aggregate(self, updates: Updates, round: int) -> dict[str, Any]:
        """Average the models; log the error of the products."""
        if not updates:
            return {}
        # computed once: a subclass may need all products for them
        weights = self.client_weights(updates)
        self.average(updates, weights)
        if not self.measures:
            return {} if self.mean is None else self.left_out()
        return {"product_error": product_error(updates, weights, self.sent(updates))}

    def client_weights(self, updates: Updates) -> Mapping[int, float]:
        """Return each client's weight in the mean, by id.

        Args:
            updates: updates by client id, at least one.
        """
        return client_weights(updates, self.weighting)

    def sent(self, updates: Updates) -> dict[Pair, float]:
        """Return the pairs that clients sent whole, with their scales.

        Args:
            updates: updates by client id, at least one.
        """
        # clients of RoLoRA send one of the two
        names = updates[min(updates)]["weights"].keys()
        return {pair: scale for pair, scale in self.scales.items() if {pair.a, pair.b} <= names}
