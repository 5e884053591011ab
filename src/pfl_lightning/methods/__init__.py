"""Methods of personalised federated learning, one file each."""

from pfl_lightning.client import FedAvg
from pfl_lightning.methods.cwfedavg import WDR, CwFedAvg
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.methods.fedprox import FedProx
from pfl_lightning.methods.local import Local

__all__ = ["WDR", "CwFedAvg", "FedAvg", "FedPer", "FedProx", "Local"]
