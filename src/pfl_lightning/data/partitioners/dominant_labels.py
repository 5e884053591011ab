"""Groups of clients with the same dominant labels."""

from bisect import bisect_left
from typing import Literal, get_args

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.checks import check_integers, check_numbers
from pfl_lightning.data.partitioners.base import Partitioner, Rows

Grouping = Literal["block", "mod"]
"""How clients form groups: neighbours (block), or every G-th client (mod)."""


class DominantLabels(Partitioner):
    r"""Give the clients of a group the same dominant labels: the partition of FedPAC and FedReMa.

    Every client has n samples. floor(s n) of them are IID: floor(s n / K) of each class, and the remainder from class K
    - 1. The other samples have the d dominant labels of the client's group g, equally many of each, and the remainder
    from the last dominant label. The dominant labels are

    .. math:: \lfloor g K / G \rfloor, \ldots, \lfloor g K / G \rfloor + d - 1 \pmod K,

    for 10 classes and the defaults 0-2, 2-4, 4-6, 6-8 and 8, 9, 0: a client with 600 samples has 172 of each of three
    labels and 12 of each other label. If K is smaller than G, some groups have the same labels.

    Samples are taken from each class in random order and without repetition, the original test samples among them. The
    official code starts at sample 2,000 of each class and begins anew when a class runs out. Not all samples are used.

    Args:
        iid_fraction: share s of IID samples, in [0, 1]. The classes are even if s n is a multiple of K.
        samples_per_client: number n of a client's samples, at least 1; None takes the largest n for which the classes
            suffice.
        grouping: client i of M is in group floor(G i / M) for ``block`` (FedReMa), i mod G for ``mod`` (FedPAC).
        dominant: number d of dominant labels of a group, 1 to K.
        groups: number G of groups, at least 1.

    Raises:
        MisconfigurationException: if a value is out of range, or a class has too few samples.

    Source: Liang et al., "FedReMa: Improving Personalized Federated Learning via Leveraging the Most Relevant Clients",
    ECAI 2024; Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
    2023.
    """

    def __init__(
        self,
        iid_fraction: float = 0.2,
        samples_per_client: int | None = 600,
        grouping: Grouping = "block",
        dominant: int = 3,
        groups: int = 5,
    ) -> None:
        check_numbers("DominantLabels ", iid_fraction=iid_fraction)
        check_integers("DominantLabels ", dominant=dominant, groups=groups)
        if samples_per_client is not None:
            check_integers("DominantLabels ", samples_per_client=samples_per_client)
        wrong = [
            (not 0 <= iid_fraction <= 1, f"iid_fraction={iid_fraction} must be from 0 to 1"),
            (
                samples_per_client is not None and samples_per_client < 1,
                f"samples_per_client={samples_per_client} must be at least 1, or null for as many as there are",
            ),
            (grouping not in get_args(Grouping), f"grouping={grouping!r} must be one of block, mod"),
            (dominant < 1, f"dominant={dominant} must be at least 1"),
            (groups < 1, f"groups={groups} must be at least 1"),
        ]
        for is_wrong, sentence in wrong:
            if is_wrong:
                raise MisconfigurationException(f"DominantLabels {sentence}")
        self.iid_fraction = iid_fraction
        self.samples_per_client = samples_per_client
        self.grouping = grouping
        self.dominant = dominant
        self.groups = groups

    def group_of(self, client: int, num_clients: int) -> int:
        """Return the group of a client, 0 to groups - 1.

        Args:
            client: client id, 0 to num_clients - 1.
            num_clients: number of clients M.
        """
        return client % self.groups if self.grouping == "mod" else self.groups * client // num_clients

    def labels_of(self, group: int, num_classes: int) -> list[int]:
        """Return the dominant labels of a group, in counting order.

        Args:
            group: the group, 0 to groups - 1.
            num_classes: number of classes K.

        >>> [DominantLabels().labels_of(group, 10) for group in (0, 1, 4)]
        [[0, 1, 2], [2, 3, 4], [8, 9, 0]]
        """
        start = group * num_classes // self.groups
        return [(start + step) % num_classes for step in range(self.dominant)]

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Compute each client's number of samples per class, then deal the samples; see `Partitioner.split`."""
        if self.dominant > len(classes):
            raise MisconfigurationException(
                f"DominantLabels dominant={self.dominant} must be at most {len(classes)}, the number of classes"
            )
        available = np.array([len(rows) for rows in classes])
        group = [self.group_of(client, num_clients) for client in range(num_clients)]
        members = np.bincount(group, minlength=self.groups)
        # 1 where no number fits, so that the refusal below names the class that lacks samples
        n = self.samples_per_client or self._most(available, members) or 1
        counts = self._counts(n, len(classes))
        missing = members @ counts - available
        if missing.max() > 0:
            k = int(missing.argmax())
            most = self._most(available, members)
            advice = f"use samples_per_client={most}, the most that fits" if most else "no number fits"
            raise MisconfigurationException(
                f"DominantLabels samples_per_client={n} for num_clients={num_clients} takes "
                f"{available[k] + missing[k]} samples of class {k} and there are {available[k]}; {advice}, or "
                "use fewer clients"
            )
        ends = counts[group].cumsum(axis=0)
        # the last piece is the remainder of the class, which no client gets
        pieces = [np.split(rng.permutation(rows), ends[:, k])[:-1] for k, rows in enumerate(classes)]
        return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]

    def _counts(self, n: int, num_classes: int, remainders: bool = True) -> NDArray[np.int64]:
        """Return the number of samples per class for a client of each group, shape [groups, num_classes]."""
        # rounded before the cut to an integer, since 0.29 * 100 is 28.999999999999996
        iid = int(round(self.iid_fraction * n, 6))
        counts = np.full((self.groups, num_classes), iid // num_classes)
        counts[:, -1] += remainders * (iid % num_classes)
        for group in range(self.groups):
            labels = self.labels_of(group, num_classes)
            counts[group, labels] += (n - iid) // self.dominant
            counts[group, labels[-1]] += remainders * ((n - iid) % self.dominant)
        return counts

    def _most(self, available: NDArray[np.int64], members: NDArray[np.int64]) -> int:
        """Return the largest number n of samples per client for which the classes suffice, or 0."""

        def is_short(n: int, remainders: bool = True) -> bool:
            return bool((members @ self._counts(n, len(available), remainders) > available).any())

        # Bisection needs a test that stays true once true, which holds only without remainders: with them, n + 1 may
        # fit where n doesn't. So bisect for an upper bound, and search downwards from there.
        sizes = range(1, available.sum() // members.sum() + 1)
        top = bisect_left(sizes, True, key=lambda n: is_short(n, remainders=False))
        return next((n for n in range(top, 0, -1) if not is_short(n)), 0)
