"""Local: every client trains on local data alone."""

from pfl_lightning.client import ClientModule
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.server import Aggregator


class Local(ClientModule):
    """Communicates nothing: every client keeps a whole model, which starts from the common initial one.

    It is the baseline of personalised federated learning: a method with lower accuracy isn't worth its communication.
    Takes the arguments of `FedAvg`.
    """

    sends = frozenset()
    offers = frozenset()
    needs = frozenset()

    def is_shared(self, name: str) -> bool:
        """Share nothing."""
        return False

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load nothing: payloads are empty."""

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return an empty update."""
        return {}

    def configure_aggregator(self) -> Aggregator:
        """Return the base class of aggregators, which sends nothing."""
        return Aggregator()
