"""Attacks: bad clients that send forged updates, or train on forged samples, to measure a server's robustness."""

from pfl_lightning.callbacks.attacks.backdoor import Backdoor
from pfl_lightning.callbacks.attacks.base import Attack
from pfl_lightning.callbacks.attacks.colluding import ALIE, IPM, AdaptiveAttack, MinMax, MinSum
from pfl_lightning.callbacks.attacks.samples import LabelFlip
from pfl_lightning.callbacks.attacks.uploads import BufferAttack, FreeRider, GaussianUpload, ModelReplacement, SignFlip

__all__ = [
    "ALIE",
    "IPM",
    "AdaptiveAttack",
    "Attack",
    "Backdoor",
    "BufferAttack",
    "FreeRider",
    "GaussianUpload",
    "LabelFlip",
    "MinMax",
    "MinSum",
    "ModelReplacement",
    "SignFlip",
]
