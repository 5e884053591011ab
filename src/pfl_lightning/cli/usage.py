"""Messages of commands: mistakes as one sentence, and filters of others' warnings; nothing here needs Lightning."""

import logging
import re
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NoReturn

WORD = 200
"""Largest number of characters of one word in a sentence; longer words lose their middle."""
SENTENCE = 2_000
"""Largest number of characters of a sentence; longer ones lose their middle."""


class UsageError(Exception):
    """Raised for a mistake on the command line, with one sentence."""


def fail(reason: str) -> NoReturn:
    """Print an error and exit with code 2."""
    print(f"pfl-lightning: error: {one_line(reason)}", file=sys.stderr)
    # 2 is argparse's code for mistakes in arguments; 1 means that a run failed
    sys.exit(2)


def one_line(text: str) -> str:
    """Return a text on one line, shortened, with a full stop.

    >>> one_line("no  file"), len(one_line("x" * 60_000)) < 300
    ('no file.', True)
    """
    line = shortened(" ".join(text.split()), SENTENCE)
    return line if line.endswith((".", "?", "!")) else f"{line}."


def shortened(text: str, most: int) -> str:
    """Cut the middle out of long words, and out of the whole text if still too long.

    Args:
        text: the text; values given by users can have any length.
        most: the number of characters to keep, about.
    """
    # words first: a value of 60,000 characters must not push out the words around it
    return without_middle(re.sub(r"\S+", lambda word: without_middle(word[0], WORD), text), most)


def without_middle(text: str, most: int) -> str:
    """Return a text's beginning and end if the text has more than ``most`` characters, else the text."""
    return text if len(text) <= most else f"{text[: most // 2 - 5]}[...]{text[5 - most // 2 :]}"


class Arguments(ArgumentParser):
    """Python's `ArgumentParser`, with each error as one sentence as in all commands run by Lightning.

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
        """Raise `UsageError` in place of printing the usage and exiting."""
        raise UsageError(f"{self.command}: {message.removeprefix('argument ')}.")


def silence() -> None:
    """Filter warnings and log lines on which a user of the command line can't act."""
    # Lightning's own use of a name that torch deprecates
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
    # the parser looks at classes by all names that they have, also by those that are out of use
    warnings.filterwarnings("ignore", message=r"pfl_lightning\.methods\.", module="jsonargparse")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Return False for Lightning's advertisements and for the line after the last epoch."""
    # Lightning advertises packages of its own (litlogger, litmodels), and ends every run with "stopped: max_epochs",
    # which reads like a failure.
    said = record.getMessage()
    return not any(part in said for part in ("/litlogger/", "/litmodels/", "stopped: `max_epochs="))
