"""Every callback of Lightning's: it does its work in a federation, or it is refused."""

from datetime import timedelta
from functools import partial

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter, Callback, EarlyStopping, LambdaCallback

from federations import fit, make_client, make_trainer, read_csv
from pfl_lightning.trainer import REFUSED_CALLBACKS, STEP_HOOKS


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        """Nothing."""

    def finetune_function(self, pl_module, epoch, optimizer):
        """Nothing."""


SETTINGS = {
    "BaseFinetuning": Finetuning,
    "GradientAccumulationScheduler": partial(callbacks.GradientAccumulationScheduler, scheduling={0: 2}),
    "ModelPruning": partial(callbacks.ModelPruning, "l1_unstructured"),
    "StochasticWeightAveraging": partial(callbacks.StochasticWeightAveraging, swa_lrs=0.1),
    "ThroughputMonitor": partial(callbacks.ThroughputMonitor, len),
}
"""What makes callbacks that need settings."""

BASES = {"Callback", "Checkpoint", "ProgressBar"}
"""Classes that do nothing by themselves."""


def stops_by_metric(root):
    # of which nothing is better
    stopping = EarlyStopping("val/acc", mode="max", patience=1, divergence_threshold=None, min_delta=10.0)
    assert len(fit(make_client(), root=root, callbacks=[stopping]).rows) == 2


def stops_by_time(root):
    timer = callbacks.Timer(duration=timedelta(microseconds=1))
    # what is over before it begins has one epoch in Lightning
    assert len(fit(make_client(), root=root, callbacks=[timer], max_rounds=50).rows) < 50


def logs(prefix, made, root):
    run = fit(make_client(), root=root, callbacks=[made()])
    rows = read_csv(run.folder / "metrics.csv")
    columns = [name for name in rows[0] if name.startswith(prefix)]
    assert columns and sum(row[columns[0]] != "" for row in rows) >= 3


def watches_the_device(root):
    pytest.importorskip("psutil", reason="DeviceStatsMonitor of a CPU needs psutil")
    logs("DeviceStatsMonitor", partial(callbacks.DeviceStatsMonitor, cpu_stats=True), root)


def saves(root):
    checkpoint = callbacks.ModelCheckpoint(filename="own-{epoch}", save_top_k=-1)
    run = fit(make_client(), root=root, callbacks=[checkpoint])
    assert len(list(run.last.parent.glob("own-*.ckpt"))) == 3


def saves_what_was_interrupted(root):
    def fails(trainer, federation):
        raise ZeroDivisionError

    saving = callbacks.OnExceptionCheckpoint(root, filename="interrupted")
    with pytest.raises(ZeroDivisionError):
        fit(make_client(), root=root, callbacks=[saving, LambdaCallback(on_train_epoch_end=fails)])
    assert (root / "interrupted.ckpt").exists()


def writes(root):
    seen = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer, federation, prediction, *_):
            seen.append(len(prediction))

    run = fit(make_client(), callbacks=[Writer("batch")], max_rounds=1)
    run.trainer.predict(run.model)
    assert seen == [run.data.size(client, "test") for client in range(4)]


def is_called(root):
    seen = []
    hooks = {"on_train_epoch_end": lambda *_: seen.append("round"), "on_validation_end": lambda *_: seen.append("val")}
    fit(make_client(), callbacks=[LambdaCallback(**hooks)], max_rounds=2)
    assert sorted(seen) == ["round", "round", "val", "val"]


def prints(made, settings, words, capsys, caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(make_client(), callbacks=[made()], max_rounds=1, **settings)
    captured = capsys.readouterr()
    assert words in captured.out + captured.err + caplog.text


SHOWN = {
    "ModelSummary": ({"enable_model_summary": True}, "client"),
    "RichModelSummary": ({"enable_model_summary": True}, "client"),
    "RichProgressBar": ({"enable_progress_bar": True}, "Round 1/1"),
    "TQDMProgressBar": ({"enable_progress_bar": True}, "Round 1/1"),
}
WORKING = {
    "BasePredictionWriter": writes,
    "DeviceStatsMonitor": watches_the_device,
    "EarlyStopping": stops_by_metric,
    "LambdaCallback": is_called,
    "LearningRateMonitor": partial(logs, "lr-", callbacks.LearningRateMonitor),
    "ModelCheckpoint": saves,
    "OnExceptionCheckpoint": saves_what_was_interrupted,
    "Timer": stops_by_time,
}


@pytest.mark.parametrize("name", callbacks.__all__)
def test_it_works_or_is_refused(name, tmp_path, capsys, caplog):
    kind = getattr(callbacks, name)
    if name in WORKING:
        WORKING[name](tmp_path)
    elif name in SHOWN:
        prints(kind, *SHOWN[name], capsys, caplog)
    elif name not in BASES:
        assert any(issubclass(kind, getattr(callbacks, refused, ())) for refused in REFUSED_CALLBACKS)
        made = SETTINGS.get(name, kind)()
        with pytest.raises(MisconfigurationException, match=rf"^trainer\.callbacks: {type(made).__name__} .+; "):
            make_trainer(callbacks=[made])


@pytest.mark.parametrize("hook", STEP_HOOKS.split())
@pytest.mark.parametrize("by_class", [True, False])
def test_a_hook_of_the_trainer_s_steps_is_refused(hook, by_class):
    def work(*_):
        """Nothing."""

    own = type("Own", (Callback,), {hook: work})() if by_class else LambdaCallback(**{hook: work})
    with pytest.raises(MisconfigurationException, match=rf"{type(own).__name__}\.{hook} would never be called"):
        make_trainer(callbacks=[own])


def test_stopping_by_a_metric_that_no_round_has_names_those_that_are_there():
    stopping = [EarlyStopping("val/acc"), EarlyStopping("nosuch")]
    with pytest.raises(MisconfigurationException, match=r"EarlyStopping: monitor=nosuch .* val/acc, .*val/loss"):
        fit(make_client(), max_rounds=2, callbacks=stopping)


@pytest.mark.parametrize(
    ("given", "words"), [(EarlyStopping, r"EarlyStopping is a class; give an instance"), (3, "3 is no callback")]
)
def test_all_but_callbacks_is_refused(given, words):
    with pytest.raises(MisconfigurationException, match=rf"^trainer\.callbacks: {words}"):
        make_trainer(callbacks=[given])
