r"""Low-rank adapters on the server: pairs of factors, and their products without a matrix of the layer's size.

A layer with the frozen weights :math:`W_0` and an adapter computes :math:`W_0 x + s B A x`. Symbols: A ``[r, i]`` and B
``[o, r]`` are the factors, s is the scale, p_k a client's weight, M the mean product :math:`\sum_k p_k B_k A_k`. A mean
of A and one of B don't multiply to M: the difference is the factors' covariance over clients,

.. math:: M - \bar B \bar A = \sum_k p_k (B_k - \bar B)(A_k - \bar A).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.messages import Updates, column, promoted

FIRST, SECOND = re.compile(r"\.lora_(embedding_)?A\."), re.compile(r"\.lora_(embedding_)?B\.")
"""Parts of the names that ``peft`` gives to A and B."""


def is_first(name: str) -> bool:
    """Return whether an entry is the factor A of an adapter.

    >>> is_first("net.features.0.lora_A.default.weight"), is_first("net.features.0.lora_B.default.weight")
    (True, False)

    Args:
        name: the entry's name.
    """
    return FIRST.search(name) is not None


def is_second(name: str) -> bool:
    """Return whether an entry is the factor B of an adapter.

    Args:
        name: the entry's name.
    """
    return SECOND.search(name) is not None


class Pair(NamedTuple):
    """Names of an adapter's factors.

    Args:
        layer: path of the layer with the adapter, in which ``base_layer`` has the frozen weights.
        adapter: name of the adapter.
        a: name of A in the ``state_dict``.
        b: name of B.
    """

    layer: str
    adapter: str
    a: str
    b: str

    def scale(self, module: nn.Module) -> float:
        """Return the scale s.

        Args:
            module: the module whose ``state_dict`` has the names.

        Raises:
            MisconfigurationException: if the layer tells no scale.
        """
        scales = getattr(module.get_submodule(self.layer), "scaling", {})
        if self.adapter not in scales:
            raise MisconfigurationException(
                f"model.net: {self.layer} has {self.a} and no scaling[{self.adapter!r}], the factor of its product; "
                "let the layer keep the factor there, as layers of peft do."
            )
        return float(scales[self.adapter])

    def is_transposed(self, module: nn.Module) -> bool:
        """Return whether the frozen weights are ``[i, o]``, as in the Conv1D of GPT-2 and in embeddings.

        Args:
            module: as for `scale`.
        """
        return "lora_embedding_A" in self.a or bool(getattr(module.get_submodule(self.layer), "fan_in_fan_out", False))


def pairs(names: Iterable[str]) -> list[Pair]:
    """Return the pairs of factors among entries, in the order of the entries.

    >>> pairs(["0.lora_A.own.weight", "0.lora_B.own.weight", "0.bias"])
    [Pair(layer='0', adapter='own', a='0.lora_A.own.weight', b='0.lora_B.own.weight')]

    Args:
        names: names of entries; an A without its B is no pair.
    """
    # a dict, which keeps the order of entries and is quick to search
    known = dict.fromkeys(names)
    found = []
    for a in known:
        if at := FIRST.search(a):
            b = f"{a[: at.start()]}.lora_{at[1] or ''}B.{a[at.end() :]}"
            if b in known:
                found.append(Pair(a[: at.start()], a[at.end() :].split(".")[0], a, b))
    return found


def factors(updates: Updates, pair: Pair) -> tuple[list[Tensor], list[Tensor]]:
    """Return all clients' A ``[r, i]`` and B ``[o, r]`` of a layer, in the order of the updates.

    Kernels of convolutions have their inputs and places in one dimension, i.

    Args:
        updates: updates with ``weights``, by client id.
        pair: the layer's names.
    """
    states = [update["weights"] for update in updates.values()]
    # by `column`, so that stacks of engine `vectorised` stay on their device
    first, second = column(states, pair.a), column(states, pair.b)
    return [a.flatten(1).to(promoted(a)) for a in first], [b.flatten(1).to(promoted(b)) for b in second]


def summed(products: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    r"""Return a weighted sum of products as one product of stacks, :math:`[p_1 B_1 \ldots p_K B_K] [A_1; \ldots; A_K]`.

    Args:
        products: B ``[o, r]`` and A ``[r, i]`` of each.
        weights: one a product.

    Returns:
        The stacks ``[o, K r]`` and ``[K r, i]``.
    """
    # the weight on one factor alone: on both it would be squared
    left = torch.cat([weight * b for weight, (b, _) in zip(weights, products, strict=True)], 1)
    return left, torch.cat([a for _, a in products])


def norm(left: Tensor, right: Tensor) -> float:
    """Return the Frobenius norm of a product, without the product.

    Args:
        left: ``[o, m]``.
        right: ``[m, i]``.
    """
    return float(torch.linalg.matrix_norm(small_core(left, right)[1]))


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the largest singular values of a product with their vectors, :math:`U_r, S_r, V_r^T`.

    The sign of a pair of vectors, which is arbitrary, makes the largest entry of the left one positive.

    Args:
        left: ``[o, m]``.
        right: ``[m, i]``.
        rank: the largest number r of singular values.

    Returns:
        ``[o, r]``, all singular values, largest first, and ``[r, i]``; r is smaller where o, i or m is.
    """
    left_basis, core, right_basis = small_core(left, right)
    # K r rows and columns at most, however large the layer is
    u, s, v = torch.linalg.svd(core, full_matrices=False)
    u, v = left_basis @ u[:, :rank], v[:rank] @ right_basis.T
    # else the same product could be sent with other factors by another engine or machine
    signs = torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    return u * signs, s, v * signs.T


def small_core(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return orthonormal bases of a product's columns and rows, and the product in them between the two.

    Args:
        left: ``[o, m]``.
        right: ``[m, i]``.
    """
    left_basis, first = torch.linalg.qr(left)
    right_basis, second = torch.linalg.qr(right.T)
    return left_basis, first @ second.T, right_basis


def deviations(a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
    r"""Return :math:`B_k - \bar B` and :math:`A_k - \bar A` of all clients.

    Args:
        a: A of each client.
        b: B of each client.
        weights: :math:`p_k`, with a sum of 1.
    """
    mean_a, mean_b = (sum(p * t for p, t in zip(weights, each, strict=True)) for each in (a, b))
    return [(second - mean_b, first - mean_a) for first, second in zip(a, b, strict=True)]


def product_error(updates: Updates, weights: Mapping[int, float], scales: Mapping[Pair, float]) -> float:
    r"""Return the error of the product of means, relative to the mean product, over all layers; 0 where M is 0.

    .. math:: \lVert M - \bar B \bar A \rVert_F / \lVert M \rVert_F

    Args:
        updates: updates by client id, at least one, with ``weights``.
        weights: :math:`p_k` by client id, with a sum of 1.
        scales: s of each layer.
    """
    shares = [weights[client] for client in updates]
    missed = whole = 0.0
    for pair, scale in scales.items():
        a, b = factors(updates, pair)
        # by deviations and not as a difference of products, in which alike clients would cancel to rounding
        missed += (scale * norm(*summed(deviations(a, b, shares), shares))) ** 2
        whole += (scale * norm(*summed(list(zip(b, a, strict=True)), shares))) ** 2
    return math.sqrt(missed / whole) if whole else 0.0
