"""Networks, each made of a feature extractor and a classifier."""

from pfl_lightning.nets.adapted import Adapted
from pfl_lightning.nets.alexnet import AlexNet
from pfl_lightning.nets.any_module import cut_net
from pfl_lightning.nets.autoencoder import Autoencoder
from pfl_lightning.nets.base import Head, Net, NetFactory, feature_size, find_output_layer
from pfl_lightning.nets.causal_lm import CausalLM
from pfl_lightning.nets.char_gru import CharGRU
from pfl_lightning.nets.cnn import CNN, LeakyCNN, LeNet5, SmallCNN
from pfl_lightning.nets.fasttext import FastText
from pfl_lightning.nets.mlp import MLP
from pfl_lightning.nets.narrow import Narrow
from pfl_lightning.nets.resnet import CifarResNet, ResNet18
from pfl_lightning.nets.shared_features import (
    AlexNetFeatures,
    GoogLeNetFeatures,
    ResNet18Features,
    ShuffleNetV2Features,
)
from pfl_lightning.nets.transformer import Transformer
from pfl_lightning.nets.unet import UNet

__all__ = [
    "CNN",
    "MLP",
    "Adapted",
    "AlexNet",
    "AlexNetFeatures",
    "Autoencoder",
    "CausalLM",
    "CharGRU",
    "CifarResNet",
    "FastText",
    "GoogLeNetFeatures",
    "Head",
    "LeNet5",
    "LeakyCNN",
    "Narrow",
    "Net",
    "NetFactory",
    "ResNet18",
    "ResNet18Features",
    "ShuffleNetV2Features",
    "SmallCNN",
    "Transformer",
    "UNet",
    "cut_net",
    "feature_size",
    "find_output_layer",
]
