"""The networks of FedClassAvg: different feature extractors with features of one width, under equal classifiers."""

from torch import nn

from pfl_lightning.nets.base import Net, check_images
from pfl_lightning.nets.resnet import ResNet18

FEATURES = 512
"""Width of the features of all these networks."""


def shared_classifier(num_classes: int) -> nn.Sequential:
    """Return a ReLU and a linear layer, with the same names and shapes for each network.

    The ReLU is in the classifier so that features keep their negative values.

    >>> sum(p.numel() for p in shared_classifier(10).parameters())
    5130

    Args:
        num_classes: number of classes.
    """
    return nn.Sequential(nn.ReLU(), nn.Linear(FEATURES, num_classes))


class ResNet18Features(Net):
    """ResNet-18 with a linear layer to 512 features, and the classifier of FedClassAvg.

    The features are the outputs of that layer, before the classifier's ReLU. See `ResNet18` for the rest.
    Source: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226).

    >>> sum(p.numel() for p in ResNet18Features((3, 32, 32), 10).features.parameters())
    11439168

    Args:
        input_shape: ``(channels, height, width)`` of one image; the channels change the first convolution only.
        num_classes: number of classes.

    Raises:
        MisconfigurationException: if the data are not images.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        # its own check: `ResNet18` would name itself in the error
        check_images("ResNet18Features", input_shape)
        backbone = ResNet18(input_shape, FEATURES)
        super().__init__(nn.Sequential(backbone.features, backbone.classifier), shared_classifier(num_classes))


class ShuffleNetV2Features(Net):
    """ShuffleNet V2 (x1.0) with a linear layer to 512 features, and the classifier of FedClassAvg.

    torchvision's (Ma et al., 2018, https://arxiv.org/abs/1807.11164), randomly initialised, with its stem for large
    images. Images of up to 32 pixels a side end as one pixel, so a batch of one sample cannot be normalised: use
    ``data.last_batch=drop`` for them. The features are those before the classifier's ReLU.
    Source: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226).

    >>> sum(p.numel() for p in ShuffleNetV2Features((3, 32, 32), 10).features.parameters())
    1778404

    Args:
        input_shape: ``(channels, height, width)`` of one image; the channels change the first convolution only.
        num_classes: number of classes.

    Raises:
        MisconfigurationException: if the data are not images.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        from torchvision.models import shufflenet_v2_x1_0

        channels, _, _ = check_images("ShuffleNetV2Features", input_shape)
        backbone = shufflenet_v2_x1_0(num_classes=FEATURES)
        # torchvision's first convolution takes 3 channels
        backbone.conv1[0] = nn.Conv2d(channels, 24, 3, stride=2, padding=1, bias=False)
        super().__init__(backbone, shared_classifier(num_classes))


class GoogLeNetFeatures(Net):
    """GoogLeNet with a linear layer to 512 features, and the classifier of FedClassAvg.

    torchvision's (Szegedy et al., 2015, https://arxiv.org/abs/1409.4842), with its stem for large images, and with
    PyTorch's fast initialisation of layers instead of its truncated normal one. Images of up to 32 pixels a side end as
    one pixel, so a batch of one sample cannot be normalised: use ``data.last_batch=drop`` for them. The features are
    those before the classifier's ReLU.
    Source: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226).

    >>> sum(p.numel() for p in GoogLeNetFeatures((3, 32, 32), 10, aux=True).features.parameters())
    12504688

    Args:
        input_shape: ``(channels, height, width)`` of one image, at least 15 pixels a side; the channels change the
            first convolution only.
        num_classes: number of classes.
        aux: whether to keep the two auxiliary classifiers for 1000 classes. The paper's parameter count has them; no
            loss uses them.

    Raises:
        MisconfigurationException: if the data are not images, or are too small.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, aux: bool = False) -> None:
        from torchvision.models import GoogLeNet

        channels, _, _ = check_images("GoogLeNetFeatures", input_shape, 15)
        backbone = GoogLeNet(aux_logits=aux, init_weights=False)
        # with True, training would return a tuple of all three outputs
        backbone.aux_logits = False
        backbone.fc = nn.Linear(1024, FEATURES)
        backbone.conv1.conv = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        super().__init__(backbone, shared_classifier(num_classes))


class AlexNetFeatures(Net):
    """A small AlexNet with 512 features, and the classifier of FedClassAvg.

    Three 3x3 convolutions (64, 128 and 256 channels), mean pooling to 3x3, dropout, 512 hidden units and a linear layer
    to the features, which are those before the classifier's ReLU. The paper mentions one fully connected layer; its
    official code has these two.
    Source: Jang et al., 2022 (FedClassAvg, https://arxiv.org/abs/2210.14226).

    >>> sum(p.numel() for p in AlexNetFeatures((3, 32, 32), 10).features.parameters())
    1813632

    Args:
        input_shape: ``(channels, height, width)`` of one image.
        num_classes: number of classes.

    Raises:
        MisconfigurationException: if the data are not images.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        channels, _, _ = check_images("AlexNetFeatures", input_shape)
        features = nn.Sequential(
            *(nn.Conv2d(channels, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=1, padding=1)),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, padding=1)),
            *(nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()),
            *(nn.Dropout(), nn.Linear(256 * 3 * 3, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
        )
        super().__init__(features, shared_classifier(num_classes))
