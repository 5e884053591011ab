"""Checks of a server with sums over clients alone, before the first round (``trainer.secure_sum``)."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator, WeightedAverage
from pfl_lightning.aggregators.aggregator_list import parts_of
from pfl_lightning.client import ClientModule
from pfl_lightning.privacy import DPAverage

SETTING = "trainer.secure_sum"


def check_sums(client: ClientModule, aggregator: Aggregator) -> None:
    """Check a client module and an aggregator for ``trainer.secure_sum``.

    Args:
        client: the client module.
        aggregator: the server side.

    Raises:
        MisconfigurationException: The aggregator looks at single updates, or the client sends none.
    """
    if not client.sends:
        raise MisconfigurationException(
            f"model={type(client).__name__} sends nothing that could be summed; leave {SETTING} out."
        )
    parts = list(parts_of(aggregator))
    # one weight multiplies a whole update, before a sum that nobody can take apart
    if len({"num_samples" in part.needs for part in parts}) > 1:
        raise MisconfigurationException(
            f"aggregator={aggregator.name} counts clients by their samples for one entry and alike for another, and "
            f"{SETTING} makes one sum; give all the same weighting."
        )
    for part in parts:
        name = type(part).__name__
        if isinstance(part, WeightedAverage) and part.mean is not None:
            raise MisconfigurationException(
                f"aggregator.mean={part.mean.name} compares clients' updates, and {SETTING} hides them: a server can "
                "be robust against single clients or blind for them, not both; leave one of the two out."
            )
        if isinstance(part, DPAverage):
            check_noise_shares(part)
        elif not part.sums_only:
            raise MisconfigurationException(
                f"aggregator={name} doesn't say of itself, by sums_only = True in its own class, that it needs sums "
                f"over clients alone, which is all that {SETTING} gives; take one that does, such as WeightedAverage."
            )


def check_noise_shares(aggregator: DPAverage) -> None:
    """Check the settings of an aggregator with noise from clients.

    Args:
        aggregator: the server side.

    Raises:
        MisconfigurationException: A setting asks for more than a sum of bounded changes.
    """
    if type(aggregator) is not DPAverage:
        raise MisconfigurationException(
            f"aggregator={type(aggregator).__name__} has noise of its own, and with {SETTING} clients draw "
            "each round's noise by itself; take DPAverage."
        )
    # a site doesn't know how many rounds and clients epsilon is shared out to, and shall not believe the server
    if aggregator.epsilon is not None:
        raise MisconfigurationException(
            f"aggregator.epsilon={aggregator.epsilon}: with {SETTING} clients draw the noise, and know "
            "aggregator.noise_multiplier alone; give that in its place, as "
            "pfl_lightning.privacy.noise_for(epsilon, delta, rounds) tells it."
        )
    # these would need a second sum, of counts or of weights
    others = {"quantile": None, "clip_by": "model", "sample_cap": None}
    for name, value in others.items():
        if getattr(aggregator, name) != value:
            raise MisconfigurationException(
                f"aggregator.{name}={getattr(aggregator, name)} isn't for {SETTING}, with which clients bound their "
                "whole changes by one clip and count alike; leave it out."
            )
