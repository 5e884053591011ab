"""Convolutional networks of federated papers, for small images."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Head, Net, check_images, cut


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
