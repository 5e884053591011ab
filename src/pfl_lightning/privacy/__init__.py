"""Differential privacy: of clients by an aggregator, of samples by local training; and an accountant."""

from pfl_lightning.privacy.accountant import Release, epsilon, noise_for, tight_epsilon
from pfl_lightning.privacy.dp_average import DPAverage
from pfl_lightning.privacy.dp_ftrl import DPFTRL
from pfl_lightning.privacy.dp_sgd import DPSGD

__all__ = ["DPFTRL", "DPSGD", "DPAverage", "Release", "epsilon", "noise_for", "tight_epsilon"]
