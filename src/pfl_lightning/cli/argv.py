"""Read a command line once, and complete it for the parser.

`CommandLine` holds the command, every option with its value, and the settings of every configuration. All that looks at
a command line before the parser looks at this object.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.cli.configs import find
from pfl_lightning.cli.yaml_text import load

CONFIG = ("--config", "-c")
"""Options that take a configuration."""
MEAN = "--aggregator.mean"
FOREIGN = re.compile(r"(?<![\w./])(?!(?:pfl_lightning|lightning|torch)\.)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""Dotted names of other packages than this one, Lightning and torch."""
METHODS = ("--methods", "--table")
"""Options of a comparison that name methods, or a table of methods."""
PAIR = ("local_epochs", "local_steps")
"""The two settings of the Trainer that exclude each other."""


@dataclass(frozen=True)
class Argument:
    """An option with its value, or a word without an option.

    Args:
        name: the option, with dashes; for a word without an option, the word.
        value: the given text; None without one.
        words: the argument as given, in one word or in two.
    """

    name: str
    value: str | None
    words: tuple[str, ...]

    @property
    def resolved(self) -> list[str]:
        """The argument's words, with the path of a configuration in place of the configuration's name."""
        if self.name not in CONFIG or not self.value:
            return list(self.words)
        path = str(find(self.value) or self.value)
        return [self.name, path] if len(self.words) == 2 else [f"{self.name}={path}"]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of a configuration; empty for another option, and for a file that can't be read."""
        read = settings_in(str(find(self.value) or self.value)) if self.name in CONFIG and self.value else None
        return read if isinstance(read, dict) else {}

    def class_of(self, setting: str) -> str | None:
        """Return the class given to a setting, by option or by configuration; None if none is given.

        Args:
            setting: ``model`` or ``aggregator``.
        """
        if self.name in (f"--{setting}", f"--{setting}.class_path"):
            return self.value or None
        given = self.settings.get(setting)
        return given.get("class_path") if isinstance(given, dict) else given if isinstance(given, str) else None

    @property
    def budget(self) -> list[str]:
        """The settings of `PAIR` that the argument sets; ``null`` sets none."""
        trainer = self.settings.get("trainer")
        if isinstance(trainer, dict):
            return [name for name in PAIR if trainer.get(name) is not None]
        return [name for name in PAIR if self.name == f"--trainer.{name}" and self.value not in ("", "null", None)]


class CommandLine:
    """A command line, read once.

    >>> line = CommandLine(["fit", "--data", "Digits", "--trainer.devices=1", "-cquickstart"])
    >>> line.command, [(argument.name, argument.value) for argument in line.arguments]
    ('fit', [('--data', 'Digits'), ('--trainer.devices', '1'), ('-c', 'quickstart')])

    Args:
        words: the words after the program's name.

    Attributes:
        words: the given words.
        command: the first word; empty if it is an option, or there is none.
        arguments: the other words, as arguments in their order.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.command = words[0] if words and not words[0].startswith("-") else ""
        self.arguments = list(arguments_in(words[1:] if self.command else words))

    @property
    def foreign(self) -> list[str]:
        """Names of classes and functions of other packages than this one, Lightning and torch, also in configurations.

        A comparison's files of methods aren't read: each of the user's own counts as such a name.

        >>> CommandLine(["fit", "--model", "mine.Confident", "--data", "pfl_lightning.data.Digits"]).foreign
        ['mine.Confident']
        """
        given = [argument.settings or argument.value for argument in self.arguments]
        own: list[str] = []
        if self.command in ("advise", "compare"):
            # behind --methods, all words but the first are arguments of their own
            bare = [argument.name for argument in self.arguments if not argument.name.startswith("-")]
            named = [argument.value or "" for argument in self.arguments if argument.name in METHODS]
            own = [part for word in bare + named for part in word.split("+") if is_own(part)]
            own += [argument.name for argument in self.arguments if argument.name == "--configs"]
            given += bare
        return own + [name for text in texts_in(given) for name in FOREIGN.findall(text)]

    def completed(self, own_server: Callable[[str], str]) -> list[str]:
        """Return the words for the parser, which takes paths of configurations and classes by name alone.

        Names of configurations become paths. ``--aggregator CLASS`` is put before ``--aggregator.mean`` if the line
        names no aggregator, as the parser couldn't tell whose mean it is. The later of ``trainer.local_epochs`` and
        ``trainer.local_steps`` holds, like the later value of a single setting; both in one file, or both as options,
        stay as given, and the Trainer refuses the two.

        >>> CommandLine(["fit", "--trainer.local_steps", "5"]).completed(str)
        ['fit', '--trainer.local_steps', '5', '--trainer.local_epochs', 'null']
        >>> CommandLine(["fit", "--model", "FedAvg", "--aggregator.mean", "Krum"]).completed(lambda model: "Own")
        ['fit', '--model', 'FedAvg', '--aggregator', 'Own', '--aggregator.mean', 'Krum']

        Args:
            own_server: returns the class of a client module's own aggregator, by the client module's class.
        """
        result = [self.command] if self.command else []
        mean = next((each for each in self.arguments if each.name == MEAN or each.name.startswith(f"{MEAN}.")), None)
        if any(argument.class_of("aggregator") for argument in self.arguments):
            mean = None
        # two options of one command line contradict each other; an option behind a file replaces the file's
        by_option = {name for argument in self.arguments if not argument.settings for name in argument.budget}
        for argument in self.arguments:
            if argument is mean:
                # reversed, as the last --model or --config holds; FedAvg is the command line's default
                models = (each.class_of("model") for each in reversed(self.arguments))
                result += ["--aggregator", own_server(next(filter(None, models), "FedAvg"))]
            result += argument.resolved
            if len(argument.budget) == 1 and (argument.settings or len(by_option) == 1):
                (other,) = set(PAIR) - set(argument.budget)
                result += [f"--trainer.{other}", "null"]
        return result


def is_own(name: str) -> bool:
    """Return True for the name of a file of the user's, with or without ``.yaml``."""
    return os.path.isfile(name) or os.path.isfile(f"{name}.yaml")


def texts_in(record: Any) -> Iterator[str]:
    """Yield the texts in nested lists and dicts."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, (list, dict)):
        for value in record.values() if isinstance(record, dict) else record:
            yield from texts_in(value)


def arguments_in(words: Sequence[str]) -> Iterator[Argument]:
    """Yield the arguments of a command line: each option with its value, and each word without an option.

    Args:
        words: the words behind the command.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, joined, value = word.partition("=")
        if not word.startswith("-"):
            yield Argument(word, None, (word,))
        elif word.startswith("-c") and name != "-c":
            # argparse takes "-cFILE" for "-c FILE"
            yield Argument("-c", word[2:], (word,))
        elif joined:
            yield Argument(name, value, (word,))
        elif rest and not rest[0].startswith("-"):
            yield Argument(word, rest[0], (word, rest.pop(0)))
        else:
            yield Argument(word, None, (word,))


def resolved(words: Sequence[str]) -> list[str]:
    """Replace names of packaged configurations on a command line by their paths.

    Args:
        words: the command's arguments; unknown names stay, and the parser refuses each.
    """
    return [word for argument in arguments_in(words) for word in argument.resolved]


def settings_in(path: str) -> Any:
    """Return the content of a configuration, or None if reading fails: the parser then reports the error.

    Args:
        path: path of the configuration; None is returned for a pipe, which can be read only once, by the parser.
    """
    try:
        return load(Path(path).read_text(encoding="utf-8")) if os.path.isfile(path) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
