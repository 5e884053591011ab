"""The densely connected network."""

from collections import OrderedDict
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net, check_images

BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
"""Numbers of layers of the four dense blocks, by depth."""


class DenseNet(Net):
    """torchvision's DenseNet (Huang et al., 2017, https://arxiv.org/abs/1608.06993) for small images.

    Its 7x7 convolution of stride 2 and the pooling after it are replaced by a 3x3 convolution that keeps the
    resolution, as FedLAW (https://arxiv.org/abs/2302.10911) has it for CIFAR. Randomly initialised. Below
    16 pixels a side images end as one pixel, so a batch of one sample cannot be normalised.

    >>> sum(p.numel() for p in DenseNet((3, 32, 32), 10).parameters())
    6956426

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 8 pixels a side.
        num_classes: number of classes.
        depth: number of layers.

    Raises:
        MisconfigurationException: if the data are not images, or are too small, or there is no network of this depth.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, depth: Literal[121, 169, 201] = 121) -> None:
        # imported here: torchvision takes a second, and other nets don't need it
        from torchvision import models

        channels, _, _ = check_images("DenseNet", input_shape, 8)
        if depth not in BLOCKS:
            raise MisconfigurationException(f"net DenseNet: depth={depth} is none of {', '.join(map(str, BLOCKS))}.")
        dense_net = models.DenseNet(block_config=BLOCKS[depth], num_classes=num_classes)
        layers = OrderedDict(dense_net.features.named_children())
        layers["conv0"] = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        # initialised as all of torchvision's convolutions
        nn.init.kaiming_normal_(layers["conv0"].weight)
        del layers["pool0"]
        end = {"relu5": nn.ReLU(), "pool5": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        super().__init__(nn.Sequential(layers | end), dense_net.classifier)
