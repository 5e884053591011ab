"""Refuse mistakes visible at sight, seconds before the parser is imported, in the parser's own sentences."""

import ast
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pfl_lightning.cli.argv import CONFIG, Argument, CommandLine
from pfl_lightning.cli.commands import FILLED, OTHERS, TRAINER
from pfl_lightning.cli.configs import find, nearest
from pfl_lightning.cli.suggestions import nearest_option, suggestion
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.cli.yaml_text import RefusedYAML, check, load, no_yaml


def refuse_at_sight(line: CommandLine) -> None:
    """Refuse an unknown command, a mistyped option, and a configuration missing or with invalid YAML.

    Everything that depends on classes and their settings is left to the parser.

    Args:
        line: the command line.

    Raises:
        UsageError: with the parser's own sentence.
    """
    if not line.words:
        raise UsageError(command_is_missing())
    if line.command in OTHERS or not line.command:
        return
    if line.command not in TRAINER:
        raise UsageError(no_command(line.command))
    options = options_of(line.command)
    mistyped = [
        argument
        for argument in line.arguments
        # an unknown set of options refuses nothing
        if options is not None and argument.name not in CONFIG and not options.may_be(argument.name[2:])
    ]
    # help and stray words are the parser's: it must see the line as given
    if not all(is_regular(argument, argument in mistyped) for argument in line.arguments):
        return
    for argument in line.arguments:
        if argument.name in CONFIG:
            refuse_file(str(argument.value))
        refuse_value(argument.name, str(argument.value))
    if options is not None and mistyped:
        raise UsageError(no_option(mistyped[0].name[2:], options.names))


def is_regular(argument: Argument, mistyped: bool) -> bool:
    """Return True for an option with a value, False for help and for words without an option."""
    if argument.name.endswith((".help", "--help", "--print_config")):
        return False
    is_option = argument.name == "-c" or re.fullmatch(r"--[a-z][\w.]*\+?", argument.name) is not None
    return is_option and (mistyped or argument.value is not None)


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


# A command's options are listed from source text, without the seconds that importing the Trainer takes.
# ``--trainer.NAME`` is an argument of two constructors: this package's, and the installed Lightning's, to which the
# first passes on what it doesn't take. The other options are the arguments of the Trainer's method with the command's
# name, and those of Lightning's command line.

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
