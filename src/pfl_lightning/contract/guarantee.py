"""Refuse clients and settings that a server's guarantee of differential privacy doesn't cover."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule
from pfl_lightning.server import Aggregator
from pfl_lightning.server.aggregator_list import parts_of

BOUNDED = frozenset({"weights", "num_samples"})
"""Entries of updates that noise at client level covers: ``weights``, and ``num_samples``, which is withheld."""


def check_guarantee(client: ClientModule, aggregator: Aggregator, min_clients: int) -> None:
    """Refuse settings against the aggregator's privacy guarantee; do nothing without a guarantee.

    Args:
        client: the client module.
        aggregator: the aggregator.
        min_clients: ``trainer.min_clients``.

    Raises:
        MisconfigurationException: if a setting would break it.
    """
    parts = list(parts_of(aggregator))
    # a subclass of such an aggregator has no guarantee until it claims one; its user still expects privacy, and gets an
    # error
    private = [part for part in parts if any(vars(kind).get("guarantee") for kind in type(part).__mro__)]
    if not private:
        return
    name = type(private[0]).__name__
    if len(parts) > 1:
        others = " and ".join(type(part).__name__ for part in parts if part not in private)
        raise MisconfigurationException(
            f"aggregator={aggregator.name}: what {others or name} receives beside {name} is not protected; take "
            f"aggregator={name} alone."
        )
    if not private[0].guarantee:
        raise MisconfigurationException(
            f"aggregator={name} changes {claimed(private[0])} and has no guarantee of its own; set guarantee = "
            f"'client' in its class if its noise is still enough, or take {claimed(private[0])}."
        )
    # one absent client would discard the updates of all others, a change of the result that no noise covers
    if min_clients > 1:
        raise MisconfigurationException(
            f"trainer.min_clients={min_clients} lets one absent client discard all other updates of a round, which "
            f"{name}'s guarantee doesn't cover; take 1."
        )
    if reason := unfit(client):
        raise MisconfigurationException(
            f"model={type(client).__name__} {reason}; leave aggregator={name} out, or take a model that it fits, such "
            "as FedAvg, FedPer or Ditto."
        )


def unfit(client: ClientModule) -> str:
    """Return a reason against a client module's guarantee at client level; empty without one.

    Args:
        client: the client module.
    """
    kind = type(client)
    if not client.sends:
        return "sends nothing, so there is nothing to protect"
    sent, needed = sorted(client.sends - BOUNDED), sorted(client.needs - BOUNDED)
    if further := sent or needed:
        way = "sends" if sent else "needs"
        return f"{way} {' and '.join(further)} beside weights, and noise at client level is added to weights alone"
    # never inherited: a subclass may hide more in its weights, by their names or values
    if not vars(kind).get("client_level", False):
        return (
            "doesn't set client_level = True in its own class, which claims that others learn of a client by its "
            "weights alone"
        )
    return ""


def claimed(aggregator: Aggregator) -> str:
    """Return the name of the class that claims a guarantee: the aggregator's own, or the nearest that it is made of."""
    return next(kind.__name__ for kind in type(aggregator).__mro__ if vars(kind).get("guarantee"))
