"""Label skew by a Dirichlet distribution, without a cap on the clients' sizes."""

import numpy as np

from pfl_lightning.data.partitioners.base import Rows
from pfl_lightning.data.partitioners.dirichlet import Dirichlet


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
