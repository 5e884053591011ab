"""Load clients into the rows of a block, and collect their updates and outcomes from the rows."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from pfl_lightning.client.hooks import overrides
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import put_together
from pfl_lightning.engines.base import ClientState, Job, Outcome, identities
from pfl_lightning.engines.errors import during
from pfl_lightning.engines.sequential import Sequential
from pfl_lightning.engines.vmap.block import Block, Member
from pfl_lightning.engines.vmap.block_hooks import CLASS_WEIGHTS, BlockData, BlockHooks, is_same, repeated
from pfl_lightning.engines.vmap.checks import BlockSignature, SharedAttributes, Unvectorisable
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.engines.vmap.evaluator import BlockEvaluator
from pfl_lightning.messages import CPU, Message, Others, Row, Stack, StateDict, is_finite, tensors, tree_map
from pfl_lightning.transfers import moved, rows_of, side_by_side

UPLOAD = ClientModule.upload
"""The hook whose entries `BlockIO` knows, also where a program has put another in its place."""


class BlockIO:
    """Load clients into stacks before training, and build updates and outcomes after training.

    Hooks of a download or an upload run once for all clients where they have the mark for it (`BlockHooks`). Others run
    with a client's row in the module, and one download serves all clients with equal state and payload if it looks at
    none of them. `ClientModule`'s own hooks need no row: what they would copy is stacked as it is.

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
        self.hooks = BlockHooks(sequential, attributes)
        self._shares = dict.fromkeys((True, False), not self.module.caches)
        """Whether a download for training, or else for an evaluation, may serve several clients, as far as known."""

    # In

    @torch.no_grad()
    def receive(self, jobs: list[Job], training: bool) -> tuple[list[Member], StateDict, list[Phase]]:
        """Return the clients in the order of the jobs, stacked parameters and buffers, and the common phases.

        Args:
            jobs: the clients' work in this round.
            training: whether local training follows, as for `Engine.become`.

        Raises:
            Unvectorisable: if the clients can't share one block.
        """
        # Each block finds its own caches that differ between clients.
        self.attributes.differing = frozenset()
        self.attributes.refuse_references()
        if foreign := [
            name for name in self.attributes.layout.personal if name not in self.attributes.slots.first_names
        ]:
            # An entry of a custom state_dict has no place in the module to stack.
            raise Unvectorisable(self.module, f"{foreign[0]} of its state_dict is no parameter or buffer")
        device, dtype = self.sequential.device, cast(torch.dtype, self.module.dtype)
        members = [Member(job, job.data.to(device, dtype), Stream(device, job.seed)) for job in jobs]
        put_together([member.data for member in members])
        if (stacks := self._given(members)) is not None:
            # Evaluations have no local phases.
            return members, stacks, self._phases(members, stacks) if training else []
        there = self._sent_together(members)
        if (stacks := self.hooks.receive(members, there, training)) is not None:
            return members, stacks, self._phases(members, stacks) if training else []
        if self._shares[training] and CLASS_WEIGHTS not in self.attributes.slots.current():
            try:
                keys = [identities(job.state, job.payload) for job in jobs]
                return members, *self._loaded(members, there, keys, training)
            except torch.cuda.OutOfMemoryError:
                raise
            # Of any type, as hooks fail in their own ways without a client; an error of their own comes again below.
            except Exception:
                self._shares[training] = False
        return members, *self._loaded(members, there, range(len(jobs)), training)

    def _given(self, members: list[Member]) -> StateDict | None:
        """Return the stacks as `ClientModule`'s hooks would assign them; None where a module has other hooks."""
        module, device, current = self.module, self.sequential.device, self.attributes.slots.current()
        if any(overrides(module, method) for method in ("receive", "on_download", "assign", "state_dict")):
            return None
        # `ClientModule.receive` writes these of the buffers in no `state_dict`; all others keep their values.
        if CLASS_WEIGHTS in current:
            return None
        names = module.state_dict().keys() - module.common_names
        pairs = [(member.job.state.personal, member.job.payload.get("weights", {})) for member in members]
        # most servers send all clients the same weights, which then stand for each client's
        if all(weights is pairs[0][1] and not personal for personal, weights in pairs):
            pairs = pairs[:1]
        given = [{**personal, **weights} for personal, weights in pairs]
        # Some entries may have two names, or would keep the values of the client before.
        if names - current.keys() or any(entries.keys() != names for entries in given):
            return None
        sent: list[Tensor] = []
        alike: set[str] = set()
        for name, tensor in current.items():
            rows = [entries[name] for entries in given] if name in names else [tensor]
            # An entry that is the same object for all clients is copied to the device once and repeated there.
            if len(set(map(id, rows))) == 1:
                alike.add(name)
                rows = rows[:1]
            if {row.shape for row in rows} != {tensor.shape}:
                return None
            sent.append(rows[0] if name in alike else side_by_side(rows, device))
        stacks: StateDict = {}
        for (name, tensor), stack in zip(current.items(), moved(sent, device), strict=True):
            stack = stack.to(tensor.dtype)
            stacks[name] = repeated(stack, len(members)) if name in alike else stack
        return stacks

    def _phases(self, members: list[Member], stacks: StateDict) -> list[Phase]:
        """Return the phases that all clients have in common.

        Args:
            members: the clients.
            stacks: parameters and buffers after the download, a row per client.

        Raises:
            Unvectorisable: if clients differ in their phases.
        """
        signature, slots = BlockSignature(self.attributes, self.attributes.is_close), self.attributes.slots
        self.sequential.set_turn(members[0].job)
        # The default phases are the same for all clients, and so are others that look at no client.
        own = overrides(self.module, "local_phases")
        phases = self.hooks.phases(members, stacks) if own else self.module.local_phases()
        if phases is not None:
            signature.admit(phases, slots.current())
            return phases
        for row, member in enumerate(members):
            self.sequential.set_turn(member.job)
            with slots.holding({name: stack[row] for name, stack in stacks.items()}):
                phases = self.module.local_phases()
                signature.admit(phases, slots.current())
        return cast("list[Phase]", phases)

    def _loaded(
        self, members: list[Member], jobs: list[Job], keys: Sequence[object], training: bool
    ) -> tuple[StateDict, list[Phase]]:
        """Return the stacks of clients whose hooks change their rows in place, and the common phases.

        Args:
            members: the clients.
            jobs: their work, with states and payloads on the device.
            keys: a key for each; clients with the same key have one download.
            training: as for `receive`.

        Raises:
            ReadsClient: if such a download looks at a client.
        """
        clients, places = Counter(keys), {key: place for place, key in enumerate(dict.fromkeys(keys))}
        firsts = dict(zip(reversed(keys), zip(reversed(members), reversed(jobs), strict=True), strict=True))
        first = [member for member, _ in (firsts[key] for key in places)]
        signature = BlockSignature(self.attributes, self.attributes.is_close or not training)
        stacks = {name: repeated(tensor, len(first)) for name, tensor in self.attributes.slots.current().items()}
        for row, key in enumerate(places):
            member, job = firsts[key]
            entries = {name: stack[row] for name, stack in stacks.items()}
            common = clients[key] > 1
            with self.attributes.slots.holding(entries):
                with self.attributes.of("on_download"):
                    if common:
                        with self.sequential.common(job, training):
                            phases = self.module.local_phases()
                    else:
                        self.sequential.become(job, training)
                        phases = self.module.local_phases()
                current = self.attributes.slots.current()
                signature.admit(phases, current)
                if row == 0:
                    # Hooks may have replaced tensors, or changed their shapes; the stacks then follow the first client.
                    new = {n: t for n, t in current.items() if n not in entries or t.shape != entries[n].shape}
                    stacks |= {name: repeated(tensor, len(first)) for name, tensor in new.items()}
                    stacks = {name: stacks[name] for name in current}
                    entries = {name: stack[row] for name, stack in stacks.items()}
                take_over(current, entries)
            if not common:
                member.stream.keep()
        for member, caches in zip(first, signature.caches(), strict=True):
            member.caches = caches
        if len(first) < len(members):
            at = torch.tensor([places[key] for key in keys], device=self.sequential.device)
            stacks = {name: stack[at] for name, stack in stacks.items()}
        return stacks, phases

    def _sent_together(self, members: list[Member]) -> list[Job]:
        """Return the jobs with states and payloads on the device, sent in few transfers."""
        device = self.sequential.device
        jobs = [member.job._replace(data=member.data) for member in members]
        if device.type == "cpu":
            return jobs
        # By identity, because clients share many tensors, such as the global weights.
        sent = {
            id(tensor): tensor
            for job in jobs
            for entry in (job.state.personal, *job.payload.values())
            if type(entry) is not Others
            for tensor in tensors(entry)
        }
        there = dict(zip(sent, moved([*sent.values()], device), strict=True))

        def arrived(record: Any) -> Any:
            # a pool's models go to the device as one stack, where a hook asks for them
            return record if type(record) is Others else tree_map(lambda tensor: there[id(tensor)], record)

        return [
            job._replace(
                state=replace(job.state, personal=arrived(job.state.personal)),
                payload={name: arrived(entry) for name, entry in job.payload.items()},
            )
            for job in jobs
        ]

    # Out

    def outcomes(self, jobs: list[Job], block: Block) -> Iterator[Outcome]:
        """Yield the outcomes of trained clients, in the order of the jobs.

        Args:
            jobs: the clients' work in this round.
            block: the trained clients.
        """
        start, work = time.perf_counter(), self.sequential.work
        names = [name for name in self.module.state_dict() if name not in self.module.common_names]
        own_hooks = any(overrides(self.module, method) for method in ("upload", "shared_state", "state_dict"))
        own_hooks |= type(self.module).upload is not UPLOAD
        at_once = not own_hooks and block.entries.keys() >= set(names)
        self.sequential.set_mode(training=False)
        with torch.no_grad():
            updates = (
                self._upload_at_once(names, block)
                if at_once
                else self.hooks.upload(block) or self._upload_one_by_one(block)
            )
        # Under example-level privacy the update alone counts, as in `Sequential.train`.
        if (private := work.example_privacy) is not None:
            pairs = zip(updates, block.members, strict=True)
            updates = [private.noised_update(update, member.job.seed) for update, member in pairs]
        stacks = {update["weights"].stack for update in updates if isinstance(update.get("weights"), Row)}
        kept = {
            name: block.entries[self.attributes.slots.first_names[name]] for name in self.attributes.layout.personal
        }
        sent = [entry for stack in stacks for entry in stack.entries.values()]
        judged = sent if private is not None else [*sent, *kept.values()]
        recorded = {name: torch.cat([values for *_, values in steps]) for name, steps in block.recorded.items()}
        # One transfer for all metrics and checks, which would otherwise wait for the device once per client.
        # A row is finite if its sum is; `is_finite` judges a single client by such sums, too.
        sums_of_rows = [stack.reshape(len(jobs), -1).sum(1) for stack in judged if stack.is_floating_point()]
        sums = torch.stack(sums_of_rows) if sums_of_rows else torch.zeros(1, len(jobs))
        *scalars, sums = moved([*recorded.values(), sums], CPU)
        means, finite = block.means(dict(zip(recorded, scalars, strict=True))), sums.isfinite().all(0).tolist()
        personal = rows_of(kept, len(jobs), self.sequential.device if work.keeps_on_device else CPU)
        after = self.evaluator.evaluate(block.members, block.entries)
        others = [[value for value in update.values() if type(value) is not Row] for update in updates]
        # Integer tensors are always finite, so most updates need no further check.
        counts_only = all(type(v) is Tensor and not v.is_floating_point() for v in chain.from_iterable(others))
        seconds = block.seconds + (time.perf_counter() - start) / len(jobs)
        for job in jobs:
            row = block.rows[job.client]
            member, metrics = block.members[row], means[row]
            sound = finite[row] and (counts_only or is_finite(others[row]))
            measured: dict[str, dict[str, float]] = {}
            if job.evaluate:
                measured = self._evaluate_alone(row, block) if after is None else after.metrics(job.client)
            yield Outcome(
                client=job.client,
                update=updates[row],
                state=ClientState(
                    personal[row], member.optimizers, member.scaler, batches=member.job.state.batches | member.batches
                ),
                metrics=metrics,
                finite=sound and (private is not None or all(map(math.isfinite, metrics.values()))),
                after=measured,
                seconds=seconds,
                releases=() if private is None else tuple(private.releases(work, block.phases, block.sizes[row])),
                steps=member.steps,
                samples=member.samples,
            )

    def _upload_at_once(self, names: list[str], block: Block) -> list[Message]:
        """Build every client's update by one call of `ClientModule.upload`; shared weights stay rows of one stack."""
        members = block.members
        shared = {name: block.entries[name].detach() for name in names if self.module.is_shared(name)}
        with during("upload", members[0].job.round, *block.rows):
            # of all clients side by side; the module's own weights are of none of them
            update = self.module.upload(cast(Any, BlockData(members, lambda stack: stack)))
            del update["weights"]
            stack, others = Stack(shared), rows_of(update, len(members), CPU)
        return [{"weights": Row(stack, row) if shared else {}, **other} for row, other in enumerate(others)]

    def _upload_one_by_one(self, block: Block) -> list[Message]:
        """Build every client's update by the overridden hooks; unchanged weights stay rows of one stack."""
        updates: list[Message] = []
        stacks: dict[tuple[str, ...], Stack] = {}
        for row, member in enumerate(block.members):
            entries = {name: stack[row].detach() for name, stack in block.entries.items()}
            member.stream.restore()
            with self.attributes.turn_of(member, entries, "upload"):
                with self.attributes.of("upload"):
                    update = dict(self.module.upload(member.data))
                member.caches = self.attributes.caches
                take_over(self.attributes.slots.current(), entries)
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

    def _evaluate_alone(self, row: int, block: Block) -> dict[str, dict[str, float]]:
        """Evaluate a trained client as `Sequential` does, in copies of its entries, as an evaluation may train."""
        member = block.members[row]
        entries = {name: stack[row].detach().clone() for name, stack in block.entries.items()}
        self.sequential.set_mode(training=False)
        member.stream.restore()
        with self.attributes.turn_of(member, entries, "evaluation"):
            return self.sequential.evaluate_present(member.job, member.data)


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


def take_over(current: StateDict, entries: StateDict) -> None:
    """Copy tensors put into the slots by hooks back into the entries."""
    for name, entry in entries.items():
        if name in current and not is_same(current[name], entry):
            entry.copy_(current[name])
