r"""pFedGraph: each client receives a mix of all models by a graph of collaboration that the server computes.

Source: Ye et al., 2023 (https://github.com/MediaBrain-SJTU/pFedGraph). Symbols: y_k is client k's trained model, x_0
the common initial model, p_k the client's share of the round's samples, a_ij the weight of y_j in client i's mix.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, weighted_means
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedcross import cosines
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights, inner_products
from pfl_lightning.settings import Unpack


class PFedGraph(FedAvg):
    r"""Trains the received mix with a term along the mix of normalised models, :math:`r_i`.

    .. math:: \min_w\; F_i(w) + \lambda\, \frac{\langle r_i, w \rangle}{\lVert w \rVert}, \qquad
        r_i = \sum_j a_{ij} \frac{y_j}{\lVert y_j \rVert}

    over all parameters. The term is 0 until the client's first mix. With the positive :math:`\lambda` of the official
    code it grows with the cosine of the two, and so drives w away from :math:`r_i`; a negative one draws w to it. Which
    of the two the paper means could not be verified. Payloads are twice the model's size.

    The official code scores a client before and after each training and keeps, of all rounds, the test accuracy of the
    best validation. Here ``trainer.evaluate`` chooses, and the last round counts: after 15 rounds on scikit-learn's
    digits the received mixes have 76 % and the trained ones 92 %, where `FedAvg` has 73 % and `Local` 95 %; after 50
    rounds 91, 97, 88 and 97 % (docs/results.md, "Defaults").
    Source: Ye et al., 2023 (https://github.com/MediaBrain-SJTU/pFedGraph), commit 4f5f17c.

    Args:
        graph_lambda: :math:`\lambda`, of either sign; 0 trains as `FedAvg` does, bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``graph_lambda`` isn't finite.
    """

    needs = FedAvg.needs | {"reference"}

    def __init__(self, *args: Any, graph_lambda: float = 0.01, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not math.isfinite(graph_lambda):
            raise MisconfigurationException(f"model.graph_lambda={graph_lambda} must be finite, such as 0.01 or -0.01.")
        self.graph_lambda = graph_lambda
        parameters = trained_parameters(self, "net")
        self.reference = Frozen((name, torch.zeros_like(tensor)) for name, tensor in parameters.items())  # r_i

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the mix of models, and the mix of normalised ones."""
        super().on_download(payload, data)
        # the first payload has no reference, and zeros give the term neither value nor gradient
        known = {name.removeprefix("net."): tensor for name, tensor in payload["reference"].items()}
        self.reference.take(known or {n: torch.zeros_like(t) for n, t in self.reference.tensors().items()})

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss plus the term."""
        loss = super().loss(features, logits, target)
        if self.graph_lambda == 0:
            return loss
        # tensor by tensor, as a flat copy of the model would cost its memory in each step
        pairs = list(zip(trained_parameters(self, "net").values(), self.reference.buffers(), strict=True))
        product = torch.stack([(w * r).sum() for w, r in pairs]).sum()
        square = torch.stack([w.square().sum() for w, _ in pairs]).sum()
        return loss + self.graph_lambda * product / square.sqrt()

    def configure_aggregator(self) -> Aggregator:
        """Return the server with the graph."""
        return CollaborationGraph()


class CollaborationGraph(WeightedAverage):
    r"""Mixes a model for each client, with larger weights for models that moved in the same direction.

    .. math::

        a_i = \arg\min_a\; \alpha \lVert a - p \rVert^2 + \langle D_i, a \rangle
        \quad \text{on the simplex}, \qquad D_{ij} = -\cos(y_i - x_0, y_j - x_0)

    over the clients of the round. A cosine above 0.9 counts as 1. The minimum is the projection of
    :math:`p - D_i / (2\alpha)` onto the simplex, for which the official code calls a solver. Cosines are over
    parameters; all entries are mixed. A client that stays away keeps its last mix. One that never took part has the
    mean weighted by samples, which is the global model too; in the official code it has the initial model. Under
    `FedAvg` clients receive the mix alone.
    Source: Ye et al., 2023 (https://github.com/MediaBrain-SJTU/pFedGraph), commit 4f5f17c.

    Args:
        alpha: :math:`\alpha`, above 0: the larger, the nearer is every mix to the mean weighted by samples. The
            official code has 0.8; from 5 on results are `FedAvg`'s within half a point (docs/results.md, "Defaults").

    Raises:
        MisconfigurationException: if ``alpha`` isn't positive.
    """

    sends = WeightedAverage.sends | {"reference"}

    def __init__(self, alpha: float = 0.8) -> None:
        super().__init__()
        if not alpha > 0:
            raise MisconfigurationException(f"aggregator.alpha={alpha} must be above 0, such as 0.8.")
        self.alpha = alpha

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without a graph."""
        super().setup(server)
        self.names = server.parameter_names()
        self.state |= {"initial": server.weights, "mixes": {}, "references": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Mix the models of the round's clients; log the mean weight of clients' own models."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        models = [update["weights"] for update in updates.values()]
        products = inner_products(models, self.names, self.state["initial"])
        d = -cosines(products[:-1, :-1])
        # as in the official code, which treats very similar clients as one
        d = torch.where(d < -0.9, -1.0, d)
        p = torch.tensor([*client_weights(updates, "samples").values()], dtype=torch.float64)
        a = on_simplex(p - d / (2 * self.alpha))
        # of y = x_0 + change, by the products that are known
        squares = products.diagonal()[:-1] + 2 * products[:-1, -1] + products[-1, -1]
        norms = squares.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        mixes = weighted_means(models, a.tolist())
        references = weighted_means(models, (a / norms).tolist(), self.names)
        # clients that stay away keep their mixes
        self.state["mixes"].update(zip(updates, mixes, strict=True))
        self.state["references"].update(zip(updates, references, strict=True))
        return {"own_weight": float(a.diagonal().mean())}

    def download(self, client: int) -> Message:
        """Return the client's mix and reference; before its first round the mean, and no reference."""
        weights = self.state["mixes"].get(client, self.state["weights"])
        return {"weights": weights, "reference": self.state["references"].get(client, {})}


def on_simplex(points: Tensor) -> Tensor:
    r"""Return the nearest points on the simplex :math:`\{a \ge 0, \sum a = 1\}`.

    >>> on_simplex(torch.tensor([[0.5, 0.7], [2.0, 0.0], [0.0, 0.0]]))
    tensor([[0.4000, 0.6000],
            [1.0000, 0.0000],
            [0.5000, 0.5000]])

    Args:
        points: ``[m, n]``, a point a row.
    """
    ordered = points.sort(1, descending=True).values
    count = torch.arange(1, points.shape[1] + 1, dtype=points.dtype)
    excess = (ordered.cumsum(1) - 1) / count
    # the last coordinate, in falling order, that stays above what all of these must lose
    last = (ordered > excess).sum(1, keepdim=True) - 1
    return (points - excess.gather(1, last)).clamp_min(0)
