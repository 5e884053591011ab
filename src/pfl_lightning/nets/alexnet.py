"""The simplified AlexNet of FedReMa."""

from torch import nn

from pfl_lightning.nets.base import Head, Net, check_images, cut


class AlexNet(Net):
    """Five padded 3x3 convolutions (32, 64, 128, 256 and 256 channels) and three fully connected layers.

    The simplified AlexNet of FedReMa (Liang et al., 2024, https://arxiv.org/abs/2411.01825). Pooling and ReLU follow
    the first, second and fifth convolution; there is no activation between the others, nor between the fully connected
    layers, as in the official code. It has no dropout and no normalisation.

    >>> net = AlexNet((3, 32, 32), 10)
    >>> [sum(p.numel() for p in part.parameters()) for part in (net.features, net.classifier)]
    [978496, 2890250]

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 12 pixels a side.
        num_classes: number of classes.
        head: the classifier's layers: the ``last`` linear layer or, as in the paper, ``all_fc``, all three.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, head: Head = "all_fc") -> None:
        channels, height, width = check_images("AlexNet", input_shape, 12)
        # two poolings halve the side; the last one has overlapping windows of 3 pixels
        side_h, side_w = ((side // 4 - 3) // 2 + 1 for side in (height, width))
        body = [
            *(nn.Conv2d(channels, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.Conv2d(128, 256, 3, padding=1),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.MaxPool2d(3, stride=2), nn.ReLU()),
            nn.Flatten(),
        ]
        dense: list[nn.Module] = [
            nn.Linear(256 * side_h * side_w, 1024),
            nn.Linear(1024, 512),
            nn.Linear(512, num_classes),
        ]
        super().__init__(*cut(body, dense, head))
