"""Differential privacy of clients and of samples, at the server or at sites, and sums that hide updates."""

from pfl_lightning.privacy.accountant import Release, epsilon, noise_for, tight_epsilon
from pfl_lightning.privacy.dp_average import DPAverage
from pfl_lightning.privacy.dp_ftrl import DPFTRL
from pfl_lightning.privacy.dp_sgd import DPSGD
from pfl_lightning.privacy.local import Laplace, LocalPrivacy, PrivUnit
from pfl_lightning.privacy.secure_sum import SecureSum

__all__ = [
    "DPFTRL",
    "DPSGD",
    "DPAverage",
    "Laplace",
    "LocalPrivacy",
    "PrivUnit",
    "Release",
    "SecureSum",
    "epsilon",
    "noise_for",
    "tight_epsilon",
]
