"""Types of keyword settings, which name what the constructors take."""

import inspect
from typing import get_type_hints

import pytest
from lightning.pytorch import Trainer

from pfl_lightning import FederatedTrainer
from pfl_lightning.aggregators import FedAdagrad, FedAvgM, WeightedAverage
from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.data import FederatedDataModule, ImageFolder
from pfl_lightning.data.datamodule import DataSettings, DivisionSettings
from pfl_lightning.data.tiny_imagenet import ImageSettings
from pfl_lightning.methods import FeatureAlignment
from pfl_lightning.methods.feature_alignment import AlignmentSettings
from pfl_lightning.methods.fedopt import AdaptiveSettings, MomentumSettings
from pfl_lightning.methods.public_answers import PublicAnswers, PublicSettings
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.trainer import MEANINGLESS, TrainerSettings

SETTINGS = {
    ClientSettings: (ClientModule, set()),
    DataSettings: (FederatedDataModule, set()),
    # a factor of the whole mean, which subclasses with steps or parts of their own refuse
    MeanSettings: (WeightedAverage, {"gamma"}),
    MomentumSettings: (FedAvgM, {"beta"}),
    AdaptiveSettings: (FedAdagrad, {"beta1"}),
}
OWN = {
    AlignmentSettings: (FeatureAlignment, ClientSettings),
    PublicSettings: (PublicAnswers, ClientSettings),
    ImageSettings: (ImageFolder, DivisionSettings),
}


def arguments(cls):
    return {name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "args", "kwargs")}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_they_are_those_of_their_class(settings):
    cls, without = SETTINGS[settings]
    assert set(get_type_hints(settings)) == arguments(cls) - without


@pytest.mark.parametrize("settings", OWN, ids=lambda settings: settings.__name__)
def test_they_are_those_of_their_class_and_of_its_parent(settings):
    cls, inherited = OWN[settings]
    assert set(get_type_hints(settings)) - set(get_type_hints(inherited)) == arguments(cls) - {"root"}


def test_the_trainer_s_are_lightning_s_that_mean_something():
    assert set(get_type_hints(TrainerSettings)) == arguments(Trainer) - arguments(FederatedTrainer) - set(MEANINGLESS)
