"""Cohorts in turn."""

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Cyclic(Selection):
    """Take ``trainer.clients_per_round`` clients in turn, by their ids, and begin again after the last one.

    With m of N clients each comes back after N / m rounds, rounded down, or later: the separation that `DPFTRL` asks
    for. Nothing is drawn.
    """

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the size of cohorts; nothing is random, and so nothing amplified."""
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the next clients."""
        first = start.round * start.size
        return [start.clients[(first + k) % len(start.clients)] for k in range(start.size)]
