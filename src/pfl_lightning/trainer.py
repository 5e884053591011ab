"""FederatedTrainer: Lightning's Trainer with rounds."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.callbacks import (
    BestCheckpoint,
    FirstRounds,
    LastCheckpoint,
    RoundLogger,
    RoundProgress,
    RunBanner,
    RunBar,
    TensorBoardReport,
    WandbReport,
    best_checkpoint,
    is_pair,
)
from pfl_lightning.callbacks.trackers import records
from pfl_lightning.client.module import ClientModule
from pfl_lightning.compression import Compression
from pfl_lightning.data import ClientDatasets, FederatedDataModule
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.data.sources.client_modules import are_modules
from pfl_lightning.engines import Engine, EngineMaker, Processes
from pfl_lightning.engines.client_parallel import ClientParallel, ended_together
from pfl_lightning.engines.errors import cut_to_hook, tell_names
from pfl_lightning.federation.cross_matrix import CrossMatrix, cross_matrix
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import final_test
from pfl_lightning.federation.joining import joined_row
from pfl_lightning.federation.options import ClientStates, FederationOptions
from pfl_lightning.federation.prediction import Asked, NeedsSamples, Predictions, SavedClients
from pfl_lightning.internals.garbage import objects_left_out
from pfl_lightning.internals.of_lightning import continue_run
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets.lightning_net import LightningNet, trains_itself
from pfl_lightning.plots.results import Results
from pfl_lightning.privacy import DPSGD, LocalPrivacy, SecureSum
from pfl_lightning.runs.checkpoint_io import AtomicCheckpointIO
from pfl_lightning.runs.folder import at_work, checkpoint_of_run, leaving_nothing_if_refused
from pfl_lightning.runs.run_status import is_bare
from pfl_lightning.schedules import Schedule
from pfl_lightning.selection import Selection, Uniform
from pfl_lightning.server.base import Aggregator
from pfl_lightning.settings import Unpack, is_count, value_text
from pfl_lightning.stopping import RankLost, Stopped, stoppable
from pfl_lightning.tasks import OwnLoss

ClientsData: TypeAlias = FederatedDataModule | Mapping[Any, LightningDataModule] | Sequence[LightningDataModule] | None
"""Clients' data: a data module of all, or a LightningDataModule for each client."""


class TrainerSettings(TypedDict, total=False):
    """Settings of Lightning's Trainer that have a meaning in a federation, as `FederatedTrainer` takes them."""

    accelerator: str | Accelerator
    strategy: str | Strategy
    devices: list[int] | str | int
    num_nodes: int
    precision: Any
    logger: Logger | Iterable[Logger] | bool | None
    callbacks: list[Callback] | Callback | None
    fast_dev_run: int | bool
    max_time: str | timedelta | dict[str, int] | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    log_every_n_steps: int | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    profiler: Profiler | str | None
    detect_anomaly: bool
    plugins: Any
    reload_dataloaders_every_n_epochs: int
    enable_autolog_hparams: bool
    model_registry: str | None


class FederatedTrainer(Trainer):
    """Fit a federation with Lightning's Trainer: each round is one epoch of Lightning's own fit loop.

    Validation and test run over all clients. Callbacks, loggers, precision, checkpoints and resuming are Lightning's.

    Args:
        max_rounds: rounds to run, at least 1.
        clients_per_round: clients per round: a number (an integer), or a fraction of all (above 0.0 and up to 1.0,
            rounded, at least one client).
        local_epochs: passes over a client's training data per round, above 0; None is 1, unless ``local_steps`` is
            given. Of a fraction, such as 0.5 or 1.5, a client takes this many times the optimizer steps of its epoch,
            rounded down to a whole number of steps, at least one; each round draws a new order of samples. A mapping
            from names or ids, such as ``{"Bremen": 3, "Ulm": 0.5}``, or a list with a number for each client, lets
            clients differ; those without an entry train 1 epoch. Phases of a method with epochs of their own keep them.
        local_steps: optimizer steps per client and round, instead of ``local_epochs``: of a batch each, or of
            ``accumulate_grad_batches``.
        lr_factors: factors of single clients' learning rates, by name or id, such as ``{"Bremen": 0.5}``, or a list
            with a factor for each client; clients without an entry have 1. A client's rate in each phase is the
            configured one, as ``lr_scheduler`` has changed it, times the factor; the record's column ``lr`` has the
            rate before the factor. None leaves all rates as they are.
        steps_continue: whether a client's ``local_steps`` go on where its last round stopped, until its epoch is over,
            as in FLamby; else each round begins with a new order of samples. Phases of a method that are counted in
            epochs, or have samples of their own, begin anew in either case.
        engine: how the clients of a round are run: ``auto``, by the engine that should be fastest for the device, the
            net, the clients and the cores, which a line reports; ``sequential``, one after another (a small net in one
            thread, unless ``OMP_NUM_THREADS`` is set); ``vectorised``, many clients in one computation, with the same
            result up to rounding; ``processes``, several clients at once on the cores of a CPU, with the same bits; or
            an `Engine` class. With the same seed, engine and machine a run has the same bits, also where ``auto``
            chooses; where another machine makes it choose otherwise, results are equal up to rounding. Several
            ``devices`` share the clients, and each uses this engine; ``processes`` needs a single device.
        workers: the largest number of processes for the engine ``processes``; None is one per core, fewer for short
            rounds.
        compile: whether the engine ``vectorised`` compiles clients' steps with ``torch.compile``. Compiling takes some
            ten seconds per net, phase and number of clients, so it pays for small nets in runs of thousands of steps. A
            step that can't be compiled runs uncompiled, and a line gives the reason.
        evaluate: the models to evaluate, of all clients, whether or not they took part in the round: ``before`` local
            training, the model received from the server; ``after`` local training, the client's model after its last
            training, or the initial one before the first; or ``both``, where the latter is recorded as ``val_after/…``
            and ``test_after/…``. A client is evaluated on both splits right after its training, and its metrics are
            kept, also in checkpoints, until it trains again; no client trains for an evaluation.
        evaluate_clients: clients evaluated in each round: a number (an integer), or a fraction of all (above 0.0 and up
            to 1.0, rounded, at least one client). Each round draws others, with equal probability among those with
            samples to evaluate on, by the run's seed. The record then has their number as ``clients_evaluated``, and
            half the width of the monitored mean's 95 % interval as ``val/acc_margin``. The test at the end of ``fit``
            covers all clients.
        test_every_round: whether to evaluate the test splits, and the server's model on the central test set if there
            is one, in every round (or every ``check_val_every_n_epoch``), as protocols of papers do, even without
            validation samples; if False, only at the end of ``fit``.
        monitor: the metric that selects the best round, such as ``val/f1``, or ``val/auroc_pooled`` of the samples of
            all clients together; None takes the task's, such as ``val/acc``.
        min_clients: the usable updates that a round needs; a round with fewer leaves the federation unchanged.
        gradient_clip_val: the largest norm or value of a client's gradients, above 0; None or 0 doesn't clip.
        gradient_clip_algorithm: whether ``gradient_clip_val`` bounds the gradients' ``norm`` or each ``value``.
        client_states: storage of clients' states between rounds, with the same result: ``memory``; ``device``, where
            clients train; ``disk``, in the run's folder ``states``; or ``auto``: on a GPU with room, else in memory.
            With several ``devices``, each rank holds all of them, but under ``rank`` those of its own clients alone,
            and where the server needs sums over clients alone, ranks exchange one sum each and not every update. Sums
            of several ranks are equal to those of one up to rounding.
        cohort: the rule that chooses a round's clients, such as ``PowerOfChoice``; None is `Uniform`, which draws
            ``clients_per_round`` clients with equal probability.
        schedule: a simulated clock of device speeds, which decides which updates a round has: `Synchronous`, for
            over-selection, dropouts and simulated time, or `Asynchronous`, under which ``clients_per_round`` clients
            train at once and nobody waits; None counts all of the round's updates, without a clock.
        example_privacy: DP-SGD for clients' training, which makes it differentially private for each sample; None
            trains without.
        local_privacy: noise that each client adds to its own update, such as ``PrivUnit``, so that nobody has to be
            trusted; None sends updates as they are.
        compression: compression of clients' updates, such as ``TopK``; None sends whole weights.
        secure_sum: sums of whole numbers, of which the server learns no client's own update; None gives the server each
            update.
        default_root_dir: the folder of runs, each in a folder ``METHOD-DATA/version_N``.
        accumulate_grad_batches: batches of a client's optimizer step, whose gradients are summed and divided by this
            number; the last step of an epoch may have fewer batches. Under a task that counts errors otherwise than by
            samples, such as tokens of texts, the step is on the mean over all counted errors of its batches.
        limit_train_batches: batches of each local epoch to train on: their number (an integer), or a share of a
            client's batches (above 0.0 and up to 1.0, rounded down, at least one batch). Each epoch shuffles all
            samples anew.
        checkpoint_common: whether checkpoints hold the net's frozen weights. If False, they hold a fingerprint of
            these, as of a language model below its adapters, and take them from the net on loading.
        checkpoint_every: rounds from one ``last.ckpt`` to the next, 1 or more. None writes one when ten times the
            seconds that it takes have passed since the last one: after each round if rounds take longer than that. A
            round that becomes ``best.ckpt``, the last round and a round after which training stops early are written in
            any case, so that this changes no result: the selected round is the same, and ``last.ckpt`` never is of an
            earlier round than ``best.ckpt``. A run that is killed, or stopped by a signal within a round, goes on from
            the last written round. Deployments, and runs with a guarantee of privacy or a secure sum, write each round.
        **kwargs: further arguments of Lightning's Trainer. Without a logger, a CSVLogger writes beside the record. The
            round with the best ``monitor`` is kept as ``best.ckpt`` and the last round as ``last.ckpt``, beside any
            other ModelCheckpoint; ``enable_checkpointing=False`` keeps none. ``limit_val_batches=0`` skips validation.

    Raises:
        MisconfigurationException: if a value is out of range, or if an argument has no meaning in a federation.
    """

    def __init__(
        self,
        max_rounds: int = 100,
        clients_per_round: int | float = 1.0,
        local_epochs: int | float | dict[str, float] | list[float] | None = None,
        local_steps: int | None = None,
        engine: str | type[Engine] = "auto",
        workers: int | None = None,
        compile: bool = False,
        evaluate: Literal["before", "after", "both"] = "before",
        test_every_round: bool = False,
        monitor: str | None = None,
        min_clients: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        client_states: ClientStates = "memory",
        cohort: Selection | None = None,
        example_privacy: DPSGD | None = None,
        local_privacy: LocalPrivacy | None = None,
        compression: Compression | None = None,
        secure_sum: SecureSum | None = None,
        default_root_dir: str = "runs",
        steps_continue: bool = False,
        accumulate_grad_batches: int = 1,
        limit_train_batches: int | float | None = None,
        evaluate_clients: int | float = 1.0,
        checkpoint_common: bool = True,
        checkpoint_every: int | None = None,
        schedule: Schedule | None = None,
        lr_factors: dict[str, float] | list[float] | None = None,
        **kwargs: Unpack[TrainerSettings],
    ) -> None:
        # before any other name is set
        given = dict(locals())
        # the same dict: jsonargparse finds the Trainer's settings by following `**kwargs` into its call
        arguments = cast(dict[str, Any], kwargs)
        refuse_meaningless(max_rounds, arguments)
        # before defaults are filled in, as the repr has the user's settings alone
        self._call = call_of(given)
        if example_privacy is not None and arguments.get("detect_anomaly"):
            raise MisconfigurationException(
                "trainer.detect_anomaly=true ends a run at a sample whose gradient isn't finite, which "
                "trainer.example_privacy wouldn't cover; leave it out."
            )
        given["cohort"] = cohort or Uniform()
        given["limit_train_batches"] = 1.0 if limit_train_batches is None else limit_train_batches
        self.rounds = FederationOptions(**{option.name: given[option.name] for option in fields(FederationOptions)})
        # Set while join() or matrix() runs Lightning's test, in which _run_stage then does their work instead.
        self._in_place_of_test: Callable[[Federation], Any] | None = None
        self._joins = False
        self._saved: tuple[int, str] = (0, "")
        """Round and path of the checkpoint that was written last."""
        # A LightningModule that was given in place of a client module, and the client module made of it.
        self._given: tuple[LightningModule | None, ClientModule | None] = None, None
        self._predicted: dict[int | str, Predictions] = {}
        # LightningDataModules of clients that were given as the data, and the data module made of them.
        self._modules: tuple[Any, FederatedDataModule | None] = None, None
        # Such a logger is named after the run; a user's logger keeps its name.
        self.own_logger = arguments.get("logger") in (None, True) and not arguments.get("fast_dev_run")
        fill_defaults(arguments, default_root_dir, client_states)
        check_machine(arguments)
        super().__init__(max_epochs=max_rounds, default_root_dir=default_root_dir, **kwargs)
        # fast_dev_run sets 1 (one batch) where all else has 1.0 (all batches); the two mean the same here, and a
        # resumed run compares them.
        self.limit_val_batches = float(self.limit_val_batches)
        # a prediction has a batch a client, of which one would stand for all
        self.limit_predict_batches = 1.0
        if self.world_size > 1:
            check_ranks(self.strategy, self.rounds.engine_class, self.world_size)

    def __repr__(self) -> str:
        federation = self.lightning_module if hasattr(self, "strategy") else None
        if not isinstance(federation, Federation):
            return self._call
        data = getattr(self, "datamodule", None)
        return f"{self._call}, after round {federation.round} of {federation.method} on {type(data).__name__}"

    @property
    def results(self) -> Results:
        """The results so far: tables of rounds, clients, the chosen round and predictions, and a picture of the rounds.

        They are those of `fit`, also after other calls, and of the last `predict`.
        """
        [record, *_] = records(self)
        federation = self.lightning_module
        method = federation.method if isinstance(federation, Federation) else "no run yet"
        data = getattr(self, "datamodule", None)
        name = method if data is None else f"{method}-{type(data).__name__}"
        return Results(record.rows, record.clients, record.summary, self._predicted, name)

    @property
    def joins(self) -> bool:
        """True while `join` is running, which Lightning takes for a test."""
        return self._joins

    @property
    def global_step(self) -> int:
        """Rounds done; the Trainer's own optimizer makes no steps."""
        federation = self.lightning_module
        return federation.round if isinstance(federation, Federation) else 0

    @property
    def log_dir(self) -> str | None:
        """The run's folder, with record, configuration and checkpoints, whatever the logger.

        Lightning's own property communicates with the first rank, so a single rank can't read it.
        """
        if self.logger is None:
            return self.default_root_dir
        if isinstance(self.logger, (CSVLogger, TensorBoardLogger)):
            return str(self.logger.log_dir)
        version = self.logger.version
        # as Lightning's ModelCheckpoint names the folders of other loggers
        version = version if isinstance(version, str) else f"version_{version}"
        return str(Path(self.logger.save_dir or self.default_root_dir, str(self.logger.name), version))

    @property
    def run_root(self) -> Path:
        """The parent of this method's runs."""
        save_dir = None if self.logger is None else self.logger.save_dir
        return Path(save_dir or self.default_root_dir, *([] if self.logger is None else [str(self.logger.name)]))

    def name_run(self, name: str, version: str | None = None) -> None:
        """Name the folder of the run, unless the logger is the user's.

        Args:
            name: name of method and data.
            version: name of an earlier run to continue; None makes a new run.
        """
        if self.own_logger:
            # flushed at each step, so that a killed run keeps all rows
            self.logger = CSVLogger(self.default_root_dir, name, version=version, flush_logs_every_n_steps=1)

    def go_on_in(self, ckpt_path: str | None) -> None:
        """Continue a resumed run in the folder of its checkpoint, so that one run lies in one place.

        The user's logger continues with the run in this folder, unless the user has named a run.

        Args:
            ckpt_path: the checkpoint, or None.
        """
        run = None if ckpt_path is None else Path(ckpt_path).resolve().parent.parent
        # a checkpoint from elsewhere, such as a copy on another machine, starts a new run
        if run is not None and run.parent == self.run_root.resolve():
            self.name_run(run.parent.name, run.name)
            if isinstance(self.logger, (CSVLogger, TensorBoardLogger, WandbLogger)):
                continue_run(self.logger, run.name)

    def take_over(self) -> None:
        """Give a new run the folder of the last run, if the last run was killed before its first round."""
        if not self.own_logger or not self.is_global_zero or Path(str(self.log_dir)).exists():
            return
        # else each attempt that fails early would leave an empty version_N
        last = self.run_root / f"version_{int(self.logger.version) - 1}"  # type: ignore[union-attr, arg-type]
        if is_bare(last):
            self.name_run(last.parent.name, last.name)

    def fit(  # type: ignore[override]
        self,
        model: LightningModule,
        train_dataloaders: ClientsData = None,
        val_dataloaders: None = None,
        datamodule: ClientsData = None,
        ckpt_path: str | Path | None = None,
        aggregator: Aggregator | None = None,
        resume_changed: bool = False,
    ) -> None:
        """Run the rounds of a federation.

        Args:
            model: the client module, or a LightningModule with its own training, of which FedAvg makes clients;
                afterwards it holds the global model.
            train_dataloaders: the clients' data, as ``datamodule``, so that ``fit(model, data)`` works.
            val_dataloaders: unused; keeps Lightning's signature.
            datamodule: the clients' data; or a LightningDataModule for each client, by name or in a list.
            ckpt_path: a checkpoint to resume from, or ``last`` for the last one of this method's newest run, whose
                folder the run continues in; without a checkpoint yet, a new run starts.
            aggregator: the server side, instead of the client module's own.
            resume_changed: whether to resume from a checkpoint of a run with other settings; a line reports each
                difference in any case. Settings that can't change a result never count: engine, devices, loggers,
                folders, and ``max_rounds`` unless the method's rounds depend on it.

        Raises:
            MisconfigurationException: if the checkpoint is of another method, net or data, or of other settings.
        """
        datamodule = self._data_of(data_in(datamodule, train_dataloaders, val_dataloaders), model)
        federation = self._federation(model, datamodule, aggregator)
        federation.resume_changed = resume_changed
        path = checkpoint_file(self, ckpt_path, begun=True)
        if path is None and ckpt_path is not None:
            rank_zero_info(f"ckpt_path={str(ckpt_path)!r}: there is no checkpoint yet; a new run starts.")
        self.go_on_in(path)
        if path is None:
            self.take_over()
        # CSVLogger warns that the files of an existing folder are deleted; `go_on_in` keeps them.
        warnings.filterwarnings("ignore", message=".* exists and is not empty")
        # the summary says so where no client has validation samples
        warnings.filterwarnings("ignore", message="Total length of `ClientLoader` across ranks is zero")
        try:
            with ended_together(self.strategy), at_work(self):
                super().fit(federation, datamodule=datamodule, ckpt_path=path)
            if model is self._given[0]:
                # as after a fit by Lightning's own Trainer
                cast(LightningNet, federation.client.net).give_weights(model)
        except (RankLost, Stopped) as stop:
            # Other ranks don't know the run's folder, and take a checkpoint for granted.
            stop.resumable = self.global_rank > 0 or Path(str(self.log_dir), "checkpoints", "last.ckpt").exists()
            raise

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; ``last.ckpt`` of a round that was just saved as ``best.ckpt`` is the same file.

        Args:
            filepath: path of the checkpoint.
            weights_only: whether to save the model alone, which can't be resumed from.
            storage_options: passed to Lightning's file system.
        """
        before, self._saved = self._saved, (self.global_step, str(filepath))
        plain = not weights_only and storage_options is None and "://" not in str(filepath)
        disk = self.strategy.checkpoint_io
        same = before[0] == self.global_step and is_pair(self, before[1], str(filepath))
        if same and plain and isinstance(disk, AtomicCheckpointIO):
            if self.is_global_zero:
                disk.link_checkpoint(before[1], filepath)
            self.strategy.barrier("link_checkpoint")
        else:
            super().save_checkpoint(filepath, weights_only, storage_options)

    def _run_stage(self) -> Any:
        """Run a stage; after a fit, test the models while still on the device, and give callbacks the result."""
        federation = cast(Federation, self.lightning_module)
        try:
            # Replaces Lightning's SIGTERM handler, which starts a collective wherever this rank happens to be, and so
            # may hang.
            with stoppable(), objects_left_out():
                if self._in_place_of_test is not None:
                    # Lightning thinks that it tests, with all its set-up; the work replaces the loop alone.
                    return self._in_place_of_test(federation)
                results = super()._run_stage()
                # fast_dev_run only tries the code, so its models aren't tested.
                if self.state.fn == TrainerFn.FITTING and not self.fast_dev_run:  # type: ignore[attr-defined]
                    federation.call("on_final_test", final_test(federation, best_checkpoint(self)))
        except Exception as error:
            if str(error).startswith("Early stopping conditioned on metric"):
                known = ", ".join(name for name in self.callback_metrics if "/" in name)
                raise MisconfigurationException(
                    f"trainer.callbacks=EarlyStopping: monitor={', '.join(self._unknown_monitors())} is no metric of "
                    f"the record; take one of {known}."
                ) from None
            tell_names(error, federation.data.client_label)
            cut_to_hook(error)
            raise
        finally:
            # After an error too: the next run would take a module left in evaluation mode for a frozen one.
            federation.release_modes()
        return results

    def _unknown_monitors(self) -> list[str]:
        """Return the metrics that callbacks stop by, and no round has recorded."""
        stopping = [each for each in self.callbacks if isinstance(each, EarlyStopping)]  # type: ignore[attr-defined]
        return [str(each.monitor) for each in stopping if each.monitor not in self.callback_metrics]

    def validate(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        dataloaders: ClientsData = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: ClientsData = None,
        aggregator: Aggregator | None = None,
    ) -> Any:
        """Evaluate every client on the client's validation split.

        Args:
            model: the client module; None takes the federation of this Trainer as it stands, unlike Lightning, which
                would load the best checkpoint.
            dataloaders: the clients' data, as ``datamodule``, so that ``validate(model, data)`` works.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, instead of the client module's own.
        """
        datamodule = self._data_of(data_in(datamodule, dataloaders), model)
        federation, data, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        with ended_together(self.strategy), leaving_nothing_if_refused(self):
            return super().validate(federation, datamodule=data, ckpt_path=path, verbose=verbose)

    def test(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        dataloaders: ClientsData = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: ClientsData = None,
        aggregator: Aggregator | None = None,
    ) -> Any:
        """Evaluate every client on the client's test split.

        Args:
            model: the client module; None takes the federation of this Trainer as it stands, unlike Lightning, which
                would load the best checkpoint.
            dataloaders: the clients' data, as ``datamodule``, so that ``test(model, data)`` works.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, instead of the client module's own.
        """
        datamodule = self._data_of(data_in(datamodule, dataloaders), model)
        federation, data, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        with ended_together(self.strategy), leaving_nothing_if_refused(self):
            return super().test(federation, datamodule=data, ckpt_path=path, verbose=verbose)

    def predict(  # type: ignore[override]
        self,
        model: LightningModule | None = None,
        data: Any = None,
        datamodule: ClientsData = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        clients: Iterable[int | str] | Mapping[int | str, Any] | None = None,
        aggregator: Aggregator | None = None,
    ) -> dict[int | str, Predictions]:
        """Predict for raw rows with clients' models, those that the federation's own evaluations use.

        Lightning's prediction loop calls callbacks once per client, with its `Predictions`. A client unknown to the
        federation, named ``new``, is predicted for by the model that it would receive; the data's new clients too, but
        those that have joined by the models that they trained.

        Args:
            model: the client module; None takes the federation of this Trainer, as it stands without ``ckpt_path``.
            data: raw rows for all of ``clients``, as `FederatedDataModule.inputs` takes them, such as a tensor or a
                Dataset; a table's data take a file or a data frame too. None takes each client's own test split.
            datamodule: the clients' data. A checkpoint may do without, unless the method makes a client's model from
                the client's samples, or ``data`` or a new client's model needs them.
            return_predictions: False returns nothing, for callbacks that write the predictions.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one; at a site of a
                deployment, the file of one of the site's clients.
            clients: names or ids of clients; a mapping gives each one's own rows; None takes all clients.
            aggregator: the server side, instead of the client module's own.

        Returns:
            Predictions by the client's name, or by its id where clients have no names.

        Raises:
            MisconfigurationException: if there is no such client, if rows have another form than in training, or if a
                client's model needs samples that aren't here.
        """
        if isinstance(data, FederatedDataModule) or are_modules(data):
            # Lightning's own second argument may be a data module.
            data, datamodule = None, data
        datamodule = self._data_of(datamodule, model)
        if data is None and clients is None and isinstance(datamodule, ClientDatasets) and datamodule.to_predict:
            clients = datamodule.to_predict
        if isinstance(clients, str) or not isinstance(clients, Iterable | None):
            # what is no client is refused with the clients that there are
            clients = [clients]
        held = getattr(self, "datamodule", None) if datamodule is None else datamodule
        if model is not None and ckpt_path is not None and (held is None or is_of_site(ckpt_path)):
            file = str(present_checkpoint(self, ckpt_path))
            return self._predict_saved(cast(ClientModule, model), data, file, clients, return_predictions, held)
        federation = self.lightning_module if model is None else self._federation(model, datamodule, aggregator)
        if not isinstance(federation, Federation):
            raise MisconfigurationException("trainer.predict needs model=, as this Trainer has no federation yet.")
        path = present_checkpoint(self, ckpt_path)
        if datamodule is not None:
            adopt_fitted(datamodule, federation, path)
        # Lightning refuses loaders beside a data module, and keeps an earlier one.
        self.datamodule = held
        asked = Asked(clients, data, lambda: federation.data, lambda: federation.joined, federation.warn_of_test_rows)
        with ended_together(self.strategy), leaving_nothing_if_refused(self), warnings.catch_warnings():
            # callbacks of the run, of which a prediction has no need
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            found = super().predict(federation, asked, None, return_predictions, path)
        self._predicted = asked.named(cast(list[Predictions], found or []))
        return self._predicted

    def _predict_saved(
        self,
        model: ClientModule,
        data: Any,
        path: str,
        clients: Iterable[int | str] | Mapping[int | str, Any] | None,
        return_predictions: bool | None,
        source: FederatedDataModule | None,
    ) -> dict[int | str, Predictions]:
        """Predict with the clients of a checkpoint, without a federation; with ``source``, those at a site."""
        checkpoint = read_checkpoint(path)
        if source is not None:
            source.prepare_data()
            source.setup()
        saved = SavedClients(model, checkpoint, path, source)
        if source is None and data is None and not isinstance(clients, Mapping):
            raise NeedsSamples("trainer.predict without data= predicts for test splits; give datamodule=, or rows.")
        if clients is None and "own" in saved.saved:
            clients = list(saved.kept)[:1]
        # A federation's own callbacks would look for one, so the loop is a plain Trainer's.
        loop = Trainer(
            # by name: for an accelerator's object Lightning prepares mixed precision for a GPU
            accelerator=self.strategy.root_device.type,
            devices=1,
            precision=cast(Any, self.precision),
            logger=False,
            callbacks=[each for each in self.callbacks if isinstance(each, callbacks.BasePredictionWriter)],  # type: ignore[attr-defined]
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        asked = Asked(clients, data, lambda: saved.data, lambda: saved.kept)
        found = loop.predict(saved, asked, return_predictions=return_predictions)
        self._predicted = asked.named(cast(list[Predictions], found or []))
        return self._predicted

    def client(self, client: int | str) -> ClientModule:
        """Return one client's model after a fit or an evaluation: an independent copy, an ordinary LightningModule.

        It is the model that the federation's evaluations use, and of a new client the model that it trained when it
        joined. A plain ``lightning.Trainer`` fits, tests and predicts
        with it; call ``eval()`` before calling it directly.

        Args:
            client: the client's name or id.

        Raises:
            MisconfigurationException: if this Trainer has no federation yet, or there is no such client.
        """
        federation = self.lightning_module
        if not isinstance(federation, Federation) or federation.seed is None:
            raise MisconfigurationException("trainer.client has no client yet; call fit, or test with a checkpoint.")
        data = federation.data
        # one that joined from data of its own, which may not be those of now
        is_elsewhere = str(client) in federation.joined and str(client) not in data.client_names
        return federation.model_of(str(client) if is_elsewhere else data.client_id(client))

    def join(
        self,
        model: LightningModule | None = None,
        datamodule: ClientsData = None,
        epochs: int | None = None,
        rounds: int = 1,
        ckpt_path: str | Path | None = None,
        aggregator: Aggregator | None = None,
        names: list[str] | str | None = None,
    ) -> dict[str, float]:
        """Let the data's new clients receive from the server and train, with a test before and after.

        Their models are kept for `predict` and `client`, and in ``joined.ckpt`` beside the checkpoint, if this Trainer
        writes files.

        Args:
            model: the client module; None takes the federation of this Trainer as it stands, unlike Lightning, which
                would load the best checkpoint.
            datamodule: the clients' data, with ``new_clients``; if clients have names, the new ones are exactly those
                with names that the federation doesn't know, with or without the others beside. Their rows become inputs
                as the training rows did.
            epochs: passes over a new client's samples in each phase; None takes the method's own number.
            rounds: rounds in which a new client receives and trains; more than one matter only for methods with
                personal state.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            aggregator: the server side, instead of the client module's own.
            names: names of the new clients that join, or a single one; None takes all new clients.

        Returns:
            Test metrics as ``new_received/METRIC`` before and ``new/METRIC`` after training, validation metrics as
                ``new_val_received/METRIC`` and ``new_val/METRIC``.

        Raises:
            MisconfigurationException: if there are no new clients, if a name is of no new client, or if the server has
                no payload for them.
        """
        federation, data, path = self._evaluated(model, self._data_of(datamodule, model), aggregator, ckpt_path)
        self._joins = True
        try:
            work = partial(joined_row, epochs=epochs, rounds=rounds, names=names)
            return cast(dict[str, float], self._instead_of_test(work, federation, data, path))
        finally:
            self._joins = False

    def matrix(
        self,
        model: LightningModule | None = None,
        datamodule: ClientsData = None,
        ckpt_path: str | Path | None = None,
        metric: str | None = None,
        clients: Sequence[int | str] | None = None,
        aggregator: Aggregator | None = None,
    ) -> CrossMatrix:
        """Test each client's model on every client's test rows: K clients take K times the work of a test.

        The models are those of the federation's own evaluations, so that each one's figure on its own client is the
        ``test/`` figure in the record.

        Args:
            model: the client module; None takes the federation of this Trainer as it stands.
            datamodule: the clients' data.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            metric: the metric, such as ``acc``; None takes the one that selects the best round.
            clients: names or ids of the clients whose models are tested; None takes all.
            aggregator: the server side, instead of the client module's own.

        Returns:
            The matrix, with ``frame``, ``plot()``, ``markdown()`` and ``write(folder)``.

        Raises:
            MisconfigurationException: if there is no such client or metric, or if clients' states are elsewhere.
        """
        federation, data, path = self._evaluated(model, self._data_of(datamodule, model), aggregator, ckpt_path)
        work = partial(cross_matrix, metric=metric, clients=clients)
        with warnings.catch_warnings():
            # callbacks of the run, of which a matrix has no need
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            return cast(CrossMatrix, self._instead_of_test(work, federation, data, path))

    def _instead_of_test(
        self, work: Callable[[Federation], Any], federation: Federation, data: FederatedDataModule, path: str | None
    ) -> Any:
        """Return the result of some work, done in place of the loop of Lightning's test."""
        self._in_place_of_test = work
        try:
            with ended_together(self.strategy), leaving_nothing_if_refused(self):
                return super().test(federation, datamodule=data, ckpt_path=path)
        finally:
            self._in_place_of_test = None

    def _evaluated(
        self,
        model: LightningModule | None,
        datamodule: FederatedDataModule | None,
        aggregator: Aggregator | None,
        ckpt_path: str | Path | None,
    ) -> tuple[Federation, FederatedDataModule, str | None]:
        """Return the federation, the data and the checkpoint's path of an evaluation.

        Rows of the data become inputs as the training rows did.
        """
        data = datamodule or getattr(self, "datamodule", None)
        # Made first, as it names the run, under whose folders best and last are looked up.
        federation = self.lightning_module if model is None else self._federation(model, data, aggregator)
        if not isinstance(federation, Federation):
            raise MisconfigurationException(
                "model=None takes the federation that this Trainer has trained, and it has trained none; give a client "
                "module, and a checkpoint's ckpt_path."
            )
        path = present_checkpoint(self, ckpt_path)
        if model is None and path is None:
            # Lightning would load the best checkpoint into the federation, and later rounds would go on from there.
            rank_zero_info(
                f"model=None: the federation as it stands, after round {federation.round}; take ckpt_path='best' for "
                "the round with the best validation."
            )
        if datamodule is not None:
            adopt_fitted(datamodule, federation, path)
        return federation, cast(FederatedDataModule, data), path

    def _federation(
        self, model: LightningModule, datamodule: FederatedDataModule | None, aggregator: Aggregator | None
    ) -> Federation:
        """Return the federation of a client module: the Trainer's current one for the same module, or a new one."""
        # Without a datamodule take the earlier run's. Lightning sets this attribute only at run time, so it may be
        # missing.
        data = datamodule or getattr(self, "datamodule", None)
        current = self.lightning_module
        if trains_itself(model) and not isinstance(model, ClientModule):
            model = self._client_of(model, data)
        check_classes(model, data, aggregator)
        # The same module as before: keep its federation, which has been trained.
        if isinstance(current, Federation) and current.client is model and aggregator is None:
            return current
        federation = Federation(cast(ClientModule, model), aggregator, self.rounds)
        self.name_run(f"{federation.method}-{type(data).__name__}")
        return federation

    def _data_of(self, given: ClientsData, model: LightningModule | None) -> FederatedDataModule | None:
        """Return the data module; of clients' LightningDataModules one that is made of them, once.

        Args:
            given: the argument ``datamodule``.
            model: the argument ``model``, whose task is taken where a client module is given.
        """
        if not isinstance(given, (Mapping, list, tuple)):
            return cast(FederatedDataModule | None, given)
        known, data = self._modules
        if known is not given or data is None:
            task = model.task if isinstance(model, ClientModule) else OwnLoss()
            data = ClientDatasets.of_modules(given, task)
            self._modules = given, data
        return data

    def _client_of(self, module: LightningModule, data: FederatedDataModule | None) -> ClientModule:
        """Return FedAvg's client module of a LightningModule; the same one again for the same module.

        Args:
            module: the LightningModule.
            data: the clients' data.
        """
        known, client = self._given
        if known is not module:
            settings = {} if data is None else {"input_shape": data.input_shape, "task": data.task}
            client = FedAvg(module, **settings)  # type: ignore[arg-type]
            self._given = module, client
        return cast(ClientModule, client)


# Arguments of Lightning's Trainer

OWN_STEPS = "works on the Trainer's own optimizer steps or weights, and a federation has none"
REFUSED_CALLBACKS = {
    "BaseFinetuning": (
        "freezes layers of the Trainer's own optimizer, and clients have theirs; freeze them in the net by "
        "requires_grad_(False), or let the client module's local_phases say what is trained"
    ),
    "BatchSizeFinder": f"{OWN_STEPS}; set data.batch_size",
    "GradientAccumulationScheduler": f"{OWN_STEPS}; set trainer.accumulate_grad_batches",
    "LearningRateFinder": f"{OWN_STEPS}; set model.optimizer.lr",
    "ModelPruning": f"{OWN_STEPS}; leave it out",
    "SpikeDetection": (
        "looks at the loss of a step of the Trainer, whose step is a round; take "
        "EarlyStopping(monitor='train/loss', check_finite=True)"
    ),
    "StochasticWeightAveraging": f"{OWN_STEPS}; leave it out",
    "ThroughputMonitor": (
        "counts the Trainer's batches, and a round is one of all clients; see time/train in the record, or take "
        "FlopCounter"
    ),
    "WeightAveraging": f"{OWN_STEPS}; leave it out",
}
"""Lightning callbacks, with subclasses, that can't work in a federation: the reason and an alternative. All others see
rounds as epochs."""
STEP_HOOKS = "on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step"
"""Callback hooks about steps of the Trainer's own optimizer, which a federation never calls."""
REPORTS = (WandbReport, TensorBoardReport)
"""Callbacks that show a run in trackers; each does nothing without its logger."""
ACCELERATORS: dict[str, tuple[type[Accelerator], ...]] = {
    "gpu": (CUDAAccelerator, MPSAccelerator),
    "cuda": (CUDAAccelerator,),
    "mps": (MPSAccelerator,),
    "tpu": (XLAAccelerator,),
}
"""Accelerators that a machine may lack, by the Trainer's names."""
MEANINGLESS = {
    "max_epochs": "a round is an epoch; give max_rounds",
    "min_epochs": "a round is an epoch; leave it out",
    "max_steps": "the Trainer takes no optimizer steps of its own; give max_rounds",
    "min_steps": "the Trainer takes no optimizer steps of its own; leave it out",
    "overfit_batches": "a round is one batch; give data.max_samples",
    "val_check_interval": "a round is one batch; give check_val_every_n_epoch",
    "use_distributed_sampler": "clients are no samples; leave it out",
    "barebones": "it forbids the record; leave it out",
    "sync_batchnorm": "clients have their own batch statistics; see model.buffers",
}


def call_of(given: Mapping[str, Any]) -> str:
    """Return the call for an equal Trainer, with all arguments other than their defaults.

    Args:
        given: the local names at the beginning of ``__init__``.
    """
    arguments = {name: value for name, value in given.items() if name not in ("self", "kwargs", "__class__")}
    defaults = inspect.signature(FederatedTrainer).parameters
    changed = {name: value for name, value in arguments.items() if value != defaults[name].default}
    shown = {"max_rounds": given["max_rounds"], **changed, **given["kwargs"]}
    return f"{type(given['self']).__name__}({', '.join(f'{name}={value_text(each)}' for name, each in shown.items())})"


def refuse_meaningless(max_rounds: int, arguments: dict[str, Any]) -> None:
    """Refuse Trainer arguments without meaning in a federation, unless they have the Trainer's default.

    Args:
        max_rounds: rounds to run.
        arguments: the arguments for Lightning's Trainer.

    Raises:
        MisconfigurationException: at the first such argument.
    """
    if not is_count(max_rounds):
        raise MisconfigurationException(f"trainer.max_rounds={max_rounds} must be at least 1.")
    if "aggregator" in arguments:
        raise MisconfigurationException(
            "aggregator is no setting of the Trainer; give it to fit, as in fit(client, datamodule=data, "
            "aggregator=...)."
        )
    parameters = inspect.signature(Trainer).parameters
    for name, advice in MEANINGLESS.items():
        value = arguments.get(name)
        if value is not None and value != parameters[name].default:
            raise MisconfigurationException(f"trainer.{name}={value} means nothing in a federation: {advice}.")
    for name in ("limit_val_batches", "limit_test_batches"):
        value = arguments.get(name)
        none = name == "limit_val_batches" and value == 0
        # Lightning takes 1 as one batch, but 1.0 as all batches.
        if value is not None and not none and not (isinstance(value, float) and value == 1):
            raise MisconfigurationException(
                f"trainer.{name}={value} would evaluate some clients for all: they come in one batch; leave it out"
                + (", or give 0 for no validation." if name == "limit_val_batches" else ".")
            )
    value = arguments.get("limit_predict_batches")
    if value is not None and not (isinstance(value, float) and value == 1):
        raise MisconfigurationException(
            f"trainer.limit_predict_batches={value} would leave clients out without a word: each is a batch; leave it "
            "out, and name clients by predict(clients=...)."
        )
    # True is equal to 1, one round.
    if (dev := arguments.get("fast_dev_run")) not in (None, False, True):
        raise MisconfigurationException(
            f"trainer.fast_dev_run={dev} is a number of batches, and a round is one batch; give true for one round."
        )
    for callback in as_list(arguments.get("callbacks")):
        check_callback(callback)
        # Without a dirpath the file would be in the run's folder, where best.ckpt and last.ckpt already are.
        own = isinstance(callback, ModelCheckpoint) and not isinstance(callback, (BestCheckpoint, LastCheckpoint))
        if own and callback.dirpath is None and callback.filename in ("best", "last"):
            raise MisconfigurationException(
                f"trainer.callbacks: ModelCheckpoint filename={callback.filename} is that of a checkpoint that every "
                "run keeps; leave it out, or give it another filename or a dirpath."
            )


def check_callback(callback: Any) -> None:
    """Refuse a callback unable to work in a federation.

    Args:
        callback: one of ``trainer.callbacks``.

    Raises:
        MisconfigurationException: if it is no callback, or one that would do nothing or fail.
    """
    if not isinstance(callback, Callback):
        made = isinstance(callback, type) and issubclass(callback, Callback)
        name = callback.__name__ if isinstance(callback, type) else repr(callback)
        raise MisconfigurationException(
            f"trainer.callbacks: {name} is a class; give an instance, {name}(...)."
            if made
            else f"trainer.callbacks: {name} is no callback; give an instance of a subclass of Callback."
        )
    name = type(callback).__name__
    for refused, reason in REFUSED_CALLBACKS.items():
        # By name, since older versions of Lightning lack some.
        if isinstance(callback, getattr(callbacks, refused, ())):
            raise MisconfigurationException(f"trainer.callbacks: {name} {reason}.")
    for hook in STEP_HOOKS.split():
        if getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback):
            raise MisconfigurationException(
                f"trainer.callbacks: {name}.{hook} would never be called, as clients' steps are not the Trainer's; let "
                "the client module's adjust_gradients, on_after_backward or on_before_optimizer_step do its work."
            )


def data_in(datamodule: ClientsData, *loaders: Any) -> ClientsData:
    """Return the data module, which may stand in place of a loader; refuse loaders, which hold no clients.

    Args:
        datamodule: the argument ``datamodule``.
        *loaders: the arguments for loaders, in their order.

    Raises:
        MisconfigurationException: if a loader is given, or two data modules.
    """
    given = [loader for loader in loaders if loader is not None]
    first = given[0] if given and given[0] is loaders[0] else None
    if datamodule is None and len(given) == 1 and (isinstance(first, FederatedDataModule) or are_modules(first)):
        return cast(ClientsData, first)
    if given:
        raise MisconfigurationException(
            "data loaders hold no clients; give datamodule=, a FederatedDataModule, such as "
            'ClientDatasets({"Bremen": (train, test), ...}, task) for Datasets of each client.'
        )
    return datamodule


def check_classes(model: Any, datamodule: Any, aggregator: Any) -> None:
    """Refuse objects of types unfit for a federation.

    Args:
        model: must be a client module.
        datamodule: must be a federated data module.
        aggregator: must be an aggregator or None.

    Raises:
        MisconfigurationException: at the first object of a wrong type.
    """
    for name, value, kind in (("model", model, ClientModule), ("datamodule", datamodule, FederatedDataModule)):
        if isinstance(value, type) and issubclass(value, kind):
            raise MisconfigurationException(
                f"{name}={value.__name__} is a class; give an instance, {value.__name__}(...)."
            )
    if not isinstance(model, ClientModule):
        raise MisconfigurationException(
            f"model={type(model).__name__} is not a client module; take one of pfl_lightning.methods, or a "
            "subclass of ClientModule."
        )
    # it would be ignored, and the run would be one of the client module's own server side
    if isinstance(own := vars(model).get("aggregator"), Aggregator):
        raise MisconfigurationException(
            f"model.aggregator={own.name} has no effect; give it to fit, as in fit(client, datamodule=data, "
            f"aggregator={type(own).__name__}()), or let configure_aggregator return it."
        )
    if not isinstance(datamodule, FederatedDataModule):
        raise MisconfigurationException(
            f"datamodule={type(datamodule).__name__} is not a FederatedDataModule; take one of pfl_lightning.data, "
            "such as TableData for a table and ClientDatasets for Datasets of each client, or a dict with a "
            "LightningDataModule for each client."
        )
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        name = getattr(aggregator, "__name__", type(aggregator).__name__)
        raise MisconfigurationException(
            f"aggregator={name} is a class; give an instance, {name}()."
            if isinstance(aggregator, type)
            else f"aggregator={name} is no Aggregator; take one of pfl_lightning.server."
        )


def fill_defaults(arguments: dict[str, Any], root: str, client_states: str) -> None:
    """Fill in the Trainer's open arguments in place.

    Args:
        arguments: the arguments for Lightning's Trainer.
        root: the folder of runs.
        client_states: as for `FederatedTrainer`.
    """
    callbacks = list(as_list(arguments.get("callbacks")))
    kinds: list[type[Callback]] = [RoundLogger, FirstRounds, *REPORTS]
    if arguments.get("enable_progress_bar") is not False:
        kinds.insert(1, RoundProgress)
    # The bar must close before the final table is printed, so it comes first.
    if wants(arguments, "enable_progress_bar", ProgressBar):
        kinds.insert(0, RunBar)
    if wants(arguments, "enable_model_summary", ModelSummary):
        kinds.insert(0, RunBanner)
        # RunBanner replaces Lightning's summary, which would describe one client's module only.
        arguments["enable_model_summary"] = False
    if arguments.get("enable_checkpointing") is not False and not arguments.get("fast_dev_run"):
        kinds += [LastCheckpoint] if arguments.get("limit_val_batches") == 0 else [BestCheckpoint, LastCheckpoint]
    callbacks += [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
    # Reports last, as they show results of other callbacks.
    callbacks.sort(key=lambda callback: isinstance(callback, REPORTS))
    plugins = list(as_list(arguments.get("plugins")))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO(mapped=client_states == "disk"))
    arguments["callbacks"], arguments["plugins"] = callbacks, plugins
    # Lightning's default depends on installed packages; a run shall write the same files everywhere.
    if arguments.get("logger") in (None, True):
        arguments["logger"] = CSVLogger(root)
    # A sanity check would evaluate all clients before training, and Lightning would log every 50th round only.
    for name, value in {"num_sanity_val_steps": 0, "log_every_n_steps": 1}.items():
        if arguments.get(name) is None:
            arguments[name] = value
    # Lightning would take all devices, each with a process; several are used on request only.
    if arguments.get("devices") in (None, "auto"):
        arguments["devices"] = 1
    # Every rank sees all clients and picks its own; Lightning's sampler would split the list of ids.
    arguments["use_distributed_sampler"] = False
    several = str(arguments["devices"]) != "1" or arguments.get("num_nodes", 1) != 1
    if several and sys.platform == "win32":
        raise MisconfigurationException(
            f"trainer.devices={arguments['devices']} with trainer.num_nodes={arguments.get('num_nodes', 1)}: several "
            "processes end together by signals and pipes, which Windows hasn't; take 1 for both, or Linux under WSL."
        )
    if several and arguments.get("strategy") in (None, "auto"):
        arguments["strategy"] = ClientParallel()


def wants(arguments: dict[str, Any], name: str, kind: type[Callback]) -> bool:
    """Return True if a display is switched on and no callback of the user does its work."""
    own = any(isinstance(callback, kind) for callback in as_list(arguments.get("callbacks")))
    return arguments.get(name) is not False and not own


def check_machine(arguments: dict[str, Any]) -> None:
    """Refuse devices missing on this machine, and evaluation intervals below 1.

    Args:
        arguments: the arguments for Lightning's Trainer, with defaults filled in.

    Raises:
        MisconfigurationException: at the first such value.
    """
    accelerator, devices = arguments.get("accelerator", "auto"), arguments["devices"]
    accelerators = [name for name, kinds in ACCELERATORS.items() if any(kind.is_available() for kind in kinds)]
    if accelerator in ACCELERATORS and accelerator not in accelerators:
        raise MisconfigurationException(
            f"trainer.accelerator={accelerator} is not on this machine, or torch is installed without it; choose from "
            f"{', '.join(['cpu', *accelerators])}."
        )
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not accelerators)
    if on_cpu and not (str(devices).isdigit() and int(devices) > 0):
        raise MisconfigurationException(
            f"trainer.devices={devices} must be a number of processes from 1 up, because trainer.accelerator is the "
            "CPU."
        )
    every = arguments.get("check_val_every_n_epoch")
    if every is not None and every < 1:
        raise MisconfigurationException(f"trainer.check_val_every_n_epoch={every} must be at least 1 round.")


def check_ranks(strategy: Strategy, engine: type[Engine] | EngineMaker, ranks: int) -> None:
    """Refuse several devices for strategies and engines made for a single one."""
    if not isinstance(strategy, ClientParallel):
        raise MisconfigurationException(
            f"trainer.strategy={type(strategy).__name__} would cut models or batches over {ranks} devices, and a "
            "federation shares out whole clients; leave it out, or take ClientParallel."
        )
    if isinstance(engine, type) and issubclass(engine, Processes):
        raise MisconfigurationException(
            f"trainer.engine=processes has processes of its own on one machine, and trainer.devices asks for {ranks}; "
            "take another engine, or devices=1."
        )


def checkpoint_file(trainer: FederatedTrainer, ckpt_path: str | Path | None, begun: bool) -> str | None:
    """Return the file of a ``ckpt_path``; None if ``best`` or ``last`` doesn't exist.

    Args:
        trainer: the trainer, for the method's newest run.
        ckpt_path: a file, ``best``, ``last`` or None.
        begun: as for `checkpoint_of_run`.
    """
    if ckpt_path not in ("best", "last"):
        return None if ckpt_path is None else str(ckpt_path)
    folder = next((str(c.dirpath or "") for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint)), "")
    # In an evaluation the callback has a folder too, but it is never made.
    if folder and Path(folder).is_dir():
        found: Path | None = Path(folder, f"{ckpt_path}.ckpt")
    else:
        found = checkpoint_of_run(trainer.run_root, str(ckpt_path), begun=begun)
    return str(found) if found is not None and found.exists() else None


def present_checkpoint(trainer: FederatedTrainer, ckpt_path: str | Path | None) -> str | None:
    """Return the file of an evaluation's ``ckpt_path``; None if none is given.

    Args:
        trainer: the trainer, for the method's newest run.
        ckpt_path: a file, ``best``, ``last`` or None.

    Raises:
        MisconfigurationException: if the file doesn't exist.
    """
    path = checkpoint_file(trainer, ckpt_path, begun=False)
    if path is None and ckpt_path is not None:
        raise MisconfigurationException(
            f"ckpt_path={str(ckpt_path)!r}: no run under {trainer.run_root} has such a checkpoint; "
            "give the path of one."
        )
    return path


def is_of_site(path: str | Path) -> bool:
    """Return whether a checkpoint is of one client at its site, and not of a federation."""
    return Path(path).is_file() and "own" in read_checkpoint(path)["federation"]


def adopt_fitted(data: FederatedDataModule, federation: Federation, path: str | None) -> None:
    """Let rows of a data module become inputs as the training rows of a federation did.

    Args:
        data: the data module, given for an evaluation.
        federation: the federation.
        path: the checkpoint to evaluate; None takes the federation as it stands.
    """
    trained = fitted_in(path, data) if path else federation.trained
    # Before Lightning sets the data up, as texts of a few new rows alone may be refused as ids.
    data.adopt(trained.get("preprocessing", {}), trained.get("names", []))


def fitted_in(path: str, data: FederatedDataModule) -> dict[str, Any]:
    """Return a checkpoint's ``preprocessing`` and names of clients; empty for a file that is no such checkpoint.

    Args:
        path: the checkpoint.
        data: the data module of the class whose entry is read.
    """
    try:
        checkpoint = read_checkpoint(path)
        names = checkpoint["federation"].get("names", [])
        return {**checkpoint.get(type(data).__qualname__, {}), "names": names}
    # Lightning reads the file again, and explains what is wrong with it.
    except Exception:
        return {}


def as_list(value: Any) -> list[Any]:
    """Return None, a single object or a list as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
