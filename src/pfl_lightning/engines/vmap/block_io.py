"""Load clients into a block and collect the results: client by client, or all at once if no hook is overridden."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import put_together
from pfl_lightning.engines.base import ClientState, Job, Outcome
from pfl_lightning.engines.errors import during
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.slots import Slots
from pfl_lightning.engines.steps import Layout
from pfl_lightning.engines.vmap.block import Block, Member
from pfl_lightning.engines.vmap.block_hooks import BlockHooks
from pfl_lightning.engines.vmap.checks import BlockSignature, SharedAttributes, Unvectorisable
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.engines.vmap.evaluator import BlockEvaluator
from pfl_lightning.messages import CPU, Message, Row, Stack, StateDict, is_finite, tensors, tree_map
from pfl_lightning.transfers import moved, rows_of, side_by_side


class BlockIO:
    """Load clients into stacks before training, and build updates and outcomes after training.

    If the hooks of download or upload are `ClientModule`'s own, those methods run unchanged with rows of the stacks as
    their input and output, and the module stays as it is.

    Args:
        sequential: the engine of one client, with the module.
        attributes: the module's attributes, which must not store client data.
        evaluator: evaluates trained clients.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes, evaluator: BlockEvaluator) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.attributes = attributes
        self.evaluator = evaluator
        self.hooks = BlockHooks(sequential)

    # In

    @torch.no_grad()
    def receive(
        self, jobs: list[Job], layout: Layout, slots: Slots, training: bool
    ) -> tuple[list[Member], StateDict, list[Phase]]:
        """Return the clients in the order of the jobs, stacked parameters and buffers, and the common phases.

        Args:
            jobs: the clients' work in this round.
            layout: the module's layout.
            slots: the module's slots.
            training: whether local training follows, as for `Engine.become`.

        Raises:
            Unvectorisable: if the clients can't share one block.
        """
        # Each block finds its own caches that differ between clients.
        self.attributes.differing = frozenset()
        self.attributes.refuse_references(slots)
        if foreign := [name for name in layout.personal if name not in slots.first_names]:
            # An entry of a custom state_dict has no place in the module to stack.
            raise Unvectorisable(self.module, f"{foreign[0]} of its state_dict is no parameter or buffer")
        signature = BlockSignature(self.attributes, layout)
        device, dtype = self.sequential.device, cast(torch.dtype, self.module.dtype)
        members = [Member(job, job.data.to(device, dtype), Stream(device, job.seed)) for job in jobs]
        put_together([member.data for member in members])
        received = self._receive_at_once(members, signature, slots)
        if received is None:
            jobs = self._sent_together(members)
            received = self.hooks.receive(members, jobs, signature, slots, training)
        return members, *(received or self._receive_one_by_one(members, jobs, signature, slots, training))

    def _receive_at_once(
        self, members: list[Member], signature: BlockSignature, slots: Slots
    ) -> tuple[StateDict, list[Phase]] | None:
        """Stack the entries assigned to each client by `ClientModule.receive`; None if any entry is left out."""
        module, device = self.module, self.sequential.device
        if any(overrides(module, method) for method in ("receive", "on_download", "assign", "state_dict")):
            return None
        current = slots.current()
        received = module.state_dict().keys() - module.common_names
        # `ClientModule.receive` writes this one of the buffers in no `state_dict`; all others keep their values.
        if received - current.keys() or "_class_weights" in current:
            # Some entries have two names, or would keep the values of the client before.
            return None
        kept = current.keys() - received
        assigned: list[StateDict] = []
        by_tensors: dict[tuple[str | int, ...], StateDict] = {}
        self.sequential.set_mode(training=False)
        # receive runs unchanged, but its results are collected instead of assigned to the module.
        with replaced(module, assign=lambda entries: assigned[-1].update(entries)):
            for member in members:
                # Clients with the same tensors in state and payload get the same entries, so receive runs once per
                # distinct combination.
                personal, payload = member.job.state.personal, member.job.payload
                given: tuple[str | int, ...] = (*payload, *map(id, chain(personal.values(), payload.values())))
                assigned.append(by_tensors.setdefault(given, {}))
                if not assigned[-1]:
                    self.sequential.set_turn(member.job)
                    with during("download", member.job.round, member.job.client):
                        module.receive(personal, payload, member.data)
        if any(entries.keys() != received for entries in by_tensors.values()):
            return None
        sent: list[Tensor] = []
        alike: set[str] = set()
        # Nearly always all clients get the same.
        distinct = assigned[:1] if len(by_tensors) == 1 else assigned
        for name, tensor in current.items():
            rows = [tensor if name in kept else entries[name] for entries in distinct]
            # An entry that is the same object for all clients is copied to the device once and repeated there.
            if len(set(map(id, rows))) == 1:
                alike.add(name)
            if {row.shape for row in rows} != {tensor.shape}:
                return None
            sent.append(rows[0] if name in alike else side_by_side(rows, device))
        stacks: StateDict = {}
        for (name, tensor), stack in zip(current.items(), moved(sent, device), strict=True):
            stack = stack.to(tensor.dtype)
            stacks[name] = repeated(stack, len(members)) if name in alike else stack
        # The default phases are the same for all clients.
        for member in members if overrides(module, "local_phases") else members[:1]:
            self.sequential.set_turn(member.job)
            phases = module.local_phases()
            signature.admit(phases, current)
        return stacks, phases

    def _receive_one_by_one(
        self, members: list[Member], jobs: list[Job], signature: BlockSignature, slots: Slots, training: bool
    ) -> tuple[StateDict, list[Phase]]:
        """Load one client after another into rows of the stacks, with hooks changing the rows in place."""
        stacks = {name: repeated(tensor, len(members)) for name, tensor in slots.current().items()}
        for row, (member, arrived) in enumerate(zip(members, jobs, strict=True)):
            entries = {name: stack[row] for name, stack in stacks.items()}
            with slots.holding(entries):
                with self.attributes.of("on_download"):
                    self.sequential.become(arrived, training)
                phases = self.module.local_phases()
                current = slots.current()
                signature.admit(phases, current)
                if row == 0:
                    # Hooks may have replaced tensors, or changed their shapes; the stacks then follow the first client.
                    new = {n: t for n, t in current.items() if n not in entries or t.shape != entries[n].shape}
                    stacks |= {name: repeated(tensor, len(members)) for name, tensor in new.items()}
                    stacks = {name: stacks[name] for name in current}
                    entries = {name: stack[row] for name, stack in stacks.items()}
                take_over(current, entries)
            member.stream.keep()
        for member, caches in zip(members, signature.caches(), strict=True):
            member.caches = caches
        return stacks, phases

    def _sent_together(self, members: list[Member]) -> list[Job]:
        """Return the jobs with states and payloads on the device, sent in few transfers."""
        device = self.sequential.device
        jobs = [member.job._replace(data=member.data) for member in members]
        if device.type == "cpu":
            return jobs
        # By identity, because clients share many tensors, such as the global weights.
        sent = {id(tensor): tensor for job in jobs for tensor in tensors([job.state.personal, job.payload])}
        there = dict(zip(sent, moved([*sent.values()], device), strict=True))

        def arrived(record: Any) -> Any:
            return tree_map(lambda tensor: there[id(tensor)], record)

        return [
            job._replace(state=replace(job.state, personal=arrived(job.state.personal)), payload=arrived(job.payload))
            for job in jobs
        ]

    # Out

    def outcomes(self, jobs: list[Job], block: Block, layout: Layout, slots: Slots) -> Iterator[Outcome]:
        """Yield the outcomes of trained clients, in the order of the jobs.

        Args:
            jobs: the clients' work in this round.
            block: the trained clients.
            layout: the module's layout.
            slots: the module's slots.
        """
        start, work = time.perf_counter(), self.sequential.work
        names = [name for name in self.module.state_dict() if name not in self.module.common_names]
        own_hooks = any(overrides(self.module, method) for method in ("upload", "shared_state", "state_dict"))
        at_once = not own_hooks and block.entries.keys() >= set(names)
        self.sequential.set_mode(training=False)
        with torch.no_grad():
            updates = (
                self._upload_at_once(names, block)
                if at_once
                else self.hooks.upload(block, slots) or self._upload_one_by_one(block, slots)
            )
        stacks = {update["weights"].stack for update in updates if isinstance(update.get("weights"), Row)}
        kept = {name: block.entries[slots.first_names[name]] for name in layout.personal}
        sent = [entry for stack in stacks for entry in stack.entries.values()]
        # The same rule as in `Sequential.train`: under example-level privacy the update alone counts.
        private = work.example_privacy
        judged = sent if private is not None else [*sent, *kept.values()]
        recorded = {name: torch.cat([values for *_, values in steps]) for name, steps in block.recorded.items()}
        # One transfer for all metrics and checks, which would otherwise wait for the device once per client.
        # A row is finite if its sum is; `is_finite` judges a single client by such sums, too.
        sums_of_rows = [stack.reshape(len(jobs), -1).sum(1) for stack in judged if stack.is_floating_point()]
        sums = torch.stack(sums_of_rows) if sums_of_rows else torch.zeros(1, len(jobs))
        *scalars, sums = moved([*recorded.values(), sums], CPU)
        means, finite = block.means(dict(zip(recorded, scalars, strict=True))), sums.isfinite().all(0).tolist()
        personal = rows_of(kept, len(jobs), self.sequential.device if work.keeps_on_device else CPU)
        after = self.evaluator.evaluate(block.members, block.entries, slots)
        others = [[value for value in update.values() if type(value) is not Row] for update in updates]
        # Integer tensors are always finite, so most updates need no further check.
        counts_only = all(type(v) is Tensor and not v.is_floating_point() for v in chain.from_iterable(others))
        seconds = block.seconds + (time.perf_counter() - start) / len(jobs)
        for job in jobs:
            row = block.rows[job.client]
            member, metrics = block.members[row], means[row]
            sound = finite[row] and (counts_only or is_finite(others[row]))
            yield Outcome(
                client=job.client,
                update=updates[row],
                state=ClientState(
                    personal[row], member.optimizers, member.scaler, batches=member.job.state.batches | member.batches
                ),
                metrics=metrics,
                finite=sound and (private is not None or all(map(math.isfinite, metrics.values()))),
                after=self._evaluate_alone(row, block, slots) if after is None else after.metrics(job.client),
                seconds=seconds,
                releases=() if private is None else tuple(private.releases(work, block.phases, block.sizes[row])),
                steps=member.steps,
                samples=member.samples,
            )

    def _upload_at_once(self, names: list[str], block: Block) -> list[Message]:
        """Build every client's update; shared weights stay rows of one stack."""
        shared = {name: block.entries[name].detach() for name in names if self.module.is_shared(name)}
        stack = Stack(shared)
        updates: list[Message] = []
        own: Mapping[str, Tensor]
        with replaced(self.module, shared_state=lambda: own):
            for row, member in enumerate(block.members):
                own = Row(stack, row) if shared else {}
                self.sequential.set_turn(member.job, member.steps)
                # No copies needed: apart from the row, `ClientModule.upload` makes its tensors anew for each update.
                with during("upload", member.job.round, member.job.client):
                    updates.append(self._uploaded(member))
        return arrived_together(updates, self.sequential.device)

    def _uploaded(self, member: Member) -> Message:
        update, private = self.module.upload(member.data), self.sequential.work.example_privacy
        return update if private is None else private.noised_update(update, member.job.seed)

    def _upload_one_by_one(self, block: Block, slots: Slots) -> list[Message]:
        """Build every client's update by the overridden hooks; unchanged weights stay rows of one stack."""
        updates: list[Message] = []
        stacks: dict[tuple[str, ...], Stack] = {}
        for row, member in enumerate(block.members):
            entries = {name: stack[row].detach() for name, stack in block.entries.items()}
            self.sequential.set_turn(member.job, member.steps)
            self.attributes.put(member.caches)
            member.stream.restore()
            with slots.holding(entries):
                job = member.job
                with self.attributes.of("upload"), during("upload", job.round, job.client):
                    update = dict(self._uploaded(member))
                member.caches = self.attributes.caches
                take_over(slots.current(), entries)
            weights = update.get("weights")
            if isinstance(weights, dict) and weights and all(is_same(t, entries.get(n)) for n, t in weights.items()):
                chosen = tuple(weights)
                if chosen not in stacks:
                    # Views of the stack, so sending them copies nothing.
                    stacks[chosen] = Stack({name: block.entries[name].detach() for name in chosen})
                update["weights"] = Row(stacks[chosen], row)
            updates.append(copied(update))
            if not self.evaluator.usable:
                # Training phases before an evaluation continue with the client's random stream.
                member.stream.keep()
        return arrived_together(updates, self.sequential.device)

    def _evaluate_alone(self, row: int, block: Block, slots: Slots) -> dict[str, dict[str, float]]:
        """Copy a trained client into the module, and evaluate as `Sequential` does."""
        member = block.members[row]
        self.sequential.set_turn(member.job, member.steps)
        self.attributes.put(member.caches)
        with torch.no_grad():
            slots.copy_row(block.entries, row)
        member.stream.restore()
        self.sequential.set_mode(training=False)
        with during("evaluation", member.job.round, member.job.client):
            return self.sequential.evaluate_present(member.job, member.data)


@contextmanager
def replaced(module: ClientModule, **methods: Callable[..., Any]) -> Iterator[None]:
    """Replace methods of a client module by functions inside this context."""
    table = vars(module)
    table.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del table[name]


def repeated(tensor: Tensor, rows: int) -> Tensor:
    """Return a stack of equal rows."""
    return tensor.detach().repeat(rows, *[1] * tensor.dim())


def copied(update: Mapping[str, Any]) -> Message:
    """Return an update with independent copies, as the next client's hooks may overwrite the originals."""
    return {k: v if type(v) is Row else tree_map(lambda t: t.detach().clone(), v) for k, v in update.items()}


def arrived_together(updates: list[Message], device: torch.device) -> list[Message]:
    """Return updates with all tensors on the CPU, except for rows of stacks, which move when first read.

    Args:
        updates: the clients' updates.
        device: the training device.
    """
    if device == CPU:
        return updates
    others = [{k: v for k, v in update.items() if type(v) is not Row} for update in updates]
    arrived = iter(moved(list(tensors(others)), CPU))
    return [update | tree_map(lambda _: next(arrived), other) for update, other in zip(updates, others, strict=True)]


def is_same(tensor: Tensor, other: Tensor | None) -> bool:
    """Return True if two tensors share one place in memory."""
    return other is not None and tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape


def take_over(current: StateDict, entries: StateDict) -> None:
    """Copy tensors put into the slots by hooks back into the entries."""
    for name, entry in entries.items():
        if name in current and not is_same(current[name], entry):
            entry.copy_(current[name])
