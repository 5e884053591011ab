"""Mistakes on the command line that are told before Lightning is imported, which takes seconds."""

import re
import sys
from typing import NoReturn

WORD = 200
"""Characters that a word of a sentence has at most; of a longer one the beginning and the end are told."""
SENTENCE = 2_000
"""Characters that a sentence has at most, cut in the same way."""


class UsageError(Exception):
    """What is wrong with a command line, in one sentence."""


def fail(reason: str) -> NoReturn:
    """Ends the program with a sentence and exit code 2."""
    print(f"pfl-lightning: error: {one_line(reason)}", file=sys.stderr)
    sys.exit(2)


def one_line(text: str) -> str:
    """Return a text in one line, with a full stop, and shortened.

    >>> one_line("no  file"), len(one_line("x" * 60_000)) < 300
    ('no file.', True)
    """
    line = shortened(" ".join(text.split()), SENTENCE)
    return line if line.endswith((".", "?", "!")) else f"{line}."


def shortened(text: str, most: int) -> str:
    """Return a text without the middle of its long words, and without its own middle where it is long.

    Args:
        text: the text, with what users gave, which can be of any length.
        most: characters that are kept of it, about.
    """
    return without_middle(re.sub(r"\S+", lambda word: without_middle(word[0], WORD), text), most)


def without_middle(text: str, most: int) -> str:
    """Return a text's beginning and end, where it has more than so many characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 5]}[...]{text[5 - most // 2 :]}"
