"""The convolutional network of the FedAvg line of papers."""

from torch import nn

from pfl_lightning.nets.base import Head, Net, cut
from pfl_lightning.nets.images import check_images


class CNN(Net):
    """Two 5x5 convolutions (32 and 64 channels), each with ReLU and 2x2 max pooling, 512 hidden units.

    The 4-layer CNN of McMahan et al., 2017 (https://arxiv.org/abs/1602.05629) as personalised federated learning
    uses it: no padding, no normalisation, no dropout.

    >>> sum(p.numel() for p in CNN((1, 28, 28), 10).parameters())
    582026
    >>> sum(p.numel() for p in CNN((3, 32, 32), 10).parameters())
    878538

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 16 pixels a side.
        num_classes: number of classes.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, both.

    Raises:
        MisconfigurationException: if the images are not ``(channels, height, width)`` or are too small.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, head: Head = "last") -> None:
        channels, height, width = check_images("CNN", input_shape, 16)
        # each 5x5 convolution without padding takes off 4 pixels, each pooling halves
        side_h, side_w = ((((side - 4) // 2) - 4) // 2 for side in (height, width))
        body = [
            *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        ]
        dense = [nn.Linear(64 * side_h * side_w, 512), nn.ReLU(), nn.Linear(512, num_classes)]
        super().__init__(*cut(body, dense, head))
