"""Docstrings for Sphinx: a name in single backticks is what Python finds under it where the docstring stands."""

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any

from site_pages import public
from sphinx.application import Sphinx

import pfl_lightning

NAME = re.compile(r"(?<![`:\w])`([A-Za-z_][\w.]*)`(?![`_])")
OF_VALUES = {"attribute", "data", "property"}


def located(name: str) -> tuple[ModuleType, list[Any]]:
    """The module of what has a dotted name, and the objects on the way to it from there."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        way: list[Any] = []
        for part in parts[end:]:
            way.append(getattr(way[-1] if way else module, part, None))
        return module, way
    raise ValueError(f"{name} is in no module.")


def reference(word: str, name: str) -> str:
    """What stands for a name in single backticks: a reference to what it is, or the name as code.

    >>> reference("Aggregator", "pfl_lightning.methods.fedawa.FedAWA")
    ':py:obj:`Aggregator <pfl_lightning.Aggregator>`'
    >>> reference("Callback", "pfl_lightning.callbacks.base.FederatedCallback")
    '``Callback``'

    Args:
        word: the name, with dots or without.
        name: the dotted name of what the docstring is of.
    """
    module, way = located(name)
    first, *rest = word.split(".")
    # a public name leads to a class whose docstring speaks of names beside its definition
    homes = [sys.modules[kind.__module__] for part in reversed(way) if isinstance(part, type) for kind in part.__mro__]
    homes += [sys.modules[part.__module__] for part in way if getattr(part, "__module__", "") in sys.modules]
    for scope in (*reversed(way), *homes, module, pfl_lightning, pfl_lightning.aggregators, pfl_lightning.methods):
        if isinstance(scope, type) and any(first in vars(base).get("__annotations__", {}) for base in scope.__mro__):
            return f"``{word}``"
        found = getattr(scope, first, None)
        if found is None:
            continue
        for part in rest:
            annotated = isinstance(found, type) and part in getattr(found, "__annotations__", {})
            found = getattr(found, part, word if annotated else None)
        if found is None:
            continue
        return to(found, scope, word)
    ours = [file for dotted, file in sys.modules.items() if dotted.startswith("pfl_lightning")]
    # names of other rooms without a public one are code, and so are attributes; a name from nowhere fails the build
    known = word in sys.modules or any(hasattr(file, first) for file in ours) or is_attribute(first, way)
    return f"``{word}``" if known else f":any:`{word}`"


def is_attribute(name: str, way: list[Any]) -> bool:
    """Return True if a class on the way to an object, or one of its bases here, assigns an attribute of this name."""
    kinds = {kind for part in way if isinstance(part, type) for kind in part.__mro__}
    ours = [kind for kind in kinds if kind.__module__.startswith("pfl_lightning")]
    return any(re.search(rf"\bself\.{name}(:| =)", inspect.getsource(kind)) for kind in ours)


def to(found: Any, scope: Any, word: str) -> str:
    """Return a reference to an object by its public name; an object without one, or a value, as code."""
    if isinstance(found, ModuleType):
        target = found.__name__
    elif hasattr(found, "__qualname__") and getattr(found, "__module__", None):
        target = f"{found.__module__}.{found.__qualname__}"
    else:
        return f"``{word}``"
    known = public(target)
    return f":py:obj:`{word} <{known}>`" if known else f"``{word}``"


def short(signature: str) -> str:
    """Return a signature with classes by their names alone, and functions as three points.

    >>> short("(net=<class 'pfl_lightning.nets.cnn.CNN'>, shape=(1, 28, 28), optimizer=<function Module.<lambda>>)")
    '(net=CNN, shape=(1, 28, 28), optimizer=...)'
    >>> short("(rule=<Rule.last: 'last'>, lines=<built-in function len>)")
    "(rule='last', lines=...)"

    Args:
        signature: the arguments, with defaults as Python prints them.
    """
    signature = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", signature)
    signature = re.sub(r"<[\w.]+: ('\w+'|\d+)>", r"\1", signature)
    return re.sub(r"<(?:built-in |bound )?(?:function|method) (?:<lambda>|[^<>])*>", "...", signature)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the steps: for signatures, and before and after napoleon, which takes a value's words for its type."""
    before: dict[str, list[str]] = {}

    def first(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = [NAME.sub(lambda found: reference(found[1], name), line) for line in lines]
        if what in OF_VALUES:
            before[name] = lines[:]

    def last(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        if what in OF_VALUES:
            lines[:] = before.pop(name)

    def signed(app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returned: str) -> Any:
        return (short(arguments), returned) if arguments else None

    app.connect("autodoc-process-signature", signed)
    app.connect("autodoc-process-docstring", first, priority=400)
    app.connect("autodoc-process-docstring", last, priority=600)
    return {"parallel_read_safe": True}
