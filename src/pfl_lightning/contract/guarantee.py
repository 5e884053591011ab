"""Whether a guarantee of privacy survives the client module and the settings that it would be given with."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.contract.aggregator_memory import parts_of
from pfl_lightning.privacy import DPAverage
from pfl_lightning.selection import Selection

COUNTS = ", or add noise to the counts by example_privacy.counts_epsilon"
BOUNDED = frozenset({"weights", "num_samples"})
"""Entries of updates that `DPAverage` bounds, or doesn't let clients send."""


def check_guarantee(client: ClientModule, aggregator: Aggregator, min_clients: int) -> None:
    """Refuses what would break an aggregator's guarantee; nothing where it gives none.

    Args:
        client: the client module.
        aggregator: the server side.
        min_clients: ``trainer.min_clients``.

    Raises:
        MisconfigurationException: if something would.
    """
    parts = list(parts_of(aggregator))
    private = [part for part in parts if part.guarantee or isinstance(part, DPAverage)]
    if not private:
        return
    name = type(private[0]).__name__
    if len(parts) > 1:
        others = " and ".join(type(part).__name__ for part in parts if part not in private)
        raise MisconfigurationException(
            f"aggregator={aggregator.name}: what {others or name} takes beside {name} isn't protected by it; take "
            f"aggregator={name} alone."
        )
    if not private[0].guarantee:
        raise MisconfigurationException(
            f"aggregator={name} changes DPAverage and doesn't say of itself, by guarantee = 'client' in its class, "
            "that its noise is still enough; take DPAverage."
        )
    if min_clients > 1:
        raise MisconfigurationException(
            f"trainer.min_clients={min_clients} lets one client decide whether all others of a round count, of which "
            f"{name} would have to know; take 1."
        )
    if reason := unfit(client):
        raise MisconfigurationException(
            f"model={type(client).__name__} {reason}; leave aggregator={name} out, or take a model that it fits, such "
            "as FedAvg, FedPer or Ditto."
        )


def check_example_level(
    client: ClientModule, aggregator: Aggregator, cohort: Selection, noisy_counts: bool = False
) -> None:
    """Refuses what would break ``trainer.example_privacy``: whatever tells of samples but by private steps.

    Args:
        client: the client module.
        aggregator: the server side.
        cohort: ``trainer.cohort``.
        noisy_counts: whether clients add noise to class counts.

    Raises:
        MisconfigurationException: if something would.
    """
    setting = "trainer.example_privacy"
    if noisy_counts and "class_counts" not in aggregator.needs:
        raise MisconfigurationException(
            f"{setting}.counts_epsilon is of class counts, for which aggregator={aggregator.name} doesn't ask; leave "
            "it out."
        )
    parts = list(parts_of(aggregator))
    if any(part.guarantee or isinstance(part, DPAverage) for part in parts):
        raise MisconfigurationException(
            f"{setting} and aggregator={aggregator.name} guarantee privacy of different units, samples and clients, "
            "and there is no one epsilon for both; take one of them."
        )
    name = type(client).__name__
    if not client.sends:
        raise MisconfigurationException(
            f"model={name} sends nothing, so there is nothing to protect; leave {setting} out."
        )
    needed = aggregator.needs - BOUNDED - ({"class_counts"} if noisy_counts else set())
    if further := sorted((client.sends - BOUNDED) | needed):
        raise MisconfigurationException(
            f"{setting} adds noise to training alone, and {' and '.join(further)}, which model={name} sends to "
            f"aggregator={aggregator.name}, tells of samples as they are; take a method that sends weights, such as "
            f"FedAvg, FedPer or Ditto{COUNTS if further == ['class_counts'] else ''}."
        )
    if cohort.asks:
        raise MisconfigurationException(
            f"trainer.cohort={type(cohort).__name__} chooses clients by what their training tells without noise, and "
            f"{setting} would not cover it; take Uniform, Poisson or Availability."
        )
    # never inherited: a subclass may see samples otherwise, or several in one loss
    own = "example_level" in vars(type(client)) and client.example_level
    others = [type(part).__name__ for part in parts if not part.example_level]
    for kind in ([] if own else [name]) + others:
        raise MisconfigurationException(
            f"{setting}: {kind} doesn't say of itself, by example_level = True in its class, that it learns of samples "
            "by private steps alone; take a method that does, such as FedAvg, FedPer or Ditto."
        )


def unfit(client: ClientModule) -> str:
    """Why a client module can't have a guarantee at client level; empty if it can."""
    kind = type(client)
    if not client.sends:
        return "sends nothing, so there is nothing to protect"
    sent, needed = sorted(client.sends - BOUNDED), sorted(client.needs - BOUNDED)
    if further := sent or needed:
        way = "sends" if sent else "needs"
        return f"{way} {' and '.join(further)} beside weights, and noise at client level is added to weights alone"
    # never inherited: a subclass may send more by its weights' names or values
    if not vars(kind).get("client_level", False):
        return (
            "doesn't say of itself, by client_level = True in its class, that others learn of a client by its weights "
            "alone"
        )
    return ""
