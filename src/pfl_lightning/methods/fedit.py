"""FedIT: clients train low-rank adapters, and the server averages both factors."""

from collections.abc import Mapping
from typing import Any

from pfl_lightning.messages import Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights
from pfl_lightning.server.adapters import Pair, pairs, product_error


class FedIT(FedAvg):
    r"""Trains and averages the factors A and B of all adapters, and whatever else the net trains.

    It is `FedAvg` of a net with low-rank adapters, bit for bit. The product of the means isn't the mean of the products
    (:math:`\bar B \bar A \ne \sum_k p_k B_k A_k`), by the factors' covariance over clients; the server side,
    `AdapterAverage`, measures the difference. The other methods of adapters differ in what they do about it. Takes the
    arguments of `FedAvg`. Source: Zhang et al., 2023 (https://arxiv.org/abs/2305.05644).
    """

    client_level = True
    example_level = True

    requires = frozenset({"adapters"})

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
