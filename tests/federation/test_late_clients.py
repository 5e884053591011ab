"""Clients that come later, from tables of their own."""

import numpy as np
import pandas as pd
import pytest
import torch

from federations import MOMENTUM, make_trainer
from pfl_lightning.data import TableData
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

SITES = {"Bremen": 24, "Ulm": 20, "Jena": 28, "Erfurt": 16}


def rows(sites=tuple(SITES)):
    tables = []
    for site in sites:
        size = SITES[site]
        age = np.random.default_rng(size).normal(30 + size, 10, size).round(1)
        # Erfurt has one ward and one outcome alone: its own table would give both another code
        ward = ["icu"] * size if site == "Erfurt" else ["icu", "er"] * (size // 2)
        out = ["yes"] * size if site == "Erfurt" else np.where(age > 52, "yes", "no")
        tables.append(pd.DataFrame({"site": site, "age": age, "ward": ward, "out": out}))
    return pd.concat(tables, ignore_index=True)


def hospitals(*sites, standardize="table", **settings):
    task = Classification(2)
    data = TableData(rows(sites), "out", task, client="site", standardize=standardize, val_fraction=0.0, **settings)
    data.given = sites
    return data


def model_of(data):
    return FedPer(MLP, data.input_shape, data.num_classes, optimizer=MOMENTUM)


@pytest.fixture(scope="module", params=["table", "client"])
def trained(request, tmp_path_factory):
    data = hospitals("Bremen", "Ulm", "Jena", standardize=request.param)
    trainer = make_trainer(tmp_path_factory.mktemp("hospitals"), max_rounds=1)
    trainer.fit(model_of(data), datamodule=data)
    return trainer, data, f"{trainer.log_dir}/checkpoints/last.ckpt"


def raw(data, name, split):
    """A client's rows before preprocessing: age, and the ward's code."""
    table = rows(data.given)
    table = table.iloc[data.division.clients[data.client_id(name)][split].numpy()]
    assert set(table["site"]) == {name}
    return torch.tensor(np.stack([table["age"], table["ward"] == "icu"], axis=1))


@pytest.mark.parametrize("set_up", [False, True])
@pytest.mark.parametrize("others", [(), ("Bremen", "Ulm", "Jena")], ids=["alone", "with the others"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_late_clients_rows_become_inputs_as_the_federations_did(trained, others, set_up, in_memory, tmp_path):
    trainer, old, path = trained
    late = hospitals("Erfurt", *others, standardize=old.standardize)
    if set_up:
        late.setup()
    if in_memory:
        trainer.join(trainer.lightning_module.client, datamodule=late)
    else:
        make_trainer(tmp_path).join(model_of(late), datamodule=late, ckpt_path=path)
    assert [late.client_names[client] for client in late.newcomers] == ["Erfurt"]
    assert late.preprocessing["categories"] == {"ward": ["er", "icu"]}
    assert late.preprocessing["classes"] == {"out": ["no", "yes"]}
    erfurt = late.client_id("Erfurt")
    values = raw(late, "Erfurt", "train").double()
    if old.standardize == "table":
        mean, deviation = (
            torch.tensor(list(old.preprocessing[name].values()), dtype=torch.float64) for name in ("mean", "deviation")
        )
    else:
        mean, deviation = values.mean(0), values.std(0, correction=0)
    deviation = torch.where(deviation == 0, torch.inf, deviation)
    assert torch.allclose(late.part(erfurt, "train").x, ((values - mean) / deviation).float(), atol=1e-5)
    assert late.part(erfurt, "train").y.tolist() == [1] * late.size(erfurt, "train")
