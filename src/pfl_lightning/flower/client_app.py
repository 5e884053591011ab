"""The site's side: its clients run through the engine that would run them anywhere, and what stays stays there."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import personal_entries, whole_model
from pfl_lightning.contract.task import check_task
from pfl_lightning.data import Split
from pfl_lightning.engines import ClientState, Engine, Job, Outcome
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.flower.export import keep_model
from pfl_lightning.flower.link import VERSION, failure, initial_of
from pfl_lightning.flower.masks import Party
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.flower.sums import data, tensor
from pfl_lightning.flower.template import Refused
from pfl_lightning.flower.wire import pack, unpack
from pfl_lightning.messages import Message, Restored
from pfl_lightning.privacy import DPAverage, SecureSum
from pfl_lightning.privacy.secure_sum import (
    KEYS_BYTES,
    SEALED_BYTES,
    Encoding,
    NoiseShare,
    Unsummable,
    drawn_share,
)
from pfl_lightning.trainer import FederatedTrainer

JOB = {
    "round": 0,
    "architecture": 0,
    "seed": 0,
    "lr_factor": 1.0,
    "evaluate": "",
    "requested": "",
    "withheld": "",
    "kept": "",
    "live": "",
    "once": "",
    "sum": "",
    "most": 0,
    "agreement": "",
}
"""What a server tells of a client's work; several names stand with spaces between them."""
STEP = {"round": 0, "sent": ""}
"""What a server tells of a step of a sum: the round, and at the end who has sent a vector."""
IDS = 1 << 31
"""A client's id is less; how many there are the server knows."""

Told: TypeAlias = dict[int, dict[str, Any]]
Records: TypeAlias = dict[str, Any]


class Worker:
    """Runs a site's clients as a server asks, by the engine that would run them anywhere.

    Args:
        trainer: has the precision, the device, and how rounds are made.
        client: the client module, as made.
        site: the clients that are here.
        states: what stays with them.
        aggregator: the server side as the site's configuration has it, from which it takes the noise that it adds to
            sums; None is the client module's own.
        memory: of the node, where secrets of sums are, which Flower keeps from one message to the next.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        client: ClientModule,
        site: Site,
        states: StateVersions,
        aggregator: Aggregator | None = None,
        memory: RecordDict | None = None,
    ) -> None:
        # whatever the server's configuration says: here is where noise is drawn
        private = trainer.rounds.example_privacy and trainer.rounds.example_privacy.deployed()
        trainer.rounds = replace(trainer.rounds, example_privacy=private)
        self.trainer, self.site, self.states = trainer, site, states
        self.aggregator = aggregator or client.configure_aggregator()
        self.memory = RecordDict() if memory is None else memory
        self.modules = client.architectures()
        for module in self.modules:
            module.settle_common()
        self.initial = initial_of(self.modules)
        self._personal = [personal_entries(module, whole_model(module)) for module in self.modules]

    @cached_property
    def engines(self) -> list[Engine]:
        """What runs the clients of each architecture."""
        for module in self.modules:
            self.trainer.precision_plugin.convert_module(module.to(self.trainer.strategy.root_device))
            module.num_rounds = self.trainer.max_epochs or 1
            check_task(module, self.site.data)
        return self.trainer.rounds.engines(self.modules, self.site.data, self.trainer)

    def hello(self) -> Records:
        """Who is here, and how many samples each has; nothing else about them is told."""
        return {"hello": {"version": VERSION, "initial": self.initial, "clients": self.site.sizes()}}

    @property
    def summing(self) -> SecureSum | None:
        """How updates are summed, by the site's own configuration, whatever the server says."""
        return self.trainer.rounds.secure_sum

    def _party(self, client: int) -> Party:
        if self.summing is None:
            raise Refused(f"client {client}: its configuration has no trainer.secure_sum, which the server asks for.")
        self.site.client(client)
        return Party(client, self.memory, self.summing)

    def offer(self, content: RecordDict) -> Records:
        """Keys of the clients whom a message is about, for a round's sum."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                keys, seed = self._party(client).offer(row["round"])
                records |= {f"{client}/answer": {}, f"{client}/offer": {"keys": tensor(keys), "seed": tensor(seed)}}
        return records

    def share(self, content: RecordDict) -> Records:
        """Shares of the clients' secrets, sealed for each other client."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                keys = self._bytes(content, client, "keys", KEYS_BYTES)
                sealed = self._party(client).share(row["round"], keys)
                records[f"{client}/sealed"] = {other: tensor(box) for other, box in sealed.items()}
                records[f"{client}/answer"] = {}
        return records

    def reveal(self, content: RecordDict) -> Records:
        """Shares of what hides the sum, and of nothing that hides one vector in it."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                sealed = self._bytes(content, client, "sealed", SEALED_BYTES)
                shares = self._party(client).reveal(row["round"], sealed, list(map(int, row["sent"].split())))
                records[f"{client}/shares"] = {other: tensor(share) for other, share in shares.items()}
                records[f"{client}/answer"] = {}
        return records

    def _steps(self, content: RecordDict, records: Records) -> Iterator[tuple[int, dict[str, Any]]]:
        """The clients whom a message of a sum is about, and what is told of each."""
        told: Told = unpack(content, "jobs", {0: STEP}, IDS)
        yield from told.items()

    def _bytes(self, content: RecordDict, client: int, name: str, size: int) -> dict[int, bytes]:
        """What other clients have sent to one, by their ids."""
        like = {name: {0: torch.zeros(size, dtype=torch.uint8)}}
        parts = unpack(content, f"{client}/payload", like, IDS)[name]
        return {other: data(part) for other, part in parts.items()}

    def train(self, content: RecordDict) -> Records:
        """A round of the clients whom a message is about: answers and updates, by the names of their records."""
        told: Told = unpack(content, "jobs", {0: JOB}, IDS)
        records: Records = {}
        trained: list[Job] = []
        device = self.trainer.strategy.root_device.type
        # as in Lightning's loop, where a federation's rounds are; engines enter autocast for forward passes
        with self.trainer.precision_plugin.train_step_context(), torch.autocast(device, enabled=False):
            for job, outcome in self._results(told, content, records, "training"):
                with failing(records, [job.client]):
                    records |= self._trained(job, outcome, told[job.client])
                    trained.append(job)
        # the last ones, where a server never asks for an evaluation; who can't keep one has trained all the same
        for job in trained:
            with failing(records, [job.client]):
                self._keep_model(job, told)
        return records

    def _trained(self, job: Job, outcome: Outcome, row: Mapping[str, Any]) -> Records:
        """Return the records of a trained client for the server; the rest is on the disk by then."""
        client, name, sent = job.client, "", {}
        live = row["live"].split()
        if (compression := self.trainer.rounds.compression) is not None:
            outcome = compression.applied(outcome, job, self.modules[row["architecture"]])
        state = replace(outcome.state, once=job.state.once)
        if outcome.finite:
            self.site.check_update(outcome.update, type(self.modules[0]).__name__)
            sent = self._sent(job, outcome.update, row)
            if state.personal or state.optimizers or state.scaler or state.once or state.residual:
                name = self.states.keep(client, state, job.state.kept, live)
        answer = {
            "round": job.round,
            "kept": name,
            "finite": outcome.finite,
            "seconds": outcome.seconds,
            "metrics": outcome.metrics,
            "after": outcome.after,
        }
        # the server wouldn't take an update that isn't finite
        return {f"{client}/answer": answer} | sent

    def _sent(self, job: Job, update: Message, row: Mapping[str, Any]) -> Records:
        """Return an update as it travels: as it is, or as a masked vector where the configuration says so."""
        if self.summing is None:
            if type(weights := update.get("weights")) is Restored:
                update = update | {"weights": weights.travelled}
            return {f"{job.client}/update": update}
        private = self.aggregator.find(DPAverage)
        noise = None if private is None else private.noise_share(deployed=True)
        clients = list(map(int, row["sum"].split()))
        if not clients:
            raise Refused(
                f"client {job.client}: the server asks for its update, and its configuration has trainer.secure_sum, "
                "which gives sums alone; give both the same configuration."
            )
        try:
            encoding = Encoding(self.summing, update, len(clients), row["most"] or None, noise)
            if encoding.agreement != row["agreement"]:
                raise Refused(
                    f"client {job.client}: the server sums by other settings of trainer.secure_sum, aggregator or "
                    "model than its site; give both the same configuration."
                )
            vector = encoding.vector(
                update, job.payload, lambda count: drawn_share(cast(NoiseShare, noise), count, job.seed)
            )
        except (Unsummable, MisconfigurationException) as reason:
            raise Refused(f"{str(reason).removesuffix('.')}.") from reason
        return {f"{job.client}/masked": {"vector": self._party(job.client).hide(job.round, vector, clients)}}

    def evaluate(self, content: RecordDict) -> Records:
        """Metrics of the models that the clients whom a message is about receive now; the models are kept."""
        told: Told = unpack(content, "jobs", {0: JOB}, IDS)
        records: Records = {}
        with undisturbed():
            evaluated = self._results(told, content, records, "evaluation")
            for job, (client, metrics) in evaluated:
                with failing(records, [client]):
                    self._keep_model(job, told)
                    records[f"{client}/answer"] = {"after": metrics}
        return records

    def _keep_model(self, job: Job, told: Told) -> None:
        """Writes the model that a client received, for its own use."""
        with undisturbed():
            keep_model(self.states, job, self.modules, told[job.client]["architecture"])

    def _results(
        self, told: Told, content: RecordDict, records: Records, phase: Literal["training", "evaluation"]
    ) -> Iterator[tuple[Job, Any]]:
        """What engines make of a message's jobs; the reasons of those that fail are put among the records."""
        jobs: dict[int, dict[int, Job]] = {}
        for client, row in told.items():
            with failing(records, [client]):
                jobs.setdefault(row["architecture"], {})[client] = self._job(client, row, content)
        for architecture, own in jobs.items():
            with failing(records, own):
                engine = self.engines[architecture]
                engine.module.requested = frozenset(told[min(own)]["requested"].split())
                engine.module.withheld = frozenset(told[min(own)]["withheld"].split())
                self.site.check_method(engine.module)
                for result in engine.complete(phase, list(own.values())):
                    yield own[result.client if isinstance(result, Outcome) else result[0]], result

    def _job(self, client: int, row: Mapping[str, Any], content: RecordDict) -> Job:
        samples = self.site.client(client)
        if row["architecture"] not in range(len(self.modules)):
            raise Refused(f"client {client} can't have the architecture {row['architecture']}.")
        begun = ClientState(self._personal[row["architecture"]])
        # with its name, as the version that follows it has to know it
        state = replace(self.states.load(client, row["kept"]), kept=row["kept"]) if row["kept"] else begun
        payload, once = unpack(content, f"{client}/payload"), row["once"].split()
        if lost := sorted(set(once) - payload.keys() - state.once.keys()):
            raise Refused(f"client {client}: its site has no {' and '.join(lost)}, which the server sends once.")
        payload |= {name: state.once[name] for name in once if name not in payload}
        state = replace(state, once={name: payload[name] for name in once})
        splits = cast(tuple[Split, ...], tuple(row["evaluate"].split()))
        return Job(client, row["round"], state, payload, samples, row["seed"], row["lr_factor"], splits)


@contextmanager
def failing(records: Records, clients: Iterable[int]) -> Iterator[None]:
    """Takes an error for the answer of those clients who have none yet.

    Args:
        records: of answers.
        clients: whom it would be about.
    """
    try:
        yield
    except Exception as error:
        for client in clients:
            records.setdefault(f"{client}/answer", reason(error))


def reason(error: Exception) -> dict[str, str]:
    """An answer in the place of a client's own, with a sentence; the site's log gets all of it."""
    if isinstance(error, Refused):
        return {"error": str(error)}
    traceback.print_exception(error)
    return {"error": f"its site failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def app_of(make: Callable[[Context], Worker]) -> ClientApp:
    """Flower's app of a site.

    Args:
        make: gives what works there, for each message anew, as Flower starts a process for each.
    """
    app = ClientApp()

    def answered(message: FlowerMessage, context: Context, work: Callable[[Worker], Records]) -> FlowerMessage:
        start = time.perf_counter()
        try:
            content = pack(work(make(context)))
        # a wrong setting ends the command line by an exit
        except (Exception, SystemExit) as error:
            traceback.print_exception(error)
            content = failure(reason(error)["error"] if isinstance(error, Exception) else "its settings are refused")
        if time.perf_counter() - start > message.metadata.ttl:
            rank_zero_warn("the server has not waited for this answer; give it a longer timeout.")
        return FlowerMessage(content, reply_to=message)

    @app.query()
    def hello(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, Worker.hello)

    @app.query("offer")
    def offer(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, lambda worker: worker.offer(message.content))

    @app.query("share")
    def share(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, lambda worker: worker.share(message.content))

    @app.query("reveal")
    def reveal(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, lambda worker: worker.reveal(message.content))

    @app.train()
    def train(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, lambda worker: worker.train(message.content))

    @app.evaluate()
    def evaluate(message: FlowerMessage, context: Context) -> FlowerMessage:
        return answered(message, context, lambda worker: worker.evaluate(message.content))

    return app
