"""FedFomo: each client mixes the other clients' models by gains in validation loss.

Source: Zhang et al., 2021 (https://arxiv.org/abs/2012.08565). Symbols: L_i the validation loss of client i, w_i^old its
model before its last local training, w_m a received model, M the number of received models, P_im client i's affinity to
client m.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.client.common import shared_entries, trained_parameters
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import Message, StateDict, Updates, detached, weighted_mean
from pfl_lightning.methods.copies import add_copy, copy_net
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, ModelPool, Server, mean_loss
from pfl_lightning.settings import Unpack


class FedFomo(ClientModule):
    r"""First-order model optimization: local training starts from a mix of received models and the client's own.

    .. math::

        \Delta_m = \frac{L_i(w_i^{old}) - L_i(w_m)}{\lVert w_m - w_i^{old} \rVert + 10^{-5}}, \qquad
        a_m = \frac{\max(\Delta_m, 0)}{\sum_j \max(\Delta_j, 0)}, \qquad
        w_i \leftarrow \sum_m a_m w_m

    over the received models and the client's own, which it kept; if none lowers the loss, it continues with its own. A
    model with a loss that isn't finite has no weight. The distance is over parameters. Each download mixes anew, with
    the server's current models, also before an evaluation; the tables of other publications are of the model after
    local training, ``trainer.evaluate=after``.

    Losses are on the client's validation samples, as the paper holds out a part for this. The same samples select the
    reported round: FedFomo's ``val/acc`` is too high and isn't comparable with that of other methods; its test accuracy
    is. A client keeps two models: the trained one, and the one it started from.
    Source: Zhang et al., 2021, Algorithm 1 (https://arxiv.org/abs/2012.08565).

    Args:
        norm: the distance in the denominator: ``l2``, or ``l1``, the official code's default.
        weigh_on: samples for the losses: ``val``, or ``train``, for data without a validation part; a client's own
            model then has the advantage of having been trained on these samples.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a client has no samples for the losses.
    """

    sends = ClientModule.sends | {"affinity"}
    needs = frozenset({"models"})
    caches = frozenset({"gains"})
    old: Net

    def __init__(
        self,
        *args: Any,
        norm: Literal["l2", "l1"] = "l2",
        weigh_on: Literal["val", "train"] = "val",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        self.order = {"l1": 1, "l2": 2}[norm]
        self.weigh_on = weigh_on
        add_copy(self, "old", self.net)  # w_i^old
        self.old.requires_grad_(False)
        # Delta_m by client id, new at each download
        self.gains: dict[int, float] = {}

    def is_personal(self, name: str) -> bool:
        """Keep the whole model, which also travels."""
        return True

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Mix the received models and the own one; outside a federation, without data, keep the own model."""
        if data is None:
            return
        part = data.train if self.weigh_on == "train" else data.val
        if not len(part):
            raise MisconfigurationException(
                f"model.weigh_on=val: client {self.client_id} has no validation samples for model FedFomo to weigh "
                "models on; take data.val_fraction=0.1, give each client some, or take model.weigh_on=train."
            )
        # a copy: `_gain` loads each model into the net to compute its loss
        own = detached(shared_entries(self, self.state_dict()))
        models = dict(sorted({**payload["models"], self.client_id: own}.items()))
        before = mean_loss(self.old, part, self.task)
        self.gains = {m: self._gain(model, before, part) for m, model in models.items()}
        helpful = {m: gain for m, gain in self.gains.items() if gain > 0}
        total = math.fsum(helpful.values())
        # fsum, in the order of ids: the weights don't depend on the order of uploads
        a = [gain / total for gain in helpful.values()]
        self.assign(weighted_mean([models[m] for m in helpful], a) if helpful else own)
        # after the mix: w_i^old of the next round is where this round's training starts
        copy_net(self, "old")

    def _gain(self, model: StateDict, before: float, part: Samples) -> float:
        r"""Return :math:`\Delta_m` of a model, or 0 in place of NaN and infinity.

        Args:
            model: the model, by name.
            before: :math:`L_i(w_i^{old})`.
            part: the samples for the loss.
        """
        self.assign(model)
        pairs = zip(*(trained_parameters(self, path).values() for path in ("net", "old")), strict=True)
        # the norm of the tensors' norms is the norm of all parameters
        gaps = torch.stack([torch.linalg.vector_norm(w - old, ord=self.order) for w, old in pairs])
        gain = (before - mean_loss(self, part, self.task)) / (
            float(torch.linalg.vector_norm(gaps, ord=self.order)) + 1e-5
        )
        return gain if math.isfinite(gain) else 0.0

    def upload(self, data: ClientData) -> Message:
        """Return the trained model, and the gains of the received ones."""
        gains = {m: torch.tensor(gain, dtype=torch.float64) for m, gain in self.gains.items()}
        return super().upload(data) | {"affinity": gains}

    def configure_aggregator(self) -> Aggregator:
        """Return a pool of models, sent by affinity."""
        return AffinityPool()


class AffinityPool(ModelPool):
    r"""Sends each client the models of the peers with the client's highest affinity.

    .. math:: P_{im} \leftarrow P_{im} + \Delta_{im}

    for each model that client i weighed in the round. A client receives the M models of the highest :math:`P_{im}`;
    each of them is replaced with probability epsilon by a random one of the rest. A model that was never sent has the
    affinity 0, above harmful ones.
    Source: Zhang et al., 2021 (https://arxiv.org/abs/2012.08565).

    Args:
        num_models: M, the number of other clients' models in a payload, at least 1; None sends all.
        epsilon: probability of a random choice in the first round, in [0, 1]; the official code's is 0.3.
        epsilon_decay: decrease of epsilon in each round, at least 0.

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
        """Start without models and affinities."""
        super().setup(server)
        self.seed = server.seed
        self.state |= {"affinity": {}, "round": 0}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take the round's models, and add the gains to the affinities."""
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
        """Return the chosen models, by client id."""
        return self._chosen(client, self.state["affinity"].get(client, {}))

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return models chosen by the newcomer's last gains; before the first update all affinities are 0."""
        gains = {} if update is None else update["affinity"]
        return self._chosen(client, {other: float(gain) for other, gain in gains.items()})

    def _chosen(self, client: int, row: Mapping[int, float]) -> Message:
        """Return the models of highest affinity, with random exceptions.

        Args:
            client: the client's id.
            row: affinities by client id; 0 for all others.
        """
        models = super().download(client)["models"]
        if self.num_models is None or self.num_models >= len(models):
            return {"models": models}
        ranked = sorted(models, key=lambda other: (-row.get(other, 0.0), other))
        # a function of seed, round and client: `download` is called often, and must give the same models each time
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedfomo", self.state["round"], client))
        epsilon = self.epsilon - self.epsilon_decay * self.state["round"]
        chosen = []
        for explore, place in torch.rand(self.num_models, 2, generator=generator).tolist():
            chosen.append(ranked.pop(int(place * len(ranked)) if explore < epsilon else 0))
        return {"models": {other: models[other] for other in sorted(chosen)}}
