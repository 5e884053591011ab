"""What a run is made with, as plain values, and whether a resumed run is still made with it."""

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

from pfl_lightning.aggregators.base import Aggregator
from pfl_lightning.client.arguments import kept_arguments
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.optimizers import Configured
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.federation.options import FederationOptions

Settings: TypeAlias = dict[str, Any]
"""Numbers, texts, truth values, None, and lists of them, by dotted names as on the command line."""

PLAIN = (bool, int, float, str)
BUILT = {"net", "optimizer", "lr_scheduler", "input_shape", "num_classes", "task"}
"""Arguments of client modules that are described by what they build, whoever wrote them down."""
UNTOLD = {
    "root",
    "download",
    "resident",
    "params",
    "initial_lr",
    "base_lrs",
    "_last_lr",
    "_class_path",
    "_instantiator",
}
"""Last parts of names of what can't matter, or is said by another setting."""
MANY = 10
"""Settings that a refusal names at most; a line says each of them before."""
LONG = 80
"""Letters of a list from which on only its first different entry is shown."""


def settings_of(
    architectures: Sequence[ClientModule], aggregator: Aggregator, data: FederatedDataModule, rounds: Settings
) -> Settings:
    """What decides over a federation's rounds: all but how, where and for how long they are run.

    Args:
        architectures: a client module of each, the configured one first.
        aggregator: the server side.
        data: the clients' data.
        rounds: the Trainer's settings, as `rounds_of` gives them.
    """
    client = architectures[0]
    own = {name: value for name, value in client.hparams.items() if name not in BUILT}
    return {
        **flat("trainer", rounds),
        **flat("model", own),
        "model.net": "\n".join(str(module.net) for module in architectures),
        **optimizer_of(client.configured()),
        **flat("aggregator", aggregator),
        **flat("data", data),
    }


def rounds_of(options: FederationOptions, trainer: Trainer, num_clients: int) -> Settings:
    """The Trainer's settings that rounds depend on, as far as they do."""
    clip: Settings = {"gradient_clip_val": options.clip or None}
    if options.clip:
        clip["gradient_clip_algorithm"] = options.clip_algorithm
    return {
        "cohort": options.cohort,
        "clients_per_round": f"{options.cohort_size(num_clients)} of {num_clients}",
        "local_epochs": None if options.local_steps is not None else options.local_epochs or 1,
        "local_steps": options.local_steps,
        "min_clients": options.min_clients,
        "example_privacy": options.example_privacy,
        "secure_sum": options.secure_sum,
        "attacks": attacks_of(trainer),
        "evaluate": options.evaluate,
        "test_every_round": options.test_every_round,
        **clip,
        "precision": trainer.precision,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": trainer.limit_val_batches,
    }


def attacks_of(trainer: Trainer) -> list[str]:
    """Those of the Trainer's callbacks that make clients bad, with their settings, in their order."""
    attacks = [callback for callback in cast(Any, trainer).callbacks if getattr(callback, "is_attack", False)]
    return [
        " ".join(str(value) if name == "" else f"{name[1:]}={value}" for name, value in flat("", attack).items())
        for attack in attacks
    ]


def optimizer_of(made: Configured) -> Settings:
    """Return the local optimizer's settings, of each group if there are several, and those of its schedule."""
    optimizer, scheduler = made.optimizer, made.scheduler
    # a schedule has moved the rate already
    groups = [group | {"lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups]
    name, schedule = "model.optimizer", "model.lr_scheduler"
    settings = {name: type(optimizer).__name__, schedule: scheduler and type(scheduler).__name__}
    settings |= flat(name, groups[0]) if len(groups) == 1 else flat(f"{name}.groups", groups)
    return settings if scheduler is None else settings | flat(schedule, scheduler.state_dict())


def flat(name: str, value: Any) -> Settings:
    """A value under its name, and what it consists of under longer names.

    An object is its class and, as far as it keeps them, the arguments that it was made with; what tells nothing of
    itself, such as a lambda, is left out.

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
        # the command line's form of an object
        named = {name: value["class_path"].rpartition(".")[2]} if "class_path" in value else {}
        parts = value.get("init_args", {}) if named else value
    elif isinstance(value, partial):
        # the command line's own has the class among its arguments
        made = next((part for part in (value.func, *value.args) if inspect.isclass(part)), value.func)
        named, parts = flat(name, made), value.keywords
    elif inspect.isclass(value) or inspect.isroutine(value):
        return {} if value.__name__ == "<lambda>" else {name: value.__name__}
    else:
        named, parts = {name: type(value).__name__}, arguments_of(value)
    return named | {key: each for part in parts for key, each in flat(f"{name}.{part}", parts[part]).items()}


def is_plain(value: Any) -> bool:
    """Whether a value can be kept as it is."""
    return value is None or isinstance(value, PLAIN)


def plain(value: Any) -> Any:
    """A plain value without a type of its own, such as NumPy's, which checkpoints don't take."""
    return next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)


def arguments_of(made: Any) -> Settings:
    """The arguments that an object was made with, as far as it keeps them: attributes of the same names."""
    if isinstance(made, (nn.Module, torch.Tensor)):
        return {}
    return kept_arguments(made)


def changes(then: Settings, now: Settings) -> list[str]:
    """A line for each setting that both know and that isn't the same.

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
    """Two different values as they are written; of texts with many lines, and long lists, the first different one."""
    if isinstance(then, str) and isinstance(now, str):
        pairs = zip_longest(then.splitlines(), now.splitlines(), fillvalue="nothing")
        one, other = next(((one, other) for one, other in pairs if one != other), (then, now))
        return one.strip(), other.strip()
    one, other = (value if isinstance(value, str) else json.dumps(value) for value in (then, now))
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now) and len(one) > LONG:
        return next(shown(each, its) for each, its in zip(then, now, strict=True) if each != its)
    return one, other


def check_rounds(done: int, asked: int | None) -> None:
    """Checks that a checkpoint has no more rounds than shall be run.

    Raises:
        MisconfigurationException: if it has.
    """
    if asked is not None and done > asked:
        raise MisconfigurationException(
            f"trainer.max_rounds={asked} is less than the {done} rounds that the checkpoint has done; give {done} or "
            "more."
        )


def check_settings(saved: Mapping[str, Any], now: Settings, accepted: bool) -> bool:
    """Checks that a run goes on as its checkpoint's run did, and says what it does otherwise.

    Args:
        saved: the checkpoint's entry ``federation``.
        now: the run's own settings.
        accepted: whether others than the checkpoint's are accepted.

    Returns:
        Whether settings differ.

    Raises:
        MisconfigurationException: if they differ and that isn't accepted.
    """
    # those of earlier versions have no settings
    then = saved["settings"] | {"seed_everything": saved["seed"]} if "settings" in saved else {}
    lines = changes(then, now | chosen_seed())
    for line in lines:
        rank_zero_info(line)
    if lines and not accepted:
        named = [line.split(":")[0] for line in lines]
        names = ", ".join(named[:MANY]) + (f" and {len(named) - MANY} more" if len(named) > MANY else "")
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint's run had other settings of {names}; resume with those that it had, or go on "
            "with these by resume_changed=true."
        )
    return bool(lines)


def chosen_seed() -> Settings:
    """The seed of this process, if ``seed_everything`` set one; a resumed run goes on with its checkpoint's."""
    return {"seed_everything": torch.initial_seed()} if "PL_GLOBAL_SEED" in os.environ else {}
