"""Arguments of the commands that run no single federation."""

from argparse import ArgumentParser
from typing import Any, NoReturn

from pfl_lightning.cli.usage import UsageError


class Arguments(ArgumentParser):
    """Python's own parser, whose errors are users' mistakes, in one sentence as all others.

    Args:
        command: what stands behind ``pfl-lightning``.
        **kwargs: the arguments of `ArgumentParser`.
    """

    def __init__(self, command: str, **kwargs: Any) -> None:
        super().__init__(prog=f"pfl-lightning {command}", allow_abbrev=False, **kwargs)
        self.command = command

    def error(self, message: str) -> NoReturn:
        """Ends in a sentence, without pages of usage."""
        raise UsageError(f"{self.command}: {message.removeprefix('argument ')}.")
