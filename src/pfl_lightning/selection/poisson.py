"""Cohorts of random size."""

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Poisson(Selection):
    """Draw each client independently with the same probability, so that cohorts differ in size.

    Analyses of client-level differential privacy call this Poisson sampling. A round may have no client: its row then
    has ``clients`` 0 and an empty ``cohort``, the aggregator receives no updates, by default keeps its state, and the
    run goes on. The rate alone decides the size of a round, so ``trainer.clients_per_round`` must be left out.

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
        """Refuse a size of rounds in addition to the rate.

        Args:
            share: ``trainer.clients_per_round`` as given.
            size: ``trainer.clients_per_round`` as a number of clients.
            num_clients: number of clients.
        """
        # 1.0 is the default and means "not set"; the integer 1 means one client
        if share != 1.0 or isinstance(share, int):
            raise MisconfigurationException(
                f"trainer.clients_per_round={share} fixes the size of a round, and trainer.cohort=Poisson draws each "
                "client by its rate; take clients_per_round=1.0, which is the default."
            )

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the expected size and the rate.

        Args:
            size: ignored.
            num_clients: number of clients.
        """
        return Sampling(self.rate * num_clients, self.rate)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        return [client for client in start.clients if start.random.random() < self.rate]
