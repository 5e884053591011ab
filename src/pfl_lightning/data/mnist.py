"""The MNIST data set."""

from typing import Any

from torch import Tensor

from pfl_lightning.data.torchvision_data import TorchvisionDataModule


class MNIST(TorchvisionDataModule):
    """70,000 images of digits, 1x28x28, 10 classes, in ``root/MNIST/raw``.

    Takes the settings of `FederatedDataModule`.

    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
    """

    num_classes = 10
    input_shape = (1, 28, 28)
    folder = "MNIST/raw"
    files = "the four unpacked idx files (train-images-idx3-ubyte and so on)"

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.MNIST``; see `TorchvisionDataModule.dataset`."""
        from torchvision import datasets

        return datasets.MNIST(self.root, train=train, download=download)

    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Add the channel; see `TorchvisionDataModule.tensors`."""
        return dataset.data.unsqueeze(1), dataset.targets.long()
