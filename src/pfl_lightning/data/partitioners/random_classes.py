"""Random classes for each client."""

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.partitioners.base import Partitioner, Rows


class RandomClasses(Partitioner):
    """Give each client a few classes, drawn independently: FedClassAvg's skewed partition.

    Each client draws c classes, uniformly and without replacement, and gets floor(N / (c M)) samples of each. A class
    with fewer samples than its clients ask for is shared out equally among them. Classes that no client draws stay
    unused. Under `Pathological`, in contrast, clients form blocks with the same classes, and all data are used.

    The official code draws the samples with replacement, so that clients hold copies of each other's samples, test
    samples included. The parts are disjoint here, so such draws are not offered.

    Args:
        classes_per_client: number of classes c of a client, 1 to K.
        equalize: bring all clients to the same size. Classes are dealt so that no class has two clients more than
            another, and each client gets as many samples per class as the clients of the scarcest class; all samples
            are used if M c is a multiple of K and all classes are equally large.

    Raises:
        MisconfigurationException: if ``classes_per_client`` is out of range, or a client would get no sample of a drawn
            class.

    Source: Jang et al., "FedClassAvg: Local Representation Learning for Personalized Federated Learning on
    Heterogeneous Neural Networks", ICPP 2022.
    """

    def __init__(self, classes_per_client: int = 2, equalize: bool = False) -> None:
        check_integers("RandomClasses ", classes_per_client=classes_per_client)
        if classes_per_client < 1:
            raise MisconfigurationException(f"RandomClasses classes_per_client={classes_per_client} must be at least 1")
        self.classes_per_client = classes_per_client
        self.equalize = equalize

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Draw classes, then share each class out among its clients; see `Partitioner.split`."""
        present = [k for k, rows in enumerate(classes) if len(rows)]
        if self.classes_per_client > len(present):
            raise MisconfigurationException(
                f"RandomClasses classes_per_client={self.classes_per_client} must be at most {len(present)}, "
                "the number of classes that have samples"
            )
        drawn = self._draw(present, num_clients, rng)
        takers = [[client for client in range(num_clients) if k in drawn[client]] for k in range(len(classes))]
        amounts = [len(rows) // max(len(mine), 1) for rows, mine in zip(classes, takers, strict=True)]
        # at least 1, so that the refusal below names a class that really lacks samples
        most = max(1, sum(map(len, classes)) // (self.classes_per_client * num_clients))
        if self.equalize:
            most = max(1, min([most, *(amounts[k] for k in present if takers[k])]))
        pieces: list[list[Rows]] = [[] for _ in range(num_clients)]
        for k, rows in enumerate(classes):
            amount = min(most, amounts[k])
            if takers[k] and not amount:
                raise MisconfigurationException(
                    f"RandomClasses classes_per_client={self.classes_per_client} leaves no sample of class {k} "
                    f"for each of the {len(takers[k])} clients that drew it; use more samples, fewer clients or "
                    "fewer classes_per_client"
                )
            shuffled = rng.permutation(rows)
            for place, client in enumerate(takers[k]):
                pieces[client].append(shuffled[place * amount : (place + 1) * amount])
        return [np.concatenate(mine) for mine in pieces]

    def _draw(self, present: list[int], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Draw the classes of each client."""
        if not self.equalize:
            return [rng.choice(present, self.classes_per_client, replace=False) for _ in range(num_clients)]
        drawn, times = [], np.zeros(max(present) + 1, dtype=np.int64)
        for _ in range(num_clients):
            # the least drawn classes come first; the shuffle before the stable sort decides among equals
            mixed = rng.permutation(present)
            mine = mixed[np.argsort(times[mixed], kind="stable")[: self.classes_per_client]]
            times[mine] += 1
            drawn.append(mine)
        return drawn
