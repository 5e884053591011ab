"""Refuse settings against a guarantee of differential privacy, or against sums of updates that hide each one."""

from collections.abc import Iterable

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator, WeightedAverage
from pfl_lightning.aggregators.aggregator_list import parts_of
from pfl_lightning.client import ClientModule
from pfl_lightning.client.hooks import overrides
from pfl_lightning.privacy import DPAverage
from pfl_lightning.selection import Selection

SUM = "trainer.secure_sum"
COUNTS = ", or add noise to the counts by example_privacy.counts_epsilon"
BOUNDED = frozenset({"weights", "num_samples"})
"""Entries of updates that are safe with `DPAverage`: its noise covers ``weights``, and it withholds ``num_samples``."""


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
    # a subclass of `DPAverage` has no guarantee until it claims one; its user still expects privacy, and gets an error
    private = [part for part in parts if part.guarantee or isinstance(part, DPAverage)]
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
            f"aggregator={name} changes DPAverage and has no guarantee of its own; set guarantee = 'client' in its "
            "class if its noise is still enough, or take DPAverage."
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


def check_example_level(
    client: ClientModule, aggregator: Aggregator, cohort: Selection, noisy_counts: bool = False
) -> None:
    """Refuse settings against ``trainer.example_privacy``: samples may count through noisy steps alone.

    Args:
        client: the client module.
        aggregator: the aggregator.
        cohort: ``trainer.cohort``.
        noisy_counts: whether clients add noise to class counts.

    Raises:
        MisconfigurationException: if a setting would break it.
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
    if client.task.samples_meet:
        raise MisconfigurationException(
            f"{setting} bounds the gradient of each sample's own loss, and the loss of task {client.task} compares "
            "samples of a batch; take a task without, such as Survival(bins=[...])."
        )
    if getattr(client.task, "class_weights", None) == "balanced":
        raise MisconfigurationException(
            f"task.class_weights=balanced counts a client's samples without noise, and {setting} would not cover it; "
            f"give {client.task.outputs} numbers known beforehand, or leave it out."
        )
    name = type(client).__name__
    if not client.sends:
        raise MisconfigurationException(
            f"model={name} sends nothing, so there is nothing to protect; leave {setting} out."
        )
    # an aggregator's needs too: the client's `offers` are sent on demand, and aren't in `sends`
    if further := without_noise(client.sends | aggregator.needs, client, noisy_counts):
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
    # never inherited: a subclass may use samples in another way, or several in one loss
    own = "example_level" in vars(type(client)) and client.example_level
    others = [type(part).__name__ for part in parts if not part.example_level]
    for kind in ([] if own else [name]) + others:
        raise MisconfigurationException(
            f"{setting}: {kind} doesn't set example_level = True in its own class, which claims that it learns of "
            "samples by private steps alone; take a method that does, such as FedAvg, FedPer or Ditto."
        )


def without_noise(entries: Iterable[str], client: ClientModule, noisy_counts: bool) -> list[str]:
    """Return entries of updates that would tell of samples without noise under ``trainer.example_privacy``, sorted.

    Args:
        entries: names of entries.
        client: the client module.
        noisy_counts: whether clients add noise to class counts.
    """
    # what follows from private steps costs no further privacy
    follows = vars(type(client)).get("follows", frozenset())
    return sorted(set(entries) - BOUNDED - follows - ({"class_counts"} if noisy_counts else set()))


def learns_without_noise(client: ClientModule) -> bool:
    """Return True if a client's own model learns of training samples without noise under ``trainer.example_privacy``.

    Such a model stays with its client, and metrics of it, on whatever samples, would tell of the training samples.

    Args:
        client: the client module.
    """
    return any(phase.stays for phase in client.local_phases()) or overrides(client, "evaluation_phases")


def check_local(client: ClientModule, aggregator: Aggregator, cohort: Selection) -> None:
    """Refuse settings against ``trainer.local_privacy``: samples may count through noised weights alone.

    Args:
        client: the client module.
        aggregator: the aggregator.
        cohort: ``trainer.cohort``.

    Raises:
        MisconfigurationException: if a setting would break it.
    """
    setting, name = "trainer.local_privacy", type(client).__name__
    parts = list(parts_of(aggregator))
    if any(part.guarantee or isinstance(part, DPAverage) for part in parts):
        raise MisconfigurationException(
            f"{setting} noises each update, and aggregator={aggregator.name} their sum, for another epsilon; take one "
            "of them."
        )
    if reason := unfit(client):
        raise MisconfigurationException(
            f"model={name} {reason}; leave {setting} out, or take a model that it fits, such as FedAvg, FedPer or "
            "Ditto."
        )
    # `offers` are sent on demand, and aren't in `sends`
    if further := sorted(aggregator.needs - BOUNDED):
        raise MisconfigurationException(
            f"{setting} noises weights alone, and aggregator={aggregator.name} asks for {' and '.join(further)}; take "
            "an aggregator of weights, such as WeightedAverage."
        )
    if "weights" not in aggregator.sends:
        raise MisconfigurationException(
            f"{setting} noises the change of received weights, and aggregator={aggregator.name} sends none; take one "
            "that does, such as WeightedAverage."
        )
    # never inherited: a class of its own may look at more than updates
    for part in parts:
        if not part.example_level:
            raise MisconfigurationException(
                f"{setting}: {type(part).__name__} doesn't set example_level = True in its own class, which claims "
                "that it learns of samples by weights alone; take an aggregator that does, such as WeightedAverage."
            )
        if part.meets_newcomers:
            raise MisconfigurationException(
                f"{setting}: {type(part).__name__} asks each new client for an update without noise; take another "
                "aggregator, such as WeightedAverage."
            )
    if cohort.asks or "sampling" not in vars(type(cohort)):
        raise MisconfigurationException(
            f"trainer.cohort={type(cohort).__name__} chooses clients by what they hold or tell, which {setting} "
            "doesn't cover; take Uniform, Poisson or Availability."
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


# Sums


def check_sums(client: ClientModule, aggregator: Aggregator) -> None:
    """Check a client module and an aggregator for ``trainer.secure_sum``.

    Args:
        client: the client module.
        aggregator: the server side.

    Raises:
        MisconfigurationException: if the aggregator looks at single updates, or the client sends none.
    """
    if not client.sends:
        raise MisconfigurationException(
            f"model={type(client).__name__} sends nothing that could be summed; leave {SUM} out."
        )
    parts = list(parts_of(aggregator))
    # one weight multiplies a whole update, before a sum that nobody can take apart
    if len({"num_samples" in part.needs for part in parts}) > 1:
        raise MisconfigurationException(
            f"aggregator={aggregator.name} counts clients by their samples for one entry and alike for another, and "
            f"{SUM} makes one sum; give all the same weighting."
        )
    for part in parts:
        name = type(part).__name__
        if isinstance(part, WeightedAverage) and part.mean is not None:
            raise MisconfigurationException(
                f"aggregator.mean={part.mean.name} compares clients' updates, and {SUM} hides them: a server can "
                "be robust against single clients or blind for them, not both; leave one of the two out."
            )
        if isinstance(part, DPAverage):
            check_noise_shares(part)
        elif not part.sums_only:
            raise MisconfigurationException(
                f"aggregator={name} doesn't say of itself, by sums_only = True in its own class, that it needs sums "
                f"over clients alone, which is all that {SUM} gives; take one that does, such as WeightedAverage."
            )


def check_noise_shares(aggregator: DPAverage) -> None:
    """Check the settings of an aggregator with noise from clients.

    Args:
        aggregator: the server side.

    Raises:
        MisconfigurationException: if a setting asks for more than a sum of bounded changes.
    """
    if type(aggregator) is not DPAverage:
        raise MisconfigurationException(
            f"aggregator={type(aggregator).__name__} has noise of its own, and with {SUM} clients draw "
            "each round's noise by itself; take DPAverage."
        )
    # a site doesn't know how many rounds and clients epsilon is shared out to, and shall not believe the server
    if aggregator.epsilon is not None:
        raise MisconfigurationException(
            f"aggregator.epsilon={aggregator.epsilon}: with {SUM} clients draw the noise, and know "
            "aggregator.noise_multiplier alone; give that in its place, as "
            "pfl_lightning.privacy.noise_for(epsilon, delta, rounds) tells it."
        )
    # these would need a second sum, of counts or of weights
    others = {"quantile": None, "clip_by": "model", "sample_cap": None}
    for name, value in others.items():
        if getattr(aggregator, name) != value:
            raise MisconfigurationException(
                f"aggregator.{name}={getattr(aggregator, name)} isn't for {SUM}, with which clients bound their "
                "whole changes by one clip and count alike; leave it out."
            )
