"""Cohorts in which all clients are equally likely."""

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Uniform(Selection):
    """Draw ``trainer.clients_per_round`` clients without replacement, all equally likely.

    Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).
    """

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the size, the only influence on cohorts.

        Args:
            size: number of clients per round, by ``trainer.clients_per_round``.
            num_clients: ignored.
        """
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        return start.random.sample(list(start.clients), start.size)
