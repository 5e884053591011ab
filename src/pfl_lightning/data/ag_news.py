"""The AG News data set, word by word and letter by letter."""

import csv
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.datamodule import DivisionSettings, FederatedDataModule
from pfl_lightning.data.preprocessing import FittedOn
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.data.words import encode, letter_numbers, number_words, tokenize
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import NextToken

HEADERS = ("label", "class index")
"""Names of the first column in files with a header line."""


class AGNews(FederatedDataModule):
    """127,600 news articles, 200 words each, 4 classes, in ``root/ag_news/train.csv`` and ``test.csv``.

    Rows are label (1 to 4), title, description; a header line is skipped. One file alone is enough: test.csv has 7,600
    articles. Inputs are word numbers; 0 stands for padding and for words without number. The vocabulary comes from the
    whole pool, test samples included, as in PFLlib.

    Args:
        root: folder that contains ag_news.
        max_length: words per article, at least 1; longer articles are cut, shorter ones padded.
        vocab_size: largest number of word numbers, at least 2: rarer words get 0. The default is the vocabulary size of
            net FastText and numbers every word of the whole data set. With another value, set ``model.net.vocab_size``
            too.
        min_count: words that occur less often in the pool get 0, at least 1.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if a value is out of range.

    Source: X. Zhang, J. Zhao and Y. LeCun, "Character-level Convolutional Networks for Text Classification", NeurIPS
    2015.
    """

    num_classes = 4

    def __init__(
        self,
        root: str = "data",
        max_length: int = 200,
        vocab_size: int = 98_635,
        min_count: int = 1,
        **kwargs: Unpack[DivisionSettings],
    ) -> None:
        super().__init__(root=root, **kwargs)
        check_integers("data.", max_length=max_length, vocab_size=vocab_size, min_count=min_count)
        # 2 numbers at least: 0 for unknown words, and one word
        limits = {"max_length": (max_length, 1), "vocab_size": (vocab_size, 2), "min_count": (min_count, 1)}
        for name, (value, least) in limits.items():
            if value < least:
                raise MisconfigurationException(f"data.{name}={value} must be at least {least}")
        self.vocab_size = vocab_size
        self.min_count = min_count
        self.input_shape = (max_length,)

    @property
    def fitted_on(self) -> FittedOn:
        """Return "all clients": the words of all articles are counted to number them."""
        return "all clients"

    def load(self) -> tuple[Tensor, Tensor]:
        """Read the articles, those of train.csv first, and number their words.

        Returns:
            Word numbers [N, max_length], int64 in [0, vocab_size), and labels [N].

        Raises:
            MisconfigurationException: if there is no file, or a row isn't label, title, description.
        """
        files = [read_articles(path) for path in article_paths(self.root)]
        articles = [article for file in files for article in file]
        # one file alone is a pool without original test half
        if len(files) == 2:
            self.original_test = torch.arange(len(files[0]), len(articles))
        texts = [tokenize(text) for _, text in articles]
        numbers = number_words(texts, self.vocab_size, self.min_count)
        return encode(texts, numbers, self.input_shape[0]), torch.tensor([label for label, _ in articles])


def article_paths(root: str) -> list[Path]:
    """Return the paths of the existing files, train.csv first.

    Args:
        root: folder that contains ag_news.

    Raises:
        MisconfigurationException: if there is no file.
    """
    folder = Path(root, "ag_news")
    if paths := [path for path in (folder / "train.csv", folder / "test.csv") if path.is_file()]:
        return paths
    raise MisconfigurationException(
        f"data.root={root!r}: there is no train.csv or test.csv in {folder}; put them there, or set "
        "data.root to the folder that ag_news is in"
    )


def read_articles(path: Path) -> list[tuple[int, str]]:
    """Read one file.

    Args:
        path: a file of rows label (1 to 4), title, description, with or without header.

    Returns:
        Label, 0 to 3, and title and description as one text, for each row.

    Raises:
        MisconfigurationException: if the file has other rows, or none.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise MisconfigurationException(f"{path} cannot be read as a CSV file ({error}); replace it") from None
    # copies with and without header line are around
    first = 1 if rows and rows[0] and rows[0][0].lower() in HEADERS else 0
    if len(rows) == first:
        raise MisconfigurationException(f"{path} has no articles; replace it, or remove it to use the other file")
    return [_article(path, number, row) for number, row in enumerate(rows[first:], start=first + 1)]


def _article(path: Path, number: int, row: list[str]) -> tuple[int, str]:
    if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
        raise MisconfigurationException(
            f"{path}: row {number} is not a label from 1 to 4, a title and a description; correct or remove it"
        )
    return int(row[0]) - 1, f"{row[1]} {row[2]}"


LETTERS = "\0 abcdefghijklmnopqrstuvwxyz0123456789.,'-\"():$&"
"""The 48 letters; the first stands for unknown letters and for padding."""

TOPICS = ("world", "sports", "business", "science")


class AGNewsLetters(OwnedData):
    """The next letter of AG News articles, from ``root/ag_news/train.csv`` and ``test.csv``, or one of the two.

    Capital letters become small ones. Each client holds one part of a topic: a topic's articles, in their order, are
    cut into equal parts, so that all texts of a client are of one topic.

    Args:
        root: folder that contains ag_news.
        max_length: letters per article, at least 1; padding doesn't count in losses and metrics.
        parts: clients of each of the four topics, at least 1.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if a value is out of range, or there is no such file.

    Source: X. Zhang, J. Zhao and Y. LeCun, "Character-level Convolutional Networks for Text Classification", NeurIPS
    2015.
    """

    def __init__(
        self, root: str = "data", max_length: int = 100, parts: int = 5, **kwargs: Unpack[DivisionSettings]
    ) -> None:
        super().__init__(NextToken(len(LETTERS)), root=root, **kwargs)
        check_integers("data.", max_length=max_length, parts=parts)
        for name, value in {"max_length": max_length, "parts": parts}.items():
            if value < 1:
                raise MisconfigurationException(f"data.{name}={value} must be at least 1")
        self.parts_of_a_topic = parts
        self.input_shape = (max_length,)

    def load(self) -> Loaded:
        """Read the articles, those of train.csv first, and number their letters."""
        files = [read_articles(path) for path in article_paths(self.root)]
        articles = [article for file in files for article in file]
        if len(files) == 2:
            self.original_test = torch.arange(len(files[0]), len(articles))
        # one letter more than a net reads, since the target of the last letter is the letter after it
        length = self.input_shape[0] + 1
        texts = [text.lower()[:length] for _, text in articles]
        numbers = letter_numbers([text.ljust(length, LETTERS[0]) for text in texts], LETTERS)
        targets = numbers[:, 1:].clone()
        sizes = torch.tensor([len(text) for text in texts])
        # padding is no letter to predict: losses and metrics leave it out
        targets[torch.arange(1, length) >= sizes.unsqueeze(1)] = NextToken(1).ignore_index
        return Loaded(numbers[:, :-1].contiguous(), targets, self._owners([topic for topic, _ in articles]))

    def _owners(self, topics: list[int]) -> list[str]:
        of_all = torch.tensor(topics)
        owners = [""] * len(topics)
        for topic, name in enumerate(TOPICS):
            rows = (of_all == topic).nonzero().flatten()
            for part, of_part in enumerate(rows.tensor_split(self.parts_of_a_topic)):
                for row in of_part.tolist():
                    owners[row] = f"{name} {part + 1}"
        return owners
