"""Messages between clients and server: nested dicts of tensors, and arithmetic on state dicts."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pfl_lightning.transfers import moved, rows_of, side_by_side

StateDict: TypeAlias = dict[str, Tensor]
"""Tensors of a module, or of a part of it, by name."""

Message: TypeAlias = dict[str, Any]
"""An update (to the server) or a payload (to a client): tensors by name, or nested dicts and lists of tensors, such as
``{"weights": {...}}``.
"""

Updates: TypeAlias = dict[int, Message]
"""The updates of a round, by client id, in the order of the ids."""

CPU = torch.device("cpu")


class Stack:
    """Tensors of several clients as rows of one tensor a name, on the device where the clients trained.

    The first access to an entry on the CPU copies the whole entry to the CPU, where it replaces the one on the device;
    each client's tensor is then a view of this copy.

    Args:
        entries: ``{name: [clients, ...]}``, with at least one name.
    """

    def __init__(self, entries: StateDict) -> None:
        self.entries = dict(entries)
        self.rows: dict[str, tuple[Tensor, ...]] = {}

    def on_cpu(self, name: str) -> tuple[Tensor, ...]:
        """Return each client's tensor of one name, on the CPU.

        Args:
            name: the name.
        """
        if name not in self.rows:
            # a single transfer for all clients; the device's memory is free afterwards
            self.entries[name] = self.entries[name].to(CPU)
            self.rows[name] = self.entries[name].unbind()
        return self.rows[name]

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of one client's tensor, by name."""
        return {name: (stack.shape[1:], stack.dtype) for name, stack in self.entries.items()}

    @cached_property
    def bytes_of_a_row(self) -> int:
        """Bytes of one client's tensors."""
        return sum(stack[0].nbytes for stack in self.entries.values())

    def sums(self, weights: Sequence[tuple[int, Sequence[float]]], names: Iterable[str]) -> StateDict:
        """Return weighted sums of rows, as `weighted_means`, on the stack's device: one matrix product for each name.

        Args:
            weights: pairs of a row's index and its m weights, one for each sum.
            names: the entries to sum.

        Returns:
            ``{name: [m, ...]}``.
        """
        # sorted by row, so that a sum over all rows needs no copy of the stack
        rows, columns = (list(part) for part in zip(*sorted(weights), strict=True))
        entries = {name: self.entries[name] for name in names}
        if rows != list(range(len(next(iter(self.entries.values()))))):
            entries = {name: stack[torch.tensor(rows, device=stack.device)] for name, stack in entries.items()}
        sums: StateDict = {}
        factors: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for name, stack in entries.items():
            m, shape = len(columns[0]), stack.shape[1:]
            if not stack.is_floating_point():
                sums[name] = stack.amax(0).expand(m, *shape)
                continue
            kind = wide, device = promoted(stack), stack.device
            if kind not in factors:
                factors[kind] = torch.tensor(columns, dtype=wide, device=device).T
            sums[name] = (factors[kind] @ stack.reshape(len(stack), -1).to(wide)).view(m, *shape)
        return sums


class Row(Mapping[str, Tensor]):
    """One client's tensors in a `Stack`, by name: a mapping that copies nothing to the CPU until a tensor is asked for.

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
        # a pickled row is a plain dict: the stack with all other clients' tensors must not go with it
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


class RunningMean(Mapping[str, Tensor]):
    r"""The weighted mean of a round's models, added up as they come, which stands for each of them.

    Models are added in the order of the clients' ids, whenever they come, so that the mean has the bits of
    `weighted_mean`. Where a client of the cohort gives none, the sum is divided by the weight that came, which rounds
    once more. Its entries, as those of any model, are the mean's.

    Args:
        counts: the expected weight of each client of the cohort, such as its number of samples, by id.
    """

    def __init__(self, counts: Mapping[int, float]) -> None:
        self.expected = sum(counts[client] for client in sorted(counts))
        self.counts: dict[int, float] = {}
        """Weights of the clients that were added."""
        # the next client is the last one, which is taken off without moving the others
        self._waiting = sorted(counts, reverse=True)
        self._early: dict[int, Mapping[str, Tensor]] = {}
        self._totals: StateDict = {}
        self._mean: StateDict | None = None
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and type of each model's tensors, by name."""

    @torch.no_grad()
    def add(self, client: int, model: Mapping[str, Tensor], count: float) -> None:
        """Add a client's model.

        Args:
            client: the client's id, one of the expected.
            model: the model; all have the same names, shapes and types.
            count: its weight.
        """
        # known at once, as a model may wait until the end for a client that gives none
        self.kinds = self.kinds or {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}
        self._early[client], self.counts[client] = model, count
        while self._waiting and self._waiting[-1] in self._early:
            self._take(self._waiting.pop())

    def _take(self, client: int) -> None:
        """Add the next model in the order of ids to the sum, and let go of it."""
        model, share = self._early.pop(client), self.counts[client] / self.expected
        # the operations of `weighted_mean`, one model at a time, which give its bits
        for name, tensor in model.items():
            if not tensor.is_floating_point():
                total = self._totals.get(name, tensor)
                self._totals[name] = torch.maximum(total, tensor.to(total.device))
            elif name in self._totals:
                self._totals[name].add_(tensor.to(self._totals[name].device), alpha=share)
            else:
                self._totals[name] = tensor.to(promoted(tensor)) * share

    def mean(self) -> StateDict:
        """Return the mean; no model can be added from then on."""
        if self._mean is None:
            for client in sorted(self._early):
                self._take(client)
            if self._came != self.expected:
                for total in filter(Tensor.is_floating_point, self._totals.values()):
                    total.mul_(self.expected / self._came)
            self._mean = {name: total.to(self.kinds[name][1]) for name, total in self._totals.items()}
            # of weights in half precision the sum is a tensor of its own, which nobody needs any more
            self._totals = {}
        return self._mean

    def is_of(self, weights: Mapping[int, float]) -> bool:
        """Return whether it is the mean by these weights of these clients.

        Args:
            weights: by client id, in the order of the ids; with sum 1.
        """
        came = self._came
        return weights == {client: count / came for client, count in self.counts.items()}

    @property
    def _came(self) -> float:
        """The weight of all clients that were added, summed in the order of their ids, as every sum of floats."""
        return sum(self.counts[client] for client in sorted(self.counts))

    @property
    def bytes_of_one(self) -> int:
        """Bytes of one client's model."""
        return sum(shape.numel() * kind.itemsize for shape, kind in self.kinds.values())

    def __getitem__(self, name: str) -> Tensor:
        return self.mean()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


class Pool:
    """The models of all clients, and stacks of them, which many clients of a round can share.

    Args:
        models: the models by client id, from 0.
    """

    def __init__(self, models: Mapping[int, Mapping[str, Tensor]]) -> None:
        self.models = models
        self._stacks: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each model, by client id."""
        return {client: num_bytes(model) for client, model in self.models.items()}

    @cached_property
    def bytes_of_all(self) -> int:
        """Bytes of all models."""
        return sum(self.sizes.values())

    def stack(self, name: str, like: Tensor) -> Tensor:
        """Return one entry of all models ``[M, ...]``: the same tensor at each call.

        Args:
            name: the entry's name.
            like: a tensor of the result's type and device.
        """
        key = name, like.dtype, like.device
        if key not in self._stacks:
            rows = [model[name].to(like.dtype) for model in self.models.values()]
            self._stacks[key] = side_by_side(rows, like.device).to(like.device)
        return self._stacks[key]


class Others(Mapping[int, Mapping[str, Tensor]]):
    """The models of all clients but one, by client id, with a way to the pool that all clients have in common.

    Pickled, copied or sent to another machine it is a plain dict, without the client's own model.

    Args:
        pool: all models.
        client: the id of the client whose model is left out.
    """

    def __init__(self, pool: Pool, client: int) -> None:
        self.pool, self.client = pool, client
        # asks for the id at once, by which a federation finds that clients have different payloads
        self._has_own = client in pool.models

    @property
    def bytes(self) -> int:
        """Bytes of these models."""
        return self.pool.bytes_of_all - self.pool.sizes.get(self.client, 0)

    def __getitem__(self, client: int) -> Mapping[str, Tensor]:
        if client == self.client:
            raise KeyError(client)
        return self.pool.models[client]

    def __iter__(self) -> Iterator[int]:
        return (client for client in self.pool.models if client != self.client)

    def __len__(self) -> int:
        return len(self.pool.models) - self._has_own

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def pooled(payloads: Mapping[int, Message]) -> dict[int, Message]:
    """Return payloads from a checkpoint, in which the models of all other clients have a common pool again.

    A checkpoint has `Others` as plain dicts, of each of which clients at once would make a stack of its own.

    Args:
        payloads: each client's payload, by client id.
    """
    given = {client: payload.get("models") for client, payload in payloads.items()}
    # the entry of another method may be of any kind
    if len(given) < 2 or not all(isinstance(others, dict) and others for others in given.values()):
        return dict(payloads)
    models = {client: model for others in given.values() for client, model in cast("dict[int, Any]", others).items()}
    places = {client: places_of(model) for client, model in models.items()}
    for client, others in given.items():
        expected = {m: own for m, own in places.items() if m != client}
        if {m: places_of(model) for m, model in cast("dict[int, Any]", others).items()} != expected:
            return dict(payloads)
    pool = Pool(dict(sorted(models.items())))
    return {client: {**payload, "models": Others(pool, client)} for client, payload in payloads.items()}


def places_of(model: Any) -> list[tuple[int, torch.Size]]:
    """Return the places in memory, and the shapes, of a model's tensors."""
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors(model)]


def tensors(record: Any) -> Iterator[Tensor]:
    """Yield every tensor of a record, at any depth, in the record's order.

    Args:
        record: a tensor, or nested dicts, lists and tuples with tensors in them.
    """
    if isinstance(record, Tensor):
        yield record
    elif isinstance(record, (list, tuple)):
        for value in record:
            yield from tensors(value)
    # a dict first: `isinstance` with an abstract class such as `Mapping` is slow
    elif isinstance(record, (dict, Mapping)):
        for value in record.values():
            yield from tensors(value)


def num_bytes(record: Any) -> int:
    """Return the bytes of a record on the wire, counting tensors alone.

    >>> num_bytes({"weights": {"w": torch.zeros(3)}, "num_samples": torch.tensor(7)})
    20

    Args:
        record: as for `tensors`.
    """
    if isinstance(record, Tensor):
        return record.nbytes
    if type(record) is Row:
        return record.stack.bytes_of_a_row
    if type(record) is Restored:
        return num_bytes(record.travelled)
    if type(record) is RunningMean:
        return record.bytes_of_one
    if type(record) is Others:
        return record.bytes
    if isinstance(record, (dict, Mapping)):
        return sum(map(num_bytes, record.values()))
    return sum(map(num_bytes, record)) if isinstance(record, (list, tuple)) else 0


def digest(record: Any) -> str:
    """Return a fingerprint of a record's tensors: 16 hexadecimal digits, equal for equal bits in equal order.

    >>> digest([torch.zeros(3)]) == digest({"w": torch.zeros(3)}) != digest([torch.ones(3)])
    True

    Args:
        record: as for `tensors`; names don't count.
    """
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors(record):
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # as bytes, since NumPy has no bfloat16; cloned where a view of one element has a stride that `view` refuses
        flat = tensor.detach().cpu().flatten()
        flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)
        hashed.update(flat.view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def is_finite(record: Any) -> bool:
    """Return True if no tensor of a record holds a NaN or an infinity.

    Args:
        record: as for `tensors`.
    """
    if type(record) is Row:
        # on the device: a check must not copy the whole stack to the CPU
        return is_finite([column([record], name)[0] for name in record])
    # a sum is NaN or infinite if an addend is, and needs no mask of the tensor's size; a float32 sum of finite weights
    # that overflows belongs to a diverged client too
    return all(not t.is_floating_point() or math.isfinite(t.sum().item()) for t in tensors(record))


def tree_map(function: Callable[[Tensor], Any], record: Any) -> Any:
    """Return a record with a function applied to each tensor.

    Args:
        function: maps a tensor to what replaces it.
        record: as for `tensors`; mappings become dicts, and values that are no tensors stay.
    """
    if isinstance(record, Tensor):
        return function(record)
    if isinstance(record, (list, tuple)):
        return type(record)(tree_map(function, value) for value in record)
    if isinstance(record, (dict, Mapping)):
        return {key: tree_map(function, value) for key, value in record.items()}
    return record


def detached(record: Any) -> Any:
    """Return copies of a record's tensors on the CPU, free of modules, graphs and devices.

    ``state_dict`` returns references: a client's results must be copied before the next client trains in the same
    module.

    Args:
        record: as for `tensors`.
    """
    return tree_map(lambda t: t.detach().to("cpu", copy=True), record)


def column(states: Sequence[Mapping[str, Tensor]], name: str) -> list[Tensor]:
    """Return one entry of several state dicts, all on one device.

    Rows of stacks stay on their device; with any other state dict among them, all are on the CPU.

    >>> column([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}], "w")
    [tensor(1.), tensor(2.)]

    Args:
        states: any number of state dicts with that entry.
        name: the entry's name.
    """
    if all(type(state) is Row for state in states):
        rows = [row.stack.entries[name][row.index] for row in cast(Sequence[Row], states)]
        # Apple's GPUs have no float64, and many callers compare in it
        if len({row.device for row in rows}) == 1 and rows[0].device.type != "mps":
            return rows
    return [state[name] for state in states]


@torch.no_grad()
def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float], names: Iterable[str] | None = None
) -> StateDict:
    r"""Return the entry-wise weighted mean of state dicts, :math:`\sum_k \lambda_k w_k`, reduced in the order given.

    Floating entries are summed in float32 or better and returned in their own type. Integer entries (BatchNorm's
    ``num_batches_tracked``) take the maximum, since a mean of counters has no meaning. The mean is on the device of the
    first state dict, and others may be elsewhere, as a client's own model and those of a payload are.

    >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [0.75, 0.25])
    {'w': tensor([1.])}

    Args:
        states: at least one state dict; all with the same names and shapes.
        weights: one a state dict, used as they are: a mean needs a sum of 1.
        names: the entries to average; all by default.
    """
    if all(type(state) is Row for state in states):
        means = means_of_rows(cast(Sequence[Row], states), [weights], names)
        return {name: stack[0] for name, stack in means.items()}
    first, *others = states
    mean = {}
    for name in first if names is None else names:
        tensor = first[name]
        if not tensor.is_floating_point():
            mean[name] = torch.stack([state[name].to(tensor.device) for state in states]).amax(0)
            continue
        # one running sum: a stack of all clients' weights would need as much memory again
        total = tensor.to(promoted(tensor)) * weights[0]
        for state, weight in zip(others, weights[1:], strict=True):
            total.add_(state[name].to(total.device), alpha=weight)
        mean[name] = total.to(tensor.dtype)
    return mean


@torch.no_grad()
def weighted_means(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[Sequence[float]], names: Iterable[str] | None = None
) -> list[StateDict]:
    r"""Return several weighted means of the same state dicts: :math:`\sum_k A_{ik} w_k` for each i.

    Args:
        states: n state dicts, at least one.
        weights: A, m lists of n weights.
        names: the entries to average; all by default.
    """
    if all(type(state) is Row for state in states):
        return rows_of(means_of_rows(cast(Sequence[Row], states), weights, names), len(weights), CPU)
    if len(weights) == 1:
        return [weighted_mean(states, weights[0], names)]
    means: list[StateDict] = [{} for _ in weights]
    for name in states[0] if names is None else names:
        # a tensor for each mean, since a kept row would keep the memory of all
        results = [torch.empty_like(states[0][name], memory_format=torch.contiguous_format) for _ in means]
        flat = [result.view(-1) for result in results]
        for start, block in mean_blocks([state[name] for state in states], weights):
            for result, row in zip(flat, block, strict=True):
                result[start : start + len(row)] = row
        for mean, result in zip(means, results, strict=True):
            mean[name] = result
    return means


@torch.no_grad()
def stacked_means(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[Sequence[float]], names: Iterable[str]
) -> StateDict:
    """Return `weighted_means` stacked as ``[m, ...]`` by name, for callers that keep all of them or none.

    Args:
        states: n state dicts, at least one.
        weights: m lists of n weights, at least one.
        names: the entries to average.
    """
    if all(type(state) is Row for state in states):
        return means_of_rows(cast(Sequence[Row], states), weights, names)
    means = {name: states[0][name].new_empty(len(weights), *states[0][name].shape) for name in names}
    fill_means(means, states, weights)
    return means


@torch.no_grad()
def fill_means(stacks: StateDict, states: Sequence[Mapping[str, Tensor]], weights: Sequence[Sequence[float]]) -> None:
    """Write `weighted_means` into the first m rows of stacks.

    Memory is reused so, which the system takes longer to give than a product takes to fill it.

    Args:
        stacks: contiguous tensors ``[m or more, ...]`` by name, of the states' types.
        states: n state dicts, at least one.
        weights: m lists of n weights, at least one.
    """
    for name, stack in stacks.items():
        rows = stack[: len(weights)].view(len(weights), -1)
        for start, block in mean_blocks([state[name] for state in states], weights):
            rows[:, start : start + block.shape[1]] = block


def mean_blocks(tensors: Sequence[Tensor], weights: Sequence[Sequence[float]]) -> Iterator[tuple[int, Tensor]]:
    """Yield weighted means of tensors for few elements at once: the first element's number, and a buffer ``[m, w]``.

    Args:
        tensors: n tensors of one shape; integer ones give their maximum for each mean.
        weights: m lists of n weights.
    """
    first, m = tensors[0], len(weights)
    if not first.is_floating_point():
        yield 0, torch.stack(list(tensors)).amax(0).reshape(1, -1).expand(m, -1)
        return
    factors = torch.tensor(weights, dtype=torch.float64).view(m, len(tensors)).to(first.device, promoted(first))
    flat, size = [tensor.reshape(-1) for tensor in tensors], first.numel()
    # a product over few parameters at once: m running sums would read all models m times; halves of `COLUMNS`, as a
    # product of 80 means takes half as long again in blocks of 11,900 as in those of 10,000
    half = COLUMNS // 2
    width = min(size, half * max(1, min(10, ELEMENTS // (2 * m * half))))
    # few models at once, too: their copies are then still in the processor's cache when the product reads them
    count = max(1, ELEMENTS // (2 * max(width, 1)))
    copies, sums = factors.new_empty(min(count, len(flat)), width), factors.new_empty(m, width)
    for start in range(0, size, max(width, 1)):
        end = min(start + width, size)
        block = sums[:, : end - start]
        for k in range(0, len(flat), count):
            parts = [tensor[start:end] for tensor in flat[k : k + count]]
            rows = torch.stack(parts, out=copies[: len(parts), : end - start])
            # beta=0 reads nothing of the block before
            block.addmm_(factors[:, k : k + count], rows, beta=float(k > 0))
        yield start, block


COLUMNS, ELEMENTS = 20_000, 2_000_000
"""Most columns and elements of a block of models: they bound memory, and the block stays in the processor's cache."""


def block_width(rows: int) -> int:
    """Return the number of columns of a block.

    Args:
        rows: number of the block's rows.
    """
    return max(1, min(COLUMNS, ELEMENTS // max(rows, 1)))


def blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield tensors of one shape as rows of matrices with few columns, `block_width`.

    Args:
        tensors: n tensors of one shape.
    """
    width, size = block_width(len(tensors)), tensors[0].numel()
    flat = [tensor.reshape(-1) for tensor in tensors]
    # one matrix for tensors without entries, too
    for start in range(0, max(size, 1), width):
        yield torch.stack([tensor[start : start + width] for tensor in flat])


def means_of_rows(
    rows: Sequence[Row], weights: Sequence[Sequence[float]], names: Iterable[str] | None = None
) -> StateDict:
    """Return `weighted_means` of rows from one stack or several, stacked as ``[m, ...]`` by name, on the CPU.

    Args:
        rows: n rows, at least one.
        weights: m lists of n weights.
        names: the entries to average; all by default.
    """
    names = list(rows[0] if names is None else names)
    stacks: dict[Stack, list[tuple[int, Sequence[float]]]] = {}
    for row, column in zip(rows, zip(*weights, strict=True), strict=True):
        stacks.setdefault(row.stack, []).append((row.index, column))
    # each stack sums its own rows where they are, and only the m sums travel to the CPU
    parts = [stack.sums(own, names) for stack, own in stacks.items()]
    means = [together([part[name] for part in parts]).to(rows[0].stack.entries[name].dtype) for name in names]
    return dict(zip(names, moved(means, CPU), strict=True))


def together(parts: list[Tensor]) -> Tensor:
    """Combine partial results of several stacks: the sum of floating tensors, the maximum of integer ones.

    Args:
        parts: one tensor a stack, ``[m, ...]``.
    """
    if len(parts) == 1:
        return parts[0]
    # one stack may have moved to the CPU, where somebody read a row of it
    stack = torch.stack([part.to(parts[0].device) for part in parts])
    return stack.sum(0) if stack.is_floating_point() else stack.amax(0)


def promoted(tensor: Tensor) -> torch.dtype:
    """Return the type in which to sum a floating tensor: float32, or float64 for a float64 tensor.

    Args:
        tensor: the tensor.
    """
    return torch.promote_types(tensor.dtype, torch.float32)


def keep_own(record: Any, updates: Updates) -> Any:
    """Replace a record's references to stacked updates by copies, in place where containers allow.

    Else an aggregator that keeps one client's row would keep in memory, and save, the rows of all clients.

    Args:
        record: an aggregator's state; its dicts and lists are changed in place.
        updates: the round's updates.

    Returns:
        The record, or its replacement if the record itself is a tensor, row or tuple.
    """
    stacks = {value.stack for update in updates.values() for value in update.values() if type(value) is Row}
    # a view of a stacked tensor has the storage of the stack, whatever was sliced or reshaped in between
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
