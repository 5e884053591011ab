"""Refuse mistakes visible in argv alone, seconds before the parser is imported, in the parser's own sentences."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import yaml

from pfl_lightning.cli.argv import grouped
from pfl_lightning.cli.commands import OTHERS, TRAINER
from pfl_lightning.cli.configs import OPTIONS as FILE
from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.suggestions import nearest_option, suggestion
from pfl_lightning.cli.usage import UsageError, one_line
from pfl_lightning.cli.yaml_text import RefusedYAML, check, load

STORED = Path(__file__).with_name("options.json")
"""Options of the Trainer's commands, printed by ``python -m pfl_lightning.cli.options``; tests keep the file true."""

PACKAGES = ("lightning", "jsonargparse")
"""Packages whose versions decide which options exist."""


class Options(NamedTuple):
    """Names of the Trainer's commands' options, without dashes."""

    versions: dict[str, str]
    """Versions of the packages with which the names were listed."""
    commands: dict[str, str]
    """Names of the commands that take each option, separated by spaces."""
    open: list[str]
    """Options that name a class, so that more options may exist below."""
    explained: list[str]
    """Options that no command takes, but that the parser refuses with advice."""

    def may_be(self, name: str, command: str) -> bool:
        """Return True if a command may take an option; only the parser knows the options below a class."""
        parts = name.removesuffix("+").split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
        takes = name.removesuffix("+") in self.of(command)
        return takes or name in self.explained or not above.isdisjoint(self.open)

    def of(self, command: str) -> list[str]:
        """Return the options of a command."""
        return [name for name, commands in self.commands.items() if command in commands.split()]


def refuse_at_sight(words: Sequence[str]) -> None:
    """Refuse an unknown command, a mistyped option, and a configuration missing or with invalid YAML.

    Everything that depends on classes and their settings is left to the parser.

    Args:
        words: the command's arguments.

    Raises:
        UsageError: with the parser's own sentence.
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
    # help and stray words are the parser's: it must see the line as given
    if not all(is_regular(name, value, name in mistyped) for name, value in arguments):
        return
    for name, value in arguments:
        if name in FILE:
            refuse_file(str(value))
        refuse_value(name, str(value))
    # a list made with another Lightning may lack an option that exists here, so it refuses nothing
    if mistyped and options.versions == installed():
        raise UsageError(no_option(mistyped[0][2:], options.of(command)))


def stored() -> Options:
    """Return the options in ``options.json``."""
    return Options(**json.loads(STORED.read_text(encoding="utf-8")))


def installed() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`."""
    return {name: version(name) for name in PACKAGES}


def pair(group: Sequence[str]) -> tuple[str, str | None]:
    """Split an argument into option and value, given as ``--name=value`` or as two words."""
    name, equals, value = group[0].partition("=")
    return name, value if equals else group[1] if len(group) > 1 else None


def is_regular(name: str, value: str | None, mistyped: bool) -> bool:
    """Return True for an option with a value, False for help and for words without an option."""
    if name.endswith((".help", "--help", "--print_config")):
        return False
    is_option = name == "-c" or re.fullmatch(r"--[a-z][\w.]*\+?", name) is not None
    return is_option and (mistyped or value is not None)


def refuse_file(file: str) -> None:
    """Refuse a missing configuration, or invalid YAML.

    A file that can't be opened, or isn't text, is left to the parser.

    Args:
        file: a path, the name of a packaged configuration, or YAML itself.

    Raises:
        UsageError: with the parser's own sentence.
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
    """Refuse a value with a key given twice, or larger than any configuration.

    Args:
        option: the option, with dashes.
        value: the given text, not necessarily YAML.

    Raises:
        UsageError: if the value is YAML of that kind.
    """
    # text that isn't YAML is a plain string for most options; for the others the parser complains
    with suppress(yaml.YAMLError):
        try:
            check(value)
        except RefusedYAML as error:
            raise UsageError(f"{option}: {error}") from error


def is_missing(file: str) -> bool:
    """Return True if a configuration is given by a path or a name, and no such file exists."""
    if find(file) is not None or os.path.exists(file) or not re.fullmatch(r"[A-Za-z./][\w./-]*", file):
        return False
    # --config also takes YAML itself, such as "trainer: {max_rounds: 3}"
    return isinstance(load(file), str)


def command_is_missing() -> str:
    """Return the sentence for a missing command."""
    return f"a command is missing; choose from {', '.join([*TRAINER, *OTHERS])}."


def no_command(name: str) -> str:
    """Return the sentence for an unknown command."""
    return f"{name!r} is not a command{suggestion(name, [*TRAINER, *OTHERS])}"


def no_option(name: str, options: Iterable[str]) -> str:
    """Return the sentence for an unknown option.

    Args:
        name: the given name, without dashes.
        options: options of the command, without dashes.
    """
    return f"{name} is not an option{nearest_option(name, options)}"


def no_yaml(reason: str) -> str:
    """Return the sentence for a configuration with invalid YAML.

    Args:
        reason: a sentence of `yaml_text.check`, or PyYAML's message with an excerpt of the file after a blank line.
    """
    if reason.startswith("the YAML "):
        return reason
    # the excerpt goes: one sentence holds no picture of several lines
    place = re.sub(r'in "<[a-z ]+>",', "at", reason.partition("\n\n")[0])
    return one_line(f"the configuration is not valid YAML: {place}")


def no_config(path: Path) -> str:
    """Return the sentence for a missing configuration.

    Args:
        path: the absolute path.
    """
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    # the working folder itself, as of `--config .`; similar names would be noise
    if shown == Path("."):
        return f"--config {path} is no file."
    return f"--config {shown} is no file{nearest(str(shown))}"
