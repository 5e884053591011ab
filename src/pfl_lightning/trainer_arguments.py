"""Refuse Trainer arguments without meaning in a federation, and fill in defaults."""

import inspect
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy

from pfl_lightning.aggregators.base import Aggregator
from pfl_lightning.callbacks import (
    BestCheckpoint,
    LastCheckpoint,
    RoundLogger,
    RoundProgress,
    RunBar,
    RunHead,
    TensorBoardReport,
    WandbReport,
)
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.engines import Engine, EngineMaker, Processes
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.federation.options import is_count
from pfl_lightning.runs.checkpoint_io import AtomicCheckpointIO
from pfl_lightning.runs.client_states import MappedCheckpointIO
from pfl_lightning.runs.folder import checkpoint_of_run
from pfl_lightning.runs.run_folders import RunFolders

OWN_STEPS = "works on the Trainer's own optimizer steps or weights, and a federation has none"
REFUSED_CALLBACKS = {
    "BaseFinetuning": (
        "freezes layers of the Trainer's own optimizer, and clients have theirs; freeze them in the net by "
        "requires_grad_(False), or let the client module's local_phases say what is trained"
    ),
    "BasePredictionWriter": (
        "writes what trainer.predict gives; give it to the lightning.Trainer by which a model of load_from_checkpoint "
        "predicts"
    ),
    "BatchSizeFinder": f"{OWN_STEPS}; set data.batch_size",
    "GradientAccumulationScheduler": f"{OWN_STEPS}; set data.batch_size",
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
    "limit_train_batches": "a round is one batch; give clients_per_round or data.max_samples",
    "overfit_batches": "a round is one batch; give data.max_samples",
    "accumulate_grad_batches": "clients step on every batch; give a larger data.batch_size",
    "val_check_interval": "a round is one batch; give check_val_every_n_epoch",
    "use_distributed_sampler": "clients are no samples; leave it out",
    "barebones": "it forbids the record; leave it out",
    "sync_batchnorm": "clients have their own batch statistics; see model.buffers",
}


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


def refuse_loaders(*loaders: Any) -> None:
    """Refuse data loaders, as samples must come by client."""
    if any(loader is not None for loader in loaders):
        raise MisconfigurationException("data loaders hold no clients; give datamodule=, a FederatedDataModule.")


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
    if not isinstance(datamodule, FederatedDataModule):
        raise MisconfigurationException(
            f"datamodule={type(datamodule).__name__} is not a FederatedDataModule; take one of pfl_lightning.data."
        )
    if aggregator is not None and not isinstance(aggregator, Aggregator):
        name = getattr(aggregator, "__name__", type(aggregator).__name__)
        raise MisconfigurationException(
            f"aggregator={name} is a class; give an instance, {name}()."
            if isinstance(aggregator, type)
            else f"aggregator={name} is no Aggregator; take one of pfl_lightning.methods."
        )


def fill_defaults(arguments: dict[str, Any], root: str, client_states: str) -> None:
    """Fill in the Trainer's open arguments in place.

    Args:
        arguments: the arguments for Lightning's Trainer.
        root: the folder of runs.
        client_states: as for `FederatedTrainer`.
    """
    callbacks = list(as_list(arguments.get("callbacks")))
    kinds: list[type[Callback]] = [RoundLogger, RoundProgress, *REPORTS]
    # The bar must close before the final table is printed, so it comes first.
    if wants(arguments, "enable_progress_bar", ProgressBar):
        kinds.insert(0, RunBar)
    if wants(arguments, "enable_model_summary", ModelSummary):
        kinds.insert(0, RunHead)
        # RunHead replaces Lightning's summary, which would describe one client's module only.
        arguments["enable_model_summary"] = False
    if arguments.get("enable_checkpointing") is not False and not arguments.get("fast_dev_run"):
        kinds += [LastCheckpoint] if arguments.get("limit_val_batches") == 0 else [BestCheckpoint, LastCheckpoint]
    callbacks += [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
    # Reports last, as they show results of other callbacks.
    callbacks.sort(key=lambda callback: isinstance(callback, REPORTS))
    plugins = list(as_list(arguments.get("plugins")))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(MappedCheckpointIO() if client_states == "disk" else AtomicCheckpointIO())
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
    found = [name for name, kinds in ACCELERATORS.items() if any(kind.is_available() for kind in kinds)]
    if accelerator in ACCELERATORS and accelerator not in found:
        raise MisconfigurationException(
            f"trainer.accelerator={accelerator} is not on this machine, or torch is installed without it; choose from "
            f"{', '.join(['cpu', *found])}."
        )
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not found)
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


def checkpoint_file(trainer: RunFolders, ckpt_path: str | Path | None, begun: bool) -> str | None:
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


def present_checkpoint(trainer: RunFolders, ckpt_path: str | Path | None) -> str | None:
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


def as_list(value: Any) -> list[Any]:
    """Return None, a single object or a list as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
