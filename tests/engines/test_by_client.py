"""Fractions of epochs, and epochs and learning rates by client, under all engines."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD, Adam

from command import QUIET, pfl, refusal
from federations import Blobs, Pause, blobs, equal, fit, make_client, make_trainer, near, noisy, points, same_end
from pfl_lightning import Results
from pfl_lightning.data import TensorData
from pfl_lightning.engines import Vectorised
from pfl_lightning.methods import ControlVariates, Ditto, FedAvg, FedNova, FedPer, FedRep, Local, PerFedAvg
from pfl_lightning.privacy import DPSGD
from pfl_lightning.schedules import Synchronous

EVEN = {"val_fraction": 0.0, "test_fraction": 0.0}
SIZES = (24, 11, 3)
"""With batches of five: 5, 3 and 1 batches an epoch, with 4, 1 and 3 samples in the last."""
COUNTS = [
    # half of 5, 3 and 1 steps: 2, 1 and at least 1
    (FedAvg, {}, {"local_epochs": 0.5}, 4, 10 + 5 + 3),
    # 1.5 times: 7, 4 and 1; an epoch and two, one and no more batches
    (FedAvg, {}, {"local_epochs": 1.5}, 12, 24 + 10 + 11 + 5 + 3),
    (FedAvg, {}, {"local_epochs": 2.0}, 18, 76),
    # steps of two batches are 3, 2 and 1 an epoch, and half of these 1 each
    (FedAvg, {}, {"local_epochs": 0.5, "accumulate_grad_batches": 2}, 3, 10 + 10 + 3),
    # half of two, two and one batches
    (FedAvg, {}, {"local_epochs": 0.5, "limit_train_batches": 2}, 3, 5 + 5 + 3),
    # BatchNorm leaves out the batch of one sample: half of 5, 2 and 1
    (FedAvg, {"net": noisy}, {"local_epochs": 0.5}, 4, 10 + 5 + 3),
    (FedAvg, {}, {"local_epochs": [2, 0.5, 3]}, 10 + 1 + 3, 48 + 5 + 9),
    (FedAvg, {}, {"local_epochs": {"1": 2}}, 5 + 6 + 1, 24 + 22 + 3),
    # the head's phase has two epochs of its own
    (FedRep, {"head_epochs": 2}, {"local_epochs": [0.5, 1, 2]}, 2 * 9 + 2 + 3 + 2, 2 * 38 + 10 + 11 + 6),
    # both models by the same amounts
    (Ditto, {}, {"local_epochs": [0.5, 1, 2]}, 2 * (2 + 3 + 2), 2 * (10 + 11 + 6)),
]


@pytest.mark.parametrize(("method", "made", "settings", "steps", "samples"), COUNTS)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_steps_and_samples_are_those_by_hand(engine, method, made, settings, steps, samples):
    run = fit(make_client(method, **made), blobs(*SIZES, **EVEN), engine=engine, max_rounds=2, **settings)
    assert [(row["local/steps"], row["local/samples"]) for row in run.rows] == [(steps, samples)] * 2


SETTINGS = [
    {"local_epochs": 0.5},
    {"local_epochs": 1.5, "accumulate_grad_batches": 2},
    {"local_epochs": [2, 0.5, 1, 3]},
    {"lr_factors": [2.0, 0.5, 1.0, 0.5]},
    {"local_epochs": {"2": 0.4}, "lr_factors": {"0": 0.1, "2": 3}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("method", [FedPer, Ditto, ControlVariates])
@pytest.mark.by_default("FedPer", "Ditto-{'local_epochs': [2")
def test_engines_agree(method, settings):
    fitted = partial(fit, max_rounds=3, **settings)
    make = partial(make_client, method, net=noisy, optimizer_lifetime="run")
    if method is ControlVariates:
        # plain steps, without momentum
        make = partial(make_client, method, optimizer=partial(SGD, lr=0.1))
    one = fitted(make())
    assert same_end(one, fitted(make(), engine="processes", workers=2))
    many = fitted(make(), engine="vectorised")
    states = (run.federation.federation_state()["clients"] for run in (one, many))
    # BatchNorm's small batches enlarge differences by rounding
    assert near(one.weights, many.weights, 1e-4) and near(*states, atol=1e-4)
    counts = ["local/steps", "local/samples", "bytes/up", "bytes/down"]
    alone, together = ([[row[name] for name in counts] for row in run.rows] for run in (one, many))
    assert alone == together


def test_blocks_are_of_clients_that_train_alike():
    sizes = []

    class Noted(Vectorised):
        def _run_block(self, jobs):
            sizes.append([job.client for job in jobs])
            return super()._run_block(jobs)

    fit(make_client(), engine=Noted, max_rounds=1, local_epochs=[2, 1, 2, 1])
    assert sizes == [[0, 2], [1, 3]]
    sizes.clear()
    fit(make_client(), engine=Noted, max_rounds=1, local_epochs=0.5)
    assert sizes == [[0, 1, 2, 3]]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_resumed_run_has_the_same_bits(settings, tmp_path):
    make = partial(make_client, FedPer, net=noisy, optimizer_lifetime="run", optimizer=partial(Adam, lr=0.01))
    whole = fit(make(), **settings)
    fit(make(), root=tmp_path, callbacks=[Pause(2)], **settings)
    assert same_end(whole, fit(make(), root=tmp_path, ckpt_path="last", **settings))


@pytest.mark.parametrize(
    ("name", "then", "now"), [("local_epochs", 0.5, {"1": 0.5}), ("lr_factors", [1, 2, 1, 1], None)]
)
def test_other_amounts_are_another_run(name, then, now, tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=1, **{name: then})
    with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}"):
        fit(make_client(), root=tmp_path, ckpt_path=run.last, max_rounds=2, **{name: now})


@pytest.mark.parametrize("name", ["local_epochs", "lr_factors"])
def test_the_same_amounts_in_other_words_are_the_same_run(name, tmp_path):
    ways = [{"0": 2, "2": 0.5}, {"2": 0.5, "0": 2.0}, [2, 1, 0.5, 1], {"0": 2, "1": 1, "2": 0.5}]
    for rounds, way in enumerate(ways, 1):
        # refused if the settings differ from those of the round before
        last = "last" if rounds > 1 else None
        run = fit(make_client(), root=tmp_path, ckpt_path=last, max_rounds=rounds, **{name: way})
    assert len(run.rows) == len(ways)
    with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}"):
        fit(make_client(), root=tmp_path, ckpt_path="last", max_rounds=9, **{name: {"0": 0.5, "2": 2}})


@pytest.mark.parametrize(
    ("name", "then", "now"), [("local_epochs", 2, dict.fromkeys("0123", 2)), ("lr_factors", None, {"1": 1.0})]
)
def test_one_amount_for_all_is_that_amount(name, then, now, tmp_path):
    fit(make_client(), root=tmp_path, max_rounds=1, **{name: then})
    assert len(fit(make_client(), root=tmp_path, ckpt_path="last", max_rounds=2, **{name: now}).rows) == 2


def test_a_factor_is_a_learning_rate_of_its_own():
    """A client trains as in a run where all have its rate, and evaluations adapt by it too."""
    for method, settings in ((Local, {}), (PerFedAvg, {})):
        make = partial(make_client, method, **settings)
        half = fit(make(optimizer=partial(SGD, lr=0.05)), max_rounds=1)
        mixed = fit(make(optimizer=partial(SGD, lr=0.1)), max_rounds=1, lr_factors={"1": 0.5})
        whole = fit(make(optimizer=partial(SGD, lr=0.1)), max_rounds=1)
        if method is Local:
            own, of_all = (run.federation.clients for run in (mixed, half))
            assert equal(own[1].personal, of_all[1].personal)
            assert equal(own[0].personal, whole.federation.clients[0].personal)
        else:
            assert not equal(mixed.weights, whole.weights)


def test_a_rate_of_one_and_epochs_of_one_change_no_bit():
    plain = fit(make_client(FedNova))
    for settings in ({"local_epochs": [1, 1, 1, 1]}, {"lr_factors": {"3": 1.0}}, {"local_epochs": 1.0}):
        other = fit(make_client(FedNova), **settings)
        assert equal(plain.weights, other.weights)


def test_names_of_clients_are_known_and_strangers_refused():
    x, y = points(60, seed=0)

    def data():
        return TensorData(x, y, Blobs().task, client=["Ulm", "Bremen"] * 30, batch_size=5, **EVEN)

    steps = [
        fit(make_client(), data(), max_rounds=1, **s).rows[0]["local/steps"] for s in ({}, {"local_epochs": {"Ulm": 3}})
    ]
    assert steps == [12, 6 + 18]
    for name in ("local_epochs", "lr_factors"):
        with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}.*Celle.*Bremen"):
            fit(make_client(), data(), **{name: {"Celle": 2}})
        with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}.*3 numbers for 2 clients"):
            fit(make_client(), data(), **{name: [1, 1, 1]})


@pytest.mark.parametrize(
    "value", [0, -1, 0.0, True, "two", float("nan"), float("inf"), [], {}, [1, 0], {"a": -1}, 2e6], ids=str
)
def test_wrong_numbers_are_refused(value):
    with pytest.raises(MisconfigurationException, match=r"trainer\.local_epochs="):
        make_trainer(local_epochs=value)
    if value != 2e6:
        with pytest.raises(MisconfigurationException, match=r"trainer\.lr_factors="):
            make_trainer(lr_factors=value)
    with pytest.raises(MisconfigurationException, match=r"trainer\.lr_factors=0\.5"):
        make_trainer(lr_factors=0.5)


@pytest.mark.parametrize("epochs", [0.5, {"0": 2}, [1, 2, 1, 1]], ids=str)
def test_private_samples_take_whole_epochs_for_all(epochs):
    with pytest.raises(MisconfigurationException, match=r"trainer\.local_epochs=.*local_steps"):
        make_trainer(local_epochs=epochs, example_privacy=DPSGD(clip=1.0, noise_multiplier=1.0))


@pytest.mark.parametrize("settings", [{"local_epochs": {"0": 2}}, {"lr_factors": [1, 2]}], ids=str)
def test_deployments_have_the_same_for_all(settings):
    (name,) = settings
    with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}=.*site"):
        make_trainer(engine=lambda modules, work, precision: [], **settings)


def test_a_simulated_clock_counts_the_fractions():
    def seconds(**settings):
        run = fit(make_client(), blobs(*SIZES, **EVEN), max_rounds=1, schedule=Synchronous(), **settings)
        return run.rows[0]["time/simulated"]

    whole = seconds()
    assert seconds(local_epochs=[2, 2, 2]) == pytest.approx(2 * whole) == pytest.approx(seconds(local_epochs=2.0))
    assert seconds(local_epochs=0.5) < whole


@pytest.mark.exhaustive
def test_the_command_line_takes_fractions_names_and_lists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = (
        f"fit {QUIET} --data Digits --data.num_clients 3 --model.net MLP --model.net.hidden [4] --trainer.max_rounds 1"
    )

    def steps(more):
        pfl([*line.split(), *more])
        newest = max(tmp_path.glob("runs/*/version_*"), key=lambda path: int(path.name.partition("_")[2]))
        return Results.of(newest).rows[0]["local/steps"]

    one = steps([])
    assert steps(["--trainer.local_epochs", "2"]) == 2 * one
    assert 0 < steps(["--trainer.local_epochs", "0.5"]) <= one / 2
    assert steps(["--trainer.local_epochs", "[2,2,2]"]) == 2 * one
    assert steps(["--trainer.local_epochs", "{0: 2, 1: 2, '2': 2}", "--trainer.lr_factors", "{1: 0.5}"]) == 2 * one
    assert "Celle" in refusal([*line.split(), "--trainer.local_epochs", "{Celle: 2}"], capsys)
    assert torch.is_grad_enabled()
