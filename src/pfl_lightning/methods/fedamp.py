"""FedAMP: each client trains near a cloud model, a mix of similar clients' models.

Source: Huang et al., 2021 (https://arxiv.org/abs/2007.03797). Symbols: w_i the model of client i, u_i its model in the
cloud, xi_im the weight of w_m in u_i, A(x) = 1 - exp(-x / sigma), alpha the step of the message passing.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import (
    Message,
    StateDict,
    Updates,
    column,
    fill_means,
    num_bytes,
    promoted,
    weighted_mean,
)
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.server import Aggregator, ModelPool, Server, inner_products
from pfl_lightning.settings import Unpack

ALONE = 0.999
"""Above this mean weight of clients' own models, no client learns from another."""
TOGETHER = 32 * 2**20
"""Bytes of the cloud models that are computed together at least."""
ROWS = 128
"""Most cloud models that are computed together beyond `TOGETHER`."""


class CloudProx(FedProx):
    r"""Keeps every client's model, and trains near the cloud model from the server.

    .. math:: \min_w \; F_i(w) + \frac\mu2 \lVert w - u_i \rVert^2

    The client side of FedAMP, where :math:`\mu` is the paper's :math:`\lambda / \alpha`; its server side is `FedAMP`.
    Training continues from the client's own model, which is also the evaluated one. Only parameters travel: buffers,
    such as BatchNorm's running statistics, stay with each client, whatever ``buffers`` says.

    Args:
        mu: :math:`\mu`, at least 0; 0 is `Local` bit for bit, and so is PFLlib's FedAMP, whose term has no gradient.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``mu`` is negative.
    """

    example_level = True
    # the cloud model is the centre of training alone
    model_needs = frozenset()

    def __init__(self, *args: Any, mu: float = 0.1, **kwargs: Unpack[ClientSettings]) -> None:
        if not mu >= 0:
            raise MisconfigurationException(f"model.mu={mu} must be 0 (which is Local) or more, such as 0.1.")
        super().__init__(*args, mu=mu, **kwargs)

    def is_shared(self, name: str) -> bool:
        """Share the net's parameters."""
        # without buffers: distances and mixes are of parameters
        return super().is_shared(name) and name not in self._buffer_names

    def is_personal(self, name: str) -> bool:
        """Keep the whole model."""
        return True

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Take the cloud model :math:`u_i` as the centre of the proximal term."""
        # without weights, the payload is of a checkpoint
        if "weights" in payload:
            self.received.take((name.removeprefix("net."), tensor) for name, tensor in payload["weights"].items())

    def configure_aggregator(self) -> Aggregator:
        """Return attentive message passing."""
        return FedAMP()


class FedAMP(ModelPool):
    r"""Attentive message passing: mixes a cloud model for each client, with larger weights for nearer models.

    .. math::

        u_i = \xi_{ii} w_i + \sum_{m \ne i} \xi_{im} w_m, \qquad
        \xi_{im} = \alpha A'(\lVert w_i - w_m \rVert^2) = \frac\alpha\sigma e^{-\lVert w_i - w_m \rVert^2 / \sigma},
        \qquad \xi_{ii} = 1 - \sum_{m \ne i} \xi_{im}

    over the last models of all clients that have taken part; distances are over parameters. The mix is convex for a
    small alpha only: if models are so near that :math:`\xi_{ii}` would be less than ``min_own``, the other weights are
    scaled down together. Under `CloudProx` clients keep their model; under `FedAvg` or `FedProx` they start from
    :math:`u_i`.
    Source: Huang et al., 2021, Algorithm 1 (https://arxiv.org/abs/2007.03797).

    The defaults are ours. The weights depend on distances, which grow with the net and with every round: with the
    values of the cwFedAvg paper (1000, 0.1 and ``mu`` 0.001) models are too far apart after a few rounds, every
    :math:`\xi_{ii}` is 1, and the method is `Local`. The record's ``server/own_weight`` is their mean, and one warning
    says when it comes near 1.

    Args:
        alpha: step of the message passing, at least 0; 0 sends every client its own model.
        sigma: the squared distance at which attention has fallen to 1/e, above 0.
        min_own: least :math:`\xi_{ii}`, in [0, 1]; None takes 1/n for n models, which gives equal models' mean.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    example_level = True
    sends = frozenset({"weights"})
    meets_newcomers = True
    caches = frozenset({"_clouds", "_xi"})

    def __init__(self, alpha: float = 5.0, sigma: float = 10.0, min_own: float | None = None) -> None:
        super().__init__()
        if not (0 <= alpha < math.inf and 0 < sigma < math.inf):
            raise MisconfigurationException(
                f"aggregator.alpha={alpha} must be 0 or more and aggregator.sigma={sigma} above 0, both finite, such "
                "as 5 and 10."
            )
        if min_own is not None and not 0 <= min_own <= 1:
            raise MisconfigurationException(
                f"aggregator.min_own={min_own} must be a weight from 0 to 1, or null for 1/n."
            )
        self.alpha, self.sigma, self.min_own = alpha, sigma, min_own
        self._xi: tuple[dict[int, StateDict], Tensor] | None = None
        self._clouds: tuple[Tensor, int, StateDict] | None = None

    def setup(self, server: Server) -> None:
        """Start from the common initial model for every client."""
        super().setup(server)
        self.names = server.parameter_names()
        self.state["initial"] = server.weights

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Weigh all models for each client anew; log the mean weight of clients' own models."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        models = list(self.state["models"].values())
        xi = self._attention(models)
        self._xi = self.state["models"], xi
        own_weight = float(xi.diagonal().mean())
        if own_weight > ALONE and len(models) > 1 and self.alpha > 0 and not self.state.get("warned"):
            self.state["warned"] = True
            rank_zero_warn(
                f"round {round + 1}: clients' own models have {own_weight:.4f} of the weight in what FedAMP sends "
                f"them, which makes it Local; take a larger aggregator.sigma than {self.sigma}, or a larger "
                f"aggregator.alpha than {self.alpha}."
            )
        return {"own_weight": own_weight}

    def _attention(self, models: list[StateDict]) -> Tensor:
        r"""Return :math:`\xi` ``[n, n]``.

        Args:
            models: n models, by name.
        """
        # from the first model, not from 0: models differ little beside their length, and float32 has seven digits
        first = {name: column(models[:1], name)[0] for name in self.names}
        products = inner_products(models, self.names, first, promoted(first[self.names[0]]))[:-1, :-1]
        norms = products.diagonal()
        # |w_i - w_m|^2 from inner products
        squares = norms[:, None] + norms - 2 * products
        return attention(squares, self.alpha, self.sigma, 1 / len(models) if self.min_own is None else self.min_own)

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the cloud model for the newcomer's own model; the common initial model before the first update."""
        if update is None:
            return {"weights": self.state["initial"]}
        models = [*self.state["models"].values(), update["weights"]]
        return {"weights": weighted_mean(models, self._attention(models)[-1].tolist())}

    def download(self, client: int) -> Message:
        """Return :math:`u_i`, or the common initial model before the client's first update."""
        models = self.state["models"]
        if client not in models:
            return {"weights": self.state["initial"]}
        # n^2 numbers, which for small nets are more than the models, are computed anew in a resumed run
        if self._xi is None or self._xi[0] is not models:
            self._xi = models, self._attention(list(models.values()))
        xi = self._xi[1]
        row = list(models).index(client)
        # a fifth of all: one by one would read all models n times, and all together need as much memory as the models;
        # a product of more rows is no faster
        count = max(min(math.ceil(len(models) / 5), ROWS), TOGETHER // max(num_bytes(models[client]), 1))
        several = count < len(models)
        first = row - row % count
        if self._clouds is None or self._clouds[0] is not xi or self._clouds[1] != first:
            stacks = self._clouds[2] if self._clouds is not None and several else {}
            self._clouds = None
            rows, model = min(count, len(models)), models[client]
            kinds = {name: ((rows, *tensor.shape), tensor.dtype) for name, tensor in model.items()}
            if {name: (stack.shape, stack.dtype) for name, stack in stacks.items()} != kinds:
                # dropped first, for its memory
                stacks = {}
                stacks = {name: tensor.new_empty(rows, *tensor.shape) for name, tensor in model.items()}
            fill_means(stacks, list(models.values()), xi[first : first + count].tolist())
            self._clouds = xi, first, stacks
        # copies where the next ones take the memory
        own = {name: stack[row - first] for name, stack in self._clouds[2].items()}
        return {"weights": {name: tensor.clone() for name, tensor in own.items()} if several else own}


def attention(squares: Tensor, alpha: float, sigma: float, min_own: float) -> Tensor:
    r"""Return FedAMP's weights :math:`\xi`; the rows sum to 1.

    >>> attention(torch.tensor([[0.0, 2.0], [2.0, 0.0]]), alpha=0.5, sigma=1.0, min_own=0.5)
    tensor([[0.9323, 0.0677],
            [0.0677, 0.9323]])
    >>> attention(torch.zeros(3, 3), alpha=10.0, sigma=1.0, min_own=0.5)[0]
    tensor([0.5000, 0.2500, 0.2500])

    Args:
        squares: squared distances ``[n, n]``; rounding may have made them negative.
        alpha: step of the message passing.
        sigma: width of the attention.
        min_own: least weight of a client's own model.
    """
    xi = alpha / sigma * torch.exp(-squares.clamp_min(0) / sigma)
    xi.fill_diagonal_(0)
    # the factor is at most 1: rows that leave enough for the own model stay
    xi *= ((1 - min_own) / xi.sum(1, keepdim=True).clamp_min(torch.finfo(xi.dtype).tiny)).clamp_max(1)
    return xi + torch.diag(1 - xi.sum(1))
