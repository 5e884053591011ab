"""Mistakes on the command line that are told before Lightning is imported, which takes seconds."""

import sys
from typing import NoReturn


class UsageError(Exception):
    """What is wrong with a command line, in one sentence."""


def fail(reason: str) -> NoReturn:
    """Ends the program with a sentence and exit code 2."""
    print(f"pfl-lightning: error: {reason}", file=sys.stderr)
    sys.exit(2)
