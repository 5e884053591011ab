"""Attacks: clients that send what they shouldn't, or train on what they shouldn't, to measure what a server bears."""

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
