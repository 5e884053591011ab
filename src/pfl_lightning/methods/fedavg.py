"""FedAvg: clients share the whole model, and the server averages."""

from pfl_lightning.client import ClientModule
from pfl_lightning.server import Aggregator, WeightedAverage


class FedAvg(ClientModule):
    """Receives the global model, trains every parameter, and sends all of the model back.

    Methods that add to it subclass it: a term in `loss`, phases of training, personal entries.
    Source: McMahan et al., 2017 (https://arxiv.org/abs/1602.05629).
    """

    client_level = True
    example_level = True

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of the clients' models, weighted by their numbers of training samples."""
        return WeightedAverage()
