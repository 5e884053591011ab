"""FedFomo: each client mixes the others' models by how much each would lower its own validation loss.

Source: Zhang et al., 2021 (https://arxiv.org/abs/2012.08565). Symbols: L_i the validation loss of client i, w_i^old its
model before its last local training, w_m what it receives, M how many that is, P_im client i's affinity to client m.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Aggregator, ModelPool, Server, mean_loss
from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import shared_entries, trained_parameters
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import Message, StateDict, Updates, detached, weighted_mean
from pfl_lightning.methods.copies import add_copy, copy_net
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed


class FedFomo(ClientModule):
    r"""First-order model optimization: starts local training from a mix of received models and its own.

    .. math::

        \Delta_m = \frac{L_i(w_i^{old}) - L_i(w_m)}{\lVert w_m - w_i^{old} \rVert + 10^{-5}}, \qquad
        a_m = \frac{\max(\Delta_m, 0)}{\sum_j \max(\Delta_j, 0)}, \qquad
        w_i \leftarrow \sum_m a_m w_m

    over the received models and the client's own, which it kept; where none lowers the loss, it goes on with its own.
    A loss that isn't finite gives the model no weight. The distance is of parameters. The mix is made, and evaluated,
    with what the server has when the client is asked; the tables of others are of the model after local training,
    ``trainer.evaluate=after``.

    Losses are taken on the client's validation part, as the paper holds one out for this. That part also selects the
    round that is reported: FedFomo's ``val/acc`` flatters it, and doesn't compare with that of other methods; its test
    accuracy does. A client keeps two models: the one that it trained, and the one that it started from.
    Source: Zhang et al., 2021, Algorithm 1 (https://arxiv.org/abs/2012.08565).

    Args:
        norm: the distance in the denominator: ``l2``, or ``l1``, the official code's default.
        weigh_on: where losses are taken: ``val``, or ``train``, for data without a validation part; a client's own
            model then has the advantage of having learnt from these samples.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a client has no samples to weigh models on.
    """

    sends = ClientModule.sends | {"affinity"}
    needs = frozenset({"models"})
    caches = frozenset({"gains"})
    old: Net

    def __init__(
        self, norm: Literal["l2", "l1"] = "l2", weigh_on: Literal["val", "train"] = "val", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.order = {"l1": 1, "l2": 2}[norm]
        self.weigh_on = weigh_on
        add_copy(self, "old", self.net)  # w_i^old
        self.old.requires_grad_(False)
        # Delta_m by client, new at each download
        self.gains: dict[int, float] = {}

    def is_personal(self, name: str) -> bool:
        """Everything: what is sent stays too."""
        return True

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Mixes; outside a federation, where there is nothing to weigh models on, the own model stays."""
        if data is None:
            return
        part = data.train if self.weigh_on == "train" else data.val
        if not len(part):
            raise MisconfigurationException(
                "data.val_fraction=0 leaves model FedFomo no samples to weigh models on; take data.val_fraction=0.1, "
                "or model.weigh_on=train."
            )
        own = detached(shared_entries(self, self.state_dict()))
        models = dict(sorted({**payload["models"], self.client_id: own}.items()))
        before = mean_loss(self.old, part, self.task)
        self.gains = {m: self._gain(model, before, part) for m, model in models.items()}
        helpful = {m: gain for m, gain in self.gains.items() if gain > 0}
        total = math.fsum(helpful.values())
        a = [gain / total for gain in helpful.values()]
        self.assign(weighted_mean([models[m] for m in helpful], a) if helpful else own)
        copy_net(self, "old")

    def _gain(self, model: StateDict, before: float, part: Samples) -> float:
        """Delta_m; 0 where it isn't finite."""
        self.assign(model)
        pairs = zip(*(trained_parameters(self, path).values() for path in ("net", "old")), strict=True)
        gaps = torch.stack([torch.linalg.vector_norm(w - old, ord=self.order) for w, old in pairs])
        gain = (before - mean_loss(self, part, self.task)) / (
            float(torch.linalg.vector_norm(gaps, ord=self.order)) + 1e-5
        )
        return gain if math.isfinite(gain) else 0.0

    def upload(self, data: ClientData) -> Message:
        """The trained model, and what the received ones were worth."""
        gains = {m: torch.tensor(gain, dtype=torch.float64) for m, gain in self.gains.items()}
        return super().upload(data) | {"affinity": gains}

    def configure_aggregator(self) -> Aggregator:
        """Hands models out."""
        return AffinityPool()


class AffinityPool(ModelPool):
    r"""Sends each client the models of those others that it had most of so far.

    .. math:: P_{im} \leftarrow P_{im} + \Delta_{im}

    for each model that client i weighed in the round. It is sent the M of the highest :math:`P_{im}`; in the place of
    each, with probability epsilon, a random one of those that are left. A model that was never sent stands at 0, above
    those that did harm. Source: Zhang et al., 2021 (https://arxiv.org/abs/2012.08565).

    Args:
        num_models: M, the most models of others that a client is sent, at least 1; None sends all.
        epsilon: probability of a random choice in the first round, in [0, 1]; the official code's is 0.3.
        epsilon_decay: what it falls by in each round, at least 0.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    needs = ModelPool.needs | {"affinity"}

    def __init__(self, num_models: int | None = None, epsilon: float = 0.0, epsilon_decay: float = 0.05) -> None:
        super().__init__()
        if num_models is not None and num_models < 1:
            raise MisconfigurationException(f"aggregator.num_models={num_models} must be 1 or more, or null for all.")
        if not (0 <= epsilon <= 1 and epsilon_decay >= 0):
            raise MisconfigurationException(
                f"aggregator.epsilon={epsilon} must be a probability from 0 to 1, and aggregator.epsilon_decay="
                f"{epsilon_decay} 0 or more, such as 0.3 and 0.05."
            )
        self.num_models, self.epsilon, self.epsilon_decay = num_models, epsilon, epsilon_decay

    def setup(self, server: Server) -> None:
        """Starts with no models and no preferences."""
        super().setup(server)
        self.seed = server.seed
        self.state |= {"affinity": {}, "round": 0}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Takes models and preferences."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        for client, update in updates.items():
            row = self.state["affinity"].setdefault(client, {})
            for other, gain in update["affinity"].items():
                row[other] = row.get(other, 0.0) + float(gain)
        self.state["round"] = round + 1
        return {}

    def download(self, client: int) -> Message:
        """The chosen models, by client id."""
        return self._chosen(client, self.state["affinity"].get(client, {}))

    def welcome(self, client: int, update: Message | None) -> Message:
        """The same by what the newcomer has just made of models, of which it knows nothing at first."""
        gains = {} if update is None else update["affinity"]
        return self._chosen(client, {other: float(gain) for other, gain in gains.items()})

    def _chosen(self, client: int, row: Mapping[int, float]) -> Message:
        """The models that stand highest in a row of affinities, or random ones."""
        models = super().download(client)["models"]
        if self.num_models is None or self.num_models >= len(models):
            return {"models": models}
        ranked = sorted(models, key=lambda other: (-row.get(other, 0.0), other))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedfomo", self.state["round"], client))
        epsilon = self.epsilon - self.epsilon_decay * self.state["round"]
        chosen = []
        for explore, place in torch.rand(self.num_models, 2, generator=generator).tolist():
            chosen.append(ranked.pop(int(place * len(ranked)) if explore < epsilon else 0))
        return {"models": {other: models[other] for other in sorted(chosen)}}
