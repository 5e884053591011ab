"""The text classifier of the FedAvg line of papers."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Head, Net, cut


class FastText(Net):
    """A mean of word vectors over all positions, a linear layer without activation and a linear classifier.

    The fastText of Joulin et al., 2017 (https://arxiv.org/abs/1607.01759) as used in personalised federated learning
    (PFLlib): padding counts in the mean, as zero vectors. PFLlib ends in ``log_softmax``, which is left out here: the
    cross-entropy applies it anyway, and a second time changes neither loss nor accuracy.

    >>> sum(p.numel() for p in FastText((200,), 4).parameters())
    3157508

    Args:
        input_shape: ``(length,)`` of one text, whose entries are word numbers in ``[0, vocab_size)``; 0 is padding.
        num_classes: number of classes.
        vocab_size: number of word vectors, at least ``data.vocab_size``; the default is that of data AGNews.
        width: width of the word vectors and of the features.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, both.

    Raises:
        MisconfigurationException: if the data are not texts, or have larger word numbers.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        vocab_size: int = 98_635,
        width: int = 32,
        head: Head = "last",
    ) -> None:
        if len(input_shape) != 1:
            raise MisconfigurationException(
                f"net FastText takes texts as rows of word numbers, not input_shape={tuple(input_shape)}; "
                "net MLP takes any shape."
            )
        if min(vocab_size, width) < 1:
            raise MisconfigurationException(
                f"net FastText: vocab_size={vocab_size} and width={width} must be at least 1."
            )
        # padding_idx keeps word 0 a zero vector without a gradient
        body = [WordVectors(vocab_size, width, padding_idx=0), MeanOfPositions()]
        super().__init__(*cut(body, [nn.Linear(width, width), nn.Linear(width, num_classes)], head))


class WordVectors(nn.Embedding):
    """An embedding whose error for too large word numbers names the setting to change."""

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors ``[n, length, width]``.

        Args:
            x: word numbers ``[n, length]``.
        """
        try:
            return super().forward(x)
        # only the CPU raises this; a GPU ends with an error of its own
        except IndexError:
            raise MisconfigurationException(
                f"net FastText has vocab_size={self.num_embeddings} and the data have larger word numbers; set "
                "model.net.vocab_size to data.vocab_size, or data.vocab_size to less."
            ) from None


class MeanOfPositions(nn.Module):
    """The mean of a text's word vectors."""

    def forward(self, x: Tensor) -> Tensor:
        """Return means ``[n, width]``.

        Args:
            x: vectors ``[n, length, width]``.
        """
        return x.mean(dim=1)
