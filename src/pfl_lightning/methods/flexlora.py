"""FlexLoRA: the server averages the products of adapters, and sends their singular value decomposition."""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import CPU, Updates
from pfl_lightning.methods.fedit import AdapterAverage
from pfl_lightning.server import Aggregator, Server, Weighting
from pfl_lightning.server.adapters import factors, summed, truncated


class ProductAverage(AdapterAverage):
    r"""Averages the products of adapters, and factors the mean M at the net's rank r.

    .. math:: M = \sum_k p_k B_k A_k = U S V^T, \qquad A \leftarrow V_r^T, \qquad B \leftarrow U_r S_r

    Clients train as by `HetLoRA`: a client of rank :math:`r_k` receives the first columns and rows, which are the best
    approximation of M at its rank. All have one scale s; in the official code a client's scale is alpha over its own
    rank. A is orthonormal from the second round on, far from its start, so that learning rates of `FedIT` don't carry
    over. Each round has new coordinates, so that optimizers begin anew.

    No matrix of the layer's size is made: the decomposition is of K r rows and columns, in bases of the stacked
    factors. Where M has a smaller rank than r, the remaining rows of A stay as they were, with zeros in B. All
    else that clients send is averaged. Its ``product_error`` is what the truncation leaves out,
    :math:`\sqrt{\sum_{j>r} S_j^2} / \lVert M \rVert_F`: by Eckart and Young's theorem the smallest error at rank r.
    Source: Bai et al., 2024 (https://arxiv.org/abs/2402.11505).

    Args:
        weighting: client weights :math:`p_k`: ``samples`` or ``uniform``.
        balanced: whether either factor has the root of the singular values, :math:`A \leftarrow S_r^{1/2} V_r^T` and
            :math:`B \leftarrow U_r S_r^{1/2}`, as in APPFL's LoRA-SVD; the product is the same, and the next round's
            gradients of A and B are of one size.

    Raises:
        MisconfigurationException: at setup, if optimizers are to live on.
    """

    def __init__(self, weighting: Weighting = "samples", balanced: bool = False) -> None:
        super().__init__(weighting=weighting)
        self.balanced = balanced

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        refuse_living_on(self, server)
        super().setup(server)

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
            left, right = u * s[: len(v)], v
            if self.balanced:
                roots = s[: len(v)].sqrt()
                left, right = u * roots, roots[:, None] * v
            first[: len(v)][counted] = right[counted]
            second[:, : len(v)][:, counted] = left[:, counted]
            for name, factor in ((pair.a, first), (pair.b, second)):
                old = updates[min(updates)]["weights"][name]
                factored[name] = factor.view(old.shape).to(CPU, old.dtype)
        self.state["weights"] = self.state["weights"] | factored
        return {"product_error": math.sqrt(missed / whole) if whole else 0.0}


def refuse_living_on(aggregator: Aggregator, server: Server) -> None:
    """Refuse optimizers that live on over rounds, for an aggregator that gives each round's adapters new coordinates.

    Args:
        aggregator: the aggregator.
        server: the server's knowledge.

    Raises:
        MisconfigurationException: if ``optimizer_lifetime`` is ``run``.
    """
    if server.module.optimizer_lifetime == "run":
        raise MisconfigurationException(
            f"model.optimizer_lifetime=run: aggregator {aggregator.name} begins each round with adapters in other "
            "coordinates, in which a kept momentum means nothing; take round."
        )
