"""Transfers between devices: many small tensors take as long as one large one when they travel together."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device, in their order: one copy for each type and place, and none where they already are.

    What arrives on the CPU are tensors of their own, so that who keeps one doesn't keep all.

    Args:
        tensors: any, of any shapes.
        device: where they are wanted.
    """
    result = list(tensors)
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(result):
        if tensor.device != device:
            together.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in together.values():
        if len(indices) == 1:
            result[indices[0]] = result[indices[0]].to(device)
            continue
        parts = [result[index] for index in indices]
        flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
        for index, part, piece in zip(indices, parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
            whole = piece.view(part.shape)
            result[index] = whole.clone() if device.type == "cpu" else whole
    return result


def side_by_side(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """A stack of tensors, on the device where one of them already is, and else where they are.

    Args:
        rows: tensors of one shape and type, each on the device or on the CPU.
        device: where the stack is wanted.
    """
    return torch.stack(moved(rows, device) if any(row.device == device for row in rows) else list(rows))


def rows_of(stacks: Mapping[str, Tensor], count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Each row of stacks as tensors of its own on a device: who keeps or saves one shall not keep the stack."""
    columns = [[row.clone() for row in stack.unbind()] for stack in moved([*stacks.values()], device)]
    return [dict(zip(stacks, row, strict=True)) for row in zip(*columns, strict=True)] or [{} for _ in range(count)]
