"""Residual networks: for large images, and for small ones."""

from collections import OrderedDict
from itertools import pairwise

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net, check_images


class ResNet18(Net):
    """torchvision's ResNet-18 (He et al., 2016, https://arxiv.org/abs/1512.03385), randomly initialised.

    It keeps the 7x7 convolution and the pooling for large images. Images of up to 32 pixels a side end as one pixel, so
    a batch of one sample cannot be normalised: use ``data.last_batch=drop`` for them.

    >>> sum(p.numel() for p in ResNet18((3, 64, 64), 200).parameters())
    11279112

    Args:
        input_shape: ``(channels, height, width)`` of one image; the channels change the first convolution only.
        num_classes: number of classes.

    Raises:
        MisconfigurationException: if the data are not images.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        # imported here: torchvision takes a second, and other nets don't need it
        from torchvision.models import resnet18

        if len(input_shape) != 3:
            raise MisconfigurationException(
                f"net ResNet18 takes images, not input_shape={tuple(input_shape)}; net FastText takes texts."
            )
        layers = OrderedDict(resnet18(num_classes=num_classes).named_children())
        classifier = layers.pop("fc")
        if input_shape[0] != 3:
            layers["conv1"] = nn.Conv2d(input_shape[0], 64, 7, stride=2, padding=3, bias=False)
            # initialised as all of torchvision's convolutions
            nn.init.kaiming_normal_(layers["conv1"].weight, mode="fan_out", nonlinearity="relu")
        super().__init__(nn.Sequential(layers | {"flatten": nn.Flatten()}), classifier)


class CifarResNet(Net):
    """The residual network for CIFAR (He et al., 2016, https://arxiv.org/abs/1512.03385, section 4.2), of any width.

    Three stages of ``(depth - 2) / 6`` basic blocks with 16, 32 and 64 channels times ``width``, on full, half and
    quarter resolution, then the mean over all pixels. Where the resolution changes, the shortcut is a 1x1 convolution
    with BatchNorm, as in FedLAW (https://arxiv.org/abs/2302.10911) and FedAWA (https://arxiv.org/abs/2503.15842), whose
    networks are ResNet-20, 56 and 110, and WRN56-k with ``depth=56`` and ``width=k``. Layers have PyTorch's
    initialisation.

    >>> sum(p.numel() for p in CifarResNet((3, 32, 32), 10).parameters())
    272474

    Args:
        input_shape: ``(channels, height, width)`` of one image.
        num_classes: number of classes.
        depth: number of layers, 6n + 2.
        width: factor of the number of channels, at least 1.

    Raises:
        MisconfigurationException: if the data are not images, or there is no network of this depth and width.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, depth: int = 20, width: int = 1) -> None:
        # imported here: torchvision takes a second, and other nets don't need it
        from torchvision.models.resnet import BasicBlock

        channels, _, _ = check_images("CifarResNet", input_shape)
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise MisconfigurationException(
                f"net CifarResNet: depth={depth} is not 6n + 2; 20, 32, 44, 56 and 110 are."
            )
        if width < 1:
            raise MisconfigurationException(f"net CifarResNet: width={width} must be at least 1.")
        stages: list[nn.Module] = []
        for before, maps in pairwise((16 * width, 16 * width, 32 * width, 64 * width)):
            # twice the channels come with half the resolution
            stride = maps // before
            shortcut = None
            if stride > 1:
                shortcut = nn.Sequential(nn.Conv2d(before, maps, 1, stride, bias=False), nn.BatchNorm2d(maps))
            others = [BasicBlock(maps, maps) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(BasicBlock(before, maps, stride, shortcut), *others))
        # named as in torchvision's ResNets
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, 16 * width, 3, padding=1, bias=False),
            "bn1": nn.BatchNorm2d(16 * width),
            "relu": nn.ReLU(),
            **{f"layer{number}": stage for number, stage in enumerate(stages, start=1)},
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "flatten": nn.Flatten(),
        }
        super().__init__(nn.Sequential(OrderedDict(layers)), nn.Linear(64 * width, num_classes))
