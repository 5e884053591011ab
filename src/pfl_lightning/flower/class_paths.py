"""Check the class names in a configuration from a server, before a site's parser imports anything."""

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
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

from pfl_lightning.cli.argv import CONFIG
from pfl_lightning.cli.configs import find
from pfl_lightning.cli.yaml_text import load
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Partitioner, Preprocessing
from pfl_lightning.flower.template import Refused
from pfl_lightning.privacy import DPSGD, SecureSum
from pfl_lightning.selection import Selection
from pfl_lightning.server import Aggregator
from pfl_lightning.tasks import Task
from pfl_lightning.trainer import FederatedTrainer

KINDS = (
    *(ClientModule, Aggregator, Task, Optimizer, LRScheduler, Metric, nn.Module),
    *(FederatedDataModule, Partitioner, Preprocessing, Selection, DPSGD, SecureSum, Callback, Logger),
)
PACKAGES = (
    *("pfl_lightning", "torch.nn", "torch.optim", "torchmetrics"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
# with None, for optional settings, and with the dots of `tuple[int, ...]`
SCALARS = (str, int, float, bool, Path, NoneType, EllipsisType)
HOLDERS = (list, tuple, dict, Sequence, Mapping, Union, UnionType)
LEVELS = ("class_path", "init_args", "dict_kwargs")
"""Keys between a class and the settings of the class; optional on a command line."""
# without dots and slashes, and so neither an importable name nor a path outside the folder
PLAIN = re.compile(r"[\w +-]*")


def check_class_paths(settings: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuse settings with a text other than a word, a number or the name of a class for training.

    Names of nets, client modules, losses, optimizers, schedules and metrics of this library and of torch pass; names of
    functions don't, and names in a module that only imports the class don't either. The parser may read any text as a
    name, a file or settings in one line, and so all texts are checked, under whatever setting.

    Args:
        settings: parsed settings, such as the ``model`` of a configuration.
        own: dotted names that the site allows too.

    Raises:
        Refused: if a text is none of these.
    """
    for name, text in texts(settings, ""):
        check_text(name, text, own)


def check_text(name: str, text: str, own: Collection[str]) -> None:
    """Refuse one text of a setting, as `check_class_paths` does."""
    if not (text in own or PLAIN.fullmatch(text) or is_number(text) or is_known(text)):
        raise Refused(
            f"{name}={text!r:.60} is neither a word, a number nor a class that this site knows; its operator can "
            f"allow a class by --node-config 'classes=\"mine.Net\"'."
        )


def check_arguments(args: Sequence[str], own: Collection[str] = ()) -> None:
    """Refuse a command line and the command line's configurations by the rule of `check_class_paths`, before parsing.

    The parser imports named classes, hence the check comes first. All settings are checked: ``model``, ``aggregator``,
    ``data``, ``trainer`` and any other. A setting may have any text only if its class annotates it as a text, such as
    the path of data.

    Args:
        args: arguments of ``pfl-lightning fit``.
        own: dotted names that the site allows too.

    Raises:
        Refused: if a text is refused, or a configuration can't be read.
    """
    settings = [pair for tree in trees(args) for pair in texts(tree, "")]
    # over all files: one may name a class, another may have its settings, and the parser joins both
    classes: defaultdict[str, set[type]] = defaultdict(set, {"trainer": {FederatedTrainer}})
    for name, text in settings:
        # in a loop of its own, as the next loop imports named classes
        if name.endswith("class_path"):
            check_text(name, text, own)
    for name, text in settings:
        classes[short(name)] |= set(named(text, own))
    for name, text in settings:
        # a class stays checked where an annotation would allow any text
        if name.endswith("class_path") or not is_any_text(short(name), text, classes):
            check_text(name, text, own)


def trees(args: Sequence[str]) -> Iterator[Any]:
    """Yield the settings of each file and of each option of a command line."""
    words = list(args)
    while words:
        option, is_joined, value = words.pop(0).partition("=")
        if not option.startswith("-"):
            # a word without an option, under its own text as the setting's name
            yield {option: option + is_joined + value}
            continue
        if not is_joined and words and not words[0].startswith("--"):
            value = words.pop(0)
        # argparse takes "-cFILE" for "-c FILE"
        if option.startswith("-c") and option not in CONFIG:
            option, value = "-c", option[2:] + is_joined + value
        try:
            if option in CONFIG:
                file = find(value)
                yield load(value if file is None else file.read_text(encoding="utf-8"))
            else:
                yield {option.lstrip("-"): read(value)}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise Refused(f"{option}={value!r:.60} can't be read ({type(error).__name__}).") from error


def read(text: str) -> Any:
    """Return the content of a text in YAML; the text where YAML can't be read."""
    try:
        return load(text)
    except yaml.YAMLError:
        return text


def short(name: str) -> str:
    """Return the short form of a setting's dotted name, as on a command line.

    >>> short("data.init_args.partitioner.class_path"), short("trainer.callbacks+")
    ('data.partitioner', 'trainer.callbacks')
    """
    return ".".join(part.rstrip("+") for part in name.split(".") if part not in LEVELS)


def named(text: str, own: Collection[str]) -> Iterator[type]:
    """Yield the classes with a given name, among the classes allowed in configurations."""
    module, _, name = text.rpartition(".")
    if module and (text in own or is_known(text)):
        made = getattr(import_module(module), name, None)
        if inspect.isclass(made):
            yield made
    # the parser resolves a bare class name among all loaded subclasses
    elif text.isidentifier():
        kinds: list[type] = list(KINDS)
        while kinds:
            kind = kinds.pop()
            kinds += type.__subclasses__(kind)
            if kind.__name__ == text and kind.__module__.startswith(PACKAGES):
                yield kind


def is_any_text(name: str, text: str, classes: Mapping[str, Collection[type]]) -> bool:
    """Return True for a setting, or part of a setting, with plain annotations in all classes; see `is_plain`."""
    parts = name.split(".")
    hints: list[Any] = []
    for end in range(1, len(parts)):
        # settings may be a dataclass by their annotation alone, without a class path
        settings = {kind for hint in hints for kind in (hint, *get_args(hint)) if isinstance(kind, type)}
        owners = {*classes.get(".".join(parts[:end]), ()), *filter(is_dataclass, settings)}
        hints = [hint for owner in owners if (hint := annotation(owner, parts[end])) is not None]
        # under the annotation Any the parser would read settings in one line, with classes in them
        of_text = end == len(parts) - 1 and isinstance(read(text), str)
        if hints and all(is_plain(hint) or (hint is Any and of_text) for hint in hints):
            return True
    return False


def annotation(kind: type, name: str) -> Any:
    """Return a class's annotation of an argument; None for a class without the argument."""
    # base classes too, which take what a class passes on by **kwargs
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
    """Return True for an annotation of texts, numbers, or lists and mappings of texts and numbers.

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
    """Yield the dotted name and the text of each setting with a text, at any depth."""
    if isinstance(settings, str):
        yield name, settings
    elif isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from texts(value, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list | tuple | set | frozenset):
        for value in settings:
            yield from texts(value, name)


def is_number(text: str) -> bool:
    """Return True for the text of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_known(path: str) -> bool:
    """Return True for the dotted name of an importable class for training, such as a net or an optimizer.

    >>> is_known("torch.optim.SGD"), is_known("torch.optim.optimizer.functools.partial"), is_known("os.system")
    (True, False, False)
    """
    module, _, name = path.rpartition(".")
    if not any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        return False
    try:
        # importing runs a module's code, and modules of these packages only define
        made = getattr(import_module(module), name, None)
    except Exception:
        return False
    return inspect.isclass(made) and issubclass(made, KINDS) and made.__module__.startswith(PACKAGES)
