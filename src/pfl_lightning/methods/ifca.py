"""IFCA: k models, and each client trains the best for the client's data.

Source: Ghosh et al., 2020 (https://arxiv.org/abs/2006.04088).
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Mean, Server, Weighting, client_weights, mean_loss, mean_model
from pfl_lightning.server.means import Averaging
from pfl_lightning.settings import Unpack


class IFCA(ClientModule):
    r"""Iterative federated clustering: chooses one of k received models, and trains the chosen one.

    .. math:: \hat\jmath = \arg\min_j F_i(w_j)

    where :math:`F_i` is the mean cross-entropy of all of the client's training samples in evaluation mode. The first of
    equal models is chosen, and a loss of NaN counts as infinite. A client chooses on each download, for training and
    for evaluation, and always by training samples. Takes the arguments of `FedAvg`.
    Source: Ghosh et al., 2020, Algorithm 1, model averaging (https://arxiv.org/abs/2006.04088).
    """

    sends = ClientModule.sends | {"cluster"}
    needs = frozenset({"cluster_models"})
    cluster: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        # an entry of the state: outside a federation, without data, the client's last choice holds
        self.register_buffer("cluster", torch.tensor(0))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Choose a model by the training loss, and load the chosen one."""
        models = payload["cluster_models"]
        if data is not None:
            losses = []
            for model in models:
                # the module is this client's alone at this moment, so that models can be tried in it
                self.assign(model)
                losses.append(mean_loss(self, data.train, self.task))
            self.cluster.fill_(losses.index(min(losses)))
        self.assign(models[int(self.cluster)])

    def upload(self, data: ClientData) -> Message:
        """Return the trained model with the number of the cluster."""
        return super().upload(data) | {"cluster": self.cluster}

    def configure_aggregator(self) -> Aggregator:
        """Return an average within each cluster."""
        return ClusterModels()


class ClusterModels(Aggregator):
    r"""Keeps k models, and averages into each model the uploads of the clients with this choice.

    .. math:: w_j \leftarrow \sum_{i: \hat\jmath_i = j} n_i w_i \Big/ \sum_{i: \hat\jmath_i = j} n_i

    A model without a client stays. The first one is the common initial model, the others have initial weights of their
    own, since equal models would never separate. The result depends on these weights; the paper's code redraws them
    until many clients choose each model, which isn't done here. Payloads are references, so that each model is in
    memory once.

    Args:
        num_clusters: k, at least 1; 1 is `WeightedAverage`.
        weights: client weights in a mean: by ``samples``, or ``uniform``.
        mean: a rule instead of the mean within each cluster, as for `WeightedAverage`, which also decides the clients'
            weights. It doesn't keep malicious clients from all choosing one cluster, where they may be the majority.

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
        """The class's name, with the rule's in addition where there is a rule."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Draw the initial models."""
        self.state["models"] = [server.weights]
        for j in range(1, self.num_clusters):
            with isolate_rng():
                torch.manual_seed(derive_seed(server.seed, "ifca", j))
                drawn = {f"net.{name}": tensor for name, tensor in server.module.new_net().state_dict().items()}
            # equal models stay equal: every client would choose the first one for ever
            own = {name: tensor for name, tensor in server.weights.items() if name in drawn}
            if all(torch.equal(drawn[name].to(tensor), tensor) for name, tensor in own.items()):
                raise MisconfigurationException(
                    f"model.net={type(server.module.net).__name__} begins each of aggregator.num_clusters="
                    f"{self.num_clusters} models with the same weights; give a class or function that draws its weights"
                )
            # in the first model's precision, and without entries that clients don't share
            model = {name: drawn.get(name, tensor).to(tensor) for name, tensor in server.weights.items()}
            self.state["models"].append(model)
        if self.mean is not None:
            self.averaging = Averaging(self.mean, server)
            self.state["means"] = 0

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average within clusters; log the number of models with clients."""
        groups: dict[int, Updates] = {}
        models = self.state["models"]
        for client, update in updates.items():
            # the number comes from a client, which may be wrong or malicious
            if 0 <= (j := int(update["cluster"])) < len(models):
                # in the order of the client ids, within each cluster too
                groups.setdefault(j, {})[client] = update
                continue
            rank_zero_warn(
                f"ClusterModels leaves out client {client}: its cluster={j} is no model's number, from 0 to "
                f"{len(models) - 1}."
            )
        # clusters in ascending order: a rule may draw random numbers by the count of means
        means = {j: self._mean(groups[j], models[j]) for j in sorted(groups)}
        self.state["models"] = [means.get(j, model) for j, model in enumerate(models)]
        return {"clusters": float(len(groups))} if updates else {}

    def _mean(self, updates: Updates, model: StateDict) -> StateDict:
        """Return the mean of the uploads of one cluster.

        Args:
            updates: updates of the cluster's clients, by id.
            model: the cluster's model before the round.
        """
        weights = client_weights(updates, self.weights)
        if self.mean is None:
            return mean_model(updates, weights)
        self.state["means"] += 1
        return self.averaging.models(updates, weights, model, self.state["means"]).entries

    def download(self, client: int) -> Message:
        """Return all k models."""
        return {"cluster_models": self.state["models"]}

    def global_model(self) -> StateDict:
        """Return the only model if k is 1, else nothing."""
        model: StateDict = self.state["models"][0]
        return model if self.num_clusters == 1 else {}
