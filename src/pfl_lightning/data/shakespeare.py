"""Shakespeare's plays, letter by letter, by speaking role."""

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import check_integers, existing
from pfl_lightning.data.partitioners import Natural, Partitioner
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, OwnedSettings
from pfl_lightning.data.words import letter_numbers
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import NextToken

LETTERS = "\0\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The file's 65 letters behind one for unknown letters and for padding."""


class Shakespeare(OwnedData):
    """The next letter in the speeches of a role; each of some 300 roles is a client.

    A role's speeches are joined and cut into windows of ``length`` letters, with the letter after each position as
    target. Windows don't overlap, so that no letter to test on is trained on; LEAF has a window for every letter, of
    which the last alone is predicted. The last window is padded, and padding doesn't count. The file doesn't name the
    plays: a role such as First Citizen speaks in several.

    Roles with one or two windows, too few to train, validate and test, are left out unless ``partitioner`` is another.
    ``client_split=time`` trains on a role's first windows and tests on the last ones, as in LEAF.

    The file is ``shakespeare/shakespeare.txt`` below ``root``, the file input.txt of
    https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare: speeches between empty lines, each below a
    line ``NAME:``.

    Args:
        length: letters of a window, at least 1.
        partitioner: how the pool is divided among the clients.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if ``length`` is below 1, the file is missing, or it has no speeches.

    Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018.
    """

    def __init__(
        self,
        length: int = 80,
        partitioner: Partitioner = Natural(min_samples=3),  # noqa: B008 - immutable, and a literal for --print_config
        **kwargs: Unpack[OwnedSettings],
    ) -> None:
        check_integers("data.", length=length)
        if length < 1:
            raise MisconfigurationException(f"data.length={length} must be at least 1, such as 80")
        super().__init__(NextToken(len(LETTERS)), partitioner=partitioner, **kwargs)
        self.input_shape = (length,)

    def load(self) -> Loaded:
        """Read the speeches, and cut them into windows."""
        path = existing(self.root, "shakespeare", "shakespeare.txt", "tinyshakespeare")
        spoken: dict[str, list[str]] = {}
        for speech in path.read_text(encoding="utf-8").split("\n\n"):
            head, _, text = speech.strip().partition("\n")
            if head.endswith(":") and text:
                spoken.setdefault(head[:-1], []).append(text)
        [length] = self.input_shape
        windows, owners, times = [], [], []
        for role, texts in spoken.items():
            whole = "\n".join(texts)
            # the last letter is a target and no input
            for start in range(0, len(whole) - 1, length):
                windows.append(whole[start : start + length + 1])
                owners.append(role)
                times.append(start)
        if not windows:
            raise MisconfigurationException(f"{path} has no speeches below lines such as 'ROMEO:'; fetch it again")
        numbers = letter_numbers([window.ljust(length + 1, LETTERS[0]) for window in windows], LETTERS)
        targets = numbers[:, 1:].clone()
        sizes = torch.tensor([len(window) for window in windows])
        # padding is no letter to predict: losses and metrics leave it out
        targets[torch.arange(1, length + 1) >= sizes.unsqueeze(1)] = NextToken(1).ignore_index
        return Loaded(numbers[:, :-1].contiguous(), targets, owners, time=times)

    def encode(self, prompt: str) -> list[int]:
        """Return the numbers of a text's letters."""
        found: list[int] = letter_numbers([prompt], LETTERS)[0].tolist()
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of letter numbers."""
        return "".join(LETTERS[token] for token in tokens)

    @property
    def end_tokens(self) -> frozenset[int]:
        """No letter ends a text."""
        return frozenset()
