"""The MNIST data sets: digits, clothes (Fashion-MNIST), letters and digits (EMNIST)."""

from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.torchvision_data import TorchvisionDataModule
from pfl_lightning.settings import Unpack


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


EMNISTSplit = Literal["letters", "balanced", "digits", "mnist", "byclass", "bymerge"]
"""A selection of EMNIST's images, each with its own classes."""

NUM_CLASSES: dict[str, int] = {
    "letters": 26,
    "balanced": 47,
    "digits": 10,
    "mnist": 10,
    "byclass": 62,
    "bymerge": 47,
}


class EMNIST(MNIST):
    """Images of letters and digits, upright, 1x28x28, in ``root/EMNIST/raw``.

    Args:
        split: ``letters`` (145,600 images, 26 classes, capital and small letters together; numbered from 1 in the
            files, from 0 to 25 here), ``balanced`` (131,600, 47 classes), ``digits`` (280,000, 10), ``mnist`` (70,000,
            10), ``byclass`` (814,255, 62) or ``bymerge`` (814,255, 47).
        **kwargs: settings of `FederatedDataModule`.

    Raises:
        MisconfigurationException: if there is no such split.

    Source: Cohen et al., "EMNIST: an Extension of MNIST to Handwritten Letters", 2017.
    """

    folder = "EMNIST/raw"

    def __init__(self, split: EMNISTSplit = "letters", **kwargs: Unpack[DataSettings]) -> None:
        super().__init__(**kwargs)
        if split not in tuple(NUM_CLASSES):
            raise MisconfigurationException(f"data.split={split!r} must be one of {', '.join(NUM_CLASSES)}")
        self.split = split
        self.num_classes = NUM_CLASSES[split]
        self.files = (
            f"the four unpacked idx files of EMNIST's gzip.zip (emnist-{split}-train-images-idx3-ubyte and so on)"
        )

    def dataset(self, train: bool, download: bool) -> Any:
        """Open ``torchvision.datasets.EMNIST``; see `TorchvisionDataModule.dataset`."""
        from torchvision import datasets

        return datasets.EMNIST(self.root, self.split, train=train, download=download)

    def prepare_data(self) -> None:
        """Check that the files exist; with ``download``, fetch missing files.

        Raises:
            MisconfigurationException: if there are no usable files.
        """
        super().prepare_data()
        # torchvision checked the test half only; a missing training half must be refused here too, and not only in
        # `setup`
        self._open(train=True)

    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Turn the images upright: the files have rows and columns exchanged."""
        x, y = super().tensors(dataset)
        return x.mT, y - 1 if self.split == "letters" else y
