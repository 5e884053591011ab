"""What travels between clients and the server: records of tensors, and arithmetic on state dicts."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

StateDict: TypeAlias = dict[str, Tensor]
"""Named tensors of a module, or a part of them."""

Message: TypeAlias = dict[str, Any]
"""An update (up) or a payload (down): named tensors, or dicts and lists of them, such as ``{"weights": {...}}``."""

Updates: TypeAlias = dict[int, Message]
"""The updates of a round, by client id, in the order of the ids."""


def tensors(record: Any) -> Iterator[Tensor]:
    """Every tensor of a record, at any depth, in the record's order."""
    if isinstance(record, Tensor):
        yield record
    elif isinstance(record, Mapping):
        for value in record.values():
            yield from tensors(value)
    elif isinstance(record, (list, tuple)):
        for value in record:
            yield from tensors(value)


def num_bytes(record: Any) -> int:
    """Bytes that a record takes on the wire: the sizes of its tensors, nothing else.

    >>> num_bytes({"weights": {"w": torch.zeros(3)}, "num_samples": torch.tensor(7)})
    20
    """
    return sum(t.numel() * t.element_size() for t in tensors(record))


def digest(record: Any) -> str:
    """Fingerprint of a record's tensors, 16 hexadecimal digits: the same for the same bits in the same order.

    >>> digest([torch.zeros(3)]) == digest({"w": torch.zeros(3)}) != digest([torch.ones(3)])
    True
    """
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors(record):
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # as bytes, since NumPy has no bfloat16; a view of one element may have a stride that can't be seen so
        flat = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        hashed.update(flat.view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def is_finite(record: Any) -> bool:
    """Whether no tensor of a record holds a NaN or an infinity."""
    # a sum is NaN or infinite if an addend is, and reads the tensor once without a mask of its size;
    # a float32 sum of finite weights that overflows belongs to a diverged client too
    return all(not t.is_floating_point() or math.isfinite(t.sum().item()) for t in tensors(record))


def tree_map(function: Callable[[Tensor], Tensor], record: Any) -> Any:
    """The record with ``function`` applied to each of its tensors."""
    if isinstance(record, Tensor):
        return function(record)
    if isinstance(record, Mapping):
        return {key: tree_map(function, value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return type(record)(tree_map(function, value) for value in record)
    return record


def detached(record: Any) -> Any:
    """The record as copies of its own on the CPU, free of modules, graphs and devices.

    `state_dict` hands out references: what leaves a client must be copied before the next one trains in its place.
    """
    return tree_map(lambda t: t.detach().to("cpu", copy=True), record)


@torch.no_grad()
def weighted_mean(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> StateDict:
    r"""Entry-wise :math:`\sum_k \lambda_k w_k` of state dicts, reduced in the order given.

    Floating entries are summed in float32 or better and returned in their own type. Integer entries (BatchNorm's
    ``num_batches_tracked``) take the maximum: a mean of counters counts nothing.

    >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [0.75, 0.25])
    {'w': tensor([1.])}

    Args:
        states: at least one state dict; all with the same names and shapes.
        weights: one a state dict; they are used as they are, so let them sum to 1 for a mean.
    """
    first, *others = states
    mean = {}
    for name, tensor in first.items():
        if not tensor.is_floating_point():
            mean[name] = torch.stack([state[name] for state in states]).amax(0)
            continue
        wide = torch.promote_types(tensor.dtype, torch.float32)
        total = tensor.to(wide) * weights[0]
        for state, weight in zip(others, weights[1:], strict=True):
            total.add_(state[name], alpha=weight)
        mean[name] = total.to(tensor.dtype)
    return mean
