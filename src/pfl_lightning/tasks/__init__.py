"""Prediction tasks: the shape of a net's outputs, the loss, the metrics, and the metric that selects the best round."""

from pfl_lightning.tasks.base import Monitor, Task
from pfl_lightning.tasks.classification import Classification, MultiLabel
from pfl_lightning.tasks.next_token import NextToken
from pfl_lightning.tasks.own_loss import OwnLoss
from pfl_lightning.tasks.preference import Preference
from pfl_lightning.tasks.reconstruction import Reconstruction
from pfl_lightning.tasks.regression import Poisson, Quantile, Regression
from pfl_lightning.tasks.segmentation import Segmentation
from pfl_lightning.tasks.survival import Survival

__all__ = [
    "Classification",
    "Monitor",
    "MultiLabel",
    "NextToken",
    "OwnLoss",
    "Poisson",
    "Preference",
    "Quantile",
    "Reconstruction",
    "Regression",
    "Segmentation",
    "Survival",
    "Task",
]
