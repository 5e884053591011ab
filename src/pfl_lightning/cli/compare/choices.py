"""Which methods are compared: files of settings, or client modules by name."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.class_names import class_names
from pfl_lightning.cli.configs import find, nearest, squeezed
from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.methods.registry import METHODS

FILE = ("--config", "-c")
"""The options that name a file."""


@dataclass(frozen=True)
class Choice:
    """A method as it was asked for.

    Args:
        label: its name in tables and folders.
        arguments: what ``fit`` is given for it.
        winning: what ``fit`` is given for the files behind a ``+``.
    """

    label: str
    arguments: tuple[str, ...]
    winning: tuple[str, ...] = ()

    def among(self, passed: Sequence[str]) -> tuple[str, ...]:
        """All that ``fit`` is given: what wins comes behind the last file, before the flags that follow it.

        >>> Choice("x", ("--model", "X"), ("--config", "mine")).among(["--config", "data", "--model.mu", "1"])
        ('--model', 'X', '--config', 'data', '--config', 'mine', '--model.mu', '1')

        Args:
            passed: the arguments that all methods have in common.
        """
        ends = [index + ("=" not in word) for index, word in enumerate(passed, 1) if word.split("=")[0] in FILE]
        last = max(ends, default=0)
        return (*self.arguments, *passed[:last], *self.winning, *passed[last:])


def choose(words: list[str], folder: Path) -> list[Choice]:
    """Finds out what each word means.

    Args:
        words: a method's name (``cwFedAvg``) or that of its file in the folder (``cwfedavg``), the path of a file, or
            a client module's class (``my_methods.Mine``), each with more files after a ``+``, whose settings win over
            those of all other files.
        folder: the folder of the methods' files.

    Raises:
        MisconfigurationException: if a word means nothing, or two mean the same.
    """
    choices = [choose_one(word, folder) for word in words]
    labels = [choice.label for choice in choices]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise MisconfigurationException(
            f"compare: --methods has two called {twice[0]}; leave one out, or rename one of the files."
        )
    return choices


def choose_one(word: str, folder: Path) -> Choice:
    """Finds out what a word means."""
    # KT-pFL+weight has a plus in its name
    known = {squeezed(method.name): method for method in METHODS}
    whole = squeezed(word) in known and (folder / f"{known[squeezed(word)].file}.yaml").is_file()
    first, *others = [word] if whole else word.split("+")
    if (path := method_file(first, folder)) is not None:
        names = {method.file: method.name for method in METHODS} if path.parent == folder else {}
        label, arguments = names.get(path.stem, path.stem), ["--config", str(path)]
    elif "." in first or first in class_names("model"):
        label, arguments = first.rpartition(".")[2], ["--model", first]
    else:
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
        label, winning = f"{label}+{path.stem}", [*winning, "--config", str(path)]
    return Choice(label, tuple(arguments), tuple(winning))


def method_file(word: str, folder: Path) -> Path | None:
    """The file that a word means: by its path if it ends as YAML does, else by a name, if the folder has it.

    Raises:
        MisconfigurationException: if there is no file under the path.
    """
    path = Path(word)
    if path.suffix in (".yaml", ".yml"):
        if not os.path.isfile(path):
            raise MisconfigurationException(f"compare: {path} is no file{nearest(word)}")
        return path
    files = {squeezed(file.stem): file for file in sorted(folder.glob("*.yaml"))}
    names = {squeezed(method.name): squeezed(method.file) for method in METHODS}
    return files.get(names.get(squeezed(word), squeezed(word)))
