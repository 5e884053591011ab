"""Callbacks: the record of a run, its progress, its report in Weights & Biases, and a base class for more."""

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.callbacks.progress import RoundProgress
from pfl_lightning.callbacks.record import RoundRecord
from pfl_lightning.callbacks.wandb_report import WandbReport

__all__ = ["FederatedCallback", "RoundProgress", "RoundRecord", "WandbReport"]
