"""The convolutional network of MOON and FedDisco."""

from torch import nn

from pfl_lightning.nets.base import Head, Net, cut
from pfl_lightning.nets.images import check_images


class LeNet5(Net):
    """Two 5x5 convolutions (6 and 16 channels), each with ReLU and 2x2 max pooling, 120 and 84 hidden units.

    LeNet-5 (LeCun et al., 1998) in today's form. MOON (https://arxiv.org/abs/2103.16257) and FedDisco
    (https://arxiv.org/abs/2305.19229) use it for CIFAR-10; MOON's projection head is not part of it.

    >>> sum(p.numel() for p in LeNet5((3, 32, 32), 10).parameters())
    62006

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 16 pixels a side.
        num_classes: number of classes.
        head: the classifier's layers: the ``last`` linear layer or ``all_fc``, all three.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, head: Head = "last") -> None:
        channels, height, width = check_images("LeNet5", input_shape, 16)
        # each convolution takes off 4 pixels, each pooling halves
        side_h, side_w = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        body = [
            *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
        ]
        dense = [
            *(nn.Linear(16 * side_h * side_w, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, num_classes),
        ]
        super().__init__(*cut(body, dense, head))
