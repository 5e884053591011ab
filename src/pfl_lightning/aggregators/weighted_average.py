"""Averaging by sample counts."""

from collections.abc import Mapping
from functools import partial

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Adam

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.client.optimizers import checked_optimizer
from pfl_lightning.messages import Message, StateDict, Updates, weighted_mean


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

    def download(self, client: int) -> Message:
        """The global model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """The global model."""
        weights: StateDict = self.state["weights"]
        return weights


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
