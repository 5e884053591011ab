"""The server side of a method: its base class, and averaging by sample counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Adam

from pfl_lightning.exchange import Record, StateDict, Updates, weighted_mean
from pfl_lightning.optimizers import checked_optimizer

if TYPE_CHECKING:
    from pfl_lightning.client import FedAvg
    from pfl_lightning.data import FederatedDataModule

AnyAggregator = TypeVar("AnyAggregator", bound="Aggregator")


@dataclass(frozen=True)
class Server:
    """What a server knows before the first round.

    Args:
        num_clients: clients of the federation, with ids ``0 .. num_clients - 1``.
        weights: the common initial model, as far as clients share it.
        module: a client module to run nets through, best with `torch.func.functional_call` and weights of the
            server's own. It stands on the device of the clients, while `Aggregator.state` is on the CPU, and engines
            train in it: what an aggregator leaves in it is overwritten. Its `FedAvg.new_net` gives further nets.
        data: the data module; its `server_data` is the server's own public or proxy set, if there is one.
        seed: seed of the federation; draw from ``derive_seed(seed, NAME, round)``.
    """

    num_clients: int
    weights: StateDict
    module: "FedAvg"
    data: "FederatedDataModule"
    seed: int

    def parameter_names(self, remove_duplicate: bool = True) -> list[str]:
        """Names of the parameters that clients share: entries of `weights` without buffers.

        Args:
            remove_duplicate: whether a tied parameter has its first name alone, as where models are compared, or all
                its names, as where each entry of `weights` is changed.
        """
        parameters = self.module.named_parameters(remove_duplicate=remove_duplicate)
        return [name for name, _ in parameters if name in self.weights]


class Aggregator:
    """A method's server side: takes the updates of a round, leaves each client's next payload.

    The base class sends nothing and learns nothing: the server of clients that don't communicate. A method overrides
    `aggregate` and `download`, keeps all that it remembers in `state` (tensors, numbers, strings, and dicts and
    lists of them: it goes into the checkpoint as it is) and names the entries it `needs` from an update and `sends`
    in a payload, so that a pair of client and aggregator that doesn't fit is refused before the first round.
    """

    needs: frozenset[str] = frozenset()
    """Entries that it reads from updates; an instance may set its own by its settings."""
    sends: frozenset[str] = frozenset()
    """Entries of its payloads."""
    caches: frozenset[str] = frozenset()
    """Attributes besides `state` that may change after `setup`, as they are made from `state` alone."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """What records and checkpoints call it."""
        return type(self).__name__

    def setup(self, server: Server) -> None:
        """Fills `state` before the first round; on resume the checkpoint's state replaces it.

        Args:
            server: the server's knowledge; keep a reference to what later rounds need of it.
        """

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes a round's updates.

        Args:
            updates: by client id, sorted by it; only clients that took part and did not diverge. Pair by id: a
                rule that pairs lists by position is wrong. If it is empty, the state stays as it is.
            round: the round's number, from 0.

        Returns:
            Numbers for the round's record, logged as ``server/NAME``.
        """
        return {}

    def download(self, client: int) -> Record:
        """What a client receives now.

        It is asked for often (training, evaluation, counting, checkpoints), so let it be pure and cheap: tensors of
        `state` are returned as they are, and the client copies them.
        """
        return {}

    def global_model(self) -> StateDict:
        """The server's one model, as far as it has one; empty where every model is somebody's own."""
        return {}

    def find(self, kind: type[AnyAggregator]) -> AnyAggregator | None:
        """Itself if it is of a kind, else None; `Together` looks into its server sides, and the first counts."""
        return self if isinstance(self, kind) else None


class WeightedAverage(Aggregator):
    r"""Federated averaging: :math:`w \leftarrow \sum_{k \in S} \frac{n_k}{\sum_{m \in S} n_m} w_k`.

    The mean is over the clients :math:`S` of the round, weighted by their training samples; each client receives it,
    whether it took part or not. Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).
    """

    needs = frozenset({"weights", "num_samples"})
    sends = frozenset({"weights"})

    def setup(self, server: Server) -> None:
        """Starts from the common initial model."""
        self.state["weights"] = server.weights

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Replaces the global model by the mean of the uploads."""
        if updates:
            self.average(updates, sample_shares(updates))
        return {}

    def average(self, updates: Updates, shares: Mapping[int, float]) -> None:
        """Makes a weighted mean of uploads the global model, and keeps the weights as ``state["shares"]``.

        Args:
            updates: by client id, at least one.
            shares: the weight of each of them, by client id; used as they are.
        """
        weights = [shares[client] for client in updates]
        self.state["weights"] = weighted_mean([update["weights"] for update in updates.values()], weights)
        self.state["shares"] = dict(shares)

    def download(self, client: int) -> Record:
        """The global model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """The global model."""
        weights: StateDict = self.state["weights"]
        return weights


class Together(Aggregator):
    """Several server sides at once, each for entries of its own: models by one, prototypes by another.

    A payload is the union of theirs; the global model is the first one's that has one.

    Args:
        aggregators: the server sides, at least one; no two send the same entry.

    Raises:
        MisconfigurationException: if there are none, or two send the same entry.
    """

    def __init__(self, aggregators: list[Aggregator]) -> None:
        super().__init__()
        entries = [entry for aggregator in aggregators for entry in aggregator.sends]
        if not aggregators or len(set(entries)) < len(entries):
            names = ", ".join(type(aggregator).__name__ for aggregator in aggregators)
            raise MisconfigurationException(
                f"aggregator.aggregators=[{names}] must be at least one, and no two may send the same entry."
            )
        self.aggregators = aggregators
        self.needs = frozenset().union(*(aggregator.needs for aggregator in aggregators))
        self.sends = frozenset(entries)

    @property
    def name(self) -> str:
        """The names of all; a subclass has its own."""
        return super().name if type(self) is not Together else "+".join(each.name for each in self.aggregators)

    @property
    def state(self) -> dict[str, Any]:
        """The states of all, by position."""
        return {str(place): aggregator.state for place, aggregator in enumerate(self.aggregators)}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        for place, aggregator in enumerate(getattr(self, "aggregators", ())):
            aggregator.state = state[str(place)]

    def setup(self, server: Server) -> None:
        """Sets all up."""
        for aggregator in self.aggregators:
            aggregator.setup(server)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Hands the updates to each, and returns what all of them log."""
        logs: dict[str, float] = {}
        for aggregator in self.aggregators:
            logs |= aggregator.aggregate(updates, round)
        return logs

    def download(self, client: int) -> Record:
        """The union of their payloads."""
        payload: Record = {}
        for aggregator in self.aggregators:
            payload |= aggregator.download(client)
        return payload

    def global_model(self) -> StateDict:
        """The first one's that has one."""
        return next((model for a in self.aggregators if (model := a.global_model())), {})

    def find(self, kind: type[AnyAggregator]) -> AnyAggregator | None:
        """The first of a kind."""
        return super().find(kind) or next((found for a in self.aggregators if (found := a.find(kind))), None)


def sample_shares(updates: Updates) -> dict[int, float]:
    """Each client's share of the training samples of all.

    >>> sample_shares({4: {"num_samples": torch.tensor(30)}, 7: {"num_samples": torch.tensor(10)}})
    {4: 0.75, 7: 0.25}

    Args:
        updates: by client id.
    """
    counts = {client: float(update["num_samples"]) for client, update in updates.items()}
    total = sum(counts.values())
    return {client: count / total for client, count in counts.items()}


def server_optimizer(given: OptimizerCallable | None, lr: float) -> OptimizerCallable:
    """The optimizer of a server that learns: the given one, or ``Adam(lr, betas=(0.5, 0.999))``.

    It is no default argument of anybody's, because the command line can't print a tuple in a lambda.

    Args:
        given: as configured; None takes Adam.
        lr: Adam's learning rate.

    Raises:
        MisconfigurationException: if the optimizer refuses its settings.
    """
    optimizer = given or partial(Adam, lr=lr, betas=(0.5, 0.999))
    checked_optimizer(optimizer, [nn.Parameter(torch.zeros(1))], "aggregator.optimizer")
    return optimizer
