"""The metric that selects the best round, and its spread over clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Monitor:
    """The metric that selects the best round, with its direction.

    Args:
        metric: name of the metric, without the split.
        mode: ``max`` if larger values are better, ``min`` if smaller ones are.
    """

    metric: str = "acc"
    mode: Literal["max", "min"] = "max"

    @property
    def sign(self) -> int:
        """Factor that turns the metric into a value to maximise: 1 or -1."""
        return 1 if self.mode == "max" else -1

    @property
    def decile(self) -> str:
        """Name of the worst decile: the lowest one, ``p10``, or the highest one, ``p90``."""
        return "p10" if self.mode == "max" else "p90"

    def spread(self, values: Sequence[float]) -> dict[str, float]:
        """Return the spread of a metric over clients: mean, deviation, the worst, the worst decile, the worst tenth.

        Clients count alike, whatever their samples.

        >>> Monitor("mae", "min").spread([1.0, 3.0])
        {'mae_mean': 2.0, 'mae_std': 1.0, 'mae_worst': 3.0, 'mae_p90': 2.8, 'mae_worst10': 3.0}

        Args:
            values: the metric of each client.
        """
        worst, share = (np.min, 0.1) if self.mode == "max" else (np.max, 0.9)
        parts = {
            "mean": np.mean(values),
            # of these clients and not an estimate for others: divided by their number
            "std": np.std(values),
            "worst": worst(values),
            self.decile: np.quantile(values, share),
            "worst10": self.worst_tenth(values),
        }
        return {f"{self.metric}_{name}": float(value) for name, value in parts.items()}

    def worst_tenth(self, values: Sequence[float]) -> float:
        """Return the plain mean over the worst tenth of clients, their number rounded up.

        >>> Monitor().worst_tenth([0.9, 0.1, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9, 0.3])
        0.2

        Args:
            values: the metric of each client, at least one; NaN in one makes the mean NaN.
        """
        # sorting has no place for NaN: the tenth would depend on the order of clients
        if np.isnan(values).any():
            return math.nan
        worst_first = sorted(values, key=lambda value: self.sign * value)
        return float(np.mean(worst_first[: math.ceil(len(values) / 10)]))

    def written(self, value: float | None) -> str:
        """Return a value for people: accuracies in per cent.

        >>> Monitor().written(0.98765), Monitor("mae", "min").written(0.98765), Monitor().written(None)
        ('98.77 %', '0.9877', 'not evaluated')

        Args:
            value: the metric's value, or None.
        """
        if value is None:
            return "not evaluated"
        return f"{100 * value:.2f} %" if self.metric == "acc" else f"{value:.4g}"

    @property
    def words(self) -> str:
        """Name of the metric for people."""
        return "accuracy" if self.metric == "acc" else self.metric
