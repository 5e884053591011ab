"""Pooled: the steps of one training on all clients' samples, and the settings that keep samples apart."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD, Adam

from federations import blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.data import Samples, epoch_order
from pfl_lightning.engines import Sequential
from pfl_lightning.methods import FedAvg, Pooled
from pfl_lightning.privacy import DPSGD, DPAverage, SecureSum
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import Oort, Uniform


def test_it_is_a_plain_loop_over_all_samples():
    run = fit(make_client(Pooled, optimizer=partial(SGD, lr=0.1)), max_rounds=2, engine="sequential")
    model = make_client(FedAvg)
    data = run.data
    samples = Samples.joined([data.part(client, "train") for client in range(4)])
    x, y = samples.x, samples.y
    optimizer = SGD(model.parameters(), lr=0.1)
    for round in range(2):
        generator = torch.Generator().manual_seed(derive_seed(run.federation.seed, "train", round, 0))
        for rows in epoch_order(len(y), data.batch_size, "keep", generator).split(data.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    assert all(torch.allclose(run.weights[name], t, atol=1e-6) for name, t in model.state_dict().items())
    assert [row["clients"] for row in run.rows] == [1, 1] and set(run.test()) == {0, 1, 2, 3}


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_engines_have_the_same_bits(engine):
    alone, other = (
        fit(make_client(Pooled, net=noisy), engine=each, clients_per_round=0.5) for each in ("sequential", engine)
    )
    assert equal(dict(alone.weights), dict(other.weights))


def test_each_round_counts_its_own_reports_to_the_selection():
    plain, told = (fit(make_client(Pooled), max_rounds=3, cohort=each) for each in (Uniform(), Oort(percentile=None)))
    # one number of eight bytes, of the one client that stands for all
    assert [row["bytes/up"] for row in told.rows] == [row["bytes/up"] + 8 for row in plain.rows]


def test_samples_read_a_batch_at_a_time_are_the_same():
    alone, read = (
        fit(make_client(Pooled), blobs(resident=resident), engine="sequential") for resident in (True, False)
    )
    assert all(torch.allclose(alone.weights[name], read.weights[name], atol=1e-6) for name in alone.weights)


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, Pooled, net=noisy, optimizer=partial(Adam, lr=0.01), optimizer_lifetime="run")
    whole = fit(make(), root=tmp_path / "whole", max_rounds=3)
    half = fit(make(), root=tmp_path / "half", max_rounds=2)
    assert same_end(whole, fit(make(), root=tmp_path / "half", max_rounds=3, ckpt_path=half.last))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"evaluate": "after"}, "trainer.evaluate=after"),
        ({"secure_sum": SecureSum()}, "trainer.secure_sum"),
        ({"aggregator": DPAverage(clip=1.0, noise_multiplier=1.0)}, "DPAverage"),
        ({"example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)}, "trainer.example_privacy"),
        ({"engine": lambda modules, work, precision: [Sequential(modules[0], work, precision)]}, "clients at sites"),
    ],
    ids=["after", "sums", "clients", "samples", "sites"],
)
def test_what_keeps_samples_apart_is_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=f"model=Pooled.*|{named}") as refused:
        fit(make_client(Pooled), **settings)
    assert "Pooled" in str(refused.value) and named in str(refused.value)
