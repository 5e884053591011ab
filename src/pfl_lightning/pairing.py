"""Whether a client and an aggregator fit together."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import FedAvg
from pfl_lightning.exchange import Updates


def check_pair(client: FedAvg, aggregator: Aggregator) -> None:
    """Refuses a client and an aggregator that don't exchange what the other needs."""
    names = type(client).__name__, type(aggregator).__name__
    for needed, sent, (one, other) in (
        (aggregator.needs, client.sends | client.offers, names[::-1]),
        (client.needs, aggregator.sends, names),
    ):
        if missing := sorted(needed - sent):
            raise MisconfigurationException(
                f"{one} needs {' and '.join(missing)}, which {other} does not send; choose another aggregator for "
                f"model {names[0]}, or leave it out to take {type(client.configure_aggregator()).__name__}."
            )


def check_updates(updates: Updates, aggregator: Aggregator, client: str) -> None:
    """Refuses updates without what the aggregator needs, which a client's `upload` promised and left out."""
    for update in updates.values():
        if missing := sorted(aggregator.needs - update.keys()):
            raise MisconfigurationException(
                f"{client}.upload gave no {' and '.join(missing)}, which {type(aggregator).__name__} needs; let it add "
                "to super().upload(data), or say in `sends` and `offers` what it gives."
            )
