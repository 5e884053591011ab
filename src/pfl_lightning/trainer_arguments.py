"""The Trainer's arguments: what means nothing in a federation is refused, what is left open gets its default."""

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
    RunBanner,
    RunBar,
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
"""Why callbacks of Lightning's, and their subclasses, can't be used, and what can; others work on rounds as epochs."""
STEP_HOOKS = "on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step"
"""Hooks of callbacks that are about steps of the Trainer's own optimizer, and never called."""
REPORTS = (WandbReport, TensorBoardReport)
"""What trackers show of a run, where they log."""
ACCELERATORS: dict[str, tuple[type[Accelerator], ...]] = {
    "gpu": (CUDAAccelerator, MPSAccelerator),
    "cuda": (CUDAAccelerator,),
    "mps": (MPSAccelerator,),
    "tpu": (XLAAccelerator,),
}
"""What can be there or not, by the names that the Trainer takes."""
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
    """Refuses Trainer arguments that have no meaning in a federation, where they aren't the Trainer's defaults."""
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
        # 1 is one batch, and 1.0 all of them
        if value is not None and not none and not (isinstance(value, float) and value == 1):
            raise MisconfigurationException(
                f"trainer.{name}={value} would evaluate some clients for all: they come in one batch; leave it out"
                + (", or give 0 for no validation." if name == "limit_val_batches" else ".")
            )
    if (dev := arguments.get("fast_dev_run")) not in (None, False, True):
        raise MisconfigurationException(
            f"trainer.fast_dev_run={dev} is a number of batches, and a round is one batch; give true for one round."
        )
    for callback in as_list(arguments.get("callbacks")):
        check_callback(callback)
        own = isinstance(callback, ModelCheckpoint) and not isinstance(callback, (BestCheckpoint, LastCheckpoint))
        if own and callback.dirpath is None and callback.filename in ("best", "last"):
            raise MisconfigurationException(
                f"trainer.callbacks: ModelCheckpoint filename={callback.filename} is that of a checkpoint that every "
                "run keeps; leave it out, or give it another filename or a dirpath."
            )


def check_callback(callback: Any) -> None:
    """Check that a callback can do its work in a federation.

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
        # an older Lightning lacks some
        if isinstance(callback, getattr(callbacks, refused, ())):
            raise MisconfigurationException(f"trainer.callbacks: {name} {reason}.")
    for hook in STEP_HOOKS.split():
        if getattr(type(callback), hook) is not getattr(Callback, hook) or hook in vars(callback):
            raise MisconfigurationException(
                f"trainer.callbacks: {name}.{hook} would never be called, as clients' steps are not the Trainer's; let "
                "the client module's adjust_gradients, on_after_backward or on_before_optimizer_step do its work."
            )


def refuse_loaders(*loaders: Any) -> None:
    """Refuses data loaders: data come by client."""
    if any(loader is not None for loader in loaders):
        raise MisconfigurationException("data loaders hold no clients; give datamodule=, a FederatedDataModule.")


def check_classes(model: Any, datamodule: Any, aggregator: Any) -> None:
    """Refuses what can't make up a federation.

    Args:
        model: to be a client module.
        datamodule: to be the clients' data.
        aggregator: to be the server side, or None.
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
    """Sets what the Trainer leaves open, in place.

    Args:
        arguments: the Trainer's.
        root: the folder of runs.
        client_states: as for `FederatedTrainer`.
    """
    callbacks = list(as_list(arguments.get("callbacks")))
    kinds: list[type[Callback]] = [RoundLogger, RoundProgress, *REPORTS]
    # before what prints the final table, for which the bar makes room
    if wants(arguments, "enable_progress_bar", ProgressBar):
        kinds.insert(0, RunBar)
    if wants(arguments, "enable_model_summary", ModelSummary):
        kinds.insert(0, RunBanner)
        # Lightning's own
        arguments["enable_model_summary"] = False
    if arguments.get("enable_checkpointing") is not False and not arguments.get("fast_dev_run"):
        kinds += [LastCheckpoint] if arguments.get("limit_val_batches") == 0 else [BestCheckpoint, LastCheckpoint]
    callbacks += [kind() for kind in kinds if not any(isinstance(callback, kind) for callback in callbacks)]
    # they show what others have made of the run
    callbacks.sort(key=lambda callback: isinstance(callback, REPORTS))
    plugins = list(as_list(arguments.get("plugins")))
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(MappedCheckpointIO() if client_states == "disk" else AtomicCheckpointIO())
    arguments["callbacks"], arguments["plugins"] = callbacks, plugins
    if arguments.get("logger") in (None, True):
        arguments["logger"] = CSVLogger(root)
    for name, value in {"num_sanity_val_steps": 0, "log_every_n_steps": 1}.items():
        if arguments.get(name) is None:
            arguments[name] = value
    if arguments.get("devices") in (None, "auto"):
        arguments["devices"] = 1
    # every rank sees all clients, and takes its own
    arguments["use_distributed_sampler"] = False
    several = str(arguments["devices"]) != "1" or arguments.get("num_nodes", 1) != 1
    if several and arguments.get("strategy") in (None, "auto"):
        arguments["strategy"] = ClientParallel()


def wants(arguments: dict[str, Any], name: str, kind: type[Callback]) -> bool:
    """Whether something shall be shown, and no callback of the user's own does it."""
    own = any(isinstance(callback, kind) for callback in as_list(arguments.get("callbacks")))
    return arguments.get(name) is not False and not own


def check_machine(arguments: dict[str, Any]) -> None:
    """Refuses devices that this machine doesn't have, and intervals of no length.

    Args:
        arguments: the Trainer's, with defaults.
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
    """Refuses several devices for what can't use them."""
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
    """The file that is meant by a ``ckpt_path``; None where ``best`` or ``last`` aren't there.

    Args:
        trainer: for whose method the newest run is looked for.
        ckpt_path: a file, ``best``, ``last`` or None.
        begun: as for `checkpoint_of_run`.
    """
    if ckpt_path not in ("best", "last"):
        return None if ckpt_path is None else str(ckpt_path)
    folder = next((str(c.dirpath or "") for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint)), "")
    # an evaluation gives the callback a folder as well, which it never makes
    if folder and Path(folder).is_dir():
        found: Path | None = Path(folder, f"{ckpt_path}.ckpt")
    else:
        found = checkpoint_of_run(trainer.run_root, str(ckpt_path), begun=begun)
    return str(found) if found is not None and found.exists() else None


def present_checkpoint(trainer: RunFolders, ckpt_path: str | Path | None) -> str | None:
    """The file that is meant by the ``ckpt_path`` of an evaluation, if one is given.

    Args:
        trainer: for whose method the newest run is looked for.
        ckpt_path: a file, ``best``, ``last`` or None.

    Raises:
        MisconfigurationException: if it isn't there.
    """
    path = checkpoint_file(trainer, ckpt_path, begun=False)
    if path is None and ckpt_path is not None:
        raise MisconfigurationException(
            f"ckpt_path={str(ckpt_path)!r}: no run under {trainer.run_root} has such a checkpoint; "
            "give the path of one."
        )
    return path


def as_list(value: Any) -> list[Any]:
    """A list of what may be None, one thing or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
