"""The EMNIST data set."""

from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.mnist import MNIST
from pfl_lightning.settings import Unpack

Split = Literal["letters", "balanced", "digits", "mnist", "byclass", "bymerge"]
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

    def __init__(self, split: Split = "letters", **kwargs: Unpack[DataSettings]) -> None:
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
