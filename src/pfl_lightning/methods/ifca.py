"""IFCA: k models, of which each client trains the one that fits its data best.

Source: Ghosh et al., 2020 (https://arxiv.org/abs/2006.04088).
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.aggregators import Aggregator, Mean, Server, Weighting, client_weights, mean_loss, mean_model
from pfl_lightning.aggregators.means import Averaging
from pfl_lightning.client import ClientModule
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.seeds import derive_seed


class IFCA(ClientModule):
    r"""Iterative federated clustering: receives k models, chooses one, and trains it.

    .. math:: \hat\jmath = \arg\min_j F_i(w_j)

    where :math:`F_i` is the mean cross-entropy of all of the client's training samples in evaluation mode; the first of
    equals is chosen, and a loss that isn't a number counts as infinite. A client chooses whenever it receives models,
    whether it takes part or is evaluated, and never by what it is evaluated on. Takes the arguments of `FedAvg`.
    Source: Ghosh et al., 2020, Algorithm 1, model averaging (https://arxiv.org/abs/2006.04088).
    """

    sends = ClientModule.sends | {"cluster"}
    needs = frozenset({"cluster_models"})
    cluster: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # kept for use without data: what the client trained last
        self.register_buffer("cluster", torch.tensor(0))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Chooses a model and takes it."""
        models = payload["cluster_models"]
        if data is not None:
            losses = []
            for model in models:
                self.assign(model)
                losses.append(mean_loss(self, data.train, self.task))
            self.cluster.fill_(losses.index(min(losses)))
        self.assign(models[int(self.cluster)])

    def upload(self, data: ClientData) -> Message:
        """The trained model, and which it is."""
        return super().upload(data) | {"cluster": self.cluster}

    def configure_aggregator(self) -> Aggregator:
        """Averages within clusters."""
        return ClusterModels()


class ClusterModels(Aggregator):
    r"""Keeps k models, and averages into each what is sent by those who trained it.

    .. math:: w_j \leftarrow \sum_{i: \hat\jmath_i = j} n_i w_i \Big/ \sum_{i: \hat\jmath_i = j} n_i

    A model that nobody trained stays. The first starts as the common initial one, the others from weights of their own:
    equal ones would never part. What comes of it depends on them; the paper's code redraws them until every model is
    chosen by many, which this doesn't. Payloads are references, so that each model is in memory once.

    Args:
        num_clusters: k, at least 1; 1 is `WeightedAverage`.
        weights: how clients count in a mean: by ``samples``, or ``uniform``.
        mean: a rule in the place of the mean within each cluster, as for `WeightedAverage`, which says how clients
            count. It doesn't keep bad clients from choosing all the same cluster, where they may be most.

    Raises:
        MisconfigurationException: if ``num_clusters`` is less than 1.
    """

    needs = frozenset({"weights", "num_samples", "cluster"})
    sends = frozenset({"cluster_models"})

    def __init__(self, num_clusters: int = 2, weights: Weighting = "samples", mean: Mean | None = None) -> None:
        super().__init__()
        if num_clusters < 1:
            raise MisconfigurationException(
                f"aggregator.num_clusters={num_clusters} must be 1 (which is FedAvg) or more, such as 2."
            )
        self.num_clusters = num_clusters
        self.weights: Weighting = weights
        self.mean = mean
        if mean is not None and not mean.weighted:
            self.weights = "uniform"
            self.needs = self.needs - {"num_samples"}

    @property
    def name(self) -> str:
        """With the rule's, where there is one."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Draws the initial models."""
        self.state["models"] = [server.weights]
        for j in range(1, self.num_clusters):
            with isolate_rng():
                torch.manual_seed(derive_seed(server.seed, "ifca", j))
                drawn = {f"net.{name}": tensor for name, tensor in server.module.new_net().state_dict().items()}
            # in the precision of the others, and only what clients share
            model = {name: drawn.get(name, tensor).to(tensor) for name, tensor in server.weights.items()}
            self.state["models"].append(model)
        if self.mean is not None:
            self.averaging = Averaging(self.mean, server)
            self.state["means"] = 0

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Averages, and tells how many of the models were trained."""
        groups: dict[int, Updates] = {}
        models = self.state["models"]
        for client, update in updates.items():
            if 0 <= (j := int(update["cluster"])) < len(models):
                groups.setdefault(j, {})[client] = update
                continue
            rank_zero_warn(
                f"ClusterModels leaves out client {client}: its cluster={j} is no model's number, from 0 to "
                f"{len(models) - 1}."
            )
        means = {j: self._mean(groups[j], models[j]) for j in sorted(groups)}
        self.state["models"] = [means.get(j, model) for j, model in enumerate(models)]
        return {"clusters": float(len(groups))} if updates else {}

    def _mean(self, updates: Updates, model: StateDict) -> StateDict:
        """Of the uploads of those who trained a model."""
        weights = client_weights(updates, self.weights)
        if self.mean is None:
            return mean_model(updates, weights)
        self.state["means"] += 1
        return self.averaging.models(updates, weights, model, self.state["means"]).entries

    def download(self, client: int) -> Message:
        """All of the models."""
        return {"cluster_models": self.state["models"]}

    def global_model(self) -> StateDict:
        """The model of all, if there is only one."""
        model: StateDict = self.state["models"][0]
        return model if self.num_clusters == 1 else {}
