"""Parser of all commands outside Lightning, such as ``configs`` and ``compare``."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NoReturn

from pfl_lightning.cli.usage import UsageError


class Arguments(ArgumentParser):
    """Python's `ArgumentParser`, with each error as one sentence in the style of all other commands.

    Args:
        command: the name of the command, such as ``status``.
        **kwargs: the arguments of `ArgumentParser`.
    """

    def __init__(self, command: str, **kwargs: Any) -> None:
        # no abbreviations: `compare` passes unknown options on to `fit`, so a prefix must never match one of ours
        super().__init__(
            prog=f"pfl-lightning {command}",
            allow_abbrev=False,
            # descriptions have commands on lines of their own, to be pasted
            formatter_class=RawDescriptionHelpFormatter,
            **kwargs,
        )
        self.command = command

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` in the place of printing the usage and exiting."""
        raise UsageError(f"{self.command}: {message.removeprefix('argument ')}.")
