"""FedAvg: everything is shared, and the server averages it."""

from pfl_lightning.aggregators import Aggregator, WeightedAverage
from pfl_lightning.client import ClientModule


class FedAvg(ClientModule):
    """Federated averaging's client: receives the global model, trains all of it, sends all of it back.

    Methods that add something to it subclass it: a term in `loss`, phases of training, entries that stay personal.
    Source: McMahan et al., 2017 (https://arxiv.org/abs/1602.05629).
    """

    client_level = True
    example_level = True

    def configure_aggregator(self) -> Aggregator:
        """The mean of the clients' models, weighted by their training samples."""
        return WeightedAverage()
