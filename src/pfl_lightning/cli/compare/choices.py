"""Choose what to compare: by the words of ``--methods``, or by a table's file."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.class_names import class_names
from pfl_lightning.cli.configs import find, nearest, squeezed
from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.cli.yaml_text import read_settings
from pfl_lightning.methods.registry import METHODS

FILE = ("--config", "-c")
"""Options that name a configuration."""

ENTRIES = {
    "methods": list,
    "seeds": list,
    "vary_data": bool,
    "fit": str,
    "paper": dict,
    "columns": list,
    "tune": list,
    "tune_folds": int,
    "reference": str,
}
"""Entries that a table's file may have, with their types."""


@dataclass(frozen=True)
class Choice:
    """A method of the comparison.

    Args:
        label: name in tables and folders.
        arguments: arguments of ``fit`` that select the method.
        winning: arguments of ``fit`` for configurations behind a ``+``.
    """

    label: str
    arguments: tuple[str, ...]
    winning: tuple[str, ...] = ()

    def among(self, passed: Sequence[str]) -> tuple[str, ...]:
        """Return all arguments of ``fit``: ``winning`` goes behind the last configuration, before the options after it.

        >>> Choice("x", ("--model", "X"), ("--config", "mine")).among(["--config", "data", "--model.mu", "1"])
        ('--model', 'X', '--config', 'data', '--config', 'mine', '--model.mu', '1')

        Args:
            passed: arguments common to all methods.
        """
        # later arguments hold: a file behind + beats other files, and an option given by hand beats every file
        ends = [index + ("=" not in word) for index, word in enumerate(passed, 1) if word.split("=")[0] in FILE]
        last = max(ends, default=0)
        return (*self.arguments, *passed[:last], *self.winning, *passed[last:])


def choose(words: list[str], folder: Path) -> list[Choice]:
    """Return the method named by each word.

    Args:
        words: each a method's name (``cwFedAvg``), the name of its file (``cwfedavg``), the path of a file, or a client
            module's class (``my_methods.Mine``); files appended with ``+`` override all other files.
        folder: folder of the methods' configurations.

    Raises:
        MisconfigurationException: if a word is unknown, or two words have the same label.
    """
    choices = [choose_one(word, folder) for word in words]
    labels = [choice.label for choice in choices]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise MisconfigurationException(
            f"compare: --methods has two called {twice[0]}; leave one out, or rename one of the files."
        )
    return choices


def choose_one(word: str, folder: Path) -> Choice:
    """Return the method named by a word.

    Args:
        word: a word of ``--methods``.
        folder: folder of the methods' configurations.

    Raises:
        MisconfigurationException: if the word is unknown.
    """
    # KT-pFL+weight and FedReMa+A have a plus in their names: a known name is never split
    known = {squeezed(method.name): method for method in METHODS}
    whole = squeezed(word) in known and (folder / f"{known[squeezed(word)].file}.yaml").is_file()
    first, *others = [word] if whole else word.split("+")
    if (path := method_file(first, folder)) is not None:
        names = {method.file: method.name for method in METHODS} if path.parent == folder else {}
        label, arguments = names.get(path.stem, path.stem), ["--config", str(path)]
    # a dotted path may be a file of the user's working folder, which `fit` imports later
    elif "." in first or first in class_names("model"):
        label, arguments = first.rpartition(".")[2], ["--model", first]
    else:
        # the user's own files in the folder are suggested too
        own = {file.stem for file in folder.glob("*.yaml")} - {method.file for method in METHODS}
        named = own | {method.name for method in METHODS}
        raise MisconfigurationException(
            f"compare: --methods {first} is no method and no client module"
            f"{suggestion(first, named | class_names('model'))}"
        )
    winning: list[str] = []
    for other in others:
        if (path := find(other)) is None:
            raise MisconfigurationException(
                f"compare: --methods {word}: {other} is no file; behind a + give the path of one, or the name of a "
                f"packaged configuration{nearest(other)}"
            )
        # the label tells variants of one method apart, in tables and in folders
        label, winning = f"{label}+{path.stem}", [*winning, "--config", str(path)]
    return Choice(label, tuple(arguments), tuple(winning))


def method_file(word: str, folder: Path) -> Path | None:
    """Return the file of a word: a path that ends like YAML, or a file of the folder by a name; None if neither.

    Args:
        word: a path or a name.
        folder: folder of the methods' configurations.

    Raises:
        MisconfigurationException: if there is no file at the path.
    """
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        if not os.path.isfile(path):
            raise MisconfigurationException(f"compare: {path} is no file{nearest(word)}")
        return path
    files = {squeezed(file.stem): file for file in sorted(folder.glob("*.yaml"))}
    names = {squeezed(method.name): squeezed(method.file) for method in METHODS}
    return files.get(names.get(squeezed(word), squeezed(word)))


@dataclass(frozen=True)
class Stored:
    """A table from a file.

    Args:
        words: the arguments of ``compare`` that the file stands for.
        paper: a paper's numbers by method, as printed.
    """

    words: list[str] = field(default_factory=list)
    paper: dict[str, str] = field(default_factory=dict)


def stored_table(args: Sequence[str]) -> Stored:
    """Return the table of ``--table NAME``; an empty one without the option.

    Args:
        args: the command's arguments.

    Raises:
        MisconfigurationException: if the file is missing, or describes no table.
    """
    # read before argparse: the file decides if --methods is required
    words = [part for word in args for part in (word.split("=", 1) if word.startswith("--table=") else [word])]
    name = next((after for word, after in pairwise(words) if word == "--table"), None)
    if name is None:
        return Stored()
    # a file of the user with this name comes first
    path = find(name) or find(f"tables/{name}")
    if path is None:
        raise MisconfigurationException(f"compare: --table {name} is no table{nearest(f'tables/{name}')}")
    content = read_settings(path, f"compare: --table {path}")
    if "methods" not in content:
        raise MisconfigurationException(f"compare: --table {path} has no methods; name some, as a list.")
    for entry, value in content.items():
        if not isinstance(value, ENTRIES.get(entry, ())):
            raise MisconfigurationException(
                f"compare: --table {path}: {entry}={value!r} is no entry of a table; methods, seeds, columns and "
                "tune are lists, vary_data is true or false, tune_folds is a number, fit and reference are texts, and "
                "paper has a value by method."
            )
    options = ["--methods", *map(str, content["methods"]), "--seeds", *map(str, content.get("seeds", [0]))]
    options += ["--columns", ",".join(map(str, content["columns"]))] if "columns" in content else []
    # settings are tried in the values given by hand, if any, and not in the table's too
    by_hand = any(word.split("=", 1)[0] == "--tune" for word in args)
    options += [word for axis in ([] if by_hand else content.get("tune", [])) for word in ("--tune", str(axis))]
    options += ["--tune_folds", str(content["tune_folds"])] if not by_hand and "tune_folds" in content else []
    options += ["--reference", content["reference"]] if "reference" in content else []
    options += ["--vary_data"] if content.get("vary_data") else []
    return Stored(
        options + shlex.split(content.get("fit", "")),
        {str(method): str(value) for method, value in content.get("paper", {}).items()},
    )
