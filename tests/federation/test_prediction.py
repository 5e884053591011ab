"""Predictions for raw rows, with the models by which clients are evaluated."""

from functools import partial
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, TensorDataset

from command import ACCELERATOR
from federations import (
    FEATURES,
    MOMENTUM,
    NETS,
    Blobs,
    blobs,
    equal,
    fit,
    make_client,
    make_trainer,
    noisy,
    plain,
    points,
)
from pfl_lightning import ClientModule, Predictions
from pfl_lightning.aggregators import CFL
from pfl_lightning.data import Preprocessing, TableData, TensorData
from pfl_lightning.federation.prediction import NeedsSamples
from pfl_lightning.methods import FedAvg, FedPer, KNNPer, Local
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.tasks import Classification, MultiLabel, NextToken, Regression, Segmentation
from sweeps import swept

SETTINGS = {"FedClassAvg": {"contrastive": False}}
ROWS = points(7, seed=5)[0]
NAMES = ("Bremen", "Erfurt", "Ulm")


def named(**settings: Any) -> TensorData:
    """Three clients with names."""
    x, y = points(90, seed=2)
    return TensorData(x, y, Blobs().task, client=[NAMES[row % 3] for row in range(90)], **settings)


def accuracies(predicted: dict[Any, Predictions], data: Any) -> dict[Any, float]:
    """The share of right classes of each client on its test rows."""
    right = {name: own.classes == data.part(data.client_id(name), "test").y for name, own in predicted.items()}
    return {name: float(each.float().mean()) for name, each in right.items()}


@pytest.mark.parametrize("method", swept(METHODS))
def test_predictions_for_a_client_s_test_rows_give_its_test_accuracy(method, tmp_path):
    make = partial(make_client, method.client, net=noisy, **SETTINGS.get(method.name, {}))
    run = fit(make(), root=tmp_path, aggregator=method.new_aggregator(), max_rounds=2)
    tested = {client: values["acc"] for client, values in run.test().items()}
    predicted = run.trainer.predict(run.model)
    assert accuracies(predicted, run.data) == tested
    rows = {client: run.data.part(client, "test").x for client in range(4)}
    given = run.trainer.predict(run.model, clients=rows)
    assert equal([own.outputs for own in predicted.values()], [own.outputs for own in given.values()])
    # in another process, with the data or with the checkpoint alone
    again = partial(make_trainer().predict, clients=rows, ckpt_path=run.last)
    saved = again(make(), datamodule=blobs(), aggregator=method.new_aggregator())
    assert equal([own.outputs for own in predicted.values()], [own.outputs for own in saved.values()])
    try:
        alone = make_trainer().predict(make(), clients=rows, ckpt_path=run.last)
    except NeedsSamples:
        assert method.name in NEED_SAMPLES
    else:
        assert equal([own.outputs for own in predicted.values()], [own.outputs for own in alone.values()])
        assert method.name not in NEED_SAMPLES
    one = run.trainer.client(2).eval()
    assert torch.equal(one(rows[2].to(one.device)).cpu(), predicted[2].outputs)
    assert {client: values["acc"] for client, values in run.test().items()} == tested


NEED_SAMPLES = {"PeFLL", "Per-FedAvg", "FedBABU", "GPFL", "kNN-Per", "pFedFDA", "FedALA", "FedFomo", "IFCA"}
"""Methods whose clients' models are made from the clients' samples."""


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_predictions_are_those_of_the_sequential_engine(engine):
    run = fit(make_client(FedPer), engine=engine)
    tested = {client: values["acc"] for client, values in run.test().items()}
    assert accuracies(run.trainer.predict(), run.data) == tested


def test_each_architecture_predicts_with_its_own_net(tmp_path):
    run = fit(make_client(Local, net=NETS), root=tmp_path)
    tested = {client: values["acc"] for client, values in run.test().items()}
    assert accuracies(run.trainer.predict(), run.data) == tested
    alone = make_trainer().predict(make_client(Local, net=NETS), ROWS, ckpt_path=run.last)
    assert all(
        torch.equal(alone[client].outputs, run.trainer.predict(None, ROWS)[client].outputs) for client in range(4)
    )


# Which clients, and which rows


def test_clients_are_named_by_name_or_id():
    run = fit(make_client(FedPer), named())
    predicted = run.trainer.predict(run.model, ROWS, clients=["Ulm", 0])
    assert list(predicted) == ["Ulm", "Bremen"] and len(predicted["Ulm"]) == len(ROWS)
    assert not torch.equal(predicted["Ulm"].outputs, predicted["Bremen"].outputs)
    assert list(run.trainer.predict(run.model)) == list(NAMES)
    assert list(run.trainer.predict(run.model, ROWS, clients="Ulm")) == ["Ulm"]
    own = run.trainer.predict(run.model, clients={"Ulm": ROWS[:2], "Erfurt": ROWS[2:]})
    assert torch.equal(own["Ulm"].outputs, predicted["Ulm"].outputs[:2]) and len(own["Erfurt"]) == 5
    for client in ("ulm", "Rom", 3):
        with pytest.raises(MisconfigurationException, match=f"client={client!r} is no client"):
            run.trainer.predict(run.model, ROWS, clients=[client])
    for wrong in (1.0, True):
        with pytest.raises(MisconfigurationException, match=f"client={wrong} is no client; .*Bremen"):
            run.trainer.predict(run.model, ROWS, clients=wrong)


def test_a_client_without_test_samples_is_left_out_with_a_warning(tmp_path):
    x, y = points(60, seed=2)
    split = ["test" if row % 4 == 0 and row % 3 else "train" for row in range(60)]
    settings = {"client": [NAMES[row % 3] for row in range(60)], "split": split, "client_split": "given"}
    data = TensorData(x, y, Blobs().task, **settings)
    run = fit(make_client(), data, root=tmp_path, max_rounds=1)
    with pytest.warns(UserWarning, match="no test samples to predict for at client .*Bremen"):
        predicted = run.trainer.predict(run.model)
    assert sorted(predicted) == ["Erfurt", "Ulm"]
    with pytest.raises(MisconfigurationException, match="no client has test samples"):
        none = TensorData(x, y, Blobs().task, **(settings | {"split": ["train"] * 60}))
        run = fit(make_client(), none, root=tmp_path / "none", max_rounds=1)
        run.trainer.predict(run.model)
    assert len(run.trainer.predict(run.model, ROWS)) == 3


def test_all_clients_predict_where_names_are_ids_of_others(tmp_path):
    x, y = points(90, seed=2)
    data = TensorData(x, y, Blobs().task, client=[["1", "2", "10"][row % 3] for row in range(90)])
    run = fit(make_client(), data, tmp_path)
    with pytest.raises(MisconfigurationException, match=r"client=1 is the id of client '10'"):
        run.trainer.predict(run.model, ROWS, clients=[1])
    for rows in (None, ROWS):
        assert list(run.trainer.predict(run.model, rows)) == data.client_names == ["1", "10", "2"]
    saved = make_trainer().predict(run.model, ROWS, ckpt_path=run.last)
    assert equal(saved["10"].outputs, run.trainer.predict(run.model, ROWS, clients="10")["10"].outputs)


def test_a_new_client_is_predicted_for_by_the_model_that_it_receives(tmp_path):
    data = named(new_clients=1)
    run = fit(make_client(FedAvg), data, root=tmp_path)
    (name,) = data.client_names[data.num_clients :]
    predicted = run.trainer.predict(run.model, ROWS, clients=[name, "new", 0])
    # FedAvg sends all of them the same model
    assert len({tuple(own.outputs.flatten().tolist()) for own in predicted.values()}) == 1
    assert accuracies(run.trainer.predict(clients=[name]), data) == {
        name: pytest.approx(run.trainer.join(run.model, data)["new_received/acc"])
    }
    alone = make_trainer().predict(make_client(FedAvg), ROWS, ckpt_path=run.last, clients=["new"])
    assert torch.equal(alone["new"].outputs, predicted["new"].outputs)


def test_rows_of_a_new_client_are_prepared_as_of_one_that_is_unknown(monkeypatch):
    run, asked = fit(make_client(), max_rounds=1), []
    monkeypatch.setattr(run.data, "inputs", lambda rows, client: asked.append(client) or rows)
    run.trainer.predict(run.model, ROWS, clients=["new", 3])
    assert asked == ["new", 3]


@pytest.mark.parametrize(("method", "server"), [(FedAvg, CFL), (KNNPer, None)])
def test_a_new_client_without_samples_is_refused_where_they_make_its_model(method, server, tmp_path):
    run = fit(make_client(method), root=tmp_path, max_rounds=1, aggregator=server and server())
    with pytest.raises(MisconfigurationException, match="new client"):
        run.trainer.predict(run.model, ROWS, clients=["new"])
    with pytest.raises(NeedsSamples):
        make_trainer().predict(make_client(method), ROWS, ckpt_path=run.last, clients=["new"])


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.zeros(2, FEATURES + 1), r"\[2, 7\].*\[n, 6\]"),
        (torch.zeros(FEATURES), r"\[6\].*\[n, 6\]"),
        (torch.zeros(0, FEATURES), r"\[0, 6\].*\[n, 6\]"),
        (torch.full((2, FEATURES), torch.nan), "nan in row 0"),
        (DataLoader([1]), "data=DataLoader"),
        ({"x": torch.zeros(2, FEATURES)}, "data is a dict"),
        ("rows.csv", "data is a str"),
    ],
    ids=["width", "no rows", "empty", "nan", "loader", "dict", "path"],
)
def test_rows_of_another_form_are_refused(rows, reason):
    run = fit(make_client(), max_rounds=1)
    with pytest.raises(MisconfigurationException, match=reason):
        run.trainer.predict(run.model, rows)


def test_datasets_and_arrays_are_rows_too():
    run = fit(make_client(), max_rounds=1)
    outputs = run.trainer.predict(run.model, ROWS, clients=[0])[0].outputs
    for rows in (TensorDataset(ROWS, torch.zeros(7)), ROWS.tolist(), ROWS.double().numpy()):
        assert torch.equal(run.trainer.predict(run.model, rows, clients=[0])[0].outputs, outputs)


def test_images_are_scaled_as_in_training():
    bytes_of = torch.randint(0, 255, (40, 1, 4, 4), dtype=torch.uint8)
    data = TensorData(bytes_of, torch.arange(40) % 2, Blobs().task, client=torch.arange(40) % 2)
    data.setup()
    assert torch.equal(data.inputs(bytes_of, 0), data.transform(bytes_of))
    # floats could be on any scale
    for rows in (data.transform(bytes_of), bytes_of.half(), bytes_of.long()):
        with pytest.raises(MisconfigurationException, match=rf"{rows.dtype}, and .*uint8"):
            data.inputs(rows, 0)


def test_bytes_are_refused_where_the_net_has_learned_from_floats():
    images = torch.rand(40, 1, 4, 4)
    data = TensorData(images, torch.arange(40) % 2, Blobs().task, client=torch.arange(40) % 2)
    data.setup()
    with pytest.raises(MisconfigurationException, match=r"uint8, and .*float32"):
        data.inputs((images * 255).byte(), 0)
    # other integers are numbers in the units of training, and so are truth values
    assert data.inputs(torch.ones(2, 1, 4, 4).int(), 0).dtype == data.inputs(images > 0.5, 0).dtype == torch.float32


# What comes back


def test_predictions_follow_the_task():
    outputs = torch.tensor([[0.0, 2.0], [3.0, -1.0]])
    assert Blobs().task.predictions(outputs)["classes"].tolist() == [1, 0]
    assert torch.allclose(Blobs().task.predictions(outputs)["probabilities"].sum(1), torch.ones(2))
    labels = MultiLabel(2).predictions(outputs)
    assert labels["classes"].tolist() == [[False, True], [True, False]] and labels["probabilities"][0, 0] == 0.5
    assert equal(Regression(2).predictions(outputs), {"values": outputs})
    pixels = Segmentation(3).predictions(torch.rand(2, 3, 4, 5))
    assert pixels["classes"].shape == (2, 4, 5) and torch.allclose(pixels["probabilities"].sum(1), torch.ones(2, 4, 5))
    tokens = NextToken(9).predictions(torch.rand(2, 5, 9))
    assert tokens["classes"].shape == (2, 5) and torch.allclose(tokens["probabilities"].sum(2), torch.ones(2, 5))


def test_predictions_become_columns():
    outputs = torch.tensor([[0.0, 2.0], [3.0, -1.0]])
    classes = Predictions(outputs, **Blobs().task.predictions(outputs), class_names=["no", "yes"]).columns()
    assert classes["prediction"] == ["yes", "no"] and list(classes) == ["prediction", "p_no", "p_yes"]
    numbered = Predictions(outputs, **Blobs().task.predictions(outputs)).columns()
    assert numbered["prediction"] == ["1", "0"] and numbered["p_1"] == classes["p_yes"]
    labels = Predictions(outputs, **MultiLabel(2).predictions(outputs), class_names=["a", "b"]).columns()
    assert labels["prediction_a"] == [0, 1] and labels["p_a"][0] == 0.5
    assert Predictions(outputs, values=outputs[:, :1]).columns() == {"prediction": [0.0, 3.0]}
    assert Predictions(outputs, values=outputs).columns() == {"prediction_0": [0.0, 3.0], "prediction_1": [2.0, -1.0]}
    pixels = torch.rand(2, 3, 4, 5)
    with pytest.raises(MisconfigurationException, match=r"\[2, 3, 4, 5\]"):
        Predictions(pixels, **Segmentation(3).predictions(pixels)).columns()


class Writer(BasePredictionWriter):
    """Keeps what Lightning gives to be written."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, *_):
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epochs.append(predictions)


def test_prediction_writers_work_with_the_checkpoint_alone_too(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    for data in ({"datamodule": blobs()}, {}):
        writer = Writer()
        trainer = make_trainer(callbacks=[writer])
        settings = {"ckpt_path": run.last, "clients": [1, 3], "return_predictions": False}
        assert trainer.predict(make_client(), ROWS, **data, **settings) == {}
        assert [len(each) for each in writer.batches] == [7, 7] and len(writer.epochs) == 1


def test_precision_is_the_trainer_s(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    exact = run.trainer.predict(run.model, ROWS, clients=[0])[0].outputs
    for with_data in ({"datamodule": blobs()}, {}):
        trainer = make_trainer(precision="bf16-mixed")
        rounded = trainer.predict(make_client(), ROWS, ckpt_path=run.last, clients=[0], **with_data)[0].outputs
        assert torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(rounded, exact)


# What isn't there


def test_what_is_missing_is_asked_for(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match="model="):
        make_trainer().predict(data=ROWS)
    with pytest.raises(NeedsSamples, match="datamodule="):
        make_trainer().predict(make_client(), ckpt_path=run.last)
    with pytest.raises(MisconfigurationException, match="another method or net"):
        make_trainer().predict(make_client(net=noisy), ROWS, ckpt_path=run.last)
    with pytest.raises(MisconfigurationException, match=r"trainer\.client"):
        make_trainer().client(0)


def test_a_checkpoint_without_the_data_s_entry_predicts_with_the_data(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1)
    checkpoint = torch.load(run.last, weights_only=True)
    # as of data of another class, and of a server that can't welcome clients
    del checkpoint["Blobs"]
    checkpoint["federation"]["newcomer"] = {}
    torch.save(checkpoint, bare := tmp_path / "bare.ckpt")
    with pytest.raises(NeedsSamples):
        make_trainer().predict(make_client(), ROWS, ckpt_path=bare)
    predicted = make_trainer().predict(make_client(), ROWS, datamodule=blobs(), ckpt_path=bare, clients=[1, "new"])
    assert torch.equal(predicted[1].outputs, run.trainer.predict(run.model, ROWS, clients=[1])[1].outputs)


def test_figures_of_trained_models_are_told_from_predictions(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1, evaluate="after")
    with pytest.warns(UserWarning, match=r"trainer\.evaluate=after"):
        run.trainer.predict(run.model, ROWS)
    with pytest.warns(UserWarning, match=r"trainer\.evaluate=after"):
        make_trainer().predict(make_client(), ROWS, ckpt_path=run.last)


class Halved(Blobs):
    """Inputs by code and a number of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = 0.5

    def transform(self, x: Any) -> Any:
        return self.factor * x


class Kept(Halved):
    """The same, in the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.factor = state_dict["factor"]


def test_inputs_by_an_author_s_own_code_need_the_data_or_an_entry_of_it(tmp_path):
    run = fit(make_client(), blobs(data=Halved), root=tmp_path / "halved", max_rounds=1)
    expected = run.trainer.predict(run.model, ROWS)[0].outputs
    with pytest.raises(NeedsSamples, match="Halved"):
        make_trainer().predict(make_client(), ROWS, ckpt_path=run.last)
    kept = fit(make_client(), blobs(data=Kept), root=tmp_path / "kept", max_rounds=1)
    assert torch.equal(make_trainer().predict(make_client(), ROWS, ckpt_path=kept.last)[0].outputs, expected)


# One client's model, as an ordinary module


def test_a_client_s_model_is_an_independent_copy():
    run = fit(make_client(FedPer), named())
    before = {name: tensor.clone() for name, tensor in run.federation.client.state_dict().items()}
    one, other = run.trainer.client("Ulm"), run.trainer.client(1)
    assert type(one) is FedPer and one.training and not equal(dict(one.state_dict()), dict(other.state_dict()))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert equal(dict(run.trainer.client(1).state_dict()), dict(other.state_dict()))
    assert before.keys() == run.federation.client.state_dict().keys()


def test_a_plain_trainer_tests_a_client_as_the_federation_does(tmp_path):
    data = named()
    run = fit(make_client(FedPer), data, root=tmp_path)
    tested = run.test()
    plain_trainer = lightning.Trainer(
        accelerator=ACCELERATOR, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    for client, name in enumerate(NAMES):
        part = data.part(client, "test")
        loader = DataLoader(TensorDataset(part.x, part.y), batch_size=4)
        loaded = FedPer.load_from_checkpoint(run.last, client=name, net=plain, optimizer=MOMENTUM)
        for model in (loaded, run.trainer.client(name)):
            (measured,) = plain_trainer.test(model, loader, verbose=False)
            assert measured["test/acc"] == tested[client]["acc"]
            assert measured["test/loss"] == pytest.approx(tested[client]["loss"])
            (validated,) = plain_trainer.validate(model, loader, verbose=False)
            assert validated["val/acc"] == measured["test/acc"]


def test_the_base_class_doesn_t_load_another_method_s_checkpoint(tmp_path):
    run = fit(make_client(FedPer), root=tmp_path, max_rounds=1)
    with pytest.raises(MisconfigurationException, match="FedPer"):
        ClientModule.load_from_checkpoint(run.last, client=1, net=plain)


@pytest.mark.parametrize("kind", ["pt2", "ts"])
def test_an_exported_client_gives_its_outputs(kind, tmp_path):
    model = fit(make_client(FedPer, net=noisy)).trainer.client(1)
    model.export(path := tmp_path / f"model.{kind}")
    read = torch.jit.load(path) if kind == "ts" else torch.export.load(path).module()
    assert model.training
    expected = model.eval().cpu()(ROWS)
    assert torch.allclose(read(ROWS), expected) and torch.allclose(read(ROWS[:1]), expected[:1], atol=1e-6)


def test_an_onnx_file_gives_the_outputs_for_raw_rows(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime beside the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    data = named(test_fraction=0.5)
    model = fit(make_client(FedPer, net=noisy), data).trainer.client("Ulm")
    model.export(path := tmp_path / "ulm.onnx")
    # the weights too are in it
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    session = runtime.InferenceSession(path)
    (given,) = session.get_inputs()
    for rows in (ROWS, ROWS[:1], ROWS.repeat(9, 1)):
        x = data.inputs(rows, "Ulm")
        (outputs,) = session.run(None, {given.name: x.numpy()})
        assert torch.allclose(torch.from_numpy(outputs), model.eval().cpu()(x), atol=1e-6)


def test_an_export_names_what_it_lacks(tmp_path, monkeypatch):
    model = make_client()
    with pytest.raises(MisconfigurationException, match=r"\.pt2, \.ts or \.onnx"):
        model.export(tmp_path / "model.h5")
    monkeypatch.setattr("pfl_lightning.client.module.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(MisconfigurationException, match=r"package onnxscript; pip install 'pfl-lightning\[onnx\]'"):
        model.export(tmp_path / "model.onnx")


def test_raw_rows_of_a_table_with_gaps_and_texts_give_the_test_figures(tmp_path):
    drawn = np.random.default_rng(0)
    age = drawn.normal(50, 10, 90)
    ill = np.where(age > 50, "ill", "well")
    pd = pytest.importorskip("pandas", reason="needs the extra tables")
    table = pd.DataFrame({"site": NAMES * 30, "age": age, "sex": drawn.choice(["f", "m"], 90), "ill": ill})
    table.loc[::7, "age"], table.loc[::11, "sex"] = None, None
    settings = {"target": "ill", "task": Classification(2), "client": "site"}
    for by in ("table", "client"):
        data = TableData(table, preprocessing=Preprocessing(by=by), **settings)
        data.setup()
        make = partial(FedPer, net=plain, num_classes=2, input_shape=data.input_shape)
        run = fit(make(), data, root=tmp_path / by)
        tested = run.test()
        rows = {name: table.iloc[data.division.clients[k]["test"].tolist()] for k, name in enumerate(NAMES)}
        for predicted in (
            run.trainer.predict(clients=rows),
            make_trainer().predict(make(), clients=rows, ckpt_path=run.last),
        ):
            for k, name in enumerate(NAMES):
                right = np.array(predicted[name].columns()["prediction"]) == rows[name]["ill"].to_numpy()
                assert right.mean() == pytest.approx(tested[k]["acc"])
                assert torch.equal(predicted[name].outputs, run.trainer.predict(clients=[name])[name].outputs)
