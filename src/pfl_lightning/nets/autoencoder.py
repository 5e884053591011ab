"""A convolutional autoencoder."""

from itertools import pairwise

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net
from pfl_lightning.nets.unet import LAYERS


class Autoencoder(Net):
    """A convolutional autoencoder of images, or of volumes: the encoder as features, the decoder as classifier.

    The encoder halves the sides ``levels`` times, by convolutions of 3 pixels a side with stride 2 and ReLU, from
    ``width`` channels on with twice as many in each, and ends in a linear layer to the code. The decoder goes the same
    way back, by enlargements to the sizes of the encoder, each with a convolution.

    >>> sum(p.numel() for p in Autoencoder((1, 28, 28), 1).parameters())
    111521

    Args:
        input_shape: ``(channels, height, width)`` of an image, or ``(channels, depth, height, width)`` of a volume; at
            least 2 pixels a side.
        num_outputs: number of channels of the reconstruction.
        width: channels of the first convolution.
        code: numbers in the code.
        levels: number of halvings.

    Raises:
        MisconfigurationException: if inputs are neither images nor volumes, or a setting is out of range.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, width: int = 16, code: int = 32, levels: int = 2
    ) -> None:
        if min(width, code, levels) < 1:
            raise MisconfigurationException(
                f"net Autoencoder: width={width}, code={code} and levels={levels} must be 1 or more."
            )
        if len(input_shape) not in (3, 4) or min(input_shape[1:]) < 2:
            raise MisconfigurationException(
                "net Autoencoder takes images (channels, height, width) and volumes (channels, depth, height, width) "
                f"of at least 2 pixels a side, not input_shape={tuple(input_shape)}; net MLP takes vectors."
            )
        channels, *sides = input_shape
        convolution = LAYERS[len(sides)]["convolution"]
        # from fine to coarse; a convolution of stride 2 rounds odd sides up
        sizes = [tuple(-(-side // 2**level) for side in sides) for level in range(levels + 1)]
        widths = [width * 2**level for level in range(levels)]
        encoder: list[nn.Module] = []
        for before, after in pairwise([channels, *widths]):
            encoder += [convolution(before, after, 3, stride=2, padding=1), nn.ReLU()]
        flat = widths[-1]
        for side in sizes[-1]:
            flat *= side
        decoder: list[nn.Module] = [nn.Linear(code, flat), nn.ReLU(), nn.Unflatten(1, (widths[-1], *sizes[-1]))]
        for size, (before, after) in zip(sizes[-2::-1], pairwise([*widths[::-1], num_outputs]), strict=True):
            decoder += [nn.Upsample(size), convolution(before, after, 3, padding=1), nn.ReLU()]
        # outputs have any sign: reconstructions of values around 0, or logits
        super().__init__(nn.Sequential(*encoder, nn.Flatten(), nn.Linear(flat, code)), nn.Sequential(*decoder[:-1]))
