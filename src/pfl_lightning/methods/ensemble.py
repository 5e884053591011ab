"""Ensemble: the mean prediction of all clients' own models."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.server import Aggregator, ModelPool
from pfl_lightning.settings import Unpack


class Ensemble(ClientModule):
    r"""Clients train alone, as `Local` does, and predict by the mean of the predictions of all clients' models.

    .. math:: p(y \mid x) = \frac1m \sum_k p(y \mid x; w_k)

    over the m clients that have trained so far. Probabilities are averaged where the task has them, else outputs; see
    `Task.combined`. Training never looks at other models, so that a client's own model is the one of `Local`. A client
    receives all other models in each round, and a prediction takes m times as long. A client that comes later predicts
    with the others' models before it has trained. Where clients hold other classes, few of the models have seen a
    sample's class: on scikit-learn's digits it has 63 % after 50 rounds, `FedAvg` 88 % and `Local` 97 %
    (docs/results.md, "Defaults"). Takes the arguments of `FedAvg`.
    Source: Guha et al., 2019, ensembles of local models (https://arxiv.org/abs/1902.11175).
    """

    needs = frozenset({"models"})
    caches = frozenset({"others"})
    trained: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        # 1 once the client has trained, before which its model is the initial one and doesn't count
        self.register_buffer("trained", torch.zeros(()))
        # the other clients' models by the net's names, new at each download
        self.others: list[StateDict] = []

    def is_personal(self, name: str) -> bool:
        """Keep the whole model, which also travels."""
        return True

    def is_shared(self, name: str) -> bool:
        """Share the whole net, buffers too, without which others couldn't predict with it."""
        return name.startswith("net.") and name not in self.common_names

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the other clients' models; the client's own is in place."""
        self.others = []
        if self.evaluation_follows:
            for _, model in sorted(payload["models"].items()):
                self.others.append({name.removeprefix("net."): t.to(self.device) for name, t in model.items()})

    def forward(self, x: Any) -> Tensor:
        """Return the outputs that stand for the mean prediction; those of the own model without others."""
        own: Tensor = self.net(x)
        if not self.others:
            return own
        outputs = torch.stack([own, *(functional_call(self.net, model, (x,)) for model in self.others)])
        shares = torch.cat([self.trained.view(1), self.trained.new_ones(len(self.others))])
        return self.task.combined(outputs, shares / shares.sum())

    def upload(self, data: ClientData) -> Message:
        """Return the trained model."""
        self.trained.fill_(1)
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return a pool of models."""
        return ModelPool()
