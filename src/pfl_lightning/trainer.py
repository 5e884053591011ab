"""FederatedTrainer: Lightning's Trainer with rounds."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.aggregators.base import Aggregator
from pfl_lightning.callbacks import best_checkpoint
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.engines import Engine
from pfl_lightning.engines.client_parallel import ended_together
from pfl_lightning.federation.federation import Federation
from pfl_lightning.federation.final_test import final_test
from pfl_lightning.federation.joining import joined_row
from pfl_lightning.federation.options import ClientStates, FederationOptions
from pfl_lightning.privacy import DPSGD
from pfl_lightning.runs.folder import at_work, leaving_nothing_if_refused
from pfl_lightning.runs.run_folders import RunFolders
from pfl_lightning.selection import Selection, Uniform
from pfl_lightning.stopping import RankLost, Stopped, stoppable
from pfl_lightning.trainer_arguments import (
    check_classes,
    check_machine,
    check_ranks,
    checkpoint_file,
    fill_defaults,
    present_checkpoint,
    refuse_loaders,
    refuse_meaningless,
)


class FederatedTrainer(RunFolders):
    """Fit a federation with Lightning's Trainer: each round is one epoch of Lightning's own fit loop.

    Validation and test run over all clients. Callbacks, loggers, precision, checkpoints and resuming are Lightning's.

    Args:
        max_rounds: rounds to run, at least 1.
        clients_per_round: clients per round: a number (an integer), or a fraction of all (above 0.0 and up to 1.0,
            rounded, at least one client).
        local_epochs: passes over a client's training data per round; None is 1, unless ``local_steps`` is given.
        local_steps: batches per client and round, instead of ``local_epochs``.
        engine: how the clients of a round are run: ``sequential``, one after another (a small net in one thread, unless
            ``OMP_NUM_THREADS`` is set); ``vectorised``, many clients in one computation, with the same result up to
            rounding; ``processes``, several clients at once on the cores of a CPU, with the same result; ``auto``, the
            one that should be fastest for the device, the net and the cores, which a line reports; or an `Engine`
            class. Several ``devices`` share the clients, and each uses this engine; ``processes`` needs a single
            device.
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
        test_every_round: whether to evaluate the test splits, and the server's model on the central test set if there
            is one, in every round (or every ``check_val_every_n_epoch``), as protocols of papers do, even without
            validation samples; if False, only at the end of ``fit``.
        monitor: the metric that selects the best round, such as ``val/f1``; None takes the task's, such as ``val/acc``.
        min_clients: the usable updates that a round needs; a round with fewer leaves the federation unchanged.
        gradient_clip_val: the largest norm or value of a client's gradients, above 0; None or 0 doesn't clip.
        gradient_clip_algorithm: whether ``gradient_clip_val`` bounds the gradients' ``norm`` or each ``value``.
        client_states: storage of clients' states between rounds, with the same result: ``memory``; ``device``, where
            clients train; ``disk``, in the run's folder ``states``; or ``auto``: on a GPU with room, else in memory.
        cohort: the rule that chooses a round's clients, such as ``PowerOfChoice``; None is `Uniform`, which draws
            ``clients_per_round`` clients with equal probability.
        example_privacy: DP-SGD for clients' training, which makes it differentially private for each sample; None
            trains without.
        default_root_dir: the folder of runs, each in a folder ``METHOD-DATA/version_N``.
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
        local_epochs: int | None = None,
        local_steps: int | None = None,
        engine: str | type[Engine] = "sequential",
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
        default_root_dir: str = "runs",
        **kwargs: Any,
    ) -> None:
        refuse_meaningless(max_rounds, kwargs)
        if example_privacy is not None and kwargs.get("detect_anomaly"):
            raise MisconfigurationException(
                "trainer.detect_anomaly=true ends a run at a sample whose gradient isn't finite, which "
                "trainer.example_privacy wouldn't cover; leave it out."
            )
        self.rounds = FederationOptions(
            clients_per_round=clients_per_round,
            local_epochs=local_epochs,
            local_steps=local_steps,
            engine=engine,
            workers=workers,
            compile=compile,
            evaluate=evaluate,
            test_every_round=test_every_round,
            monitor=monitor,
            min_clients=min_clients,
            clip=gradient_clip_val,
            clip_algorithm=gradient_clip_algorithm,
            client_states=client_states,
            cohort=cohort or Uniform(),
            example_privacy=example_privacy,
        )
        # Set while join() runs Lightning's test, in which _run_stage then joins instead.
        self._joining: Callable[[Federation], dict[str, float]] | None = None
        self.own_logger = kwargs.get("logger") in (None, True) and not kwargs.get("fast_dev_run")
        fill_defaults(kwargs, default_root_dir, client_states)
        check_machine(kwargs)
        super().__init__(max_epochs=max_rounds, default_root_dir=default_root_dir, **kwargs)
        # fast_dev_run sets 1 (one batch) where all else has 1.0 (all batches); the two mean the same here, and a
        # resumed run compares them.
        self.limit_val_batches = float(self.limit_val_batches)
        if self.world_size > 1:
            check_ranks(self.strategy, self.rounds.engine_class, self.world_size)

    @property
    def joins(self) -> bool:
        """True while `join` is running, which Lightning takes for a test."""
        return self._joining is not None

    @property
    def global_step(self) -> int:
        """Rounds done; the Trainer's own optimizer makes no steps."""
        federation = self.lightning_module
        return federation.round if isinstance(federation, Federation) else 0

    def fit(  # type: ignore[override]
        self,
        model: ClientModule,
        train_dataloaders: None = None,
        val_dataloaders: None = None,
        datamodule: FederatedDataModule | None = None,
        ckpt_path: str | Path | None = None,
        aggregator: Aggregator | None = None,
        resume_changed: bool = False,
    ) -> None:
        """Run the rounds of a federation.

        Args:
            model: the client module; afterwards it holds the global model.
            train_dataloaders: unused; keeps Lightning's signature.
            val_dataloaders: unused; keeps Lightning's signature.
            datamodule: the clients' data.
            ckpt_path: a checkpoint to resume from, or ``last`` for the last one of this method's newest run, whose
                folder the run continues in; without a checkpoint yet, a new run starts.
            aggregator: the server side, instead of the client module's own.
            resume_changed: whether to resume from a checkpoint of a run with other settings; a line reports each
                difference in any case. Settings that can't change a result never count: ``max_rounds``, engine,
                devices, loggers, folders.

        Raises:
            MisconfigurationException: if the checkpoint is of another method, net or data, or of other settings.
        """
        refuse_loaders(train_dataloaders, val_dataloaders)
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
        try:
            with ended_together(self.strategy), at_work(self):
                super().fit(federation, datamodule=datamodule, ckpt_path=path)
        except (RankLost, Stopped) as stop:
            # Other ranks don't know the run's folder, and take a checkpoint for granted.
            stop.resumable = self.global_rank > 0 or Path(str(self.log_dir), "checkpoints", "last.ckpt").exists()
            raise

    def _run_stage(self) -> Any:
        """Run a stage; after a fit, test the models while still on the device, and give callbacks the result."""
        federation = cast(Federation, self.lightning_module)
        try:
            # Replaces Lightning's SIGTERM handler, which starts a collective wherever this rank happens to be, and so
            # may hang.
            with stoppable():
                if self._joining is not None:
                    # Lightning thinks that it tests, with all its set-up; joining replaces the loop alone.
                    return self._joining(federation)
                results = super()._run_stage()
                # fast_dev_run only tries the code, so its models aren't tested.
                if self.state.fn == TrainerFn.FITTING and not self.fast_dev_run:  # type: ignore[attr-defined]
                    federation.call("on_final_test", final_test(federation, best_checkpoint(self)))
        finally:
            # After an error too: the next run would take a module left in evaluation mode for a frozen one.
            federation.release_modes()
        return results

    def validate(  # type: ignore[override]
        self,
        model: ClientModule | None = None,
        dataloaders: None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: FederatedDataModule | None = None,
        aggregator: Aggregator | None = None,
    ) -> Any:
        """Evaluate every client on the client's validation split.

        Args:
            model: the client module; None takes the federation of this Trainer.
            dataloaders: unused; keeps Lightning's signature.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, instead of the client module's own.
        """
        refuse_loaders(dataloaders)
        federation, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        with ended_together(self.strategy), leaving_nothing_if_refused(self):
            return super().validate(federation, datamodule=datamodule, ckpt_path=path, verbose=verbose)

    def test(  # type: ignore[override]
        self,
        model: ClientModule | None = None,
        dataloaders: None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: FederatedDataModule | None = None,
        aggregator: Aggregator | None = None,
    ) -> Any:
        """Evaluate every client on the client's test split.

        Args:
            model: the client module; None takes the federation of this Trainer.
            dataloaders: unused; keeps Lightning's signature.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, instead of the client module's own.
        """
        refuse_loaders(dataloaders)
        federation, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        with ended_together(self.strategy), leaving_nothing_if_refused(self):
            return super().test(federation, datamodule=datamodule, ckpt_path=path, verbose=verbose)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to predict, as a federation has a model per client; a plain ``lightning.Trainer`` predicts with any.

        Args:
            *args: as for ``lightning.Trainer.predict``.
            **kwargs: as for ``lightning.Trainer.predict``.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            "FederatedTrainer.predict can't choose among the clients' models; load a client's model by the trained "
            "class, such as model = FedPer.load_from_checkpoint(path, client=3), or the global model without client=, "
            "and call lightning.Trainer().predict(model, dataloaders)."
        )

    def join(
        self,
        model: ClientModule | None = None,
        datamodule: FederatedDataModule | None = None,
        epochs: int | None = None,
        rounds: int = 1,
        ckpt_path: str | Path | None = None,
        aggregator: Aggregator | None = None,
    ) -> dict[str, float]:
        """Let the data's new clients receive from the server and train, with a test before and after.

        Args:
            model: the client module; None takes the federation of this Trainer.
            datamodule: the clients' data, with ``new_clients``; if clients have names, the new ones are exactly those
                with names that the federation doesn't know.
            epochs: passes over a new client's samples in each phase; None takes the method's own number.
            rounds: rounds in which a new client receives and trains; more than one matter only for methods with
                personal state.
            ckpt_path: a checkpoint, or ``best`` or ``last`` of this method's newest run that has one.
            aggregator: the server side, instead of the client module's own.

        Returns:
            Test metrics as ``new_received/METRIC`` before and ``new/METRIC`` after training, validation metrics as
                ``new_val_received/METRIC`` and ``new_val/METRIC``.

        Raises:
            MisconfigurationException: if there are no new clients, or the server has no payload for them.
        """
        federation, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        self._joining = partial(joined_row, epochs=epochs, rounds=rounds)
        try:
            with ended_together(self.strategy), leaving_nothing_if_refused(self):
                return cast(dict[str, float], super().test(federation, datamodule=datamodule, ckpt_path=path))
        finally:
            self._joining = None

    def _evaluated(
        self,
        model: ClientModule | None,
        datamodule: FederatedDataModule | None,
        aggregator: Aggregator | None,
        ckpt_path: str | Path | None,
    ) -> tuple[Federation | None, str | None]:
        """Return the federation and the checkpoint's path of an evaluation."""
        # Made first, as it names the run, under whose folders best and last are looked up.
        federation = None if model is None else self._federation(model, datamodule, aggregator)
        return federation, present_checkpoint(self, ckpt_path)

    def _federation(
        self, model: ClientModule, datamodule: FederatedDataModule | None, aggregator: Aggregator | None
    ) -> Federation:
        """Return the federation of a client module: the Trainer's current one for the same module, or a new one."""
        # Without a datamodule take the earlier run's. Lightning sets this attribute only at run time, so it may be
        # missing.
        data = getattr(self, "datamodule", None) if datamodule is None else datamodule
        check_classes(model, data, aggregator)
        current = self.lightning_module
        # The same module as before: keep its federation, which has been trained.
        if isinstance(current, Federation) and current.client is model and aggregator is None:
            return current
        federation = Federation(model, aggregator, self.rounds)
        self.name_run(f"{federation.method}-{type(data).__name__}")
        return federation
