"""A small causal transformer."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Net


class Transformer(Net):
    """Decoder of a language model: each position attends to earlier positions and to the position's own token.

    Token and position vectors, layers of self-attention and a perceptron, each behind a layer norm, as in GPT-2. The
    classifier is the linear layer at the end, with logits for each position.

    >>> Transformer((100,), 48)(torch.zeros(2, 100, dtype=torch.int64)).shape
    torch.Size([2, 100, 48])

    Args:
        input_shape: ``(length,)`` of one text, whose entries are token numbers; shorter texts may be given too.
        num_classes: number of tokens, and of logits of a position.
        width: width of the vectors, a multiple of ``heads``.
        depth: number of layers, at least 1.
        heads: number of attention heads, at least 1.

    Raises:
        MisconfigurationException: if a number is out of range, or the data are not texts.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 64, depth: int = 2, heads: int = 4
    ) -> None:
        if len(input_shape) != 1:
            raise MisconfigurationException(
                f"net Transformer takes texts as rows of token numbers, not input_shape={tuple(input_shape)}."
            )
        if min(width, depth, heads) < 1 or width % heads:
            raise MisconfigurationException(
                f"net Transformer: width={width}, depth={depth} and heads={heads} must be at least 1, and width a "
                "multiple of heads."
            )
        layers = [Layer(width, heads) for _ in range(depth)]
        body = nn.Sequential(TokensInOrder(input_shape[0], num_classes, width), *layers, nn.LayerNorm(width))
        super().__init__(body, nn.Linear(width, num_classes))


class TokensInOrder(nn.Module):
    """The sum of a token vector and a position vector.

    Args:
        length: number of positions.
        vocabulary: number of tokens.
        width: width of the vectors.
    """

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        # GPT-2's standard deviation; PyTorch's default of 1 for embeddings is far too large beside the layers
        for weights in (self.tokens.weight, self.positions):
            nn.init.normal_(weights, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors ``[n, T, width]``.

        Args:
            x: token numbers ``[n, T]``.
        """
        if x.is_floating_point():
            raise MisconfigurationException("net Transformer takes token numbers, int64; net MLP takes quantities.")
        vectors: Tensor = self.tokens(x) + self.positions[: x.shape[1]]
        return vectors


class Layer(nn.Module):
    """Causal self-attention and a perceptron, both with a residual connection.

    Args:
        width: width of the vectors.
        heads: number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors ``[n, T, width]``.

        Args:
            x: vectors ``[n, T, width]``.
        """
        x = x + self.attended(self.norm(x))
        added: Tensor = self.perceptron(x)
        return x + added

    def attended(self, x: Tensor) -> Tensor:
        """Return the causal attention's output for each position.

        Args:
            x: vectors ``[n, T, width]``.
        """
        # in plain matrix products, which run under vmap for many clients at once
        n, length, width = x.shape
        split = self.queries_keys_values(x).view(n, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) * (width // self.heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ values
        taken: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return taken
