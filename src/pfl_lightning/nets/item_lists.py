"""Batches that are lists of samples of different shapes, such as images with boxes, as trees of tensors with rows.

A detection model takes a list of images and a list of dicts. Engines take and move tensors with a row for each sample
alone, so that lists travel as padded tensors beside the sizes, and a LightningModule gets lists again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

KINDS: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"items of a list": list, "items of a tuple": tuple}
"""Names in the place of lists, by which lists are known again."""
PADDED, SIZES = "padded", "sizes"


def are_items(one: Any, two: Any) -> bool:
    """Return whether a part of a batch is a list with an element for each sample.

    >>> are_items([torch.zeros(3)], [torch.zeros(3), torch.zeros(3)]), are_items(torch.zeros(1, 3), torch.zeros(2, 3))
    (True, False)

    Args:
        one: the part in a batch of one sample.
        two: the part in a batch of two.
    """
    # not by the shapes: an image of one channel looks like a row of a batch
    return type(one) is type(two) and type(one) in (list, tuple) and (len(one), len(two)) == (1, 2)


def packed(items: Sequence[Any]) -> dict[str, Any]:
    """Return a list of samples as a tree of tensors with a row each.

    >>> packed([torch.tensor([5.0]), torch.tensor([6.0, 7.0])])["items of a list"]["padded"]
    tensor([[5., 0.],
            [6., 7.]])

    Args:
        items: a list or tuple of samples, each a tensor, a number, or a dict, list or tuple of these, of one structure.

    Raises:
        MisconfigurationException: if samples differ in structure, or have other values than numbers.
    """
    kind = next(name for name, each in KINDS.items() if isinstance(items, each))
    return {kind: packed_part(items, "")}


def packed_part(items: Sequence[Any], name: str) -> Any:
    """Return one part of several samples as a tree of tensors.

    Args:
        items: the part of each sample.
        name: the part's name for messages.
    """
    first = items[0]
    if isinstance(first, Mapping):
        if any(not isinstance(item, Mapping) or item.keys() != first.keys() for item in items):
            raise MisconfigurationException(
                f"data.collate_fn: samples of a list differ in the entries of their dicts{name}; give all the same"
            )
        return {key: packed_part([item[key] for item in items], f"{name}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        if any(type(item) is not type(first) or len(item) != len(first) for item in items):
            raise MisconfigurationException(
                f"data.collate_fn: samples of a list differ in the length of their lists{name}; make tensors of them, "
                "whose shapes may differ"
            )
        parts = [packed_part(list(part), f"{name}[{place}]") for place, part in enumerate(zip(*items, strict=True))]
        return parts if isinstance(first, list) else tuple(parts)
    try:
        # plain tensors: boxes of TorchVision are a subclass, which would check what is padded
        tensors = [torch.as_tensor(item).as_subclass(Tensor) for item in items]
    except (TypeError, ValueError, RuntimeError):
        raise MisconfigurationException(
            f"data.collate_fn: samples of a list have a {type(first).__name__}{name and f' in {name}'}; give tensors "
            "and numbers, and leave texts out"
        ) from None
    if len({each.dim() for each in tensors}) > 1:
        shapes = ", ".join(sorted({str(list(each.shape)) for each in tensors})[:2])
        raise MisconfigurationException(
            f"data.collate_fn: samples of a list have tensors of shapes {shapes}{name and f' in {name}'}; give all as "
            "many dimensions, such as boxes [0, 4] where there are none"
        )
    sizes = torch.tensor([list(each.shape) for each in tensors]).view(len(tensors), -1)
    most = sizes.amax(0).tolist()
    return {PADDED: torch.stack([widened(each, most) for each in tensors]), SIZES: sizes}


def widened(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor with zeros behind its entries, up to a shape.

    Args:
        tensor: the tensor.
        shape: the shape, at least as large in each dimension.
    """
    # from the last dimension on, as `pad` counts
    missing = [amount for side, most in zip(tensor.shape, shape, strict=True) for amount in (most - side, 0)]
    return F.pad(tensor, missing[::-1]) if any(missing) else tensor


def holds_items(tree: Any) -> bool:
    """Return whether a batch, or a part of it, is a list of samples, as `packed` returns.

    Args:
        tree: a tree of tensors.
    """
    if isinstance(tree, Mapping):
        return not KINDS.keys().isdisjoint(tree) or any(map(holds_items, tree.values()))
    return type(tree) in (list, tuple) and any(map(holds_items, tree))


def unpacked(tree: Any) -> Any:
    """Return a batch with lists of samples where `packed` has put tensors; other batches stay as they are.

    >>> unpacked(packed((torch.zeros(2), torch.zeros(3))))
    (tensor([0., 0.]), tensor([0., 0., 0.]))

    Args:
        tree: a tree of tensors.
    """
    if isinstance(tree, Mapping):
        kind = KINDS.get(next(iter(tree), ""))
        if kind is not None:
            return kind(unpacked_items(next(iter(tree.values()))))
        return {key: unpacked(part) for key, part in tree.items()}
    return type(tree)(unpacked(part) for part in tree) if type(tree) in (list, tuple) else tree


def unpacked_items(tree: Any) -> list[Any]:
    """Return the samples of a part of a list; see `packed_part`."""
    if isinstance(tree, Mapping):
        if tree.keys() == {PADDED, SIZES}:
            return [
                row[tuple(slice(side) for side in sides)]
                for row, sides in zip(tree[PADDED], tree[SIZES].tolist(), strict=True)
            ]
        parts = {key: unpacked_items(part) for key, part in tree.items()}
        return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]
    kind = type(tree)
    return [kind(each) for each in zip(*(unpacked_items(part) for part in tree), strict=True)]
