"""Canaries bound a guarantee's epsilon from below: within a right claim, and above a wrong one."""

import json
from functools import partial

import lightning
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD

from federations import CLASSES, Blobs, Pause, blobs, equal, fit, make_client, make_trainer, read_csv, untimed
from pfl_lightning.callbacks import CanaryAudit
from pfl_lightning.engines import examples
from pfl_lightning.methods import Ditto, FedAvg, FedPer, Local
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD, DPAverage, dp_average
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


def of_clients(z, canaries=100, method=FedAvg, root="unused", ckpt_path=None, unit=None, pause=None, **settings):
    aggregator = settings.pop("aggregator", DPAverage(noise_multiplier=z, delta=1e-5))
    callbacks = [CanaryAudit(canaries, unit), *([Pause(pause)] if pause else [])]
    model = make_client(method, net=wide)
    settings = {"max_rounds": 1, "callbacks": callbacks, **settings}
    return fit(model, blobs(), root, aggregator=aggregator, ckpt_path=ckpt_path, **settings)


def of_samples(z, canaries=50, method=FedAvg, root="unused", ckpt_path=None, pause=None, **settings):
    lightning.seed_everything(3, verbose=False)
    model = method(net=wide, optimizer=partial(SGD, lr=0.05), input_shape=(FEATURES,), num_classes=CLASSES)
    data = blobs(30, 40, 50, data=Deep, val_fraction=0.0, batch_size=settings.pop("batch_size", 50))
    privacy = DPSGD(noise_multiplier=z, delta=1e-5)
    callbacks = [CanaryAudit(canaries), *([Pause(pause)] if pause else [])]
    settings = {"max_rounds": 1, "example_privacy": privacy, "callbacks": callbacks, **settings}
    return fit(model, data, root, ckpt_path=ckpt_path, **settings)


def found(run):
    return run.federation.audit["audited_epsilon"], run.federation.audit["epsilon"]


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
    monkeypatch.setattr(examples.ExampleGradients, "_bounded", unbounded)
    bound, claim = found(of_samples(2.0, engine=engine))
    assert bound > claim


def test_noise_that_is_too_small_is_found(monkeypatch):
    real = dp_average.seeded_normal
    monkeypatch.setattr(dp_average, "seeded_normal", lambda size, *key: real(size, *key) / 20)
    bound, claim = found(of_clients(4.0))
    assert bound > claim


@pytest.mark.parametrize("audited", [of_clients, of_samples])
def test_a_right_guarantee_with_little_noise_has_a_bound_above_zero(audited):
    bound, claim = found(audited(0.3))
    assert 1 < bound < claim


def test_small_batches_and_personal_heads_are_audited_too():
    bound, claim = found(of_samples(0.3, batch_size=10, method=FedPer, max_rounds=3))
    assert 0 < bound < claim


def test_canaries_of_poisson_rounds_are_drawn_as_clients_are():
    bound, claim = found(of_clients(0.5, cohort=Poisson(0.5), max_rounds=6))
    assert bound < claim


# What it looks at


def test_a_sample_that_is_left_out_has_no_influence():
    run = of_samples(1.0)
    data = run.data
    audit = next(callback for callback in run.trainer.callbacks if isinstance(callback, CanaryAudit))
    samples, coins = data.part(1, "train"), audit.included(run.federation)
    own = audit.of_client(run.federation, 1)
    changed = audit.exchanged(samples, 1, run.federation, blank=True)
    rows, canaries = audit.crafted(samples, 1, run.federation)
    there = torch.from_numpy(coins[own])
    assert 0 < int(there.sum()) < len(own) and len(changed) == len(samples)
    assert torch.equal(changed.x[rows][there], canaries.x[there]) and changed.x[rows][~there].isnan().all()
    assert torch.equal(changed.y[rows][~there], samples.y[rows][~there])
    others = torch.ones(len(samples), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(changed.x[others], samples.x[others]) and torch.equal(changed.y[others], samples.y[others])
    kept = audit.exchanged(samples, 1, run.federation, blank=False)
    assert torch.equal(kept.x[rows][~there], samples.x[rows][~there])


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
    assert len(canaries) == audit.included(run.federation).sum()
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


@pytest.mark.parametrize("unit", ["client", "sample"])
def test_without_a_guarantee_the_bound_stands_for_itself(unit):
    run = of_clients(0.0, canaries=40, unit=unit, aggregator=None, max_rounds=1)
    assert run.federation.audit["epsilon"] is None and run.federation.audit["unit"] == unit
    assert run.federation.audit["audited_epsilon"] > (1 if unit == "client" else -1)


def test_refusals():
    for settings, name in (({"canaries": 5}, "canaries=5"), ({"unit": "site"}, "unit="), ({"scale": 0.0}, "scale=")):
        with pytest.raises(MisconfigurationException, match=name):
            CanaryAudit(**settings)
    with pytest.raises(MisconfigurationException, match="canaries=900"):
        of_clients(1.0, canaries=900)
    with pytest.raises(MisconfigurationException, match="canaries=120"):
        of_samples(1.0, canaries=120)
    with pytest.raises(MisconfigurationException, match="unit='sample'"):
        of_clients(1.0, unit="sample")
    with pytest.raises(MisconfigurationException, match="personal model"):
        of_samples(1.0, method=Ditto)
    with pytest.raises(MisconfigurationException, match="weights"):
        make_trainer(callbacks=[CanaryAudit(10)]).fit(make_client(Local), datamodule=blobs())
