"""Selection among the clients available in a round."""

import csv
from collections.abc import Mapping
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.selection.base import RoundStart, Sampling, Selection


class Availability(Selection):
    """Draw ``trainer.clients_per_round`` of the clients available in the round, all equally likely.

    If fewer clients are available, all of them take part; if none is, the round has no client, as under
    `Poisson`.

    The table is a CSV file with a header, and one row per client: its id, and for each round the probability that the
    client is available, 0 for never and 1 for certainly. Rounds beyond the last column begin again with the first
    column, so a single column is a rate for each client::

        client,day,night
        0,1,0
        1,0.5,1

    Args:
        table: path of the file, which the server reads before the first round; or a rate for all rounds for each of
            some clients, dealt out to all clients in turn, as networks by ``model.assign_nets``.

    Raises:
        MisconfigurationException: if there is no rate, or one isn't from 0 to 1.
    """

    # the list first: the command line would take it for a path
    def __init__(self, table: list[float] | str) -> None:
        super().__init__()
        if not isinstance(table, str) and not (table and all(0 <= rate <= 1 for rate in table)):
            raise MisconfigurationException(
                f"trainer.cohort.table={table} must have numbers from 0 to 1, such as [1, 0.5], or be a file's path."
            )
        self.table = table

    def setup(self, sizes: Mapping[int, int]) -> None:
        """Read the table.

        Args:
            sizes: training samples of all clients, by id.

        Raises:
            MisconfigurationException: if the table can't be read, or lacks a client.
        """
        super().setup(sizes)
        if not isinstance(self.table, str):
            self.rates = {client: [self.table[client % len(self.table)]] for client in sizes}
            return
        self.rates = read_rates(self.table)
        if missing := sorted(sizes.keys() - self.rates.keys()):
            raise MisconfigurationException(
                f"trainer.cohort.table={self.table} has no row for client {missing[0]}; give each of the {len(sizes)} "
                f"clients one row, with ids from 0 to {len(sizes) - 1}."
            )

    def sampling(self, size: int, num_clients: int) -> Sampling:
        """Return the size: the table and no samples of clients decide the cohort, which may be smaller.

        Args:
            size: number of clients per round, by ``trainer.clients_per_round``.
            num_clients: number of clients.
        """
        return Sampling(size)

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        rates = {client: self.rates[client][start.round % len(self.rates[client])] for client in start.clients}
        # certain clients draw no number: a table of ones leaves the random stream where `Uniform` leaves it, bit for
        # bit
        there = [client for client in start.clients if rates[client] in (0, 1) or start.random.random() < rates[client]]
        there = [client for client in there if rates[client]]
        return start.random.sample(there, min(start.size, len(there)))


def read_by_client(path: str, setting: str) -> tuple[list[str], list[tuple[int, int, list[float]]]]:
    """Return the header of a CSV file, and each further line's number, client id and numbers behind the id.

    A line that can't be read, or is of another length than the header, has no numbers.

    Args:
        path: path of the file.
        setting: the setting that names the file.

    Raises:
        MisconfigurationException: if the file can't be read.
    """
    try:
        rows = list(csv.reader(Path(path).read_text(encoding="utf-8").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MisconfigurationException(f"{setting}={path} can't be read: {reason}.") from error
    header, lines = rows[0] if rows else [], []
    for line, row in enumerate(rows[1:], 2):
        try:
            client, values = int(row[0]), list(map(float, row[1:]))
        except (IndexError, ValueError):
            # for the caller to refuse, with the same sentence as a wrong number
            client, values = -1, []
        lines.append((line, client, values if len(row) == len(header) else []))
    return header, lines


def read_rates(path: str) -> dict[int, list[float]]:
    """Return the rows of a table of availabilities by client, all of the same length.

    Args:
        path: path of the file.

    Raises:
        MisconfigurationException: if the file is no such table.
    """
    header, lines = read_by_client(path, "trainer.cohort.table")
    rates: dict[int, list[float]] = {}
    for line, client, values in lines:
        if client in rates or not values or not all(0 <= value <= 1 for value in values):
            raise MisconfigurationException(
                f"trainer.cohort.table={path}, line {line}: give the id of a client that has no other line, and for "
                f"each of the header's {len(header) - 1} rounds a number from 0 to 1."
            )
        rates[client] = values
    return rates
