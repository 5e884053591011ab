"""Samples as trees of tensors: a tensor, or dicts, tuples and lists of them, whose first dimension is the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pfl_lightning.messages import tensors, tree_map

Tree: TypeAlias = Any
"""A tensor ``[n, ...]``, or a dict, tuple or list of trees; what else has a length and takes ``[rows]`` is a leaf."""


def rows_in(tree: Tree) -> int:
    """Number of samples.

    >>> rows_in({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    if isinstance(tree, Tensor):
        return tree.shape[0]
    if isinstance(tree, Mapping):
        return rows_in(next(iter(tree.values())))
    return rows_in(tree[0]) if type(tree) in (list, tuple) else len(tree)


def leaves_of(tree: Tree) -> Iterator[Any]:
    """What a tree is of, in its order: tensors, or what has rows as they have."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if type(tree) in (list, tuple):
        for part in tree:
            yield from leaves_of(part)
    else:
        yield tree


def take(tree: Tree, rows: Tensor | slice) -> Tree:
    """Some of the samples.

    >>> take({"a": torch.tensor([5, 6, 7])}, torch.tensor([2, 0]))
    {'a': tensor([7, 5])}

    Args:
        tree: of tensors, or of leaves that give some for ``leaf[rows]``.
        rows: their positions.
    """
    if isinstance(tree, Tensor):
        # copies whole rows, where indexing goes element by element
        return tree.index_select(0, rows.to(tree.device)) if isinstance(rows, Tensor) else tree[rows]
    if isinstance(tree, Mapping):
        return {name: take(part, rows) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(take(part, rows) for part in tree)
    return read(tree, rows)


def read(leaf: Any, rows: Tensor | slice) -> Tensor:
    """Some rows of a leaf that is no tensor, each read once and in ascending order, as files like it.

    Args:
        leaf: what gives an array or a tensor for ``leaf[positions]``.
        rows: their positions.
    """
    wanted = np.arange(len(leaf))[rows] if isinstance(rows, slice) else rows.cpu().numpy()
    each, places = np.unique(wanted, return_inverse=True)
    found = torch.as_tensor(leaf[each])
    return found if np.array_equal(each, wanted) else found[torch.from_numpy(places)]


class Rows:
    """Some rows of a leaf that is no tensor, none of which is read before it is asked for.

    Args:
        leaf: what has a length and gives an array or a tensor for ``leaf[positions]``.
        rows: their positions.
    """

    def __init__(self, leaf: Any, rows: Tensor) -> None:
        self.leaf = leaf
        self.rows = rows.numpy()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: NDArray[np.int64]) -> Any:
        return self.leaf[self.rows[positions]]


def narrowed(tree: Tree, rows: Tensor) -> Tree:
    """Some of the samples, without reading what isn't in memory.

    Args:
        tree: of any leaves.
        rows: their positions, ascending.
    """
    if isinstance(tree, Mapping):
        return {name: narrowed(part, rows) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(narrowed(part, rows) for part in tree)
    return take(tree, rows) if isinstance(tree, Tensor) else Rows(tree, rows)


def split(tree: Tree, sizes: int | list[int], dim: int = 0) -> Iterator[Tree]:
    """A tree of tensors cut into pieces, which are views.

    >>> [piece["a"].tolist() for piece in split({"a": torch.arange(3)}, 2)]
    [[0, 1], [2]]

    Args:
        tree: of tensors.
        sizes: of all pieces, or of each.
        dim: along which dimension.
    """
    if isinstance(tree, Tensor):
        return iter(torch.split(tree, sizes, dim))
    if type(tree) is tuple:
        return zip(*(split(part, sizes, dim) for part in tree), strict=True)
    leaves = zip(*(torch.split(leaf, sizes, dim) for leaf in tensors(tree)), strict=True)
    return (like(tree, pieces) for pieces in leaves)


def like(tree: Tree, leaves: Sequence[Tensor]) -> Tree:
    """A tree with other leaves, given in its order."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), tree)


def merged(trees: Sequence[Tree], merge: Callable[[list[Tensor]], Tensor]) -> Tree:
    """One tree of several alike, whose leaves are merged one by one."""
    if isinstance(trees[0], Tensor):
        return merge(list(trees))
    if type(trees[0]) is tuple:
        return tuple(merged(parts, merge) for parts in zip(*trees, strict=True))
    return like(trees[0], [merge(list(leaves)) for leaves in zip(*map(tensors, trees), strict=True)])


def joined(trees: Sequence[Tree]) -> Tree:
    """The samples of several trees, one after another.

    >>> joined([{"a": torch.tensor([1])}, {"a": torch.tensor([2, 3])}])
    {'a': tensor([1, 2, 3])}
    """
    return merged(trees, torch.cat)


def padded(trees: Sequence[Tree]) -> Tree:
    """Trees in a stack ``[trees, n, ...]``, with zeros where one has fewer samples.

    >>> padded([torch.tensor([1]), torch.tensor([2, 3])])
    tensor([[1, 0],
            [2, 3]])
    """
    return merged(trees, lambda leaves: pad_sequence(leaves, batch_first=True))
