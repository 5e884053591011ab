"""CFL: clusters of clients with a model for each cluster, split in two when updates disagree.

Source: Sattler, Müller and Samek, 2020 (https://arxiv.org/abs/1910.01991). Symbols: Delta_i the update of client i, by
which its parameters changed, and S_im = cos(Delta_i, Delta_m).
"""

from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Message, StateDict, Updates, weighted_mean
from pfl_lightning.server import Aggregator, Mean, Server, Weighting, client_weights, inner_products, mean_model
from pfl_lightning.server.means import Averaging
from pfl_lightning.settings import check_least


class CFL(Aggregator):
    r"""Clustered federated learning: federated averaging within clusters, which split and never merge.

    All clients begin in one cluster. After a round, a cluster c is split if the mean of its updates is small and a
    client's update is not,

    .. math::

        \Bigl\lVert \frac1{|c|} \sum_{i \in c} \Delta_i \Bigr\rVert < \varepsilon_1, \qquad
        \max_{i \in c} \lVert \Delta_i \rVert > \varepsilon_2, \qquad |c| > 2

    into the two clusters that complete linkage makes of the distances :math:`1 - S_{im}`, as in the official code; the
    paper minimises the largest similarity across, and asks for a gap. Then each cluster takes the mean of its clients'
    uploads. Updates are of parameters, and their norms grow with the learning rate and the number of steps: the record
    has ``server/mean_norm``, the smallest of all clusters, and ``server/max_norm``, the largest of all clients.

    Until a first split this is `FedAvg` with ``weighting=uniform``. On scikit-learn's digits none came in 50 rounds, as
    no update was longer than 0.6: 73 % after 15 rounds and 89 % after 50, where `FedAvg` has 73 % and 88 %, and `Local`
    95 % and 97 %. With ``eps2=0.4`` four to six clusters have 97 % (docs/results.md, "Defaults").
    Source: Sattler et al., 2020 (https://arxiv.org/abs/1910.01991).

    Args:
        eps1: :math:`\varepsilon_1`, at least 0; 0 never splits, which is federated averaging.
        eps2: :math:`\varepsilon_2`, at least 0.
        warmup: number of first rounds without splits, at least 0.
        weights: client weights in a mean, ``uniform`` as in the official code, or by ``samples``.
        absent: treatment of absent members in a split: by their ``last`` update, of which the server then keeps one for
            each client, or not at all (``skip``). A member without an update follows the larger half.
        mean: a rule instead of the mean within each cluster, as for `WeightedAverage`; ``weights`` then count only in
            the norms.

    Raises:
        MisconfigurationException: if a value is negative, or clients share no parameters.
    """

    example_level = True
    fixed_clients = True
    needs = frozenset({"weights", "num_samples"})
    sends = frozenset({"weights"})
    meets_newcomers = True

    def __init__(
        self,
        eps1: float = 0.4,
        eps2: float = 0.9,
        warmup: int = 20,
        weights: Weighting = "uniform",
        absent: Literal["last", "skip"] = "last",
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        check_least("aggregator", eps1=(eps1, 0), eps2=(eps2, 0), warmup=(warmup, 0))
        self.eps1, self.eps2, self.warmup = eps1, eps2, warmup
        self.weights = weights
        self.absent = absent
        self.mean = mean

    @property
    def name(self) -> str:
        """The class's name, with the rule's in addition where there is a rule."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Start with all clients in one cluster, with the common initial model."""
        self.names = server.parameter_names()
        if not self.names:
            raise MisconfigurationException(
                f"aggregator CFL compares clients by the parameters that they share, and model "
                f"{type(server.module).__name__} shares none; take aggregator WeightedAverage."
            )
        self.state |= {"clusters": [list(range(server.num_clients))], "models": [server.weights], "updates": {}}
        if self.mean is not None:
            self.averaging = Averaging(self.mean, server)
            self.state["means"] = 0

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Split clusters and average within each; log the number of clusters and the norms."""
        if not updates:
            return {}
        # deltas are against the models that clients received, before any split of this round
        judged = self.state["updates"] | {client: self._delta(client, update) for client, update in updates.items()}
        if self.absent == "last":
            self.state["updates"] = judged
        clusters, models, norms = [], [], []
        for members, model in zip(self.state["clusters"], self.state["models"], strict=True):
            sent = {client: judged[client] for client in members if client in judged}
            halves = [members]
            if sent:
                products = inner_products([update["delta"] for update in sent.values()], self.names)
                weights = torch.tensor(list(client_weights(sent, self.weights).values()), dtype=torch.float64)
                # norm of the mean from inner products: |sum p_i Delta_i|^2 = p^T (Delta Delta^T) p
                mean_norm = float((weights @ products @ weights).clamp_min(0).sqrt())
                max_norm = float(products.diagonal().max().sqrt())
                # both are logged, so that a first run tells which eps1 and eps2 would split
                norms.append((mean_norm, max_norm))
                if mean_norm < self.eps1 and max_norm > self.eps2 and len(sent) > 2 and round >= self.warmup:
                    halves = split(members, list(sent), products)
            for half in halves:
                # a half without a client in the round keeps the cluster's model
                present = {client: update for client, update in updates.items() if client in half}
                clusters.append(half)
                models.append(self._mean(present, model) if present else model)
        self.state |= {"clusters": clusters, "models": models}
        means, largest = zip(*norms, strict=True)
        return {"clusters": float(len(clusters)), "mean_norm": min(means), "max_norm": max(largest)}

    def _mean(self, updates: Updates, model: StateDict) -> StateDict:
        """Return the mean of a cluster's uploads.

        Args:
            updates: updates of the cluster's clients in the round, by id.
            model: the cluster's model, from which they started.
        """
        if self.mean is None:
            return mean_model(updates, client_weights(updates, self.weights))
        weights = client_weights(updates, "samples" if self.mean.weighted else "uniform")
        self.state["means"] += 1
        return self.averaging.models(updates, weights, model, self.state["means"]).entries

    def _delta(self, client: int, update: Message) -> Message:
        r"""Return :math:`\Delta_i` with the client's number of samples.

        Args:
            client: the client's id.
            update: its update.
        """
        start, end = self.download(client)["weights"], update["weights"]
        return {"delta": {name: end[name] - start[name] for name in self.names}, "num_samples": update["num_samples"]}

    def download(self, client: int) -> Message:
        """Return the model of the client's cluster."""
        cluster = next(index for index, members in enumerate(self.state["clusters"]) if client in members)
        return {"weights": self.state["models"][cluster]}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the cluster model nearest in direction to the newcomer's update, seen from the mean of these models.

        Before the first update, the newcomer receives this mean.
        """
        models = self.state["models"]
        if len(models) == 1:
            return {"weights": models[0]}
        middle = weighted_mean(models, [1 / len(models)] * len(models))
        if update is None:
            return {"weights": middle}
        products = inner_products([update["weights"], *models], self.names, origin=middle)
        norms = products.diagonal().clamp_min(0).sqrt()
        # cosines up to the factor of the newcomer's own norm, which is the same for all clusters
        nearness = products[0, 1:-1] / (norms[1:-1] + 1e-12)
        return {"weights": models[int(nearness.argmax())]}

    def global_model(self) -> StateDict:
        """Return the model of all clients as long as one cluster has all clients; else nothing."""
        model: StateDict = self.state["models"][0]
        return model if len(self.state["models"]) == 1 else {}


def split(members: list[int], sent: list[int], products: Tensor) -> list[list[int]]:
    """Return two clusters instead of one, by complete linkage of the cosines of updates.

    >>> split([0, 3, 4, 7, 9], [0, 4, 9], torch.tensor([[1.0, -1.0, 0.9], [-1.0, 1.0, -0.9], [0.9, -0.9, 1.0]]))
    [[0, 3, 7, 9], [4]]

    Args:
        members: ids of the cluster, ascending.
        sent: ids of the members with an update, at least two.
        products: inner products ``[n, n]`` of their updates.

    Returns:
        Ids, ascending; the cluster with the smallest first. Members without an update are in the larger one.
    """
    # imported here: the import takes a second, and no other method needs it
    from sklearn.cluster import AgglomerativeClustering

    norms = products.diagonal().sqrt()
    similarity = products / (norms[:, None] * norms + 1e-12)
    clustering = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    labels = clustering.fit_predict((1 - similarity).numpy())
    halves = sorted([client for client, label in zip(sent, labels, strict=True) if label == side] for side in (0, 1))
    max(halves, key=len).extend(set(members) - set(sent))
    return sorted(map(sorted, halves))
