"""The handwritten digits of scikit-learn."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pfl_lightning.data.datamodule import FederatedDataModule, SplitSettings
from pfl_lightning.data.partitioners import Partitioner
from pfl_lightning.settings import Unpack


class DigitsSettings(SplitSettings, total=False):
    """Settings of `FederatedDataModule` but for ``num_clients``, whose default is another here."""

    root: str
    partitioner: Partitioner


class Digits(FederatedDataModule):
    """1,797 images of digits, 1x8x8, 10 classes; needs no files and no network.

    Args:
        num_clients: number of clients M, at least 1.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """

    num_classes = 10
    input_shape = (1, 8, 8)

    def __init__(self, num_clients: int = 10, **kwargs: Unpack[DigitsSettings]) -> None:
        super().__init__(num_clients=num_clients, **kwargs)

    def load(self) -> tuple[Tensor, Tensor]:
        """Read the digits; grey levels 0..16 become 0..255."""
        # The file alone: scikit-learn's own function imports SciPy and pandas, for half a second.
        (package,) = cast(ModuleSpec, find_spec("sklearn")).submodule_search_locations or [""]
        rows = torch.from_numpy(np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=","))
        # as uint8 with the full range, so that `transform` scales digits like any other images
        x = rows[:, :-1].view(-1, *self.input_shape).mul(255 / 16).round().to(torch.uint8)
        return x, rows[:, -1].long()
