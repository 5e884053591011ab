"""Conversion of texts into word and letter numbers."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

NO_WORD = 0
"""The number of padding and of words outside the vocabulary."""

_TOKEN = re.compile(r"[.,()!?']|[^\s;:.,()!?']+")


def tokenize(text: str) -> list[str]:
    r"""Cut a text into lower-case words and punctuation marks.

    The rules are torchtext's ``basic_english``, so that vocabularies have the sizes that papers report: double quotes
    vanish; ``;``, ``:``, white space and ``<br />`` separate words; other common marks are words of their own.

    >>> tokenize('The "Race" is on: Second Team (U.S.) isn\'t late!')
    ['the', 'race', 'is', 'on', 'second', 'team', '(', 'u', '.', 's', '.', ')', 'isn', "'", 't', 'late', '!']

    Args:
        text: the text.
    """
    return _TOKEN.findall(text.lower().replace('"', "").replace("<br />", " "))


def number_words(texts: Iterable[list[str]], size: int, min_count: int) -> dict[str, int]:
    """Number the words of some texts from 1 on, the most frequent first, equally frequent words by alphabet.

    Args:
        texts: words of each text.
        size: largest number of word numbers, ``NO_WORD`` included.
        min_count: leave out words that occur less often.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = [word for word, count in counts.items() if count >= min_count]
    # Counter.most_common orders equally frequent words by first occurrence, so the order of files would count.
    ordered = sorted(frequent, key=lambda word: (-counts[word], word))[: size - 1]
    return {word: number for number, word in enumerate(ordered, start=NO_WORD + 1)}


def encode(texts: list[list[str]], numbers: dict[str, int], length: int) -> Tensor:
    """Look up all words, and cut or pad each text to one length.

    Args:
        texts: words of each of the N texts.
        numbers: number of each known word, 1 or more.
        length: words to keep of a text.

    Returns:
        Shape [N, length], int64; ``NO_WORD`` for padding and for unknown words.
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
        texts: texts of one length.
        letters: the letters with a number, namely their position; any other letter gets 0.

    Returns:
        Numbers [number of texts, length], int64.

    Raises:
        MisconfigurationException: if the texts differ in length.
    """
    lengths = {len(text) for text in texts}
    if len(lengths) > 1:
        raise MisconfigurationException(
            f"texts are of {min(lengths)} to {max(lengths)} letters; cut or pad them to one length"
        )
    known = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([[known.get(letter, 0) for letter in text] for text in texts])
