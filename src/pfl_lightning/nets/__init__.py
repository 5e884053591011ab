"""Networks, each a feature extractor and a classifier."""

from pfl_lightning.nets.base import Head, Net, NetFactory
from pfl_lightning.nets.cnn import CNN
from pfl_lightning.nets.fasttext import FastText
from pfl_lightning.nets.mlp import MLP
from pfl_lightning.nets.output import find_output_layer
from pfl_lightning.nets.resnet import ResNet18

__all__ = ["CNN", "MLP", "FastText", "Head", "Net", "NetFactory", "ResNet18", "find_output_layer"]
