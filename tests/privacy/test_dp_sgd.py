import json
import math
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from scipy.stats import chi2
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    Altered,
    Pause,
    Sizes,
    Spy,
    blobs,
    check_order_and_resume,
    equal,
    fit,
    flat,
    make_client,
    noisy,
    points,
    read_csv,
    same_end,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import SCAFFOLD, FedAWA, FedDisco, FedLAW, FedNH
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.client import Phase
from pfl_lightning.data import Natural, Samples, TensorData
from pfl_lightning.engines import Auto, Processes, Sequential, Vectorised
from pfl_lightning.engines.base import LocalWork
from pfl_lightning.engines.slots import Slots
from pfl_lightning.methods import (
    MOON,
    ControlVariates,
    Ditto,
    FedAvg,
    FedBABU,
    FedClassAvg,
    FedPer,
    FedProx,
    FedRep,
    FedSAM,
    FedUV,
    Local,
    NormalizedHead,
)
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD, DPAverage, Release, dp_sgd, epsilon, example_blocks
from pfl_lightning.privacy.accountant import gaussian_delta, has_pld, within
from pfl_lightning.privacy.example_steps import Draws, ExampleGradients, noised
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import PowerOfChoice
from pfl_lightning.tasks import Classification
from sweeps import all_but

PLAIN = partial(SGD, lr=0.5)


def sums_of(client, samples, taken=None, clip=1.0, at_once=None, **settings):
    slots = Slots(client)
    privacy = DPSGD(**{"noise_multiplier": 1.0} | settings, clip=clip, samples_at_once=at_once)
    gradients = ExampleGradients(client, slots, [name for name, _ in client.named_parameters()], privacy, nullcontext)
    taken = torch.ones(len(samples), dtype=torch.float64) if taken is None else taken
    return gradients.sums(slots.current(), (samples.x, samples.y), taken, 0)


def one_by_one(client, samples):
    """The gradient of each sample by itself, as one vector."""
    rows = []
    for x, y in zip(samples.x, samples.y, strict=True):
        loss = client.training_step((x[None], y[None]), 0)["loss"]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(client.parameters()))]))
    return torch.stack(rows)


def drawn(count=12, seed=4):
    x, y = points(count, seed)
    return Samples(x.double(), y)


# Sums


@pytest.mark.parametrize("at_once", [None, 1, 5])
@pytest.mark.parametrize("clip", [1.3, 1e9])
def test_sums_are_of_gradients_that_are_bounded_one_by_one(clip, at_once):
    client, samples = make_client().double(), drawn()
    gradients = one_by_one(client, samples)
    norms = gradients.norm(dim=1, keepdim=True)
    assert norms.min() < 1.3 < norms.max()
    expected = (gradients * (clip / norms).clamp(max=1)).sum(0)
    sums, totals = sums_of(client, samples, clip=clip, at_once=at_once)
    assert torch.allclose(flat(sums, sums), expected, atol=1e-12)
    losses = F.cross_entropy(client(samples.x), samples.y, reduction="sum")
    assert torch.allclose(totals["loss"], losses)


def test_what_only_fills_up_counts_for_nothing():
    client, samples = make_client().double(), drawn()
    taken = torch.zeros(12, dtype=torch.float64)
    taken[:7] = 1
    some, totals = sums_of(client, samples, taken)
    alone, expected = sums_of(client, samples.take(slice(7)))
    assert all(torch.allclose(some[name], alone[name], atol=1e-12) for name in alone)
    assert torch.allclose(totals["loss"], expected["loss"])


@pytest.mark.parametrize("value", [0.0, 1e6, math.inf, math.nan])
def test_one_sample_moves_the_sum_by_the_bound_at_most(value):
    client, samples = make_client().double(), drawn()
    samples.x[0] = value
    with_it, _ = sums_of(client, samples, clip=0.7)
    without, _ = sums_of(client, samples.take(slice(1, None)), clip=0.7)
    moved = flat(with_it, with_it) - flat(without, without)
    assert float(moved.norm()) <= 0.7 + 1e-12


@pytest.mark.parametrize("value", [1e20, 1e37])
def test_a_huge_gradient_is_bounded_and_not_lost(value):
    client = make_client(net=linear)
    moved, _ = sums_of(client, Samples(torch.full((1, 6), value), torch.tensor([1])), clip=0.7)
    assert float(flat(moved, moved).norm()) == pytest.approx(0.7)


def test_means_are_of_the_samples_that_count():
    """What only fills a row up may be a sample that isn't finite."""
    client, samples = make_client(), Samples(*points(12, 4))
    samples.x[0] = math.nan
    _, totals = sums_of(client, samples, torch.arange(12) % 12 > 0)
    _, expected = sums_of(client, samples.take(slice(1, None)))
    assert totals["loss"] == pytest.approx(float(expected["loss"]))


def neighbours(count):
    """Two pairs of clients, of which one has a sample more: of samples that are all alike, and of others."""
    drawn = torch.Generator().manual_seed(count)
    same = torch.randn(1, 6, generator=drawn).expand(count + 1, -1)
    rows = [same, same + 0.3 * torch.randn(count + 1, 6, generator=drawn)]
    rows = [kind[first:] for first in (0, 1) for kind in rows]
    owners = [client for client, own in enumerate(rows) for _ in own]
    return TensorData(
        torch.cat(rows), torch.zeros(len(owners), dtype=torch.int64), Classification(3), owners,
        partitioner=Natural(), batch_size=count + 1, test_fraction=0, val_fraction=0,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 16, 512])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_further_sample_moves_the_sum_by_the_bound_at_most_in_each_precision(engine, precision, count, monkeypatch):
    found = []

    def spied(sums, *others):
        rows = 1 if engine is Sequential else 4
        found.extend(torch.cat([sums[name].double().reshape(rows, -1) for name in sorted(sums)], -1))
        return noised(sums, *others)

    monkeypatch.setattr(dp_sgd if engine is Sequential else example_blocks, "noised", spied)
    clip = 0.3
    fit(
        make_client(), neighbours(count), engine=engine, precision=precision, local_steps=1, max_rounds=1,
        example_privacy=DPSGD(0.0, clip), limit_val_batches=0,
    )  # fmt: skip
    moved = [float((found[kind] - found[kind + 2]).norm()) for kind in (0, 1)]
    assert max(moved) <= clip * (1 + 1e-5)
    # nearer to it than half precision comes
    assert moved[0] == pytest.approx(clip, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_as_fine_as_what_it_hides(dtype):
    noise = DPSGD(1.0).drawn_noise([torch.zeros(2, 3), torch.zeros(4, dtype=dtype)], torch.Generator().manual_seed(0))
    assert noise.shape == (10,) and noise.dtype == dtype
    assert torch.equal(noise.float().to(dtype), noise) == (dtype is torch.float32)


def test_without_noise_and_bound_a_step_is_the_plain_one_on_the_drawn_batch():
    run = fit(make_client(optimizer=PLAIN), blobs(24), local_steps=1, max_rounds=1, example_privacy=DPSGD(0.0, 1e9))
    client, data = make_client(optimizer=PLAIN), blobs(24)
    data.setup("fit")
    part = data.part(0, "train")
    # the client's own stream, which orders its batches elsewhere
    generator = torch.Generator().manual_seed(run_seed(run))
    rows = (torch.rand(len(part), generator=generator) < 5 / len(part)).nonzero().flatten()
    assert 0 < len(rows) != 5
    loss = F.cross_entropy(client(part.x[rows]), part.y[rows], reduction="sum") / 5
    loss.backward()
    for name, parameter in client.named_parameters():
        assert torch.allclose(run.weights[name], parameter.detach() - 0.5 * parameter.grad, atol=1e-6)
    assert run.rows[0]["privacy/epsilon"] == math.inf


def run_seed(run):
    return derive_seed(run.federation.seed, "train", 0, 0)


class Silent(FedAvg):
    """Learns nothing, so that its steps are noise."""

    example_level = True

    def loss(self, features, logits, target):
        return 0 * super().loss(features, logits, target)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_noise_has_the_variance_that_is_counted(engine):
    z, clip, steps = 1.5, 0.4, 200
    client = make_client(Silent, optimizer=partial(SGD, lr=1.0))
    start = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    run = fit(client, blobs(30, 30), engine=engine, local_steps=steps, max_rounds=1, example_privacy=DPSGD(z, clip))
    moved = torch.cat([(run.weights[name] - start[name]).flatten() for name in start if name.startswith("net.")])
    # of a step zC / B, of a client's steps together that of the root of their number, and the mean of two clients
    std = z * clip / 5 * math.sqrt(steps / 2)
    low, high = chi2.ppf([1e-4, 1 - 1e-4], len(moved))
    assert low < float((moved / std).square().sum()) < high


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_the_clip_is_of_a_whole_sample(engine):
    client = make_client(optimizer=partial(SGD, lr=1.0))
    start = flat(client.state_dict(), sorted(client.state_dict()))
    run = fit(client, blobs(40, 40), engine=engine, local_steps=1, max_rounds=1, example_privacy=DPSGD(0.0, 1e-3))
    moved = flat(run.weights, sorted(run.weights)) - start
    # some five samples of each, divided by five
    assert 0 < float(moved.norm()) < 3e-3


# Noise that nobody else can know


ENGINES = [Sequential, Vectorised, Processes]


@pytest.mark.parametrize("engine", ENGINES)
def test_secure_noise_is_another_in_each_run_and_seeded_noise_the_same(engine):
    ends = {}
    for noise in ("secure", "seeded", None):
        privacy = DPSGD(1.0, 0.5, noise=noise)
        ends[noise] = [fit(make_client(), engine=engine, example_privacy=privacy, max_rounds=1) for _ in range(2)]
    assert same_end(*ends["seeded"]) and same_end(ends["seeded"][0], ends[None][0])
    one, other = ends["secure"]
    assert all(not torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    # the same privacy is spent
    assert (
        one.federation.options.example_privacy.spent
        == other.federation.options.example_privacy.spent
        == ends["seeded"][0].federation.options.example_privacy.spent
    )
    assert one.rows[-1]["privacy/epsilon"] == ends["seeded"][0].rows[-1]["privacy/epsilon"]
    for noise, (run, _) in ends.items():
        told = run.federation.privacy()
        assert ("simulation" in told["noise"], "seed" in told["not_covered"]) == (noise != "secure",) * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_secure_batches_are_of_no_seed(engine, monkeypatch):
    """Without noise and bound, two runs differ by their batches alone."""
    loud = {"engine": engine, "example_privacy": DPSGD(0.0, 1e9, noise="secure"), "max_rounds": 1}
    one, other = (fit(make_client(), **loud) for _ in range(2))
    assert not equal(one.weights, other.weights)


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_secure_noise_has_the_variance_that_is_counted(engine):
    z, clip, steps = 1.5, 0.4, 200
    client = make_client(Silent, optimizer=partial(SGD, lr=1.0))
    start = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    privacy = DPSGD(z, clip, noise="secure")
    run = fit(client, blobs(30, 30), engine=engine, local_steps=steps, max_rounds=1, example_privacy=privacy)
    moved = torch.cat([(run.weights[name] - start[name]).flatten() for name in start if name.startswith("net.")])
    # as of seeded noise above
    std = z * clip / 5 * math.sqrt(steps / 2)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], len(moved))
    assert low < float((moved / std).square().sum()) < high


@pytest.mark.parametrize("at_once", [None, 5])
def test_what_gets_secure_noise_lies_on_its_grid_and_within_the_bound(at_once):
    client, samples = make_client().double(), drawn()
    secure = {"noise": "secure", "noise_multiplier": 0.8, "clip": 0.7, "at_once": at_once}
    step = DPSGD(0.8, 0.7, noise="secure").grid
    sums, _ = sums_of(client, samples, **secure)
    steps = flat(sums, sums) / step
    assert torch.equal(steps, steps.round()) and math.log2(step) % 1 == 0 and step < 1e-9
    usual, _ = sums_of(client, samples, clip=0.7)
    # each sample's own gradient is rounded, by less than a step
    assert 0 < (flat(sums, sums) - flat(usual, usual)).abs().max() < len(samples.y) * step
    alone, _ = sums_of(client, samples.take(slice(1)), **secure)
    assert 0.7 * (1 - 1e-6) < float(flat(alone, alone).norm()) <= 0.7
    noise = DPSGD(0.8, 0.7, noise="secure").drawn_noise([torch.zeros(50)], torch.Generator()) / step
    assert torch.equal(noise, noise.round()) and noise.dtype == torch.float64


def test_secure_steps_draw_dropout_from_no_seed():
    """Known masks would move with a sample's place in its batch."""
    quiet = DPSGD(0.0, 1e9, noise="secure")
    data = partial(blobs, 24, batch_size=30, test_fraction=0, val_fraction=0)
    settings = {"example_privacy": quiet, "local_steps": 1, "max_rounds": 1, "limit_val_batches": 0}
    # a rate of 1, so that batches are the same
    one, other = (fit(make_client(net=dropped), data(), **settings) for _ in range(2))
    assert not equal(one.weights, other.weights)
    one, other = (fit(make_client(), data(), **settings) for _ in range(2))
    assert equal(one.weights, other.weights)


@pytest.mark.parametrize(("noise", "counted"), [("seeded", False), ("secure", True)])
def test_steps_of_lost_rounds_count_where_their_noise_was_another(noise, counted, tmp_path):
    class Ends(FederatedCallback):
        """In the fourth round, before there is a checkpoint of the third."""

        def on_round_start(self, trainer, federation, cohort):
            if federation.round == 3:
                raise ZeroDivisionError

    settings = {"example_privacy": DPSGD(2.0, noise=noise), "clients_per_round": 2, "max_rounds": 4}
    every = ModelCheckpoint(every_n_epochs=2, save_top_k=-1, filename="{epoch}", save_last=False)
    with pytest.raises(ZeroDivisionError):
        fit(make_client(), root=tmp_path, callbacks=[Ends(), every], **settings)
    recorded = read_csv(next(tmp_path.rglob("rounds.csv")))
    (checkpoint,) = tmp_path.rglob("epoch=1*.ckpt")
    run = fit(make_client(), root=tmp_path, ckpt_path=checkpoint, **settings)
    sizes, rounds = run.federation.sizes(range(4), "train"), Counter()
    for row in run.rows:
        rounds.update(map(int, row["cohort"].split()))
    if counted:
        # the third, which is recorded, and the fourth, whose clients nobody knows
        rounds.update([*map(int, recorded[2]["cohort"].split()), *range(4)])
    expected = {k: [Release(2.0, min(1, 5 / sizes[k]), rounds[k] * math.ceil(sizes[k] / 5))] for k in rounds}
    assert run.federation.options.example_privacy.spent == expected
    assert run.rows[-1]["privacy/epsilon"] == max(epsilon(own, 0.1 / sizes[k]) for k, own in expected.items())
    assert run.logger.summary["privacy"]["noise"].startswith(noise)


# Engines


@pytest.mark.parametrize("method", all_but([FedProx, FedPer, MOON], [FedAvg, FedProx, FedPer, FedRep, Ditto, MOON]))
def test_private_steps_are_the_same_under_all_engines(method):
    settings = {"example_privacy": DPSGD(1.0, 0.5), "max_rounds": 2, "clients_per_round": 3, "local_epochs": 2}
    one, many = (fit(make_client(method), engine=engine, **settings) for engine in (Sequential, Vectorised))
    assert all(torch.allclose(one.weights[name], many.weights[name], atol=1e-5) for name in one.weights)
    assert one.federation.options.example_privacy.spent == many.federation.options.example_privacy.spent
    for name in ("train/loss", "val/loss"):
        assert [row[name] for row in one.rows] == pytest.approx([row[name] for row in many.rows], abs=1e-4)
    for client, state in one.federation.clients.items():
        other = many.federation.clients[client].personal
        assert all(torch.allclose(state.personal[name], other[name], atol=1e-5) for name in state.personal)
    assert same_end(one, fit(make_client(method), engine=Processes, **settings))


@pytest.mark.parametrize("method", [FedAvg, Ditto])
def test_private_runs_resume_bit_for_bit_in_any_order_of_clients(method, tmp_path):
    dropping = partial(method, net=dropped)

    def made(**settings):
        return dropping(**{**settings, "net": dropped})

    check_order_and_resume(made, tmp_path, example_privacy=DPSGD(0.8, 0.5))


def linear(input_shape, num_classes):
    """Without anything that saturates."""
    return Net(nn.Linear(input_shape[0], 4), nn.Linear(4, num_classes))


def dropped(input_shape, num_classes):
    return Net(nn.Sequential(nn.Linear(input_shape[0], 5), nn.Tanh(), nn.Dropout(0.3)), nn.Linear(5, num_classes))


def test_dropout_of_single_samples_is_not_vectorised():
    private = DPSGD(1.0)
    with pytest.raises(MisconfigurationException, match="engine='vectorised' can't run FedAvg"):
        fit(make_client(net=dropped), engine=Vectorised, example_privacy=private)
    auto = fit(make_client(net=dropped), engine=Auto, example_privacy=private, max_rounds=1)
    assert same_end(auto, fit(make_client(net=dropped), example_privacy=private, max_rounds=1))


def test_batches_of_nobody_are_noise():
    """A client with a small share of each batch; most of its batches have nobody."""
    settings = {"batch_size": 1, "test_fraction": 0, "val_fraction": 0}
    for engine in (Sequential, Vectorised):
        run = fit(
            make_client(), blobs(40, 30, **settings), engine=engine, example_privacy=DPSGD(1.0, 0.1), local_steps=6,
            max_rounds=1, limit_val_batches=0,
        )  # fmt: skip
        assert run.federation.options.example_privacy.spent == {
            0: [Release(1.0, 1 / 40, 6)],
            1: [Release(1.0, 1 / 30, 6)],
        }


# Which phases are private


class Halves(FedAvg):
    """Trains its classifier in a phase that says that it stays, and then the rest."""

    example_level = True

    def local_phases(self):
        return [
            Phase("head", lambda name: "classifier" in name, stays=True),
            Phase("body", lambda name: "classifier" not in name),
        ]

    def is_shared(self, name):
        return "classifier" not in name


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_phase_that_stays_with_its_client_is_as_ever_and_spends_nothing(engine):
    loud = fit(make_client(Halves), example_privacy=DPSGD(9.0, 9.0), max_rounds=1, engine=engine)
    usual = fit(make_client(Halves), max_rounds=1, engine=engine)
    for client, state in usual.federation.clients.items():
        assert equal(loud.federation.clients[client].personal, state.personal)
    assert not equal(loud.weights, usual.weights)
    assert {len(releases) for releases in loud.federation.options.example_privacy.spent.values()} == {1}


def test_evaluation_after_training_on_a_copy_is_without_noise():
    """FedBABU's fine-tuning, which nobody learns of."""
    quiet = fit(make_client(FedBABU), example_privacy=DPSGD(0.0, 1e-9), max_rounds=1)
    assert quiet.rows[0]["val/acc"] > quiet.rows[0]["val_received/acc"]


# Who counts


class OneChanged(Altered):
    """A client's first sample isn't what data modules have checked."""

    value, who = 0.0, 1

    def alter(self, part, client, split):
        if split != "train" or client != self.who:
            return part
        x = part.x.clone()
        x[0] = self.value
        return Samples(x, part.y)


def with_value(value):
    data = blobs(24, 16, 30, data=OneChanged, batch_size=30)
    data.value = value
    return data


def everything_told(method, engine, value):
    """What the server gets in two rounds, and what of the rounds is public."""
    spy = Spy()
    run = fit(
        make_client(method, optimizer=PLAIN, net=linear), with_value(value), engine=engine, callbacks=[spy],
        local_steps=1, max_rounds=2, example_privacy=DPSGD(1.0, 0.2),
    )  # fmt: skip
    names = ["round", "cohort", "lr", "bytes/up", "bytes/down", "privacy/epsilon"]
    names += [name for name in run.rows[0] if name.startswith("clients")]
    told = {
        "cohorts": spy.cohorts,
        "senders": [list(updates) for updates in spy.updates],
        "entries": [[sorted(update) for update in updates.values()] for updates in spy.updates],
        "num_samples": [[int(update["num_samples"]) for update in updates.values()] for updates in spy.updates],
        "shares": run.federation.aggregator.state["shares"],
        "spent": run.federation.options.example_privacy.spent,
        "rows": [[row[name] for name in names] for row in run.rows],
    }
    return told, spy.updates[0]


@pytest.mark.parametrize("engine", all_but([Processes], [Sequential, Vectorised, Processes]))
@pytest.mark.parametrize("method", [FedAvg, partial(Ditto, personal_epochs=3)], ids=["FedAvg", "Ditto"])
def test_one_sample_changes_its_own_upload_by_the_bound_and_nothing_else(method, engine):
    told, usual = everything_told(method, engine, 0.5)
    assert told["senders"] == [[0, 1, 2]] * 2
    assert told["entries"] == [[["num_samples", "weights"]] * 3] * 2
    names = sorted(usual[1]["weights"])
    for value in (0.51, -3e38, math.nan, math.inf):
        others, first = everything_told(method, engine, value)
        assert others == told
        assert equal([first[0], first[2]], [usual[0], usual[2]])
        moved = flat(first[1]["weights"], names) - flat(usual[1]["weights"], names)
        # a rate of 0.5, one sample for another among all
        assert 0 < float(moved.norm()) <= 0.5 * 2 * 0.2 / told["num_samples"][0][1] * (1 + 1e-5)


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_sample_of_the_only_client_ends_no_run(engine):
    data = blobs(16, data=OneChanged)
    data.value, data.who = math.nan, 0
    run = fit(make_client(), data, engine=engine, example_privacy=DPSGD(1.0), max_rounds=2)
    assert [(row["clients"], row["clients_diverged"]) for row in run.rows] == [(1, 0), (1, 0)]


def test_uploads_that_are_not_finite_are_left_out_and_end_no_run():
    wild = make_client(optimizer=partial(SGD, lr=1e38))
    start = {name: tensor.clone() for name, tensor in wild.state_dict().items()}
    with pytest.warns(UserWarning, match="left out of the aggregation"):
        run = fit(wild, example_privacy=DPSGD(1e3), max_rounds=2)
    assert [(row["clients"], row["clients_diverged"]) for row in run.rows] == [(0, 4), (0, 4)]
    assert all(torch.equal(run.weights[name], tensor) for name, tensor in start.items())


@pytest.mark.parametrize("engine", [Sequential, Vectorised, Processes])
def test_what_stays_and_is_not_finite_is_told(engine):
    with pytest.warns(UserWarning, match="round 1: what stays with client 1 became NaN or infinite"):
        fit(make_client(Ditto), with_value(math.nan), engine=engine, example_privacy=DPSGD(1.0), max_rounds=1)


def test_what_stays_with_new_clients_and_is_not_finite_is_told():
    data = OneChanged(num_clients=2, new_clients=1, partitioner=Sizes(24, 16, 30), batch_size=5)
    data.value, data.who = math.nan, 2
    run = fit(make_client(Ditto), data, example_privacy=DPSGD(1.0), max_rounds=1)
    with pytest.warns(UserWarning, match="the loss or the weights of new clients 2 became NaN or infinite"):
        run.trainer.join(run.model, datamodule=data)


# Accounts


@pytest.mark.parametrize(
    ("work", "samples", "expected"),
    [
        (LocalWork(epochs=2, batch_size=5), 12, Draws(6, 5 / 12, 5.0)),
        (LocalWork(epochs=1, batch_size=20), 12, Draws(1, 1.0, 12.0)),
        (LocalWork(steps=7, batch_size=3), 12, Draws(7, 0.25, 3.0)),
        (LocalWork(epochs=3, batch_size=5), 0, Draws(0, 1.0, 1.0)),
    ],
    ids=["epochs", "larger than all", "steps", "nobody"],
)
def test_there_are_as_many_steps_as_batches(work, samples, expected):
    assert Draws.of(work, Phase(), samples) == pytest.approx(expected)


def test_epsilon_is_of_each_client_by_its_samples_and_steps(tmp_path):
    run = fit(make_client(), blobs(), tmp_path, example_privacy=DPSGD(1.0), clients_per_round=2, max_rounds=3)
    sizes = run.federation.sizes(range(4), "train")
    took = [[int(client) for client in row["cohort"].split()] for row in run.rows]
    for row in read_csv(run.folder / "clients.csv"):
        client = int(row["client"])
        n, rounds = sizes[client], sum(client in cohort for cohort in took)
        released = [Release(1.0, min(1, 5 / n), rounds * math.ceil(n / 5))] if rounds else []
        assert float(row["epsilon"]) == pytest.approx(epsilon(released, 0.1 / n))
    told = json.loads((run.folder / "summary.json").read_text())["privacy"]
    assert told["epsilon"] == max(float(row["epsilon"]) for row in read_csv(run.folder / "clients.csv"))
    assert told["unit"] == "sample" and told["accountant"] == "Rényi"
    values = [row["privacy/epsilon"] for row in run.rows]
    assert values == sorted(values) and values[-1] == told["epsilon"]


@pytest.mark.parametrize("method", [FedAvg, FedRep])
@pytest.mark.by_default("FedAvg")
def test_a_target_gets_the_least_noise_that_keeps_every_client_within_it(method, tmp_path):
    run = fit(make_client(method), blobs(), tmp_path, example_privacy=DPSGD(epsilon=3.0), max_rounds=3)
    sizes = run.federation.sizes(range(4), "train")
    ((z,),) = {
        tuple({release.noise_multiplier for release in own})
        for own in run.federation.options.example_privacy.spent.values()
    }

    def all_within(factor):
        return all(
            within(3.0, 0.1 / sizes[k], [Release(factor * z, q, steps) for z, q, steps in releases])
            for k, releases in run.federation.options.example_privacy.spent.items()
        )

    assert all_within(1) and not all_within(1 - 2e-4)
    told = json.loads((run.folder / "summary.json").read_text())["privacy"]
    assert (told["epsilon"], told["noise_multiplier"]) == (pytest.approx(3, rel=1e-3), z)
    tight = told["accountant"].startswith("privacy loss distributions")
    assert tight == has_pld(3.0) and tight == (told["epsilon"] == 3.0)
    # the noise of the steps is this one
    again = fit(make_client(method), blobs(), tmp_path, example_privacy=DPSGD(z), max_rounds=3)
    assert equal(run.federation.aggregator.state, again.federation.aggregator.state)


@pytest.mark.exhaustive
def test_a_target_is_of_all_rounds_also_after_resuming(tmp_path):
    settings = {"example_privacy": DPSGD(epsilon=3.0), "max_rounds": 4}
    whole = fit(make_client(), root=tmp_path / "whole", **settings)
    fit(make_client(), root=tmp_path / "halves", callbacks=[Pause(2)], **settings)
    resumed = fit(make_client(), root=tmp_path / "halves", ckpt_path="last", **settings)
    assert (
        same_end(whole, resumed)
        and resumed.federation.options.example_privacy.spent == whole.federation.options.example_privacy.spent
    )
    with pytest.raises(MisconfigurationException, match=r"epsilon=3\.0 is spent after 4 rounds"):
        fit(make_client(), root=tmp_path / "halves", ckpt_path="last", **{**settings, "max_rounds": 8})
    with pytest.raises(MisconfigurationException, match=r"other settings of trainer\.example_privacy\.epsilon"):
        fit(make_client(), root=tmp_path / "whole", ckpt_path="last", example_privacy=DPSGD(epsilon=9.0), max_rounds=5)


def test_all_engines_share_a_target_out_alike(tmp_path):
    given = {"example_privacy": DPSGD(epsilon=3.0), "max_rounds": 2}
    first, *others = (fit(make_client(), engine=kind, **given) for kind in (Sequential, Vectorised, Processes))
    assert all(
        other.federation.options.example_privacy.spent == first.federation.options.example_privacy.spent
        for other in others
    )


def test_resuming_goes_on_with_what_was_spent(tmp_path):
    settings = {"example_privacy": DPSGD(1.0), "max_rounds": 4}
    whole = fit(make_client(), root=tmp_path / "whole", **settings)
    fit(make_client(), root=tmp_path / "halves", callbacks=[Pause(2)], **settings)
    resumed = fit(make_client(), root=tmp_path / "halves", ckpt_path="last", **settings)
    assert (
        same_end(whole, resumed)
        and resumed.federation.options.example_privacy.spent == whole.federation.options.example_privacy.spent
    )
    with pytest.raises(MisconfigurationException, match=r"other settings of trainer\.example_privacy\.noise"):
        fit(make_client(), root=tmp_path / "halves", ckpt_path="last", example_privacy=DPSGD(2.0), max_rounds=5)


def test_other_noise_after_resuming_is_added(tmp_path):
    fit(make_client(), root=tmp_path, example_privacy=DPSGD(1.0), max_rounds=1)
    settings = {"example_privacy": DPSGD(2.0), "max_rounds": 2, "resume_changed": True}
    run = fit(make_client(), root=tmp_path, ckpt_path="last", **settings)
    assert [release.noise_multiplier for release in run.federation.options.example_privacy.spent[0]] == [1.0, 2.0]


# Class counts


COUNTED = DPSGD(2.0, counts_epsilon=0.7)


@pytest.mark.parametrize("engine", ENGINES)
def test_class_counts_have_noise_that_no_one_but_the_client_draws(engine):
    spy, plain = Spy(), Spy()
    run = fit(make_client(), aggregator=FedDisco(), engine=engine, callbacks=[spy], example_privacy=COUNTED)
    fit(make_client(), aggregator=FedDisco(), engine=engine, callbacks=[plain])
    told, true = (
        torch.stack([updates[k]["class_counts"] for updates in each.updates for k in sorted(updates)])
        for each in (spy, plain)
    )
    assert told.dtype == torch.int64 and told.min() >= 0 and not torch.equal(told, true)
    # rounds and clients have noise of their own
    assert len({tuple(row) for row in (told - true).tolist()}) > 6
    again = fit(make_client(), aggregator=FedDisco(), example_privacy=COUNTED)
    assert [row["privacy/epsilon"] for row in again.rows] == [row["privacy/epsilon"] for row in run.rows]
    assert torch.allclose(flat(again.weights, sorted(again.weights)), flat(run.weights, sorted(run.weights)), atol=1e-4)


def test_secure_counts_are_others_in_each_run():
    secure = DPSGD(2.0, counts_epsilon=0.5, noise="secure")
    one, other = (torch.stack([secure.noisy_counts(torch.tensor([5, 0, 30]), 1) for _ in range(20)]) for _ in range(2))
    assert not torch.equal(one, other) and one.min() == 0
    seeded = DPSGD(2.0, counts_epsilon=0.5)
    drawn = [seeded.noisy_counts(torch.tensor([5, 0, 30]), seed) for seed in (1, 1, 2)]
    assert torch.equal(*drawn[:2]) and not torch.equal(*drawn[1:])


def test_epsilon_covers_the_class_counts(tmp_path):
    run = fit(make_client(), root=tmp_path, aggregator=FedDisco(), example_privacy=COUNTED, max_rounds=3)
    told = run.logger.summary["privacy"]
    assert (told["counts_epsilon"], told["counts_epsilon_total"]) == (0.7, pytest.approx(2.1))
    assert told["noise_multiplier"] == 2.0
    steps = fit(make_client(), example_privacy=DPSGD(2.0), max_rounds=3)
    assert told["releases"] == steps.federation.privacy()["releases"]
    alone = steps.rows[-1]["privacy/epsilon"]
    # for few rounds both one after the other, and for many less
    assert told["epsilon"] == pytest.approx(alone + 2.1)
    many = [Release(2.0, 1.0, 100), Release(DPSGD(2.0, counts_epsilon=0.1).counts_release.noise_multiplier, 1.0, 100)]
    assert DPSGD(2.0, counts_epsilon=0.1).epsilon_of(many, 30) < epsilon(many[:1], 0.1 / 30) + 10
    for client, own in run.federation.options.example_privacy.spent.items():
        assert own == [
            *steps.federation.options.example_privacy.spent[client],
            COUNTED.counts_release._replace(steps=3),
        ]


@pytest.mark.parametrize("pure", [0.01, 0.7, 3.0, 20.0])
def test_a_pure_epsilon_is_no_worse_than_the_gaussian_that_is_counted_for_it(pure):
    z = DPSGD(1.0, counts_epsilon=pure).counts_release.noise_multiplier
    for share in (0.0, 0.2, 0.5, 0.9, 0.99):
        eps = share * pure
        # of randomized response, the worst of this epsilon
        worst = (math.exp(pure) - math.exp(eps)) / (1 + math.exp(pure))
        assert worst <= gaussian_delta(eps, z) * (1 + 1e-9)
    assert gaussian_delta(0.0, z) == pytest.approx((math.exp(pure) - 1) / (1 + math.exp(pure)))


def test_class_counts_without_noise_and_noise_without_counts_are_refused():
    refused("class_counts, .* or add noise to the counts by example_privacy.counts_epsilon", aggregator=FedDisco())
    refused("counts_epsilon is of class counts, for which .*WeightedAverage", example_privacy=COUNTED)
    refused("directions", make_client(NormalizedHead), aggregator=FedNH(), example_privacy=COUNTED)
    assert fit(make_client(), aggregator=FedAWA(init="disco"), example_privacy=COUNTED, max_rounds=1).rows


# Refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 must be 0 or more"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan must be 0 or more"),
        ({}, "noise_multiplier=None and trainer.example_privacy.epsilon=None: give one of them"),
        (
            {"noise_multiplier": 1.0, "epsilon": 2.0},
            "noise_multiplier=1.0 and trainer.example_privacy.epsilon=2.0: give",
        ),
        ({"epsilon": 0.0}, "epsilon=0.0 must be above 0"),
        ({"epsilon": math.inf}, "epsilon=inf must be above 0"),
        ({"noise_multiplier": 1.0, "clip": 0.0}, "clip=0.0 must be above 0"),
        ({"noise_multiplier": 1.0, "clip": math.inf}, "clip=inf must be above 0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta=1.0 must be above 0 and below 1"),
        ({"noise_multiplier": 1.0, "counts_epsilon": 0.0}, "counts_epsilon=0.0 must be from 1e-6"),
        ({"epsilon": 8.0, "counts_epsilon": 1.0}, "counts_epsilon=1.0 and .*give noise_multiplier"),
        ({"noise_multiplier": 1.0, "noise": "hidden"}, "noise='hidden' must be one of"),
        ({"noise_multiplier": 1.0, "samples_at_once": 0}, "samples_at_once=0 must be at least 1"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(MisconfigurationException, match=f"^trainer.example_privacy.{words}"):
        DPSGD(**settings)


def refused(words, client=None, data=None, **settings):
    with pytest.raises(MisconfigurationException, match=words):
        fit(client or make_client(), data, **{"example_privacy": DPSGD(1.0), **settings})


@pytest.mark.parametrize("method", [FedSAM, FedUV, partial(FedClassAvg, contrastive=False)], ids=str)
def test_methods_that_do_not_say_that_they_are_fit_are_refused(method):
    refused("example_level = True", make_client(method))


def test_a_subclass_does_not_inherit_that_it_is_fit():
    class Coupled(FedAvg):
        """Its loss could be of a batch."""

    class Telling(WeightedAverage):
        """It could look at data."""

    refused("Coupled .*example_level = True", make_client(Coupled))
    refused("Telling .*example_level = True", aggregator=Telling())


def test_what_tells_of_samples_beside_weights_is_refused():
    refused("control, which model=ControlVariates sends to", make_client(ControlVariates), aggregator=SCAFFOLD())
    refused("class_counts, which model=FedAvg sends", aggregator=FedDisco())
    refused("class_counts, which model=FedAvg sends", aggregator=FedAWA(init="disco"))
    refused("FedLAW .*example_level = True", aggregator=FedLAW())
    refused("sends nothing, so there is nothing to protect", make_client(Local))
    refused("asks clients", cohort=PowerOfChoice(3), clients_per_round=2)


def test_what_does_not_go_with_it_is_refused():
    refused("another unit", aggregator=DPAverage(noise_multiplier=1.0))
    refused("has BatchNorm, where samples meet", make_client(net=noisy))
    refused("gradient_clip_val=1.0 clips what", gradient_clip_val=1.0)
    refused("compile=true compiles steps of whole batches", compile=True, engine="vectorised")
    refused("detect_anomaly=true ends a run at a sample", detect_anomaly=True)
    refused("delta=0.1 must be below 1 / ", example_privacy=DPSGD(1.0, delta=0.1))


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_precisions_that_do_not_go_with_it_are_refused(engine):
    for precision in ("bf16-true", "16-true"):
        refused(
            f"^trainer.precision={precision} doesn't keep weights in single precision, .*; take 32-true, bf16-mixed or "
            "64-true.$",
            precision=precision, engine=engine,
        )  # fmt: skip
    # which Lightning replaces on a CPU where it is asked for by its name
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    refused(
        "^trainer.precision=16-mixed scales .*; take 32-true, bf16-mixed or 64-true.$", plugins=[scaled], engine=engine
    )


class Branching(FedAvg):
    """Looks at values, which many samples at once don't have."""

    example_level = True

    def loss(self, features, logits, target):
        loss = super().loss(features, logits, target)
        return loss if loss > 0 else -loss


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_a_step_that_cannot_be_taken_by_samples_is_refused(engine):
    refused("Branching", make_client(Branching), engine=engine)
