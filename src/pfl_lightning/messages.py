"""What travels between clients and the server: records of tensors, and arithmetic on state dicts."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pfl_lightning.transfers import moved, rows_of

StateDict: TypeAlias = dict[str, Tensor]
"""Named tensors of a module, or a part of them."""

Message: TypeAlias = dict[str, Any]
"""An update (up) or a payload (down): named tensors, or dicts and lists of them, such as ``{"weights": {...}}``."""

Updates: TypeAlias = dict[int, Message]
"""The updates of a round, by client id, in the order of the ids."""

CPU = torch.device("cpu")


class Stack:
    """Tensors of several clients side by side, on the device where they were made.

    Who asks for a client's gets a view of one copy of that entry on the CPU, which then is all that there is of it.

    Args:
        entries: ``{name: [clients, ...]}``, of at least one name.
    """

    def __init__(self, entries: StateDict) -> None:
        self.entries = dict(entries)
        self.rows: dict[str, tuple[Tensor, ...]] = {}

    def on_cpu(self, name: str) -> tuple[Tensor, ...]:
        """Each client's tensor of one name, on the CPU."""
        if name not in self.rows:
            self.entries[name] = self.entries[name].to(CPU)
            self.rows[name] = self.entries[name].unbind()
        return self.rows[name]

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of a client's tensors, by name."""
        return {name: stack.shape[1:] for name, stack in self.entries.items()}

    @cached_property
    def types(self) -> dict[str, torch.dtype]:
        """Types of a client's tensors, by name."""
        return {name: stack.dtype for name, stack in self.entries.items()}

    @cached_property
    def bytes_of_a_row(self) -> int:
        """What a client's tensors take on the wire."""
        return sum(stack[0].nbytes for stack in self.entries.values())

    def sums(self, weights: Sequence[tuple[int, Sequence[float]]], names: Iterable[str]) -> StateDict:
        """As `weighted_means` of the clients of some rows, ``[m, ...]``, on the device: one product for each name."""
        # in the order of the stack, of which all then is taken as it is
        rows, columns = (list(part) for part in zip(*sorted(weights), strict=True))
        entries = {name: self.entries[name] for name in names}
        if rows != list(range(len(next(iter(self.entries.values()))))):
            entries = {name: stack[torch.tensor(rows, device=stack.device)] for name, stack in entries.items()}
        kinds = {(promoted(stack), stack.device) for stack in entries.values() if stack.is_floating_point()}
        factors = {(wide, device): torch.tensor(columns, dtype=wide, device=device).T for wide, device in kinds}
        return {name: product(factors, stack, len(columns[0])) for name, stack in entries.items()}


class Row(Mapping[str, Tensor]):
    """A client's tensors in a stack, by name: what it sends, as long as nobody has looked at it.

    Args:
        stack: the stack.
        index: the client's row.
    """

    def __init__(self, stack: Stack, index: int) -> None:
        self.stack, self.index = stack, index

    def __getitem__(self, name: str) -> Tensor:
        return self.stack.on_cpu(name)[self.index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack.entries)

    def __len__(self) -> int:
        return len(self.stack.entries)

    def __or__(self, other: Mapping[str, Tensor]) -> StateDict:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Tensor]) -> StateDict:
        return {**other, **self}

    def __reduce__(self) -> Any:
        # in a file or another process it is by itself
        return dict, (dict(self),)


class Restored(dict[str, Tensor]):
    """Weights as they were restored from a compressed form, with the form that travelled.

    Args:
        weights: restored, by name.
        travelled: the compressed form.
    """

    def __init__(self, weights: StateDict, travelled: dict[str, Any]) -> None:
        super().__init__(weights)
        self.travelled = travelled

    def __reduce__(self) -> Any:
        return Restored, (dict(self), self.travelled)


def tensors(record: Any) -> Iterator[Tensor]:
    """Every tensor of a record, at any depth, in the record's order."""
    if isinstance(record, Tensor):
        yield record
    elif isinstance(record, (list, tuple)):
        for value in record:
            yield from tensors(value)
    # a dict first: whether something is another mapping takes long to tell
    elif isinstance(record, (dict, Mapping)):
        for value in record.values():
            yield from tensors(value)


def num_bytes(record: Any) -> int:
    """Bytes that a record takes on the wire: the sizes of its tensors, nothing else.

    >>> num_bytes({"weights": {"w": torch.zeros(3)}, "num_samples": torch.tensor(7)})
    20
    """
    if isinstance(record, Tensor):
        return record.nbytes
    if type(record) is Row:
        return record.stack.bytes_of_a_row
    if type(record) is Restored:
        return num_bytes(record.travelled)
    if isinstance(record, (dict, Mapping)):
        return sum(map(num_bytes, record.values()))
    return sum(map(num_bytes, record)) if isinstance(record, (list, tuple)) else 0


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
    if type(record) is Row:
        return is_finite([column([record], name)[0] for name in record])
    # a sum is NaN or infinite if an addend is, and reads the tensor once without a mask of its size;
    # a float32 sum of finite weights that overflows belongs to a diverged client too
    return all(not t.is_floating_point() or math.isfinite(t.sum().item()) for t in tensors(record))


def tree_map(function: Callable[[Tensor], Tensor], record: Any) -> Any:
    """The record with ``function`` applied to each of its tensors."""
    if isinstance(record, Tensor):
        return function(record)
    if isinstance(record, (list, tuple)):
        return type(record)(tree_map(function, value) for value in record)
    if isinstance(record, (dict, Mapping)):
        return {key: tree_map(function, value) for key, value in record.items()}
    return record


def detached(record: Any) -> Any:
    """The record as copies of its own on the CPU, free of modules, graphs and devices.

    ``state_dict`` hands out references: what leaves a client must be copied before the next one trains in its place.
    """
    return tree_map(lambda t: t.detach().to("cpu", copy=True), record)


def column(states: Sequence[Mapping[str, Tensor]], name: str) -> list[Tensor]:
    """An entry of each of several state dicts, all on one device: rows of stacks where they are, others on the CPU.

    >>> column([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}], "w")
    [tensor(1.), tensor(2.)]

    Args:
        states: any number of state dicts with that entry.
        name: the entry's.
    """
    if all(type(state) is Row for state in states):
        rows = [row.stack.entries[name][row.index] for row in cast(Sequence[Row], states)]
        # Apple's GPUs know no float64, in which many compare
        if len({row.device for row in rows}) == 1 and rows[0].device.type != "mps":
            return rows
    return [state[name] for state in states]


@torch.no_grad()
def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float], names: Iterable[str] | None = None
) -> StateDict:
    r"""Entry-wise :math:`\sum_k \lambda_k w_k` of state dicts, reduced in the order given.

    Floating entries are summed in float32 or better and returned in their own type. Integer entries (BatchNorm's
    ``num_batches_tracked``) take the maximum: a mean of counters counts nothing.

    >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [0.75, 0.25])
    {'w': tensor([1.])}

    Args:
        states: at least one state dict; all with the same names and shapes.
        weights: one a state dict; they are used as they are, so let them sum to 1 for a mean.
        names: the entries that are wanted; all by default.
    """
    if all(type(state) is Row for state in states):
        means = means_of_rows(cast(Sequence[Row], states), [weights], names)
        return {name: stack[0] for name, stack in means.items()}
    first, *others = states
    mean = {}
    for name in first if names is None else names:
        tensor = first[name]
        if not tensor.is_floating_point():
            mean[name] = torch.stack([state[name] for state in states]).amax(0)
            continue
        total = tensor.to(promoted(tensor)) * weights[0]
        for state, weight in zip(others, weights[1:], strict=True):
            total.add_(state[name], alpha=weight)
        mean[name] = total.to(tensor.dtype)
    return mean


@torch.no_grad()
def weighted_means(states: Sequence[Mapping[str, Tensor]], weights: Sequence[Sequence[float]]) -> list[StateDict]:
    r"""Several means of the same state dicts, :math:`\sum_k A_{ik} w_k`, each as from `weighted_mean`.

    Args:
        states: n of them, at least one.
        weights: A, m lists of n.
    """
    if all(type(state) is Row for state in states):
        return rows_of(means_of_rows(cast(Sequence[Row], states), weights), len(weights), CPU)
    return [weighted_mean(states, row) for row in weights]


def means_of_rows(
    rows: Sequence[Row], weights: Sequence[Sequence[float]], names: Iterable[str] | None = None
) -> StateDict:
    """As `weighted_means`, side by side ``[m, ...]``, of rows of one stack or of several; on the CPU."""
    names = list(rows[0] if names is None else names)
    stacks: dict[Stack, list[tuple[int, Sequence[float]]]] = {}
    for row, column in zip(rows, zip(*weights, strict=True), strict=True):
        stacks.setdefault(row.stack, []).append((row.index, column))
    parts = [stack.sums(own, names) for stack, own in stacks.items()]
    means = [together([part[name] for part in parts]).to(rows[0].stack.entries[name].dtype) for name in names]
    return dict(zip(names, moved(means, CPU), strict=True))


def together(parts: list[Tensor]) -> Tensor:
    """The sum of floating tensors, the maximum of others; who looked at a part has it on the CPU."""
    if len(parts) == 1:
        return parts[0]
    stack = torch.stack([part.to(parts[0].device) for part in parts])
    return stack.sum(0) if stack.is_floating_point() else stack.amax(0)


def product(factors: Mapping[tuple[torch.dtype, torch.device], Tensor], stack: Tensor, count: int) -> Tensor:
    """Weighted sums of the rows of a floating stack, in float32 or better; of another one the maximum, as many times.

    Args:
        factors: the weights ``[m, clients]``, by the type in which sums are taken and the device.
        stack: ``[clients, ...]``.
        count: m.
    """
    if not stack.is_floating_point():
        return stack.amax(0).expand(count, *stack.shape[1:])
    wide = promoted(stack)
    return (factors[wide, stack.device] @ stack.reshape(len(stack), -1).to(wide)).view(count, *stack.shape[1:])


def promoted(tensor: Tensor) -> torch.dtype:
    """The type in which sums of a floating tensor are taken."""
    return torch.promote_types(tensor.dtype, torch.float32)


def keep_own(record: Any, updates: Updates) -> Any:
    """Puts copies in the place of what a record, changed in place, has of the stacks in which updates are rows.

    Else who keeps one row would keep, and save, all of them.
    """
    stacks = {value.stack for update in updates.values() for value in update.values() if type(value) is Row}
    storages = {stack.untyped_storage().data_ptr() for of_rows in stacks for stack in of_rows.entries.values()}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if value.untyped_storage().data_ptr() in storages else value
        if type(value) is Row:
            return {name: tensor.clone() for name, tensor in value.items()}
        if isinstance(value, tuple):
            return type(value)(map(own, value))
        if isinstance(value, (dict, list)):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (kept := own(item)) is not item:
                    value[key] = kept
        return value

    return own(record) if stacks else record
