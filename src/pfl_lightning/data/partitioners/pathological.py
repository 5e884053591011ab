"""A few classes per client, in blocks of clients."""

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.partitioners.base import Partitioner, Rows


class Pathological(Partitioner):
    """Give each client a few classes, in blocks of clients with the same classes: PFLlib's ``pat`` partition.

    In class order, each class goes to the first ceil(M c / K) clients that still lack classes, as consecutive slices in
    pool order. So clients form blocks with the same classes: 20 clients with 2 of 10 classes are 5 blocks of 4. All
    clients of a class but the last get a random amount between a tenth of the fair share and the fair share, and the
    last client gets the rest: one client of each block is very large.

    Args:
        classes_per_client: number of classes c of a client, 1 to K. The last block has fewer if M c is no multiple of
            K.
        balanced: give all clients of a class the same amount instead.

    Raises:
        MisconfigurationException: if a value is out of range, or M, c and K would leave classes without client (PFLlib
            drops their data silently).

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    in PFLlib's unbalanced variant.
    """

    def __init__(self, classes_per_client: int = 2, balanced: bool = False) -> None:
        check_integers("Pathological ", classes_per_client=classes_per_client)
        if classes_per_client < 1:
            raise MisconfigurationException(f"Pathological classes_per_client={classes_per_client} must be at least 1")
        self.classes_per_client = classes_per_client
        self.balanced = balanced

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Hand out the classes in order; see `Partitioner.split`."""
        self._check(len(classes), num_clients)
        sharers = -(-num_clients * self.classes_per_client // len(classes))
        lacking = np.full(num_clients, self.classes_per_client)
        pieces: list[list[Rows]] = [[] for _ in range(num_clients)]
        for k, rows in enumerate(classes):
            takers = np.flatnonzero(lacking)[:sharers]
            if len(rows) < len(takers):
                raise MisconfigurationException(
                    f"Pathological classes_per_client={self.classes_per_client} needs {len(takers)} samples "
                    f"of class {k} and there are {len(rows)}; use more samples, fewer clients or fewer "
                    "classes_per_client"
                )
            cuts = np.cumsum(self._amounts(len(rows), len(takers), rng))
            # not shuffled: slices in pool order, as PFLlib cuts them
            for client, piece in zip(takers, np.split(rows, cuts), strict=True):
                pieces[client].append(piece)
            lacking[takers] -= 1
        return [np.concatenate(mine) for mine in pieces]

    def _amounts(self, size: int, takers: int, rng: np.random.RandomState) -> NDArray[np.int64]:
        """Return the number of samples for each client of a class but the last."""
        fair = size // takers
        if self.balanced:
            return np.full(takers - 1, fair)
        # PFLlib's range; at least one sample, where a class is small
        low = max(int(size / takers / 10), 1)
        return rng.randint(low, max(fair, low + 1), takers - 1)

    def _check(self, num_classes: int, num_clients: int) -> None:
        """Refuse numbers of classes with which some class would go to no client."""

        def covers(per_client: int) -> bool:
            # Each class takes `sharers` clients (rounded up), so rounding may use all clients up before the last class.
            sharers = -(-num_clients * per_client // num_classes)
            return -(-num_clients // sharers) * per_client >= num_classes

        if self.classes_per_client > num_classes:
            raise MisconfigurationException(
                f"Pathological classes_per_client={self.classes_per_client} must be at most {num_classes}, "
                "the number of classes"
            )
        if not covers(self.classes_per_client):
            enough = next(c for c in range(self.classes_per_client + 1, num_classes + 1) if covers(c))
            raise MisconfigurationException(
                f"Pathological classes_per_client={self.classes_per_client} leaves some of the {num_classes} "
                f"classes to none of num_clients={num_clients}; use classes_per_client={enough}, or make "
                f"num_clients * classes_per_client a multiple of {num_classes}"
            )
