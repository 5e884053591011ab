"""Resolve ``trainer.local_epochs`` against ``trainer.local_steps``: the later of the two on a command line holds.

The Trainer refuses both together. A file that sets the one and a flag that sets the other are no mistake, though: later
arguments replace earlier ones, as for any single setting.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pfl_lightning.cli.yaml_text import load

PAIR = ("local_epochs", "local_steps")
"""The two settings of the Trainer that exclude each other."""


def later_wins(words: Sequence[str]) -> list[str]:
    """Append ``--trainer.OTHER null`` behind each file or option with one setting of the pair.

    Both in one file, or both as options, stay as given, and the Trainer refuses the two.

    >>> later_wins(["fit", "--config", "gone.yaml", "--trainer.local_steps", "5"])
    ['fit', '--config', 'gone.yaml', '--trainer.local_steps', '5', '--trainer.local_epochs', 'null']

    Args:
        words: the command's arguments, with paths of configurations.
    """
    arguments = grouped(words)
    # two options of the same command line contradict each other; an option behind a file replaces the file's
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
    """Group argv into ``[option]``, ``[option, value]`` and ``[word]`` lists.

    >>> grouped(["fit", "--data", "Digits", "--trainer.devices=1"])
    [['fit'], ['--data', 'Digits'], ['--trainer.devices=1']]
    """
    groups: list[list[str]] = []
    for word in words:
        last = groups[-1] if groups else [""]
        if len(last) == 1 and last[0].startswith("-") and "=" not in last[0] and not word.startswith("-"):
            last.append(word)
        else:
            groups.append([word])
    return groups


def value_of(argument: list[str], *options: str) -> str | None:
    """Return the value given to one of ``options``, or None if the argument has another option.

    Args:
        argument: a list from `grouped`.
        *options: names of options, with dashes.
    """
    # joined by "=", `--name value` and `--name=value` read the same
    option, _, value = "=".join(argument).partition("=")
    return value if option in options and value else None


def by_option(argument: list[str]) -> list[str]:
    """Return the settings of the pair set by an option; ``null`` sets none."""
    return [name for name in PAIR if value_of(argument, f"--trainer.{name}") not in (None, "null")]


def by_file(argument: list[str]) -> list[str]:
    """Return the settings of the pair set by a configuration."""
    path = value_of(argument, "-c", "--config")
    settings = None if path is None else settings_in(path)
    trainer = settings.get("trainer") if isinstance(settings, dict) else None
    return [name for name in PAIR if isinstance(trainer, dict) and trainer.get(name) is not None]


def settings_in(path: str) -> Any:
    """Return the content of a configuration, or None if reading fails: the parser then reports the error.

    Args:
        path: path of the configuration; None is returned for a pipe, which can be read only once, by the parser.
    """
    try:
        return load(Path(path).read_text(encoding="utf-8")) if os.path.isfile(path) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
