from functools import partial

import numpy as np
import pytest
import torch
from torch.optim import SGD

from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.data import IID, Digits, Dirichlet, Natural, TensorData
from pfl_lightning.methods import FedProx
from pfl_lightning.nets import MLP
from pfl_lightning.settings import as_call
from pfl_lightning.tasks import Classification


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Digits(), "Digits(num_clients=10, partitioner=Dirichlet(alpha=0.1))"),
        (Digits(num_clients=4, partitioner=IID(), seed=3), "Digits(num_clients=4, partitioner=IID(), seed=3)"),
        (Dirichlet(alpha=0.5), "Dirichlet(alpha=0.5)"),
        (Natural(), "Natural(min_samples=1)"),
        (WeightedAverage(), "WeightedAverage()"),
        (WeightedAverage(weighting="uniform"), "WeightedAverage(weighting='uniform')"),
    ],
)
def test_a_repr_is_the_call(made, text):
    assert repr(made) == text


def test_a_client_module_shows_its_settings_above_its_net():
    model = FedProx(MLP, (4,), 3, mu=0.25, optimizer=partial(SGD, lr=0.5))
    lines = repr(model).splitlines()
    assert lines[0] == "FedProx(" and "mu=0.25" in lines[1] and "SGD(lr=0.5)" in lines[1] and "(net): MLP" in lines[2]


def test_a_clients_data_show_name_and_sizes():
    data = TensorData(torch.zeros(8, 2), np.arange(8) % 2, Classification(2), client=["Ulm"] * 8, val_fraction=0.0)
    data.setup()
    assert repr(data.client(0)) == "ClientData(client 0 (Ulm), train=6, val=0, test=2)"


def test_a_large_value_is_shown_by_its_class():
    class Held:
        def __init__(self, rows, name="x"):
            self.rows, self.name = rows, name

    assert as_call(Held(np.arange(1000))) == "Held(rows=ndarray)"
    assert as_call(Held(np.arange(2), "y")) == "Held(rows=array([0, 1]), name='y')"
    assert as_call(Held(object())) == "Held(rows=object)"


def test_an_object_that_is_not_whole_has_a_repr():
    assert repr(object.__new__(WeightedAverage)) == "WeightedAverage()"
