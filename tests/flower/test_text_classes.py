"""Tables with texts at three sites, and the same rows in a simulation."""

import json
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
from lightning.fabric.utilities.exceptions import MisconfigurationException
from local_grid import LocalGrid

from federations import Pause, fit, make_trainer, plain
from pfl_lightning.data import TableData
from pfl_lightning.flower.client_app import Worker, app_of
from pfl_lightning.flower.first_exchange import (
    KINDS,
    TOLD,
    FirstExchange,
    kept,
    merged,
    pieces,
    take_over,
    values_of,
)
from pfl_lightning.flower.greeting import settings_told
from pfl_lightning.flower.link import Link, initial_of
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.flower.template import Refused
from pfl_lightning.flower.wire import pack, unpack
from pfl_lightning.methods import FedAvg
from pfl_lightning.privacy import DPAverage, SecureSum
from pfl_lightning.tasks import Classification, Regression

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


def alone(client, **settings):
    """A site's own table, with nothing given about the others'."""
    return data(table(client), classes=None, categories={}, standardize="table", **settings)


class Sites(LocalGrid):
    """Three sites with a table each, where words and scales are exchanged before the first round."""

    def __init__(
        self, folder, allow="classes categories scales", agrees=True, changed=lambda client, data: data, **more
    ):
        def worker(context):
            client = context.node_id - 1
            own = changed(client, alone(client))
            own.setup()
            states = StateVersions(folder / str(context.node_id))
            if agreed := kept(states.folder):
                take_over(own, agreed)
            site = Site.of(context.node_config, own, agrees=agrees)
            rounds = {} if self.max_rounds is None else {"max_rounds": self.max_rounds}
            return Worker(make_trainer(limit_val_batches=0, **rounds, **more), make(), site, states)

        super().__init__(app_of(worker), {client + 1: {"clients": str(client), "allow": allow} for client in range(3)})


def exchanged(grid, root="unused", ckpt_path=None, serving=None, callbacks=(), kinds=KINDS):
    every = pandas.concat([table(client) for client in range(3)])
    settings = {"limit_val_batches": 0, "max_rounds": 4, "callbacks": list(callbacks)}
    # the server has the names of columns alone, and the number of clients
    server = partial(data, every[:0], num_clients=3, classes=None, categories={}, standardize="table")
    # three looks for sites, each of which may take long
    serving = {"first_exchange": kinds, "patience": 60.0, **(serving or {})}
    return deploy(grid, make, root, server, ckpt_path=ckpt_path, serving=serving, **settings)


def test_words_and_scales_of_all_sites_make_the_simulations_inputs(tmp_path):
    grid = Sites(tmp_path)
    there = exchanged(grid)
    every = pandas.concat([table(client) for client in range(3)])
    here = fit(make(), data(every, classes=None, categories={}, standardize="table"), limit_val_batches=0, max_rounds=4)
    for name, tensor in here.weights.items():
        assert torch.allclose(there.weights[name], tensor, atol=1e-5)
    assert [kind for kind, node in grid.asked if node == 1][:4] == ["query.first", "query.first", "query", "train"]
    files = [json.loads(kept(tmp_path / str(node))) for node in (1, 2, 3)]
    assert files[0] == files[1] == files[2]
    assert files[0]["classes"] == {"ill": CLASSES} and files[0]["categories"] == {"sex": SEXES}
    both = here.data.preprocessing
    assert files[0]["mean"] == pytest.approx(both["mean"]) and files[0]["deviation"] == pytest.approx(both["deviation"])


def test_a_restarted_site_checks_what_was_agreed(tmp_path):
    exchanged(Sites(tmp_path / "sites"), tmp_path / "server", callbacks=[Pause(2)])
    grid = Sites(tmp_path / "sites")
    run = exchanged(grid, tmp_path / "server", "last")
    assert len(run.rows) == 4 and run.rows[3]["clients"] == 3


def test_a_site_with_other_values_than_the_first_is_refused(tmp_path):
    exchanged(Sites(tmp_path))
    # such as from a backup of another run
    path = tmp_path / "2" / "agreed.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mean": {"age": 7.0, "sex": 0.5}}))
    grid = Sites(tmp_path)
    client = make()
    told = settings_told(make_trainer(limit_val_batches=0), [client], client.configure_aggregator(), alone(0))
    link = Link(grid, 3, initial_of([client]), settings=told)
    with pytest.warns(UserWarning, match=r"node [123] is refused: its data\.standardize makes other inputs"):
        link.look()
    assert 0 < len(link.present) < 3


def test_a_site_whose_operator_has_not_allowed_it_tells_nothing(tmp_path):
    with (
        pytest.warns(UserWarning, match="first-exchange asks for categories and scales of its table"),
        pytest.raises(MisconfigurationException, match="no site has said"),
    ):
        exchanged(Sites(tmp_path, allow="classes"), serving={"patience": 0.2})


@pytest.mark.parametrize(
    "told",
    [
        "[",
        "[]",
        '{"classes": {"ill": "cold"}}',
        '{"classes": {"ill": [1]}}',
        '{"rows": -1}',
        '{"rows": true}',
        '{"mean": {"age": NaN}}',
        '{"samples": 3}',
        json.dumps({"classes": {"ill": ["x" * 501]}}),
    ],
)
def test_what_is_no_list_of_words_is_refused(told):
    with pytest.raises(Refused):
        FirstExchange(KINDS, 1, 3, False).take(1, {"values": pieces(told), "clients": 1, "agreed": False})


def test_many_words_travel_in_pieces():
    words = [f'{number:05} "µ"' for number in range(9000)]
    record = {"values": pieces(json.dumps({"categories": {"sex": words}})), "clients": 1, "agreed": False}
    told = unpack(pack({"first": record}), "first", TOLD, limit=0)
    exchange = FirstExchange(["categories"], 1, None, False)
    assert exchange.take(1, told) == [1]
    assert json.loads(exchange.agreed)["categories"]["sex"] == words


def test_sites_with_other_columns_of_texts_end_the_run_in_a_sentence():
    own = {"classes": {}, "categories": {"sex": ["f"]}}
    with pytest.raises(MisconfigurationException, match="column 'sex' holds texts at some sites"):
        merged({1: own, 2: {"classes": {}, "categories": {}}}, ["categories"])
    with pytest.raises(MisconfigurationException, match="the task takes 3"):
        merged({1: {"classes": {"ill": ["a"]}}}, ["classes"], 3)


def test_moments_of_sites_are_those_of_all_rows():
    drawn = np.random.default_rng(0)
    parts = [drawn.normal(1e6 + 3 * k, 1 + k, 20 + 7 * k) for k in range(3)]
    told = {
        k: {"mean": {"age": part.mean()}, "deviation": {"age": part.std()}, "rows": len(part)}
        for k, part in enumerate(parts)
    }
    found, every = merged(told, ["scales"]), np.concatenate(parts)
    assert found["mean"]["age"] == pytest.approx(every.mean(), rel=1e-12)
    assert found["deviation"]["age"] == pytest.approx(every.std(), rel=1e-9)
    # of one site alone they are its own
    assert merged({7: told[1]}, ["scales"])["mean"] == {"age": pytest.approx(parts[1].mean(), rel=1e-12)}


@pytest.mark.parametrize("standardize", ["table", "client", None])
def test_targets_of_sites_get_the_scale_of_all_training_rows(standardize):
    def prices(rows):
        rows = rows.assign(price=300_000 + 1000 * rows["age"] * (1 + rows["who"]))
        settings = {
            "standardize": standardize,
            "standardize_target": "table",
            "test_fraction": 0.0,
            "val_fraction": 0.0,
        }
        return TableData(rows, "price", Regression(), ["age"], "who", **settings)

    sites = [prices(table(client)) for client in range(3)]
    told = {node: values_of(site, ["scales"], "{}") for node, site in enumerate(sites)}
    # of inputs only what all fit together
    assert ("mean" in told[0]) == (standardize == "table")
    every = prices(pandas.concat([table(client) for client in range(3)]))
    every.setup()
    agreed = json.dumps(merged(told, ["scales"]))
    for site in sites:
        take_over(site, agreed)
        found, expected = site.target_scale(0), every.target_scale(0)
        assert found.mean == pytest.approx(expected.mean) and found.deviation == pytest.approx(expected.deviation)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"secure_sum": SecureSum()}, "trainer.secure_sum"),
        ({"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)}, "the guarantee of aggregator DPAverage"),
        ({"kinds": ["rows"]}, "choose from classes, categories, scales"),
    ],
)
def test_an_exchange_is_refused_under_a_guarantee(tmp_path, settings, words):
    kinds = settings.pop("kinds", KINDS)
    grid = Sites(tmp_path)
    with pytest.raises(MisconfigurationException, match=f"first-exchange=.*{words}"):
        deploy(grid, make, data=lambda: alone(0, num_clients=3), serving={"first_exchange": kinds}, **settings)
    assert grid.asked == []


def test_a_site_with_a_guarantee_tells_nothing_whatever_the_server_says(tmp_path):
    grid = Sites(tmp_path, secure_sum=SecureSum())
    with (
        pytest.warns(UserWarning, match=r"trainer\.secure_sum doesn't cover"),
        pytest.raises(MisconfigurationException, match="no site has said"),
    ):
        exchanged(grid, serving={"patience": 0.2})


def test_the_global_model_is_right_as_often_as_the_simulations(tmp_path):
    def worker(context):
        own = data(table(context.node_id - 1))
        own.setup()
        site = Site.of(context.node_config, own)
        return Worker(make_trainer(**settings), make(), site, StateVersions(tmp_path / str(context.node_id)))

    settings = {"limit_val_batches": 0, "max_rounds": 15}
    grid = LocalGrid(app_of(worker), {client + 1: {"clients": str(client)} for client in range(3)})
    every = pandas.concat([table(client) for client in range(3)])
    # the server has the names of columns alone
    there = deploy(grid, make, data=lambda: data(every[:0], num_clients=3), **settings)
    here = fit(make(), data(every), **settings)
    for name, tensor in here.weights.items():
        assert torch.allclose(there.weights[name], tensor, atol=1e-5)
    x = torch.tensor(np.stack([every["age"], every["sex"].map(SEXES.index)], 1), dtype=torch.float32)
    y = torch.tensor(every["ill"].map(CLASSES.index).to_numpy())
    right = [float((run.federation.client(x).argmax(1) == y).float().mean()) for run in (there, here)]
    assert right[0] == right[1] > 0.6
