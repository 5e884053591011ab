"""Run a method's own hooks of download and upload for a whole block of clients in one call."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pfl_lightning.client.at_once import runs_at_once
from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData, Samples, whole_of
from pfl_lightning.data.client_data import IGNORED, counts_of, drawn_numbers
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.data.trees import Tree
from pfl_lightning.engines.base import AnyClient, ClientState, Job, ReadsClient
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vmap.block import Block, Member, batches_at
from pfl_lightning.engines.vmap.checks import SharedAttributes
from pfl_lightning.internals.of_torch import (
    enter_vmap,
    is_wrapped,
    leave_vmap,
    load_decompositions,
    outside_vmap,
    row_of,
    stack_of,
)
from pfl_lightning.messages import CPU, Message, Row, Stack, StateDict, tensors, tree_map
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Classification
from pfl_lightning.tasks.base import number_of_classes
from pfl_lightning.transfers import moved, rows_of, side_by_side

FILLED = 8192
"""Samples of all clients in one pass of a hook, with the filling of smaller clients."""
CLASS_WEIGHTS = "_class_weights"
"""Buffer of a client's own weights of classes."""

RowOf: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the row of a stack, for the clients under ``vmap``."""
Doubt: TypeAlias = tuple[Tensor, Callable[..., str], tuple[Tensor, ...]]
"""Arguments of `ClientModule.warn_if`."""


class Done(NamedTuple):
    """A hook's result for some clients.

    Args:
        result: the update, a row per client.
        doubts: its warnings, flags and numbers with a row per client.
        members: the clients.
    """

    result: Message
    doubts: list[Doubt]
    members: list[Member]


class Differ(Exception):
    """Payloads of clients have no common form."""


class Payload(NamedTuple):
    """The payloads of several clients.

    Args:
        tree: the payload's form, with the place of a tensor in ``entries`` where a payload has the tensor.
        entries: tensors, each with whether it has a row per client; others are the same for all clients.
    """

    tree: Any
    entries: list[tuple[Tensor, bool]]

    @classmethod
    def of(cls, payloads: Sequence[Message], device: torch.device) -> "Payload":
        """Return payloads side by side.

        Args:
            payloads: each client's.
            device: the training device.

        Raises:
            Differ: if payloads have different entries, shapes or other values.
        """
        entries: list[tuple[Tensor, bool]] = []

        def joined(values: Sequence[Any]) -> Any:
            first = values[0]
            # Most of what a server sends is the same object for all clients.
            alike = all(value is first for value in values)
            if isinstance(first, Tensor):
                if not alike and len({(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in values}) > 1:
                    raise Differ
                entries.append((first if alike else side_by_side(values, device), not alike))
                return Place(len(entries) - 1)
            if isinstance(first, Mapping):
                if not alike and any(not isinstance(v, Mapping) or [*v] != [*first] for v in values):
                    raise Differ
                return {key: joined([first[key]] if alike else [value[key] for value in values]) for key in first}
            if isinstance(first, (list, tuple)):
                if any(type(value) is not type(first) or len(value) != len(first) for value in values):
                    raise Differ
                columns = zip(*([first] if alike else values), strict=True)
                return type(first)(joined(column) for column in columns)
            if not alike and any(type(value) is not type(first) or value != first for value in values):
                raise Differ
            return first

        return cls(joined(payloads), entries)

    def under_vmap(self, row: RowOf) -> Message:
        """Return the payload of one client under ``vmap``.

        Args:
            row: returns a stack's row.
        """

        def found(value: Any) -> Any:
            if isinstance(value, Place):
                tensor, has_rows = self.entries[value.index]
                return row(tensor) if has_rows else tensor
            if isinstance(value, dict):
                return {key: found(each) for key, each in value.items()}
            return type(value)(map(found, value)) if type(value) in (list, tuple) else value

        message: Message = found(self.tree)
        return message


class Place:
    """The place of a tensor in `Payload.entries`.

    Args:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self.index = index


class ClassNumber(int):
    """A class number as a key in an update of many clients; each client keeps the keys of present classes."""


class BlockData(AnyClient):
    """The part of clients' data for hooks under ``vmap``; each look at other parts raises.

    Args:
        members: the clients.
        row: returns a stack's row under ``vmap``.
    """

    is_absent = False

    def __init__(self, members: Sequence[Member], row: RowOf) -> None:
        self._members, self._row = members, row

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class ``[num_classes]``, of each client."""
        return self._row(counts_of([member.data for member in self._members]))

    @property
    def classes(self) -> list[int]:
        """All classes, for the keys of an update; see `ClassNumber`."""
        return [ClassNumber(c) for c in range(number_of_classes(self._members[0].data.task, "a class"))]

    def marked_chunks(self, size: int | None = None, ignored: bool = False) -> Iterator[tuple[Tree, Tree, Tensor]]:
        """Yield inputs and targets of all clients' training samples, some at a time, and which are each client's.

        Args:
            size: as for `ClientData.marked_chunks`.
            ignored: likewise.

        Raises:
            ReadsClient: if samples are read one batch after another, or have no class to mark the filling by.
        """
        # a task of another type may count the marked samples
        if ignored and type(self._members[0].data.task) is not Classification:
            self._refuse()
        for x, y, own in self._chunks(size):
            marked = torch.where(own, y, IGNORED) if ignored else y
            yield tree_map(self._row, x), tree_map(self._row, marked), self._row(own)

    def _chunks(self, size: int | None = None) -> Iterator[tuple[Tree, Any, Tensor]]:
        """Yield samples of all clients ``[clients, n, ...]``, and which of them are a client's ``[clients, n]``."""
        clients = [member.data for member in self._members]
        sizes = torch.tensor([data.size("train") for data in clients])
        if isinstance(clients[0].train, Streamed):
            self._refuse()
        whole = whole_of(clients, "train")
        begins, device = sizes.cumsum(0) - sizes, next(tensors(whole.y)).device
        for numbers in torch.split(torch.arange(int(sizes.max())), size or max(1, FILLED // len(clients))):
            own = numbers < sizes[:, None]
            # filled up by the client's first sample, of which its net makes numbers as finite as of others
            rows = (begins[:, None] + torch.where(own, numbers, 0)).clamp_max(int(sizes.sum()) - 1)
            yield *batches_at((whole.x, whole.y), rows.to(device)), own.to(device)

    def drawn(self, percent: float, name: str) -> tuple[Samples, Tensor]:
        """Return a random share of each client's training samples, filled up, and which are its own.

        Args:
            percent: the share in percent.
            name: as for `ClientData.drawn`.

        Raises:
            ReadsClient: if samples have no class to mark the filling by, or are read one batch after another.
        """
        clients = [member.data for member in self._members]
        # a task of another type may count the marked samples
        if type(clients[0].task) is not Classification or isinstance(clients[0].train, Streamed):
            self._refuse()
        sizes = [data.size("train") for data in clients]
        whole, begins = whole_of(clients, "train"), itertools.accumulate(sizes, initial=0)
        # within vmap, random functions are refused
        with outside_vmap():
            drawn = [
                begin + drawn_numbers(size, percent, derive_seed(member.job.seed, name))
                for member, size, begin in zip(self._members, sizes, begins, strict=False)
            ]
        numbers = pad_sequence(drawn, batch_first=True, padding_value=-1)
        # filled up by the client's first drawn sample, of which its net makes numbers as finite as of others
        own, device = numbers >= 0, whole.y.device
        x, y = batches_at((whole.x, whole.y), torch.where(own, numbers, numbers[:, :1]).to(device))
        own = own.to(device)
        return Samples(tree_map(self._row, x), self._row(torch.where(own, y, IGNORED))), self._row(own)

    def size(self, split: Any) -> Tensor:
        """Return each client's number of samples in a split, on the CPU.

        Args:
            split: the split's name.
        """
        return self._row(torch.tensor([member.data.size(split) for member in self._members]))


class BlockHooks:
    """Run the hooks marked by `at_once` for all clients of a block.

    Args:
        sequential: the engine of one client, with the module.
        attributes: the module's attributes, with the places of its entries.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.attributes = attributes
        self.refused: set[str] = set()
        """Hooks that failed for many clients, and run client by client."""
        self._reads_steps = False
        """Whether the upload has asked for the number of steps, by which it then runs."""

    def _may_run(self, hook: str) -> bool:
        """Return whether a hook runs for many clients, as far as known."""
        module = self.module
        return (
            hook not in self.refused
            and runs_at_once(module, hook)
            # each client would have its own, and a hook the last one's
            and not self.attributes.differing
            and not isinstance(module.net, LightningNet)
            and not any(overrides(module, other) for other in ("receive", "assign", "state_dict", "shared_state"))
        )

    @torch.no_grad()
    def receive(self, members: list[Member], jobs: list[Job], training: bool) -> StateDict | None:
        """Return parameters and buffers after the download, a row per client; None if the hook can't run at once.

        Args:
            members: the clients.
            jobs: their work, with states and payloads on the device.
            training: whether local training follows.
        """
        current, first_names = self.attributes.slots.current(), self.attributes.slots.first_names
        device = self.sequential.device
        if (
            not self._may_run("on_download")
            or CLASS_WEIGHTS in current
            or len({not training or bool(job.evaluate) for job in jobs}) > 1
            or any(job.state.is_trained for job in jobs)
        ):
            return None
        stacks: StateDict = {}
        # by the names of slots, where tied entries have one name
        personal = [{first_names[name]: tensor for name, tensor in job.state.personal.items()} for job in jobs]
        for name, tensor in current.items():
            rows = [own.get(name, tensor) for own in personal]
            if {row.shape for row in rows} != {tensor.shape}:
                return None
            stacks[name] = (
                repeated(tensor, len(rows))
                if all(row is tensor for row in rows)
                else side_by_side(rows, device).to(device, tensor.dtype)
            )
        try:
            # compared and stacked before the hook runs, which a difference says nothing about
            payload = Payload.of([job.payload for job in jobs], device)
        except Differ:
            return None

        def download(row: RowOf, data: BlockData) -> None:
            # the personal entries are in their rows already
            job = jobs[0]._replace(client=cast(Any, AnyClient()), state=ClientState(), payload=payload.under_vmap(row))
            self.sequential.receive(job, cast(Any, data), training)

        done = self._run("on_download", download, stacks, members)
        if done is None:
            return None
        self._tell([done])
        return stacks

    def phases(self, members: list[Member], stacks: StateDict) -> list[Phase] | None:
        """Return the local phases of all clients; None if these look at a client, or at values of its entries.

        Args:
            members: the clients.
            stacks: parameters and buffers after the download, a row per client.
        """
        phases: list[Phase] = []

        def ask(_: RowOf, data: BlockData) -> None:
            phases.extend(self.module.local_phases())

        if "local_phases" in self.refused or self._run("local_phases", ask, stacks, members) is None:
            return None
        return phases

    @torch.no_grad()
    def upload(self, block: Block) -> list[Message] | None:
        """Return every client's update; None if the hook can't run at once, with all entries as before.

        Args:
            block: the trained clients.
        """
        if not self._may_run("upload"):
            return None
        before = {name: stack.detach().clone() for name, stack in block.entries.items()}
        updates = self._uploaded(block)
        if updates is None:
            # the one that failed may have changed entries, and groups before it have
            for name, entry in before.items():
                block.entries[name].detach().copy_(entry)
            if self._reads_steps or len({member.steps for member in block.members}) == 1:
                return None
            # again, with clients of one number of steps together
            self._reads_steps = True
            self.refused.discard("upload")
            return self.upload(block)
        return updates

    def _uploaded(self, block: Block) -> list[Message] | None:
        """Return every client's update, with entries changed as by the hook; None if a run for many clients failed."""
        whole = {name: stack.detach() for name, stack in block.entries.items()}
        sent: dict[tuple[str, ...], Stack] = {}
        updates: list[Message] = []
        told: list[Done] = []

        def upload(_: RowOf, data: BlockData) -> Message:
            return self.module.upload(cast(Any, data))

        for rows in self._groups(block):
            members = block.members[rows]
            entries = {name: stack[rows] for name, stack in whole.items()}
            done = self._run("upload", upload, entries, members)
            if done is None:
                return None
            told.append(done)
            update = done.result
            weights, stack = update.get("weights"), None
            if isinstance(weights, dict) and weights and all(is_same(t, entries.get(n)) for n, t in weights.items()):
                stack = sent.setdefault(tuple(weights), Stack({name: whole[name] for name in weights}))
                del update["weights"]
            for row, of_client in enumerate(rows_of_tree(update, len(members)), rows.start):
                of_client = with_own_classes(of_client, block.members[row].data)
                updates.append(of_client if stack is None else {"weights": Row(stack, row)} | of_client)
        self._tell(told)
        return updates

    def _groups(self, block: Block) -> Iterator[slice]:
        """Yield the rows of each upload: all, or the rows of one number of steps if the hook reads this number."""
        steps = [member.steps for member in block.members]
        if not self._reads_steps:
            yield slice(0, len(steps))
            return
        # Larger clients, which make more steps, are first, so that groups are neighbours.
        for _, rows in groupby(range(len(steps)), key=steps.__getitem__):
            first, *others = rows
            yield slice(first, first + 1 + len(others))

    def _run(
        self,
        hook: str,
        function: Callable[[RowOf, BlockData], Message | None],
        entries: StateDict,
        members: list[Member],
    ) -> Done | None:
        """Return a hook's result for many clients, and change the entries in place; None if this failed.

        Args:
            hook: name of the hook.
            function: calls the hook, with a function for a stack's row and the clients' data.
            entries: parameters and buffers, a row per client, changed in place; after a failure, in part.
            members: the clients.
        """
        table, count = vars(self.module), len(members)
        turn = {name: table[name] for name in ("client_id", "steps_done")}
        steps, caches = {member.steps for member in members}, self.attributes.caches
        table.update(client_id=AnyClient(), round=members[0].job.round, steps_done=min(steps))
        if len(steps) > 1:
            # a hook reading the number fails, and runs again for clients with equal numbers
            del table["steps_done"]
        doubts: list[Doubt] = []
        # flags stay on the device until all groups are done
        table["_doubts"] = doubts
        # without these, some operations would have no rule for vmap
        load_decompositions()
        level = enter_vmap(count, "error")

        def row(stack: Tensor) -> Tensor:
            one: Tensor = row_of(stack, 0, level)
            return one

        def stacked(tensor: Tensor) -> Tensor:
            stack: Tensor = stack_of(tensor, level, count, 0)
            return stack

        try:
            given = {name: row(entry.detach()) for name, entry in entries.items()}
            found = self.attributes.slots.call(function, given, row, BlockData(members, row))
            # what a hook computes of all clients' common payload is the same for all; else it would hold all rows
            if any(map(is_wrapped, tensors(self.attributes.caches))):
                raise ReadsClient("a cache is of one client")
            return Done(
                {key: tree_map(stacked, value) for key, value in (found or {}).items()},
                [(stacked(flag), text, tuple(map(stacked, numbers))) for flag, text, numbers in doubts],
                members,
            )
        except torch.cuda.OutOfMemoryError:
            raise
        # Of any type: the hook then runs client by client, which shows the author's own errors.
        except Exception:
            self.refused.add(hook)
            self.attributes.take(self.attributes.caches.keys() - caches.keys())
            self.attributes.put(caches)
            return None
        finally:
            leave_vmap()
            table["_doubts"] = None
            table.update(turn)

    def _tell(self, done: list[Done]) -> None:
        """Warn of clients with doubts of a hook, after one copy of all flags.

        Args:
            done: results of the hook.
        """
        told = [(members, text, [flag, *numbers]) for _, doubts, members in done for flag, text, numbers in doubts]
        arrived = iter(moved([value for *_, values in told for value in values], CPU))
        for members, text, values in told:
            flags, *numbers = [next(arrived) for _ in values]
            for at in flags.nonzero().flatten().tolist():
                self.sequential.set_turn(members[at].job, members[at].steps)
                rank_zero_warn(text(*(float(number[at]) for number in numbers)))


def with_own_classes(record: Any, data: ClientData) -> Any:
    """Return a client's part of an update without absent classes.

    Args:
        record: the part, where keys may be `ClassNumber`.
        data: the client's data.
    """
    if not isinstance(record, dict):
        return record
    if type(next(iter(record), None)) is ClassNumber:
        return {c: record[c] for c in data.classes}
    return {key: with_own_classes(value, data) for key, value in record.items()}


def repeated(tensor: Tensor, rows: int) -> Tensor:
    """Return a stack of equal rows."""
    return tensor.detach().repeat(rows, *[1] * tensor.dim())


def is_same(tensor: Tensor, other: Tensor | None) -> bool:
    """Return True if two tensors share one place in memory."""
    return other is not None and tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape


def rows_of_tree(update: Message, count: int) -> list[Message]:
    """Return each client's update on the CPU, with tensors of their own.

    Args:
        update: the update with stacks ``[clients, ...]``.
        count: number of clients.
    """
    stacks = {str(place): stack for place, stack in enumerate(tensors(update))}

    def with_own(values: Iterator[Tensor]) -> Message:
        message: Message = tree_map(lambda _: next(values), update)
        return message

    return [with_own(iter(own.values())) for own in rows_of(stacks, count, CPU)]
