import json
import math
import sys
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy.stats import chi2

from federations import Pause, blobs, drawn_update, equal, fit, flat, make_client, noisy, read_csv, same_end
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import FedACG, FedAdagrad, FedAdam, FedAvgM, FedAWA, FedYogi
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines import Sequential, Vectorised
from pfl_lightning.methods import Ditto, FedAvg, FedPer
from pfl_lightning.privacy import DPAverage, Release, epsilon
from pfl_lightning.privacy.noise import grid_of
from pfl_lightning.selection import Poisson, Sampling, Uniform
from pfl_lightning.server.means import TrimmedMean

CLIENTS = 4


def started(sampling=None, rounds=10, clients=CLIENTS, model=None, seed=0, **settings):
    """An aggregator before its first round, and the model that it begins with."""
    model = model or make_client()
    aggregator = DPAverage(**{"noise_multiplier": 0.0} | settings)
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items() if model.is_shared(name)}
    aggregator.setup(Server(clients, shared, model, None, seed, rounds, sampling or Sampling(clients)))
    return aggregator, shared


def vector(weights):
    return flat(weights, sorted(weights)).double()


def moved_by(shared, *changes):
    """Updates that change a model by vectors."""
    names, updates = sorted(shared), {}
    for client, change in enumerate(changes):
        parts = torch.split(change, [shared[name].numel() for name in names])
        own = {n: shared[n] + p.view_as(shared[n]).to(shared[n].dtype) for n, p in zip(names, parts, strict=True)}
        updates[client] = {"weights": own}
    return updates


def directions(count, length, seed=0):
    drawn = torch.randn(count, len(vector(started()[1])), generator=torch.Generator().manual_seed(seed))
    return list(length * drawn / drawn.norm(dim=1, keepdim=True))


# Rule


def test_without_noise_and_bound_it_is_the_uniform_mean():
    aggregator, _ = started(clip=math.inf)
    average = WeightedAverage(weighting="uniform")
    updates = {client: drawn_update(make_client(), client, 10 * client) for client in range(CLIENTS)}
    aggregator.aggregate(updates, 0)
    average.aggregate(updates, 0)
    assert torch.allclose(vector(aggregator.state["weights"]), vector(average.state["weights"]), atol=1e-6)


def test_a_run_without_noise_and_bound_is_federated_averaging():
    whole = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9))
    usual = fit(make_client(), aggregator=WeightedAverage(weighting="uniform"))
    assert all(torch.allclose(whole.weights[n], usual.weights[n], atol=1e-5) for n in usual.weights)
    assert whole.rows[-1]["privacy/epsilon"] == math.inf


def test_a_lone_client_moves_the_model_by_the_bound_over_all():
    aggregator, shared = started(clip=0.25, server_lr=2.0)
    aggregator.aggregate(moved_by(shared, *directions(1, 3.0)), 0)
    step = vector(aggregator.state["weights"]) - vector(shared)
    assert float(step.norm()) == pytest.approx(2.0 * 0.25 / CLIENTS, rel=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(4), Sampling(0.8, 0.2)])
def test_who_came_does_not_change_what_sums_are_divided_by(sampling):
    change = directions(1, 0.5)
    for updates in (1, 2, 3):
        aggregator, shared = started(sampling, clip=1.0)
        aggregator.aggregate(moved_by(shared, *change * updates), 0)
        step = vector(aggregator.state["weights"]) - vector(shared)
        assert float(step.norm()) == pytest.approx(updates * 0.5 / sampling.expected, rel=1e-4)


def test_an_update_that_is_not_finite_counts_as_zero():
    aggregator, shared = started()
    updates = moved_by(shared, *directions(2, 0.5))
    next(iter(updates[1]["weights"].values())).view(-1)[0] = math.nan
    aggregator.aggregate(updates, 0)
    alone, _ = started()
    alone.aggregate({0: updates[0]}, 0)
    assert equal(aggregator.state["weights"], alone.state["weights"])


def test_clients_of_few_samples_count_less_and_nobody_more_than_once():
    aggregator, shared = started(sample_cap=20, clip=1.0)
    assert aggregator.needs == {"weights", "num_samples"}
    updates = moved_by(shared, *directions(3, 5.0))
    for client, size in enumerate((5, 20, 5000)):
        only, _ = started(sample_cap=20, clip=1.0)
        only.aggregate({client: updates[client] | {"num_samples": torch.tensor(size)}}, 0)
        step = vector(only.state["weights"]) - vector(shared)
        assert float(step.norm()) == pytest.approx((0.25, 1, 1)[client] / CLIENTS, rel=1e-5)


def test_tied_parameters_count_once_and_stay_tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.classifier = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False)
            self.classifier.weight = self.features.weight

    model = make_client()
    model.net = Tied()
    aggregator, _ = started(model=model, noise_multiplier=1.0)
    aggregator.aggregate({}, 0)
    one, other = aggregator.state["weights"].values()
    assert torch.equal(one, other) and aggregator.entries.sizes == [36]


# A server's step behind the noise


STEPS = [partial(FedAvgM, server_lr=0.5), FedACG, FedAdagrad, FedAdam, FedYogi]


@pytest.mark.parametrize("step", STEPS)
def test_without_noise_and_bound_it_is_that_server_with_the_uniform_mean(step):
    """To rounding: changes are added up in float64 here, and models in float32 there."""
    whole = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9, server=step()))
    usual = fit(make_client(), aggregator=step(weighting="uniform"))
    assert all(torch.allclose(whole.weights[n], usual.weights[n], atol=1e-4) for n in usual.weights)
    plain = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9))
    assert not all(torch.allclose(whole.weights[n], plain.weights[n], atol=1e-3) for n in usual.weights)


@pytest.mark.parametrize("step", STEPS)
def test_the_step_is_of_the_noisy_mean_and_of_nothing_else(step):
    """Post-processing: from the models of a run without a server behind the noise, its models follow."""
    changes = directions(2, 3.0)
    behind, shared = started(noise_multiplier=1.0, server=step())
    mean, _ = started(noise_multiplier=1.0)
    alone = step()
    alone.setup(Server(CLIENTS, shared, make_client(), None, 0))
    for round in range(3):
        mean.state["weights"] = dict(behind.state["weights"])
        mean.aggregate(moved_by(behind.state["weights"], *changes), round)
        alone.move(dict(mean.state["weights"]))
        behind.aggregate(moved_by(behind.state["weights"], *changes), round)
        assert equal(behind.state["weights"], alone.state["weights"])
    assert behind.privacy()["epsilon"] == mean.privacy()["epsilon"]


@pytest.mark.parametrize("step", [FedAvgM, FedAdam])
def test_moments_resume_bit_for_bit(step, tmp_path):
    def private():
        return DPAverage(noise_multiplier=0.5, server=step())

    settings = {"cohort": Poisson(0.5), "max_rounds": 4}
    whole = fit(make_client(), blobs(), tmp_path / "whole", private(), **settings)
    fit(make_client(), blobs(), tmp_path / "halves", private(), callbacks=[Pause(2)], **settings)
    resumed = fit(make_client(), blobs(), tmp_path / "halves", private(), "last", **settings)
    assert same_end(whole, resumed)
    assert equal(whole.federation.aggregator.state["server"]["m"], resumed.federation.aggregator.state["server"]["m"])
    assert resumed.federation.aggregator.name == f"DPAverage+{step.__name__}"


# Sensitivity and noise


@pytest.mark.parametrize("clip_by", ["model", "entry"])
@pytest.mark.parametrize("length", [0.0, 1e-4, 0.3, 1e6])
def test_two_federations_that_differ_in_a_client_differ_by_no_more_than_the_bound(length, clip_by):
    changes = [*directions(3, 0.4), *directions(1, length, seed=1)]
    ends = []
    for count in (3, 4):
        aggregator, shared = started(clip=0.3, clip_by=clip_by)
        aggregator.aggregate(moved_by(shared, *changes[:count]), 0)
        ends.append(CLIENTS * vector(aggregator.state["weights"]))
    # float32 models
    distance = float((ends[1] - ends[0]).norm())
    assert distance <= 0.3 + 1e-5
    assert length < 1 or clip_by == "entry" or distance > 0.299


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_the_noise_has_the_variance_that_is_accounted_for(quantile):
    values = []
    for round in range(40):
        aggregator, shared = started(noise_multiplier=0.8, clip=0.5, quantile=quantile, count_noise=0.6)
        logs = aggregator.aggregate({}, round)
        values.append((vector(aggregator.state["weights"]) - vector(shared)) / logs["noise_std"])
        z = 0.8 if quantile is None else (0.8**-2 - 1.2**-2) ** -0.5
        assert logs["noise_std"] == pytest.approx(z * 0.5 / CLIENTS)
    noise = torch.cat(values)
    low, high = chi2.ppf([0.001, 0.999], len(noise))
    assert low < float((noise**2).sum()) < high
    assert abs(float(noise.mean())) < 4 / len(noise) ** 0.5
    # rounds have noise of their own
    assert abs(float(torch.corrcoef(torch.stack(values))[0, 1:].mean())) < 0.2


def test_noise_and_bound_in_a_run():
    settings = {"clip": 0.2, "clip_by": "model"}
    noisy_run = fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0, **settings), max_rounds=1)
    clean = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, **settings), max_rounds=1)
    free = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.0, clip=1e9), max_rounds=1)
    names = sorted(clean.weights)
    noise = (flat(noisy_run.weights, names) - flat(clean.weights, names)).double() / (0.2 / CLIENTS)
    low, high = chi2.ppf([0.001, 0.999], len(noise))
    assert low < float((noise**2).sum()) < high
    start = flat(make_client().state_dict(), names)
    moved, unbounded = ((flat(run.weights, names) - start).norm() for run in (clean, free))
    assert moved <= 0.2 + 1e-6 < unbounded


class Without(FederatedCallback):
    """Lets a client contribute nothing."""

    def on_aggregate_start(self, trainer, federation, updates):
        del updates[3]


@pytest.mark.parametrize("settings", [{}, {"clip_by": "entry"}, {"sample_cap": 5}], ids=str)
def test_a_client_moves_a_run_by_no_more_than_the_bound(settings):
    ends = []
    for callbacks in ([], [Without()]):
        aggregator = DPAverage(noise_multiplier=1.0, clip=0.2, **settings)
        ends.append(fit(make_client(), aggregator=aggregator, callbacks=callbacks, max_rounds=1).weights)
    moved = flat(ends[0], sorted(ends[0])) - flat(ends[1], sorted(ends[1]))
    # which it reaches, all of it or in most entries
    assert 0.15 < CLIENTS * float(moved.norm()) <= 0.2 + 1e-5


def test_noise_is_of_the_seed_and_the_round():
    ends = {}
    for seed, round in [(0, 0), (0, 1), (1, 0), (0, 0)]:
        aggregator, _ = started(noise_multiplier=1.0, seed=seed)
        aggregator.aggregate({}, round)
        end = aggregator.state["weights"]
        assert equal(ends.setdefault((seed, round), end), end)
    assert len({vector(end)[0].item() for end in ends.values()}) == 3


@pytest.mark.parametrize("settings", [{}, {"quantile": 0.5, "count_noise": 2.0}], ids=str)
def test_secure_noise_is_of_nothing_that_a_run_keeps(settings):
    ends = []
    for _ in range(2):
        aggregator, _ = started(noise_multiplier=1.0, noise="secure", **settings)
        aggregator.aggregate({}, 0)
        ends.append(vector(aggregator.state["weights"]))
    assert not torch.equal(*ends)
    assert aggregator.state.keys() == {"weights", "clip", "releases"}


def test_secure_noise_has_the_variance_that_is_accounted_for():
    aggregator, shared = started(noise_multiplier=2.0, clip=0.5, noise="secure")
    squares = []
    for round in range(30):
        aggregator.state["weights"] = shared
        aggregator.aggregate({}, round)
        squares.append((vector(aggregator.state["weights"]) - vector(shared)).square().mean())
    count = 30 * len(vector(shared))
    assert chi2.ppf(1e-6, count) < count * float(sum(squares)) / 30 * CLIENTS**2 < chi2.ppf(1 - 1e-6, count)


def test_sums_that_get_secure_noise_lie_on_its_grid(monkeypatch):
    """Which results can occur doesn't tell of the sum below the noise; without noise drawn, the sum itself is seen."""
    monkeypatch.setattr("pfl_lightning.privacy.dp_average.secure_normal", lambda size: torch.zeros(size).double())
    kept, step = [], grid_of(1.0)
    aggregator, shared = started(noise_multiplier=1.0, noise="secure")
    monkeypatch.setattr(aggregator.entries, "model", lambda x, *others: kept.append(x) or shared)
    aggregator.aggregate(moved_by(shared, *directions(CLIENTS, 3.0)), 0)
    total = CLIENTS * (kept[0] - aggregator.entries.vector(shared))
    steps = total / step
    assert total.norm() > 0.5 and (steps - steps.round()).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("noise", "deployed", "secure"),
    [(None, False, False), (None, True, True), ("seeded", True, False), ("secure", False, True)],
)
def test_deployments_draw_secure_noise_unless_told_otherwise(noise, deployed, secure):
    aggregator, shared = started(noise_multiplier=1.0, noise=noise)
    aggregator.setup(Server(CLIENTS, shared, make_client(), None, 0, 10, Sampling(CLIENTS), deployed))
    told = aggregator.privacy()
    assert (told["noise"] == "secure") == secure
    assert ("seed" in told["not_covered"]) != secure


@pytest.mark.parametrize("start", [0.001, 50.0])
def test_a_learnt_bound_comes_to_the_quantile_from_below_and_from_above(start):
    changes = [length * change for length, change in zip(np.linspace(1, 2, 20), directions(20, 1.0), strict=True)]
    settings = {"clip": start, "quantile": 0.5, "noise_multiplier": 0.5, "count_noise": 1.0}
    aggregator, shared = started(clients=20, **settings)
    for round in range(150):
        aggregator.state["weights"] = shared
        logs = aggregator.aggregate(moved_by(shared, *changes), round)
    assert aggregator.state["clip"] == pytest.approx(1.5, rel=0.15)
    assert logs["clipped"] == pytest.approx(0.5, abs=0.3)


# Accounts


def test_epsilon_grows_as_rounds_are_released():
    run = fit(make_client(), aggregator=DPAverage(noise_multiplier=2.0), max_rounds=3)
    expected = [epsilon([Release(2.0, 1.0, steps)], 0.1 / CLIENTS) for steps in (1, 2, 3)]
    assert [row["privacy/epsilon"] for row in run.rows] == expected == sorted(expected)
    row = run.rows[0]
    assert row["privacy/delta"] == 0.1 / CLIENTS and row["privacy/sampling"] == "no amplification"
    assert row["privacy/adjacency"].startswith("zero-out") and "own model" in row["privacy/not_covered"]


def test_record_and_summary_say_what_is_guaranteed(tmp_path):
    run = fit(make_client(), blobs(), tmp_path, aggregator=DPAverage(noise_multiplier=1.0), cohort=Poisson(0.5))
    rows = read_csv(run.folder / "rounds.csv")
    told = json.loads((run.folder / "summary.json").read_text())["privacy"]
    assert float(rows[-1]["privacy/epsilon"]) == told["epsilon"] == epsilon([Release(1.0, 0.5, 3)], 0.025)
    for name in ("delta", "adjacency", "sampling", "noise", "not_covered"):
        assert all(row[f"privacy/{name}"] == str(told[name]) for row in rows)
    assert told["unit"] == "client" and told["releases"] == 3 and told["sampling"].startswith("Poisson, rate 0.5, ")
    assert "epsilon_tight" not in told or told["epsilon_tight"] < told["epsilon"]


def test_nothing_is_said_where_nothing_is_guaranteed(tmp_path):
    run = fit(make_client(), blobs(), tmp_path, max_rounds=1)
    assert not [name for name in run.rows[0] if name.startswith("privacy/")]
    assert "privacy" not in json.loads((run.folder / "summary.json").read_text())


@pytest.mark.parametrize("cohort", [Poisson(0.5), Uniform()])
def test_a_target_is_reached_with_the_last_round(cohort):
    run = fit(make_client(), aggregator=DPAverage(epsilon=3.0), cohort=cohort, max_rounds=4)
    values = [row["privacy/epsilon"] for row in run.rows]
    assert values == sorted(values) and 2.999 < values[-1] <= 3.0 < 2 * values[1]


def test_a_target_by_privacy_loss_distributions_needs_less_noise_and_says_so(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting", reason="the extra privacy")
    private = {"cohort": Poisson(0.5), "max_rounds": 4}
    run = fit(make_client(), blobs(), tmp_path / "tight", DPAverage(epsilon=3.0), **private)
    told = run.logger.summary["privacy"]
    assert told["accountant"].startswith("privacy loss distributions") and told["epsilon"] == 3.0
    assert 2.999 < told["epsilon_tight"] <= 3.0
    with pytest.raises(MisconfigurationException, match=r"epsilon=3\.0 is spent after 4 rounds"):
        fit(make_client(), blobs(), tmp_path / "tight", DPAverage(epsilon=3.0), "last", **private | {"max_rounds": 5})
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    coarse = fit(make_client(), blobs(), tmp_path / "coarse", DPAverage(epsilon=3.0), **private)
    assert coarse.logger.summary["privacy"]["accountant"] == "Rényi"
    assert coarse.federation.aggregator.z > 1.05 * run.federation.aggregator.z


def test_a_spent_target_ends_a_longer_run(tmp_path):
    fit(make_client(), blobs(), tmp_path, aggregator=DPAverage(epsilon=3.0), max_rounds=2)
    with pytest.raises(MisconfigurationException, match=r"epsilon=3.0 is spent after 2 rounds"):
        fit(make_client(), blobs(), tmp_path, DPAverage(epsilon=3.0), ckpt_path="last", max_rounds=4)


@pytest.mark.parametrize(
    "aggregator", [{"epsilon": 4.0}, {"noise_multiplier": 0.3, "quantile": 0.5, "count_noise": 0.5}], ids=str
)
@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_it_resumes_bit_for_bit_with_its_epsilon(method, aggregator, tmp_path):
    settings = {"cohort": Poisson(0.5), "max_rounds": 4}
    whole = fit(make_client(method), blobs(), tmp_path / "whole", DPAverage(**aggregator), **settings)
    fit(make_client(method), blobs(), tmp_path / "halves", DPAverage(**aggregator), callbacks=[Pause(2)], **settings)
    resumed = fit(make_client(method), blobs(), tmp_path / "halves", DPAverage(**aggregator), "last", **settings)
    assert same_end(whole, resumed) and resumed.federation.aggregator.state["releases"][0][2] == 4
    assert resumed.logger.summary["privacy"] == whole.logger.summary["privacy"]


@pytest.mark.parametrize(("noise", "lost"), [("seeded", 0), ("secure", 2)])
def test_rounds_that_were_lost_count_where_their_noise_was_another(noise, lost, tmp_path):
    def private():
        return DPAverage(noise_multiplier=2.0, noise=noise)

    class Ends(FederatedCallback):
        """In the fourth round, before there is a checkpoint of the third."""

        def on_round_start(self, trainer, federation, cohort):
            if federation.round == 3:
                raise ZeroDivisionError

    def every(rounds):
        return ModelCheckpoint(every_n_epochs=rounds, save_top_k=-1, filename="{epoch}", save_last=False)

    with pytest.raises(ZeroDivisionError):
        fit(make_client(), blobs(), tmp_path / "once", private(), callbacks=[Ends(), every(2)], max_rounds=4)
    (checkpoint,) = tmp_path.rglob("epoch=1*.ckpt")
    resumed = fit(make_client(), blobs(), tmp_path / "once", private(), checkpoint, max_rounds=4)
    # of two rounds: the third, which is recorded, and the fourth, which had begun
    assert resumed.rows[-1]["privacy/epsilon"] == epsilon([Release(2.0, 1.0, 4 + lost)], 0.025)
    # a second interruption, from which the same checkpoint goes on: the record has been cut back, and all counts
    with pytest.raises(ZeroDivisionError):
        fit(make_client(), blobs(), tmp_path / "twice", private(), callbacks=[Ends(), every(2)], max_rounds=4)
    (checkpoint,) = (tmp_path / "twice").rglob("epoch=1*.ckpt")
    with pytest.raises(ZeroDivisionError):
        fit(
            make_client(),
            blobs(),
            tmp_path / "twice",
            private(),
            checkpoint,
            callbacks=[Ends(), every(9)],
            max_rounds=4,
        )
    twice = fit(make_client(), blobs(), tmp_path / "twice", private(), checkpoint, max_rounds=4)
    assert twice.rows[-1]["privacy/epsilon"] == epsilon([Release(2.0, 1.0, 4 + 2 * lost)], 0.025)
    longer = fit(make_client(), blobs(), tmp_path / "once", private(), "last", max_rounds=5)
    # one that had come to its end has lost nothing
    assert longer.rows[-1]["privacy/epsilon"] == epsilon([Release(2.0, 1.0, 5 + lost)], 0.025)


def test_rounds_with_other_noise_are_added_to_those_before(tmp_path):
    first, second = DPAverage(noise_multiplier=1.0), DPAverage(noise_multiplier=2.0)
    fit(make_client(), blobs(), tmp_path, first, max_rounds=2)
    run = fit(make_client(), blobs(), tmp_path, second, ckpt_path="last", resume_changed=True, max_rounds=3)
    expected = epsilon([Release(1.0, 1.0, 2), Release(2.0)], 0.025)
    assert run.rows[-1]["privacy/epsilon"] == expected > run.rows[-2]["privacy/epsilon"]


# Federations


@pytest.mark.parametrize("method", [FedAvg, FedPer, Ditto])
def test_engines_agree(method):
    one, other = (
        fit(
            make_client(method),
            aggregator=DPAverage(noise_multiplier=0.5, quantile=0.5, count_noise=1.0),
            engine=engine,
        )
        for engine in (Sequential, Vectorised)
    )
    assert all(torch.allclose(one.weights[n], other.weights[n], atol=1e-4) for n in one.weights)
    assert [row["privacy/epsilon"] for row in one.rows] == [row["privacy/epsilon"] for row in other.rows]


def test_a_round_of_nobody_is_noise(recwarn):
    run = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.5), cohort=Poisson(0.2), max_rounds=8)
    empty = [k for k, row in enumerate(run.rows) if not row["cohort"]]
    assert 0 < len(empty) < 8
    assert run.federation.aggregator.state["releases"] == [[0.5, 0.2, 8]]
    # what validation sees has moved
    assert all(run.rows[k]["val/loss"] != run.rows[k - 1]["val/loss"] for k in empty if k)
    assert not [warning for warning in recwarn if "leaves the federation" in str(warning.message)]


class Diverging(FedAvg):
    client_level = True

    def loss(self, features, logits, target):
        return super().loss(features, logits, target) * math.nan


def test_clients_that_diverge_are_zero_and_end_nothing():
    run = fit(make_client(Diverging), aggregator=DPAverage(noise_multiplier=0.5), max_rounds=2)
    assert [row["clients_diverged"] for row in run.rows] == [4, 4]
    nobody, _ = started(noise_multiplier=0.5, seed=run.federation.seed)
    for round in range(2):
        nobody.aggregate({}, round)
    assert equal(run.federation.aggregator.state["weights"], nobody.state["weights"])


def test_nobody_sends_how_many_samples_it_has():
    run = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.5), max_rounds=1)
    usual = fit(make_client(), max_rounds=1)
    assert usual.rows[0]["bytes/up"] - run.rows[0]["bytes/up"] == 8 * CLIENTS
    capped = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.5, sample_cap=10), max_rounds=1)
    assert capped.rows[0]["bytes/up"] == usual.rows[0]["bytes/up"]


def test_wider_weights_of_clients_make_a_wider_model():
    run = fit(make_client(), aggregator=DPAverage(noise_multiplier=0.5), precision="64-true", max_rounds=2)
    assert {tensor.dtype for tensor in run.federation.aggregator.state["weights"].values()} == {torch.float64}


# Refusals


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "give one of them"),
        ({"noise_multiplier": 1.0, "epsilon": 8.0}, "give one of them"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 must be"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be"),
        ({"epsilon": 8.0, "delta": 1.0}, "delta=1.0 must be"),
        ({"epsilon": 8.0, "clip": 0.0}, "clip=0.0 must be"),
        ({"epsilon": 8.0, "clip": math.inf}, "clip=inf bounds nothing"),
        ({"epsilon": 8.0, "clip": math.nan}, "clip=nan must be"),
        ({"epsilon": 8.0, "clip_by": "layer"}, "clip_by='layer' must be"),
        ({"epsilon": 8.0, "quantile": 1.0}, "quantile=1.0 must be"),
        ({"epsilon": 8.0, "quantile": 0.5, "clip_by": "entry"}, "quantile=0.5 follows"),
        ({"epsilon": 8.0, "clip_lr": 0.0}, "clip_lr=0.0 must be"),
        ({"epsilon": 8.0, "count_noise": -1.0}, "count_noise=-1.0 must be"),
        ({"epsilon": 8.0, "sample_cap": 0}, "sample_cap=0 must be"),
        ({"epsilon": 8.0, "server_lr": 0.0}, "server_lr=0.0 must be"),
        ({"epsilon": 8.0, "server": WeightedAverage()}, "server=WeightedAverage makes no step"),
        ({"epsilon": 8.0, "server": FedAWA()}, "server=FedAWA makes no step"),
        ({"epsilon": 8.0, "server": FedAdam(mean=TrimmedMean(0.1))}, r"server\.mean=TrimmedMean"),
        ({"epsilon": 8.0, "server": FedAdam(), "server_lr": 0.1}, "server_lr=0.1 beside aggregator.server=FedAdam"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        DPAverage(**settings)


def test_a_federation_that_it_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"delta=0.25 must be below 1 / 4"):
        started(noise_multiplier=1.0, delta=0.25)
    with pytest.raises(MisconfigurationException, match=r"count_noise=0.2 must be above 0.5"):
        started(noise_multiplier=1.0, quantile=0.5)
    with pytest.raises(MisconfigurationException, match=r"epsilon=8.0 is shared out"):
        started(noise_multiplier=None, epsilon=8.0, rounds=None)
    with pytest.raises(MisconfigurationException, match=r"model\.buffers='average': clients share"):
        started(model=make_client(net=noisy))
    assert started(model=make_client(net=noisy, buffers="local"))
