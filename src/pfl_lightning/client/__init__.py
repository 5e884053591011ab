"""The client side: the base class of client modules, and the phases of local training."""

from pfl_lightning.client.module import Batch, ClientModule, ClientSettings
from pfl_lightning.client.phases import CLASSIFIER, Phase, everything, in_body, in_classifier

__all__ = ["CLASSIFIER", "Batch", "ClientModule", "ClientSettings", "Phase", "everything", "in_body", "in_classifier"]
