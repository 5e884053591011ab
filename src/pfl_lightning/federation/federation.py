"""The federation: the one module that Lightning's loop drives. Rounds, evaluation and what a checkpoint holds."""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from functools import cached_property
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from pfl_lightning.aggregators import Aggregator, Server
from pfl_lightning.client import ClientModule
from pfl_lightning.client.hooks import check_hooks
from pfl_lightning.client.optimizers import check_schedule
from pfl_lightning.contract.aggregator_memory import Remembered
from pfl_lightning.contract.messages import check_payload, sound_updates
from pfl_lightning.contract.pairing import check_common, check_finite, check_pair
from pfl_lightning.data import FederatedDataModule, Split
from pfl_lightning.engines import ClientState, Engine, Job, Outcome, Sharded
from pfl_lightning.federation.evaluation import Evaluations
from pfl_lightning.federation.options import FederationOptions
from pfl_lightning.federation.resuming import Settings, check_resumed, settings_of
from pfl_lightning.federation.summary import summarise
from pfl_lightning.messages import StateDict, detached, num_bytes
from pfl_lightning.methods.registry import method_of
from pfl_lightning.runs.client_states import DiskStates
from pfl_lightning.runs.folder import run_folder
from pfl_lightning.seeds import derive_seed, draw_cohort


class TrainingDiverged(RuntimeError):
    """Every client of a round ended with a NaN or an infinity."""


class Federation(LightningModule):
    """Clients and a server, for Lightning's fit loop: a round is an epoch with one batch, the ids of all clients.

    ``FederatedTrainer`` makes it from a client module. Its ``state_dict`` is the global model's, under the client
    module's own names, so that a checkpoint loads into the client module; the rest of the federation is in the
    checkpoint under ``federation``.

    Args:
        client: the client module that every client is run through; with several nets, one of each module is made.
        aggregator: the server side; None takes the client module's own.
        options: how rounds are made.

    Raises:
        MisconfigurationException: if client and aggregator don't fit together.
    """

    def __init__(self, client: ClientModule, aggregator: Aggregator | None, options: FederationOptions) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.client = client
        # one resident module an architecture, not one a client
        self.architectures = nn.ModuleList(client.architectures())
        self.aggregator = aggregator if aggregator is not None else client.configure_aggregator()
        self.options = options
        self.round = 0
        self.lr_factor = 1.0
        self.seed: int | None = None
        self.initial: list[StateDict] = []
        self.start: StateDict = {}
        self.clients: MutableMapping[int, ClientState] = {}
        self.metrics: dict[str, Any] = {}
        self.evaluations = Evaluations(self)
        check_hooks(client)
        self.settings: Settings = {}
        self.resume_changed = self.changed = False
        check_finite(client, self.aggregator)
        check_pair(client, self.aggregator)
        for module in self._architectures:
            module.requested = module.offers & self.aggregator.needs
        self.save_hyperparameters(dict(client.hparams))

    @property
    def method(self) -> str:
        """The literature's name of client module and aggregator, or else their own."""
        return method_of(self.client, self.aggregator)

    @property
    def _architectures(self) -> list[ClientModule]:
        return cast(list[ClientModule], list(self.architectures))

    @cached_property
    def engines(self) -> list[Engine]:
        """What runs the clients of each module; made when the modules stand on their device."""
        work, trainer = self.options.work(self.data), self.trainer
        try:
            engines: list[Engine] = [
                self.options.engine_class(
                    module, work, trainer.precision_plugin, self.options.workers, self.options.compile
                )
                for module in self._architectures
            ]
        except AttributeError as error:
            # of which `nn.Module` would say no more than that this property isn't there
            raise RuntimeError(f"{type(self.client).__name__} can't be set up: {error}") from error
        ranks = trainer.world_size
        return [Sharded(engine, trainer.global_rank, ranks) for engine in engines] if ranks > 1 else engines

    def architecture_of(self, client: int) -> int:
        """Which of the `architectures` a client has."""
        return self.client.architecture_of(client, self.data.num_clients)

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""
        return cast(FederatedDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Takes the common initial model and prepares the server, once."""
        for module in self._architectures:
            self.options.check(module, self.data)
            module.num_rounds = self.trainer.max_epochs or 1
        if self._fitting:
            check_schedule(self.client.configure_optimizers(), cast(int, self.trainer.max_epochs))
        self.settings = settings_of(self)
        if self.seed is not None:
            return
        # every rank goes on with what the first one has drawn
        self.seed, states = self.trainer.strategy.broadcast(
            (torch.initial_seed(), [detached(module.state_dict()) for module in self._architectures])
        )
        pairs = list(zip(self._architectures, states, strict=True))
        self.initial = [{name: t for name, t in state.items() if module.is_personal(name)} for module, state in pairs]
        shared = [{name: t for name, t in state.items() if module.is_shared(name)} for module, state in pairs]
        check_common(self._architectures, shared)
        self._shared = shared[0]
        self._set_up_server(self.seed)
        # where every model is somebody's own, a global model has still to be shown: the one that all began with
        whole = self.aggregator.global_model()
        self.start = {name: tensor for name, tensor in self._shared.items() if name not in whole}
        self.clients = self._kept({})

    def _kept(self, states: MutableMapping[int, ClientState]) -> MutableMapping[int, ClientState]:
        """Clients' states, where the Trainer keeps them."""
        if self.options.client_states == "memory":
            return states
        run = run_folder(self.trainer)
        # in a folder that stays: files that come and go directly in the run's would make it look newer than it is
        return DiskStates(run and run / "states", states)

    def _set_up_server(self, seed: int) -> None:
        self.aggregator.setup(Server(self.data.num_clients, self._shared, self.client, self.data, seed))
        self._remembered = Remembered(self.aggregator, self.architectures)

    def configure_optimizers(self) -> Any:
        """The optimizer that carries the round's learning rate, and its schedule; engines read the rate."""
        return self.client.configure_optimizers()

    # Training

    def training_step(self, clients: list[int], batch_idx: int) -> None:
        """Runs one round."""
        # Lightning wraps this in autocast; only forward passes belong there, and engines enter it for each
        with isolate_rng(), torch.autocast(self.device.type, enabled=False):
            self._run_round(clients)

    def _run_round(self, clients: list[int]) -> None:
        cohort = draw_cohort(clients, self.options.cohort_size(len(clients)), cast(int, self.seed), self.round)
        self._read_rate()
        self._start_metrics(cohort)
        self._call("on_round_start", cohort)
        outcomes: dict[int, Outcome] = {}
        start = time.perf_counter()
        for architecture, engine in enumerate(self.engines):
            for outcome in engine.run(
                self._jobs([client for client in cohort if self.architecture_of(client) == architecture])
            ):
                outcomes[outcome.client] = outcome
                self._call("on_client_fit_end", outcome.client, outcome)
        self.metrics["time/train"] = time.perf_counter() - start
        taken = self._sound(self._finite(outcomes))
        self._add_training(taken, len(cohort) - len(outcomes))
        self.evaluations.keep_initial(taken)
        self._aggregate(taken)
        self.round += 1
        if (scheduler := self.lr_schedulers()) is not None:
            # moves nothing, as there are no gradients; torch warns of schedules that step before their optimizer
            self.trainer.optimizers[0].step()
            scheduler.step()  # type: ignore[union-attr]
            self._read_rate()

    def _jobs(self, clients: list[int]) -> Iterator[Job]:
        checked = None
        for client in clients:
            self._call("on_client_fit_start", client)
            job = self.job(client, self.options.splits_after)
            if (weights := job.payload.get("weights")) is not checked:
                check_payload(job.payload, client, self.aggregator, self._shared)
                checked = weights
            self.metrics["bytes/down"] += num_bytes(job.payload)
            yield job

    def job(self, client: int, evaluate: tuple[Split, ...] = ()) -> Job:
        """A client's work in the coming round.

        Args:
            client: its id.
            evaluate: the parts to evaluate on.
        """
        state = self.clients.get(client, ClientState(self.initial[self.architecture_of(client)]))
        seed = derive_seed(cast(int, self.seed), "train", self.round, client)
        payload = self.aggregator.download(client)
        return Job(client, self.round, state, payload, self.data.client(client), seed, self.lr_factor, evaluate)

    def _read_rate(self) -> None:
        """Takes the round's learning rate from the optimizer that the schedule moves."""
        group = self.trainer.optimizers[0].param_groups[0]
        self.lr_factor = group["lr"] / group["initial_lr"] if group.get("initial_lr") else 1.0

    def _finite(self, outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
        """The outcomes by id, without those of clients that diverged."""
        diverged = sorted(client for client, outcome in outcomes.items() if not outcome.finite)
        self.metrics["clients_diverged"] = len(diverged)
        if diverged and len(diverged) == len(outcomes):
            raise TrainingDiverged(
                f"round {self.round + 1}: the loss or the weights of every client became NaN or infinite; "
                "earlier checkpoints stand; try a smaller learning rate or trainer.gradient_clip_val."
            )
        if diverged:
            rank_zero_warn(
                f"round {self.round + 1}: left out of the aggregation, because their loss or weights became NaN or "
                f"infinite: clients {', '.join(map(str, diverged))}."
            )
        return {client: outcomes[client] for client in sorted(outcomes) if outcomes[client].finite}

    def _sound(self, outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
        """The outcomes whose updates the aggregator can use."""
        updates = {client: outcome.update for client, outcome in outcomes.items()}
        sound = sound_updates(updates, self.aggregator, type(self.client).__name__, self._shared)
        self.metrics["clients_refused"] = len(updates) - len(sound)
        return {client: outcome for client, outcome in outcomes.items() if client in sound}

    def _aggregate(self, taken: dict[int, Outcome]) -> None:
        updates = {client: outcome.update for client, outcome in taken.items()}
        self._call("on_aggregate_start", updates)
        start = time.perf_counter()
        with self._remembered.aggregation():
            logs = self.aggregator.aggregate(updates, self.round)
        # states change here and not while clients train: an interrupted round leaves none behind
        for client, outcome in taken.items():
            self.clients[client] = outcome.state
            if self.options.splits_after:
                self.evaluations.after[client] = outcome.after
        self.metrics["time/aggregate"] = time.perf_counter() - start
        self.metrics |= {f"server/{name}": value for name, value in logs.items()}
        self._call("on_aggregate_end", logs)

    def _start_metrics(self, cohort: list[int]) -> None:
        self.evaluations.begin()
        self.metrics = {
            "round": self.round + 1,
            "clients": 0,
            "clients_diverged": 0,
            "clients_refused": 0,
            "clients_absent": 0,
            "cohort": " ".join(map(str, cohort)),
            "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
            "bytes/up": 0,
            "bytes/down": 0,
        }

    def _add_training(self, taken: dict[int, Outcome], absent: int) -> None:
        if absent:
            rank_zero_warn(f"round {self.round + 1}: {absent} of the round's clients gave nothing.")
        sizes = {client: self.data.size(client, "train") for client in taken}
        trained = {client: outcome.metrics for client, outcome in taken.items() if outcome.metrics}
        self.metrics |= {"clients": len(taken), "clients_absent": absent}
        self.metrics["bytes/up"] = sum(num_bytes(outcome.update) for outcome in taken.values())
        self.metrics |= {f"train/{name}": value for name, value in summarise(trained, sizes).items()}
        if "train/loss" in self.metrics:
            self.log("train/loss", self.metrics["train/loss"], prog_bar=True, logger=False, batch_size=1)

    # Evaluation

    def validation_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluates the clients of a batch on their validation parts; on their test parts too where rounds ask."""
        for client in clients:
            self.evaluations.evaluate(client, self.options.validation_splits)

    def test_step(self, clients: list[int], batch_idx: int) -> None:
        """Evaluates the clients of a batch on their test parts."""
        for client in clients:
            self.evaluations.evaluate(client, ("test",))

    @property
    def _fitting(self) -> bool:
        return bool(self.trainer.state.fn == TrainerFn.FITTING)

    def on_validation_epoch_start(self) -> None:
        """Starts the clock."""
        self._evaluation_start = time.perf_counter()
        trainer = self.trainer
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self.evaluations.begin(int(sum(batches)))

    def on_test_epoch_start(self) -> None:
        """Forgets other evaluations."""
        self.evaluations.begin(int(sum(self.trainer.num_test_batches)))

    def on_validation_epoch_end(self) -> None:
        """Summarises over clients into the round's record and for callbacks."""
        summary = self.evaluations.summary()
        if self._fitting:
            if self.options.test_every_round:
                summary |= self.evaluations.evaluate_global()
            self.metrics |= summary | {"time/evaluate": time.perf_counter() - self._evaluation_start}
        self._log_summary(summary)

    def on_test_epoch_end(self) -> None:
        """Summarises over clients, and tests the server's model."""
        self._log_summary(self.evaluations.summary() | self.evaluations.evaluate_global())

    def _log_summary(self, summary: dict[str, float]) -> None:
        # while fitting, loggers get the whole record of the round at once, from a callback
        for name, value in summary.items():
            shown = name.endswith(("/acc", "/global_acc"))
            self.log(name, value, prog_bar=shown and self._fitting, logger=not self._fitting, batch_size=1)

    # Checkpoints

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The global model, under the client module's names; what it leaves out is the common initial one."""
        state: StateDict = detached(self.client.state_dict())
        return state | self.start | self.initial[0] | self.aggregator.global_model()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Takes a global model.

        Raises:
            MisconfigurationException: if it is another net's.
        """
        try:
            return self.client.load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise MisconfigurationException(f"ckpt_path: the checkpoint holds another net: {reason}") from error

    def federation_state(self) -> dict[str, Any]:
        """Everything that a later process needs to go on as if nothing had happened."""
        clients = range(self.data.num_clients)
        return {
            "method": self.method,
            "sizes": [self.data.size(client, "train") for client in clients],
            "round": self.round,
            "lr_factor": self.lr_factor,
            "seed": self.seed,
            "initial": self.initial,
            "start": self.start,
            "aggregator": self.aggregator.state,
            "clients": {client: vars(state) for client, state in sorted(self.clients.items())},
            "after": dict(sorted(self.evaluations.after.items())),
            # not for resuming: they let one client's model be loaded without the aggregator
            "payloads": {client: self.aggregator.download(client) for client in clients},
        }

    def load_federation_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, checked for being one of this federation.

        Raises:
            MisconfigurationException: if it is of another method, number of clients or partition.
        """
        sizes = [self.data.size(client, "train") for client in range(self.data.num_clients)]
        if state["method"] != self.method:
            raise MisconfigurationException(
                f"ckpt_path: the checkpoint is of {state['method']} and this run of {self.method}; "
                "resume with the configuration that it was made with."
            )
        if len(state["sizes"]) != len(sizes):
            raise MisconfigurationException(
                f"ckpt_path: the checkpoint has {len(state['sizes'])} clients and data.num_clients={len(sizes)}."
            )
        if state["sizes"] != sizes:
            raise MisconfigurationException(
                "ckpt_path: the checkpoint's clients hold other numbers of samples than those of data; "
                "resume with the data, partitioner and data.seed that it was made with."
            )
        self.evaluations.load(state)
        self.round, self.lr_factor = state["round"], state["lr_factor"]
        self.seed, self.initial, self.start = state["seed"], state["initial"], state["start"]
        self.aggregator.state = state["aggregator"]
        self.clients = {client: ClientState(**saved) for client, saved in state["clients"].items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the federation."""
        checkpoint["federation"] = {**self.federation_state(), "settings": self.settings}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the federation."""
        if "federation" not in checkpoint:
            raise MisconfigurationException("ckpt_path: the checkpoint is not of a federation.")
        state = checkpoint["federation"]
        if state["seed"] != self.seed:
            # what the server draws is a function of the run's seed, not of the process's
            self._set_up_server(state["seed"])
        if self.options.client_states == "disk":
            # the file of a mapped checkpoint stays on the disk, replaced or not, for as long as a tensor is in it
            state = state | deepcopy({name: state[name] for name in ("initial", "start", "aggregator")})
        self.load_federation_state(state)
        self.clients = self._kept(self.clients)
        if self._fitting:
            self.changed = check_resumed(self, checkpoint)

    def on_fit_end(self) -> None:
        """Leaves the global model in the client module."""
        self.client.load_state_dict(self.state_dict())

    def _call(self, hook: str, *args: Any) -> None:
        """Calls a hook of ours on the callbacks that have it, subclasses of `FederatedCallback` or not."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if method := getattr(callback, hook, None):
                method(self.trainer, self, *args)
