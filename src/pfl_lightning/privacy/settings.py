"""Check settings of noise and bounds."""

import math

from lightning.fabric.utilities.exceptions import MisconfigurationException


def check_one(owner: str, noise_multiplier: float | None, epsilon: float | None) -> None:
    """Refuse noise beside a target, and neither of the two.

    Args:
        owner: the settings' place, such as ``aggregator``.
        noise_multiplier: the noise.
        epsilon: the target.

    Raises:
        MisconfigurationException: if not exactly one is given.
    """
    if (noise_multiplier is None) == (epsilon is None):
        raise MisconfigurationException(
            f"{owner}.noise_multiplier={noise_multiplier} and {owner}.epsilon={epsilon}: give one of them, such as "
            "epsilon=8."
        )


def check_spent(owner: str, target: float, spent: float, round: int) -> None:
    """Refuse rounds beyond a target.

    Args:
        owner: the place of its setting, such as ``aggregator``.
        target: the epsilon that all rounds may have together.
        spent: what they have with the coming one.
        round: rounds that are done.

    Raises:
        MisconfigurationException: if it does.
    """
    # noise is found to a relative 1e-6
    if spent > target * (1 + 1e-6):
        raise MisconfigurationException(
            f"{owner}.epsilon={target} is spent after {round} rounds; end there by trainer.max_rounds, or begin anew "
            "with more rounds."
        )


def check_noise(
    noise_multiplier: float | None, epsilon: float | None, clip: float, clip_by: str, quantile: float | None
) -> None:
    """Refuse settings in contradiction to each other.

    Raises:
        MisconfigurationException: if they don't.
    """
    check_one("aggregator", noise_multiplier, epsilon)
    if clip == math.inf and noise_multiplier != 0:
        raise MisconfigurationException(
            "aggregator.clip=inf bounds nothing that noise could hide; give a norm such as 1."
        )
    if quantile is not None and clip_by == "entry":
        raise MisconfigurationException(
            f"aggregator.quantile={quantile} follows the norms of whole changes, and aggregator.clip_by='entry' bounds "
            "their parts; take 'model'."
        )


def check_numbers(**settings: float | None) -> None:
    """Refuse numbers out of range; None is in each range.

    Raises:
        MisconfigurationException: if one is.
    """
    for name, value in settings.items():
        least, most, words = RANGES[name]
        inside = value is None or (least < value <= most) or (name == "noise_multiplier" and value == 0)
        if not inside:
            raise MisconfigurationException(f"aggregator.{name}={value} must be {words}.")


LARGEST = 1e308
RANGES = {
    "noise_multiplier": (0.0, LARGEST, "0 or more, such as 1"),
    "epsilon": (0.0, LARGEST, "above 0, such as 8"),
    "delta": (0.0, math.nextafter(1, 0), "above 0 and below one over data.num_clients, such as 1e-3"),
    "clip": (0.0, math.inf, "above 0, such as 1"),
    "quantile": (0.0, math.nextafter(1, 0), "between 0 and 1, such as 0.5"),
    "clip_lr": (0.0, LARGEST, "above 0, such as 0.2"),
    "count_noise": (0.0, LARGEST, "above 0, such as a twentieth of the clients of a round"),
    "sample_cap": (0.0, LARGEST, "at least 1, such as 100"),
    "server_lr": (0.0, LARGEST, "above 0, such as 1"),
}
"""What each number is above, and at most, and how that is said."""
