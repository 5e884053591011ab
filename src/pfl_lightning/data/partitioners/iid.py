"""Equal shares of the shuffled pool."""

from itertools import pairwise

import numpy as np

from pfl_lightning.data.partitioners.base import Partitioner, Rows


class IID(Partitioner):
    """Give every client an equal share of the shuffled pool; sizes differ by 1 at most.

    Each client's class mix is the pool's in expectation. PFLlib means something else by "iid": every client gets every
    class, in very unequal amounts. For that use ``Pathological(classes_per_client=K)``.
    """

    by_class = False

    def split(self, classes: list[Rows], num_clients: int, rng: np.random.RandomState) -> list[Rows]:
        """Shuffle and cut into equal pieces; see `Partitioner.split`."""
        rows = rng.permutation(np.concatenate(classes))
        # as `np.array_split` cuts, which takes several microseconds a piece
        size, larger = divmod(len(rows), num_clients)
        ends = [client * size + min(client, larger) for client in range(num_clients + 1)]
        return [rows[start:end] for start, end in pairwise(ends)]
