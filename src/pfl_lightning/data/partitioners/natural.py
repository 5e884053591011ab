"""Clients as the data set has them."""

from __future__ import annotations

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.partitioners.base import Partitioner, Rows


class Natural(Partitioner):
    """Gives each sample to the client that the data set names for it.

    Clients are in the order of their names, whatever the order of the samples. All of them take part where
    ``data.num_clients`` is null; else so many, drawn by ``data.seed``.

    Args:
        min_samples: Clients with fewer samples are left out, at least 1.

    Raises:
        MisconfigurationException: ``min_samples`` is below 1, or leaves fewer clients than are asked for.
    """

    by_class = False
    by_owner = True

    def __init__(self, min_samples: int = 1) -> None:
        check_integers("Natural ", min_samples=min_samples)
        if min_samples < 1:
            raise MisconfigurationException(f"Natural min_samples={min_samples} must be at least 1")
        self.min_samples = min_samples

    def owners(self, classes: list[Rows]) -> list[int]:
        """Numbers of the owners that have enough samples.

        Args:
            classes: The samples of each owner.

        Raises:
            MisconfigurationException: There is none.
        """
        large = [owner for owner, rows in enumerate(classes) if len(rows) >= self.min_samples]
        if not large:
            most = max(map(len, classes))
            raise MisconfigurationException(
                f"Natural min_samples={self.min_samples} leaves none of {len(classes)} clients, whose largest has "
                f"{most} samples; use a smaller min_samples"
            )
        return large

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Draw who takes part, of those that are large enough; ``classes`` are the samples of each owner."""
        owners = self.owners(classes)
        if num_clients > len(owners):
            raise MisconfigurationException(
                f"data.num_clients={num_clients} is more than the {len(owners)} clients that have at least "
                f"{self.min_samples} samples; use fewer, null for all of them, or a smaller min_samples"
            )
        drawn = owners if num_clients == len(owners) else sorted(rng.permutation(owners)[:num_clients])
        return [classes[owner] for owner in drawn]
