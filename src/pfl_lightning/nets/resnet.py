"""The residual network."""

from collections import OrderedDict

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net


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
