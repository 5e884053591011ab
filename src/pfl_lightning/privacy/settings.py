"""Which settings of noise and bounds there can be."""

import math

from lightning.fabric.utilities.exceptions import MisconfigurationException


def check_noise(
    noise_multiplier: float | None, epsilon: float | None, clip: float, clip_by: str, quantile: float | None
) -> None:
    """Refuses settings that don't go together.

    Raises:
        MisconfigurationException: if they don't.
    """
    if (noise_multiplier is None) == (epsilon is None):
        raise MisconfigurationException(
            f"aggregator.noise_multiplier={noise_multiplier} and aggregator.epsilon={epsilon}: give one of them, such "
            "as epsilon=8."
        )
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
    """Refuses numbers out of their ranges; None is in each of them.

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
