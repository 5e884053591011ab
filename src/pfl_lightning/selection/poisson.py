"""Cohorts of random size."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Poisson(Selection):
    """Draws each client by itself with the same probability, so that rounds have different sizes.

    This is what analyses of differential privacy by clients call Poisson sampling. A round may have nobody: its row
    says so by ``clients`` 0 and an empty ``cohort``, the aggregator is given no updates, which by itself leaves its
    state as it is, and the run goes on. The size of a round is the rate's alone, so ``trainer.clients_per_round`` must
    be left out.

    Args:
        rate: probability of each client, above 0 and up to 1.

    Raises:
        MisconfigurationException: if ``rate`` is out of its range.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 < rate <= 1:
            raise MisconfigurationException(f"trainer.cohort.rate={rate} must be above 0 and up to 1, such as 0.1.")
        self.rate = rate

    def check(self, share: float, size: int, num_clients: int) -> None:
        """Refuses a size of rounds beside the rate."""
        if share != 1.0 or isinstance(share, int):
            raise MisconfigurationException(
                f"trainer.clients_per_round={share} fixes the size of a round, and trainer.cohort=Poisson draws each "
                "client by its rate; take clients_per_round=1.0, which is the default."
            )

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """By its rate."""
        return Sampling(self.rate * num_clients, self.rate)

    def choose(self, start: RoundStart) -> list[int]:
        """The cohort of the round."""
        return [client for client in start.clients if start.random.random() < self.rate]
