"""Each task in the few lines that somebody writes at the first try, from the documents alone."""

from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.functional.classification import multiclass_confusion_matrix

from command import QUIET, pfl, refusal
from federations import make_trainer, read_csv
from pfl_lightning.data import ClientDatasets, Digits, FolderData, Preprocessing, TableData, VisionData
from pfl_lightning.methods import Ditto, FedAvg, FedPer, Local
from pfl_lightning.nets import CNN, MLP
from pfl_lightning.tasks import Classification, Regression

SITES = ("Bremen", "Erfurt", "Ulm")
TABLE = (
    "--data TableData --data.path patients.csv --data.target back --data.client site --model.net MLP "
    "--data.preprocessing.drop [admitted] --data.task Classification --data.task.num_classes 2 "
    "--data.task.metrics [acc,auroc] --data.task.class_weights balanced"
)
DROP = Preprocessing(drop=["admitted"])


def patients(sites=SITES, rows=40, seed=0):
    """A hospital's table: gaps, texts, dates, and a minority that comes back."""
    pd = pytest.importorskip("pandas", reason="needs the extra tables")
    drawn, n = np.random.default_rng(seed), rows * len(sites)
    age, smokes = drawn.normal(60, 15, n).round(), drawn.choice(["never", "once", "daily"], n).astype(object)
    back = age / 15 + 2 * (smokes == "daily") + drawn.normal(0, 0.5, n) > 5
    table = pd.DataFrame({"age": age, "smokes": smokes, "site": np.tile(sites, rows)})
    table["admitted"] = pd.date_range("2023-01-01", periods=n).astype(str)
    table["cost"] = age / 50 + drawn.normal(0, 0.1, n)
    table["back"] = np.where(back, "yes", "no")
    table.loc[drawn.choice(n, n // 10, replace=False), "age"] = np.nan
    table.loc[drawn.choice(n, n // 10, replace=False), "smokes"] = None
    return table


def hospitals(table=None, task=None, **settings):
    table = patients() if table is None else table
    return TableData(table.drop(columns="cost"), "back", task or Classification(2), client="site", **settings)


def fast(parameters):
    return SGD(parameters, lr=0.3)


def fitted(data, method=FedPer, root="unused", net=MLP, rounds=2, optimizer=fast):
    lightning.seed_everything(0, verbose=False)
    model = method(net, data.input_shape, task=data.task, optimizer=optimizer)
    trainer = make_trainer(root, max_rounds=rounds)
    trainer.fit(model, data)
    return trainer, model


def test_rows(data, table, name):
    """Raw test rows of a client, without site and target, and their targets."""
    rows = table.iloc[data.division.clients[data.client_id(name)]["test"].numpy()]
    assert set(rows["site"]) == {name} and len(rows) > 5
    return rows[["smokes", "age"]], rows["back"].tolist()


test_rows.__test__ = False


def share_right(predicted, targets):
    return float(np.mean([a == b for a, b in zip(predicted.columns()["prediction"], targets, strict=True)]))


# A table


def test_a_table_with_gaps_texts_and_names():
    table = patients()
    with pytest.raises(MisconfigurationException, match=r"'age' .* 12 of 120 rows.*data\.preprocessing=auto"):
        hospitals(table).setup()
    with pytest.raises(MisconfigurationException, match=r"'admitted'.*data\.preprocessing\.drop"):
        hospitals(table, preprocessing="auto").setup()
    data = hospitals(table, preprocessing=DROP)
    trainer, _ = fitted(data, rounds=4)
    assert data.client_names == list(SITES) and data.input_shape == (4,)
    assert trainer.callback_metrics["test/acc"] > 0.75


def test_predictions_for_raw_rows_give_the_federation_s_own_figures(tmp_path):
    table = patients(rows=60)
    data = hospitals(table, preprocessing=DROP)
    model, path = None, None
    for rounds in (1, 2):
        # the second begins with the checkpoint of the first
        trainer = make_trainer(tmp_path, max_rounds=rounds)
        model = FedPer(MLP, data.input_shape, task=data.task, optimizer=fast)
        trainer.fit(model, data, ckpt_path=path)
        path = f"{trainer.log_dir}/checkpoints/last.ckpt"
        own = {row["name"]: float(row["test/acc"]) for row in read_csv(Path(trainer.log_dir, "clients.csv"))}
        for site in SITES:
            rows, targets = test_rows(data, table, site)
            predicted = trainer.predict(None, rows, clients=site)[site]
            alone = make_trainer().predict(model, rows, ckpt_path=path, clients=site)[site]
            assert share_right(predicted, targets) == pytest.approx(own[site], abs=1e-7)
            assert torch.equal(predicted.outputs, alone.outputs)
    # of the same hospitals, with one that comes later
    later = patients(("Jena",), rows=60, seed=5)
    late = hospitals(later, preprocessing=DROP)
    joined = trainer.join(model, late)
    rows, targets = test_rows(late, later, "Jena")
    predicted = trainer.predict(None, rows, clients=["Jena", "Ulm"])
    # the model that the join trained
    assert share_right(predicted["Jena"], targets) == pytest.approx(joined["new/acc"], abs=1e-7)
    rows, _ = test_rows(data, table, "Ulm")
    before = make_trainer().predict(model, rows, ckpt_path=path, clients="Ulm")["Ulm"].outputs
    assert torch.equal(trainer.predict(None, rows, clients="Ulm")["Ulm"].outputs, before)


def test_class_weights_and_auroc_and_predictions_with_them(tmp_path):
    task = Classification(2, metrics=("auroc", "f1"), class_weights="balanced")
    data = hospitals(task=task, preprocessing=DROP)
    trainer, model = fitted(data, root=tmp_path, rounds=3)
    assert trainer.callback_metrics["test/auroc"] > 0.75 and "test/f1" in trainer.callback_metrics
    assert "task=Classification" in repr(trainer.client("Ulm"))
    # the weights are of training, so that a new client needs no samples
    path = f"{trainer.log_dir}/checkpoints/last.ckpt"
    rows = [{"age": 80, "smokes": "daily"}, {"age": 20, "smokes": None}]
    found = make_trainer().predict(model, rows, ckpt_path=path, clients=["new", "Bremen"])
    assert torch.equal(found["Bremen"].outputs, trainer.predict(model, rows, clients=["Bremen"])["Bremen"].outputs)
    assert found["new"].probabilities.sum(1).tolist() == pytest.approx([1, 1])


def test_four_methods_of_a_data_frame():
    data = hospitals(preprocessing=DROP)
    found = {method: fitted(data, method)[0].callback_metrics["test/acc"] for method in (Local, FedAvg, FedPer, Ditto)}
    assert all(0.5 < accuracy <= 1 for accuracy in found.values())


def test_a_regression_with_a_chronological_split():
    table = patients().drop(columns=["back", "smokes"]).dropna()
    settings = {"client": "site", "time": "admitted", "client_split": "time", "preprocessing": "auto"}
    data = TableData(table, "cost", Regression(), **settings)
    trainer, model = fitted(data, FedAvg, rounds=3, optimizer=lambda parameters: SGD(parameters, lr=0.03))
    splits = data.division.clients[0]
    days = [table.iloc[splits[name].numpy()]["admitted"] for name in ("train", "val", "test")]
    assert days[0].max() < days[1].min() and days[1].max() < days[2].min()
    assert trainer.callback_metrics["test/mae"] < table["cost"].std()
    (values,) = trainer.predict(model, table.head(3), clients="Ulm")["Ulm"].columns().values()
    assert len(values) == 3
    with pytest.raises(AttributeError, match=r"task=data\.task"):
        _ = data.num_classes
    dollars = table.assign(cost=table["cost"] * 1000)
    large = TableData(dollars, "cost", Regression(), **settings)
    trainer, _ = fitted(large, FedAvg, rounds=3, optimizer=lambda parameters: SGD(parameters, lr=0.03))
    assert trainer.callback_metrics["test/mae"] < dollars["cost"].std()
    with pytest.warns(UserWarning, match=r"'cost' are around 1\.2.*standardize_target"):
        TableData(dollars, "cost", Regression(), standardize_target=None, **settings).setup()


# Images and Datasets


def test_folders_of_photographs(tmp_path):
    image = pytest.importorskip("PIL.Image")
    drawn = np.random.default_rng(0)
    for site in SITES:
        for label in ("ill", "well"):
            (folder := tmp_path / site / label).mkdir(parents=True)
            for number in range(5):
                shape = (16 + 2 * (number == 3), 16, 3)
                image.fromarray(drawn.integers(0, 255, shape, dtype=np.uint8)).save(folder / f"{number}.jpg")
    with pytest.raises(MisconfigurationException, match=r"data\.size"):
        FolderData(tmp_path, Classification(2)).setup()
    trainer, _ = fitted(FolderData(tmp_path, Classification(2), size=16), net=CNN, rounds=1)
    assert trainer.datamodule.client_names == list(SITES) and trainer.datamodule.class_names == ["ill", "well"]


class Scans(Dataset):
    """Scans, by a transform."""

    def __init__(self, seed, count, transform=None):
        drawn = torch.Generator().manual_seed(seed)
        self.x, self.transform = torch.rand(count, 6, generator=drawn), transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        scan = self.x[index]
        return scan if self.transform is None else self.transform(scan), int(scan.sum() > 3)


def test_a_list_of_train_and_test_sets_with_transforms():
    pairs = [(Scans(k, 20, lambda x: x + 0.1 * torch.randn(6)), Scans(k, 8)) for k in range(12)]
    data = ClientDatasets(pairs, Classification(2))
    trainer, model = fitted(data, rounds=1)
    # the twelfth client is the twelfth pair
    assert torch.equal(data.part(11, "test").x, pairs[11][1].x) and data.client_names == list(map(str, range(12)))
    predicted = trainer.predict(model, clients=[2, 10])
    assert list(predicted) == [2, 10] and len(predicted[10]) == 8
    rows = trainer.predict(model, pairs[3][1], clients=["10"])["10"].outputs
    assert torch.equal(rows, trainer.predict(model, clients={10: pairs[3][1]})[10].outputs)
    assert str(data) == repr(data) and "ClientDatasets(" in str(data)
    parts = ClientDatasets(random_split(Scans(0, 60), [30, 30]), Classification(2))
    assert fitted(parts, FedAvg, rounds=1)[0].datamodule.num_clients == 2


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (lambda sets: FedAvg(MLP, (6,), 2) and make_trainer().fit(FedAvg(MLP, (6,), 2), sets), "ClientDatasets"),
        (lambda sets: ClientDatasets([DataLoader(each) for each in sets], Classification(2)), "dataset"),
        (lambda sets: VisionData(sets, Classification(2)), "ClientDatasets"),
        (lambda sets: VisionData([(each, each) for each in sets], Classification(2)), "ClientDatasets"),
        (lambda sets: TableData.from_datasets(sets), "ClientDatasets"),
    ],
    ids=["fit", "loaders", "VisionData", "VisionData of pairs", "from_datasets"],
)
def test_other_ways_to_give_datasets_name_the_one_that_works(wrong, advice):
    with pytest.raises(MisconfigurationException, match=advice):
        wrong([Scans(0, 8), Scans(1, 8)])


# Networks


class Plain(nn.Module):
    """Two layers, in no parts."""

    def __init__(self, input_shape=(1, 8, 8), num_classes=10):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, num_classes)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.flatten(1))))


def layers(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))


@pytest.fixture(scope="module")
def digits():
    data = Digits(num_clients=4, max_samples=200)
    data.setup()
    return data


@pytest.mark.parametrize(
    "net", [Plain, Plain(), layers, layers(None, 10)], ids=["class", "module", "function", "built"]
)
def test_a_network_of_one_s_own(net, digits):
    trainer, _ = fitted(digits, net=net, rounds=1)
    assert 0 <= trainer.callback_metrics["test/acc"] <= 1


@pytest.mark.exhaustive
def test_a_network_of_torchvision(digits):
    torchvision = pytest.importorskip("torchvision")

    def resnet(input_shape, num_classes):
        net = torchvision.models.resnet18(num_classes=num_classes)
        net.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
        return net

    assert 0 <= fitted(digits, net=resnet, rounds=1)[0].callback_metrics["test/acc"] <= 1
    # called with the shape, it would take it for weights, and fetch some
    with pytest.raises(MisconfigurationException, match=r"resnet18 .*input_shape"):
        FedPer(torchvision.models.resnet18, digits.input_shape, 10)


@pytest.mark.parametrize("net", [lambda: Plain(), lambda shape: Plain(shape)])
def test_builders_of_other_arguments_are_told_which_ones(net):
    with pytest.raises(MisconfigurationException, match="input_shape and num_classes"):
        FedAvg(net, (1, 8, 8), 10)


def test_a_net_without_the_data_s_shape_is_told_of_it():
    with pytest.raises(MisconfigurationException, match=r"input_shape=data\.input_shape"):
        FedAvg(layers(None, 10))


# One client


def test_one_client_s_model_under_a_plain_trainer(tmp_path):
    data = hospitals(preprocessing=DROP)
    trainer, model = fitted(data, root=tmp_path)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    tests = data.part(data.client_id("Bremen"), "test")
    loader = DataLoader(TensorDataset(tests.x, tests.y), batch_size=4)
    path = f"{trainer.log_dir}/checkpoints/last.ckpt"
    for bremen in (trainer.client("Bremen"), FedPer.load_from_checkpoint(path, client="Bremen", net=MLP)):
        plain = lightning.Trainer(max_epochs=1, enable_model_summary=False, **quiet)
        (tested,) = plain.test(bremen, loader, verbose=False)
        own = {row["name"]: float(row["test/acc"]) for row in read_csv(Path(f"{trainer.log_dir}/clients.csv"))}
        assert tested["test/acc"] == pytest.approx(own["Bremen"], abs=1e-6)
        outputs = torch.cat(plain.predict(bremen, loader))
        assert torch.allclose(outputs, trainer.predict(model, clients="Bremen")["Bremen"].outputs, atol=1e-6)
        before = bremen(tests.x).detach()
        plain.fit(bremen, loader)
        assert not torch.equal(bremen(tests.x), before)


def test_a_confusion_matrix_of_client_3(digits):
    trainer, model = fitted(digits, rounds=1)
    predicted, targets = trainer.predict(model, clients=[3])[3], digits.part(3, "test").y
    matrix = multiclass_confusion_matrix(predicted.classes, targets, 10)
    assert matrix.sum() == len(targets) and torch.equal(matrix.sum(1), targets.bincount(minlength=10))


def test_tensorboard_and_a_cosine_over_rounds(digits, tmp_path):
    pytest.importorskip("tensorboard")
    lightning.seed_everything(0, verbose=False)
    model = FedAvg(MLP, digits.input_shape, task=digits.task, lr_scheduler=lambda sgd: CosineAnnealingLR(sgd, 2))
    trainer = make_trainer(tmp_path, max_rounds=2, logger=TensorBoardLogger(tmp_path))
    trainer.fit(model, digits)
    assert list(tmp_path.rglob("events.out.*"))
    told = trainer.logger.hparams
    assert told["model.net"] == "MLP" and told["model.lr_scheduler.T_max"] == 2 and told["model.optimizer"] == "SGD"


# The command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder with three hospitals' table, and a run of it."""
    folder = tmp_path_factory.mktemp("stranger")
    table = patients()
    table.to_csv(folder / "patients.csv", index=False)
    table.drop(columns=["site", "back"]).head(5).to_csv(folder / "rows.csv", index=False)
    patients(("Jena",), rows=30, seed=5).to_csv(folder / "jena.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pfl(f"fit {TABLE} --model FedPer {QUIET} --trainer.max_rounds 2")
    return folder


def test_predict_join_and_compare_on_the_command_line(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    done = pytest.raises(SystemExit, match=r"^0$")
    with done:
        pfl("predict --ckpt_path best --client Bremen --data rows.csv --out predictions.csv")
    rows = read_csv(Path("predictions.csv"))
    assert [row["client"] for row in rows] == ["Bremen"] * 5
    assert all(float(row["p_no"]) + float(row["p_yes"]) == pytest.approx(1) for row in rows)
    words = refusal("predict --client Jena --data jena.csv", capsys)
    assert "'Jena'" in words and "'new'" in words
    with done:
        pfl("predict --client new --data jena.csv --out new.csv")
    assert len(read_csv(Path("new.csv"))) == 30
    # the checkpoint makes these models alone: nothing is told of reading the run's table
    assert "reading the data" not in capsys.readouterr().err
    pfl("join --data jena.csv")
    assert "Jena" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_methods_are_compared_by_site_with_mu_swept_where_there_is_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match=r"^0$"):
        pfl(f"compare --methods Local FedProx {TABLE} --tune model.mu=0.01,0.1 --seeds 0 --trainer.max_rounds 1")
    rows = read_csv(Path("runs/compare-TableData/by_client.csv"))
    assert {row["client"] for row in rows} == set(SITES) and {row["method"] for row in rows} == {"Local", "FedProx"}
    assert "Bremen" in Path("runs/compare-TableData/by_client.md").read_text()
    tuned = read_csv(Path("runs/compare-TableData/tuning.csv"))
    assert {row["method"] for row in tuned} == {"FedProx"} and len(tuned) == 2
