"""Whether a client and an aggregator fit together."""

from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import FedAvg
from pfl_lightning.exchange import StateDict


def check_pair(client: FedAvg, aggregator: Aggregator) -> None:
    """Refuses a client and an aggregator that don't exchange what the other needs."""
    names = type(client).__name__, aggregator.name
    for needed, sent, (one, other) in (
        (aggregator.needs, client.sends | client.offers, names[::-1]),
        (client.needs, aggregator.sends, names),
    ):
        if missing := sorted(needed - sent):
            raise MisconfigurationException(
                f"{one} needs {' and '.join(missing)}, which {other} does not send; choose another aggregator for "
                f"model {names[0]}, or leave it out to take {client.configure_aggregator().name}."
            )


def check_common(kinds: Sequence[FedAvg], shared: Sequence[StateDict]) -> None:
    """Refuses networks whose shared entries are not the same in all of them.

    Args:
        kinds: the client modules, one a network.
        shared: what each of them shares.
    """
    first = {name: tensor.shape for name, tensor in shared[0].items()}
    for kind, entries in zip(kinds, shared, strict=True):
        own = {name: tensor.shape for name, tensor in entries.items()}
        if different := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            raise MisconfigurationException(
                f"model.net: {type(kinds[0].net).__name__} and {type(kind.net).__name__} differ in {different[0]}, "
                f"which {type(kind).__name__} shares; give one network, or take a method that shares only what all "
                "have alike, such as FedClassAvg."
            )
