"""Cohorts in which all clients are as likely."""

from pfl_lightning.selection.base import RoundStart, Selection


class Uniform(Selection):
    """Draws ``trainer.clients_per_round`` clients, all as likely, without replacement.

    Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).
    """

    def choose(self, start: RoundStart) -> list[int]:
        """The cohort of the round."""
        return start.random.sample(list(start.clients), start.size)
