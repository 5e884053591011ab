"""The multi-layer perceptron."""

from math import prod

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.nets.base import Head, Net, cut


class MLP(Net):
    """A fully connected network with ReLU between the layers.

    >>> sum(p.numel() for p in MLP((1, 8, 8), 10).parameters())
    4810

    Args:
        input_shape: shape of one sample, without the batch; it is flattened.
        num_classes: number of classes.
        hidden: widths of the hidden layers, at least 1 each; an empty tuple makes a linear classifier.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, all of them.

    Raises:
        MisconfigurationException: if a width is out of range; in use, if the inputs are integers.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        hidden: tuple[int, ...] = (64,),
        head: Head = "last",
    ) -> None:
        if any(width < 1 for width in hidden):
            raise MisconfigurationException(f"model.net.hidden={list(hidden)} must be 1 or more each, such as [64].")
        # widths of inputs and hidden layers; zip stops before the last one, which feeds the output layer
        widths = (prod(input_shape), *hidden)
        dense: list[nn.Module] = []
        for width_in, width_out in zip(widths, hidden, strict=False):
            dense += [nn.Linear(width_in, width_out), nn.ReLU()]
        dense.append(nn.Linear(widths[-1], num_classes))
        super().__init__(*cut([FlattenQuantities()], dense, head))


class FlattenQuantities(nn.Flatten):
    """A flattening layer for quantities, which refuses word numbers.

    The size of a word number has no meaning, and a shape doesn't tell texts from quantities, so the type of the inputs
    is checked.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors ``[n, d]``.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        if not x.is_floating_point():
            raise MisconfigurationException(
                f"net MLP takes no {x.dtype} inputs; make floats of quantities, or take net FastText for texts."
            )
        return super().forward(x)
