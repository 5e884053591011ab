"""The server's engine in a deployment: send jobs to sites as messages, and check the outcomes that come back."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from reprlib import repr as shown
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, cast

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
from pfl_lightning.flower.journal import Again
from pfl_lightning.flower.link import Link, check_failure
from pfl_lightning.flower.masks import ids
from pfl_lightning.flower.measured import COUNTED, NAMED, Measured, bounded
from pfl_lightning.flower.sketch import Sketches
from pfl_lightning.flower.states import TOKEN
from pfl_lightning.flower.sums import Exchange, Summing, told_alike
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
from pfl_lightning.flower.wire import LARGE, on_disk, unpack
from pfl_lightning.messages import Message, Restored, StateDict, num_bytes, tensors
from pfl_lightning.privacy import DPSGD
from pfl_lightning.privacy.secure_sum import Encoding

ANSWER_BYTES = 1 << 20
"""Largest size of the tensors in a client's metrics, in bytes."""
NUMBERS = {"seconds": 0.0, "steps": 0.0, "samples": 0.0}
"""Template of the numbers in a site's answer about a client's training."""
TRAINED = {"round": 0, "kept": "", "finite": True, "metrics": {str: float}} | NUMBERS
"""Template of a site's answer about a client's training, without the metrics after training."""
FAR = 10.0
"""Factor of the round's median norm above which the server warns of an update."""

Live = Callable[[], Mapping[int, set[str]]]
"""Function that returns, by client, the tokens of the states that the server may ask for again."""


class Masked(NamedTuple):
    """What clients have sent of a round's sum.

    Args:
        exchange: the messages of the sum.
        trained: outcomes without updates, by client.
        hidden: masked vectors ``[length]``, by client.
        row: what each client was told about its work, alike for all; empty if no client was asked to train.
        encoding: of the vectors; None if no client was asked to train.
    """

    exchange: Exchange
    trained: dict[int, Outcome]
    hidden: dict[int, Tensor]
    row: dict[str, Any]
    encoding: Encoding | None


class Remote(Engine):
    """Runs clients at sites: sends each job to the client's site, one message per site and phase.

    Answers are not trusted: shapes, types, sizes and numbers are checked, and a client with a wrong answer is left out.

    Args:
        modules: the client modules, by architecture.
        work: each client's local work. Sites read the same settings from their own copy of the configuration.
        precision: the Trainer's precision plugin.
        link: the connection to the sites.
        architecture_of: returns the architecture's index in ``modules`` for a client.
        live: returns the tokens of the states that sites must keep.
        max_norm: largest Euclidean norm of update minus payload over all floating tensors, above 0; None refuses no
            update, and warns of an update with a norm above `FAR` times the round's median.
        compression: the compression of updates; None if sites send whole weights.
        summing: the secure sum, with which the server learns no single update; None takes each client's update.
        folder: a folder on a disk for large updates, until the aggregation, and for the server's own model; None keeps
            them in memory.
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
        folder: Path | None = None,
    ) -> None:
        for module in modules:
            module.sends_counts = True
        # settings read from the first module, such as requested entries, hold for all architectures
        super().__init__(modules[0], work, precision)
        self.modules, self.compression = modules, compression
        self.link, self.architecture_of, self.live, self.max_norm = link, architecture_of, live, max_norm
        self.summing, self.folder = summing, folder
        self.sums = None if summing is None else {}
        self.run_name = ""
        """Name of the run, the same after it is resumed, by which sites know a round again."""
        # jobs without an answer so far, where a late answer may count
        self._late: dict[int, Job] = {}
        self._sketches = Sketches(modules)
        self._measured = Measured(modules[0])
        # a site with a wrong metric has it every round, so that each kind of warning comes once per node
        self._warned: set[int] = set()
        self._warned_far: set[int] = set()
        self.joined: Sequence[int] = ()
        self.coming: Callable[[Collection[int]], Mapping[int, Job]] | None = None
        """Returns the coming round's jobs, which an evaluation sends along; None sends evaluations alone."""
        # of the coming round; a round without any answer isn't asked for twice
        self._ahead: dict[int, tuple[Job, Outcome | Refused]] | None = None
        self._ahead_took: dict[int, float] = {}
        self.begin_round()

    def begin_round(self) -> None:
        """Reset the round's training seconds, evaluation bytes and refusals."""
        self.refusals: dict[int, str] = {}
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._evaluated = 0

    @property
    def absent(self) -> frozenset[int]:  # type: ignore[override]
        """Return the clients without a site, or at a lost one."""
        return frozenset(range(self.link.clients)).difference(self.link.present)

    @property
    def taken(self) -> dict[str, Any]:
        """Return the slowest site's training seconds and the evaluations' bytes for the round's record.

        Where clients may join, there are also the ids of those that have joined.
        """
        # sites train at the same time, so that the slowest one decides how long a round takes
        taken: dict[str, Any] = {"time/site": max(self._seconds.values(), default=0.0)}
        taken["bytes/evaluate"] = self._evaluated
        if self.link.most > self.link.founders:
            taken["joined"] = " ".join(map(str, self.joined))
        return taken

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield outcomes in the order of sites' answers; a client with a wrong answer gets a refused outcome."""
        asked = {job.client: job for job in jobs}
        if self.summing is not None:
            yield from self._run_summed(asked, self.summing)
            return
        norms: dict[int, dict[int, float]] = {}
        silent = dict(asked)
        for client, job, outcome in self._come_now(asked) if self._ahead is None else self._come_early(asked):
            silent.pop(client)
            if isinstance(outcome, Refused):
                yield self._refused(client, outcome)
                continue
            self._count_seconds(outcome)
            # by architecture, as norms of networks of different sizes can't be compared
            if self.max_norm is None and outcome.finite:
                own = norms.setdefault(self.architecture_of(client), {})
                own[client] = norm_of(outcome.update, job.payload)
            yield outcome
            # the next message is read while this name stands
            del outcome
        if self.link.quorum.late_rounds:
            # a client still at work on an earlier job hasn't been sent this one
            self._late |= {client: job for client, job in silent.items() if self.link.times_asked[client]}
        # only now, as the median is of the whole round; the updates have been taken by then
        for own in norms.values():
            self._look_for_far(own)

    def _come_now(self, asked: Mapping[int, Job]) -> Iterator[tuple[int, Job, Outcome | Refused]]:
        """Yield clients, jobs and outcomes, or the reason of a refusal, in the order of sites' answers."""
        for client, content in self._ask(MessageType.TRAIN, asked):
            # an answer to an earlier job is relative to the payload of that job
            job = asked[client] if self.link.times_asked[client] else self._late.pop(client, asked[client])
            outcome = self._tried(job, content)
            # the next message is read while this name stands
            del content
            yield client, job, outcome
            del outcome

    def _come_early(self, asked: Mapping[int, Job]) -> Iterator[tuple[int, Job, Outcome | Refused]]:
        """Yield what clients have sent with the evaluation before the round, as `_come_now`."""
        early, self._ahead = cast(dict[int, tuple[Job, Outcome | Refused]], self._ahead), None
        self.link.trained = self._ahead_took
        for client in [client for client in early if client in asked]:
            yield client, *early.pop(client)

    def _tried(self, job: Job, content: RecordDict) -> Outcome | Refused:
        """Return a client's outcome, a large update in a file, or the reason of a refusal."""
        try:
            return self._outcome(job, content)
        except Refused as reason:
            self.link.useless.add(job.client)
            return reason

    def _run_summed(self, asked: Mapping[int, Job], summing: Summing) -> Iterator[Outcome]:
        """Yield outcomes with the mean in place of each update; with too few clients, yield no update.

        Raises:
            MisconfigurationException: if the clients have helped with another sum of the model, and its other clients
                aren't in the cohort.
        """
        self.sums = {}
        if not asked:
            return
        jobs = told_alike(asked)
        words = "the server has another payload for it than for most, and a sum is of clients that are told the same"
        left_out = {client: Refused(words) for client in asked if client not in jobs}
        summed = self._summed(jobs, summing)
        # a server that goes on from its last checkpoint may have learnt a sum that it no longer has
        if before := summed.exchange.begun_before(len(summed.hidden)):
            again = {client: job for client, job in jobs.items() if str(client) in before.cohort.split()}
            if not 0 < len(again) < len(jobs) or ids(again) != before.cohort:
                raise MisconfigurationException(f"round {summed.exchange.round + 1}: {before}")
            words = f"the round was begun with clients {before.cohort} before, and goes on with them"
            left_out |= {client: Refused(words) for client in jobs if client not in again}
            seconds = summed.exchange.seconds
            summed = self._summed(again, summing)
            summed.exchange.seconds += seconds
        exchange, trained = summed.exchange, summed.trained
        if summed.encoding is not None:
            encoding, hidden, clients = summed.encoding, summed.hidden, len(exchange.clients)
            received = jobs[min(exchange.clients)].payload
            means, clipped = exchange.end(encoding, hidden, received, summed.row)
            up, down = encoding.bytes_up(clients, len(hidden)), encoding.bytes_down(clients, len(hidden))
            self.sums = {"bytes/up": up, "bytes/down": down}
            if means:
                self.sums["secure_sum/clipped"] = clipped
            yield from (trained[client]._replace(update=mean) for client, mean in means.items())
        self.sums["time/secure_sum"] = exchange.seconds
        yield from (outcome for outcome in trained.values() if not outcome.finite)
        # a client with a vector counts in the sum, even if its site refused a later step
        left_out |= {client: reason for client, reason in exchange.refused.items() if client not in summed.hidden}
        yield from (self._refused(client, reason) for client, reason in left_out.items())

    def _summed(self, asked: Mapping[int, Job], summing: Summing) -> "Masked":
        """Have clients exchange keys, train, and send masked vectors.

        Clients exchange keys before training: the sum then survives a client that drops out during training, the
        longest phase.
        """
        exchange = Exchange(self.link, summing, next(iter(asked.values())).round, self._answer)
        summed = Masked(exchange, {}, {}, {}, None)
        begun = exchange.begin(sorted(asked))
        jobs = {client: asked[client] for client in exchange.clients} if begun else {}
        if not jobs:
            return summed
        # a sum has updates of one shape, so that any client's job shows the look of all
        encoding = exchange.encoding(self.look(jobs[min(jobs)]), asked)
        shown = {"sum": ids(jobs), "most": encoding.most or 0, "agreement": encoding.agreement}
        shown["signatures"] = " ".join(f"{client}:{text}" for client, text in exchange.signatures.items() if text)
        like = {"vector": torch.zeros(encoding.length, dtype=encoding.dtype)}
        for client, content in self._ask(MessageType.TRAIN, jobs, shown):
            try:
                answer = self._answer(content, client)
                outcome = self._trained(jobs[client], answer)
                # a client whose training diverged sends no vector, and is removed from the sum like a dropped one
                if outcome.finite:
                    name, limit = f"{client}/masked", num_bytes(like)
                    vector = unpack(content, name, like, limit=limit, folder=self.folder)["vector"]
                    summed.hidden[client] = vector
                summed.trained[client] = outcome
                self._count_seconds(outcome)
            except Refused as reason:
                self.link.useless.add(client)
                exchange.refused[client] = reason
        return summed._replace(encoding=encoding, row=self._alike(jobs[min(jobs)], shown))

    def stored(self, record: Any) -> Any:
        """Return a record in a file if it is large, so that the server holds few models in memory at once."""
        # the memory taken: `num_bytes` counts compressed weights as they were sent
        if self.folder is None or sum(tensor.nbytes for tensor in tensors(record)) < LARGE:
            return record
        # a server without room on the disk may have it in memory
        with suppress(OSError):
            # a run's first round may come before its first file
            self.folder.mkdir(parents=True, exist_ok=True)
            return on_disk(record, self.folder)
        return record

    def _refused(self, client: int, reason: Refused) -> Outcome:
        """Return the outcome of a refused client, without an update, and note the reason.

        Args:
            client: the client's id.
            reason: the reason for the record.
        """
        self.refusals[client] = str(reason).removesuffix(".") or "it gave no reason"
        self.link.greet_again(client)
        return Outcome(client, {}, ClientState(), {}, True, {}, 0.0, self.refusals[client])

    def _count_seconds(self, outcome: Outcome) -> None:
        # a site that told impossible seconds has NaN here, which would hide all other times in the sum
        if not math.isnan(outcome.seconds):
            self._seconds[self.link.node(outcome.client)] += outcome.seconds

    def _look_for_far(self, norms: Mapping[int, float]) -> None:
        """Warn, once per node, of a client whose update has a norm above `FAR` times the median.

        Args:
            norms: Euclidean norm of update minus payload, by client, of one architecture.
        """
        # with one or two norms the median says nothing about which one is far
        middle = median(norms.values()) if len(norms) > 2 else 0.0
        for client, norm in sorted(norms.items()):
            node = self.link.node(client)
            # written with `not`, as a NaN compares false and should warn
            if middle > 0 and not norm <= FAR * middle and node not in self._warned_far:
                self._warned_far.add(node)
                rank_zero_warn(
                    f"client {self.link.label(client)} at node {node} changes the model by the norm {norm:.3g}, where "
                    f"the round's median is {middle:.3g}, and counts; max-norm={FAR / 2 * middle:.1g}, say, leaves "
                    "such ones out."
                )

    def times_asked(self, client: int) -> int:
        """Return the number of messages about a client in the last phase, above 1 after a site's reconnection."""
        return self.link.times_asked[client]

    def evaluate_all(self, jobs: Iterable[Job]) -> Iterator[Evaluated]:
        """Yield clients' metrics in the order of sites' answers; warn of a client with a wrong answer, and skip it."""
        # an evaluation behind a late training would wait for it
        left_out = self.absent | self.link.busy
        asked = {job.client: job for job in jobs if job.client not in left_out}
        if self.coming is not None:
            yield from self._train_ahead(asked, left_out)
        self._evaluated += sum(num_bytes(sent_to(job)) for job in asked.values())
        for client, content in self._ask(MessageType.EVALUATE, asked):
            try:
                yield Evaluated.of(client, self._metrics(asked[client], self._answer(content, client)))
            except Refused as reason:
                self.link.useless.add(client)
                rank_zero_warn(f"client {self.link.label(client)} isn't evaluated: {reason}")

    def _train_ahead(self, asked: dict[int, Job], left_out: Collection[int]) -> Iterator[Evaluated]:
        """Send the coming round's jobs, and yield the metrics that clients have measured before training.

        Args:
            asked: the jobs of the evaluation by client; those of the coming round's clients are taken out.
            left_out: ids of the clients out of reach.
        """
        # the choice of the cohort may evaluate clients too
        coming, self.coming = cast(Callable[[Collection[int]], Mapping[int, Job]], self.coming), None
        jobs = coming(left_out)
        measured = {client: asked.pop(client) for client in jobs if client in asked}
        splits = {client: job.evaluate for client, job in measured.items()}
        self._ahead, self.trains_ahead = {}, True
        for client, content in self._ask(MessageType.TRAIN, jobs, measure=splits):
            # made in a validation, updates would be tensors that no server can change
            with torch.inference_mode(False):
                self._ahead[client] = jobs[client], self._tried(jobs[client], content)
            if client in measured:
                try:
                    yield Evaluated.of(client, self._metrics(measured[client], self._answer(content, client), "before"))
                except Refused as reason:
                    rank_zero_warn(f"client {self.link.label(client)} isn't evaluated: {reason}")
            del content
        self._ahead_took = dict(self.link.took)

    def evaluate(self, job: Job) -> dict[str, dict[str, float]]:
        """Return one client's metrics by split, evaluated at the client's site; empty without an answer."""
        results = list(self.evaluate_all([job]))
        return results[0].metrics(job.client) if results else {}

    def become(self, job: Job, training: bool = False) -> ClientData:
        """Refuse to become a client: samples and personal parameters are at the client's site.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            f"client {job.client} is at its site, with its samples and what stays with it; leave out what looks at "
            "clients' own models here, such as trainer.callbacks=FeaturePictures."
        )

    def adapt(self, phases: list[Phase], job: Job, data: ClientData) -> None:
        """Refuse to adapt a client here, as in `become`."""
        self.become(job)

    def look(self, job: Job) -> Message:
        """Return the template of a job's update: names, types and shapes of all entries.

        Raises:
            MisconfigurationException: if the client module can't upload without training.
        """
        return self._sketches.update(self.architecture_of(job.client), job)

    def _compressed_look(self, job: Job, like: Message) -> Message:
        """Return the template of a job's update after compression."""
        return cast(Compression, self.compression).look(like, self.modules[self.architecture_of(job.client)])

    def _restored(self, job: Job, travelled: Message, like: StateDict) -> Restored:
        """Return the weights restored from a site's compressed weights.

        Raises:
            Refused: if the compressed weights are malformed, or the restored weights have a NaN or an infinity.
        """
        try:
            weights = cast(Compression, self.compression).restored(travelled, job.payload["weights"], like)
        except ValueError as error:
            raise Refused(f"update.weights can't be restored: {error}.") from error
        # what was finite as it travelled can overflow in the sum with the payload
        check_finite(weights, "update.weights")
        return weights

    def _ask(
        self,
        kind: str,
        asked: Mapping[int, Job],
        sums: Mapping[str, Any] | None = None,
        measure: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> Iterator[tuple[int, RecordDict]]:
        if not asked:
            return
        # once per phase, as this reads the tokens of all checkpoints
        live = self.live()
        # names travel as one text with spaces, so that sites check each field by a fixed type
        jobs = {
            client: {
                **self._alike(job, sums or {"sum": "", "most": 0, "agreement": "", "signatures": ""}),
                "architecture": self.architecture_of(client),
                "seed": job.seed,
                "evaluate": " ".join(job.evaluate),
                "measure": " ".join(measure.get(client, ())),
                "kept": job.state.kept or "",
                "live": " ".join(sorted(live.get(client, set()))),
                # a site learns the id of its new client by this
                "name": self.link.names[client] if client >= self.link.founders else "",
                "settings": self.link.greeted_with(client),
            }
            for client, job in asked.items()
        }
        round = next(iter(asked.values())).round + 1
        payloads = {client: sent_to(job) for client, job in asked.items()}
        # what comes back has about the size of what is sent
        self.link.one_by_one = max(map(num_bytes, payloads.values())) >= LARGE
        yield from self.link.ask(kind, str(round), jobs, payloads)

    def _alike(self, job: Job, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a client is told about its work and all others too: the entries `masks.ALIKE`.

        Args:
            job: of any client of the round.
            sums: the round's clients, weights and settings of a secure sum.
        """
        return {
            "run": self.run_name,
            "round": job.round,
            "lr_factor": job.lr_factor,
            "requested": " ".join(sorted(self.module.requested)),
            "withheld": " ".join(sorted(self.module.withheld)),
            "once": " ".join(sorted(job.once & job.payload.keys())),
            **sums,
        }

    def _answer(self, content: RecordDict, client: int) -> dict[str, Any]:
        """Return a site's answer about a client as a dict, with its entries still unchecked.

        Raises:
            Refused: if the site gives a reason in place of an answer.
        """
        check_failure(content)
        answer: dict[str, Any] = unpack(content, f"{client}/answer", limit=ANSWER_BYTES)
        check_type(answer, dict, "answer")
        if "again" in answer:
            check(answer, {"error": "", "again": ""}, where="answer")
            raise Again(plain(answer["error"]), answer["again"])
        if "error" in answer:
            check(answer, {"error": ""}, where="answer")
            raise Refused(plain(answer["error"]))
        return answer

    def _metrics(self, job: Job, answer: dict[str, Any], name: str = "after") -> dict[str, dict[str, float]]:
        """Return metrics by split in the order of the record, with NaN in place of impossible numbers."""
        # a split without samples has no metrics, and a site may not invent some
        held = [split for split in job.evaluate if self.link.sizes[job.client][split]]
        metrics, wrong = self._measured.evaluated(answer.get(name), held, name)
        self._tell(job.client, wrong)
        return metrics

    def _tell(self, client: int, wrong: list[str]) -> None:
        """Warn, once per node, of metrics left out of the record."""
        node = self.link.node(client)
        if wrong and node not in self._warned:
            self._warned.add(node)
            more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            rank_zero_warn(
                f"client {self.link.label(client)} at node {node} tells metrics that the record leaves out: "
                f"{'; '.join(wrong[:NAMED])}{more}. What else the node tells of that kind is left out without a word."
            )

    def _trained(self, job: Job, answer: dict[str, Any]) -> Outcome:
        """Return a client's outcome with an empty update.

        Raises:
            Refused: if the answer isn't like `TRAINED`, or is about another round.
        """
        client = job.client
        after = self._metrics(job, answer)
        own = {name: value for name, value in answer.items() if name not in ("after", "before")}
        check(own, TRAINED, where="answer")
        if answer["round"] != job.round:
            raise Refused(f"it is the answer of round {shown(answer['round'] + 1)}.")
        # the token goes into checkpoints, and back to the site, where it becomes part of a path
        if answer["kept"] and not TOKEN.fullmatch(answer["kept"]):
            raise Refused(f"answer.kept is {shown(answer['kept'])} and should be 16 hexadecimal digits.")
        metrics, wrong = self._measured.trained(answer["metrics"])
        # an answer later than the time-out is never read, so that more seconds than that can't be true
        most = {"seconds": self.link.timeout, "steps": COUNTED, "samples": COUNTED}
        numbers = {name: bounded(name, answer[name], (0.0, most[name]), wrong) for name in NUMBERS}
        self._tell(client, wrong)
        # the token is empty if a client has nothing to keep, such as a stateless one under FedAvg
        state = ClientState(kept=answer["kept"] or None)
        seconds = math.nan if numbers["seconds"] is None else numbers["seconds"]
        # whole numbers, so that the record is the simulation's to the character
        steps, samples = (math.nan if value is None else int(value) for value in (numbers["steps"], numbers["samples"]))
        return Outcome(client, {}, state, metrics, answer["finite"], after, seconds, steps=steps, samples=samples)

    def _outcome(self, job: Job, content: RecordDict) -> Outcome:
        client = job.client
        outcome = self._trained(job, self._answer(content, client))
        update = {}
        if outcome.finite:
            samples = self.link.sizes[client]["train"]
            like = self.look(job)
            compressed = self.compression is not None and "weights" in job.payload
            travelling = self._compressed_look(job, like) if compressed else like
            # entries by class or client can be more than in the template, and an exact limit would refuse sound updates
            limit = 2 * num_bytes(travelling)
            # tensors of a free size, such as factors of a rank that depends on data, stand for shared entries
            if not all(tensor.numel() for tensor in tensors(travelling)):
                limit += 2 * num_bytes(self.modules[self.architecture_of(client)].shared_state())
            keys = self._sketches.keys(self.link.clients)
            update = unpack(content, f"{client}/update", travelling, keys, limit, self.folder)
            if compressed:
                update["weights"] = self.stored(self._restored(job, update["weights"], like["weights"]))
            # with noise, class counts no longer add up to the number of samples
            private = cast(DPSGD | None, self.work.example_privacy)
            check_counts(update, samples, private is not None and private.counts_epsilon is not None)
            if self.max_norm is not None:
                check_norm(update, job.payload, self.max_norm)
        return outcome._replace(update=update)


def sent_to(job: Job) -> Message:
    """Return the part of a job's payload that travels: all entries, unless the site keeps a state with the rest."""
    return job.travelling if job.state.kept else job.payload
