"""The public names: ``python docs/public_names.py`` writes them to ``public_names.txt``, one a line.

From version 1.0 on they are promised (promises.md). ``tests/test_generated.py`` fails while the file is stale, so that
no name and no argument vanishes unseen.
"""

import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pfl_lightning.cli.commands import OTHERS, TRAINER

FILE = Path(__file__).parent / "public_names.txt"
ROOMS = {
    "pfl_lightning": "Trainer, client module and aggregator: the base of all else",
    "pfl_lightning.data": "Clients and their samples: data sets, sources, partitioners, preprocessing",
    "pfl_lightning.methods": "Client sides of the methods",
    "pfl_lightning.aggregators": "Server sides of the methods",
    "pfl_lightning.server.means": "Rules in place of the weighted mean, against bad clients",
    "pfl_lightning.tasks": "Losses and metrics: classes, quantities, survival, labels, masks, tokens",
    "pfl_lightning.nets": "Networks, and the cut into features and classifier",
    "pfl_lightning.callbacks": "Records, pictures, attacks and audits",
    "pfl_lightning.plots": "Pictures of federations, from Python",
    "pfl_lightning.privacy": "Differential privacy and secure sums",
    "pfl_lightning.selection": "The cohort of a round",
    "pfl_lightning.schedules": "A simulated clock of devices",
    "pfl_lightning.federation.stages": "What settings and callbacks add to a round",
    "pfl_lightning.compression": "Updates in fewer bytes",
    "pfl_lightning.client": "Hooks and phases of the client side",
    "pfl_lightning.engines": "How the clients of a round run",
}
"""Public modules, each with a line of description; their ``__all__`` is the reference."""


def exported(module: str) -> list[str]:
    """Return a public module's own names: those of earlier modules, submodules and the version left out."""
    earlier = {id(one) for one in named_before(module)}
    found = importlib.import_module(module)
    names = [name for name in found.__all__ if not name.startswith("_")]
    return [name for name in names if id(getattr(found, name)) not in earlier]


def named_before(module: str) -> list[Any]:
    """Return all objects that public modules before this one export."""
    before = list(ROOMS)[: list(ROOMS).index(module)]
    found = [getattr(module, name) for module in map(importlib.import_module, before) for name in module.__all__]
    return [each for each in found if not isinstance(each, str | int)]


def arguments(found: Any) -> str:
    """Return the names of a function's or class's arguments, in parentheses; nothing where another package has them."""
    made = found.__init__ if inspect.isclass(found) else found
    if not getattr(made, "__module__", "").startswith("pfl_lightning"):
        return ""
    names = []
    for each in inspect.signature(made).parameters.values():
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        names.append(f"{star}{each.name}")
    return f"({', '.join(name for name in names if name != 'self')})"


def members(found: type) -> Iterator[str]:
    """Yield the public methods and properties that a class has and its bases haven't."""
    for name, each in vars(found).items():
        known = any(hasattr(base, name) for base in found.__mro__[1:])
        if (
            not name.startswith("_")
            and not known
            and isinstance(each, property | cached_property | classmethod | staticmethod | FUNCTION)
        ):
            yield f".{name}{arguments(each) if isinstance(each, FUNCTION) else ''}"


FUNCTION = type(members)


def listed() -> str:
    """Return the file's text: commands, then each public name with its arguments, and the members of classes."""
    lines = [f"pfl-lightning {command}" for command in sorted(TRAINER | OTHERS)]
    for module in ROOMS:
        for name in sorted(exported(module)):
            found = getattr(importlib.import_module(module), name)
            is_code = inspect.isclass(found) or inspect.isroutine(found)
            lines.append(f"{module}.{name}{arguments(found) if is_code else ''}")
            if inspect.isclass(found):
                lines += sorted(f"{module}.{name}{member}" for member in members(found))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(listed(), encoding="utf-8")
