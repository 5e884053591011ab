"""Rounds as steps of a server that waits for nobody: the next updates count, of whatever age."""

from itertools import count
from types import MappingProxyType
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.federation.stages import Plan
from pfl_lightning.schedules.base import Course, Schedule, SpeedSettings, Turn
from pfl_lightning.settings import Unpack, is_count


class Asynchronous(Schedule):
    r"""Clients train without waiting for each other, and a round is one step of the server by the first updates.

    ``trainer.clients_per_round`` clients train at once, each from the model that it received at its start. A client
    whose update has arrived makes room for another one, chosen by ``trainer.cohort`` among the clients that neither
    train nor have an update in the buffer. When ``buffer`` updates have arrived, the server steps, and their clients
    may train again. An update is stale by the number of steps since its client's start; `FedBuff` and `FedAsync` weigh
    updates by this, and other aggregators take them as they are. Updates that arrive at once are taken by their
    clients' ids, and clients start after the updates of the same moment.

    Args:
        buffer: number of updates for a step of the server, from 1 to the number of clients.
        **kwargs: the arguments of `Schedule`. After ``timeout`` a client's training is given up.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    does = MappingProxyType({**Schedule.does, "stale": "has updates from models of earlier rounds"})
    excludes = MappingProxyType(
        {
            **Schedule.excludes,
            **dict.fromkeys(
                ("moves", "changes"),
                "trains a client at its update, on samples of another time than its start's; take Synchronous, or data "
                "without a change",
            ),
            "any number": "keeps a fixed number at work; take Uniform or another choice",
        }
    )

    def __init__(self, buffer: int = 10, **kwargs: Unpack[SpeedSettings]) -> None:
        super().__init__(**kwargs)
        if not is_count(buffer):
            raise MisconfigurationException(
                f"trainer.schedule.buffer={buffer} must be a number of updates from 1 up, such as 10."
            )
        self.buffer = buffer

    def updates(self, size: int) -> int:
        """Return the size of the buffer."""
        return self.buffer

    def check_size(self, size: int, num_clients: int) -> None:
        """Refuse a buffer that is larger than the federation, since each client has one update in it at most."""
        if self.buffer > num_clients:
            raise MisconfigurationException(
                f"trainer.schedule.buffer={self.buffer} is more than data.num_clients={num_clients}, and a client has "
                "one update in the buffer at most; take at most that many."
            )

    def course(self, turn: Turn) -> Course:
        """Return the course of a round: clients start and updates arrive until the buffer is full."""
        begin = now = self.state["now"]
        # a copy, as the state changes only once the round is over
        flying = dict(self.state.get("flying", {}))
        gone: dict[int, dict[str, Any]] = {}
        arrived: list[int] = []
        for draw in count():
            idle = [client for client in turn.clients if client not in flying and client not in gone]
            if (free := min(turn.size - len(flying), len(idle))) > 0:
                for client in turn.draw(idle, free, draw):
                    flying[client] = self._started(client, turn, now)
            # nobody is left to train, as with few clients available: the step is by fewer updates
            if not flying:
                break
            # straight to the next arrival: nothing happens in between
            now = min(flight["arrives"] for flight in flying.values())
            for client in sorted(client for client, flight in flying.items() if flight["arrives"] == now):
                gone[client] = flying.pop(client)
                if not gone[client]["lost"]:
                    arrived.append(client)
                if len(arrived) == self.buffer:
                    break
            if len(arrived) == self.buffer:
                break
        took = {client: flight["arrives"] - flight["starts"] for client, flight in gone.items()}
        return Course(Plan(sorted(gone), arrived, gone, took), now - begin, {"now": now, "flying": flying})

    def _started(self, client: int, turn: Turn, now: float) -> dict[str, Any]:
        """Return the record of a training that starts."""
        took, lost = self.took(client, turn.samples(client)), self.is_lost(client, turn.round)
        # a server can't tell a slow client from a lost one, and gives both up after the same time
        if self.timeout is not None and took > self.timeout:
            took, lost = self.timeout, True
        flight = {"round": turn.round, "starts": now, "arrives": now + took, "lost": lost}
        return flight | turn.send(client)
