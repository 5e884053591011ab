"""Differential privacy of clients: an aggregator that clips and adds noise, and an accountant."""

from pfl_lightning.privacy.accountant import Release, epsilon, noise_for, tight_epsilon

__all__ = ["Release", "epsilon", "noise_for", "tight_epsilon"]
