"""Data of clients: data sets, partitioners, sources, splits and batches."""

from pfl_lightning.data.ag_news import AGNews, AGNewsLetters
from pfl_lightning.data.batches import LastBatch, epoch_order
from pfl_lightning.data.chem97 import Chem97
from pfl_lightning.data.cifar import CIFAR10, CIFAR100
from pfl_lightning.data.client_data import ClientData, gather, put_together, whole_of
from pfl_lightning.data.datamodule import ClientLoader, FederatedDataModule
from pfl_lightning.data.diabetes import Diabetes
from pfl_lightning.data.digit_domains import DigitDomains
from pfl_lightning.data.digit_mixtures import DigitMixtures
from pfl_lightning.data.digits import Digits
from pfl_lightning.data.flamby import FedHeartDisease, FedTcgaBrca
from pfl_lightning.data.image_folder import ImageFolder
from pfl_lightning.data.input_drift import InputDrift
from pfl_lightning.data.mnist import EMNIST, MNIST, FashionMNIST
from pfl_lightning.data.partitioners import (
    IID,
    Dirichlet,
    DominantLabels,
    Natural,
    Partitioner,
    Pathological,
    RandomClasses,
    RoundedDirichlet,
)
from pfl_lightning.data.preprocessing import Column, Preprocessing
from pfl_lightning.data.samples import CHUNK, Loaded, Samples, Split
from pfl_lightning.data.shakespeare import Shakespeare
from pfl_lightning.data.sources import (
    ChatData,
    ClientDatasets,
    FlowerDatasets,
    FolderData,
    HFData,
    LeafData,
    OwnedData,
    PFLlibData,
    PreferenceData,
    SeriesData,
    TableData,
    TensorData,
    VisionData,
)
from pfl_lightning.data.target_scale import TargetScale
from pfl_lightning.data.tiny_imagenet import TinyImageNet

__all__ = [
    "CHUNK",
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "IID",
    "MNIST",
    "AGNews",
    "AGNewsLetters",
    "ChatData",
    "Chem97",
    "ClientData",
    "ClientDatasets",
    "ClientLoader",
    "Column",
    "Diabetes",
    "DigitDomains",
    "DigitMixtures",
    "Digits",
    "Dirichlet",
    "DominantLabels",
    "FashionMNIST",
    "FedHeartDisease",
    "FedTcgaBrca",
    "FederatedDataModule",
    "FlowerDatasets",
    "FolderData",
    "HFData",
    "ImageFolder",
    "InputDrift",
    "LastBatch",
    "LeafData",
    "Loaded",
    "Natural",
    "OwnedData",
    "PFLlibData",
    "Partitioner",
    "Pathological",
    "PreferenceData",
    "Preprocessing",
    "RandomClasses",
    "RoundedDirichlet",
    "Samples",
    "SeriesData",
    "Shakespeare",
    "Split",
    "TableData",
    "TargetScale",
    "TensorData",
    "TinyImageNet",
    "VisionData",
    "epoch_order",
    "gather",
    "put_together",
    "whole_of",
]
