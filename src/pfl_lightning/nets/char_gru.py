"""A small recurrent network for letters."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Net


class CharGRU(Net):
    """Letter vectors, one layer of gated recurrent units, and logits for each position.

    A smaller relative of LEAF's network for Shakespeare, which has two layers of 256 LSTM units. The recurrence is
    written in plain matrix products, since PyTorch's recurrent kernels don't run for many clients at once (vmap); the
    outputs are those of ``torch.nn.GRU`` with the same weights.

    >>> CharGRU((80,), 66)(torch.zeros(2, 80, dtype=torch.int64)).shape
    torch.Size([2, 80, 66])

    Args:
        input_shape: ``(length,)`` of one text, whose entries are letter numbers; other lengths may be given too.
        num_classes: number of letters, and of logits of a position.
        width: number of recurrent units, at least 1.
        embedding: width of the letter vectors, at least 1; LEAF's is 8.

    Raises:
        MisconfigurationException: if a number is out of range, or the data are not texts.

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
    Translation", EMNLP 2014.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 64, embedding: int = 8) -> None:
        if len(input_shape) != 1:
            raise MisconfigurationException(
                f"net CharGRU takes texts as rows of letter numbers, not input_shape={tuple(input_shape)}."
            )
        if min(width, embedding) < 1:
            raise MisconfigurationException(f"net CharGRU: width={width} and embedding={embedding} must be at least 1.")
        super().__init__(RecurrentUnits(num_classes, embedding, width), nn.Linear(width, num_classes))


class RecurrentUnits(nn.Module):
    """A layer of gated recurrent units over letter vectors.

    Args:
        vocabulary: number of letters.
        embedding: width of the letter vectors.
        width: number of units.
    """

    def __init__(self, vocabulary: int, embedding: int, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, embedding)
        # reset gates, update gates and candidates side by side, in the order of torch.nn.GRU
        self.of_input = nn.Linear(embedding, 3 * width)
        self.of_state = nn.Linear(width, 3 * width)
        # torch.nn.GRU's range, which is that of of_state and not that of of_input
        for parameter in self.of_input.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after each letter, ``[n, T, width]``.

        Args:
            x: letter numbers ``[n, T]``.
        """
        if x.is_floating_point():
            raise MisconfigurationException("net CharGRU takes letter numbers, int64; net MLP takes quantities.")
        of_inputs = self.of_input(self.letters(x))
        state = of_inputs.new_zeros(len(x), of_inputs.shape[-1] // 3)
        states = []
        for of_input in of_inputs.unbind(1):
            reset, update, candidate = of_input.chunk(3, -1)
            reset_by, update_by, candidate_by = self.of_state(state).chunk(3, -1)
            candidate = torch.tanh(candidate + torch.sigmoid(reset + reset_by) * candidate_by)
            state = torch.lerp(candidate, state, torch.sigmoid(update + update_by))
            states.append(state)
        return torch.stack(states, 1)
