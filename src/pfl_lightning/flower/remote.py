"""The engine whose clients are at sites: jobs go out as messages, outcomes come back."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from reprlib import repr as shown
from statistics import median
from typing import Any, cast

import torch
from flwr.app import MessageType, RecordDict
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.client import ClientModule, Phase
from pfl_lightning.compression import Compression
from pfl_lightning.data import ClientData
from pfl_lightning.engines import ClientState, Engine, Evaluated, Job, LocalWork, Outcome
from pfl_lightning.flower.link import Link, check_failure
from pfl_lightning.flower.measured import NAMED, Measured, bounded
from pfl_lightning.flower.sketch import Sketches
from pfl_lightning.flower.states import TOKEN
from pfl_lightning.flower.sums import Exchange, Summing, ids
from pfl_lightning.flower.template import (
    Refused,
    check,
    check_counts,
    check_finite,
    check_norm,
    check_type,
    norm_of,
    plain,
)
from pfl_lightning.flower.wire import unpack
from pfl_lightning.messages import Message, Restored, StateDict, num_bytes

ANSWER_BYTES = 1 << 20
"""Bytes of tensors that a client's metrics take at most."""
TRAINED = {"round": 0, "kept": "", "finite": True, "seconds": 0.0, "metrics": {str: float}}
"""What a site tells of a client's training, beside its metrics after it."""
FAR = 10.0
"""How many times the median norm of a round's updates one is, of which the server warns."""

Live = Callable[[], Mapping[int, set[str]]]
"""Gives the names of the states that the server may ask for again, by client."""


class Remote(Engine):
    """Sends each job to the site that has its client, and gives what comes back, one message a site and phase.

    Args:
        modules: the client modules, by architecture.
        work: how much each client trains, which sites read in the configuration.
        precision: the Trainer's precision plugin.
        link: the sites.
        architecture_of: which of the modules a client has.
        live: the states that sites must keep.
        max_norm: how far an update may be from the payload at most, as a norm over all of its tensors; None refuses
            none, and warns of one that is far above the others.
        compression: what sites compress updates by; None where they send whole weights.
        summing: how the sum of updates is taken, where the server learns no client's own; None takes each update.
    """

    may_miss_clients = True

    def __init__(
        self,
        modules: Sequence[ClientModule],
        work: LocalWork,
        precision: Precision,
        link: Link,
        architecture_of: Callable[[int], int],
        live: Live,
        max_norm: float | None = None,
        compression: Compression | None = None,
        summing: Summing | None = None,
    ) -> None:
        super().__init__(modules[0], work, precision)
        self.modules, self.compression = modules, compression
        self.link, self.architecture_of, self.live, self.max_norm = link, architecture_of, live, max_norm
        self.summing = summing
        self.sums = None if summing is None else {}
        self._sketches = Sketches(modules)
        self._measured = Measured(modules[0])
        self._told: set[int] = set()
        self._told_far: set[int] = set()
        self.begin_round()

    def begin_round(self) -> None:
        """Forgets what earlier rounds took."""
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._evaluated = 0

    @property
    def taken(self) -> dict[str, float]:
        """What the round has taken, for its record: training seconds of the slowest site, and bytes for evaluations."""
        return {"time/site": max(self._seconds.values(), default=0.0), "bytes/evaluate": self._evaluated}

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yields outcomes as sites answer; what isn't as it should be is refused."""
        asked = {job.client: job for job in jobs}
        if self.summing is not None:
            yield from self._run_summed(asked, self.summing)
            return
        norms: dict[int, dict[int, float]] = {}
        for client, content in self._ask(MessageType.TRAIN, asked):
            try:
                outcome = self._outcome(asked[client], content)
                self._count_seconds(outcome)
                if self.max_norm is None and outcome.finite:
                    own = norms.setdefault(self.architecture_of(client), {})
                    own[client] = norm_of(outcome.update, asked[client].payload)
                yield outcome
            except Refused as reason:
                yield refused(client, reason)
        for own in norms.values():
            self._look_for_far(own)

    def _run_summed(self, asked: Mapping[int, Job], summing: Summing) -> Iterator[Outcome]:
        """Yield outcomes with the mean in the place of each update; without enough clients none of a sum.

        Keys come before training: who drops out in the longest phase can then be taken out of the sum.
        """
        self.sums = {}
        if not asked:
            return
        round = next(iter(asked.values())).round
        exchange = Exchange(self.link, summing, round, self._answer)
        trained: dict[int, Outcome] = {}
        hidden: dict[int, Tensor] = {}
        begun = exchange.begin(sorted(asked))
        jobs = {client: asked[client] for client in exchange.clients} if begun else {}
        if jobs:
            encoding = exchange.encoding(self.look(jobs[min(jobs)]), asked)
            shown = {"sum": ids(jobs), "most": encoding.most or 0, "agreement": encoding.agreement}
            like = {"vector": torch.zeros(encoding.length, dtype=encoding.dtype)}
            for client, content in self._ask(MessageType.TRAIN, jobs, shown):
                try:
                    answer = self._answer(content, client)
                    outcome = self._trained(jobs[client], answer)
                    if outcome.finite:
                        name, limit = f"{client}/masked", num_bytes(like)
                        hidden[client] = unpack(content, name, like, limit=limit)["vector"]
                    trained[client] = outcome
                    self._count_seconds(outcome)
                except Refused as reason:
                    exchange.refused[client] = reason
            means, clipped = exchange.end(encoding, hidden, jobs[min(jobs)].payload)
            up, down = encoding.bytes_up(len(jobs), len(hidden)), encoding.bytes_down(len(jobs), len(hidden))
            self.sums = {"bytes/up": up, "bytes/down": down}
            if means:
                self.sums["secure_sum/clipped"] = clipped
            yield from (trained[client]._replace(update=mean) for client, mean in means.items())
        self.sums["time/secure_sum"] = exchange.seconds
        yield from (outcome for outcome in trained.values() if not outcome.finite)
        told = {client: reason for client, reason in exchange.refused.items() if client not in hidden}
        yield from (refused(client, reason) for client, reason in told.items())

    def _count_seconds(self, outcome: Outcome) -> None:
        if not math.isnan(outcome.seconds):
            self._seconds[self.link.node(outcome.client)] += outcome.seconds

    def _look_for_far(self, norms: Mapping[int, float]) -> None:
        """Warns, once of each site, of an update that changes far more than others of its architecture.

        Args:
            norms: of what each client changes, by client; of fewer than three nobody can say which is far.
        """
        middle = median(norms.values()) if len(norms) > 2 else 0.0
        for client, norm in sorted(norms.items()):
            node = self.link.node(client)
            if middle > 0 and not norm <= FAR * middle and node not in self._told_far:
                self._told_far.add(node)
                rank_zero_warn(
                    f"client {client} at node {node} changes the model by the norm {norm:.3g}, where the round's "
                    f"median is {middle:.3g}, and counts; max-norm={FAR / 2 * middle:.1g}, say, leaves such ones out."
                )

    def times_asked(self, client: int) -> int:
        """Return how often a client's site was asked, more than once where the site was gone in between."""
        return self.link.times_asked[client]

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Yields metrics as sites answer; clients whose aren't as they should be are left out with a warning."""
        asked = {job.client: job for job in jobs}
        self._evaluated += sum(num_bytes(sent_to(job)) for job in asked.values())
        for client, content in self._ask(MessageType.EVALUATE, asked):
            try:
                yield client, self._metrics(asked[client], self._answer(content, client))
            except Refused as reason:
                rank_zero_warn(f"client {client} isn't evaluated: {reason}")

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Metrics of one client, at its site."""
        return dict(self.evaluate_all([job])).get(job.client, {})

    def become(self, job: Job, training: bool = False) -> ClientData:
        """Refused: nobody can be a client here.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            f"client {job.client} is at its site, with its samples and what stays with it; leave out what looks at "
            "clients' own models here, such as trainer.callbacks=FeaturePictures."
        )

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Refused, as `become`."""
        self.become(job)

    def look(self, job: Job) -> Message:
        """What the update of a job should look like.

        Raises:
            MisconfigurationException: if that can't be found out.
        """
        return self._sketches.update(self.architecture_of(job.client), job)

    def _compressed_look(self, job: Job, like: Message) -> Message:
        """Return what a job's update looks like as it travels."""
        return cast(Compression, self.compression).look(like, self.modules[self.architecture_of(job.client)])

    def _restored(self, job: Job, travelled: Message, like: StateDict) -> Restored:
        """Return the weights that a site's compressed ones stand for.

        Raises:
            Refused: if they stand for none, or for some that aren't finite.
        """
        try:
            weights = cast(Compression, self.compression).restored(travelled, job.payload["weights"], like)
        except ValueError as error:
            raise Refused(f"update.weights can't be restored: {error}.") from error
        check_finite(weights, "update.weights")
        return weights

    def _ask(
        self, kind: str, asked: Mapping[int, Job], sums: Mapping[str, Any] | None = None
    ) -> Iterator[tuple[int, RecordDict]]:
        if not asked:
            return
        live = self.live()
        jobs = {
            client: {
                "round": job.round,
                "architecture": self.architecture_of(client),
                "seed": job.seed,
                "lr_factor": job.lr_factor,
                "evaluate": " ".join(job.evaluate),
                "requested": " ".join(sorted(self.module.requested)),
                "withheld": " ".join(sorted(self.module.withheld)),
                "kept": job.state.kept or "",
                "live": " ".join(sorted(live.get(client, set()))),
                "once": " ".join(sorted(job.once & job.payload.keys())),
                **(sums or {"sum": "", "most": 0, "agreement": ""}),
            }
            for client, job in asked.items()
        }
        round = next(iter(asked.values())).round + 1
        yield from self.link.ask(kind, str(round), jobs, {client: sent_to(job) for client, job in asked.items()})

    def _answer(self, content: RecordDict, client: int) -> dict[str, Any]:
        """What a client's site tells, as a dict of anything."""
        check_failure(content)
        answer: dict[str, Any] = unpack(content, f"{client}/answer", limit=ANSWER_BYTES)
        check_type(answer, dict, "answer")
        if "error" in answer:
            check(answer, {"error": ""}, where="answer")
            raise Refused(plain(answer["error"]))
        return answer

    def _metrics(self, job: Job, answer: dict[str, Any]) -> dict[str, dict[str, float]]:
        """Metrics by split, in the order in which they are computed; NaN in the place of what can't be."""
        held = [split for split in job.evaluate if self.link.sizes[job.client][split]]
        metrics, wrong = self._measured.evaluated(answer.get("after"), held, "after")
        self._tell(job.client, wrong)
        return metrics

    def _tell(self, client: int, wrong: list[str]) -> None:
        """Warns, once of each site, of what is left out of its metrics."""
        node = self.link.node(client)
        if wrong and node not in self._told:
            self._told.add(node)
            more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            rank_zero_warn(
                f"client {client} at node {node} tells metrics that the record leaves out: {'; '.join(wrong[:NAMED])}"
                f"{more}. What else the node tells of that kind is left out without a word."
            )

    def _trained(self, job: Job, answer: dict[str, Any]) -> Outcome:
        """Return a client's outcome without its update."""
        client = job.client
        after = self._metrics(job, answer)
        check({name: value for name, value in answer.items() if name != "after"}, TRAINED, where="answer")
        if answer["round"] != job.round:
            raise Refused(f"it is the answer of round {shown(answer['round'] + 1)}.")
        if answer["kept"] and not TOKEN.fullmatch(answer["kept"]):
            raise Refused(f"answer.kept is {shown(answer['kept'])} and should be 16 hexadecimal digits.")
        metrics, wrong = self._measured.trained(answer["metrics"])
        # whoever is slower than the time-out isn't waited for
        seconds = bounded("seconds", answer["seconds"], (0.0, self.link.timeout), wrong)
        self._tell(client, wrong)
        # of a client with whom nothing stays there is nothing to keep
        state = ClientState(kept=answer["kept"] or None)
        taken = math.nan if seconds is None else seconds
        return Outcome(client, {}, state, metrics, answer["finite"], after, taken)

    def _outcome(self, job: Job, content: RecordDict) -> Outcome:
        client = job.client
        outcome = self._trained(job, self._answer(content, client))
        update = {}
        if outcome.finite:
            samples = self.link.sizes[client]["train"]
            like = self.look(job)
            compressed = self.compression is not None and "weights" in job.payload
            travelling = self._compressed_look(job, like) if compressed else like
            limit = 2 * num_bytes(travelling)
            update = unpack(content, f"{client}/update", travelling, self._sketches.keys(self.link.clients), limit)
            if compressed:
                update["weights"] = self._restored(job, update["weights"], like["weights"])
            private = self.work.example_privacy
            check_counts(update, samples, private is not None and private.counts_epsilon is not None)
            if self.max_norm is not None:
                check_norm(update, job.payload, self.max_norm)
        return outcome._replace(update=update)


def sent_to(job: Job) -> Message:
    """The part of a job's payload that travels; all of it where the site keeps no state that could have the rest."""
    return job.travelling if job.state.kept else job.payload


def refused(client: int, reason: Refused) -> Outcome:
    """The outcome of a client of whom nothing can be used.

    Args:
        client: its id.
        reason: why.
    """
    return Outcome(client, {}, ClientState(), {}, True, {}, 0.0, str(reason).removesuffix(".") or "it gave no reason")
