"""Convolutions in the memory format in which they are fastest."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class ChannelsLast(Callback):
    """Keeps the weights of convolutions with the channels of each pixel side by side, in which images follow them.

    Results are the same but for rounding. It is for nets of some size, most of all under ``precision=bf16-mixed``, and
    for engines that run one client after another; small nets may get slower by it. Stacks of the engine ``vectorised``
    have a format of their own.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Changes the format before the common initial model is taken; what is copied into a weight later takes it."""
        pl_module.architectures.to(memory_format=torch.channels_last)
