"""The base class of data sets whose files torchvision finds, checks and fetches."""

import socket
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule


class TorchvisionDataModule(FederatedDataModule):
    """Open a data set by torchvision; name missing files in one sentence.

    Subclasses set ``folder`` and ``files`` and implement `dataset` and `tensors`.
    """

    folder: str
    """Folder of the files, relative to ``root``."""
    files: str
    """Description of the files; completes the sentence "put ... there"."""

    TIMEOUT = 10.0
    """Seconds without an answer after which a download fails."""

    @abstractmethod
    def dataset(self, train: bool, download: bool) -> Any:
        """Open the torchvision data set.

        Args:
            train: the training half if True, else the test half.
            download: fetch missing files.
        """

    @abstractmethod
    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Return images [n, C, H, W] and labels [n] of a torchvision data set, as tensors.

        Args:
            dataset: the result of `dataset`.
        """

    def load(self) -> tuple[Tensor, Tensor]:
        """Read the original training half and then the test half."""
        (x, y), (test_x, test_y) = (self.tensors(self._open(train)) for train in (True, False))
        # both halves form one pool, as in the papers; the positions allow tests on the original half
        self.original_test = torch.arange(len(y), len(y) + len(test_y))
        return torch.cat([x, test_x]), torch.cat([y, test_y])

    def prepare_data(self) -> None:
        """Check that the files exist; with ``download``, fetch missing files.

        Raises:
            MisconfigurationException: if there are no usable files.
        """
        with _network_timeout(self.TIMEOUT):
            self._open(train=False, download=self.download)

    def _open(self, train: bool, download: bool = False) -> Any:
        try:
            return self.dataset(train, download)
        # RuntimeError: missing or unreachable; OSError: no network or permission; others: damaged idx files
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            failed = ", and downloading failed" if download else ""
            # advice to download only where it hasn't just been tried
            fetch = "" if self.download else "set data.download=true to fetch them, "
            reason = shorten(str(error), 90, placeholder="...")
            raise MisconfigurationException(
                f"data.root={self.root!r}: no usable {type(self).__name__} files in "
                f"{Path(self.root, self.folder)}{failed} ({reason}); put {self.files} there, {fetch}or set "
                f"data.root to the folder that {self.folder} is in"
            ) from None


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    # torchvision's downloads have no timeout of their own and would hang on a dead network
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
