"""The convolutional network of FedLAW and FedAWA."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Head, Net, cut
from pfl_lightning.nets.images import check_images


class SmallCNN(Net):
    """Three 3x3 convolutions (32, 64 and 64 channels) with ReLU, pooling after the first two, 64 hidden units.

    The CNN of FedLAW (Li et al., 2023, https://arxiv.org/abs/2302.10911), whose experiments FedAWA
    (https://arxiv.org/abs/2503.15842) continues: no padding, no normalisation, no dropout.

    >>> sum(p.numel() for p in SmallCNN((3, 32, 32), 10).parameters())
    122570

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 18 pixels a side.
        num_classes: number of classes.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, both.
        batch_norm: put a BatchNorm layer behind each convolution, which the papers' network doesn't have; FedBN keeps
            these layers at the clients.
        maps: channels of the first convolution, at least 1; the others and the hidden layer have twice as many.

    Raises:
        MisconfigurationException: if the data are not images, or are too small, or there are no ``maps``.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        head: Head = "last",
        batch_norm: bool = False,
        maps: int = 32,
    ) -> None:
        channels, height, width = check_images("SmallCNN", input_shape, 18)
        if maps < 1:
            raise MisconfigurationException(f"net SmallCNN: maps={maps} must be at least 1, such as 32.")
        # each convolution takes off 2 pixels, each pooling halves
        side_h, side_w = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))

        def convolution(before: int, after: int) -> list[nn.Module]:
            norm = [nn.BatchNorm2d(after)] if batch_norm else []
            return [nn.Conv2d(before, after, 3), *norm, nn.ReLU()]

        wide = 2 * maps
        body = [
            *(*convolution(channels, maps), nn.MaxPool2d(2)),
            *(*convolution(maps, wide), nn.MaxPool2d(2)),
            *convolution(wide, wide),
            nn.Flatten(),
        ]
        dense = [nn.Linear(wide * side_h * side_w, wide), nn.ReLU(), nn.Linear(wide, num_classes)]
        super().__init__(*cut(body, dense, head))
