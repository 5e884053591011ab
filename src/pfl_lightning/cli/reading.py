"""Command lines of ``fit``, read without a run: the classes that they would make, and what is wrong with them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, cast

from pfl_lightning.cli.parser_errors import is_unknown, sentence
from pfl_lightning.cli.trainer_commands import Parser, PflCLI
from pfl_lightning.trainer import FederatedTrainer

Check = Callable[[Mapping[str, Any]], None]
"""Looks at settings before anything is made of them."""


class Configured(PflCLI):
    """The command line of ``fit``, which makes all classes and runs nothing.

    It has the ``trainer``, the ``model``, the ``datamodule`` and the ``aggregator``.
    """

    trainer: FederatedTrainer
    check: Check | None = None

    def before_instantiate_classes(self) -> None:
        """Looks at the settings."""
        super().before_instantiate_classes()
        if self.check is not None:
            self.check(self.config[self.subcommand].as_dict())

    def _run_subcommand(self, subcommand: str) -> None:
        self.aggregator = self._get(self.config_init, "aggregator")


def configured(args: list[str], check: Check | None = None) -> Configured:
    """What a command line would run.

    Args:
        args: the arguments of ``pfl-lightning fit``.
        check: looks at the settings before classes are made.
    """
    # of the arguments of the process, which are those of another program
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    kind: Any = type("Configured", (Configured,), {"check": staticmethod(check) if check else None})
    return cast(Configured, kind.of(["fit", *args]))


class Complaint(Exception):
    """Raised for what is wrong with a command line, in a sentence.

    Args:
        sentence: the sentence.
        unknown: whether the command line names a setting or an option that there is not.
    """

    def __init__(self, sentence: str, unknown: bool) -> None:
        super().__init__(sentence)
        self.unknown = unknown


class _Asked(Parser):
    """Parser that raises its complaints."""

    def complain(self, message: str) -> NoReturn:
        file, self._file = self._file, ""
        raise Complaint(file + sentence(message, self.option_names()), is_unknown(message))


class _Made(Exception):
    """Ends the making of a command line when it has its parser."""


class _Unparsed(PflCLI):
    """Command line that has its parser and parses nothing."""

    made_parser = _Asked

    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _Made(parser)


def new_parser() -> Parser:
    """Return a parser of the Trainer's commands, which raises `Complaint` in the place of ending the program."""
    try:
        return cast(Parser, _Unparsed.of([]))
    except _Made as made:
        return cast(Parser, made.args[0])


_parser = cache(new_parser)


def complaint(args: Sequence[str]) -> Complaint | None:
    """Return what is wrong with a command line by its names and types; values out of range come out in a run alone.

    Args:
        args: the arguments of ``pfl-lightning fit``.
    """
    try:
        _parser().parse_args(["fit", *args])
    except Complaint as found:
        return found
    return None
