"""Raw rows to predict for, as tensors in the form of training inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from pfl_lightning.data.trees import Tree, cell, first_not_finite, mapped, read, with_leaves
from pfl_lightning.messages import tensors


def checked_rows(rows: Any, like: Tree) -> Tree:
    """Return rows as tensors in the form of training inputs, without a copy where the type is the same.

    >>> checked_rows([[1, 2]], torch.empty(0, 2))
    tensor([[1., 2.]])

    Args:
        rows: a tensor or an array ``[n, ...]``, a tree of these, or a map-style Dataset.
        like: a tree of empty tensors with the right shape and type.

    Raises:
        MisconfigurationException: if the rows have another form, no row, or numbers that aren't finite.
    """
    if isinstance(rows, (DataLoader, IterableDataset)):
        raise MisconfigurationException(
            f"data={type(rows).__name__} doesn't tell its rows by number; give tensors or a map-style Dataset"
        )
    if isinstance(rows, Dataset):
        rows = items_of(rows)
    return checked(mapped(with_leaves(rows, "data"), lambda leaf: read(leaf, slice(None))), like, "data")


def items_of(dataset: Any) -> Tree:
    """Return the inputs of a map-style Dataset; targets that items have beside them are left out.

    Args:
        dataset: the Dataset.
    """
    if not len(dataset):
        raise MisconfigurationException(f"data={type(dataset).__name__} has no items to predict for; give at least one")
    items = (dataset[index] for index in range(len(dataset)))
    return default_collate([item[0] if isinstance(item, (tuple, list)) else item for item in items])


def checked(rows: Tree, like: Tree, name: str) -> Tree:
    """Return a tree of rows in the types of another tree; see `checked_rows`.

    Args:
        rows: a tree of tensors.
        like: a tree of empty tensors.
        name: name of the tree for messages.
    """
    if isinstance(like, Mapping):
        if not isinstance(rows, Mapping) or not rows.keys() >= like.keys():
            raise MisconfigurationException(f"{name} must be a dict with {', '.join(map(repr, like))}, as in training")
        tree: Tree = {key: checked(rows[key], part, f"{name}[{key!r}]") for key, part in like.items()}
        return same_length(tree, name)
    if type(like) in (tuple, list):
        if type(rows) not in (tuple, list) or len(rows) != len(like):
            raise MisconfigurationException(f"{name} must be a {type(like).__name__} of {len(like)} parts")
        parts = (checked(part, other, f"{name}[{k}]") for k, (part, other) in enumerate(zip(rows, like, strict=True)))
        return same_length(type(like)(parts), name)
    if not isinstance(rows, Tensor):
        raise MisconfigurationException(
            f"{name} is a {type(rows).__name__}; give a tensor of shape {shown(like)}, as in training"
        )
    if rows.shape[1:] != like.shape[1:] or not rows.dim() or not len(rows):
        raise MisconfigurationException(
            f"{name} has the shape {list(rows.shape)}, and the inputs in training {shown(like)}; give such rows"
        )
    if (place := first_not_finite(rows)) is not None:
        raise MisconfigurationException(f"{cell(name, rows[place].item(), place)}; correct this row, or leave it out")
    return in_type(rows, like.dtype, name)


def in_type(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return rows in the type of the inputs in training.

    Args:
        rows: the rows.
        dtype: the type in training.
        name: name of the rows for the message.

    Raises:
        MisconfigurationException: if the type can't hold the rows.
    """
    # images may come as bytes or as finished inputs: `transform` scales bytes alone
    if rows.dtype == dtype or (dtype == torch.uint8 and rows.is_floating_point()):
        return rows
    whole = not (rows.is_floating_point() or rows.is_complex())
    if dtype.is_floating_point and not rows.is_complex():
        return rows.to(dtype)
    if whole and dtype != torch.uint8 and not dtype.is_floating_point:
        return rows.to(dtype)
    raise MisconfigurationException(f"{name} is of the type {rows.dtype}, and the inputs in training of {dtype}")


def same_length(tree: Tree, name: str) -> Tree:
    """Return a tree whose tensors have the same number of rows.

    Raises:
        MisconfigurationException: if the numbers differ.
    """
    if len(counts := {len(leaf) for leaf in tensors(tree)}) > 1:
        raise MisconfigurationException(f"{name} has parts of {sorted(counts)} rows; give each the same number")
    return tree


def shown(like: Tensor) -> str:
    """Return the shape of inputs for messages.

    >>> shown(torch.empty(0, 3, 8))
    '[n, 3, 8]'
    """
    return f"[{', '.join(['n', *map(str, like.shape[1:])])}]"
