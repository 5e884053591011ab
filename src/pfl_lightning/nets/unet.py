"""The U-Net, for classes or values of pixels and voxels."""

from itertools import pairwise
from typing import Any, Literal, cast, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.nets.base import Net

Norm = Literal["batch", "instance"]
"""Normalisation behind convolutions: over the batch, or over each image's own pixels."""
LAYERS: dict[int, dict[str, Any]] = {
    2: {"convolution": nn.Conv2d, "batch": nn.BatchNorm2d, "instance": nn.InstanceNorm2d, "pool": nn.MaxPool2d},
    3: {"convolution": nn.Conv3d, "batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d, "pool": nn.MaxPool3d},
}
"""Layers by the number of dimensions of space."""


class UNet(Net):
    """The U-Net (Ronneberger et al., 2015, https://arxiv.org/abs/1505.04597) for images, and for volumes in 3D.

    Each of ``levels`` resolutions has two convolutions of 3 pixels a side, each with normalisation and ReLU, and twice
    the channels of the resolution above. On the way up, the coarser features are enlarged to the size of the finer ones
    and joined with them. Convolutions are padded, so that outputs have the inputs' size, whatever it is. The classifier
    is the last convolution, of 1 pixel. Volumes have the layers of the 3D U-Net (Çiçek et al., 2016,
    https://arxiv.org/abs/1606.06650), with fewer channels.

    >>> sum(p.numel() for p in UNet((1, 32, 32), 3).parameters())
    118339
    >>> sum(p.numel() for p in UNet((1, 16, 32, 32), 3).parameters())
    353635

    Args:
        input_shape: ``(channels, height, width)`` of an image, or ``(channels, depth, height, width)`` of a volume; at
            least ``2 ** (levels - 1)`` pixels a side, and twice as many for ``instance``.
        num_classes: number of outputs of each pixel.
        width: channels at full resolution.
        levels: number of resolutions.
        norm: ``batch``, whose layers FedBN keeps at the clients, or ``instance``, as in nnU-Net (Isensee et al., 2021,
            https://doi.org/10.1038/s41592-020-01008-z), which treats each image by itself and so takes batches of one.

    Raises:
        MisconfigurationException: if inputs are neither images nor volumes, or too small, or a setting is out of range.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 16,
        levels: int = 3,
        norm: Norm = "batch",
    ) -> None:
        if width < 1 or levels < 1 or norm not in get_args(Norm):
            raise MisconfigurationException(
                f"net UNet: width={width} and levels={levels} must be 1 or more, and norm={norm!r} one of "
                f"{', '.join(get_args(Norm))}."
            )
        # a coarsest resolution of one pixel has no variance, which `batch` takes over the batch
        side = 2 ** (levels - 1) * (2 if norm == "instance" else 1)
        if len(input_shape) not in (3, 4) or min(input_shape[1:]) < side:
            raise MisconfigurationException(
                f"net UNet takes images (channels, height, width) and volumes (channels, depth, height, width) of at "
                f"least {side} pixels a side, not input_shape={tuple(input_shape)}; "
                + ("take fewer model.net.levels." if len(input_shape) in (3, 4) else "net MLP takes any shape.")
            )
        layers = LAYERS[len(input_shape) - 1]
        super().__init__(
            Resolutions(input_shape[0], [width * 2**level for level in range(levels)], layers, norm),
            layers["convolution"](width, num_classes, 1),
        )


class Resolutions(nn.Module):
    """The way down to coarse resolutions and up again.

    Args:
        channels: channels of the inputs.
        widths: channels of each resolution, from fine to coarse.
        layers: layers of `LAYERS`.
        norm: name of the normalisation.
    """

    def __init__(self, channels: int, widths: list[int], layers: dict[str, Any], norm: Norm) -> None:
        super().__init__()
        sizes = list(pairwise([channels, *widths]))
        self.down = nn.ModuleList(block(before, after, layers, norm) for before, after in sizes)
        # joined with the finer resolution's own channels
        self.up = nn.ModuleList(block(fine + coarse, fine, layers, norm) for fine, coarse in pairwise(widths))
        self.pool = layers["pool"](2)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of each pixel ``[n, width, *sizes]``.

        Args:
            x: inputs ``[n, channels, *sizes]``.
        """
        found: list[Tensor] = []
        for place, down in enumerate(self.down):
            found.append(down(self.pool(found[-1]) if place else x))
        features = found.pop()
        for up in reversed(cast("list[nn.Module]", self.up)):
            finer = found.pop()
            # to the finer size and not by 2, as pooling an odd side has left a pixel out
            larger = F.interpolate(features, size=finer.shape[2:], mode="nearest")
            features = up(torch.cat([finer, larger], 1))
        return features


def block(before: int, after: int, layers: dict[str, Any], norm: Norm) -> nn.Sequential:
    """Return two convolutions, each with normalisation and ReLU.

    Args:
        before: channels of the inputs.
        after: channels of the outputs.
        layers: layers of `LAYERS`.
        norm: name of the normalisation.
    """
    # scale and shift of instance normalisation are learnt too, as nnU-Net's; BatchNorm has them by default
    own = {"affine": True} if norm == "instance" else {}
    return nn.Sequential(
        *(layers["convolution"](before, after, 3, padding=1, bias=False), layers[norm](after, **own), nn.ReLU()),
        *(layers["convolution"](after, after, 3, padding=1, bias=False), layers[norm](after, **own), nn.ReLU()),
    )
