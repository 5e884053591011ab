"""Targets with a scale, such as prices: standardised while a net learns, and in their unit wherever they are read."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

pytest.importorskip("pandas", reason="needs the extra tables")

import lightning
import pandas

from command import QUIET, pfl
from federations import Pause, equal, fit, make_trainer, near, untimed
from pfl_lightning import FederatedTrainer
from pfl_lightning.cli import predict
from pfl_lightning.data import Preprocessing, TableData, TargetScale
from pfl_lightning.methods import Ditto, FedAvg, FedPer
from pfl_lightning.nets import MLP
from pfl_lightning.privacy import DPAverage
from pfl_lightning.tasks import Poisson, Quantile, Regression

TOWNS = ["Bremen", "Ulm", "Jena"]


def houses(*towns: str, rows: int = 60, **columns: object) -> pandas.DataFrame:
    """Prices around 300,000, with a level of its own in each town."""
    drawn, count = np.random.default_rng(0), rows * len(towns)
    area, rooms = drawn.normal(100, 30, count), drawn.integers(1, 6, count)
    town = np.repeat(towns, rows)
    price = 300_000 + 2_500 * (area - 100) + 20_000 * rooms + 30_000 * (town == "Ulm") + drawn.normal(0, 8_000, count)
    made = {
        "area": area,
        "rooms": rooms,
        "town": town,
        "price": price,
        "rent": price / 250 + drawn.normal(0, 50, count),
    }
    return pandas.DataFrame({**made, **columns})


def data_of(table=None, target="price", task=None, **settings):
    settings = {
        "features": ["area", "rooms"],
        "client": "town",
        "preprocessing": "auto",
        "val_fraction": 0.2,
        **settings,
    }
    return TableData(houses(*TOWNS) if table is None else table, target, task or Regression(), **settings)


def client_of(data, method=FedAvg, rate=0.05, **settings):
    lightning.seed_everything(3, verbose=False)
    net = partial(MLP, hidden=[8])
    return method(net, (2,), task=data.task, optimizer=partial(SGD, lr=rate), **settings)


def ready(**settings):
    data = data_of(**settings)
    data.setup()
    return data


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_prices_are_learned_and_measured_in_dollars(engine):
    run = fit(client_of(data_of()), data_of(), max_rounds=20, engine=engine)
    row = run.rows[-1]
    assert row["val/r2_pooled"] > 0.8 and row["train/loss"] < 1
    # by hand, from the table's own prices
    run.back_on_device()
    model = run.trainer.client("Ulm")
    scale, part = run.data.target_scale("Ulm"), run.data.client(run.data.client_id("Ulm")).val
    outputs, prices = model.eval().cpu()(part.x), scale.undone(part.y)
    run.federation.evaluations.evaluate(range(3), ("val",))
    values = run.federation.evaluations.results["val"][run.data.client_id("Ulm")]
    errors = scale.undone(outputs.detach())[:, 0] - prices
    assert prices.mean() > 200_000 and values["mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-4)
    assert values["loss"] == pytest.approx(float(errors.square().mean()), rel=1e-4)


def test_engines_agree_where_each_client_has_its_own_scale():
    settings = {"preprocessing": Preprocessing(by="client")}
    runs = [
        fit(client_of(data_of(**settings), Ditto), data_of(**settings), max_rounds=2, engine=engine)
        for engine in ("sequential", "vectorised", "processes")
    ]
    for name in ("val/mae", "val/r2_pooled", "val/loss", "val/mae_worst", "train/loss"):
        values = [run.rows[-1][name] for run in runs]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4), name
    assert runs[0].rows[-1]["val/mae"] > 1000


def test_the_scale_is_of_training_rows_by_table_by_client_or_given():
    table = houses(*TOWNS)
    table["part"] = np.tile(["train", "train", "val", "test"], 45)
    trained = table[table["part"] == "train"]
    settings = {"table": table, "split_column": "part"}
    whole, own = ready(**settings), ready(**settings, standardize_target="client")
    scale = whole.target_scale("Ulm")
    assert scale == whole.target_scale(None) == whole.target_scale("new")
    assert scale.mean[0] == pytest.approx(trained["price"].mean(), rel=1e-6)
    assert scale.deviation[0] == pytest.approx(trained["price"].std(ddof=0), rel=1e-6)
    for client, town in enumerate(own.client_names):
        here = trained.loc[trained["town"] == town, "price"]
        assert own.target_scale(town).mean[0] == pytest.approx(here.mean(), rel=1e-6)
        assert near(own.part(client, "train").y.mean(), torch.tensor(0.0), 1e-5)
    # a model of nobody has no unit of its own
    assert own.target_scale(None) is None
    with pytest.raises(MisconfigurationException, match=r"client 'new'.*none are of this client"):
        own.target_scale("new")
    given = ready(**settings, standardize_target={"price": [300_000, 50_000]})
    assert given.target_scale(2) == TargetScale((300_000.0,), (50_000.0,))
    assert (whole.fitted_on, own.fitted_on, given.fitted_on) == ("all clients",) * 3
    constants = Preprocessing(fill=0, scale=[100, 30])
    fitted = [
        ready(**settings, preprocessing=constants, standardize_target=each).fitted_on
        for each in ("table", "client", None)
    ]
    assert fitted == ["all clients", "each client", "nothing"]


@pytest.mark.parametrize("by", ["table", "client"])
def test_test_rows_change_no_scale_and_no_figure_of_training(by):
    runs = []
    for factor in (1.0, 1000.0):
        table = houses(*TOWNS)
        table["part"] = np.tile(["train", "train", "val", "test"], 45)
        table.loc[table["part"] == "test", "price"] *= factor
        data = data_of(table, split_column="part", preprocessing=Preprocessing(by=by))
        runs.append(fit(client_of(data), data, max_rounds=2, limit_val_batches=0))
    one, other = runs
    assert one.data.preprocessing == other.data.preprocessing and equal(one.weights, other.weights)
    assert [row["train/loss"] for row in one.rows] == [row["train/loss"] for row in other.rows]
    assert other.test()[0]["mae"] > 100 * one.test()[0]["mae"]


def test_without_a_scale_bits_are_those_of_plain_targets():
    table = houses(*TOWNS)
    table["price"] /= 1e5
    off = data_of(table, standardize_target=None)
    off.setup()
    assert off.target_scale(0) is None and not {name for name in off.preprocessing if "target_" in name}
    raw = torch.tensor(table.loc[table["town"] == "Ulm", "price"].to_numpy()).float().sort().values
    held = torch.cat([off.part(off.client_id("Ulm"), split).y for split in ("train", "val", "test")])
    assert torch.equal(held.sort().values, raw)
    # `auto` is of preprocessing, and of tasks with a scale
    bare = data_of(table, preprocessing=None, standardize="table")
    bare.setup()
    assert torch.equal(bare.part(1, "train").y, off.part(1, "train").y)
    visits = ready(table=houses(*TOWNS, price=3.0), task=Poisson())
    assert visits.target_scale(0) is None
    runs = [fit(client_of(each), each, max_rounds=2) for each in (off, bare)]
    assert equal(runs[0].weights, runs[1].weights) and untimed(runs[0].rows) == untimed(runs[1].rows)


@pytest.mark.parametrize("by", ["table", "client"])
@pytest.mark.exhaustive
def test_predictions_are_in_dollars_wherever_a_model_goes(by, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    houses(*TOWNS).to_csv("houses.csv", index=False)
    rows = houses("Ulm", rows=7)
    rows.drop(columns=["price", "rent"]).to_csv("new.csv", index=False)
    pfl(
        f"fit --data TableData --data.path houses.csv --data.target price --data.client town --data.task Regression "
        f"--data.features [area,rooms] --data.preprocessing.by {by} --model FedPer --model.net MLP "
        f"--model.optimizer SGD --model.optimizer.lr 0.05 --trainer.max_rounds 2 --trainer.engine sequential {QUIET}"
    )
    assert predict.main("--client Ulm --data new.csv".split()) == 0
    told = torch.tensor(pandas.read_csv("predictions.csv")["prediction"].to_numpy()).float()
    assert 100_000 < told.mean() < 600_000
    (path,) = Path("runs").rglob("best.ckpt")
    model = FedPer.load_from_checkpoint(path, client="Ulm").eval()
    quiet = FederatedTrainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    (found,) = quiet.predict(FedPer.load_from_checkpoint(path), rows, ckpt_path=path, clients=["Ulm"]).values()
    assert torch.allclose(found.values[:, 0], told, rtol=1e-5)
    x = TableData.from_state(torch.load(path, weights_only=True)["TableData"]).inputs(rows, "Ulm")
    assert torch.allclose(model.predict_step(x)[:, 0], told, rtol=1e-5)
    # formats differ in nothing by whose rows have fitted
    for kind in ("ts", "pt2", "onnx") if by == "table" else ("ts",):
        if kind == "onnx":
            pytest.importorskip("onnxscript", reason="needs the extra onnx")
            runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
        model.export(f"model.{kind}")
        if kind == "onnx":
            session = runtime.InferenceSession("model.onnx")
            outputs = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
        else:
            read = torch.jit.load("model.ts") if kind == "ts" else torch.export.load("model.pt2").module()
            outputs = read(x)
        assert torch.allclose(outputs[:, 0], told, rtol=1e-5), kind


def test_a_plain_trainer_measures_in_dollars_and_keeps_the_scale(tmp_path):
    run = fit(client_of(data_of()), data_of(), tmp_path, max_rounds=3)
    model, scale = run.trainer.client("Ulm"), run.data.target_scale("Ulm")
    assert model.target_scale == run.model.target_scale == scale
    part = run.data.client(run.data.client_id("Ulm")).test
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(part.x, part.y), 64)
    plain = lightning.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path / "plain", logger=False, enable_progress_bar=False
    )
    (values,) = plain.test(model, loader, verbose=False)
    assert values["test/mae"] == pytest.approx(run.test()[run.data.client_id("Ulm")]["mae"], rel=1e-4)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    again = FedAvg.load_from_checkpoint(tmp_path / "plain.ckpt", net=partial(MLP, hidden=[8]))
    assert again.target_scale == scale and torch.equal(
        again.cpu().predict_step(part.x), model.cpu().predict_step(part.x)
    )


def test_several_targets_and_quantiles_have_a_scale_each():
    both = fit(client_of(each := data_of(target=["price", "rent"], task=Regression(2))), each, max_rounds=8)
    scale = both.data.target_scale(0)
    assert scale.mean[0] > 100 * scale.mean[1] and both.rows[-1]["val/r2_pooled"] > 0.7
    of_levels = data_of(target=["price", "rent"], task=Quantile(2, levels=(0.1, 0.9)))
    runs = [
        fit(client_of(of_levels), of_levels, max_rounds=4, engine=engine) for engine in ("sequential", "vectorised")
    ]
    rows = [run.rows[-1] for run in runs]
    assert rows[0]["val/mae"] == pytest.approx(rows[1]["val/mae"], rel=1e-3) and rows[0]["val/mae"] > 1000
    assert rows[0]["val/coverage"] == pytest.approx(rows[1]["val/coverage"], abs=1e-6)
    values = scale.undone(torch.tensor([[-1.0, 1.0, 0.0, 2.0]]))
    (m, n), (s, t) = scale.mean, scale.deviation
    assert values.tolist() == [pytest.approx([m - s, m + s, n, n + 2 * t])]


@pytest.mark.parametrize("by", ["table", "client"])
def test_a_resumed_run_has_the_same_bits_and_another_scale_is_told(by, tmp_path):
    settings = {"preprocessing": Preprocessing(by=by)}
    whole = fit(client_of(data_of(**settings)), data_of(**settings), tmp_path / "whole", max_rounds=4)
    first = fit(client_of(data_of(**settings)), data_of(**settings), tmp_path / "a", max_rounds=4, callbacks=[Pause(2)])
    again = fit(client_of(data_of(**settings)), data_of(**settings), tmp_path / "b", ckpt_path=first.last, max_rounds=4)
    assert equal(whole.weights, again.weights) and untimed(whole.rows) == untimed(again.rows)
    off = data_of(**settings, standardize_target=None)
    with pytest.raises(MisconfigurationException, match="standardize_target"):
        fit(client_of(off), off, tmp_path / "c", ckpt_path=first.last, max_rounds=4)


@pytest.mark.parametrize("by", ["table", "client"])
def test_late_clients_and_other_tables_take_the_federations_scale(by, tmp_path):
    settings = {"preprocessing": Preprocessing(by=by)}
    run = fit(client_of(data_of(**settings)), data_of(**settings), tmp_path, max_rounds=10)
    rich = houses("Trier")
    rich["price"] *= 3
    # whatever a late table says of its own targets
    late = data_of(rich, **settings, standardize_target=None if by == "table" else "auto")
    trainer = make_trainer(tmp_path)
    figures = trainer.join(client_of(late), late, ckpt_path=run.last)
    assert figures["new_received/mae"] > 10_000
    scale = late.target_scale("Trier")
    if by == "table":
        assert scale == run.data.target_scale("Ulm")
    else:
        assert scale.mean[0] > 2 * run.data.target_scale("Ulm").mean[0]
        # a known client keeps the scale that its model was trained with
        known = data_of(houses("Ulm", rows=20), **settings)
        known.adopt(run.data.preprocessing, run.data.client_names)
        known.setup()
        assert known.target_scale("Ulm") == run.data.target_scale("Ulm")
    (found,) = trainer.predict(data=rich, clients=["Trier"]).values()
    assert found.values.mean() > 150_000
    assert trainer.client("Trier").target_scale == scale


def test_a_matrix_a_central_test_and_results_are_in_dollars(tmp_path):
    data = data_of(central_test=0.2)
    run = fit(client_of(data), data, tmp_path, max_rounds=5)
    matrix = run.trainer.matrix()
    tests = run.test()
    assert matrix.metric == "test/mae" and min(map(min, matrix.values)) > 1000
    assert [matrix.values[k][k] for k in range(3)] == pytest.approx([tests[k]["mae"] for k in range(3)], rel=1e-4)
    assert run.federation.test_global()["test/global_mae"] > 1000
    assert run.rows[-1]["val/mae"] > 1000


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"table": houses(*TOWNS, price=5.0)}, r"standardize_target=table: target 'price' is 5 .* another target"),
        ({"table": houses(*TOWNS, price=float("nan"))}, "'price'"),
        ({"standardize_target": "rows"}, "standardize_target"),
        ({"standardize_target": {"cost": [1, 2]}}, r"standardize_target\.cost is no target"),
        ({"standardize_target": {"price": [1, 0]}}, r"standardize_target\.price"),
        ({"standardize_target": {"price": [1, 2]}, "target": ["price", "rent"], "task": Regression(2)}, "of rent"),
        ({"standardize_target": "table", "task": Poisson()}, r"standardize_target='table': targets of task Poisson"),
        ({"standardize_target": "client", "central_test": 0.2}, r"standardize_target=client: .*central_test=0\.2"),
    ],
)
def test_a_target_without_a_scale_is_refused(settings, says):
    with pytest.raises(MisconfigurationException, match=says):
        ready(**settings)


def test_whole_dollars_are_a_quantity():
    whole = houses(*TOWNS).round()
    given = [ready(table=whole.astype({"price": kind})) for kind in (int, float)]
    assert given[0].target_scale(0) == given[1].target_scale(0)
    assert torch.equal(given[0].part(0, "train").y, given[1].part(0, "train").y)
    for settings in ({"standardize_target": None}, {"task": Poisson()}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            plain = ready(table=whole.astype({"price": int}), **settings)
        assert plain.part(0, "train").y.dtype == torch.float32 and plain.part(0, "train").y.mean() > 200_000


def test_a_client_whose_target_is_constant_is_named():
    table = houses(*TOWNS)
    table.loc[table["town"] == "Ulm", "price"] = 7.0
    with pytest.raises(MisconfigurationException, match=r"'price' is 7 .* of client Ulm.* take table"):
        ready(table=table, standardize_target="client")
    assert ready(table=table).target_scale("Ulm") is not None


def test_a_guarantee_refuses_a_scale_of_all_clients_targets():
    constants = Preprocessing(fill=0, scale=[100, 30])
    server = partial(DPAverage, clip=1.0, noise_multiplier=1.0)
    for way, allowed in (("table", False), ("client", True), ({"price": [300_000, 80_000]}, True), (None, True)):
        data = data_of(preprocessing=constants, standardize_target=way)
        if allowed:
            fit(client_of(data, rate=1e-9), data, aggregator=server(), max_rounds=1, limit_val_batches=0)
            continue
        with pytest.raises(MisconfigurationException, match=r"all clients.*standardize_target"):
            fit(client_of(data), data, aggregator=server(), max_rounds=1)


def test_the_head_of_a_run_tells_the_unit_of_its_figures():
    lines = dict(ready().head_lines)
    assert "all clients (price: mean 3" in lines["targets"] and "train/loss of standardized" in lines["targets"]
    own = dict(ready(standardize_target="client").head_lines)["targets"]
    assert "each client's own training rows; val/" in own
    assert "targets" not in dict(ready(standardize_target=None).head_lines)


def test_half_precision_keeps_the_digits_of_dollars(tmp_path):
    data = data_of()
    run = fit(client_of(data), data, max_rounds=2)
    model, x = run.trainer.client("Ulm").eval().cpu(), run.data.client(0).test.x
    whole, half = model.predict_step(x), model.to(torch.bfloat16).predict_step(x.bfloat16())
    deviation = run.data.target_scale(0).deviation[0]
    assert half.dtype == torch.float32 and float((half - whole).abs().max()) < 0.05 * deviation
    model.export(tmp_path / "half.ts")
    assert torch.allclose(torch.jit.load(tmp_path / "half.ts")(x.bfloat16()), half, atol=0.02 * deviation)


def test_a_late_table_may_name_its_target_otherwise(tmp_path):
    given = {"standardize_target": {"price": [300_000, 80_000]}}
    run = fit(client_of(data_of(**given)), data_of(**given), tmp_path, max_rounds=1)
    late = data_of(houses("Trier").rename(columns={"price": "cost"}), target="cost")
    make_trainer(tmp_path).join(client_of(late), late, ckpt_path=run.last)
    assert late.target_scale("Trier") == TargetScale((300_000.0,), (80_000.0,))
