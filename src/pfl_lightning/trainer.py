"""FederatedTrainer: Lightning's Trainer, with rounds."""

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
from pfl_lightning.privacy import DPSGD, SecureSum
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
    """A ``lightning.Trainer`` that fits a federation: a round is an epoch of Lightning's own fit loop.

    Validation and test run over all clients. Callbacks, loggers, precision, checkpoints and resuming are Lightning's.

    Args:
        max_rounds: rounds to run.
        clients_per_round: clients that take part in a round: a number (an integer), or a fraction of all (above 0.0
            and up to 1.0, rounded, at least one client).
        local_epochs: passes of a client over its training data in a round; None is 1, but for ``local_steps``.
        local_steps: batches of a client in a round, in the place of ``local_epochs``.
        engine: how the clients of a round are run: ``sequential``, one after another, and where the net is small in one
            thread, unless ``OMP_NUM_THREADS`` is set; ``vectorised``, many in one computation, with the same result but
            for rounding; ``processes``, several at once on the cores of a CPU, with the same result; ``auto``, the one
            that should be fastest for the device, the net and the cores, and a line says which; or an `Engine` class.
            Several ``devices`` share the clients out, and each runs its own so; ``processes`` is for one.
        workers: processes of the engine ``processes`` at most; None takes one a core, and fewer for short rounds.
        compile: whether the engine ``vectorised`` compiles clients' steps by ``torch.compile``, some ten seconds for
            each net, phase and number of clients: it pays for small nets in runs of thousands of steps. What can't be
            compiled stays as it is, and a line says why.
        evaluate: which model of each client is evaluated, by all clients whoever takes part in the round: ``before``
            local training, as received from the server; ``after`` local training, the model that the client had when it
            last trained, or the initial one where it never has; or ``both``, then the latter is recorded as
            ``val_after/…`` and ``test_after/…``. A client is evaluated on both splits right after its training, and its
            metrics are kept, in checkpoints too, until it trains again; nobody trains for an evaluation.
        test_every_round: whether the test splits, and the server's model on the central test set where there is one,
            are evaluated every round, which the papers' protocol asks for, or as often as ``check_val_every_n_epoch``
            says, whether or not clients have validation samples; else only at the end of ``fit``.
        monitor: the metric that selects the best round, such as ``val/f1``; None takes the task's, such as ``val/acc``.
        min_clients: usable updates that a round needs; one with fewer leaves the federation as it is.
        gradient_clip_val: largest norm or value of a client's gradients, above 0; None or 0 doesn't clip.
        gradient_clip_algorithm: whether ``gradient_clip_val`` bounds their ``norm`` or each ``value``.
        client_states: where what stays with clients is between rounds, with the same result: in ``memory``, on the
            ``device`` where they train, on the ``disk`` (the run's folder ``states``); ``auto``: on a GPU with room.
        cohort: what chooses the clients that take part in a round, such as ``PowerOfChoice``; None is `Uniform`, which
            draws ``clients_per_round`` of them, all as likely.
        example_privacy: what makes clients' training differentially private in each sample; None trains as ever.
        secure_sum: how updates become whole numbers of which the server learns sums alone; None gives it each update.
        default_root_dir: where runs are kept, each in a folder ``METHOD-DATA/version_N``.
        **kwargs: Lightning's Trainer's arguments. Without a logger a CSVLogger writes beside the record. The round
            with the best ``monitor`` is kept as ``best.ckpt`` and the last one as ``last.ckpt``, whatever other
            ModelCheckpoint there is; none with ``enable_checkpointing=False``. ``limit_val_batches=0`` leaves
            validation out.

    Raises:
        MisconfigurationException: if a value is out of its range, or if an argument means nothing in a federation.
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
        secure_sum: SecureSum | None = None,
        default_root_dir: str = "runs",
        **kwargs: Any,
    ) -> None:
        refuse_meaningless(max_rounds, kwargs)
        if example_privacy is not None and kwargs.get("detect_anomaly"):
            raise MisconfigurationException(
                "trainer.detect_anomaly=true ends a run at a sample whose gradient isn't finite, and "
                "trainer.example_privacy would not cover that it does; leave it out."
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
            secure_sum=secure_sum,
        )
        self._joining: Callable[[Federation], dict[str, float]] | None = None
        self.own_logger = kwargs.get("logger") in (None, True) and not kwargs.get("fast_dev_run")
        fill_defaults(kwargs, default_root_dir, client_states)
        check_machine(kwargs)
        super().__init__(max_epochs=max_rounds, default_root_dir=default_root_dir, **kwargs)
        # fast_dev_run gives 1, a number of batches, for which settings say 1.0 otherwise
        self.limit_val_batches = float(self.limit_val_batches)
        if self.world_size > 1:
            check_ranks(self.strategy, self.rounds.engine_class, self.world_size)

    @property
    def joins(self) -> bool:
        """Whether clients join: what Lightning takes for a test."""
        return self._joining is not None

    @property
    def global_step(self) -> int:
        """Rounds done: no optimizer of the Trainer's own steps."""
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
        """Runs the rounds of a federation.

        Args:
            model: the client module; afterwards it holds the global model.
            train_dataloaders: not used; it is where Lightning's signature has it.
            val_dataloaders: not used; it is where Lightning's signature has it.
            datamodule: the clients' data.
            ckpt_path: a checkpoint to go on from, or ``last`` for the last one of this method's newest run, in whose
                folder the run then goes on; where that run has none yet, a new one starts.
            aggregator: the server side, in the place of the client module's own.
            resume_changed: whether to go on from a checkpoint whose run had other settings; a line says each of them
                in any case. What can't change a result is free: ``max_rounds``, engine, devices, loggers, folders.

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
        # its logger says of a folder where a run goes on that its files are deleted
        warnings.filterwarnings("ignore", message=".* exists and is not empty")
        try:
            with ended_together(self.strategy), at_work(self):
                super().fit(federation, datamodule=datamodule, ckpt_path=path)
        except (RankLost, Stopped) as stop:
            # only the first rank knows the run's folder
            stop.resumable = self.global_rank > 0 or Path(str(self.log_dir), "checkpoints", "last.ckpt").exists()
            raise

    def _run_stage(self) -> Any:
        """Ends a fit with the test of its models, while they are on their device, and hands it to the callbacks."""
        federation = cast(Federation, self.lightning_module)
        try:
            # in the place of Lightning's handler of SIGTERM, which begins a collective wherever this rank is
            with stoppable():
                if self._joining is not None:
                    # in the place of a test's own loop
                    return self._joining(federation)
                results = super()._run_stage()
                if self.state.fn == TrainerFn.FITTING and not self.fast_dev_run:  # type: ignore[attr-defined]
                    federation.call("on_final_test", final_test(federation, best_checkpoint(self)))
        finally:
            # whatever ended the run: a module that is left in evaluation mode would be taken for frozen by the next one
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
        """Evaluates every client on its validation split.

        Args:
            model: the client module; None takes the federation of this Trainer.
            dataloaders: not used; it is where Lightning's signature has it.
            ckpt_path: a checkpoint, or ``best`` or ``last`` for those of this method's newest run that has them.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, in the place of the client module's own.
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
        """Evaluates every client on its test split.

        Args:
            model: the client module; None takes the federation of this Trainer.
            dataloaders: not used; it is where Lightning's signature has it.
            ckpt_path: a checkpoint, or ``best`` or ``last`` for those of this method's newest run that has them.
            verbose: whether to print the result.
            datamodule: the clients' data.
            aggregator: the server side, in the place of the client module's own.
        """
        refuse_loaders(dataloaders)
        federation, path = self._evaluated(model, datamodule, aggregator, ckpt_path)
        with ended_together(self.strategy), leaving_nothing_if_refused(self):
            return super().test(federation, datamodule=datamodule, ckpt_path=path, verbose=verbose)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to predict: there is a model for each client, and a plain ``lightning.Trainer`` predicts with any.

        Args:
            *args: as for ``lightning.Trainer.predict``.
            **kwargs: the same by name.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(
            "FederatedTrainer.predict has a model for each client, and not one; load that of a client by the class "
            "that was trained, such as model = FedPer.load_from_checkpoint(path, client=3), or the global one without "
            "client=, and call lightning.Trainer().predict(model, dataloaders)."
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
        """Lets the data's new clients receive what the server has and train by it, and tests them before and after.

        Args:
            model: the client module; None takes the federation of this Trainer.
            datamodule: the clients' data, with ``new_clients``; where clients have names, all those are new whose
                names the federation doesn't know, and no others.
            epochs: passes over a new client's samples in each phase; None takes what the method makes in a round.
            rounds: how often a new client receives and trains; they are one where nothing stays with it in between.
            ckpt_path: a checkpoint, or ``best`` or ``last`` for those of this method's newest run that has them.
            aggregator: the server side, in the place of the client module's own.

        Returns:
            On test ``new_received/METRIC`` and then ``new/METRIC``, on val ``new_val_received/METRIC`` and so on.

        Raises:
            MisconfigurationException: if there are no new clients, or the server has nothing for them.
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
        federation = None if model is None else self._federation(model, datamodule, aggregator)
        return federation, present_checkpoint(self, ckpt_path)

    def _federation(
        self, model: ClientModule, datamodule: FederatedDataModule | None, aggregator: Aggregator | None
    ) -> Federation:
        """The federation of a client module, the one there is if it is of the same module."""
        # without one that of an earlier run holds; Lightning declares the attribute at run time
        data = getattr(self, "datamodule", None) if datamodule is None else datamodule
        check_classes(model, data, aggregator)
        current = self.lightning_module
        if isinstance(current, Federation) and current.client is model and aggregator is None:
            return current
        federation = Federation(model, aggregator, self.rounds)
        self.name_run(f"{federation.method}-{type(data).__name__}")
        return federation
