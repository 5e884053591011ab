"""Which classes a configuration from elsewhere may name."""

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import EllipsisType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.cli.configs import OPTIONS, find
from pfl_lightning.cli.yaml_text import load
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Partitioner
from pfl_lightning.flower.template import Refused
from pfl_lightning.privacy import DPSGD, SecureSum
from pfl_lightning.selection import Selection
from pfl_lightning.tasks import Task
from pfl_lightning.trainer import FederatedTrainer

KINDS = (
    *(ClientModule, Aggregator, Task, Optimizer, LRScheduler, Metric, nn.Module),
    *(FederatedDataModule, Partitioner, Selection, DPSGD, SecureSum, Callback, Logger),
)
PACKAGES = (
    *("pfl_lightning", "torch.nn", "torch.optim", "torchmetrics"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
SCALARS = (str, int, float, bool, Path, NoneType, EllipsisType)
HOLDERS = (list, tuple, dict, Sequence, Mapping, Union, UnionType)
LEVELS = ("class_path", "init_args", "dict_kwargs")
"""Keys between a class and its settings, which a command line may leave out."""
PLAIN = re.compile(r"[\w +-]*")


def check_class_paths(settings: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuses settings that name something else than a class of this library or of torch that training needs.

    Nets, client modules, losses, optimizers, schedules and metrics are such; functions aren't, nor is anything that a
    module has only imported. As the parser reads any text that it can as a name, as a file or as settings in one line,
    all texts count, whatever their settings: each is a word, a number or such a name.

    Args:
        settings: parsed settings, such as the ``model`` of a configuration.
        own: dotted names that the site allows beside.

    Raises:
        Refused: if they do.
    """
    for name, text in texts(settings, ""):
        check_text(name, text, own)


def check_text(name: str, text: str, own: Collection[str]) -> None:
    """Refuses one text, as `check_class_paths`."""
    if not (text in own or PLAIN.fullmatch(text) or is_number(text) or is_known(text)):
        raise Refused(
            f"{name}={text!r:.60} is neither a word, a number nor a class that this site knows; its operator can "
            f"allow a class by --node-config 'classes=\"mine.Net\"'."
        )


def check_arguments(args: Sequence[str], own: Collection[str] = ()) -> None:
    """Refuses a command line and its configurations as `check_class_paths`, before a parser imports what they name.

    The whole tree counts: ``model``, ``aggregator``, ``data``, ``trainer`` and anything else. Only settings that
    classes of this library annotate as texts, such as the paths of data, may be any text.

    Args:
        args: of ``pfl-lightning fit``.
        own: dotted names that the site allows beside.

    Raises:
        Refused: if they name something else, or can't be read.
    """
    found = [pair for tree in trees(args) for pair in texts(tree, "")]
    # whatever file names the class of a setting: the parser joins them
    classes: defaultdict[str, set[type]] = defaultdict(set, {"trainer": {FederatedTrainer}})
    for name, text in found:
        # before any of them is looked up
        if name.endswith("class_path"):
            check_text(name, text, own)
    for name, text in found:
        classes[short(name)] |= set(named(text, own))
    for name, text in found:
        if name.endswith("class_path") or not is_any_text(short(name), text, classes):
            check_text(name, text, own)


def trees(args: Sequence[str]) -> Iterator[Any]:
    """The settings of a command line: of each file, and of each option."""
    words = list(args)
    while words:
        option, is_joined, value = words.pop(0).partition("=")
        if not option.startswith("-"):
            # belongs to no option
            yield {option: option + is_joined + value}
            continue
        if not is_joined and words and not words[0].startswith("--"):
            value = words.pop(0)
        if option.startswith("-c") and option not in OPTIONS:
            option, value = "-c", option[2:] + is_joined + value
        try:
            if option in OPTIONS:
                file = find(value)
                yield load(value if file is None else file.read_text())
            else:
                yield {option.lstrip("-"): read(value)}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise Refused(f"{option}={value!r:.60} can't be read ({type(error).__name__}).") from error


def read(text: str) -> Any:
    """What a parser may read a text as: settings, or the text."""
    try:
        return load(text)
    except yaml.YAMLError:
        return text


def short(name: str) -> str:
    """A setting's dotted name as a command line may have it.

    >>> short("data.init_args.partitioner.class_path"), short("trainer.callbacks+")
    ('data.partitioner', 'trainer.callbacks')
    """
    return ".".join(part.rstrip("+") for part in name.split(".") if part not in LEVELS)


def named(text: str, own: Collection[str]) -> Iterator[type]:
    """The classes that a text may name, of those that configurations may name."""
    if text in own or is_known(text):
        module, _, name = text.rpartition(".")
        made = getattr(import_module(module), name, None) if module else None
        if inspect.isclass(made):
            yield made
    elif text.isidentifier():
        kinds: list[type] = list(KINDS)
        while kinds:
            kind = kinds.pop()
            kinds += type.__subclasses__(kind)
            if kind.__name__ == text and kind.__module__.startswith(PACKAGES):
                yield kind


def is_any_text(name: str, text: str, classes: Mapping[str, Collection[type]]) -> bool:
    """Whether a setting, or one that it is a part of, is by all its classes' annotations a text and nothing else."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        owners = classes.get(".".join(parts[:end]), ())
        hints = [hint for owner in owners if (hint := annotation(owner, parts[end])) is not None]
        # where anything goes, settings in one line are read as such
        of_text = end == len(parts) - 1 and isinstance(read(text), str)
        if hints and all(is_plain(hint) or (hint is Any and of_text) for hint in hints):
            return True
    return False


def annotation(kind: type, name: str) -> Any:
    """What a class says of an argument; None where it has none of that name."""
    for owner in kind.__mro__:
        made = vars(owner).get("__init__")
        try:
            hints = get_type_hints(made) if inspect.isfunction(made) else {}
        except (NameError, TypeError):
            continue
        if name in hints:
            return hints[name]
    return None


def is_plain(hint: Any) -> bool:
    """Whether an annotation is of texts, numbers, and lists and mappings of them.

    >>> is_plain(dict[str, list[str | int]] | None), is_plain(str | type), is_plain(Any)
    (True, False, False)
    """
    if get_origin(hint) is Literal:
        return True
    return (
        any(hint is kind for kind in SCALARS)
        or hint is ...
        or (get_origin(hint) in HOLDERS and all(map(is_plain, get_args(hint))))
    )


def texts(settings: Any, name: str) -> Iterator[tuple[str, str]]:
    """All texts in settings, with their dotted names."""
    if isinstance(settings, str):
        yield name, settings
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from texts(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list | tuple | set | frozenset):
        for value in settings:
            yield from texts(value, name)


def is_number(text: str) -> bool:
    """Whether a text is of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_known(path: str) -> bool:
    """Whether a dotted name is of a class that training needs, in the module that it names.

    >>> is_known("torch.optim.SGD"), is_known("torch.optim.optimizer.functools.partial"), is_known("os.system")
    (True, False, False)
    """
    module, _, name = path.rpartition(".")
    if not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        return False
    try:
        # of these packages only: their modules do nothing but define
        made = getattr(import_module(module), name, None)
    except Exception:
        return False
    return inspect.isclass(made) and issubclass(made, KINDS) and made.__module__.startswith(PACKAGES)
