"""CIFAR-10."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.data.torchvision_data import TorchvisionDataModule


class CIFAR10(TorchvisionDataModule):
    """60,000 colour images, 3x32x32, 10 classes, in ``root/cifar-10-batches-py``.

    Takes the settings of :class:`FederatedDataModule`. For CIFAR-10 as image files see :class:`ImageFolder`.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """

    num_classes = 10
    input_shape = (3, 32, 32)
    folder = "cifar-10-batches-py"
    files = "the unpacked files of cifar-10-python.tar.gz (data_batch_1 and so on)"

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.CIFAR10``; see :meth:`TorchvisionDataModule.dataset`."""
        from torchvision import datasets

        return datasets.CIFAR10(self.root, train=train, download=download)

    def load(self) -> tuple[Tensor, Tensor]:
        """Read the 50,000 training and the 10,000 test images."""
        halves = [self._open(train) for train in (True, False)]
        x = torch.from_numpy(np.concatenate([half.data for half in halves]))
        y = torch.tensor([label for half in halves for label in half.targets])
        return x.permute(0, 3, 1, 2).contiguous(), y
