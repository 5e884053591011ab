"""Networks, each a feature extractor and a classifier."""

from pfl_lightning.nets.base import Head, Net, NetFactory
from pfl_lightning.nets.cnn import CNN
from pfl_lightning.nets.mlp import MLP

__all__ = ["CNN", "MLP", "Head", "Net", "NetFactory"]
