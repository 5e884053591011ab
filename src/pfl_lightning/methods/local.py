"""Local: every client trains on its own data alone."""

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message


class Local(ClientModule):
    """No communication: every client keeps its whole model and starts from the common initial one.

    The yardstick of personalised federated learning: what doesn't beat it isn't worth sending. Takes the arguments of
    `FedAvg`.
    """

    sends = frozenset()
    offers = frozenset()
    needs = frozenset()

    def is_shared(self, name: str) -> bool:
        """Nothing travels."""
        return False

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """There is nothing to take."""

    def upload(self, data: ClientData) -> Message:
        """There is nothing to send."""
        return {}

    def configure_aggregator(self) -> Aggregator:
        """A server that does nothing."""
        return Aggregator()
