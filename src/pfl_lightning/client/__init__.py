"""The client side: the base class of client modules, and the phases of local training."""

from pfl_lightning.client.module import Batch, ClientModule
from pfl_lightning.client.phases import CLASSIFIER, Phase, everything, in_body, in_classifier

__all__ = ["CLASSIFIER", "Batch", "ClientModule", "Phase", "everything", "in_body", "in_classifier"]
