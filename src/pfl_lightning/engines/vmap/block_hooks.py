"""Run a method's own hooks of download and upload for a whole block of clients in one call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.client.at_once import runs_at_once
from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.phases import Phase
from pfl_lightning.data.client_data import counts_of
from pfl_lightning.engines.base import Job
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.vmap.block import Block, Member, neighbours
from pfl_lightning.engines.vmap.checks import BlockSignature
from pfl_lightning.internals.of_torch import (
    enter_vmap,
    leave_vmap,
    load_decompositions,
    row_of,
    stack_of,
)
from pfl_lightning.messages import CPU, Message, Row, Stack, StateDict, tensors, tree_map
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.transfers import moved, rows_of, side_by_side


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

    def under_vmap(self, row: Callable[[Tensor], Tensor]) -> Message:
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


class BlockData:
    """What a hook for many clients may read of their data, under ``vmap``.

    Args:
        members: the clients.
        row: returns a stack's row under ``vmap``.
    """

    is_absent = False

    def __init__(self, members: Sequence[Member], row: Callable[[Tensor], Tensor]) -> None:
        self._members, self._row = members, row

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class ``[num_classes]``, of each client."""
        return self._row(counts_of([member.data for member in self._members]))

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
    """

    def __init__(self, sequential: Sequential) -> None:
        self.sequential = sequential
        self.module = sequential.module
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
            # attributes that a hook writes under vmap would hold the rows of all clients
            and not module.caches
            and not isinstance(module.net, LightningNet)
            and not any(overrides(module, other) for other in ("receive", "assign", "state_dict", "shared_state"))
        )

    @torch.no_grad()
    def receive(
        self, members: list[Member], jobs: list[Job], signature: BlockSignature, slots: Slots, training: bool
    ) -> tuple[StateDict, list[Phase]] | None:
        """Return stacked entries after the download, and the common phases; None if the hook can't run at once.

        Args:
            members: the clients.
            jobs: their work, with states and payloads on the device.
            signature: the properties that clients of a block share.
            slots: the module's slots.
            training: whether local training follows.
        """
        module, device = self.module, self.sequential.device
        current = slots.current()
        purposes = {not training or bool(job.evaluate) for job in jobs}
        if not self._may_run("on_download") or len(purposes) > 1 or "_class_weights" in current:
            return None
        stacks: StateDict = {}
        personal = [{slots.first_names[n]: t for n, t in job.state.personal.items()} for job in jobs]
        for name, tensor in current.items():
            rows = [own.get(name, tensor) for own in personal]
            if {row.shape for row in rows} != {tensor.shape}:
                return None
            together = len({id(row) for row in rows}) == 1
            stacks[name] = (
                tensor.detach().repeat(len(rows), *[1] * tensor.dim())
                if together and rows[0] is tensor
                else side_by_side(rows, device).to(device, tensor.dtype)
            )
        payloads = [job.payload for job in jobs]
        try:
            # compared and stacked before the hook runs, which a difference says nothing about
            payload = Payload.of(payloads, device)
        except Differ:
            return None
        self.sequential.set_mode(training=False)
        vars(module).update(
            training_follows=training or overrides(module, "evaluation_phases"), evaluation_follows=purposes.pop()
        )
        try:
            done = self._run("on_download", stacks, members, slots, payload)
        finally:
            vars(module).update(training_follows=True, evaluation_follows=True)
        if done is None:
            return None
        for member in members if overrides(module, "local_phases") else members[:1]:
            self.sequential.set_turn(member.job)
            phases = module.local_phases()
            signature.admit(phases, current)
        return stacks, phases

    @torch.no_grad()
    def upload(self, block: Block, slots: Slots) -> list[Message] | None:
        """Return every client's update; None if the hook can't run at once.

        Args:
            block: the trained clients.
            slots: the module's slots.
        """
        if not self._may_run("upload"):
            return None
        whole = Stack({name: entry.detach() for name, entry in block.entries.items()})
        sent: dict[tuple[str, ...], Stack] = {}
        updates: list[Message] = []
        for rows in self._groups(block):
            count = len(block.of(rows))
            entries = {name: stack[rows] for name, stack in whole.entries.items()}
            update = self._run("upload", entries, block.of(rows), slots)
            if update is None and not self._reads_steps and len(set(m.steps for m in block.members)) > 1:
                # again, with clients of one number of steps together: nothing has been changed so far
                self._reads_steps = True
                self.refused.discard("upload")
                return self.upload(block, slots)
            if update is None:
                return None
            if isinstance(rows, Tensor):
                for name, entry in entries.items():
                    whole.entries[name][rows] = entry
            weights = update.get("weights")
            kept = isinstance(weights, dict) and all(
                n in entries and t.data_ptr() == entries[n].data_ptr() and t.shape == entries[n].shape
                for n, t in weights.items()
            )
            stack = None
            if kept and weights:
                stack = sent.setdefault(tuple(weights), Stack({n: whole.entries[n] for n in weights}))
                del update["weights"]
            own = rows_of_tree(update, count)
            numbers = range(*rows.indices(len(block.members))) if isinstance(rows, slice) else rows.tolist()
            for number, of_client in zip(numbers, own, strict=True):
                updates.append(of_client if stack is None else {"weights": Row(stack, number)} | of_client)
        private = self.sequential.work.example_privacy
        if private is not None:
            updates = [
                private.noised_update(update, member.job.seed)
                for update, member in zip(updates, block.members, strict=True)
            ]
        return updates

    def _groups(self, block: Block) -> Iterator[Any]:
        """Yield the rows that upload together: all, or those of one number of steps if the hook reads that number."""
        steps = np.array([member.steps for member in block.members])
        if not self._reads_steps or len(set(steps.tolist())) == 1:
            yield slice(0, len(steps))
            return
        # Larger clients, which make more steps, are first, so that groups are neighbours.
        for _, rows in groupby(range(len(steps)), key=steps.__getitem__):
            yield neighbours(np.array(list(rows)), self.sequential.device)

    def _run(
        self, hook: str, entries: StateDict, members: list[Member], slots: Slots, payload: "Payload | None" = None
    ) -> Message | None:
        """Return a hook's result for many clients, whose entries it changes in place; None if it can't run at once.

        Args:
            hook: name of the hook.
            entries: parameters and buffers, a row per client, changed in place.
            members: the clients.
            slots: the module's slots.
            payload: the clients' payloads; None for an upload.
        """
        module, count = self.module, len(members)
        before = {name: entry.clone() for name, entry in entries.items()} if hook == "upload" else {}
        steps = {member.steps for member in members}
        vars(module).update(round=members[0].job.round)
        taken = {name: vars(module).pop(name) for name in ("client_id", "steps_done")}
        if len(steps) == 1:
            vars(module)["steps_done"] = steps.pop()
        warnings: list[tuple[Tensor, Callable[..., str], tuple[Any, ...]]] = []
        vars(module)["_doubts"] = warnings
        load_decompositions()
        level = enter_vmap(count, "error")

        def row(stack: Tensor) -> Tensor:
            return row_of(stack, 0, level)

        def stacked(tensor: Tensor) -> Tensor:
            stack: Tensor = stack_of(tensor, level, count, 0)
            return stack

        try:
            given = tree_map(row, {name: entry.detach() for name, entry in entries.items()})
            own = () if payload is None else (payload.under_vmap(row),)
            found = slots.call(getattr(module, hook), given, *own, BlockData(members, row))
            result = tree_map(stacked, {} if found is None else dict(found))
            doubts = [(stacked(flag), text, list(map(stacked, numbers))) for flag, text, numbers in warnings]
        except torch.cuda.OutOfMemoryError:
            raise
        # Of any type: the hook then runs client by client, which shows the author's own errors.
        except Exception:
            self.refused.add(hook)
            for name, entry in before.items():
                entries[name].copy_(entry)
            return None
        finally:
            leave_vmap()
            vars(module)["_doubts"] = None
            vars(module).update(taken)
        self._tell(doubts, members)
        return result

    def _tell(self, doubts: list[Any], members: list[Member]) -> None:
        """Warn of the clients of which a hook has doubts, after one copy of all flags.

        Args:
            doubts: flags, texts and their numbers, a row per client.
            members: the clients.
        """
        for flag, text, numbers in doubts:
            flags, *values = moved([flag, *numbers], CPU)
            for at in flags.nonzero().flatten().tolist():
                self.sequential.set_turn(members[at].job, members[at].steps)
                rank_zero_warn(text(*(float(value[at]) for value in values)))


def rows_of_tree(update: Message, count: int) -> list[Message]:
    """Return each client's update on the CPU, with tensors of their own.

    Args:
        update: the update with stacks ``[clients, ...]``.
        count: number of clients.
    """
    stacks = {str(place): stack for place, stack in enumerate(tensors(update))}
    updates = []
    for own in rows_of(stacks, count, CPU):
        values = iter(own.values())
        updates.append(tree_map(lambda _, values=values: next(values), update))
    return updates
