"""Turning texts into rows of word numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

NO_WORD = 0
"""The number of padding and of words that are not in the vocabulary."""

_TOKEN = re.compile(r"[.,()!?']|[^\s;:.,()!?']+")


def tokenize(text: str) -> list[str]:
    r"""Cut a text into lower-case words and punctuation marks.

    The rules of torchtext's ``basic_english``, so that vocabularies have the size that papers report: double quotes
    vanish, ``;``, ``:``, white space and ``<br />`` separate, other common marks are words of their own.

    >>> tokenize('The "Race" is on: Second Team (U.S.) isn\'t late!')
    ['the', 'race', 'is', 'on', 'second', 'team', '(', 'u', '.', 's', '.', ')', 'isn', "'", 't', 'late', '!']

    Args:
        text: The text.
    """
    return _TOKEN.findall(text.lower().replace('"', "").replace("<br />", " "))


def number_words(texts: Iterable[list[str]], size: int, min_count: int) -> dict[str, int]:
    """Number the words of some texts from 1 on, the most frequent first and equally frequent ones by alphabet.

    Args:
        texts: Words of each text.
        size: Numbers to use at most, together with ``NO_WORD``.
        min_count: Leave out words that occur less often.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = [word for word, count in counts.items() if count >= min_count]
    # not Counter.most_common, whose order of equally frequent words is that of the files
    ordered = sorted(frequent, key=lambda word: (-counts[word], word))[: size - 1]
    return {word: number for number, word in enumerate(ordered, start=NO_WORD + 1)}


def encode(texts: list[list[str]], numbers: dict[str, int], length: int) -> Tensor:
    """Look up all words, and cut or pad each text to one length.

    Args:
        texts: Words of each of the N texts.
        numbers: Number of each known word, 1 or more.
        length: Words to keep of a text.

    Returns:
        Shape [N, length], int64; ``NO_WORD`` where a text has no or no known word.
    """
    rows = np.full((len(texts), length), NO_WORD, dtype=np.int64)
    for row, words in zip(rows, texts, strict=True):
        row[: len(words)] = [numbers.get(word, NO_WORD) for word in words[:length]]
    return torch.from_numpy(rows)


def letter_numbers(texts: list[str], letters: str) -> Tensor:
    """Number the letters of texts.

    >>> letter_numbers(["ab", "b?"], " ab")
    tensor([[1, 2],
            [2, 0]])

    Args:
        texts: All of one length.
        letters: The letters that have a number, their position; any other gets 0.

    Returns:
        Numbers [number of texts, length], int64.

    Raises:
        MisconfigurationException: The texts differ in length.
    """
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise MisconfigurationException(
            f"texts are of {min(lengths)} to {max(lengths)} letters; cut or pad them to one length"
        )
    known = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([[known.get(letter, 0) for letter in text] for text in texts])
