"""The base class of robust rules, and their use by an aggregator."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.messages import StateDict, is_finite
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server.base import Server
from pfl_lightning.server.means.vectors import Sum, Vectors


class Mean(ABC):
    """A rule in place of the mean of uploads, such as the median."""

    weighted: bool = False
    """Clients count by their numbers of training samples; else all count alike, whatever numbers they claim."""
    own_model: bool = False
    """The rule compares uploads with a model trained by the server, and so takes whole models alone."""

    @property
    def name(self) -> str:
        """The rule's name in records."""
        return type(self).__name__

    def begin(self, server: Server) -> None:  # noqa: B027 - most need nothing
        """Prepare the rule before the first round, for example by taking the server's samples.

        Args:
            server: the server's knowledge.

        Raises:
            MisconfigurationException: if the server lacks something the rule needs.
        """

    @abstractmethod
    def of(self, vectors: Vectors) -> Sum:
        """Return the rule's result for the uploads of a round.

        Args:
            vectors: the uploads, at least one.
        """

    def check(self, clients: int) -> None:  # noqa: B027 - most fit any
        """Refuse settings too large for any round.

        Args:
            clients: number of clients in the largest round.

        Raises:
            MisconfigurationException: if there are too few.
        """


class Assumed:
    """The number f of uploads taken for bad in a round, by a rule's setting and its breakdown point.

    Args:
        rule: the rule's name, for sentences.
        setting: the setting's name, such as ``f``.
        value: f itself, an integer from 0 up, or a share of the round's uploads, rounded down to whole ones.
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
        """Return the f of the setting.

        Args:
            uploads: number of uploads in the round.
        """
        # 0.29 of 100 is 28.999… in floating point
        return math.floor(self.value * uploads + 1e-9) if isinstance(self.value, float) else self.value

    def most(self, uploads: int) -> int:
        """Return the rule's breakdown point, the largest f it bears.

        Args:
            uploads: number of uploads in the round.
        """
        return max(0, (uploads - self.offset) // self.slope)

    def among(self, uploads: int) -> int:
        """Return the f of a round; warn where the setting's f exceeds the breakdown point, which then stands.

        Args:
            uploads: number of uploads in the round.
        """
        asked, most = self.asked(uploads), self.most(uploads)
        if asked > most:
            # a cohort may be small by chance or by failures: a federation of many rounds doesn't end by one of them
            rank_zero_warn(
                f"aggregator.mean={self.rule}: {self.setting}={self.value} is {asked} of a round's {uploads} uploads, "
                f"of which {most} is the most that can be borne; the round goes on with {most}."
            )
        return min(asked, most)

    def check(self, clients: int) -> None:
        """Refuse an f above the breakdown point of the largest round; see `Mean.check`.

        Args:
            clients: number of clients in the largest round.
        """
        asked, most = self.asked(clients), self.most(clients)
        if asked > most:
            raise MisconfigurationException(
                f"aggregator.mean={self.rule}: {self.setting}={self.value} is {asked} of a round's {clients} uploads, "
                f"and {self.rule} needs {self.slope * asked + self.offset} to bear that; take {most} or less, or more "
                "clients."
            )


class Combined(NamedTuple):
    """A rule's result, and each client's share in the result.

    Args:
        entries: the result.
        shares: by client id; empty for rules by coordinate, whose shares differ between coordinates.
    """

    entries: StateDict
    shares: dict[int, float]


def check_models_alone(mean: Mean, aggregator: str, entries: str) -> None:
    """Refuse a rule with a server's own model for an aggregator of entries other than whole models.

    Args:
        mean: the rule.
        aggregator: the aggregator's name.
        entries: the entries averaged beside models or in their place, in words.

    Raises:
        MisconfigurationException: if the rule is one.
    """
    if mean.own_model:
        raise MisconfigurationException(
            f"aggregator.mean={mean.name} compares models with one that the server trains, and {aggregator} averages "
            f"{entries} too; take another rule, such as CoordinateMedian."
        )


class Averaging:
    """Apply a rule to the updates of each round, for an aggregator.

    Args:
        mean: the rule.
        server: the server's knowledge.

    Raises:
        MisconfigurationException: if the rule's settings are too large for any round.
    """

    def __init__(self, mean: Mean, server: Server) -> None:
        self.mean, self.seed = mean, server.seed
        # distances are of parameters alone: running statistics follow a client's data, on scales of their own
        self.names = server.parameter_names()
        self.buffers = server.weights.keys() - server.parameter_names(remove_duplicate=False)
        sampling = server.sampling
        # with a share of clients drawn, only the largest possible cohort is known: all of them
        mean.check(int(sampling.expected) if sampling and sampling.rate == 1 else server.num_clients)
        mean.begin(server)

    def models(
        self, updates: Mapping[int, Mapping[str, Any]], weights: Mapping[int, float], origin: StateDict, draw: int
    ) -> Combined:
        """Return the rule's result for uploaded models.

        Args:
            updates: by client id, at least one, with ``weights``.
            weights: each client's weight in a plain mean, by client id.
            origin: the model received by the clients.
            draw: number of this call in the run; with the run's seed the seed of the rule's draws.
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
        """Return the rule's result for any entries, without clients whose entries aren't finite.

        Without finite entries from anybody the result is the origin.

        Args:
            sent: the entries of each client, by id, at least one.
            weights: as for `models`.
            origin: the entries received by the clients.
            draw: as for `models`.
            names: names of the entries for distances.
            buffers: names of the entries that aren't parameters, for medians.
        """
        clients = [client for client in sorted(sent) if is_finite(sent[client])]
        if dropped := sorted(sent.keys() - set(clients)):
            rank_zero_warn(f"{self.mean.name} leaves out what isn't finite, of clients {', '.join(map(str, dropped))}.")
        if not clients:
            return Combined(dict(origin), {})
        # in the order of ids, as sums in another order have other last bits
        counts = torch.tensor([weights[client] for client in clients], dtype=torch.float64)
        seed = derive_seed(self.seed, "mean", draw)
        states = [sent[client] for client in clients]
        combined = self.mean.of(Vectors(states, origin, names, counts / counts.sum(), seed, buffers=buffers))
        if combined.shares is None:
            return Combined(combined.entries, {})
        return Combined(
            combined.entries,
            dict.fromkeys(sorted(sent), 0.0) | dict(zip(clients, combined.shares.tolist(), strict=True)),
        )
