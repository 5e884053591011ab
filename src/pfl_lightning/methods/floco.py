r"""FLOCO: clients share a simplex of output layers, and each one's own is drawn near its point of the simplex.

Source: Grinwald, Wiesner and Nakajima, 2024 (https://openreview.net/forum?id=JL2eMCfDW8). Symbols: M endpoints, each a
weight W_i of the output layer; alpha, of length M, are their shares in a layer; c_k is client k's point of the simplex.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.knowledge_coefficients import project
from pfl_lightning.nets import feature_size
from pfl_lightning.nets.base import find_output_layer
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.settings import Unpack

CANDIDATES = torch.linspace(1e-4, 1, 1000, dtype=torch.float64)
"""Radii of the simplex that are tried for the projection, as in the official code."""
CLOSEST = 1e-4
"""The least distance of two points in an energy."""


class SimplexLinear(nn.Module):
    r"""A linear layer with the weight :math:`\sum_i \alpha_i W_i`, whose shares are drawn in each forward of training.

    Args:
        layer: a linear layer, whose bias is taken, and with one endpoint its weight too.
        endpoints: M; several endpoints are drawn as in the official code, by Xavier's normal distribution.
        radius: :math:`\rho`.
    """

    centre: Tensor

    def __init__(self, layer: nn.Linear, endpoints: int, radius: float) -> None:
        super().__init__()
        weight = layer.weight.detach().repeat(endpoints, 1, 1)
        if endpoints > 1:
            for each in weight:
                nn.init.xavier_normal_(each)
        self.weight = nn.Parameter(weight)  # [M, outputs, d]
        self.bias = layer.bias
        self.radius = radius
        # c_k; zeros, which no point of the simplex is, before there is one
        self.register_buffer("centre", torch.zeros(endpoints))

    def shares(self) -> Tensor:
        r"""Return :math:`\alpha`: in training a draw near the centre, or from all of the simplex; else the centre."""
        centre, size = self.centre, len(self.centre)
        has_centre = centre.any()
        if not self.training:
            return torch.where(has_centre, centre, 1 / size)
        draw = partial(torch.rand, dtype=centre.dtype, device=centre.device)
        # the smallest number, against a division of 0 by 0
        least = torch.finfo(centre.dtype).tiny
        # exponential numbers over their sum are uniform on the simplex
        numbers = -torch.log1p(-draw(size)) + least
        u = 2 * draw(size) - 1
        near = centre + self.radius * draw(()) * u / u.abs().sum().clamp_min(least)
        # by `where` and not by `if`, so that many clients can run at once
        return torch.where(has_centre, near, numbers / numbers.sum())

    def forward(self, features: Tensor) -> Tensor:
        """Return outputs ``[n, outputs]``.

        Args:
            features: ``[n, d]``.
        """
        # one endpoint is a plain layer, whatever its share: nothing is drawn, so that no random number moves
        weight = self.weight[0] if len(self.weight) == 1 else torch.einsum("m,mod->od", self.shares(), self.weight)
        return F.linear(features, weight, self.bias)


class FLOCO(FedAvg):
    r"""Trains M output layers at once, by random mixes of them, and predicts by a mix of its own.

    .. math:: W = \sum_{i=1}^M \alpha_i W_i, \qquad
        \alpha \sim \begin{cases} \mathrm{uniform\ on\ the\ simplex} & \text{in the first } \tau R \text{ rounds} \\
        c_k + r\, u / \lVert u \rVert_1,\quad r \sim U(0, \rho),\ u \sim U(-1, 1)^M & \text{from then on} \end{cases}

    with R rounds and one draw for each batch. Predictions are by the centre of the simplex, and after these rounds by
    :math:`c_k`, which the server finds from how the client has changed the endpoints: `SubregionAverage`. All endpoints
    and the rest of the net, with one bias, are averaged as by `FedAvg`. The record's global model has the centre of the
    simplex. With :math:`\rho = 0` a client's layer stands still from then on. Near the border, draws may leave
    the simplex, as in the official code. The released code also sends the net's own output layer, which nothing uses.

    Floco+ is left out, in which each client has a second whole model: its regulariser in the official code is
    :math:`\lambda w - x`, and not :math:`\lambda (w - x)`.
    Source: Grinwald, Wiesner and Nakajima, 2024 (https://openreview.net/forum?id=JL2eMCfDW8);
    dennis-grinwald/floco@a25b3a1.

    Args:
        endpoints: M, at least 1; 1 is `FedAvg` bit for bit.
        rho: :math:`\rho`, at least 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net has no linear output layer.
    """

    needs = FedAvg.needs | {"centre"}

    requires = frozenset({"vector features"})

    def __init__(self, *args: Any, endpoints: int = 10, rho: float = 0.1, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if endpoints < 1:
            raise MisconfigurationException(f"model.endpoints={endpoints} must be 1 (which is FedAvg) or more.")
        if not 0 <= rho < math.inf:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (without draws) or more, such as 0.1.")
        # first, as it refuses a classifier of other layers in its own words
        feature_size(self.net)
        self.layer = find_output_layer(self, self.task.outputs)
        made = SimplexLinear(cast(nn.Linear, self.get_submodule(self.layer)), endpoints, rho)
        self.set_submodule(self.layer, made)

    def is_shared(self, name: str) -> bool:
        """Share the net, without the client's point."""
        return super().is_shared(name) and name != f"{self.layer}.centre"

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and the client's point."""
        super().on_download(payload, data)
        self.assign({f"{self.layer}.centre": payload["centre"]})

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of models, which also finds the clients' points."""
        return SubregionAverage()


class SubregionAverage(WeightedAverage):
    r"""Averages models, and finds a point of the simplex for each client after a share :math:`\tau` of the rounds.

    The last change of all endpoints by each client so far, as one vector, is projected onto the M principal components
    of these vectors, and then onto the simplex:

    .. math:: c_k = P_\Delta(\kappa_k / z), \qquad
        z = \arg\min_z \sum_{j < k} \lVert c_j - c_k \rVert_2^{-2}, \qquad z \in [10^{-4}, 1]

    with the components' scores :math:`\kappa_k` and the nearest point of the simplex :math:`P_\Delta`: the z of 1000
    whose points are furthest apart. Distances below 0.0001 count as such. With fewer clients than endpoints the scores
    of further components are 0. The sign of a component is that of its largest entry.

    The official code has all clients train once more at that round for this alone, from one model; here each
    client's last training before does, so that no round is lost, and changes, not weights, are compared, as they may be
    of several rounds. A client that hasn't taken part by then, or that joins later, has no point, and goes on with the
    whole simplex. The server keeps one vector of the endpoints' size for each client until then.
    Source: as for `FLOCO`.

    Args:
        tau: :math:`\tau`, share of the planned rounds before clients have points of their own, in [0, 1]:
            rounded down, and one round at least. With 1 clients never have any. The official code gives a number of
            rounds instead: 250 of 500 for CIFAR-10, and of 350 for FEMNIST. Points need rounds: of 15 on
            scikit-learn's digits, 10 before them end at 73 %, and half before them at 86 %, where `FedAvg` has 73 % and
            `Local` 95 % (docs/results.md, "Defaults").

    Raises:
        MisconfigurationException: if ``tau`` is out of its range or a share of an unknown number of rounds, or clients
            have no endpoints.
    """

    sends = WeightedAverage.sends | {"centre"}
    fixed_rounds = True

    def __init__(self, tau: float = 0.5) -> None:
        super().__init__()
        if not 0 <= tau <= 1:
            raise MisconfigurationException(
                f"aggregator.tau={tau} must be a share of all rounds from 0 to 1, such as 0.5."
            )
        self.tau = tau

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without points."""
        super().setup(server)
        if server.rounds is None and 0 < self.tau < 1:
            raise MisconfigurationException(
                f"aggregator.tau={self.tau} is a share of trainer.max_rounds, which has no limit; give it one."
            )
        # points need one training, so that there is one round before them at least
        self.before = math.inf if self.tau == 1 else max(1, math.floor(self.tau * (server.rounds or 0)))
        layers = [name for name, module in server.module.named_modules() if isinstance(module, SimplexLinear)]
        if not layers:
            raise MisconfigurationException(
                f"aggregator={type(self).__name__} projects endpoints of an output layer, which "
                f"model={type(server.module).__name__} doesn't have; take model=FLOCO."
            )
        self.endpoints = f"{layers[0]}.weight"
        self.state |= {"changes": {}, "centres": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average models; after the share of rounds find all points, and log their mean distance once."""
        if not updates:
            return {}
        x: StateDict = self.state["weights"]
        before = x[self.endpoints]
        super().aggregate(updates, round)
        if self.state["centres"] or len(before) == 1 or self.before == math.inf:
            return {}
        # not in the type of `before`: with precision=64-true the initial model is float32
        sent = {client: update["weights"][self.endpoints] for client, update in updates.items()}
        own = {client: (weight.to(before.device) - before).flatten() for client, weight in sent.items()}
        # by id, so that sums don't depend on the rounds in which clients first took part
        self.state["changes"] = changes = dict(sorted((self.state["changes"] | own).items()))
        if round + 1 < self.before:
            return {}
        points = subregions(torch.stack([*changes.values()]), len(before))
        centres = points.to(self.state["weights"][self.endpoints])
        self.state |= {"centres": dict(zip(changes, centres, strict=True)), "changes": {}}
        return {"distance": float(torch.pdist(points).mean())} if len(points) > 1 else {}

    def download(self, client: int) -> Message:
        """Return the model and the client's point; zeros without one."""
        centre = self.state["centres"].get(client)
        if centre is None:
            endpoints = self.state["weights"][self.endpoints]
            centre = endpoints.new_zeros(len(endpoints))
        return super().download(client) | {"centre": centre}


def subregions(changes: Tensor, endpoints: int) -> Tensor:
    """Return each client's point of the simplex, ``[K, M]`` in float64.

    Args:
        changes: each client's change of all endpoints, ``[K, D]``.
        endpoints: M.
    """
    kappa = principal_scores(changes, endpoints)
    points = [project(kappa / z) for z in CANDIDATES]
    # ties go to the lowest id; a single client has no distances
    energies = [float(torch.pdist(each).clamp_min(CLOSEST).pow(-2).sum()) for each in points]
    return points[energies.index(min(energies))]


def principal_scores(rows: Tensor, size: int) -> Tensor:
    """Return the scores of vectors on their principal components, ``[K, size]`` in float64.

    >>> principal_scores(torch.tensor([[3.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]), 2).round().abs()
    tensor([[2., 0.],
            [2., 0.],
            [0., 0.]], dtype=torch.float64)

    Args:
        rows: vectors ``[K, D]``.
        size: number of components; those beyond K or D have the score 0.
    """
    centred = rows.double() - rows.double().mean(0)
    u, s, components = torch.linalg.svd(centred, full_matrices=False)
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    scores = (u * s * largest.sign().T)[:, :size]
    return F.pad(scores, (0, size - scores.shape[1]))
