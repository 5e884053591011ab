"""Parts of Lightning that work on a federation as they come."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from federations import fit, load, make_client, plain, read_csv
from pfl_lightning.cli.main import main
from pfl_lightning.data import IID, Digits
from pfl_lightning.methods import FedAvg, FedPer, FedProx

# Checkpoints and stopping


@pytest.mark.exhaustive
def test_model_checkpoint_keeps_the_best_rounds(tmp_path):
    keep = ModelCheckpoint(tmp_path / "kept", "{round}-{epoch}", monitor="val/loss", save_top_k=2, save_last=True)
    run = fit(make_client(), root=tmp_path, max_rounds=5, callbacks=[keep])
    best = sorted(run.rows, key=lambda row: row["val/loss"])[:2]
    kept = {load(path)["federation"]["round"] for path in keep.best_k_models}
    assert kept == {row["round"] for row in best}
    assert len(list((tmp_path / "kept").glob("*.ckpt"))) == 3
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


@pytest.mark.parametrize("period", [{"every_n_train_steps": 2}, {"every_n_epochs": 2}])
@pytest.mark.by_default("period0")
def test_model_checkpoint_counts_rounds_as_steps_and_as_epochs(period, tmp_path):
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **period)
    fit(make_client(), root=tmp_path, max_rounds=5, callbacks=[keep])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


def test_early_stopping_stops():
    stop = EarlyStopping("val/loss", patience=2, min_delta=100.0)
    run = fit(make_client(), max_rounds=20, callbacks=[stop])
    assert len(run.rows) == run.federation.round == 3 == stop.stopped_epoch + 1


def test_a_callback_can_stop_a_run_and_it_ends_in_order(tmp_path):
    class Stop(Callback):
        def on_train_epoch_end(self, trainer, federation):
            trainer.should_stop = trainer.current_epoch == 1

    run = fit(make_client(), root=tmp_path, max_rounds=9, callbacks=[Stop()])
    assert len(run.rows) == 2 and (run.folder / "summary.json").exists()
    assert load(run.last)["federation"]["round"] == 2


def test_a_timer_ends_a_run():
    run = fit(make_client(), max_rounds=100_000, callbacks=[Timer({"milliseconds": 300}, interval="epoch")])
    assert 1 <= len(run.rows) < 100_000


# Bars and summaries


def test_tqdm_shows_the_round_and_the_clients_done(capsys):
    settings = {"enable_progress_bar": True, "callbacks": [TQDMProgressBar()]}
    fit(make_client(), max_rounds=2, clients_per_round=3, **settings)
    printed = "".join(capsys.readouterr())
    for round in (1, 2):
        for done in range(4):
            assert f"Round {round}/2, clients {done}/3" in printed
    assert "val/acc" in printed and "train/loss" in printed


def test_rich_shows_the_round_and_the_clients_done():
    shown = []

    class Watch(Callback):
        def on_aggregate_start(self, trainer, federation, updates):
            shown.extend(task.description for task in trainer.progress_bar_callback.progress.tasks)

    fit(make_client(), max_rounds=2, enable_progress_bar=True, callbacks=[RichProgressBar(), Watch()])
    assert any("Round 1/2, clients 4/4" in text for text in shown)
    assert any("Round 2/2, clients 4/4" in text for text in shown)


def test_the_model_summary_shows_the_client_module(caplog):
    with caplog.at_level("INFO"):
        fit(make_client(), callbacks=[ModelSummary(max_depth=4)], enable_model_summary=True, max_rounds=1)
    assert "client.net.features" in caplog.text


# Loggers


def test_the_learning_rate_monitor_counts_rounds(tmp_path):
    model = make_client(lr_scheduler=partial(ExponentialLR, gamma=0.5))
    run = fit(model, root=tmp_path, callbacks=[LearningRateMonitor(logging_interval="epoch")])
    logged = [float(row["lr-SGD"]) for row in read_csv(run.folder / "metrics.csv") if row["lr-SGD"]]
    assert logged == pytest.approx([0.1, 0.05, 0.025])
    assert [row["lr"] for row in run.rows] == pytest.approx(logged)


def test_csv_logger(tmp_path):
    run = fit(make_client(), root=tmp_path, logger=CSVLogger(tmp_path, "mine"))
    assert run.folder == tmp_path / "mine" / "version_0"
    assert {"rounds.csv", "metrics.csv", "checkpoints"} <= {path.name for path in run.folder.iterdir()}


def test_tensorboard_logger(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    run = fit(make_client(FedPer), root=tmp_path, logger=TensorBoardLogger(tmp_path, "board"))
    events = event_accumulator.EventAccumulator(str(run.folder))
    events.Reload()
    points = events.Scalars("val/acc")
    assert [point.step for point in points] == [1, 2, 3]
    assert [point.value for point in points] == pytest.approx([row["val/acc"] for row in run.rows])
    assert "bytes/up" in events.Tags()["scalars"]
    assert (run.folder / "rounds.csv").exists()


@pytest.mark.exhaustive
def test_mlflow_logger(tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'pfl-lightning[mlflow]' for mlflow")
    from lightning.pytorch.loggers import MLFlowLogger

    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    runs = []
    for rounds in (2, 3):
        logger = MLFlowLogger("federation", tracking_uri=address, artifact_location=str(tmp_path / "artifacts"))
        model = make_client(partial(FedProx, mu=0.5))
        runs.append(fit(model, root=tmp_path, logger=logger, max_rounds=rounds, ckpt_path="last"))
        points = logger.experiment.get_metric_history(logger.run_id, "val/acc")
        # a resumed run is a new one there, and whole
        assert [point.step for point in points] == list(range(1, rounds + 1))
        assert [point.value for point in points] == pytest.approx([row["val/acc"] for row in runs[-1].rows])
        settings = logger.experiment.get_run(logger.run_id).data.params
        assert settings["mu"] == "0.5" and settings["method"] == "FedProx" and settings["max_rounds"] == str(rounds)
    assert runs[0].folder != runs[1].folder and (runs[1].folder / "summary.json").exists()


# Checkpoints of the command line, as models


CONFIG = [
    "fit",
    "--model=FedProx",
    "--model.mu=0.25",
    "--model.net=MLP",
    "--model.net.hidden=[12]",
    "--model.optimizer=Adam",
    "--model.optimizer.lr=0.002",
    "--data=Digits",
    "--data.num_clients=5",
    "--data.max_samples=300",
    "--data.partitioner=IID",
    "--trainer.max_rounds=2",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


@pytest.fixture(scope="module")
def command_line_run(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    main([*CONFIG, f"--trainer.default_root_dir={root}"])
    (folder,) = root.glob("*/version_0")
    return folder


def test_a_checkpoint_of_the_command_line_rebuilds_its_client_module(command_line_run):
    path = command_line_run / "checkpoints" / "last.ckpt"
    model = FedProx.load_from_checkpoint(path, weights_only=True)
    assert model.mu == 0.25
    assert [layer.out_features for layer in model.net.modules() if hasattr(layer, "out_features")] == [12, 10]
    optimizer = model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam) and optimizer.param_groups[0]["lr"] == 0.002
    weights = load(path)["state_dict"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.exhaustive
def test_it_predicts_under_a_plain_trainer_as_well_as_it_was_tested(command_line_run, tmp_path):
    data = Digits(num_clients=5, max_samples=300, partitioner=IID())
    data.setup()
    trainer = Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)
    for row in read_csv(command_line_run / "clients.csv"):
        part = data.part(int(row["client"]), "test")
        path = command_line_run / "checkpoints" / "last.ckpt"
        model = FedProx.load_from_checkpoint(path, client=int(row["client"]), weights_only=True)
        logits = torch.cat(trainer.predict(model, DataLoader(TensorDataset(part.x, part.y), batch_size=64)))
        assert float((logits.argmax(1) == part.y).float().mean()) == pytest.approx(float(row["test/acc"]))


def test_the_run_s_folder_keeps_its_configuration(command_line_run, tmp_path):
    main(["fit", f"--config={command_line_run / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path}"])
    (again,) = tmp_path.glob("*/version_0")
    first, second = (load(folder / "checkpoints" / "last.ckpt")["state_dict"] for folder in (command_line_run, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_hyper_parameters_reach_the_loggers_and_the_checkpoint(tmp_path):
    run = fit(make_client(partial(FedProx, mu=0.5)), root=tmp_path)
    saved = load(run.last)["hyper_parameters"]
    assert saved["mu"] == 0.5 and saved["num_classes"] == 3
    model = FedProx.load_from_checkpoint(run.last, net=plain)
    assert model.mu == 0.5 and isinstance(model, FedAvg)
    assert "mu: 0.5" in (run.folder / "hparams.yaml").read_text()
