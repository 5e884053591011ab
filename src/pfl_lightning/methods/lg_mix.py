r"""LG-Mix: each client's model moves by its own change and the clients' mean change, mixed by the spread of features.

Source: Jiang et al., 2024 (https://openreview.net/forum?id=7pWRLDBAtc). Symbols: :math:`w_k` is client k's model,
:math:`w_g` the common one, :math:`h_k, h_g` are their features, :math:`\Delta_k` is the change by client k's training.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import common_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, Server, WeightedAverage, Weighting, client_weights
from pfl_lightning.settings import Unpack


class LGMix(FedAvg):
    r"""Trains the client's own model, and tells how far its features spread beside those of the common model.

    .. math:: s_k = \frac{\operatorname{tr} C(h_k)}{\operatorname{tr} C(h_k) + \operatorname{tr} C(h_g)}

    with the covariances C of features over the batches of a round: :math:`h_k` as the net in training has them, whose
    weights move from batch to batch, and :math:`h_g` those of the received common model in evaluation mode, as in the
    official code. The trace stands for the rate at which a wide net converges. Without a batch, and where no feature
    varies, :math:`s_k` is 1/2.

    The official code leaves the smallest eigenvalue out of the trace, and takes full batches alone; with several local
    epochs all but the last are undone, and here batches of all epochs count.
    Source: Jiang et al., 2024 (https://openreview.net/forum?id=7pWRLDBAtc), by its abstract; the facts are those of its
    official code, med-air/HeteroPFL@2081189. Takes the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if the net's features have no known width.
    """

    sends = FedAvg.sends | {"share"}
    needs = FedAvg.needs | {"global"}
    model_needs = frozenset({"weights"})
    requires = frozenset({"vector features"})
    seen: Tensor
    means: Tensor
    scatter: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.common = FrozenModule(self.net.features, common=common_parameters(self).values())  # h_g
        # the samples so far, their mean features by both models, and their summed squared distances from these
        self.register_buffer("seen", torch.tensor(0.0), persistent=False)
        self.register_buffer("means", torch.zeros(2, feature_size(self.net)), persistent=False)
        self.register_buffer("scatter", torch.zeros(2), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the client's model, and copy the common model's feature extractor."""
        # a checkpoint of one client has its model alone
        if "global" in payload:
            self.assign(payload["global"])
            self.common.take_from(self.net.features)
        super().on_download(payload, data)
        for total in (self.seen, self.means, self.scatter):
            total.zero_()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss, and count the features of both models."""
        x, target = batch
        h = self.net.features(x)
        self.count(torch.stack([h.detach(), self.common(x)]))
        return {"loss": self.loss(h, self.net.classifier(h), target)}

    @torch.no_grad()
    def count(self, features: Tensor) -> None:
        """Take a batch's features into means and squared distances.

        Args:
            features: ``[2, n, d]``, of the client's model and of the common one.
        """
        features, n = features.to(self.means), features.shape[1]
        middle = features.mean(1)
        # by the distance of both means, not by sums of squares, which would cancel for features far from 0
        apart = (middle - self.means).square().sum(1)
        share = n / (self.seen + n)
        self.scatter += (features - middle[:, None]).square().sum((1, 2)) + self.seen * share * apart
        self.means += share * (middle - self.means)
        self.seen += n

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the trained model, and its share of both spreads."""
        own, total = self.scatter[0], self.scatter.sum()
        # by `where` and not by `if`, so that many clients can run at once; both spreads are of equally many samples
        share = torch.where(total > 0, own / torch.where(total > 0, total, 1), 0.5)
        return super().upload(data) | {"share": share}

    def configure_aggregator(self) -> Aggregator:
        """Return the mix of changes."""
        return MixedChanges()


class MixedChanges(WeightedAverage):
    r"""Moves each client's model by a mix of its own change and the mean change, and the common model by the mean.

    .. math::

        \bar\Delta = \sum_{k \in S} p_k \Delta_k, \qquad
        w_k \leftarrow w_k + \lambda_k \Delta_k + (1 - \lambda_k)\,\bar\Delta, \qquad w_g \leftarrow w_g + \bar\Delta

    for the clients S of the round, where :math:`\lambda_k` is the mean of all shares :math:`s_k` that client k has sent
    so far. In the official code all clients take part; here the models of others stay, and a client starts from
    :math:`w_g` where it first takes part. Running statistics are mixed as they are, :math:`\lambda_k` of the client's
    and the rest of the mean, and the common model has the mean: the official code adds changes of these too, by which a
    variance can become negative. A newcomer gets :math:`w_g`.
    Source: as for `LGMix`.

    Args:
        weighting: :math:`p_k`: by ``samples``, as officially, or ``uniform``.
    """

    needs = WeightedAverage.needs | {"share"}
    sends = frozenset({"weights", "global"})

    def __init__(self, weighting: Weighting = "samples") -> None:
        super().__init__(weighting=weighting)

    def setup(self, server: Server) -> None:
        """Start from the common initial model for every client."""
        super().setup(server)
        # all names of a tied parameter, each of which is an entry of the model
        self.parameters = server.parameter_names(remove_duplicate=False)
        # by client id: its model, the mean of its shares, and their number
        self.state |= {"models": {}, "shares": {}, "counts": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        r"""Move all models; log the mean :math:`\lambda_k` of the round's clients."""
        if not updates:
            return {}
        p = [*client_weights(updates, self.weighting).values()]
        # running statistics and counters among them
        mean = weighted_mean([update["weights"] for update in updates.values()], p)
        starts = [self.download(client)["weights"] for client in updates]
        changes = [
            {name: update["weights"][name] - start[name] for name in self.parameters}
            for update, start in zip(updates.values(), starts, strict=True)
        ]
        change = weighted_mean(changes, p)
        for (client, update), start in zip(updates.items(), starts, strict=True):
            count = self.state["counts"].get(client, 0) + 1
            share = self.state["shares"].get(client, 0.0)
            share += (float(update["share"]) - share) / count
            self.state["counts"][client], self.state["shares"][client] = count, share
            around = mean | moved(start, change)
            self.state["models"][client] = {
                # a share of 1 gives the client's own bits
                name: torch.lerp(around[name], own, share) if own.is_floating_point() else own.clone()
                for name, own in update["weights"].items()
            }
        self.state["weights"] = mean | moved(self.state["weights"], change)
        return {"share": sum(self.state["shares"][client] for client in updates) / len(updates)}

    def download(self, client: int) -> Message:
        """Return the client's model and the common one, which is also a client's first."""
        common = self.state["weights"]
        return {"weights": self.state["models"].get(client, common), "global": common}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the common model twice."""
        return {"weights": self.state["weights"], "global": self.state["weights"]}


def moved(model: StateDict, change: StateDict) -> StateDict:
    """Return the changed entries of a model, in the type of the change.

    Args:
        model: the model, by name.
        change: the change of some of its entries, by name.
    """
    return {name: model[name].to(by.dtype) + by for name, by in change.items()}
