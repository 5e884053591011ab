"""Private names of jsonargparse, and of argparse, from which jsonargparse's parser inherits."""

from argparse import Action, ArgumentParser
from collections.abc import Mapping
from typing import Any

from jsonargparse import _util


def options_of(parser: ArgumentParser) -> list[Action]:
    """Return a parser's options and positional arguments; argparse has no public list.

    Args:
        parser: the parser, without the options of subcommands.
    """
    return list(parser._actions)


def commands_of(parser: ArgumentParser) -> dict[str, Any]:
    """Return the parsers of a parser's subcommands, by name; empty for a parser without subcommands.

    Args:
        parser: the parser.
    """
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return {name: command for each in choices for name, command in each.items()}


def name_paths(paths: Mapping[str, type]) -> None:
    """Let jsonargparse write classes by paths of their own in configurations.

    By itself it writes the shortest path along a class's module. That module's package can have an older name of the
    class, which warns at each look.

    Args:
        paths: class by dotted path.
    """
    for path, cls in paths.items():
        _util.resolved_import_paths.add(cls, path)
