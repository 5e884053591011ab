"""The convolutional network of FedPAC."""

from torch import nn

from pfl_lightning.nets.base import Head, Net, cut
from pfl_lightning.nets.images import check_images


class LeakyCNN(Net):
    """Two or three convolutions, each with leaky ReLU and 2x2 max pooling, and 128 hidden units with leaky ReLU.

    The CNN of FedPAC (Xu et al., 2023, https://arxiv.org/abs/2306.11867). The convolutions are 5x5 with 16 channels,
    5x5 with 32 channels and a padding of 1, and, for images of 32 pixels a side or more, 3x3 with 64 channels and a
    padding of 1. The paper's CIFAR-10 has three, its Fashion-MNIST two.

    >>> sum(p.numel() for p in LeakyCNN((3, 32, 32), 10).parameters())
    107690
    >>> sum(p.numel() for p in LeakyCNN((1, 28, 28), 10).parameters())
    117066

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 12 pixels a side.
        num_classes: number of classes.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, both.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, head: Head = "last") -> None:
        channels, height, width = check_images("LeakyCNN", input_shape, 12)
        body: list[nn.Module] = [
            *(nn.Conv2d(channels, 16, 5), nn.LeakyReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)),
        ]
        # the first convolution takes off 4 pixels and the second 2, each pooling halves
        side_h, side_w = (((side - 4) // 2 - 2) // 2 for side in (height, width))
        maps = 32
        if min(height, width) >= 32:
            body += [nn.Conv2d(32, 64, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
            side_h, side_w, maps = side_h // 2, side_w // 2, 64
        dense = [nn.Linear(maps * side_h * side_w, 128), nn.LeakyReLU(), nn.Linear(128, num_classes)]
        super().__init__(*cut([*body, nn.Flatten()], dense, head))
