import inspect
import json
import os
import shutil
from functools import partial

import lightning
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from federations import Blobs, blobs, equal, fit, load, make_client, make_trainer, noisy
from pfl_lightning import FederatedTrainer
from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.engines import Sequential
from pfl_lightning.methods import FedBABU, FedPer
from pfl_lightning.runs.folder import checkpoint_of_run, stamp
from pfl_lightning.runs.run_status import STAMP
from pfl_lightning.trainer import MEANINGLESS

# Refusals


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 5},
        {"min_epochs": 1},
        {"max_steps": 5},
        {"min_steps": 1},
        {"overfit_batches": 1},
        {"val_check_interval": 3},
        {"use_distributed_sampler": False},
        {"sync_batchnorm": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_arguments_without_a_meaning_are_refused_with_advice(settings):
    (name,) = settings
    with pytest.raises(MisconfigurationException, match=f"trainer.{name}={settings[name]} means nothing"):
        make_trainer(**settings)
    assert name in MEANINGLESS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("limit_val_batches", value) for value in (1, 2, 0.5)],
        *[("limit_test_batches", value) for value in (0, 1, 2, 0.5)],
        *[("limit_predict_batches", value) for value in (0, 1, 2, 0.5)],
        ("fast_dev_run", 3),
    ],
)
def test_some_clients_are_not_evaluated_for_all(name, value):
    with pytest.raises(MisconfigurationException, match=rf"^trainer\.{name}={value} .*(give|leave it out)"):
        make_trainer(**{name: value})


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches", "limit_predict_batches"])
def test_all_clients_may_be_asked_for(name):
    make_trainer(**{name: 1.0})


@pytest.mark.parametrize("name", sorted(set(MEANINGLESS) - {"max_epochs"}))
def test_lightning_s_own_defaults_of_them_are_accepted(name):
    make_trainer(**{name: inspect.signature(lightning.Trainer).parameters[name].default})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_rounds": 0}, "max_rounds=0"),
        ({"clients_per_round": 0}, "clients_per_round=0"),
        ({"clients_per_round": 0.0}, r"clients_per_round=0\.0"),
        ({"clients_per_round": 1.5}, r"clients_per_round=1\.5"),
        ({"clients_per_round": -1}, "clients_per_round=-1"),
        ({"local_epochs": 0}, "local_epochs=0"),
        ({"local_steps": -1}, "local_steps=-1"),
        ({"local_steps": 1, "local_epochs": 1}, "exclude each other"),
        ({"engine": "steam"}, "engine='steam'"),
        ({"max_rounds": float("nan")}, "max_rounds=nan must be at least 1"),
        ({"max_rounds": 2.5}, "max_rounds=2.5 must be at least 1"),
        ({"max_rounds": None}, "max_rounds=None must be at least 1"),
        ({"clients_per_round": float("nan")}, "clients_per_round=nan must be a number of clients"),
        ({"clients_per_round": None}, "clients_per_round=None must be a number of clients"),
        ({"local_epochs": -1.5}, "local_epochs=-1.5 must be a number above 0"),
        ({"workers": float("nan")}, "workers=nan must be at least 1"),
        ({"gradient_clip_val": -1}, "gradient_clip_val=-1 must be a number above 0"),
        ({"gradient_clip_val": float("nan")}, "gradient_clip_val=nan must be a number above 0"),
        ({"gradient_clip_val": float("inf")}, "gradient_clip_val=inf must be a number above 0"),
        ({"gradient_clip_algorithm": "nrm"}, "gradient_clip_algorithm='nrm' must be one of norm, value"),
        ({"evaluate": "befor"}, "evaluate='befor' must be one of before, after, both"),
        ({"devices": -1}, "devices=-1 must be a number of processes from 1 up"),
        ({"devices": [0]}, r"devices=\[0\] must be a number of processes from 1 up"),
        ({"accelerator": "tpu"}, "accelerator=tpu is not on this machine"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch=0 must be at least 1 round"),
        ({"barebones": True}, "barebones=True means nothing in a federation: it forbids the record"),
    ],
)
def test_values_out_of_range_are_refused_by_name(settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        make_trainer(**settings)


def test_a_bound_of_0_clips_nothing_as_in_lightning():
    assert equal(fit(make_client(), gradient_clip_val=0).weights, fit(make_client()).weights)


def test_more_clients_a_round_than_there_are_is_refused():
    with pytest.raises(MisconfigurationException, match="clients_per_round=9 is more than"):
        fit(make_client(), clients_per_round=9)


def test_batches_of_one_under_batchnorm_are_refused():
    with pytest.raises(MisconfigurationException, match="batch_size=1 gives BatchNorm nothing"):
        fit(make_client(net=noisy), blobs(batch_size=1))


def test_other_modules_data_and_loaders_are_refused():
    with pytest.raises(MisconfigurationException, match="BoringModel overrides train_dataloader"):
        make_trainer().fit(BoringModel(), datamodule=blobs())
    with pytest.raises(MisconfigurationException, match="LightningDataModule is not a FederatedDataModule"):
        make_trainer().fit(make_client(), datamodule=lightning.LightningDataModule())
    with pytest.raises(MisconfigurationException, match="is not a FederatedDataModule"):
        make_trainer().fit(make_client())
    with pytest.raises(MisconfigurationException, match="data loaders hold no clients"):
        make_trainer().fit(make_client(), DataLoader([1]))
    with pytest.raises(MisconfigurationException, match=r"^aggregator is no setting of the Trainer; .* fit\("):
        make_trainer(aggregator=WeightedAverage())
    client = make_client()
    client.aggregator = WeightedAverage()
    with pytest.raises(MisconfigurationException, match=r"^model\.aggregator=WeightedAverage has no effect"):
        make_trainer().fit(client, datamodule=blobs())
    with pytest.raises(MisconfigurationException, match=r"^model=FedPer is a class; give an instance"):
        make_trainer().fit(FedPer, datamodule=blobs())
    with pytest.raises(MisconfigurationException, match=r"^datamodule=Blobs is a class; give an instance"):
        make_trainer().fit(make_client(), datamodule=Blobs)


def test_a_checkpoint_that_is_not_there_is_refused_for_evaluation(tmp_path):
    with pytest.raises(MisconfigurationException, match="has such a checkpoint"):
        make_trainer(tmp_path).test(make_client(), datamodule=blobs(), ckpt_path="best")


# What it does


def test_it_is_a_lightning_trainer_over_lightning_s_own_loop():
    trainer = make_trainer(max_rounds=7)
    assert isinstance(trainer, lightning.Trainer) and trainer.max_epochs == 7
    assert type(trainer.fit_loop) is type(lightning.Trainer(logger=False, enable_checkpointing=False).fit_loop)
    assert trainer.global_step == 0


def test_rounds_are_epochs_and_steps():
    run = fit(make_client(), max_rounds=4)
    assert run.trainer.current_epoch == run.trainer.global_step == run.federation.round == 4


@pytest.mark.parametrize(("per_round", "expected"), [(1.0, 4), (0.5, 2), (3, 3), (0.01, 1), (1, 1)])
def test_fractions_and_numbers_of_clients(per_round, expected):
    run = fit(make_client(), clients_per_round=per_round, max_rounds=1)
    assert run.rows[0]["clients"] == expected == len(run.rows[0]["cohort"].split())


def test_an_engine_can_be_given_by_name_or_class():
    class Mine(Sequential):
        pass

    by_name, by_class = fit(make_client(), engine="sequential"), fit(make_client(), engine=Mine)
    assert isinstance(by_class.federation.engines[0], Mine)
    assert equal(by_name.weights, by_class.weights)


def test_the_best_checkpoint_is_evaluated_where_asked(tmp_path):
    run = fit(make_client(FedPer), root=tmp_path, max_rounds=6, evaluate="before")
    best = max(run.rows, key=lambda row: row["val/acc"])
    assert best["round"] < 6
    trainer = make_trainer(tmp_path)
    (values,) = trainer.validate(make_client(FedPer), datamodule=blobs(), ckpt_path="best", verbose=False)
    assert values["val/acc"] == pytest.approx(best["val/acc"])
    (values,) = trainer.test(make_client(FedPer), datamodule=blobs(), ckpt_path="last", verbose=False)
    assert values["test/acc"] == pytest.approx(run.logger.summary["final"]["test/acc"])


def test_training_before_the_evaluation_of_a_checkpoint_goes_on_at_its_learning_rate(tmp_path):
    def model():
        return make_client(FedBABU, lr_scheduler=partial(ExponentialLR, gamma=0.5))

    run = fit(model(), root=tmp_path)
    trainer = make_trainer(tmp_path)
    trainer.test(model(), datamodule=blobs(), ckpt_path="last", verbose=False)
    assert equal(trainer.lightning_module.evaluations.results["test"], run.federation.evaluations.results["test"])


def test_fast_dev_run_runs_one_round_and_leaves_nothing(tmp_path):
    run = fit(make_client(), root=tmp_path, fast_dev_run=True)
    assert len(run.trainer.predict()) == run.federation.data.num_clients
    assert run.federation.round == 1
    assert set(run.federation.evaluations.results["val"]) == {0, 1, 2, 3}
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("*.csv"))


def test_without_a_logger_and_checkpoints_nothing_is_written(tmp_path, capsys):
    run = fit(make_client(), root=tmp_path, logger=False, enable_checkpointing=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(run.rows) == 3 and run.logger.summary["final"]["round"] == 3
    assert capsys.readouterr().out == ""


def test_a_fit_ends_with_the_files_of_a_run(tmp_path):
    run = fit(make_client(), root=tmp_path)
    names = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    assert names >= {"rounds.csv", "clients.csv", "summary.json", "metrics.csv"}
    assert {name for name in names if name.endswith("ckpt")} == {"checkpoints/best.ckpt", "checkpoints/last.ckpt"}


class Looking(Callback):
    """What Lightning shows of each round's loss."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append([float(shown["train/loss"]) for shown in self.shown(trainer)])

    @staticmethod
    def shown(trainer):
        return trainer.callback_metrics, trainer.progress_bar_metrics


@pytest.mark.parametrize("validates", [True, False])
def test_each_round_s_loss_is_where_callbacks_and_bars_look(validates):
    looking = Looking()
    run = fit(make_client(), callbacks=[looking], limit_val_batches=float(validates))
    assert looking.seen == [[pytest.approx(row["train/loss"])] * 2 for row in run.rows]
    assert len({seen for seen, _ in looking.seen}) == 3


def test_a_run_can_stop_by_the_loss_of_its_training():
    stopping = EarlyStopping("train/loss", stopping_threshold=1e9, check_on_train_epoch_end=True)
    assert len(fit(make_client(), callbacks=[stopping]).rows) == 1


@pytest.mark.parametrize("every_round", [False, True])
def test_the_test_of_the_last_round_is_where_lightning_s_users_look(every_round, tmp_path):
    run = fit(make_client(), root=tmp_path, test_every_round=every_round)
    final = json.loads((run.folder / "summary.json").read_text())["final"]
    assert run.trainer.callback_metrics["test/acc"] == pytest.approx(final["test/acc"])
    assert run.trainer.callback_metrics["val/acc"] == pytest.approx(run.rows[-1]["val/acc"])


# Precision


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-mixed", torch.float32),
        ("64-true", torch.float64),
        ("bf16-true", torch.bfloat16),
    ],
)
def test_precisions(precision, dtype, tmp_path):
    run = fit(make_client(FedPer, net=noisy), root=tmp_path, precision=precision)
    floating = {
        tensor.dtype for tensor in run.federation.aggregator.global_model().values() if tensor.is_floating_point()
    }
    assert floating == {dtype}
    assert {t.dtype for t in load(run.last)["federation"]["clients"][0]["personal"].values()} == {dtype}
    assert all(0 <= row["val/acc"] <= 1 and row["val/loss"] < 10 for row in run.rows)


def test_forward_passes_run_under_mixed_precision_and_nothing_else_does():
    seen = set()

    class Watch(FedPer):
        def loss(self, features, logits, target):
            seen.add(("loss", logits.dtype))
            return super().loss(features, logits, target)

        def upload(self, data):
            seen.add(("upload", self.net(data.train.x).dtype))
            return super().upload(data)

    run = fit(make_client(Watch), precision="bf16-mixed")
    assert seen == {("loss", torch.bfloat16), ("upload", torch.float32)}
    assert not equal(run.weights, fit(make_client(FedPer)).weights)


def test_16_mixed_on_a_cpu_falls_back_as_lightning_does():
    with pytest.warns(UserWarning, match="bf16-mixed"):
        run = fit(make_client(), precision="16-mixed")
    assert run.trainer.precision == "bf16-mixed"


def test_deterministic_runs_are_the_same_runs():
    try:
        deterministic = fit(make_client(net=noisy), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal(deterministic.weights, fit(make_client(net=noisy)).weights)
    assert isinstance(deterministic.trainer, FederatedTrainer)


def test_an_evaluation_takes_the_newest_run_with_such_a_checkpoint_and_a_resumed_fit_the_newest_run(tmp_path):
    for number, mark in enumerate(("checkpoints/best.ckpt", "rounds.csv", "hparams.yaml")):
        file = tmp_path / f"version_{number}" / mark
        file.parent.mkdir(parents=True)
        file.touch()
        stamp(tmp_path / f"version_{number}")
    (tmp_path / "version_0" / "rounds.csv").touch()
    assert checkpoint_of_run(tmp_path, "best", begun=False) == tmp_path / "version_0" / "checkpoints" / "best.ckpt"
    assert checkpoint_of_run(tmp_path, "best", begun=True) == tmp_path / "version_1" / "checkpoints" / "best.ckpt"
    assert checkpoint_of_run(tmp_path / "none", "best", begun=True) is None


def marked(root, *names):
    """Folders of runs, of which each wrote after the one before it."""
    for name in names:
        (root / name / "checkpoints").mkdir(parents=True)
        for mark in ("rounds.csv", "checkpoints/last.ckpt"):
            (root / name / mark).touch()
        stamp(root / name)


@pytest.mark.parametrize("begun", [True, False])
def test_the_newest_run_is_told_by_its_own_record(begun, tmp_path):
    def newest():
        return checkpoint_of_run(tmp_path, "last", begun=begun).parents[1].name

    marked(tmp_path, "version_1", "version_0")
    assert newest() == "version_0"
    # neither a look into the other's folder nor a copy makes another one newer
    (tmp_path / "version_1" / "notes.txt").touch()
    os.utime(tmp_path / "version_1", (2e9, 2e9))
    for copy in ("a_copy", "version_7"):
        shutil.copytree(tmp_path / "version_0", tmp_path / copy)
    assert newest() == "version_0"
    # of copies alone nobody can tell
    shutil.rmtree(tmp_path / "version_0")
    with pytest.raises(MisconfigurationException, match=r"a_copy/?.* or of .*version_7, .*same time"):
        newest()
    # one of them that goes on is the newest, and so is one that was renamed
    stamp(tmp_path / "a_copy")
    assert newest() == "a_copy"
    os.rename(tmp_path / "a_copy", tmp_path / "other")
    assert newest() == "other"


def test_runs_without_a_stamp_are_older_and_alone_not_told_apart(tmp_path):
    marked(tmp_path, "version_0", "version_1", "version_2")
    for name in ("version_1", "version_2"):
        (tmp_path / name / STAMP).unlink()
    assert checkpoint_of_run(tmp_path, "last", begun=True).parents[1].name == "version_0"
    (tmp_path / "version_0" / STAMP).unlink()
    with pytest.raises(MisconfigurationException, match=rf"version_1.* no {STAMP}"):
        checkpoint_of_run(tmp_path, "last", begun=True)


def test_last_goes_on_with_the_run_that_wrote_last(tmp_path):
    older, newer = (fit(make_client(), root=tmp_path, max_rounds=1).folder for _ in range(2))
    os.utime(older, (2e9, 2e9))
    assert fit(make_client(), root=tmp_path, max_rounds=2, ckpt_path="last").folder == newer
    assert fit(make_client(), root=tmp_path, max_rounds=2, ckpt_path=older / "checkpoints/last.ckpt").folder == older
    os.utime(newer, (2e9, 2e9))
    assert fit(make_client(), root=tmp_path, max_rounds=3, ckpt_path="last").folder == older


def test_data_may_stand_in_the_place_of_loaders(tmp_path):
    data, model = blobs(), make_client()
    trainer = make_trainer(tmp_path, max_rounds=1)
    trainer.fit(model, data)
    assert trainer.datamodule is data and trainer.lightning_module.round == 1
    for act in (trainer.test, trainer.validate):
        assert act(model, data, verbose=False) == act(model, datamodule=data, verbose=False)
    for wrong in ({"val_dataloaders": data}, {"train_dataloaders": data, "datamodule": data}):
        with pytest.raises(MisconfigurationException, match="data loaders hold no clients"):
            trainer.fit(model, **wrong)


def test_without_a_model_the_federation_is_tested_as_it_stands(tmp_path):
    # validated after the second round alone, so that best.ckpt isn't the last round
    trainer = make_trainer(tmp_path, max_rounds=3, check_val_every_n_epoch=2)
    with pytest.raises(MisconfigurationException, match="model=None"):
        trainer.test(datamodule=blobs())
    model = make_client()
    trainer.fit(model, blobs(val_fraction=0.2))
    before = {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()}
    assert trainer.test(verbose=False) == trainer.test(model, verbose=False)
    assert equal(trainer.lightning_module.state_dict(), before) and trainer.lightning_module.round == 3
    trainer.test(ckpt_path="best", verbose=False)
    assert trainer.lightning_module.round == 2
