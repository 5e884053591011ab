"""Samples as trees of tensors: a tensor, or dicts, tuples and lists of tensors, with samples in the first dimension."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pfl_lightning.messages import tensors, tree_map

Tree: TypeAlias = Any
"""A tensor ``[n, ...]``, or a dict, tuple or list of trees; any other object with a length and ``[rows]`` is a leaf."""

LARGEST = torch.finfo(torch.float32).max
"""Largest number in single precision, in which nets compute."""
BLOCK = 2**20
"""Numbers per step of a check, so that no check copies a whole pool."""


def rows_in(tree: Tree) -> int:
    """Return the number of samples.

    >>> rows_in({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3

    Args:
        tree: a tree of any leaves, not empty.
    """
    if isinstance(tree, Tensor):
        return tree.shape[0]
    if isinstance(tree, Mapping):
        return rows_in(next(iter(tree.values())))
    return rows_in(tree[0]) if type(tree) in (list, tuple) else len(tree)


def leaves_of(tree: Tree) -> Iterator[Any]:
    """Yield the leaves of a tree in order: tensors, or other objects with rows.

    Args:
        tree: a tree of any leaves.
    """
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if type(tree) in (list, tuple):
        for part in tree:
            yield from leaves_of(part)
    else:
        yield tree


def mapped(tree: Tree, function: Callable[[Any], Any]) -> Tree:
    """Apply a function to each leaf, a tensor or another object, and return the tree of results.

    Args:
        tree: a tree of any leaves.
        function: takes a leaf.
    """
    if isinstance(tree, Mapping):
        return {name: mapped(part, function) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(part, function) for part in tree)
    return function(tree)


def take(tree: Tree, rows: Tensor | slice) -> Tree:
    """Return the samples at some positions.

    >>> take({"a": torch.tensor([5, 6, 7])}, torch.tensor([2, 0]))
    {'a': tensor([7, 5])}

    Args:
        tree: a tree of tensors, or of leaves that return rows for ``leaf[rows]``.
        rows: positions of the samples.

    Raises:
        MisconfigurationException: if a leaf that stays in files has a number that no net can take.
    """
    if isinstance(tree, Tensor):
        # index_select copies whole rows; indexing goes element by element and is slower
        return tree.index_select(0, rows.to(tree.device)) if isinstance(rows, Tensor) else tree[rows]
    if isinstance(tree, Mapping):
        return {name: take(part, rows) for name, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(take(part, rows) for part in tree)
    # `check_pool` sees only inputs in memory: those in files are checked here, whenever they are read
    values = read(tree, rows)
    if (place := first_not_finite(values)) is not None:
        wanted = np.arange(len(tree))[rows] if isinstance(rows, slice) else rows.cpu().numpy()
        leaf, row = tree, int(wanted[place[0]])
        # through all subsets, to the row in the file that the user knows
        while isinstance(leaf, Rows):
            leaf, row = leaf.leaf, int(leaf.rows[row])
        where = cell("x", values[place].item(), (row, *place[1:]))
        raise MisconfigurationException(f"{where}; correct this sample, or leave it out")
    return values


def read(leaf: Any, rows: Tensor | slice) -> Tensor:
    """Return some rows of a leaf; read files row by row in ascending order, each row once.

    Args:
        leaf: a tensor, or an object that returns an array or a tensor for ``leaf[positions]``.
        rows: positions of the rows.
    """
    if isinstance(leaf, Tensor):
        return leaf[rows]
    wanted = np.arange(len(leaf))[rows] if isinstance(rows, slice) else rows.cpu().numpy()
    # ascending and distinct: HDF5 and other readers refuse positions in another order, and disks read forwards faster
    each, places = np.unique(wanted, return_inverse=True)
    values = as_tensor(leaf[each])
    if len(values) != len(each):
        raise MisconfigurationException(
            f"{type(leaf).__name__} gave {len(values)} rows for {len(each)} positions; let it give a row for each"
        )
    return values if np.array_equal(each, wanted) else values[torch.from_numpy(places)]


def as_tensor(values: Any, name: str = "a data set") -> Tensor:
    """Return an array or a list of numbers as a tensor, without a copy where type and order allow sharing.

    Numbers in the other byte order and in extended precision, which torch doesn't know, are converted.

    >>> as_tensor(np.array([1, 2], dtype=">i4")), as_tensor([0.5, 1.5])
    (tensor([1, 2], dtype=torch.int32), tensor([0.5000, 1.5000], dtype=torch.float64))

    Args:
        values: an array, a tensor, or a list of numbers or of such lists.
        name: name of the values in the error message.

    Raises:
        MisconfigurationException: if the values aren't numbers, or the lists differ in length.
    """
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
    except ValueError:
        raise MisconfigurationException(f"{name} has rows of different lengths; give rows of one length") from None
    check_type(array.dtype, name)
    if array.dtype.kind in "fc" and array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.complex128)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch warns about read-only memory, such as a data frame's, and refuses reversed arrays
    is_shared = array.flags.writeable and min(array.strides, default=0) >= 0
    return torch.as_tensor(array if is_shared else array.copy())


def check_type(dtype: Any, name: str) -> None:
    """Check that an array holds numbers.

    Args:
        dtype: type of the elements; anything but a NumPy type passes.
        name: name of the array in the error message.

    Raises:
        MisconfigurationException: if the elements are texts, dates, records or Python objects.
    """
    if isinstance(dtype, np.dtype) and dtype.kind not in "biufc":
        raise MisconfigurationException(f"{name} is of type {dtype}; make numbers of it, such as float32")


def with_leaves(tree: Tree, name: str) -> Tree:
    """Return a tree whose leaves are tensors, or objects with readable rows.

    Arrays in memory, data frames and lists of numbers become tensors; memory maps and readers stay as they are.

    Args:
        tree: a tensor, an array, a data frame, a list of numbers, or a dict, tuple or list of trees.
        name: name of the tree in error messages.

    Raises:
        MisconfigurationException: if a leaf has no rows, or doesn't hold numbers.
    """
    if isinstance(tree, Mapping):
        return {key: with_leaves(part, f"{name}[{key!r}]") for key, part in tree.items()}
    if type(tree) in (list, tuple) and not is_table(tree):
        return type(tree)(with_leaves(part, f"{name}[{index}]") for index, part in enumerate(tree))
    # indexing a data frame's column looks rows up by label and not by position
    leaf = tree.to_numpy() if hasattr(tree, "to_numpy") else tree
    if type(leaf) in (list, tuple, np.ndarray):
        leaf = as_tensor(leaf, name)
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
            kind = "meta" if leaf.is_meta else "quantized" if leaf.is_quantized else str(leaf.layout)[6:]
            raise MisconfigurationException(f"{name} is a {kind} tensor; give a dense one")
        # else each gather would record a graph over the whole pool
        leaf = leaf.detach() if leaf.requires_grad else leaf
    elif isinstance(leaf, (str, bytes)) or not (has_length(leaf) and hasattr(leaf, "__getitem__")):
        raise MisconfigurationException(f"{name} is a {type(leaf).__name__}; give an array or a tensor, a row a sample")
    else:
        check_type(getattr(leaf, "dtype", None), name)
    if getattr(leaf, "ndim", 1) == 0:
        raise MisconfigurationException(f"{name} is a single number; give an array or a tensor, a row a sample")
    return leaf


def has_length(leaf: Any) -> bool:
    """Return whether the rows of a leaf can be counted; SciPy's sparse matrices refuse ``len``."""
    try:
        return len(leaf) >= 0
    except TypeError:
        # an array of no dimension passes here, for the clearer refusal "is a single number"
        return hasattr(leaf, "ndim") and leaf.ndim == 0


def is_table(values: Sequence[Any]) -> bool:
    """Return whether a list holds numbers (or lists of numbers) and not arrays; also True for a tuple of numbers.

    >>> is_table([[1, 2], [3, 4]]), is_table((1, 2)), is_table(([1, 2], [3, 4])), is_table([torch.zeros(2)])
    (True, True, False, False)

    Args:
        values: the list or tuple.
    """
    first: Any = values[0] if values else None
    while type(values) is list and type(first) is list:
        first = first[0] if first else None
    is_single = isinstance(first, (Tensor, np.ndarray)) and first.ndim == 0
    return is_single or first is None or isinstance(first, (Number, np.generic, str, bytes))


def first_not_finite(leaf: Any) -> tuple[int, ...] | None:
    """Return the position of the first NaN, infinity or number beyond single precision; None without one.

    >>> first_not_finite(torch.tensor([[0.0, 1.0], [2.0, torch.inf]])), first_not_finite(torch.tensor([3.0]))
    ((1, 1), None)

    Args:
        leaf: a tensor, or a memory map, read a few rows at a time.
    """
    is_floating = leaf.is_floating_point() or leaf.is_complex() if isinstance(leaf, Tensor) else leaf.dtype.kind in "fc"
    if not is_floating or 0 in leaf.shape:
        return None
    step = max(1, BLOCK // math.prod(leaf.shape[1:]))
    for start in range(0, len(leaf), step):
        block = read(leaf, slice(start, start + step))
        if block.is_complex():
            block = torch.view_as_real(block).abs().amax(-1)
        # float8 types have no minimum and maximum in torch
        elif block.itemsize == 1:
            block = block.float()
        # one pass without a copy; `isfinite` takes ten times as long
        low, high = (float(bound) for bound in torch.aminmax(block))
        # written with `not`, as every comparison with NaN is False
        if not (low >= -LARGEST and high <= LARGEST):
            row, *place = (~(block.abs() <= LARGEST)).nonzero()[0].tolist()
            return (start + row, *place)
    return None


def cell(name: str, value: complex, place: Sequence[int]) -> str:
    """Return the words for a number that no net can take, and for its place.

    >>> cell("x", float("nan"), (17, 3))
    'x is nan in row 17, column 3'

    Args:
        name: name of the array.
        value: the number.
        place: position of the number, the row first.
    """
    where = f", column {place[1]}" if len(place) == 2 else f" at {list(place[1:])}" if len(place) > 2 else ""
    large = ", beyond single precision," if math.isfinite(abs(value)) else ""
    return f"{name} is {value}{large} in row {place[0]}{where}"


class Rows:
    """Some rows of a leaf that is no tensor, read only on access.

    Args:
        leaf: an object with a length that returns an array or a tensor for ``leaf[positions]``.
        rows: positions of the rows.
    """

    def __init__(self, leaf: Any, rows: Tensor) -> None:
        self.leaf = leaf
        self.rows = rows.numpy()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: NDArray[np.int64]) -> Any:
        return self.leaf[self.rows[positions]]


def narrowed(tree: Tree, rows: Tensor) -> Tree:
    """Return the samples at some positions, without reading leaves that stay in files.

    Args:
        tree: a tree of any leaves.
        rows: positions of the samples, ascending.
    """
    return mapped(tree, lambda leaf: take(leaf, rows) if isinstance(leaf, Tensor) else Rows(leaf, rows))


def split(tree: Tree, sizes: int | list[int], dim: int = 0) -> Iterator[Tree]:
    """Cut a tree of tensors into pieces, which are views.

    >>> [piece["a"].tolist() for piece in split({"a": torch.arange(3)}, 2)]
    [[0, 1], [2]]

    Args:
        tree: a tree of tensors.
        sizes: the size of all pieces, or the size of each.
        dim: the dimension to cut.
    """
    if isinstance(tree, Tensor):
        return iter(torch.split(tree, sizes, dim))
    if type(tree) is tuple:
        return zip(*(split(part, sizes, dim) for part in tree), strict=True)
    leaves = zip(*(torch.split(leaf, sizes, dim) for leaf in tensors(tree)), strict=True)
    return (like(tree, pieces) for pieces in leaves)


def like(tree: Tree, leaves: Sequence[Tensor]) -> Tree:
    """Return a tree of the same structure with other leaves, given in order.

    Args:
        tree: the structure.
        leaves: the new leaves.
    """
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), tree)


def merged(trees: Sequence[Tree], merge: Callable[[list[Tensor]], Tensor]) -> Tree:
    """Merge several trees of one structure leaf by leaf.

    Args:
        trees: the trees, at least one.
        merge: takes the corresponding leaves of all trees, and returns one.
    """
    if isinstance(trees[0], Tensor):
        return merge(list(trees))
    # by key: dicts may have their keys in different orders
    if type(trees[0]) is dict:
        return {name: merged([tree[name] for tree in trees], merge) for name in trees[0]}
    if type(trees[0]) is tuple:
        return tuple(merged(parts, merge) for parts in zip(*trees, strict=True))
    return like(trees[0], [merge(list(leaves)) for leaves in zip(*map(tensors, trees), strict=True)])


def shortened(x: Tree, y: Tree, length: int | None) -> tuple[Tree, Tree]:
    """Return inputs and targets of texts without the positions behind a length.

    >>> shortened({"a": torch.ones(2, 9), "b": torch.ones(2, 3)}, torch.tensor([range(9)]), 2)[1]
    tensor([[0, 1]])

    Args:
        x: inputs; a tensor whose last dimension is as long as that of the targets has positions.
        y: targets ``[..., T]``, or a tree whose first tensor has this shape.
        length: number of positions; None keeps all.
    """
    if length is None or length >= (size := next(tensors(y)).shape[-1]):
        return x, y
    shortened: tuple[Tree, Tree] = tree_map(
        lambda leaf: leaf[..., :length] if leaf.shape[-1:] == (size,) else leaf, (x, y)
    )
    return shortened


def joined(trees: Sequence[Tree]) -> Tree:
    """Join the samples of several trees, one after another.

    >>> joined([{"a": torch.tensor([1])}, {"a": torch.tensor([2, 3])}])
    {'a': tensor([1, 2, 3])}

    Args:
        trees: the trees, at least one.
    """
    return merged(trees, torch.cat)


def padded(trees: Sequence[Tree]) -> Tree:
    """Stack trees to ``[trees, n, ...]``, with zeros in place of missing samples.

    >>> padded([torch.tensor([1]), torch.tensor([2, 3])])
    tensor([[1, 0],
            [2, 3]])

    Args:
        trees: the trees, at least one.
    """
    return merged(trees, lambda leaves: pad_sequence(leaves, batch_first=True))
