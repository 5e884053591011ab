"""Faster float32 arithmetic on a GPU's tensor cores."""

from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from pfl_lightning.settings import check_choices


class MatmulPrecision(Callback):
    """Set how a GPU rounds the inputs of float32 matrix products and convolutions while the Trainer runs.

    Torch's default is float32 for matrix products and TF32 for convolutions. With TF32 results move in the fourth
    digit, and differ from those of a CPU by as much. On a CPU only ``medium`` has an effect, on processors with
    products in bfloat16.

    Args:
        precision: ``highest`` for float32 in both, ``high`` for TF32 in both (10 bits in place of 23), ``medium`` for
            bfloat16 in matrix products and TF32 in convolutions.

    Raises:
        MisconfigurationException: if ``precision`` is none of these.
    """

    def __init__(self, precision: Literal["highest", "high", "medium"] = "high") -> None:
        super().__init__()
        check_choices("trainer.callbacks", precision=(precision, ("highest", "high", "medium")))
        self.precision = precision
        self._before: tuple[str, bool] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the precision, and keep the process's own."""
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        self._set(self.precision, self.precision != "highest")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the process's own precision again."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Set the process's own precision again, since Lightning calls no `teardown` after an error."""
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            self._set(*self._before)
            self._before = None

    @staticmethod
    def _set(precision: str, tf32: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
