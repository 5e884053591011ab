"""Settings that exclude each other, of which the later one holds, as of one setting that is given twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

PAIR = ("local_epochs", "local_steps")
"""Settings of the Trainer that exclude each other."""


def later_wins(words: Sequence[str]) -> list[str]:
    """A command line on which a file or an option that gives one of the pair takes the other one back.

    A file that gives both, and a command line that does so by its own options, stay as they are, and are refused. What
    this gives stays as it is when it comes here again, as parsers of commands are asked by that of the program.

    >>> later_wins(["fit", "--config", "gone.yaml", "--trainer.local_steps", "5"])
    ['fit', '--config', 'gone.yaml', '--trainer.local_steps', '5', '--trainer.local_epochs', 'null']
    """
    options = [word.partition("=")[0] for word in words]
    both = all(f"--trainer.{name}" in options for name in PAIR)
    result: list[str] = []
    place = 0
    while place < len(words):
        option, has_value, value = words[place].partition("=")
        taken = 1 if has_value or place + 1 == len(words) else 2
        if option in ("-c", "--config"):
            given = in_file(value or words[place + taken - 1])
        else:
            is_null = (value or words[place + taken - 1]).lower() in ("null", "none")
            given = [name for name in PAIR if option == f"--trainer.{name}" and not both and not is_null]
        taken = taken if given else 1
        result += words[place : place + taken]
        if len(given) == 1:
            (other,) = set(PAIR) - set(given)
            result += [f"--trainer.{other}", "null"]
        place += taken
    return result


def in_file(path: str) -> list[str]:
    """Which of the pair a file gives; a file that can't be read is for the parser to refuse."""
    try:
        settings: Any = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    trainer = settings.get("trainer") if isinstance(settings, dict) else None
    return [name for name in PAIR if isinstance(trainer, dict) and trainer.get(name) is not None]
