"""The AG News data set, letter by letter."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.ag_news import article_paths, read_articles
from pfl_lightning.data.checks import check_integers
from pfl_lightning.data.datamodule import DivisionSettings
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.data.words import letter_numbers
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import NextToken

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
