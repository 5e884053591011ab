"""Clients that come later, from tables of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import MOMENTUM, make_trainer, read_csv
from pfl_lightning.data import IID, Digits, TableData
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

pd = pytest.importorskip("pandas", reason="needs the extra tables")

SITES = {"Bremen": 24, "Ulm": 20, "Jena": 28, "Erfurt": 16, "Kiel": 26}


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


def test_only_named_clients_join(trained, tmp_path):
    late, trainer = hospitals("Erfurt", "Bremen", "Kiel", standardize=trained[1].standardize), make_trainer(tmp_path)
    trainer.join(model_of(late), datamodule=late, ckpt_path=trained[2], names=["Kiel"])
    (row,) = read_csv(Path(trainer.log_dir, "clients.csv"))
    assert row["name"] == "Kiel" and int(row["client"]) == late.client_id("Kiel")
    assert 0 <= float(row["new_received/acc"]) <= 1 and 0 <= float(row["new/acc"]) <= 1


@pytest.mark.parametrize(
    ("sites", "names", "sentence"),
    [
        (("Erfurt", "Bremen"), ["Bremen"], r"names: client 0 \(Bremen\) has trained"),
        # the federation knows Jena, though these data have no row of it
        (("Erfurt", "Bremen"), ["Erfurt", "Jena"], r"Jena\) has trained"),
        (("Erfurt", "Bremen"), ["Erfrut"], r"names='Erfrut' .*did you mean Erfurt"),
        (("Erfurt", "Bremen"), [], r"names=\[\] leaves nobody"),
        (("Ulm", "Bremen"), None, r"leaves nobody to join: all 3 clients"),
    ],
)
def test_a_client_that_trained_is_never_called_new(sites, names, sentence, trained, tmp_path):
    late = hospitals(*sites, standardize=trained[1].standardize)
    with pytest.raises(MisconfigurationException, match=sentence):
        make_trainer(tmp_path).join(model_of(late), datamodule=late, ckpt_path=trained[2], names=names)


@pytest.mark.parametrize("spelled", ["bremen", "Bremen "])
def test_another_spelling_is_no_new_client(spelled, trained, tmp_path):
    table = rows(["Bremen", "Kiel"]).replace({"site": {"Bremen": spelled}})
    late = TableData(table, "out", Classification(2), client="site", standardize=trained[1].standardize)
    with pytest.raises(MisconfigurationException, match=f"'Bremen' and '{spelled}'"):
        make_trainer(tmp_path).join(model_of(late), datamodule=late, ckpt_path=trained[2])


def test_a_net_for_a_further_column_is_refused_and_one_for_the_federations_joins(trained, tmp_path):
    table = rows(["Erfurt"]).assign(weight=1.0)
    settings = {"client": "site", "standardize": trained[1].standardize}
    late = TableData(table, "out", Classification(2), **settings)
    wide = model_of(late)
    with (
        pytest.warns(UserWarning, match="no inputs of the federation: weight"),
        pytest.raises(MisconfigurationException, match=r"model\.input_shape=\(3,\).*\(2,\)"),
    ):
        make_trainer(tmp_path).join(wide, datamodule=late, ckpt_path=trained[2])
    late = TableData(table, "out", Classification(2), fitted=trained[2], **settings)
    with pytest.warns(UserWarning, match="no inputs of the federation: weight"):
        make_trainer(tmp_path).join(model_of(late), datamodule=late, ckpt_path=trained[2])


def test_a_new_federation_fits_anew(trained, tmp_path):
    _, old, path = trained
    data = hospitals("Ulm", "Erfurt", standardize=old.standardize)
    own = hospitals("Ulm", "Erfurt", standardize=old.standardize)
    own.setup()
    make_trainer(tmp_path).join(model_of(data), datamodule=data, ckpt_path=path)
    assert data.preprocessing != own.preprocessing and data.client_names == ["Bremen", "Jena", "Ulm", "Erfurt"]
    make_trainer(tmp_path, max_rounds=1).fit(model_of(data), datamodule=data)
    assert data.preprocessing == own.preprocessing and data.client_names == own.client_names == ["Erfurt", "Ulm"]


def test_named_clients_are_held_out(tmp_path):
    data = hospitals(*SITES, new_clients=["Erfurt", "Bremen"])
    trainer = make_trainer(tmp_path, max_rounds=1)
    trainer.fit(model_of(data), datamodule=data)
    assert data.client_names == ["Jena", "Kiel", "Ulm", "Bremen", "Erfurt"] and list(data.newcomers) == [3, 4]
    held = [row["name"] for row in read_csv(Path(trainer.log_dir, "clients.csv")) if row["new"] == "1"]
    assert held == ["Bremen", "Erfurt"]
    members = rows(data.given).iloc[torch.cat([part["train"] for part in data.division.clients[:3]]).numpy()]
    assert data.preprocessing["mean"]["age"] == pytest.approx(members["age"].mean())
    trainer.join(trainer.lightning_module.client, datamodule=data, names=["Erfurt"])


@pytest.mark.parametrize(
    ("new", "sentence"),
    [
        (["Erfrut"], r"data\.new_clients='Erfrut' is no client; did you mean Erfurt"),
        (["Ulm", "Ulm"], r"data\.new_clients=.*list of their names"),
        ([], r"data\.new_clients=\[\] must be"),
        (list(SITES), r"leaves none of 5 clients"),
    ],
)
def test_wrong_names_of_new_clients_are_refused(new, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        hospitals(*SITES, new_clients=new).setup()


def test_clients_without_names_cannot_be_held_out_by_name():
    data = Digits(num_clients=4, partitioner=IID(), new_clients=["3"])
    with pytest.raises(MisconfigurationException, match=r"clients of Digits have no names"):
        data.setup()
