"""The CIFAR-100 data set."""

from typing import Any

from pfl_lightning.data.cifar10 import CIFAR10


class CIFAR100(CIFAR10):
    """60,000 colour images, 3x32x32, 100 classes (the fine labels), in ``root/cifar-100-python``.

    Takes the settings of `FederatedDataModule`.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    num_classes = 100
    folder = "cifar-100-python"
    files = "the unpacked files of cifar-100-python.tar.gz (train, test and meta)"

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.CIFAR100``; see `TorchvisionDataModule.dataset`."""
        from torchvision import datasets

        return datasets.CIFAR100(self.root, train=train, download=download)
