"""Data sets whose files torchvision knows how to find, check and fetch."""

from __future__ import annotations

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
    """Opens a data set by torchvision and says in one sentence what is missing.

    Subclasses set ``folder`` and ``files`` and implement `dataset` and `tensors`.
    """

    folder: str
    """Where the files belong, relative to ``root``."""
    files: str
    """What the files are; completes the sentence "put ... there"."""

    TIMEOUT = 10.0
    """Seconds without an answer after which a download is given up."""

    @abstractmethod
    def dataset(self, train: bool, download: bool) -> Any:
        """Open the torchvision data set.

        Args:
            train: Its training half, else its test half.
            download: Fetch what is missing.
        """

    @abstractmethod
    def tensors(self, dataset: Any) -> tuple[Tensor, Tensor]:
        """Images [n, C, H, W] and labels [n] of a torchvision data set, as tensors."""

    def load(self) -> tuple[Tensor, Tensor]:
        """Read the original training half and then the test half."""
        (x, y), (test_x, test_y) = (self.tensors(self._open(train)) for train in (True, False))
        self.original_test = torch.arange(len(y), len(y) + len(test_y))
        return torch.cat([x, test_x]), torch.cat([y, test_y])

    def prepare_data(self) -> None:
        """Check that the files are there and, with ``download``, fetch them if not.

        Raises:
            MisconfigurationException: There are no usable files.
        """
        with _network_timeout(self.TIMEOUT):
            self._open(train=False, download=self.download)

    def _open(self, train: bool, download: bool = False) -> Any:
        try:
            return self.dataset(train, download)
        # RuntimeError: missing or unreachable; OSError: no network or permission; others: damaged idx files
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            failed = ", and downloading failed" if download else ""
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
