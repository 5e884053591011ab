"""A checkpoint knows its clients' rows again."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, fit, load, make_client, make_trainer, plain, points
from pfl_lightning.data import IID, TableData, TensorData
from pfl_lightning.federation.checkpoint import warn_of_rows
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

OWNERS = np.array(["Bremen", "Jena", "Ulm"]).repeat(20)
BACKWARDS = np.r_[0:40, 59:39:-1]
"""The rows of Ulm in another order."""


class Leaf:
    """Inputs in a file."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, rows):
        return self.x[rows]


def coins(order=None, streamed=False, split=None, **settings):
    order = np.arange(60) if order is None else order
    x, y = points(60, seed=0)
    y = torch.from_numpy(np.random.default_rng(1).integers(0, CLASSES, 60))
    settings = {"client": OWNERS[order], "batch_size": 5, **settings}
    if split is not None:
        settings["split"] = split[order]
    inputs = Leaf(x[order]) if streamed else x[order]
    return TensorData(inputs, y[order], Classification(CLASSES), input_shape=(x.shape[1],), **settings)


def model():
    return make_client(FedAvg, net=plain)


@pytest.fixture(scope="module", params=[False, True], ids=["memory", "files"])
def run(request, tmp_path_factory):
    return request.param, fit(model(), coins(streamed=request.param), tmp_path_factory.mktemp("rows"), max_rounds=1)


def others(caught):
    return [str(each.message) for each in caught if "others than in the run" in str(each.message)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"order": BACKWARDS}, "first the .* rows of client 2 \\(Ulm\\)"),
        ({"seed": 9}, "3 of 3, first .* 0 \\(Bremen\\)"),
    ],
    ids=["order", "seed"],
)
def test_a_run_does_not_go_on_with_other_rows(changed, words, run, tmp_path):
    streamed, before = run
    with pytest.raises(MisconfigurationException, match=words):
        fit(
            *(model(), coins(streamed=streamed, **changed), tmp_path),
            **{"max_rounds": 2, "ckpt_path": before.last, "resume_changed": True},
        )
    again = fit(model(), coins(streamed=streamed), tmp_path, max_rounds=2, ckpt_path=before.last)
    assert len(again.rows) == 2


def test_rows_may_go_from_memory_into_files(run, tmp_path):
    streamed, before = run
    again = fit(model(), coins(streamed=not streamed), tmp_path, max_rounds=2, ckpt_path=before.last)
    assert len(again.rows) == 2


def test_a_trainer_does_not_go_on_with_other_rows(tmp_path):
    trainer, client = make_trainer(tmp_path, max_rounds=1), model()
    trainer.fit(client, datamodule=coins())
    with pytest.raises(MisconfigurationException, match=r"this Trainer's federation.*\(Ulm\)"):
        trainer.fit(client, datamodule=coins(BACKWARDS))


@pytest.mark.parametrize("changed", [{"order": BACKWARDS}, {"seed": 9}, {}], ids=["order", "seed", "same"])
@pytest.mark.parametrize("work", ["test", "validate", "predict"])
def test_other_rows_are_told_by_name_where_they_are_tested(changed, work, run, tmp_path):
    streamed, before = run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(make_trainer(tmp_path), work)(
            model(), datamodule=coins(streamed=streamed, **changed), ckpt_path=before.last
        )
    lines = others(caught)
    assert len(lines) == (1 if changed else 0)
    if changed:
        split = "val" if work == "validate" else "test"
        name, count = ("2 (Ulm)", 1) if "order" in changed else ("0 (Bremen)", 3)
        assert f"{split} rows of {count} of 3 clients, first of client {name}" in lines[0]


def test_clients_that_are_new_or_have_no_rows_are_not_counted(monkeypatch):
    was_changed = torch.tensor([[False] * 3, [False, False, True], [True] * 3])
    monkeypatch.setattr("pfl_lightning.federation.checkpoint.other_rows", lambda saved, data: was_changed)
    data = SimpleNamespace(size=lambda client, split: 5 * (client != 2), client_label=str)
    with pytest.warns(UserWarning, match="test rows of 1 of 2 clients, first of client 1,"):
        warn_of_rows({"round": 1}, data, "test", range(5))


def test_rows_of_the_user_s_own_are_predicted_for_without_a_word(run, tmp_path):
    streamed, before = run
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(tmp_path)
        data = coins(BACKWARDS, streamed=streamed)
        trainer.predict(model(), points(3, seed=2)[0], datamodule=data, ckpt_path=before.last, clients=["Ulm"])
    assert others(caught) == []


def test_a_test_set_in_another_order_is_the_same(tmp_path):
    split = np.array(["train", "train", "val", "test"])[np.arange(60) % 4]
    before = fit(model(), coins(split=split), tmp_path, max_rounds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path).test(model(), datamodule=coins(BACKWARDS, split=split), ckpt_path=before.last)
    assert others(caught) == []
    with pytest.raises(MisconfigurationException, match="the same rows in another order"):
        fit(model(), coins(BACKWARDS, split=split), tmp_path, max_rounds=2, ckpt_path=before.last)


def test_clients_without_names_are_the_same_rows_or_refused(tmp_path):
    settings = {"partitioner": IID(), "num_clients": 3, "batch_size": 5}
    x, y = points(60, seed=0)
    # one class, so that counts of classes tell nothing
    y = torch.zeros_like(y)
    made = [TensorData(x, y, Classification(CLASSES), **settings, seed=seed) for seed in (1, 1, 2)]
    before = fit(model(), made[0], tmp_path, max_rounds=1)
    make_trainer(tmp_path).test(model(), datamodule=made[1], ckpt_path=before.last)
    with pytest.raises(MisconfigurationException, match="other samples"):
        make_trainer(tmp_path).test(model(), datamodule=made[2], ckpt_path=before.last)


def test_the_record_has_a_digest_of_the_rows(run, tmp_path):
    streamed, before = run
    assert load(before.last)["federation"]["rows"].shape == (3, 3, 3)
    digest = before.logger.summary["rows"]
    same, other = (fit(model(), coins(streamed=streamed, seed=seed), tmp_path, max_rounds=1) for seed in (1, 2))
    assert same.logger.summary["rows"] == digest != other.logger.summary["rows"]


def test_other_rows_are_told_before_the_fitted_values_that_follow_from_them(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs the extra tables")
    table = pandas.DataFrame({"age": np.arange(60) ** 1.5, "bmi": np.arange(60) % 7, "flu": np.arange(60) % CLASSES})
    table = table.assign(site=OWNERS)

    def hospitals(order):
        settings = {"client": "site", "standardize": "table"}
        return TableData(table.iloc[order], "flu", Classification(CLASSES), **settings)

    def client(data):
        return FedAvg(MLP, data.input_shape, CLASSES)

    data, moved = hospitals(np.arange(60)), hospitals(BACKWARDS)
    before = fit(client(data), data, tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match=r"first the .* rows of client 2 \(Ulm\)"):
        fit(client(moved), moved, tmp_path, max_rounds=2, ckpt_path=before.last)
