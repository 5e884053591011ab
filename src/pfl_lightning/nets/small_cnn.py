"""The convolutional network of FedLAW and FedAWA."""

from itertools import pairwise

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
        batch_norm: normalise behind each convolution, which FedLAW doesn't; FedBN keeps these layers at the clients.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, head: Head = "last", batch_norm: bool = False
    ) -> None:
        channels, height, width = check_images("SmallCNN", input_shape, 18)
        # each convolution takes off 2 pixels, each pooling halves
        side_h, side_w = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
        maps, body = (channels, 32, 64, 64), list[nn.Module]()
        for layer, (maps_in, maps_out) in enumerate(pairwise(maps)):
            norm = [nn.BatchNorm2d(maps_out)] if batch_norm else []
            pool = [nn.MaxPool2d(2)] if layer < 2 else []
            body += [nn.Conv2d(maps_in, maps_out, 3), *norm, nn.ReLU(), *pool]
        body.append(nn.Flatten())
        dense = [nn.Linear(64 * side_h * side_w, 64), nn.ReLU(), nn.Linear(64, num_classes)]
        super().__init__(*cut(body, dense, head))
