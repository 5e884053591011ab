"""Tables with texts at three sites, and the same rows in a simulation."""

from functools import partial

import lightning
import numpy as np
import pytest
import torch
from torch.optim import SGD

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")
pytest.importorskip("pandas", reason="needs the extra tables")

import pandas
from deployments import deploy
from local_grid import LocalGrid

from federations import fit, make_trainer, plain
from pfl_lightning.data import TableData
from pfl_lightning.flower.client_app import Worker, app_of
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.methods import FedAvg
from pfl_lightning.tasks import Classification

CLASSES, SEXES = ["cold", "covid", "flu"], ["f", "m"]
HELD = [["cold", "covid", "flu"], ["flu", "covid"], ["flu", "cold"]]
"""The texts at each site, in the order of its rows: numbers by a site's own order would differ."""


def table(client):
    drawn, rows = np.random.default_rng(client), np.arange(40)
    ill = np.array(HELD[client])[rows % len(HELD[client])]
    mean = {"cold": -2.0, "covid": 0.0, "flu": 2.0}
    age = np.array([mean[each] for each in ill]) + drawn.normal(0, 0.5, 40)
    sex = np.array(SEXES if client else SEXES[::-1])[rows % 2]
    return pandas.DataFrame({"age": age, "sex": sex, "ill": ill, "who": client})


def data(rows, **settings):
    words = {"classes": CLASSES, "categories": {"sex": SEXES}, "val_fraction": 0.0, "test_fraction": 0.0}
    # whole batches: a site divides its table alone, and so has its rows in another order
    words["batch_size"] = 64
    return TableData(rows, "ill", Classification(3), ["age", "sex"], "who", **{**words, **settings})


def make():
    lightning.seed_everything(3, verbose=False)
    return FedAvg(plain, (2,), 3, optimizer=partial(SGD, lr=0.1))


def test_the_global_model_is_right_as_often_as_the_simulations(tmp_path):
    def worker(context):
        own = data(table(context.node_id - 1))
        own.setup()
        site = Site.of(context.node_config, own)
        return Worker(make_trainer(limit_val_batches=0), make(), site, StateVersions(tmp_path / str(context.node_id)))

    grid = LocalGrid(app_of(worker), {client + 1: {"clients": str(client)} for client in range(3)})
    every = pandas.concat([table(client) for client in range(3)])
    settings = {"limit_val_batches": 0, "max_rounds": 15}
    # the server has the names of columns alone
    there = deploy(grid, make, data=lambda: data(every[:0], num_clients=3), **settings)
    here = fit(make(), data(every), **settings)
    for name, tensor in here.weights.items():
        assert torch.allclose(there.weights[name], tensor, atol=1e-5)
    x = torch.tensor(np.stack([every["age"], every["sex"].map(SEXES.index)], 1), dtype=torch.float32)
    y = torch.tensor(every["ill"].map(CLASSES.index).to_numpy())
    right = [float((run.federation.client(x).argmax(1) == y).float().mean()) for run in (there, here)]
    assert right[0] == right[1] > 0.6
