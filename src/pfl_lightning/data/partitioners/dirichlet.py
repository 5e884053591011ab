"""Label skew by Dirichlet distributions."""

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.checks import check_integers, check_numbers
from pfl_lightning.data.partitioners.base import Partitioner, Rows


class Dirichlet(Partitioner):
    r"""Divide each class by shares from a Dirichlet distribution: PFLlib's ``dir`` partition.

    FedClassAvg's partition is ``alpha=0.5`` with ``min_size=10``.

    For each class, the shares of the M clients are q ~ Dir(alpha * 1_M). Clients that already hold N / M samples get
    none, and the remaining shares are renormalised. The whole draw is repeated until every client has ``min_size``
    samples.

    Args:
        alpha: concentration, above 0. Small is skewed (0.1 is usual), large is nearly IID (100).
        min_size: size of the smallest client to accept, at least 1. The default gives the partitions of papers that
            used PFLlib before March 2024; later versions ask for 40.
        equalize: bring every client to N / M samples after the draw (sizes differ by 1 at most): a random part of the
            large clients' samples is dealt to the small clients, whatever the classes. The draw alone bounds the sizes
            loosely, though FedClassAvg's paper calls them equal.

    Raises:
        MisconfigurationException: if a value is out of range, or no draw reaches ``min_size``.

    Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; the cap at N /
    M as in Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022.
    """

    MAX_DRAWS = 1000

    def __init__(self, alpha: float = 0.1, min_size: int = 1, equalize: bool = False) -> None:
        self._check_concentration("alpha", alpha)
        check_integers(f"{type(self).__name__} ", min_size=min_size)
        if min_size < 1:
            raise MisconfigurationException(f"{type(self).__name__} min_size={min_size} must be at least 1")
        self.alpha = alpha
        self.min_size = min_size
        self.equalize = equalize

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Draw until every client is large enough; see `Partitioner.split`."""
        fair = sum(map(len, classes)) / num_clients
        # a min_size above N / M can never be reached, so it is refused without a draw
        draws = self.MAX_DRAWS if self.min_size <= fair else 0
        for _ in range(draws):
            clients = self._draw(classes, num_clients, fair, rng)
            if min(map(len, clients)) >= self.min_size:
                return _equal_sizes(clients, rng) if self.equalize else clients
        raise MisconfigurationException(
            f"{type(self).__name__} min_size={self.min_size} was not reached in {draws} draws with alpha={self.alpha} "
            f"and num_clients={num_clients} ({fair:g} samples a client); use a larger alpha, a smaller "
            "min_size or fewer clients"
        )

    def _draw(self, classes: list[Rows], num_clients: int, fair: float, rng: np.random.RandomState) -> list[Rows]:
        pieces: list[list[Rows]] = [[] for _ in range(num_clients)]
        sizes = np.zeros(num_clients)
        for rows in classes:
            if len(rows) == 0:
                continue
            shuffled = rng.permutation(rows)
            cuts = (np.cumsum(self._shares(self.alpha, sizes < fair, rng)) * len(rows)).astype(int)[:-1]
            # sizes grow class by class, so the cap at N / M depends on the order of classes, as in PFLlib
            for client, piece in enumerate(np.split(shuffled, cuts)):
                pieces[client].append(piece)
                sizes[client] += len(piece)
        return [np.concatenate(mine) for mine in pieces]

    def _shares(self, alpha: float, is_open: NDArray[np.bool_], rng: np.random.RandomState) -> NDArray[np.float64]:
        # NumPy's gamma draws of very large alphas overflow when summed. Shares are even to the last bit long before
        # 1e100.
        shares = rng.dirichlet(np.full(len(is_open), min(alpha, 1e100))) * is_open
        total = shares.sum()
        if total > 0:
            return np.asarray(shares / total)
        # Every open share underflowed to 0. For alpha -> 0, the limit of the distribution is one client that takes the
        # class.
        shares = np.zeros(len(is_open))
        shares[rng.choice(np.flatnonzero(is_open))] = 1.0
        return shares

    def _check_concentration(self, name: str, value: float) -> None:
        check_numbers(f"{type(self).__name__} ", **{name: value})
        if not 0 < value < float("inf"):
            raise MisconfigurationException(
                f"{type(self).__name__} {name}={value} must be above 0 and finite, for example 0.1 (skewed) or "
                "100 (even)"
            )


def _equal_sizes(clients: list[Rows], rng: np.random.RandomState) -> list[Rows]:
    # the surplus is mixed before it is dealt, so that no small client is filled up from one large client alone
    fair, extra = divmod(sum(map(len, clients)), len(clients))
    sizes = [fair + (client < extra) for client in range(len(clients))]
    mixed = [rng.permutation(rows) for rows in clients]
    surplus = rng.permutation(np.concatenate([rows[size:] for rows, size in zip(mixed, sizes, strict=True)]))
    lacking = [max(size - len(rows), 0) for rows, size in zip(mixed, sizes, strict=True)]
    refills = np.split(surplus, np.cumsum(lacking)[:-1])
    return [np.concatenate([rows[:size], more]) for rows, size, more in zip(mixed, sizes, refills, strict=True)]


class RoundedDirichlet(Dirichlet):
    r"""Divide each class by rounded shares from a Dirichlet distribution: the partition of FedLAW and FedAWA.

    The shares of the M clients in class k, which has N_k samples, are q_k ~ Dir(alpha * 1_M). Client i gets round(q_ki
    N_k) samples while the class has any left, and the last client gets the rest. Unlike in `Dirichlet`, no share is cut
    off, so sizes differ more. The first draw equals the official one for the same seed; draws are repeated until every
    client has ``min_size`` samples, where the official code may leave clients empty. If a class has hardly more samples
    than there are clients, rounding errors add up, and the last clients get far too many samples or none.

    Args:
        alpha: concentration, above 0. The papers use 0.5, and 100 for "IID".
        second_alpha: if given, only the first floor(M / 2) clients keep their shares, and the other clients divide the
            rest of a class by Dir(second_alpha * 1): two kinds of clients, half of each.
        min_size: size of the smallest client to accept, at least 1.

    Raises:
        MisconfigurationException: if a value is out of range, or no draw reaches ``min_size``.

    Source: Li et al., "Revisiting Weighted Aggregation in Federated Learning with Neural Networks", ICML 2023, official
    code.
    """

    def __init__(self, alpha: float = 0.5, second_alpha: float | None = None, min_size: int = 1) -> None:
        super().__init__(alpha, min_size)
        if second_alpha is not None:
            self._check_concentration("second_alpha", second_alpha)
        self.second_alpha = second_alpha

    def _draw(self, classes: list[Rows], num_clients: int, fair: float, rng: np.random.RandomState) -> list[Rows]:
        # the official code's order of draws: all shuffles, then all shares
        shuffled = [rng.permutation(rows) for rows in classes]
        everyone = np.ones(num_clients, dtype=bool)
        shares = np.stack([self._shares(self.alpha, everyone, rng) for _ in classes])
        if self.second_alpha is not None:
            half = num_clients // 2
            left = 1 - shares[:, :half].sum(axis=1, keepdims=True)
            shares[:, half:] = [self._shares(self.second_alpha, everyone[half:], rng) for _ in classes]
            shares[:, half:] *= left
        pieces = []
        for rows, q in zip(shuffled, shares, strict=True):
            # rounding up may ask for more samples than the class has: np.split makes the pieces past the end empty
            ends = np.rint(q * len(rows)).astype(int).cumsum()
            pieces.append(np.split(rows, ends[:-1]))
        return [np.concatenate(mine) for mine in zip(*pieces, strict=True)]
