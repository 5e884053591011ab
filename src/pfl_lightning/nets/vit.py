"""The vision transformer."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.nets.base import Net, check_images


class ViT(Net):
    """torchvision's vision transformer (Dosovitskiy et al., 2021, https://arxiv.org/abs/2010.11929) for small images.

    The defaults are those of FedAWA (https://arxiv.org/abs/2503.15842) for CIFAR; for the 64 pixels of Tiny-ImageNet it
    takes ``patch=16``. The features are the class token's. The classifier has PyTorch's initialisation of linear
    layers: with torchvision's zeros, methods that keep it fixed at first would train no feature at all.

    >>> sum(p.numel() for p in ViT((3, 32, 32), 10).parameters())
    9532938

    Args:
        input_shape: ``(channels, side, side)`` of one image, square.
        num_classes: number of classes.
        patch: pixels a side of a patch; it divides the image's side.
        dim: width of the tokens and features, a multiple of ``heads``.
        depth: number of layers.
        heads: number of attention heads.
        mlp: hidden units of the perceptron in each layer.
        dropout: probability of dropout after attention, in the perceptron and on the tokens, in [0, 1).

    Raises:
        MisconfigurationException: if the data are not images that divide into patches, or a setting is out of range.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        patch: int = 4,
        dim: int = 512,
        depth: int = 6,
        heads: int = 8,
        mlp: int = 512,
        dropout: float = 0.1,
    ) -> None:
        # imported here: torchvision takes a second, and other nets don't need it
        from torchvision.models import VisionTransformer

        if min(patch, dim, depth, heads, mlp) < 1:
            raise MisconfigurationException(
                f"net ViT: patch={patch}, dim={dim}, depth={depth}, heads={heads} and mlp={mlp} must be at least 1."
            )
        if not 0 <= dropout < 1:
            raise MisconfigurationException(f"net ViT: dropout={dropout} must be at least 0 and less than 1.")
        if dim % heads:
            raise MisconfigurationException(f"net ViT: dim={dim} must be a multiple of heads={heads}.")
        channels, height, width = check_images("ViT", input_shape)
        if height != width or height % patch:
            raise MisconfigurationException(
                f"net ViT takes square images whose side is a multiple of patch={patch}, "
                f"not input_shape={tuple(input_shape)}; set model.net.patch to a divisor, or use another net."
            )
        transformer = VisionTransformer(height, patch, depth, heads, dim, mlp, dropout)
        # torchvision's classifier goes, and the class token becomes the features
        transformer.heads = nn.Sequential()
        transformer.conv_proj = patches = nn.Conv2d(channels, dim, patch, stride=patch)
        # initialised as by torchvision
        nn.init.trunc_normal_(patches.weight, std=(channels * patch**2) ** -0.5)
        nn.init.zeros_(patches.get_parameter("bias"))
        super().__init__(transformer, nn.Linear(dim, num_classes))
