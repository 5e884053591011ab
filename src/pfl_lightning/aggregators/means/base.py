"""What a rule in the place of the mean is, and how an aggregator uses one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.aggregators.base import Server
from pfl_lightning.aggregators.means.vectors import Sum, Vectors
from pfl_lightning.messages import StateDict, is_finite
from pfl_lightning.seeds import derive_seed


class Mean(ABC):
    """A rule in the place of the mean of uploads, such as their median."""

    weighted: bool = False
    """Whether clients count by their training samples; else all count alike, whatever they claim to have."""
    own_model: bool = False
    """Whether it compares uploads with a model that the server trains itself, so that it is for whole models alone."""

    @property
    def name(self) -> str:
        """What records call it."""
        return type(self).__name__

    def begin(self, server: Server) -> None:  # noqa: B027 - most need nothing
        """Takes what it needs of the server before the first round.

        Args:
            server: the server's knowledge.

        Raises:
            MisconfigurationException: if that isn't there.
        """

    @abstractmethod
    def of(self, vectors: Vectors) -> Sum:
        """The rule itself.

        Args:
            vectors: of the clients of a round, at least one.
        """

    def check(self, clients: int) -> None:  # noqa: B027 - most fit any
        """Refuses settings that no round can bear.

        Args:
            clients: how many the largest round has.

        Raises:
            MisconfigurationException: if there are too few.
        """


class Assumed:
    """How many uploads of a round a rule takes for bad, f, and how many it can.

    Args:
        rule: the rule's name, for sentences.
        setting: the setting's name, such as ``f``.
        value: f itself, an integer from 0 up, or a share of the round's uploads, which is rounded down.
        slope, offset: the rule needs at least ``slope * f + offset`` uploads, unless f is 0.

    Raises:
        MisconfigurationException: if the value is neither, or a share that is too large for any round.
    """

    def __init__(self, rule: str, setting: str, value: float, slope: int, offset: int) -> None:
        share = isinstance(value, float)
        if isinstance(value, bool) or not (0 <= value < 1 / slope if share else value >= 0):
            raise MisconfigurationException(
                f"aggregator.mean={rule}: {setting}={value} must be a number of clients such as 2, or a share of a "
                f"round's from 0.0 to below {1 / slope:g}, such as 0.1."
            )
        self.rule, self.setting, self.value = rule, setting, value
        self.slope, self.offset = slope, offset

    def asked(self, uploads: int) -> int:
        """The f that is set."""
        # 0.29 of 100 is 28.999… in floating point
        return math.floor(self.value * uploads + 1e-9) if isinstance(self.value, float) else self.value

    def most(self, uploads: int) -> int:
        """The largest f that the rule can bear."""
        return max(0, (uploads - self.offset) // self.slope)

    def among(self, uploads: int) -> int:
        """The f of a round, no more than the rule can bear, of which it warns.

        Args:
            uploads: how many there are.
        """
        asked, most = self.asked(uploads), self.most(uploads)
        if asked > most:
            rank_zero_warn(
                f"aggregator.mean={self.rule}: {self.setting}={self.value} is {asked} of a round's {uploads} uploads, "
                f"of which {most} is the most that can be borne; the round goes on with {most}."
            )
        return min(asked, most)

    def check(self, clients: int) -> None:
        """Refuses an f that no round can bear; see `Mean.check`."""
        asked, most = self.asked(clients), self.most(clients)
        if asked > most:
            raise MisconfigurationException(
                f"aggregator.mean={self.rule}: {self.setting}={self.value} is {asked} of a round's {clients} uploads, "
                f"and {self.rule} needs {self.slope * asked + self.offset} to bear that; take {most} or less, or more "
                "clients."
            )


class Combined(NamedTuple):
    """A mean, and how much of it is each client's.

    Args:
        entries: the mean.
        shares: by client id; empty where that differs from coordinate to coordinate.
    """

    entries: StateDict
    shares: dict[int, float]


def check_models_alone(mean: Mean, aggregator: str, entries: str) -> None:
    """Refuses a rule with a model of the server's where more than models, or others than these, are averaged.

    Args:
        mean: the rule.
        aggregator: who averages.
        entries: what it averages beside models or in their place.

    Raises:
        MisconfigurationException: if it is such a rule.
    """
    if mean.own_model:
        raise MisconfigurationException(
            f"aggregator.mean={mean.name} compares models with one that the server trains, and {aggregator} averages "
            f"{entries} too; take another rule, such as CoordinateMedian."
        )


class Averaging:
    """A rule as an aggregator uses it, round after round.

    Args:
        mean: the rule.
        server: the server's knowledge.

    Raises:
        MisconfigurationException: if the rule can't bear what it shall in any round.
    """

    def __init__(self, mean: Mean, server: Server) -> None:
        self.mean, self.seed = mean, server.seed
        # buffers tell of data and have scales of their own, so that distances are of parameters alone
        self.names = server.parameter_names()
        self.buffers = server.weights.keys() - server.parameter_names(remove_duplicate=False)
        sampling = server.sampling
        mean.check(int(sampling.expected) if sampling and sampling.rate == 1 else server.num_clients)
        mean.begin(server)

    def models(
        self, updates: Mapping[int, Mapping[str, Any]], weights: Mapping[int, float], origin: StateDict, draw: int
    ) -> Combined:
        """The mean of uploaded models.

        Args:
            updates: by client id, at least one, with ``weights``.
            weights: by how much each would count in a plain mean, by client id.
            origin: the model that the clients received.
            draw: number of this mean, from which with the run's seed comes what the rule draws.
        """
        sent = {client: update["weights"] for client, update in updates.items()}
        return self.entries(sent, weights, origin, draw, self.names, self.buffers)

    def entries(
        self,
        sent: Mapping[int, Mapping[str, Tensor]],
        weights: Mapping[int, float],
        origin: StateDict,
        draw: int,
        names: Sequence[str],
        buffers: Collection[str] = (),
    ) -> Combined:
        """The mean of any entries; those that aren't finite are left out, and without others it is the origin.

        Args:
            sent: the entries of each client, by id, at least one.
            weights: as for `models`.
            origin: the same.
            draw: the same.
            names: the entries that distances are taken over.
            buffers: those that aren't parameters, of which medians are taken.
        """
        clients = [client for client in sorted(sent) if is_finite(sent[client])]
        if dropped := sorted(sent.keys() - set(clients)):
            rank_zero_warn(f"{self.mean.name} leaves out what isn't finite, of clients {', '.join(map(str, dropped))}.")
        if not clients:
            return Combined(dict(origin), {})
        counts = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        seed = derive_seed(self.seed, "mean", draw)
        states = [sent[client] for client in clients]
        found = self.mean.of(Vectors(states, origin, names, counts / counts.sum(), seed, buffers=buffers))
        if found.shares is None:
            return Combined(found.entries, {})
        return Combined(
            found.entries, dict.fromkeys(sorted(sent), 0.0) | dict(zip(clients, found.shares.tolist(), strict=True))
        )
