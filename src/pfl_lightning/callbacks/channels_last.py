"""Faster convolutions through the channels-last memory format."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class ChannelsLast(Callback):
    """Store the weights of convolutions channels-last, the memory format of cuDNN's fastest kernels.

    Results are equal up to rounding. Worth trying for large nets under ``precision=bf16-mixed``, with engines that
    train one client after another; small nets can become slower. The engine ``vectorised`` chooses the memory format of
    its stacked weights itself.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert the weights before the federation takes its initial model; later copies keep the format."""
        pl_module.architectures.to(memory_format=torch.channels_last)
