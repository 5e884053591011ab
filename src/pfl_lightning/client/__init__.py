"""The client side: a client of a federation as a LightningModule, and the hooks that methods override."""

from pfl_lightning.client.module import Batch, ClientModule
from pfl_lightning.client.phases import CLASSIFIER, Phase, everything, in_body, in_classifier

__all__ = ["CLASSIFIER", "Batch", "ClientModule", "Phase", "everything", "in_body", "in_classifier"]
