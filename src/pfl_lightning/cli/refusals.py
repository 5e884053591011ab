"""Refuse mistyped commands and unreadable configurations, seconds before the parser is imported, in its sentences."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import yaml

from pfl_lightning.cli.argv import CONFIG, Argument, CommandLine
from pfl_lightning.cli.commands import OTHERS, TRAINER
from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.suggestions import nearest_option, suggestion
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.cli.yaml_text import RefusedYAML, check, load, no_yaml


def refuse_at_sight(line: CommandLine) -> None:
    """Refuse an unknown command, and a configuration missing or with invalid YAML.

    Options are left to the parser, which knows them seconds later from the classes themselves.

    Args:
        line: the command line.

    Raises:
        UsageError: with the parser's own sentence.
    """
    if not line.words:
        raise UsageError(command_is_missing())
    # other commands read their words by themselves, in little time
    if line.command in OTHERS or not line.command:
        return
    if line.command not in TRAINER:
        raise UsageError(no_command(line.command))
    # help and stray words are the parser's: it must see the line as given
    if not all(map(is_regular, line.arguments)):
        return
    for argument in line.arguments:
        if argument.name in CONFIG:
            refuse_file(str(argument.value))
        refuse_value(argument.name, str(argument.value))


def is_regular(argument: Argument) -> bool:
    """Return True for an option with a value, False for help and for words without an option."""
    if argument.name.endswith((".help", "--help", "--print_config")):
        return False
    is_option = argument.name == "-c" or re.fullmatch(r"--[a-z][\w.]*\+?", argument.name) is not None
    # whether an option may stand without a value depends on the option's type, which the parser knows
    return is_option and argument.value is not None


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
    # the parser has a sentence for a file without permission, and one for bytes that are no text
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
