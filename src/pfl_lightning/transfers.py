"""Joint transfers of tensors between devices: many small tensors, sent together, take as long as one large one."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on a device, in order, by one copy for each type and origin.

    Tensors already on the device are returned unchanged. Results on the CPU are independent copies: keeping one doesn't
    keep the memory of all.

    Args:
        tensors: tensors of any shapes.
        device: device of the results.
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
            # a view keeps the whole transfer in memory; on the CPU, where results are kept for long, each becomes a
            # copy
            whole = piece.view(part.shape)
            result[index] = whole.clone() if device.type == "cpu" else whole
    return result


def side_by_side(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors: on the device if any tensor lies on the device, else on the CPU.

    Args:
        rows: tensors of one shape and type, each on the device or on the CPU.
        device: device of the stack.
    """
    return torch.stack(moved(rows, device) if any(row.device == device for row in rows) else list(rows))


def rows_of(stacks: Mapping[str, Tensor], count: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return each row of stacks as independent tensors on a device; a kept row keeps no stack in memory.

    Args:
        stacks: tensors ``[count, ...]`` by name.
        count: number of rows, needed if there is no stack.
        device: device of the results.
    """
    # typed as without a result in torch's stubs
    copies = cast(Callable[[Tensor], tuple[Tensor, ...]], torch.unbind_copy)
    columns = map(copies, moved([*stacks.values()], device))
    return [dict(zip(stacks, row, strict=True)) for row in zip(*columns, strict=True)] or [{} for _ in range(count)]
