"""Clients into a block and out of it: one after another, or at once where a method has no hooks of its own for it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.engines.base import ClientState, Job, Outcome
from pfl_lightning.engines.layout import Layout
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vmap.block import Block, Member
from pfl_lightning.engines.vmap.checks import BlockSignature, SharedAttributes
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.engines.vmap.evaluator import BlockEvaluator
from pfl_lightning.engines.vmap.slots import Slots
from pfl_lightning.messages import Message, StateDict, detached, is_finite


class HandOver:
    """Receives clients into a stack, and hands over what they give and keep when they are trained.

    Where reception or upload are `ClientModule`'s own, the very same methods say what becomes of each client; only what
    they read and write are rows of the stack, and the module stays as it is.

    Args:
        sequential: the engine of one client, whose module it is.
        attributes: the module's, in which nothing of a client may be kept.
        evaluator: evaluates trained clients.
    """

    def __init__(self, sequential: Sequential, attributes: SharedAttributes, evaluator: BlockEvaluator) -> None:
        self.sequential = sequential
        self.module = sequential.module
        self.attributes = attributes
        self.evaluator = evaluator

    # In

    @torch.no_grad()
    def receive(self, jobs: list[Job], layout: Layout, slots: Slots) -> tuple[list[Member], StateDict, list[Phase]]:
        """The clients in the order of the jobs, their stacked parameters and buffers, and their common phases.

        Args:
            jobs: their work in this round.
            layout: the module's.
            slots: the module's.

        Raises:
            Unvectorisable: if the clients can't be in one block.
        """
        self.attributes.refuse_references(slot.tensor for slot in slots)
        signature = BlockSignature(self.attributes, layout)
        return self._receive_at_once(jobs, signature, slots) or self._receive_one_by_one(jobs, signature, slots)

    def _receive_at_once(
        self, jobs: list[Job], signature: BlockSignature, slots: Slots
    ) -> tuple[list[Member], StateDict, list[Phase]] | None:
        """Stacks what `ClientModule.receive` would assign to each client; None where that isn't all of its entries."""
        module, device = self.module, self.sequential.device
        if any(overrides(module, method) for method in ("receive", "on_download", "assign", "state_dict")):
            return None
        members = [Member(job, self.sequential.data_of(job), Stream(device, job.seed)) for job in jobs]
        own = slots.current()
        if module.state_dict().keys() - module.common_names != own.keys():
            # some have two names, or stay as the client before has left them
            return None
        assigned: list[StateDict] = []
        self.sequential.set_mode(training=False)
        with replaced(module, assign=lambda entries: assigned[-1].update(entries)):
            for member in members:
                self.sequential.set_turn(member.job)
                assigned.append({})
                module.receive(member.job.state.personal, member.job.payload, member.data)
        if any(entries.keys() != own.keys() for entries in assigned):
            return None
        stacks = {}
        for name, tensor in own.items():
            rows = [entries[name] for entries in assigned]
            if {row.shape for row in rows} != {tensor.shape}:
                return None
            if len(set(map(id, rows))) == 1:
                stacks[name] = rows[0].to(tensor.device, tensor.dtype).repeat(len(rows), *[1] * tensor.dim())
            else:
                stacks[name] = torch.stack(rows).to(tensor.device, tensor.dtype)
        for job in jobs if overrides(module, "local_phases") else jobs[:1]:
            self.sequential.set_turn(job)
            phases = module.local_phases()
            signature.admit(phases, own)
        return members, stacks, phases

    def _receive_one_by_one(
        self, jobs: list[Job], signature: BlockSignature, slots: Slots
    ) -> tuple[list[Member], StateDict, list[Phase]]:
        """Becomes one client after another, and copies each into a row of its own."""
        members: list[Member] = []
        for job in jobs:
            with self.sequential.leaks.of("on_download"):
                data = self.sequential.become(job)
            phases = self.module.local_phases()
            own = slots.current()
            signature.admit(phases, own)
            if not members:
                stacks = {name: tensor.new_empty((len(jobs), *tensor.shape)) for name, tensor in own.items()}
                rows = list(zip(*(stack.unbind() for stack in stacks.values()), strict=True))
            for row, tensor in zip(rows[len(members)], own.values(), strict=True):
                row.copy_(tensor)
            members.append(Member(job, data, Stream(self.sequential.device, job.seed).keep()))
        return members, stacks, phases

    # Out

    def outcomes(self, jobs: list[Job], block: Block, layout: Layout, slots: Slots) -> Iterator[Outcome]:
        """What trained clients give and keep, in the order of the jobs.

        Args:
            jobs: their work in this round.
            block: the clients, trained.
            layout: the module's.
            slots: the module's.
        """
        start = time.perf_counter()
        names = [name for name in self.module.state_dict() if name not in self.module.common_names]
        own_hooks = overrides(self.module, "upload") or overrides(self.module, "state_dict")
        at_once = not own_hooks and block.entries.keys() >= set(names)
        after = self.evaluator.evaluate(block.members, block.entries, slots) if at_once else None
        if after is None:
            yield from (self._outcome(job, block, layout, slots) for job in jobs)
            return
        given = self._upload_at_once(names, block)
        finite = all_finite([block.entries[name] for name in {*given[0][0]["weights"], *layout.personal}])
        seconds = block.seconds + (time.perf_counter() - start) / len(jobs)
        for job in jobs:
            row = block.rows[job.client]
            (update, own), metrics = given[row], block.means[row]
            others = {name: value for name, value in update.items() if name != "weights"}
            yield Outcome(
                client=job.client,
                update=update,
                state=ClientState({name: own[name] for name in layout.personal}, block.members[row].optimizers),
                metrics=metrics,
                finite=finite[row] and is_finite(others) and all(map(math.isfinite, metrics.values())),
                after=after[row],
                seconds=seconds,
            )

    @torch.no_grad()
    def _upload_at_once(self, names: list[str], block: Block) -> list[tuple[Message, StateDict]]:
        """Of each row the update that `ClientModule.upload` makes of it, and its ``state_dict``, as copies."""
        # of their own: who keeps or saves one row shall not keep the stack
        stacks = {name: [row.clone() for row in block.entries[name].cpu().unbind()] for name in names}
        result: list[tuple[Message, StateDict]] = []
        entries: StateDict
        self.sequential.set_mode(training=False)
        with replaced(self.module, state_dict=lambda: entries):
            for row, member in enumerate(block.members):
                entries = {name: rows[row] for name, rows in stacks.items()}
                self.sequential.set_turn(member.job, member.steps)
                update = self.module.upload(member.data)
                result.append(({k: v if k == "weights" else detached(v) for k, v in update.items()}, entries))
        return result

    def _outcome(self, job: Job, block: Block, layout: Layout, slots: Slots) -> Outcome:
        """Makes the module a trained client, and takes from it what `Sequential` does."""
        start = time.perf_counter() - block.seconds
        row = block.rows[job.client]
        member = block.members[row]
        self.sequential.set_turn(job, member.steps)
        with torch.no_grad():
            slots.copy_row(block.entries, row)
        member.stream.restore()
        state = ClientState(optimizers=member.optimizers)
        return self.sequential.outcome(job, layout, member.data, state, block.means[row], start)


@contextmanager
def replaced(module: ClientModule, **methods: Callable[..., Any]) -> Iterator[None]:
    """Puts functions in the place of a client module's methods while it is entered."""
    table = vars(module)
    table.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del table[name]


def all_finite(stacks: list[Tensor]) -> list[bool]:
    """Of each row whether it is free of NaN and infinity, as `is_finite` tells."""
    finite = [stack.reshape(len(stack), -1).sum(1).isfinite() for stack in stacks if stack.is_floating_point()]
    result: list[bool] = torch.stack(finite).all(0).tolist()
    return result
