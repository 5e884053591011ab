"""Settings that exclude each other, of which the later one holds, as of one setting that is given twice."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.cli.yaml_text import load

PAIR = ("local_epochs", "local_steps")
"""Settings of the Trainer that exclude each other."""


def later_wins(words: Sequence[str]) -> list[str]:
    """A command line on which a file or an option that gives one of the pair takes the other one back.

    A file that gives both, and a command line that does so by its own options, stay as they are, and are refused.

    >>> later_wins(["fit", "--config", "gone.yaml", "--trainer.local_steps", "5"])
    ['fit', '--config', 'gone.yaml', '--trainer.local_steps', '5', '--trainer.local_epochs', 'null']
    """
    arguments = grouped(words)
    options = {name for argument in arguments for name in by_option(argument)}
    result: list[str] = []
    for argument in arguments:
        given = by_file(argument) + (by_option(argument) if len(options) == 1 else [])
        result += argument
        if len(given) == 1:
            (other,) = set(PAIR) - set(given)
            result += [f"--trainer.{other}", "null"]
    return result


def grouped(words: Sequence[str]) -> list[list[str]]:
    """Words, each with its value if it is an option that has one behind it."""
    groups: list[list[str]] = []
    for word in words:
        last = groups[-1] if groups else [""]
        if len(last) == 1 and last[0].startswith("-") and "=" not in last[0] and not word.startswith("-"):
            last.append(word)
        else:
            groups.append([word])
    return groups


def value_of(argument: list[str], *options: str) -> str | None:
    """The value that an argument gives to one of some options."""
    option, _, value = "=".join(argument).partition("=")
    return value if option in options and value else None


def by_option(argument: list[str]) -> list[str]:
    """Which of the pair an option gives; null gives none."""
    return [name for name in PAIR if value_of(argument, f"--trainer.{name}") not in (None, "null")]


def by_file(argument: list[str]) -> list[str]:
    """Which of the pair a file gives; a file that can't be read is for the parser to refuse."""
    path = value_of(argument, "-c", "--config")
    settings = None if path is None else settings_in(path)
    trainer = settings.get("trainer") if isinstance(settings, dict) else None
    return [name for name in PAIR if isinstance(trainer, dict) and trainer.get(name) is not None]


def settings_in(path: str) -> Any:
    """Return the content of a configuration; None where it can't be read, which is for the parser to refuse.

    Args:
        path: a file; None is returned for a pipe, which only the parser can read, as it can be read once.
    """
    try:
        return load(Path(path).read_text(encoding="utf-8")) if os.path.isfile(path) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
