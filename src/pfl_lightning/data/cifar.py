"""The CIFAR-10 and CIFAR-100 data sets."""

from typing import Any

import torch
from torch import Tensor

from pfl_lightning.data.torchvision_data import TorchvisionDataModule


class CIFAR10(TorchvisionDataModule):
    """60,000 colour images, 3x32x32, 10 classes, in ``root/cifar-10-batches-py``.

    Takes the settings of `FederatedDataModule`. For CIFAR-10 as image files see `ImageFolder`.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    num_classes = 10
    input_shape = (3, 32, 32)
    folder = "cifar-10-batches-py"
    files = "the unpacked files of cifar-10-python.tar.gz (data_batch_1 and so on)"

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.CIFAR10``; see `TorchvisionDataModule.dataset`."""
        # imported on use: torchvision is slow to import, and most runs need another data set
        from torchvision import datasets

        return datasets.CIFAR10(self.root, train=train, download=download)

    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Put the channels first; see `TorchvisionDataModule.tensors`."""
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(dataset.targets)


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
