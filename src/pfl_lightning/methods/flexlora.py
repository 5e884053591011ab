"""FlexLoRA: the server averages the products of adapters, and sends their singular value decomposition."""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings
from pfl_lightning.messages import CPU, Updates
from pfl_lightning.methods.fedit import AdapterAverage
from pfl_lightning.methods.hetlora import HetLoRA
from pfl_lightning.server import Aggregator, Weighting
from pfl_lightning.server.adapters import factors, summed, truncated
from pfl_lightning.settings import Unpack


class FlexLoRA(HetLoRA):
    r"""Trains adapters whose mean product the server factors anew, at the client's own rank.

    A client receives the best approximation of the mean product M at its rank, the first columns and rows of a singular
    value decomposition; the server side is `ProductAverage`. Ranks are handled as in `HetLoRA`, with one scale s for
    all; in the official code a client's scale is alpha over its own rank.

    A is orthonormal from the second round on, far from its start, so that learning rates of `FedIT` don't carry over.
    Each round has new coordinates, so that optimizers begin anew.
    Source: Bai et al., 2024 (https://arxiv.org/abs/2402.11505).

    Args:
        ranks: ranks of the clients, as for `HetLoRA`.
        **kwargs: the arguments of `FedAvg`, but for ``optimizer_lifetime: run``.

    Raises:
        MisconfigurationException: if a rank is out of its range, or optimizers are to live on.
    """

    def __init__(self, *args: Any, ranks: list[int] | None = None, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, ranks=ranks, **kwargs)
        refuse_living_on(self)

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of products."""
        return ProductAverage()


def refuse_living_on(client: HetLoRA) -> None:
    """Refuse optimizers that live on over rounds, for a server that gives each round's adapters new coordinates.

    Args:
        client: the client module.

    Raises:
        MisconfigurationException: if ``optimizer_lifetime`` is ``run``.
    """
    if client.optimizer_lifetime == "run":
        raise MisconfigurationException(
            f"model.optimizer_lifetime=run: {type(client).__name__} begins each round with adapters in other "
            "coordinates, in which a kept momentum means nothing; take round."
        )


class ProductAverage(AdapterAverage):
    r"""Averages the products of adapters, and factors the mean at the net's rank r.

    .. math:: M = \sum_k p_k B_k A_k = U S V^T, \qquad A \leftarrow V_r^T, \qquad B \leftarrow U_r S_r

    No matrix of the layer's size is made: the decomposition is of K r rows and columns, in bases of the stacked
    factors. Where M has a smaller rank than r, the remaining rows of A stay as they were, with zeros in B. All
    else that clients send is averaged. Its ``product_error`` is what the truncation leaves out,
    :math:`\sqrt{\sum_{j>r} S_j^2} / \lVert M \rVert_F`: by Eckart and Young's theorem the smallest error at rank r.
    Source: as for `FlexLoRA`.

    Args:
        weighting: client weights :math:`p_k`: ``samples`` or ``uniform``.
    """

    def __init__(self, weighting: Weighting = "samples") -> None:
        super().__init__(weighting=weighting)

    def aggregate(self, updates: Updates, round: int) -> dict[str, Any]:
        """Average products and all else; log the error of truncation."""
        if not updates:
            return {}
        weights, before = self.client_weights(updates), self.state["weights"]
        self.average(updates, weights)
        factored, missed, whole = {}, 0.0, 0.0
        for pair, scale in self.sent(updates).items():
            a, b = factors(updates, pair)
            mean = summed(list(zip(b, a, strict=True)), [weights[client] for client in updates])
            u, s, v = truncated(*mean, len(a[0]))
            squares = (scale * s).square()
            missed, whole = missed + float(squares[len(v) :].sum()), whole + float(squares.sum())
            # vectors of a value that is rounding alone are arbitrary
            counted = s[: len(v)] > max(len(u), v.shape[1]) * torch.finfo(s.dtype).eps * s[0]
            # a row of zeros in A beside a column of zeros in B would never learn again
            first = before[pair.a].flatten(1).to(v, copy=True)
            second = torch.zeros_like(b[0])
            first[: len(v)][counted] = v[counted]
            second[:, : len(v)][:, counted] = (u * s[: len(v)])[:, counted]
            for name, factor in ((pair.a, first), (pair.b, second)):
                old = updates[min(updates)]["weights"][name]
                factored[name] = factor.view(old.shape).to(CPU, old.dtype)
        self.state["weights"] = self.state["weights"] | factored
        return {"product_error": math.sqrt(missed / whole) if whole else 0.0}
