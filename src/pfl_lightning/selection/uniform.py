"""Cohorts in which all clients are as likely."""

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Uniform(Selection):
    """Draws ``trainer.clients_per_round`` clients, all as likely, without replacement.

    Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).
    """

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """By the size alone."""
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """The cohort of the round."""
        return start.random.sample(list(start.clients), start.size)
