"""Optimizer steps of several batches, and epochs of some of their batches, under all engines."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import SGD, Adam

from federations import MOMENTUM, SIZES, blobs, equal, fit, make_client, noisy, points, same_end
from pfl_lightning.client import Phase
from pfl_lightning.data import Samples, TensorData, epoch_order
from pfl_lightning.engines import Job, LocalWork, Sequential
from pfl_lightning.methods import ControlVariates, FedAvg, FedNova, FedRep, Local
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD
from pfl_lightning.tasks import NextToken

EVEN = {"val_fraction": 0.0, "test_fraction": 0.0}


class Kept(Sequential):
    """Keeps each client's seed and its number of optimizer steps."""

    seeds: ClassVar[dict[int, int]] = {}
    steps: ClassVar[dict[int, int]] = {}

    def train(self, job: Job, layout):
        outcome = super().train(job, layout)
        self.seeds[job.client], self.steps[job.client] = job.seed, self.module.steps_done
        return outcome


def by_hand(part, seed, k, limit):
    """A client's weights after two epochs under Lightning's rule, and the optimizer steps."""
    model, steps = make_client(Local), 0
    optimizer, generator = MOMENTUM(model.parameters()), torch.Generator().manual_seed(seed)
    for _ in range(2):
        batches = epoch_order(len(part), 5, "keep", generator).split(5)
        batches = batches[: limit if isinstance(limit, int) else max(1, int(len(batches) * limit))]
        for index, rows in enumerate(batches):
            (torch.nn.functional.cross_entropy(model(part.x[rows]), part.y[rows]) / k).backward()
            if (index + 1) % k == 0 or index + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    return model.state_dict(), steps


@pytest.mark.parametrize("k", [2, 3, 50])
@pytest.mark.parametrize("limit", [1.0, 3, 0.5])
def test_steps_are_those_of_lightning_s_rule(k, limit):
    settings = {"accumulate_grad_batches": k, "limit_train_batches": limit, "local_epochs": 2, "max_rounds": 1}
    run = fit(make_client(Local), engine=Kept, **settings)
    for client in range(len(SIZES)):
        expected, steps = by_hand(run.data.part(client, "train"), Kept.seeds[client], k, limit)
        personal = run.federation.clients[client].personal
        assert all(torch.allclose(personal[name], entry, atol=1e-6) for name, entry in expected.items())
        assert Kept.steps[client] == steps


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_two_batches_of_four_are_one_of_eight(engine):
    settings = {"local_epochs": 2, "gradient_clip_val": 0.5, "max_rounds": 2, "engine": engine}
    small = fit(make_client(), blobs(24, 16, 32, batch_size=4, **EVEN), accumulate_grad_batches=2, **settings)
    large = fit(make_client(), blobs(24, 16, 32, batch_size=8, **EVEN), **settings)
    assert all(torch.allclose(small.weights[name], entry, atol=1e-6) for name, entry in large.weights.items())


def test_one_batch_a_step_and_all_batches_change_no_bit():
    settings = {"local_epochs": 2, "clients_per_round": 3, "gradient_clip_val": 1.0}
    made = partial(make_client, net=noisy)
    for engine in ("sequential", "vectorised"):
        plain = fit(made(), engine=engine, **settings)
        for same in ({"accumulate_grad_batches": 1, "limit_train_batches": 1.0}, {"limit_train_batches": 99}):
            assert equal(dict(plain.weights), dict(fit(made(), engine=engine, **settings, **same).weights))


LOCAL = [
    {"local_epochs": 3, "accumulate_grad_batches": 2},
    {"local_epochs": 2, "accumulate_grad_batches": 3, "limit_train_batches": 0.6, "gradient_clip_val": 0.3},
    {"local_steps": 3, "accumulate_grad_batches": 2},
    {"local_steps": 3, "accumulate_grad_batches": 2, "steps_continue": True, "limit_train_batches": 3},
    {"local_epochs": 2, "limit_train_batches": 1},
]


SGD_ALONE = {"optimizer": partial(SGD, lr=0.1)}
KEPT_ADAM = {"optimizer": partial(Adam, lr=0.01), "optimizer_lifetime": "run"}


@pytest.mark.parametrize(
    ("method", "made", "settings"),
    [
        *((FedAvg, {"net": noisy}, settings) for settings in LOCAL),
        (FedAvg, KEPT_ADAM, LOCAL[1]),
        (ControlVariates, SGD_ALONE, LOCAL[0]),
        (FedNova, SGD_ALONE, LOCAL[0]),
        (FedRep, SGD_ALONE, LOCAL[3]),
    ],
)
def test_engines_agree(method, made, settings):
    make = partial(make_client, method, **made)
    alone, at_once = (fit(make(), engine=engine, max_rounds=2, **settings) for engine in ("sequential", "vectorised"))
    assert all(torch.allclose(alone.weights[name], t, atol=2e-5) for name, t in at_once.weights.items())
    assert alone.rows[-1]["train/loss"] == pytest.approx(at_once.rows[-1]["train/loss"], rel=1e-4)
    states = [run.federation.clients for run in (alone, at_once)]
    assert all(states[0][client].batches == states[1][client].batches for client in range(len(SIZES)))


def test_processes_give_the_same_bits():
    settings = {**LOCAL[1], "max_rounds": 1}
    one, other = (fit(make_client(net=noisy), engine=engine, **settings) for engine in ("sequential", "processes"))
    assert equal(dict(one.weights), dict(other.weights))


def test_steps_that_continue_resume_bit_for_bit(tmp_path):
    settings = {**LOCAL[3], "clients_per_round": 2, "max_rounds": 4}
    whole = fit(make_client(), root=tmp_path / "whole", **settings)
    half = fit(make_client(), root=tmp_path / "half", **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make_client(), root=tmp_path / "half", ckpt_path=half.last, **settings))
    for other in ({"accumulate_grad_batches": 3}, {"limit_train_batches": 2}):
        (name,) = other
        with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}"):
            fit(make_client(), root=tmp_path / "half", ckpt_path=half.last, **{**settings, **other})


def test_a_limit_is_about_clients_own_samples():
    work = LocalWork(limit=2, accumulate=2)
    assert work.extent(Phase()).limit == 2
    assert work.extent(Phase(data=Samples(*points(9, 0)))).limit == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 0},
        {"accumulate_grad_batches": 2.0},
        {"accumulate_grad_batches": True},
        {"limit_train_batches": 0},
        {"limit_train_batches": 0.0},
        {"limit_train_batches": 1.5},
        {"limit_train_batches": True},
        {"accumulate_grad_batches": 2, "example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)},
        {"limit_train_batches": 1, "example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)},
    ],
    ids=str,
)
def test_values_without_a_meaning_are_refused(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(MisconfigurationException, match=rf"trainer\.{name}={value}"):
        fit(make_client(), **settings)


def bigrams(input_shape, num_classes):
    return Net(nn.Embedding(num_classes, 4), nn.Linear(4, num_classes))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("rows", [8, 7])
def test_a_step_of_texts_is_on_the_mean_of_all_counted_tokens(engine, rows):
    """As one batch of all texts, although the batches count different numbers of tokens; the last batch is shorter."""
    tokens = torch.randint(0, 9, (2 * rows, 7), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row, target in enumerate(targets):
        target[1 + row % 6 :] = -100

    def weights(batch_size, **settings):
        clients = torch.arange(2 * rows) % 2
        data = TensorData(tokens[:, :-1], targets, client=clients, task=NextToken(9), batch_size=batch_size, **EVEN)
        torch.manual_seed(0)
        model = FedAvg(bigrams, (6,), task=data.task, optimizer=partial(SGD, lr=0.5))
        return fit(model, data, engine=engine, max_rounds=1, **settings).weights

    whole, parts = weights(8), weights(2, accumulate_grad_batches=4)
    assert all(torch.allclose(parts[name], whole[name], atol=1e-6) for name in whole)
    assert not equal(whole, weights(2, accumulate_grad_batches=2))
