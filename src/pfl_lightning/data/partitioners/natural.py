"""The clients that the data set names."""

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.partitioners.base import Partitioner, Rows


class Natural(Partitioner):
    """Give each sample to the client that the data set names as owner.

    Clients are ordered by name, whatever the order of the samples. All take part if ``data.num_clients`` is null;
    otherwise ``data.seed`` draws ``data.num_clients`` of them.

    Args:
        min_samples: leave out clients with fewer samples, at least 1.

    Raises:
        MisconfigurationException: if ``min_samples`` is below 1, or leaves fewer clients than ``data.num_clients``.
    """

    by_class = False
    by_owner = True

    def __init__(self, min_samples: int = 1) -> None:
        check_integers("Natural ", min_samples=min_samples)
        if min_samples < 1:
            raise MisconfigurationException(f"Natural min_samples={min_samples} must be at least 1")
        self.min_samples = min_samples

    def owners(self, classes: list[Rows]) -> list[int]:
        """Return the numbers of the owners with at least ``min_samples`` samples.

        Args:
            classes: pool positions of each owner's samples.

        Raises:
            MisconfigurationException: if no owner has enough samples.
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
        """Draw the participating clients among the large enough owners.

        Args:
            classes: pool positions of each owner's samples.
            num_clients: number of clients M.
            rng: the source of the draw.

        Raises:
            MisconfigurationException: if too few owners have ``min_samples`` samples.
        """
        owners = self.owners(classes)
        if num_clients > len(owners):
            raise MisconfigurationException(
                f"data.num_clients={num_clients} is more than the {len(owners)} clients that have at least "
                f"{self.min_samples} samples; use fewer, null for all of them, or a smaller min_samples"
            )
        # sorted, so that client ids follow the order of names, drawn or not
        drawn = owners if num_clients == len(owners) else sorted(rng.permutation(owners)[:num_clients])
        return [classes[owner] for owner in drawn]
