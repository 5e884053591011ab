"""Mistakes that a look at the words of a command line tells, in the parser's own sentences but seconds before it."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import yaml

from pfl_lightning.cli.commands import OTHERS, TRAINER
from pfl_lightning.cli.configs import OPTIONS as FILE
from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.exclusive import grouped
from pfl_lightning.cli.suggestions import nearest_option, suggestion
from pfl_lightning.cli.usage import UsageError, one_line
from pfl_lightning.cli.yaml_text import RefusedYAML, check, load

STORED = Path(__file__).with_name("options.json")
"""The Trainer's commands' options, which ``python -m pfl_lightning.cli.options`` prints and the tests keep true."""

PACKAGES = ("lightning", "jsonargparse")
"""What options there are depends on their versions."""


class Options(NamedTuple):
    """Names of options, without dashes."""

    versions: dict[str, str]
    """The packages whose versions they are of."""
    commands: dict[str, str]
    """Each option with the commands that take it, separated by spaces."""
    open: list[str]
    """Those below which there may be more, as classes have settings."""
    explained: list[str]
    """Those that no command takes, and that have a sentence of their own."""

    def may_be(self, name: str, command: str) -> bool:
        """Whether a command may take an option."""
        parts = name.removesuffix("+").split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
        takes = name.removesuffix("+") in self.of(command)
        return takes or name in self.explained or not above.isdisjoint(self.open)

    def of(self, command: str) -> list[str]:
        """The options that a command takes."""
        return [name for name, commands in self.commands.items() if command in commands.split()]


def refuse_at_sight(words: Sequence[str]) -> None:
    """Refuse a missing or mistyped command, a mistyped option, and a configuration that isn't there or can't be read.

    What can't be told for sure without classes and their settings is left to the parser.

    Args:
        words: the command's arguments.

    Raises:
        UsageError: as the parser would put it.
    """
    if not words:
        raise UsageError(command_is_missing())
    command, *rest = words
    if command in OTHERS or command.startswith("-"):
        return
    if command not in TRAINER:
        raise UsageError(no_command(command))
    options = stored()
    arguments = [pair(group) for group in grouped(rest)]
    mistyped = [name for name, _ in arguments if name not in FILE and not options.may_be(name[2:], command)]
    if not all(is_regular(name, value, name in mistyped) for name, value in arguments):
        return
    for name, value in arguments:
        if name in FILE:
            refuse_file(str(value))
        refuse_value(name, str(value))
    if mistyped and options.versions == installed():
        raise UsageError(no_option(mistyped[0][2:], options.of(command)))


def stored() -> Options:
    """The options as they are stored."""
    return Options(**json.loads(STORED.read_text(encoding="utf-8")))


def installed() -> dict[str, str]:
    """The versions that are here."""
    return {name: version(name) for name in PACKAGES}


def pair(group: Sequence[str]) -> tuple[str, str | None]:
    """An option and its value, given in one word or in two."""
    name, equals, value = group[0].partition("=")
    return name, value if equals else group[1] if len(group) > 1 else None


def is_regular(name: str, value: str | None, mistyped: bool) -> bool:
    """Whether a word is an option with its value, if it takes one, and asks for no help."""
    if name.endswith((".help", "--help", "--print_config")):
        return False
    is_option = name == "-c" or re.fullmatch(r"--[a-z][\w.]*\+?", name) is not None
    return is_option and (mistyped or value is not None)


def refuse_file(file: str) -> None:
    """Refuse a configuration that isn't there, or whose text can't be taken.

    Args:
        file: a path, or the name of a packaged configuration, or settings in its place.

    Raises:
        UsageError: as the parser would put it; of a file that can't be read, or is no text, it tells itself.
    """
    if is_missing(file):
        raise UsageError(no_config(Path(Path.cwd(), file)))
    if (path := find(file)) is None:
        return
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
        try:
            check(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{path}: {no_yaml(str(error))}") from error


def refuse_value(option: str, value: str) -> None:
    """Refuse a value that is YAML with a key twice, or more than any configuration.

    Args:
        option: the option, with dashes.
        value: what is given to it, which can be any text.

    Raises:
        UsageError: if it is so.
    """
    # most of those that aren't YAML are texts, and of the others the parser tells
    with suppress(yaml.YAMLError):
        try:
            check(value)
        except RefusedYAML as error:
            raise UsageError(f"{option}: {error}") from error


def is_missing(file: str) -> bool:
    """Whether what is given as a configuration is a path, or a name, and there is no such file."""
    if find(file) is not None or os.path.exists(file) or not re.fullmatch(r"[A-Za-z./][\w./-]*", file):
        return False
    # settings can stand in a file's place
    return isinstance(load(file), str)


def command_is_missing() -> str:
    """The sentence where no command is given."""
    return f"a command is missing; choose from {', '.join([*TRAINER, *OTHERS])}."


def no_command(name: str) -> str:
    """The sentence about a command that there is not."""
    return f"{name!r} is not a command{suggestion(name, [*TRAINER, *OTHERS])}"


def no_option(name: str, options: Iterable[str]) -> str:
    """The sentence about an option that there is not.

    Args:
        name: what was given, without dashes.
        options: those that the command takes, without dashes.
    """
    return f"{name} is not an option{nearest_option(name, options)}"


def no_yaml(reason: str) -> str:
    """Return the sentence about a configuration whose text can't be taken.

    Args:
        reason: why, in a sentence of `yaml_text.check` or in the words of YAML's reader, with a picture of the place
            behind an empty line.
    """
    if reason.startswith("the YAML "):
        return reason
    place = re.sub(r'in "<[a-z ]+>",', "at", reason.partition("\n\n")[0])
    return one_line(f"the configuration is not valid YAML: {place}")


def no_config(path: Path) -> str:
    """The sentence about a configuration that isn't there.

    Args:
        path: the whole path.
    """
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    if shown == Path("."):
        return f"--config {path} is no file."
    return f"--config {shown} is no file{nearest(str(shown))}"
