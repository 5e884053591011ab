"""Flower's app of a site: train and evaluate the site's clients, and keep personal state on the site's disk."""

import json
import sys
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

from pfl_lightning.cli.errors import mistake
from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import common_parameters, personal_entries, shared_entries, whole_model
from pfl_lightning.client.module import base_digest, loadable
from pfl_lightning.contract.pairing import check_task
from pfl_lightning.data import Split
from pfl_lightning.engines import ClientState, Engine, Job, Outcome
from pfl_lightning.federation.evaluation import undisturbed
from pfl_lightning.flower.export import CONFIG, keep_model
from pfl_lightning.flower.first_exchange import ASKED, checked, keep, kept, pieces, take_over, values_of, whole
from pfl_lightning.flower.greeting import fingerprint, settings_told
from pfl_lightning.flower.journal import Again, Journal
from pfl_lightning.flower.link import VERSION, failure, initial_of
from pfl_lightning.flower.masks import Party
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.states import StateVersions, written
from pfl_lightning.flower.sums import data, tensor
from pfl_lightning.flower.template import Refused, Spec, check_received
from pfl_lightning.flower.wire import message_digest, pack, unpack, unpack_as_sent
from pfl_lightning.messages import Message, Restored
from pfl_lightning.privacy import SecureSum
from pfl_lightning.privacy.dp_sgd import learns_without_noise, without_noise
from pfl_lightning.privacy.noise import secure_seed
from pfl_lightning.privacy.secure_sum import (
    KEYS_BYTES,
    SEALED_BYTES,
    Encoding,
    NoiseShare,
    Unsummable,
    drawn_share,
)
from pfl_lightning.server import Aggregator
from pfl_lightning.trainer import FederatedTrainer

JOB = {
    "run": "",
    "round": 0,
    "architecture": 0,
    "seed": 0,
    "lr_factor": 1.0,
    "evaluate": "",
    "measure": "",
    "requested": "",
    "withheld": "",
    "kept": "",
    "live": "",
    "once": "",
    "name": "",
    "settings": "",
    "sum": "",
    "most": 0,
    "agreement": "",
    "signatures": "",
}
"""Template of a server's message about one client's job; lists of names are one text with spaces."""
STEP = {"round": 0, "sent": ""}
"""Template of a server's message about a step of a sum: the round, and at the end the ids with a vector."""
IDS = 1 << 31
"""Upper bound of client ids; the exact number of clients is known to the server alone."""

Jobs: TypeAlias = dict[int, dict[str, Any]]
Records: TypeAlias = dict[str, Any]


class Worker:
    """Answers a server's messages about a site's clients, with the engines of a run on one machine.

    Args:
        trainer: the trainer of the site's configuration, with precision, device and options of rounds.
        client: the client module, with initial weights.
        site: the site's clients and samples.
        states: the clients' states on the site's disk.
        aggregator: the server side of the site's configuration, which decides the noise added to sums; None takes the
            client module's own.
        memory: the node's record of secrets of sums, kept by Flower from one message to the next; None begins with an
            empty one.
        config: the site's whole configuration, which is kept beside the states for predictions at the site.
        run: Flower's id of the run.
        keys: the keys by which sites of secure sums know each other; None believes the server's word for all keys.
        new_seed: returns the seed of a client's training under secure sums, where the server must not know it.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        client: ClientModule,
        site: Site,
        states: StateVersions,
        aggregator: Aggregator | None = None,
        memory: RecordDict | None = None,
        config: str = "",
        run: int = 0,
        keys: SiteKeys | None = None,
        new_seed: Callable[[Job], int] = lambda job: secure_seed(),
    ) -> None:
        # noise is drawn here, so that the site's own configuration decides, whatever the server says
        private = trainer.rounds.example_privacy and trainer.rounds.example_privacy.deployed()
        local = trainer.rounds.local_privacy and trainer.rounds.local_privacy.deployed()
        trainer.rounds = replace(trainer.rounds, example_privacy=private, local_privacy=local)
        self.trainer, self.site, self.states = trainer, site, states
        self.aggregator = aggregator or client.configure_aggregator()
        self.memory = RecordDict() if memory is None else memory
        self.config, self.run, self.keys, self.new_seed = config, run, keys, new_seed
        self.modules = client.architectures()
        for module in self.modules:
            module.settle_common()
            module.sends_counts = True
        # before any training, as the server compares this with its own models
        self.initial = initial_of(self.modules)
        self._personal = [personal_entries(module, whole_model(module)) for module in self.modules]
        self._shared = [
            {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in shared_entries(module, own).items()}
            for module in self.modules
            for own in [module.state_dict()]
        ]
        self._last = ("", RecordDict())

    def again(self, kind: str, content: RecordDict) -> RecordDict:
        """Return the content of the answer to a message, the same one where the last message comes again.

        An answer can be lost on its way. Training once more would count a client twice, add other noise to its update,
        and leave another state than the one that the server knows of.

        Args:
            kind: Flower's type of the message.
            content: the message's content.
        """
        key = f"{kind} {message_digest(content)}"
        # a greeting reads what is on the disk now
        if kind not in GREETINGS and self._last[0] == key:
            return self._last[1]
        answered = pack(WORKS[kind](self, content))
        self._last = key, answered
        return answered

    @cached_property
    def engines(self) -> list[Engine]:
        """Return one engine per architecture."""
        # made at first use: a greeting or a step of a sum needs no model on the device
        for module in self.modules:
            self.trainer.precision_plugin.convert_module(module.to(self.trainer.strategy.root_device))
            module.num_rounds = self.trainer.max_epochs or 1
            check_task(module, self.site.data)
        return self.trainer.rounds.engines(self.modules, self.site.data, self.trainer)

    def first(self, content: RecordDict) -> Records:
        """Return what the site tells of its rows before the first round.

        Raises:
            Refused: if the site's operator hasn't allowed it, or its configuration has a guarantee.
        """
        asked = unpack(content, "first", ASKED, limit=0)
        kinds = asked["kinds"].split()
        self.site.check_exchange(kinds)
        if reason := guards(self.trainer, self.aggregator):
            raise Refused(f"first-exchange={asked['kinds']!r} tells of its rows, which {reason} doesn't cover.")
        had = kept(self.states.folder) if asked["resumed"] else ""
        values = had or json.dumps(values_of(self.site.data, kinds, whole(asked["words"])))
        clients = len(self.site.clients) + len(self.site.joining())
        return {"first": {"values": pieces(values), "clients": clients, "agreed": bool(had)}}

    def hello(self, content: RecordDict) -> Records:
        """Return the site's greeting: version, initial model, settings, the folder's secret, and numbers of samples.

        Raises:
            Refused: if the site's inputs depend on rows of other sites.
        """
        question = unpack(content, "hello", {"version": "", "num_clients": 0, "agreed": {str: str}}, limit=0)
        if agreed := whole(question["agreed"]):
            if not self.site.agrees:
                raise Refused("the server has values of an exchange before the first round, and its app has none.")
            checked(agreed)
            take_over(self.site.data, agreed)
            keep(self.states.folder, agreed)
        self.site.check_inputs()
        if self.config:
            with written(self.states.folder / CONFIG) as partial:
                partial.write_text(self.config, encoding="utf-8")
        greeting = {"version": VERSION, "initial": self.initial, "settings": self.settings}
        clients = {"clients": self.site.sizes(), "new": self.site.joining()}
        return {"hello": {**greeting, "secret": self.states.secret(), **clients}}

    @property
    def settings(self) -> dict[str, str]:
        """Return the site's settings that decide a guarantee or a result, and fingerprints of those that make inputs.

        A server has the first part of its own, and compares the second from site to site.
        """
        return self._settings | self.site.inputs

    @cached_property
    def _settings(self) -> dict[str, str]:
        return settings_told(self.trainer, self.modules, self.aggregator, self.site.data)

    @property
    def summing(self) -> SecureSum | None:
        """Return the settings of secure sums from the site's own configuration, never from the server."""
        return cast(SecureSum | None, self.trainer.rounds.secure_sum)

    def _party(self, client: int) -> Party:
        if self.summing is None:
            raise Refused(f"client {client}: its configuration has no trainer.secure_sum, which the server asks for.")
        # refuses a client of another site
        self.site.client(client)
        return Party(client, self.memory, self.summing, Journal(self.states.of(client)), self.keys)

    def offer(self, content: RecordDict) -> Records:
        """Return public keys and a commitment for each client in a message, the first step of a round's sum."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                keys, seed = self._party(client).offer(row["round"])
                records |= {f"{client}/answer": {}, f"{client}/offer": {"keys": tensor(keys), "seed": tensor(seed)}}
        return records

    def share(self, content: RecordDict) -> Records:
        """Return shares of each client's secrets, sealed for the other clients, the second step of a sum."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                keys = self._bytes(content, client, "keys", KEYS_BYTES)
                sealed = self._party(client).share(row["round"], keys)
                records[f"{client}/sealed"] = {other: tensor(box) for other, box in sealed.items()}
                records[f"{client}/answer"] = {"signature": self._party(client).signature(row["round"])}
        return records

    def reveal(self, content: RecordDict) -> Records:
        """Return the shares that take the masks off the sum, never off a single client's vector."""
        records: Records = {}
        for client, row in self._steps(content, records):
            with failing(records, [client]):
                sealed = self._bytes(content, client, "sealed", SEALED_BYTES)
                shares = self._party(client).reveal(row["round"], sealed, list(map(int, row["sent"].split())))
                records[f"{client}/shares"] = {other: tensor(share) for other, share in shares.items()}
                records[f"{client}/answer"] = {}
        return records

    def _steps(self, content: RecordDict, records: Records) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the clients in a message of a sum, each with the server's settings for the step."""
        jobs: Jobs = unpack(content, "jobs", {0: STEP}, IDS)
        yield from jobs.items()

    def _bytes(self, content: RecordDict, client: int, name: str, size: int) -> dict[int, bytes]:
        """Return the other clients' parts of a client's payload, by id, each of a fixed size in bytes."""
        # the template refuses any other size before the protocol's code sees a byte
        like = {name: {0: torch.zeros(size, dtype=torch.uint8)}}
        parts = unpack(content, f"{client}/payload", like, IDS)[name]
        return {other: data(part) for other, part in parts.items()}

    def train(self, content: RecordDict) -> Records:
        """Train the clients in a message for one round, and return answers and updates by the records' names."""
        jobs: Jobs = unpack(content, "jobs", {0: JOB}, IDS)
        records: Records = {}
        trained: list[Job] = []
        before = self._measured(jobs, content)
        device = self.trainer.strategy.root_device.type
        # rounds elsewhere run inside Lightning's loop, which enters this context; engines enter autocast themselves
        with self.trainer.precision_plugin.train_step_context(), torch.autocast(device, enabled=False):
            for job, outcome in self._results(jobs, content, records, "training"):
                with failing(records, [job.client]):
                    records |= self._trained(job, outcome, jobs[job.client])
                    records[f"{job.client}/answer"] |= before.get(job.client, {})
                    trained.append(job)
        # a server may never ask for an evaluation, which would keep the models; a failure here changes no answer
        for job in trained:
            with failing(records, [job.client]):
                self._keep_model(job, jobs)
        return records

    def _measured(self, jobs: Jobs, content: RecordDict) -> dict[int, dict[str, Any]]:
        """Return the metrics of the received models that a training message asks for, by client.

        A client that fails has none here; its training then tells the reason.
        """
        asked = {client: row | {"evaluate": row["measure"]} for client, row in jobs.items() if row["measure"]}
        # as if asked by a separate message, so that the metrics are the same
        with undisturbed():
            return {
                job.client: {"before": evaluated.metrics(job.client)}
                for job, evaluated in self._results(asked, content, {}, "evaluation")
            }

    def _trained(self, job: Job, outcome: Outcome, row: Mapping[str, Any]) -> Records:
        """Return a trained client's records for the server, after the client's state is on the site's disk."""
        client, name, sent = job.client, "", {}
        live = row["live"].split()
        for stage in self.trainer.rounds.stages.values():
            outcome = stage.on_upload(outcome, job, self.modules[row["architecture"]])
        # engines know nothing of entries that travel once, such as public samples
        state = replace(outcome.state, once=job.state.once)
        if outcome.finite:
            self.site.check_update(outcome.update, type(self.modules[0]).__name__)
            self._check_noised(job, outcome.update, row)
            sent = self._sent(job, outcome.update, row)
            # nothing to keep means no file and no token, and the server then sends all entries again
            if state.personal or state.optimizers or state.scaler or state.once or state.residual:
                name = self.states.keep(client, state, job.state.kept, live)
        answer = {
            "round": job.round,
            "kept": name,
            "finite": outcome.finite,
            "seconds": outcome.seconds,
            # floats, as an integer of a message has no bound
            "steps": float(outcome.steps),
            "samples": float(outcome.samples),
            # means over training samples have no noise
            "metrics": {} if self.trainer.rounds.example_privacy is not None else outcome.metrics,
            "after": outcome.after,
        }
        # no update of a diverged client travels, since the server would refuse the NaN anyway
        return {f"{client}/answer": answer} | sent

    def _check_noised(self, job: Job, update: Message, row: Mapping[str, Any]) -> None:
        """Refuse entries that ``trainer.example_privacy`` doesn't cover, whatever server and operator agree on."""
        if (private := self.trainer.rounds.example_privacy) is None:
            return
        counted = private.counts_epsilon is not None
        if further := without_noise(update, self.modules[row["architecture"]], counted):
            raise Refused(
                f"client {job.client}: the server asks for {' and '.join(further)}, which trainer.example_privacy of "
                "its site doesn't cover; take a server that needs weights alone."
            )

    def _sent(self, job: Job, update: Message, row: Mapping[str, Any]) -> Records:
        """Return an update's records for the server: plain or compressed, or a masked vector under secure sums."""
        if self.summing is None:
            if type(weights := update.get("weights")) is Restored:
                update = update | {"weights": weights.travelled}
            return {f"{job.client}/update": update}
        # under differential privacy each client adds a share of the noise, as the server sees the sum alone
        noise = self.aggregator.noise_share(deployed=True)
        clients = list(map(int, row["sum"].split()))
        # a server without secure sums must not get the plain update of a site that hides updates
        if not clients:
            raise Refused(
                f"client {job.client}: the server asks for its update, and its configuration has trainer.secure_sum, "
                "which gives sums alone; give both the same configuration."
            )
        try:
            encoding = Encoding(self.summing, update, len(clients), row["most"] or None, noise)
            # vectors of other scales or lengths would add up to nonsense that nobody could see
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

    def _begun(self, job: Job, row: Mapping[str, Any]) -> Job:
        """Return a training job of a sum, with a seed of the site's own.

        A training that repeats bit for bit would repeat the update: a sum over the same clients but one would then
        differ from an earlier one by just that client's update.

        Raises:
            Refused: if the site's configuration has no secure sum, or the client has helped with another sum of the
                model or the round.
        """
        self._party(job.client).begin(job.round, row, job.payload)
        return job._replace(seed=self.new_seed(job))

    def evaluate(self, content: RecordDict) -> Records:
        """Evaluate the received models of the clients in a message, keep the models, and return metrics by client."""
        jobs: Jobs = unpack(content, "jobs", {0: JOB}, IDS)
        records: Records = {}
        # random states stay as they are, so that evaluations never change a training
        with undisturbed():
            for job, evaluated in self._results(jobs, content, records, "evaluation"):
                with failing(records, [job.client]):
                    self._keep_model(job, jobs)
                    records[f"{job.client}/answer"] = {"after": evaluated.metrics(job.client)}
        return records

    def _keep_model(self, job: Job, jobs: Jobs) -> None:
        """Write a client's received model to the site's disk, for use at the site."""
        run = {"id": self.run, "settings": {"trainer.evaluate": self.trainer.rounds.evaluate}}
        architecture = jobs[job.client]["architecture"]
        with undisturbed():
            keep_model(self.states, job, self.modules, architecture, self.site, run, self._bases[architecture])

    @cached_property
    def _bases(self) -> list[str | None]:
        """Fingerprints of frozen weights left out of saved models, by architecture; None where saved.

        As in the checkpoints of a simulation, they are left out by ``trainer.checkpoint_common=false``, and always
        where they are quantised.
        """
        left_out = [
            not self.trainer.rounds.checkpoint_common or bool(module.common_names - loadable(module).keys())
            for module in self.modules
        ]
        digests = [
            base_digest(module, common_parameters(module).keys()) if out else None
            for module, out in zip(self.modules, left_out, strict=True)
        ]
        return digests

    def _results(
        self, jobs: Jobs, content: RecordDict, records: Records, phase: Literal["training", "evaluation"]
    ) -> Iterator[tuple[Job, Any]]:
        """Yield jobs with the engines' results, and write the reason of each failed job into the records."""
        # one engine serves one architecture
        groups: dict[int, dict[int, Job]] = {}
        # once a message, as sites may have many clients and long lists of words
        settings = fingerprint(self.settings)
        for client, row in jobs.items():
            with failing(records, [client]):
                job = self._job(client, row, content, settings)
                # before training, which a refusal would waste
                if phase == "training" and row["sum"] and self.summing is not None:
                    job = self._begun(job, row)
                groups.setdefault(row["architecture"], {})[client] = job
        for architecture, group in groups.items():
            with failing(records, group):
                engine = self.engines[architecture]
                engine.module.requested = frozenset(jobs[min(group)]["requested"].split())
                engine.module.withheld = frozenset(jobs[min(group)]["withheld"].split())
                # before training, as a refused upload would waste a round's work
                self.site.check_method(engine.module)
                for result in engine.complete(phase, list(group.values())):
                    for client in result.clients:
                        yield group[client], result

    def _job(self, client: int, row: Mapping[str, Any], content: RecordDict, settings: str) -> Job:
        if row["name"]:
            self.site.join(client, row["name"])
        samples = self.site.client(client)
        # its files and flags may have changed, or its SuperNode may have been started again unseen
        if row["settings"] != settings:
            raise Refused(f"client {client}: its site has other settings than in its greeting.")
        if row["architecture"] not in range(len(self.modules)):
            raise Refused(f"client {client} can't have the architecture {row['architecture']}.")
        begun = ClientState(self._personal[row["architecture"]])
        # with the token, as the next version is written beside the version of this token
        state = replace(self.states.load(client, row["kept"]), kept=row["kept"]) if row["kept"] else begun
        payload, once = self._payload(content, client, row["architecture"]), row["once"].split()
        # an entry that travels once comes with the payload or from the kept state
        if lost := sorted(set(once) - payload.keys() - state.once.keys()):
            raise Refused(f"client {client}: its site has no {' and '.join(lost)}, which the server sends once.")
        payload |= {name: state.once[name] for name in once if name not in payload}
        state = replace(state, once={name: payload[name] for name in once})
        splits = self._splits(client, row)
        return Job(client, row["round"], state, payload, samples, row["seed"], row["lr_factor"], splits)

    def _splits(self, client: int, row: Mapping[str, Any]) -> tuple[Split, ...]:
        """Return the splits that a client is evaluated on for the server: those asked for, if metrics may be known."""
        splits = cast(tuple[Split, ...], tuple(row["evaluate"].split()))
        # each metric tells of samples without noise, whatever the server asks for
        if self.trainer.rounds.local_privacy is not None:
            return ()
        if self.trainer.rounds.example_privacy is None:
            return splits
        if "train" in splits:
            raise Refused(
                f"client {client}: the server asks for metrics of training rows, which trainer.example_privacy of its "
                "site doesn't cover."
            )
        return () if learns_without_noise(self.modules[row["architecture"]]) else splits

    def _payload(self, content: RecordDict, client: int, architecture: int) -> Message:
        """Return a client's payload, in no more memory than came, if the site's own method can have one like it."""
        shared, entries = self._shared[architecture], self.modules[architecture].needs | self.aggregator.sends
        source = f"{type(self.modules[architecture]).__name__} with {self.aggregator.name}"
        payload: Message = unpack_as_sent(
            content, f"{client}/payload", lambda outline: check_received(outline, shared, entries, source)
        )
        return payload


def guards(trainer: FederatedTrainer, aggregator: Aggregator) -> str:
    """Return what bounds the knowledge of a server about clients' rows; an empty text if nothing does.

    Args:
        trainer: the settings of rounds.
        aggregator: the server side.
    """
    rounds = trainer.rounds
    if rounds.local_privacy is not None:
        return "trainer.local_privacy"
    if rounds.example_privacy is not None or rounds.secure_sum is not None:
        return "trainer.secure_sum" if rounds.example_privacy is None else "trainer.example_privacy"
    return f"the guarantee of aggregator {aggregator.name}" if aggregator.guarantee else ""


@contextmanager
def failing(records: Records, clients: Iterable[int]) -> Iterator[None]:
    """Catch an error, and write the reason as the answer of each client without an answer.

    Args:
        records: the answers so far, by name.
        clients: ids of the clients affected by the error.
    """
    try:
        yield
    # any error: one client's must not cost the site's other clients their round
    except Exception as error:
        for client in clients:
            records.setdefault(f"{client}/answer", reason(error))


def reason(error: Exception) -> dict[str, str]:
    """Return an answer with an error's reason in one sentence; the site's log gets the whole traceback."""
    if isinstance(error, Again):
        return {"error": str(error), "again": error.cohort}
    if isinstance(error, Refused):
        return {"error": str(error)}
    # what the site's operator can mend has a sentence, inside the parser's words too
    if sentence := mistake(error):
        print(f"pfl-lightning: error: {sentence}", file=sys.stderr, flush=True)
        return {"error": sentence}
    # the server gets the first 300 characters alone, and no traceback with the site's paths
    traceback.print_exception(error)
    return {"error": f"its site failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


WORKS: dict[str, Callable[[Worker, RecordDict], Records]] = {
    "query": Worker.hello,
    "query.first": Worker.first,
    "query.offer": Worker.offer,
    "query.share": Worker.share,
    "query.reveal": Worker.reveal,
    "train": Worker.train,
    "evaluate": Worker.evaluate,
}
"""The work of each of Flower's types of messages."""
END = "query.end"
"""Type of the message at the end of a federation."""
GREETINGS = ("query", "query.first")
"""Types of messages that a site answers anew each time."""


def answer(kind: str, content: RecordDict, make: Callable[[], Worker], ttl: float, clients: str = "") -> RecordDict:
    """Return the content of the answer to a message.

    Args:
        kind: Flower's type of the message.
        content: the message's content.
        make: returns the site's worker.
        ttl: seconds for which the server waits.
        clients: the site's clients as its node has them, by which the server names a site that fails before it greets.
    """
    start = time.perf_counter()
    try:
        answered = make().again(kind, content)
    except Exception as error:
        answered = failure(reason(error)["error"], clients)
    if time.perf_counter() - start > ttl:
        rank_zero_warn("the server has not waited for this answer; give it a longer timeout.")
    return answered


def app_of(make: Callable[[Context], Worker]) -> ClientApp:
    """Return Flower's app of a site.

    Args:
        make: returns the site's worker; called for each message, since Flower starts a process for each.
    """
    app = ClientApp()

    def answered(message: FlowerMessage, context: Context) -> FlowerMessage:
        metadata = message.metadata
        clients = str(context.node_config.get("clients", ""))
        content = answer(metadata.message_type, message.content, lambda: make(context), metadata.ttl, clients)
        return FlowerMessage(content, reply_to=message)

    for kind in WORKS:
        name, _, step = kind.partition(".")
        register = getattr(app, name)
        register(step)(answered) if step else register()(answered)
    # nothing stays here that would have to end
    app.query(END.partition(".")[2])(lambda message, context: FlowerMessage(RecordDict(), reply_to=message))
    return app
