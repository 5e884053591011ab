"""Clients whose samples change from a round on."""

from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from command import QUIET, pfl, summary
from federations import Altered, Blobs, Pause, Spy, blobs, equal, fit, make_client, same_end
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import IID, Digits, Dirichlet, Natural, Pathological, Samples, TensorData
from pfl_lightning.data.description import fingerprint
from pfl_lightning.flower.remote_data import remote_data
from pfl_lightning.flower.site import Site
from pfl_lightning.methods import APPLE, FedAvg, FedDyn
from pfl_lightning.privacy import DPSGD
from pfl_lightning.selection import Oort
from pfl_lightning.tasks import Regression

SPLITS = ("train", "val", "test")
START = 3


def digits(drift=None, **settings):
    settings = {"num_clients": 5, "partitioner": IID(), "val_fraction": 0.2, **settings}
    data = Digits(drift={START: Pathological(2)} if drift is None else drift, **settings)
    data.setup()
    return data


def drifting(**settings):
    return blobs(drift={START: Dirichlet(alpha=0.3, min_size=6)}, **{"val_fraction": 0.2, **settings})


def held(data, split):
    return torch.cat([parts[split] for parts in data.division.clients])


def test_the_label_mix_of_each_split_changes_in_its_round():
    data = digits()
    for round in (START - 1, START):
        data.go_to(round)
        classes = [(data.class_counts(split) > 0).sum(1) for split in SPLITS]
        if round < START:
            assert all((own >= 8).all() for own in classes)
        else:
            assert (classes[0] == 2).all() and all((own <= 2).all() for own in classes)
    assert [len(data.part(1, split)) for split in SPLITS] == [data.size(1, split) for split in SPLITS]


@pytest.mark.parametrize("settings", [{}, {"central_test": 0.1}, {"client_test": "original"}, {"new_clients": 2}])
def test_no_sample_that_was_tested_on_is_trained_on(settings, monkeypatch):
    half = torch.arange(1200, 1797)
    monkeypatch.setattr(Digits, "original_test", half)
    data = digits({2: Dirichlet(alpha=0.5), 5: IID()}, **settings)
    before = {split: set(held(data, split).tolist()) for split in SPLITS}
    newcomers = [data.division.clients[client] for client in data.newcomers]
    for round in (2, 5):
        assert data.go_to(round)
        now = {split: set(held(data, split).tolist()) for split in SPLITS}
        assert now["train"] <= before["train"] and all(now[split] <= before[split] for split in ("val", "test"))
        assert not now["train"] & (now["val"] | now["test"])
        assert equal(newcomers, [data.division.clients[client] for client in data.newcomers])
        assert all(data.size(client, split) for client in range(5) for split in SPLITS)
    assert not data.go_to(9)


def test_a_division_is_a_function_of_the_seed_and_the_round():
    one, other, third = digits(), digits(), digits(seed=2)
    for data in (one, other, third):
        data.go_to(START + 4)
    assert equal(one.division.clients, other.division.clients)
    assert not equal(one.division.clients, third.division.clients)
    again = digits({2: IID()})
    assert again.go_to(2)
    assert fingerprint(one) == fingerprint(digits()) != fingerprint(digits({START: Pathological(4)}))


@pytest.mark.parametrize("settings", [{}, {"evaluate": "both", "clients_per_round": 2}, {"cohort": Oort()}])
@pytest.mark.parametrize("pause", [START - 1, START])
@pytest.mark.by_default("2-settings0", "3-settings1", "3-settings2")
def test_resuming_across_the_change_is_bit_for_bit(pause, settings, tmp_path):
    settings = {"max_rounds": 5, "test_every_round": True, **settings}
    whole = fit(make_client(), drifting(), **settings)
    fit(make_client(), drifting(), tmp_path, callbacks=[Pause(pause)], **settings)
    assert same_end(whole, fit(make_client(), drifting(), tmp_path, ckpt_path="last", **settings))
    assert not equal(whole.weights, fit(make_client(), blobs(val_fraction=0.2), **settings).weights)


@pytest.mark.parametrize("engine", ["processes", "vectorised"])
def test_engines_follow(engine):
    spies = [Spy(), Spy()]
    settings = {"max_rounds": 4, "evaluate": "both"}
    one = fit(make_client(), drifting(), callbacks=[spies[0]], **settings)
    other = fit(make_client(), drifting(), callbacks=[spies[1]], engine=engine, **settings)
    sizes = [[[int(update["num_samples"]) for update in round.values()] for round in spy.updates] for spy in spies]
    assert sizes[0] == sizes[1] and sizes[0][1] != sizes[0][2] == sizes[0][3]
    for row, same in zip(one.rows, other.rows, strict=True):
        assert row["val/loss"] == pytest.approx(same["val/loss"], rel=1e-4)


class Kept(FederatedCallback):
    """Keeps each round's metrics of clients after their training, and the cohorts."""

    def __init__(self):
        self.cohorts, self.rounds = [], []

    def on_round_start(self, trainer, federation, cohort):
        self.cohorts.append(cohort)

    def on_aggregate_end(self, trainer, federation, logs):
        self.rounds.append({client: own["test"]["loss"] for client, own in federation.evaluations.after.items()})


@pytest.mark.parametrize("data", [blobs, drifting])
def test_what_was_measured_on_other_samples_is_forgotten(data):
    kept = Kept()
    settings = {"evaluate": "after", "clients_per_round": 1, "max_rounds": START, "test_every_round": True}
    fit(make_client(), data(val_fraction=0.2), callbacks=[kept], **settings)
    before, after = kept.rounds[START - 2 :]
    absent = set(range(4)) - set(kept.cohorts[-1])
    assert len(absent) == 3 and all((before[client] != after[client]) == (data is drifting) for client in absent)


def test_a_run_goes_on_with_the_drift_that_it_had(tmp_path):
    fit(make_client(), drifting(), tmp_path, callbacks=[Pause(1)])
    other = blobs(drift={START: Dirichlet(alpha=0.4, min_size=6)}, val_fraction=0.2)
    with pytest.raises(MisconfigurationException, match=rf"data\.drift\.{START}\.alpha"):
        fit(make_client(), other, tmp_path, ckpt_path="last")


def test_the_best_round_is_tested_on_what_clients_held_then(tmp_path):
    run = fit(make_client(), drifting(), tmp_path, max_rounds=5, monitor="loss")
    assert run.data.round == 5
    best = run.trainer.checkpoint_callback.best_model_path
    saved = torch.load(best, weights_only=True)["federation"]
    data = drifting()
    data.setup()
    # clients are told by the first round's samples, whichever round was saved
    assert saved["round"] >= START and saved["sizes"] == [data.size(client, "train") for client in range(4)]
    run.trainer.test(run.model, datamodule=run.data, ckpt_path=best)
    assert run.data.round == saved["round"]


class Turned(Blobs):
    """Clients that pass all that they hold on to the next one."""

    def division_at(self, round):
        division = super().division_at(round)
        if round < START:
            return division
        return replace(division, clients=division.clients[1:] + division.clients[:1])


class Renamed(Altered):
    """Clients that call the classes by other names."""

    def alter(self, part, client, split):
        return Samples(part.x, (part.y + (self.round >= START)) % 3)


@pytest.mark.parametrize("data", [Turned, Renamed])
def test_a_class_of_one_s_own_says_what_clients_hold_in_a_round(data, tmp_path):
    whole = fit(make_client(), blobs(data=data), max_rounds=4)
    plain = fit(make_client(), blobs(), max_rounds=4)
    assert whole.rows[1]["train/loss"] == plain.rows[1]["train/loss"]
    assert whole.rows[2]["val/loss"] != plain.rows[2]["val/loss"]
    fit(make_client(), blobs(data=data), tmp_path, callbacks=[Pause(2)], max_rounds=4)
    assert same_end(whole, fit(make_client(), blobs(data=data), tmp_path, ckpt_path="last", max_rounds=4))


@pytest.mark.parametrize(
    ("made", "says"), [(lambda own: None, "a NoneType"), (lambda own: replace(own, clients=[]), "0 clients")]
)
def test_a_division_of_other_clients_is_refused(made, says):
    class Wrong(Blobs):
        def division_at(self, round):
            own = super().division_at(round)
            return own if round == 1 else made(own)

    with pytest.raises(MisconfigurationException, match=rf"division_at\(2\) returned {says}"):
        fit(make_client(), blobs(data=Wrong))


@pytest.mark.parametrize(
    "drift",
    [{1: IID()}, {"a": IID()}, {2.5: IID()}, [IID()], {3: None}, {3: IID}, {3: Natural()}, {True: IID()}],
    ids=["round 1", "a text", "half a round", "a list", "no partitioner", "a class", "by owners", "True"],
)
def test_a_drift_that_cannot_be_is_refused(drift):
    with pytest.raises(MisconfigurationException, match=r"data\.drift="):
        Digits(drift=drift)


def test_a_drift_by_classes_needs_classes():
    data = TensorData(torch.rand(40, 2), torch.rand(40), Regression(), torch.arange(40) // 20, drift={2: Dirichlet()})
    with pytest.raises(MisconfigurationException, match=r"Dirichlet tells samples apart"):
        data.setup()
    data = TensorData(torch.rand(40, 2), torch.rand(40), Regression(), torch.arange(40) // 20, drift={2: IID()})
    data.setup()
    assert data.go_to(2) and data.size(0, "train")


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        (FedDyn, {}, "FedAvg"),
        (APPLE, {}, "FedAvg"),
        (FedAvg, {"example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)}, "example_privacy"),
    ],
)
def test_what_counts_on_the_first_samples_is_refused(method, settings, says):
    with pytest.raises(MisconfigurationException, match=rf"data\.drift=\[{START}\].*{says}"):
        fit(make_client(method), drifting(), **settings)


def test_sites_hold_what_they_hold():
    data = digits()
    with pytest.raises(MisconfigurationException, match="drift"):
        Site(data, [0, 1])
    with pytest.raises(MisconfigurationException, match="drift"):
        remote_data(data, {})


def test_a_drift_by_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drift.yaml").write_text(
        "data:\n  class_path: Digits\n  init_args:\n    num_clients: 4\n    drift:\n      2: {class_path: IID}\n"
    )
    net = "--model FedAvg --model.net MLP"
    pfl(f"fit --config drift.yaml {net} --trainer.max_rounds 2 {QUIET}")
    assert summary("FedAvg-Digits/version_0")["final"]["round"] == 2
    pfl(f"fit --config drift.yaml {net} --trainer.max_rounds 3 {QUIET} --ckpt_path last")
    assert summary("FedAvg-Digits/version_0")["final"]["round"] == 3
