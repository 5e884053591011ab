"""Differential privacy of clients: an aggregator that clips and adds noise, and an accountant."""

from pfl_lightning.privacy.accountant import Release, epsilon, noise_for, tight_epsilon
from pfl_lightning.privacy.dp_average import DPAverage

__all__ = ["DPAverage", "Release", "epsilon", "noise_for", "tight_epsilon"]
