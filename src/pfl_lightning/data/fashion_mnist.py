"""The Fashion-MNIST data set."""

from typing import Any

from pfl_lightning.data.mnist import MNIST


class FashionMNIST(MNIST):
    """70,000 images of clothes, 1x28x28, 10 classes, in ``root/FashionMNIST/raw``.

    Takes the settings of `FederatedDataModule`.

    Source: Xiao et al., "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", 2017.
    """

    folder = "FashionMNIST/raw"

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.FashionMNIST``; see `TorchvisionDataModule.dataset`."""
        from torchvision import datasets

        return datasets.FashionMNIST(self.root, train=train, download=download)
