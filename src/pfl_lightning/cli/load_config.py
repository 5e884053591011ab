"""Read command lines of ``fit`` without training: build the classes, or report the first mistake."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, cast

from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.class_names import own_server
from pfl_lightning.cli.parser_errors import is_unknown, sentence
from pfl_lightning.cli.trainer_commands import Parser, PflCLI
from pfl_lightning.internals.of_jsonargparse import commands_of
from pfl_lightning.trainer import FederatedTrainer

Check = Callable[[Mapping[str, Any]], None]
"""A function that inspects the settings before any class is built."""


class Configured(PflCLI):
    """Command line of ``fit``, to build all classes and train nothing.

    Attributes ``trainer``, ``model``, ``datamodule`` and ``aggregator`` hold the built objects.
    """

    trainer: FederatedTrainer
    check: Check | None = None

    def before_instantiate_classes(self) -> None:
        """Run ``check`` on the settings."""
        super().before_instantiate_classes()
        if self.check is not None:
            self.check(self.config[self.subcommand].as_dict())

    def text(self) -> str:
        """Return the whole configuration as YAML, with all defaults."""
        config = self.config[self.subcommand].clone()
        # of one start alone, as in the configuration of a run
        config.pop("resume_changed", None)
        return str(commands_of(self.parser)[str(self.subcommand)].dump(config, skip_unset=False))

    def fit(self, aggregator: Any = None, **kwargs: Any) -> None:
        """Store the aggregator, and don't train; Lightning prefers this method to the trainer's.

        Args:
            aggregator: the server side; None if the command line names none.
            **kwargs: the other arguments of the trainer's ``fit``, unused.
        """
        self.aggregator = aggregator


def configured(args: list[str], check: Check | None = None) -> Configured:
    """Build the trainer, model, data module and aggregator of a command line.

    Args:
        args: the arguments of ``pfl-lightning fit``.
        check: inspects the settings before classes are built, and raises to refuse.
    """
    # the check is a class attribute because LightningCLI runs everything within its constructor
    kind: Any = type("Configured", (Configured,), {"check": staticmethod(check) if check else None})
    return cast(Configured, kind.of(CommandLine(["fit", *args])))


class Complaint(Exception):
    """Raised for the first mistake of a command line, with one sentence.

    Args:
        sentence: the sentence for the user.
        unknown: True if the mistake is an unknown setting or option.
    """

    def __init__(self, sentence: str, unknown: bool) -> None:
        super().__init__(sentence)
        self.unknown = unknown


class _Asked(Parser):
    """Parser raising `Complaint` in place of exiting."""

    def complain(self, message: str) -> NoReturn:
        file, self._file = self._file, ""
        raise Complaint(file + sentence(message, self.option_names()), is_unknown(message))


class _Made(Exception):
    """Carries the finished parser out of LightningCLI's constructor."""


class _Unparsed(PflCLI):
    """Command line stopped once the parser is built."""

    made_parser = _Asked

    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _Made(parser)


def new_parser() -> Parser:
    """Build a parser of the Trainer's commands, with errors raised as `Complaint`."""
    try:
        return cast(Parser, _Unparsed.of(CommandLine([])))
    except _Made as made:
        return cast(Parser, made.args[0])


# building the parser takes half a second, and `compare` asks once per method and value
_parser = cache(new_parser)


def complaint(args: Sequence[str]) -> Complaint | None:
    """Return the first mistake in a command line's names and types, or None.

    Values out of range are found only when the classes are built.

    Args:
        args: the arguments of ``pfl-lightning fit``.
    """
    try:
        _parser().parse_args(CommandLine(["fit", *args]).completed(own_server))
    except Complaint as found:
        return found
    return None
