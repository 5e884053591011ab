"""List the options of the Trainer's commands from source text, without the seconds that importing the Trainer takes.

``--trainer.NAME`` is an argument of two constructors: this package's, and the installed Lightning's, to which the first
passes on what it doesn't take. The other options are the arguments of the Trainer's method with the command's name, and
those of Lightning's command line.
"""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from pfl_lightning.cli.commands import FILLED

OWN = Path(__file__).parents[1] / "trainer.py"
CLASSES = ("data", "model")
OF_ALL = ("config", "help", "print_config", "seed_everything", "trainer", *CLASSES)
"""Options of Lightning's command line, which all commands have."""
PLAIN = re.compile(r"(Optional|Union|Literal\[[^]]*\]|None|int|float|str|bool|[\[\],| ])*")
"""Annotations whose values have no settings of their own."""


class Options(NamedTuple):
    """Options of a command, without dashes."""

    names: list[str]
    open: set[str]
    """Options that may name a class, so that more options may exist below."""
    explained: set[str]
    """Options that the command doesn't take, and that the parser refuses with advice; a suggestion would mislead."""

    def may_be(self, name: str) -> bool:
        """Return True if the command may take an option; only the parser knows the options below a class."""
        name = name.removesuffix("+")
        parts = name.split(".")
        above = {".".join(parts[:depth]) for depth in range(1, len(parts))}
        return name in self.names or name in self.explained or not above.isdisjoint(self.open)


@cache
def options_of(command: str) -> Options | None:
    """Return a command's options; None if a file is missing or reads otherwise than expected.

    Args:
        command: a command of `commands.TRAINER`.
    """
    try:
        own = ast.parse(OWN.read_text(encoding="utf-8"))
        init = method_of(own, "FederatedTrainer", "__init__")
        settings = arguments_of(method_of(ast.parse(lightning_source()), "Trainer", "__init__"))
        # an argument that our constructor gives Lightning's, such as max_epochs, is no option
        for name in words_of_super(init):
            settings.pop(name, None)
        settings |= arguments_of(init)
        taken = arguments_of(method_of(own, "FederatedTrainer", command))
        advice = constant_in(own, "MEANINGLESS")
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    given = {f"trainer.{name}": annotation for name, annotation in settings.items()}
    given |= {name: annotation for name, annotation in taken.items() if name not in FILLED}
    named = {name for name, annotation in given.items() if not PLAIN.fullmatch(annotation)}
    explained = {f"trainer.{name}" for name in advice} - given.keys()
    return Options(sorted({*OF_ALL, *given}), {*CLASSES, *named}, explained)


def lightning_source() -> str:
    """Return the source of Lightning's Trainer.

    Raises:
        LookupError: if Lightning isn't installed as a folder of files.
    """
    # of a package at the top, find_spec imports nothing
    spec = find_spec("lightning")
    if spec is None or spec.origin is None:
        raise LookupError("lightning")
    return Path(spec.origin).with_name("pytorch").joinpath("trainer", "trainer.py").read_text(encoding="utf-8")


def method_of(tree: ast.Module, owner: str, name: str) -> ast.FunctionDef:
    """Return a method of a class in a parsed file.

    Raises:
        LookupError: if there is no such method.
    """
    for node in tree.body:
        for made in node.body if isinstance(node, ast.ClassDef) and node.name == owner else []:
            if isinstance(made, ast.FunctionDef) and made.name == name:
                return made
    raise LookupError(f"{owner}.{name}")


def arguments_of(method: ast.FunctionDef) -> dict[str, str]:
    """Return a method's arguments without ``self``, each with its annotation as written."""
    listed = [*method.args.args, *method.args.kwonlyargs][1:]
    return {each.arg: ast.unparse(each.annotation) if each.annotation else "Any" for each in listed}


def words_of_super(method: ast.FunctionDef) -> set[str]:
    """Return the names of arguments that a constructor gives its base's by name."""
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    own = [call for call in calls if ast.unparse(call.func) == "super().__init__"]
    return {word.arg for call in own for word in call.keywords if word.arg}


def constant_in(tree: ast.Module, name: str) -> Any:
    """Return the value of a constant, written as a literal.

    Args:
        tree: the parsed file.
        name: the constant.

    Raises:
        LookupError: if there is no such constant.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)
