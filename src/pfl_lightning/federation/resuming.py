"""Describe the settings of a run as plain values, and compare the settings of a resumed run."""

import inspect
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.optimizers import Configured
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.data.preprocessing import RANGE
from pfl_lightning.federation.options import FederationOptions, by_client
from pfl_lightning.internals.of_lightning import COMMAND_LINE_NOTES
from pfl_lightning.internals.of_torch import LAST_RATES
from pfl_lightning.server.base import Aggregator
from pfl_lightning.settings import kept_arguments
from pfl_lightning.tasks.plain import plain as plain_task

Settings: TypeAlias = dict[str, Any]
"""Numbers, texts, booleans, None, and lists of these, by dotted names as on the command line."""

PLAIN = (bool, int, float, str)
BUILT = {"net", "optimizer", "lr_scheduler", "input_shape", "num_classes", "task"}
"""Arguments of client modules that are described by the built object, wherever the arguments were given."""
UNTOLD = {
    "root",
    "download",
    "resident",
    "input_drift",
    "params",
    "initial_lr",
    "base_lrs",
    LAST_RATES,
    *COMMAND_LINE_NOTES,
}
"""Last parts of names of settings that can't change a result, or repeat another setting."""
MANY = 10
"""The largest number of settings named in a refusal; the log has a line for each."""
LONG = 80
"""The length in characters from which only the first differing entry of a list is shown."""


def settings_of(
    architectures: Sequence[ClientModule], aggregator: Aggregator, data: FederatedDataModule, rounds: Settings
) -> Settings:
    """Return the settings with an influence on a federation's rounds, without devices or engine.

    Args:
        architectures: a client module per architecture, the configured one first.
        aggregator: the server side.
        data: the clients' data.
        rounds: the Trainer's settings, from `rounds_of`.
    """
    return {
        **client_settings(architectures, rounds),
        **flat("aggregator", aggregator),
        **flat("data", data),
        # One value, or a run with a change and one without would have no name in common.
        "data.input_drift": [str(drift) for drift in data.input_drift or ()],
    }


def client_settings(architectures: Sequence[ClientModule], rounds: Settings) -> Settings:
    """Return the settings of rounds and of client modules.

    Args:
        architectures: a client module per architecture, the configured one first.
        rounds: the Trainer's settings, from `rounds_of`.
    """
    client = architectures[0]
    own = {name: value for name, value in client.hparams.items() if name not in BUILT}
    return {
        **flat("trainer", rounds),
        **flat("model", own),
        # The settings of the loss; metrics may change, as they only watch.
        **flat("model.task", {k: v for k, v in plain_task(client.task)["init_args"].items() if k != "metrics"}),
        "model.net": "\n".join(str(module.net) for module in architectures),
        **optimizer_of(client.configured()),
    }


def rounds_of(
    options: FederationOptions, trainer: Trainer, num_clients: int, aggregator: Aggregator, data: FederatedDataModule
) -> Settings:
    """Return the Trainer's settings with an influence on a round's result.

    Args:
        options: the Trainer's settings of a federation.
        trainer: the Trainer.
        num_clients: number of clients.
        aggregator: the server side.
        data: the clients' data, whose names are those of settings by client.
    """
    clip: Settings = {"gradient_clip_val": options.gradient_clip_val or None}
    if options.gradient_clip_val:
        clip["gradient_clip_algorithm"] = options.gradient_clip_algorithm
    return {
        "cohort": options.cohort,
        "schedule": options.schedule,
        # Resolved values, so that 0.5 of 10 clients equals 5, and local_epochs=None equals 1.
        "clients_per_round": f"{options.cohort_size(num_clients)} of {num_clients}",
        "local_epochs": None
        if options.local_steps is not None
        else of_clients("local_epochs", options.local_epochs, data) or 1,
        "lr_factors": of_clients("lr_factors", options.lr_factors, data),
        "local_steps": options.local_steps,
        "steps_continue": options.steps_continue,
        "accumulate_grad_batches": options.accumulate_grad_batches,
        # As a text, because 1 is one batch, and 1.0 are all.
        "limit_train_batches": str(options.limit_train_batches),
        "min_clients": options.min_clients,
        "example_privacy": options.example_privacy,
        "local_privacy": options.local_privacy,
        "compression": options.compression,
        "secure_sum": options.secure_sum,
        "attacks": attacks_of(trainer),
        "evaluate": options.evaluate,
        "evaluate_clients": f"{options.evaluation_size(num_clients)} of {num_clients}",
        "test_every_round": options.test_every_round,
        **clip,
        **({"max_rounds": trainer.max_epochs} if aggregator.fixed_rounds else {}),
        "precision": trainer.precision,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
    }


def of_clients(name: str, value: Any, data: FederatedDataModule) -> Any:
    """Return a setting as a list with each client's number, or as one value where all clients have the same.

    Args:
        name: the setting.
        value: a number, None, a mapping in any order and by names or ids, or a list.
        data: the clients' data.
    """
    own = by_client(name, value, data)
    numbers = [float(own.get(client, 1)) for client in range(data.num_clients)]
    if not own:
        return None if isinstance(value, Mapping) else value
    # of all alike, as if the number had been given; a factor of 1 is none
    return numbers if len(set(numbers)) > 1 else None if numbers[0] == 1 else numbers[0]


def attacks_of(trainer: Trainer) -> list[str]:
    """Return descriptions of the Trainer's attack callbacks, with their settings, in order."""
    attacks = [callback for callback in cast(Any, trainer).callbacks if getattr(callback, "is_attack", False)]
    return [
        " ".join(str(value) if name == "" else f"{name[1:]}={value}" for name, value in flat("", attack).items())
        for attack in attacks
    ]


def optimizer_of(made: Configured) -> Settings:
    """Return the settings of the local optimizer, of several groups one by one, and of the schedule."""
    optimizer, scheduler = made.optimizer, made.scheduler
    # Making a schedule, such as a warm-up, changes the rate at once; the configured one is initial_lr.
    groups = [group | {"lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups]
    name, schedule = "model.optimizer", "model.lr_scheduler"
    settings = {name: type(optimizer).__name__, schedule: scheduler and type(scheduler).__name__}
    settings |= flat(name, groups[0]) if len(groups) == 1 else flat(f"{name}.groups", groups)
    return settings if scheduler is None else settings | flat(schedule, scheduler.state_dict())


def flat(name: str, value: Any) -> Settings:
    """Return a value under a name, and the parts under longer dotted names.

    An object is described by its class and by the constructor arguments that it keeps as attributes; lambdas are left
    out, as their names say nothing.

    >>> flat("data", {"seed": 1, "shape": (2, 3), "root": "here"})
    {'data.seed': 1, 'data.shape': [2, 3]}
    >>> flat("net", partial(nn.Linear, out_features=3))
    {'net': 'Linear', 'net.out_features': 3}
    """
    if name.rpartition(".")[2] in UNTOLD:
        return {}
    if is_plain(value):
        return {name: plain(value)}
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        if all(map(is_plain, value)):
            return {name: list(map(plain, value))}
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        # The command line describes an object by class_path and init_args.
        named = {name: value["class_path"].rpartition(".")[2]} if "class_path" in value else {}
        parts = value.get("init_args", {}) if named else value
    elif isinstance(value, partial):
        # The command line's partials wrap a function of its own, with the class among the arguments.
        made = next((part for part in (value.func, *value.args) if inspect.isclass(part)), value.func)
        named, parts = flat(name, made), value.keywords
    elif inspect.isclass(value) or inspect.isroutine(value):
        return {} if value.__name__ == "<lambda>" else {name: value.__name__}
    else:
        named, parts = {name: type(value).__name__}, arguments_of(value)
    return named | {key: each for part in parts for key, each in flat(f"{name}.{part}", parts[part]).items()}


def is_plain(value: Any) -> bool:
    """Return True if a value can be stored unchanged."""
    return value is None or isinstance(value, PLAIN)


def plain(value: Any) -> Any:
    """Return a value as a plain Python type, which checkpoints can hold, unlike subclasses such as NumPy's float64."""
    return next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)


def arguments_of(made: Any) -> Settings:
    """Return the constructor arguments kept by an object as attributes of the same names."""
    if isinstance(made, (nn.Module, torch.Tensor)):
        return {}
    return kept_arguments(made)


def changes(then: Settings, now: Settings) -> list[str]:
    """Return a line for each setting with different values in two runs; a setting of only one run is skipped.

    >>> changes({"model.mu": 0.1, "data.seed": 1}, {"model.mu": 0.5, "data.seed": 1, "model.new": 3})
    ['model.mu: 0.1 then, 0.5 now']
    """
    lines = []
    for name in then:
        if name in now and then[name] != now[name]:
            one, other = shown(then[name], now[name])
            lines.append(f"{name}: {one} then, {other} now")
    return lines


def shown(then: Any, now: Any) -> tuple[str, str]:
    """Return two different values as texts; of texts with many lines and of long lists, the first difference only."""
    if isinstance(then, str) and isinstance(now, str):
        pairs = zip_longest(then.splitlines(), now.splitlines(), fillvalue="nothing")
        one, other = next(((one, other) for one, other in pairs if one != other), (then, now))
        return one.strip(), other.strip()
    one, other = (value if isinstance(value, str) else json.dumps(value) for value in (then, now))
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now) and len(one) > LONG:
        return next(shown(each, its) for each, its in zip(then, now, strict=True) if each != its)
    return one, other


def preprocessing_of(fitted: Mapping[str, Any], data: FederatedDataModule) -> tuple[Settings, Settings]:
    """Return a federation's preprocessing and a data module's, as settings with the same names.

    Values of each client are left out where the data took over the federation's: the data may have other clients.

    Args:
        fitted: the federation's ``preprocessing``; an empty one leaves both empty.
        data: the data module, set up.
    """
    both = [fitted, data.preprocessing] if fitted else [{}, {}]
    inputs, targets = ("mean", "deviation", *RANGE, "numbers", "category_fill"), ("target_mean", "target_deviation")
    for way, values in (("standardize", inputs), ("by", inputs), ("standardize_target", targets)):
        if data.adopted and fitted.get(way) == data.preprocessing.get(way) == "client":
            both = [{name: each[name] for name in each if name not in values} for each in both]
    then, now = (flat("data.preprocessing", each) for each in both)
    # Filled up with empty entries, so that a vocabulary that only one of the two has counts as a change.
    return dict.fromkeys(now) | then, dict.fromkeys(then) | now


def check_rounds(done: int, asked: int | None) -> None:
    """Refuse a checkpoint with more rounds than ``max_rounds``.

    Raises:
        MisconfigurationException: if the checkpoint has more.
    """
    if asked is not None and done > asked:
        raise MisconfigurationException(
            f"trainer.max_rounds={asked} is less than the {done} rounds that the checkpoint has done; give {done} or "
            "more."
        )


def check_settings(saved: Mapping[str, Any], now: Settings, accepted: bool) -> bool:
    """Refuse other settings than the checkpoint's run had, unless accepted, and log each difference.

    Args:
        saved: the checkpoint's entry ``federation``.
        now: this run's settings.
        accepted: whether to accept different settings.

    Returns:
        Whether settings differ.

    Raises:
        MisconfigurationException: if settings differ and ``accepted`` is False.
    """
    lines = changes(saved["settings"] | {"seed_everything": saved["seed"]}, now | chosen_seed())
    # each of them, as the refusal has room for some names only
    for line in lines:
        rank_zero_info(line)
    if lines and not accepted:
        named = [line.split(":")[0] for line in lines]
        names = ", ".join(named[:MANY]) + (f" and {len(named) - MANY} more" if len(named) > MANY else "")
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint's run had other settings of {names}; resume with the old settings, or with "
            "these by resume_changed=true."
        )
    return bool(lines)


def chosen_seed() -> Settings:
    """Return the seed set by ``seed_everything`` in this process; else empty, as a resumed run keeps its seed."""
    return {"seed_everything": torch.initial_seed()} if "PL_GLOBAL_SEED" in os.environ else {}
