"""Canaries bound a guarantee's epsilon from below: within a right claim, and above a wrong one."""

import json
import math
from functools import partial

import lightning
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import (
    CLASSES,
    Altered,
    Blobs,
    Pause,
    Spy,
    blobs,
    equal,
    fit,
    make_client,
    make_trainer,
    read_csv,
    untimed,
)
from pfl_lightning.callbacks import CanaryAudit
from pfl_lightning.data import Samples
from pfl_lightning.methods import Ditto, FedAvg, FedPer, Local
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD, DPAverage, dp_average, example_steps
from pfl_lightning.selection import Poisson

FEATURES = 64


class Deep(Blobs):
    """Points of many features."""

    input_shape = (FEATURES,)

    def load(self):
        y = torch.arange(120) % CLASSES
        noise = torch.randn(120, FEATURES, generator=torch.Generator().manual_seed(0))
        return noise + 2 * torch.eye(CLASSES, FEATURES)[y], y


def wide(input_shape, num_classes):
    return Net(nn.Sequential(nn.Linear(input_shape[0], 60), nn.ReLU()), nn.Linear(60, num_classes))


def of_clients(
    z, canaries=100, method=FedAvg, root="unused", ckpt_path=None, unit=None, pause=None, seed=3, **settings
):
    aggregator = settings.pop("aggregator", DPAverage(noise_multiplier=z, delta=1e-5))
    callbacks = [CanaryAudit(canaries, unit), *([Pause(pause)] if pause else [])]
    model = make_client(method, seed, net=wide)
    settings = {"max_rounds": 1, "callbacks": callbacks, **settings}
    return fit(model, blobs(), root, aggregator=aggregator, ckpt_path=ckpt_path, **settings)


def of_samples(z, canaries=80, method=FedAvg, root="unused", ckpt_path=None, pause=None, seed=3, **settings):
    lightning.seed_everything(seed, verbose=False)
    model = method(net=wide, optimizer=partial(SGD, lr=0.05), input_shape=(FEATURES,), num_classes=CLASSES)
    kind = {"data": settings.pop("data", Deep), "batch_size": settings.pop("batch_size", 50)}
    data = blobs(30, 40, 50, val_fraction=0.0, **kind)
    privacy = DPSGD(noise_multiplier=z, delta=1e-5)
    callbacks = [CanaryAudit(canaries), *([Pause(pause)] if pause else [])]
    settings = {"max_rounds": 1, "example_privacy": privacy, "callbacks": callbacks, **settings}
    return fit(model, data, root, ckpt_path=ckpt_path, **settings)


def found(run):
    return run.federation.audit["audited_epsilon"], run.federation.audit["epsilon"]


def both(run):
    return run.federation.audit["audited_epsilon"], run.federation.audit["audited_epsilon_gaussian"]


def unbounded(self, gradients, taken):
    """Sums of gradients without a bound, of samples whose gradient is finite."""
    finite = torch.stack([gradient.flatten(1).isfinite().all(1) for gradient in gradients.values()]).all(0)
    factors = torch.where(finite, taken, 0.0).double()
    return {name: torch.tensordot(factors, torch.nan_to_num(g.double()), 1) for name, g in gradients.items()}


# Right and wrong guarantees


@pytest.mark.parametrize("z, rounds", [(4.0, 1), (6.0, 4)])
@pytest.mark.by_default("4.0-1")
def test_the_bound_for_clients_is_within_the_claim_and_without_clipping_above_it(z, rounds, monkeypatch):
    bound, claim = found(of_clients(z, max_rounds=rounds))
    assert 0 <= bound < claim
    monkeypatch.setattr(dp_average, "clipped", lambda change, *_: change)
    bound, claim = found(of_clients(z, max_rounds=rounds))
    assert bound > claim


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_bound_for_samples_is_within_the_claim_and_without_clipping_above_it(engine, monkeypatch):
    bound, claim = found(of_samples(2.0, engine=engine))
    assert 0 <= bound < claim
    monkeypatch.setattr(example_steps.ExampleGradients, "_bounded", unbounded)
    bound, claim = found(of_samples(2.0, engine=engine))
    assert bound > claim


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("audited", [of_clients, of_samples])
@pytest.mark.by_default("of_clients-0", "of_clients-1", "of_samples-0", "of_samples-1")
def test_a_tenth_of_the_noise_is_found_by_both_bounds_and_all_of_it_by_none(audited, seed, monkeypatch):
    run = audited(4.0, seed=seed)
    assert max(both(run)) < found(run)[1]
    for place, name in ((DPSGD, "drawn_noise"), (DPAverage, "_drawn")):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, real=real: real(*args) / 10)
    less = audited(4.0, seed=seed)
    assert found(less)[1] == found(run)[1] < min(both(less))
    assert 0.4 < less.federation.audit["audited_noise_multiplier"] < 2


@pytest.mark.parametrize("audited", [of_clients, of_samples])
def test_a_right_guarantee_with_little_noise_has_a_bound_above_zero(audited):
    bound, claim = found(audited(0.3))
    assert 1 < bound < claim


@pytest.mark.parametrize("method", [FedPer, Ditto])
def test_small_batches_and_personal_models_are_audited_too(method):
    run = of_samples(0.3, batch_size=10, method=method, max_rounds=3)
    assert 0 < max(both(run)) < found(run)[1]


def test_canaries_of_poisson_rounds_are_drawn_as_clients_are():
    bound, claim = found(of_clients(0.5, cohort=Poisson(0.5), max_rounds=6))
    assert bound < claim


# What it looks at


def audit_of(run):
    return next(callback for callback in run.trainer.callbacks if isinstance(callback, CanaryAudit))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_sample_in_the_place_of_a_canary_has_no_influence(engine):
    run = of_samples(1.0, engine=engine, max_rounds=2)
    audit, places = audit_of(run), []
    for client in range(3):
        samples = run.data.part(client, "train")
        changed = audit.exchanged(samples, client)
        marked = changed.x[:, 0] >= audit.marks[0]
        assert marked.sum() == len(audit.of_client(client)) and len(changed) == len(samples)
        assert torch.equal(changed.x[:, 1:], samples.x[:, 1:]) and torch.equal(changed.x[~marked], samples.x[~marked])
        places.append(marked)

    class Other(Altered, Deep):
        def alter(self, part, client, split):
            if split != "train":
                return part
            there = places[client]
            x = torch.where(there[:, None] & (torch.arange(FEATURES) > 0), 7.0, part.x)
            return Samples(x, torch.where(there, (part.y + 1) % CLASSES, part.y))

    assert equal(run.weights, of_samples(1.0, engine=engine, max_rounds=2, data=Other).weights)


def test_scores_of_samples_are_their_coins_where_there_is_no_noise():
    run = of_samples(0.0)
    audit = audit_of(run)
    # steps go by the learning rate, and gradients of ten times the bound count as the bound
    assert np.abs(audit.scores / 0.05 - audit.coins).max() < 0.25
    assert run.federation.audit["epsilon"] == math.inf


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_without_canaries_train_with_the_bits_of_a_run_without_an_audit(engine):
    def uploads(*callbacks):
        lightning.seed_everything(3, verbose=False)
        spy = Spy()
        model = FedAvg(net=wide, optimizer=partial(SGD, lr=0.05), input_shape=(FEATURES,), num_classes=CLASSES)
        data = blobs(*[10] * 12, data=Deep, val_fraction=0.0, batch_size=4)
        settings = {"engine": engine, "example_privacy": DPSGD(1.0, delta=1e-5), "max_rounds": 1}
        fit(model, data, callbacks=[*callbacks, spy], **settings)
        return spy.updates[0]

    plain, audited = uploads(), uploads(CanaryAudit(10))
    alike = [equal(plain[client]["weights"], audited[client]["weights"]) for client in range(12)]
    assert alike == [False] * 10 + [True] * 2


def test_canaries_are_dealt_out_in_turn_where_there_is_room():
    audit = audit_of(of_samples(1.0, canaries=86))
    assert [len(audit.of_client(client)) for client in range(4)] == [21, 29, 36, 0]
    assert audit.owners[:7].tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_canaries_of_clients_are_above_the_bound_and_in_no_other_direction():
    seen = {}

    class Watch(lightning.Callback):
        def on_aggregate_start(self, trainer, federation, updates):
            seen.update({client: update["weights"] for client, update in updates.items()})
            seen["model"] = federation.aggregator.global_model()

    audit = CanaryAudit(40)
    run = of_clients(1.0, callbacks=[audit, Watch()], aggregator=DPAverage(noise_multiplier=1.0, clip=0.5))
    model = seen.pop("model")
    changes = {client: torch.cat([(w[n] - model[n]).flatten() for n in model]).double() for client, w in seen.items()}
    canaries = torch.stack([change for client, change in changes.items() if client >= run.data.num_clients])
    assert len(canaries) == audit.coins.sum()
    assert torch.allclose(canaries @ canaries.T, 25 * torch.eye(len(canaries), dtype=torch.float64), atol=1e-3)
    assert all((canaries @ changes[client]).abs().max() < 1e-4 for client in range(run.data.num_clients))


@pytest.mark.parametrize("audited", [of_clients, of_samples])
def test_the_record_says_it_and_training_metrics_of_canaries_stay_out(audited, tmp_path):
    run = audited(1.0, root=tmp_path, max_rounds=2)
    rows = read_csv(run.folder / "rounds.csv")
    assert all(float(row["privacy/audited_epsilon"]) >= 0 for row in rows)
    assert all(row["privacy/canaries"] == str(run.federation.audit["canaries"]) for row in rows)
    assert ("train/loss" in rows[0]) == (audited is of_clients)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["audit"]["models_changed"] and summary["audit"]["unit"] == summary["privacy"]["unit"]
    assert summary["audit"]["epsilon"] == summary["privacy"]["epsilon"]
    assert "parts" not in vars(run.data)


@pytest.mark.parametrize("audited", [of_clients, of_samples])
def test_a_resumed_run_has_the_bound_of_the_whole(audited, tmp_path):
    whole = audited(1.0, max_rounds=3)
    audited(1.0, root=tmp_path, pause=1, max_rounds=3)
    resumed = audited(1.0, root=tmp_path, ckpt_path="last", max_rounds=3)
    assert equal(whole.weights, resumed.weights) and untimed(whole.rows) == untimed(resumed.rows)
    with pytest.raises(MisconfigurationException, match=r"trainer\.attacks"):
        audited(1.0, canaries=20, root=tmp_path, ckpt_path="last", max_rounds=4)


@pytest.mark.parametrize("audited", [of_clients, of_samples])
def test_a_finished_run_that_is_resumed_keeps_its_audit(audited, tmp_path):
    summary = audited(1.0, root=tmp_path, max_rounds=2).folder / "summary.json"
    before = json.loads(summary.read_text())["audit"]
    summary.unlink()
    again = audited(1.0, root=tmp_path, ckpt_path="last", max_rounds=2)
    assert json.loads((again.folder / "summary.json").read_text())["audit"] == before


@pytest.mark.parametrize("unit", ["client", "sample"])
def test_without_a_guarantee_the_bound_stands_for_itself(unit):
    run = of_clients(0.0, canaries=40, unit=unit, aggregator=None, max_rounds=1)
    assert run.federation.audit["epsilon"] is None and run.federation.audit["unit"] == unit
    assert run.federation.audit["audited_epsilon"] > 1
    assert "audited_epsilon_gaussian" not in run.federation.audit
    assert "training_step" not in vars(run.model)


def test_refusals():
    for settings, name in (({"canaries": 5}, "canaries=5"), ({"unit": "site"}, "unit="), ({"scale": 0.0}, "scale=")):
        with pytest.raises(MisconfigurationException, match=name):
            CanaryAudit(**settings)
    with pytest.raises(MisconfigurationException, match="canaries=900"):
        of_clients(1.0, canaries=900)
    with pytest.raises(MisconfigurationException, match="unit='sample'"):
        of_clients(1.0, unit="sample")
    with pytest.raises(MisconfigurationException, match="86 beside one each"):
        of_samples(1.0, canaries=87)
    with pytest.raises(MisconfigurationException, match="weights"):
        make_trainer(callbacks=[CanaryAudit(10)]).fit(make_client(Local), datamodule=blobs())
