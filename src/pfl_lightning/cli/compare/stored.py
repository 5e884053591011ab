"""Read a table from a file: methods, seeds, options of ``fit``, and a paper's numbers."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.refusals import no_yaml
from pfl_lightning.cli.yaml_text import load

ENTRIES = {"methods": list, "seeds": list, "vary_data": bool, "fit": str, "paper": dict, "columns": list}
"""Entries that a table's file may have, with their types."""


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
    try:
        content: Any = load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise MisconfigurationException(f"compare: --table {path} is no text in UTF-8; save it as such.") from error
    except yaml.YAMLError as error:
        raise MisconfigurationException(f"compare: --table {path}: {no_yaml(str(error))}") from error
    if not isinstance(content, dict) or "methods" not in content:
        raise MisconfigurationException(f"compare: --table {path} names no methods, and describes no table.")
    for entry, value in content.items():
        if not isinstance(value, ENTRIES.get(entry, ())):
            raise MisconfigurationException(
                f"compare: --table {path}: {entry}={value!r} is none of its entries, which are {', '.join(ENTRIES)}."
            )
    options = ["--methods", *map(str, content["methods"]), "--seeds", *map(str, content.get("seeds", [0]))]
    options += ["--columns", ",".join(map(str, content["columns"]))] if "columns" in content else []
    options += ["--vary_data"] if content.get("vary_data") else []
    return Stored(
        options + shlex.split(content.get("fit", "")),
        {str(method): str(value) for method, value in content.get("paper", {}).items()},
    )
