"""Private names of jsonargparse, and of argparse, from which jsonargparse's parser inherits."""

from argparse import Action, ArgumentParser
from typing import Any


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


def type_of(option: Action) -> Any:
    """Return an option's type, as a type or a type hint; an empty text for an option without a value.

    Args:
        option: an option of jsonargparse's parser.
    """
    return getattr(option, "_typehint", "")
