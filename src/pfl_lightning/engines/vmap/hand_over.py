"""From clients to a stack, and back: by the hooks of each, or at once where those are ClientModule's own."""

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.data import gather
from pfl_lightning.engines.base import ClientState, Job, Outcome
from pfl_lightning.engines.vmap.block import Block, Member
from pfl_lightning.engines.vmap.checks import Alike
from pfl_lightning.engines.vmap.dropout import Stream
from pfl_lightning.engines.vmap.evaluator import Scorer
from pfl_lightning.engines.vmap.training import Stacked
from pfl_lightning.messages import StateDict


class Stacking(Stacked):
    """Receives the clients of a block into a stack, scores them there, and hands them over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scorer = Scorer(self.module, self.metrics, self.forward_context)
        self._scores_alone = self._scorer.alone or not self._has_own("evaluation_phases")

    def _has_own(self, *hooks: str) -> bool:
        """Whether hooks of the client module are `ClientModule`'s own."""
        own, ours = type(self.module), vars(self.module)
        return all(getattr(own, name) is getattr(ClientModule, name) and name not in ours for name in hooks)

    def _stack(self, jobs: list[Job]) -> Block:
        """The clients as the round begins for them; the largest come first."""
        members, entries, phases = self._received(jobs)
        sizes = [member.data.size("train") for member in members]
        order = sorted(range(len(members)), key=lambda place: -sizes[place])
        if sizes != sorted(sizes, reverse=True):
            members, sizes = [members[place] for place in order], [sizes[place] for place in order]
            at = torch.tensor(order, device=self.device)
            entries = {name: stack[at] for name, stack in entries.items()}
        parts = gather([member.data for member in members], "train")
        samples = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
        return Block(members, sizes, entries, samples, phases)

    @torch.no_grad()
    def _received(self, jobs: list[Job]) -> tuple[list[Member], StateDict, list[Phase]]:
        """The clients in the order of the jobs, their rows of a stack, and the phases that they have in common."""
        self._watch.refuse_references(place.tensor for place in self._places)
        entries = self._received_at_once(jobs)
        if entries is None:
            return self._received_one_by_one(jobs)
        alike = Alike(self._watch)
        for job in jobs[:1] if self._has_own("local_phases") else jobs:
            self._set_turn(job)
            phases = self.module.local_phases()
            alike.admit(self._signature(phases), {})
        device, dtype = self.device, cast(torch.dtype, self.module.dtype)
        members = [Member(job, job.data.to(device, dtype), Stream(device, job.seed)) for job in jobs]
        return members, entries, phases

    def _received_at_once(self, jobs: list[Job]) -> StateDict | None:
        """What `ClientModule.receive` makes of the clients; None where a method does otherwise."""
        if not self._has_own("receive", "on_download", "assign", "state_dict"):
            return None
        there = self._places.current()
        given = [{**job.state.personal, **job.payload["weights"]} for job in jobs]
        # else something stays as the client before has left it, or has two names
        if any(entries.keys() != there.keys() for entries in (self.module.state_dict(), *given)):
            return None
        stacks = {}
        for name, own in there.items():
            rows = [entries[name] for entries in given]
            if {row.shape for row in rows} != {own.shape}:
                return None
            if len(set(map(id, rows))) == 1:
                stacks[name] = rows[0].to(own.device, own.dtype).repeat(len(rows), *[1] * own.dim())
            else:
                stacks[name] = torch.stack(rows).to(own.device, own.dtype)
        return stacks

    def _received_one_by_one(self, jobs: list[Job]) -> tuple[list[Member], StateDict, list[Phase]]:
        """Becomes one client after another, and copies each into a row of its own."""
        alike = Alike(self._watch)
        members: list[Member] = []
        for job in jobs:
            with self._leaks.of("on_download"):
                data = self.become(job)
            phases = self.module.local_phases()
            there = self._places.current()
            alike.admit(self._signature(phases), {name: tensor.shape for name, tensor in there.items()})
            if not members:
                entries = {name: tensor.new_empty((len(jobs), *tensor.shape)) for name, tensor in there.items()}
                rows = list(zip(*(stack.unbind() for stack in entries.values()), strict=True))
            for row, tensor in zip(rows[len(members)], there.values(), strict=True):
                row.copy_(tensor)
            members.append(Member(job, data, Stream(self.device, job.seed).keep()))
        return members, entries, phases

    def _set_turn(self, job: Job, steps: int = 0) -> None:
        """Tells the module whose turn it is."""
        module = self.module
        module.client_id, module.round, module.steps_done = job.client, job.round, steps

    def _signature(self, phases: list[Phase]) -> list[Any]:
        """What phases of clients that train together have in common."""
        if any(phase.data is not None for phase in phases):
            self._watch.refuse("it has a phase with samples of its own")
        return [{**vars(phase), "trains": list(self._trained(phase))} for phase in phases]

    def _score(self, members: list[Member], entries: StateDict) -> list[dict[str, dict[str, float]]] | None:
        """Metrics of stacked clients, by part; None where that must be done client by client."""
        stages = list(dict.fromkeys(chain.from_iterable(member.job.evaluate for member in members)))
        if stages and self._scores_alone:
            return None
        results: list[dict[str, dict[str, float]]] = [{} for _ in members]
        self._set_mode(training=False)
        try:
            with self._watch.nobody_in_turn():
                before = self._watch.attributes()
                for stage in stages:
                    parts = gather([member.data for member in members], stage)
                    scores = self._scorer.score(self._places, entries, parts)
                    for member, result, values in zip(members, results, scores, strict=True):
                        if values and stage in member.job.evaluate:
                            result[stage] = values
                self._watch.compare(before, "its forward pass changes {}")
        except Exception:
            # if it is wrong in any way, it is so client by client, and says so there
            self._scores_alone = True
            return None
        return results

    def _handed_over(self, jobs: list[Job], block: Block) -> Iterator[Outcome]:
        """What trained clients give and keep, in the order of the jobs."""
        start = time.perf_counter()
        names = list(self.module.state_dict())
        at_once = self._has_own("upload", "state_dict") and block.entries.keys() >= set(names)
        after = self._score(block.members, block.entries) if at_once else None
        if after is None:
            yield from (self._hand_over(job, block) for job in jobs)
            return
        shared = [name for name in names if self.module.is_shared(name)]
        # copies of their own: who keeps or saves one row shall not keep the stack
        rows = {
            name: [row.clone() for row in block.entries[name].cpu().unbind()] for name in {*shared, *self._personal}
        }
        finite = all_finite([block.entries[name] for name in rows])
        seconds = block.seconds + (time.perf_counter() - start) / len(jobs)
        for job in jobs:
            row = block.rows[job.client]
            member, metrics = block.members[row], block.means[row]
            # as `ClientModule.upload` does
            update = {
                "weights": {name: rows[name][row] for name in shared},
                "num_samples": torch.tensor(block.sizes[row]),
            }
            if "class_counts" in self.module.requested:
                update["class_counts"] = member.data.class_counts.cpu()
            yield Outcome(
                client=job.client,
                update=update,
                state=ClientState({name: rows[name][row] for name in self._personal}, member.optimizers),
                metrics=metrics,
                finite=finite[row] and all(map(math.isfinite, metrics.values())),
                after=after[row],
                seconds=seconds,
            )

    def _hand_over(self, job: Job, block: Block) -> Outcome:
        """Makes the module a trained client, and takes from it what `Sequential` does."""
        start = time.perf_counter() - block.seconds
        row = block.rows[job.client]
        member = block.members[row]
        self._set_turn(job, member.steps)
        with torch.no_grad():
            for p in self._places:
                if p.current is p.tensor and p.tensor is not None:
                    p.tensor.copy_(block.entries[p.name][row])
                elif p.current is not None:
                    # put there by a hook, and maybe the server's own
                    p.table[p.key] = block.entries[p.name][row].clone()
        member.stream.restore()
        kept = ClientState(optimizers=member.optimizers)
        return self._outcome(job, member.data, kept, block.means[row], start)


def all_finite(stacks: list[Tensor]) -> list[bool]:
    """Of each row whether it is free of NaN and infinity, as `is_finite` tells."""
    finite = [stack.reshape(len(stack), -1).sum(1).isfinite() for stack in stacks if stack.is_floating_point()]
    result: list[bool] = torch.stack(finite).all(0).tolist()
    return result
