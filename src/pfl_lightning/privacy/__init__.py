"""Differential privacy of clients and of samples, an accountant, and sums that hide updates."""

from pfl_lightning.privacy.accountant import Release, epsilon, noise_for, tight_epsilon
from pfl_lightning.privacy.dp_average import DPAverage
from pfl_lightning.privacy.dp_ftrl import DPFTRL
from pfl_lightning.privacy.dp_sgd import DPSGD
from pfl_lightning.privacy.secure_sum import SecureSum

__all__ = ["DPFTRL", "DPSGD", "DPAverage", "Release", "SecureSum", "epsilon", "noise_for", "tight_epsilon"]
