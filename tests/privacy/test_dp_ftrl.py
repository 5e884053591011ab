"""Averages with correlated noise."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from federations import Pause, blobs, equal, fit, flat, make_client, same_end
from pfl_lightning import Server
from pfl_lightning.aggregators import FedAdam
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.methods import FedPer
from pfl_lightning.privacy import DPFTRL, DPAverage, Release, epsilon
from pfl_lightning.privacy.accountant import gaussian_epsilon
from pfl_lightning.privacy.dp_ftrl import inverse, square_root, squared_sensitivity
from pfl_lightning.selection import Cyclic, Poisson, Sampling, Uniform

CLIENTS = 4


def started(rounds=8, sampling=None, **settings):
    model = make_client()
    aggregator = DPFTRL(**{"separation": 4, "noise_multiplier": 1.0, "clip": 0.5} | settings)
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    aggregator.setup(Server(CLIENTS, shared, model, None, 0, rounds, sampling or Sampling(1)))
    return aggregator, shared


def banded(coefficients, rounds):
    """The matrix of the encoder, lower triangular and the same along diagonals."""
    matrix = np.zeros((rounds, rounds))
    for offset, weight in enumerate(coefficients):
        matrix += weight * np.eye(rounds, k=-offset)
    return matrix


# Sensitivity


@pytest.mark.parametrize("separation", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 4, 7])
def test_the_sensitivity_is_the_largest_of_all_ways_to_take_part(separation, times, rounds):
    for bands in range(1, separation + 1):
        matrix = banded(square_root(bands), rounds)
        worst = 0.0
        for count in range(1, times + 1):
            for chosen in combinations(range(rounds), count):
                if all(b - a >= separation for a, b in pairwise(chosen)):
                    # changes may point anywhere: columns without a common row are at right angles, whatever they carry
                    gram = matrix[:, chosen].T @ matrix[:, chosen]
                    assert np.allclose(gram, np.diag(np.diag(gram)))
                    worst = max(worst, float(np.trace(gram)))
        assert squared_sensitivity(square_root(bands), rounds, times, separation) == pytest.approx(worst)


def test_coefficients_are_of_the_square_root_of_sums():
    whole = banded(square_root(12), 12)
    assert np.allclose(whole @ whole, np.tril(np.ones((12, 12))))
    for bands in (1, 3, 12):
        back = np.linalg.inv(banded(square_root(bands), 12))
        assert np.allclose(back[:, 0], inverse(square_root(bands), 12))


def test_epsilon_is_that_of_one_gaussian_mechanism():
    for rounds, times, columns in ((8, None, 2), (8, 1, 1), (3, None, 1)):
        aggregator, _ = started(rounds, participations=times, noise_multiplier=3.0)
        for round in range(rounds):
            aggregator.aggregate({}, round)
        norms = [sum(c * c for c in square_root(4)[: rounds - 4 * j]) for j in range(columns)]
        assert aggregator.privacy()["epsilon"] == gaussian_epsilon(3.0 / math.sqrt(sum(norms)), 0.1 / CLIENTS)
        assert aggregator.privacy()["accountant"] == "Gaussian, exact"


def test_it_has_less_noise_in_sums_than_a_tree_at_the_same_epsilon():
    """In one epoch of 100 rounds, against the tree that Google's accountant knows."""
    dp_accounting = pytest.importorskip("dp_accounting", reason="the extra privacy")
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(dp_accounting.SingleEpochTreeAggregationDpEvent(4.0, 100))
    height = 7
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.96, abs=0.25)
    # whose sum of seven numbers at most a client is in
    exact = gaussian_epsilon(4.0 / math.sqrt(height), 1e-5)
    assert exact <= accountant.get_epsilon(1e-5) * 1.001
    z = math.sqrt(squared_sensitivity(square_root(100), 100, 1, 100)) * 4.0 / math.sqrt(height)
    weights = np.array(inverse(square_root(100), 100))
    errors = z * np.sqrt(np.cumsum(np.cumsum(weights) ** 2))
    # of a prefix that takes six nodes of the tree, 63 rounds
    assert errors[62] < 0.7 * 4.0 * math.sqrt(6)
    # and than independent noise
    assert errors[99] < 0.5 * gaussian_z(exact) * math.sqrt(100)


def gaussian_z(target):
    """The noise multiplier of a single release with some epsilon."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_epsilon(middle, 1e-5) <= target else (middle, high)
    return high


def test_lost_rounds_add_no_more_than_is_counted():
    """Rounds 2 and 3 of 6 are made twice, with fresh noise the second time: two more rows of the encoder."""
    matrix, lost = banded(square_root(3), 6), [2, 3]
    whole, worst = np.vstack([matrix, matrix[lost]]), 0.0
    for count in (1, 2):
        for chosen in combinations(range(6), count):
            if all(b - a >= 3 for a, b in pairwise(chosen)):
                # with changes that point to the worst side, one sign a time; the lost rounds may have had another one
                worst = max(worst, float(np.abs(whole[:, chosen]).sum(1) @ np.abs(whole[:, chosen]).sum(1)))
    assert worst <= squared_sensitivity(square_root(3), 6, 2, 3) + len(lost)


# Noise


def test_noise_is_the_decoded_noise_of_rounds():
    """From the noise of separate rounds, that of the rule follows by the inverse matrix."""
    aggregator, shared = started(separation=3, bands=3, sampling=Sampling(1))
    plain = DPAverage(noise_multiplier=1.0, clip=0.5)
    plain.setup(Server(CLIENTS, shared, make_client(), None, 0, 8, Sampling(1)))
    ours, fresh = [], []
    for round in range(8):
        for server, noise in ((aggregator, ours), (plain, fresh)):
            server.state["weights"] = dict(shared)
            server.aggregate({}, round)
            noise.append(flat(server.state["weights"], sorted(shared)).double() - flat(shared, sorted(shared)).double())
    expected = np.linalg.inv(banded(square_root(3), 8)) @ torch.stack(fresh).numpy()
    assert np.allclose(torch.stack(ours).numpy(), expected, atol=1e-5)
    assert len(aggregator.state["noise"]) == 2


def test_the_recorded_deviation_is_that_of_the_noise():
    aggregator, _ = started(separation=3, noise_multiplier=2.0)
    for round in range(5):
        logs = aggregator.aggregate({}, round)
        weights = inverse(square_root(3), round + 1)
        assert logs["noise_std"] == pytest.approx(2.0 * 0.5 * math.sqrt(sum(w * w for w in weights)))


def test_with_a_separation_of_one_it_is_an_average_without_amplification():
    ours = fit(make_client(), aggregator=DPFTRL(1, noise_multiplier=1.0), cohort=Uniform())
    usual = fit(make_client(), aggregator=DPAverage(noise_multiplier=1.0))
    assert equal(ours.weights, usual.weights)
    for ours_row, row in zip(ours.rows, usual.rows, strict=True):
        assert ours_row["privacy/epsilon"] == pytest.approx(row["privacy/epsilon"], rel=1e-9)


# Runs


ROUNDS = {"cohort": Cyclic(), "clients_per_round": 1, "max_rounds": 6}


SETTINGS = {"mean": {"epsilon": 4.0}, "FedAdam": {"noise_multiplier": 0.5, "server": FedAdam()}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_resumes_bit_for_bit_with_its_noise(settings, tmp_path):
    def private():
        return DPFTRL(3, clip=0.3, **settings)

    whole = fit(make_client(FedPer), blobs(), tmp_path / "whole", private(), **ROUNDS)
    fit(make_client(FedPer), blobs(), tmp_path / "halves", private(), callbacks=[Pause(4)], **ROUNDS)
    resumed = fit(make_client(FedPer), blobs(), tmp_path / "halves", private(), "last", **ROUNDS)
    assert same_end(whole, resumed)
    state = resumed.federation.aggregator.state
    assert all(map(torch.equal, state["noise"], whole.federation.aggregator.state["noise"]))
    assert state["taken"] == {0: [2, 4], 1: [2, 5], 2: [1, 2], 3: [1, 3]}
    told = resumed.logger.summary["privacy"]
    assert told == whole.logger.summary["privacy"] and told["releases"] == 6
    assert "noise of the last rounds" in told["not_covered"] and "2 times, 3 rounds apart" in told["sampling"]
    assert "epsilon" not in settings or told["epsilon"] == pytest.approx(4.0)


def test_secure_noise_is_in_checkpoints_alone(tmp_path):
    runs = [
        fit(make_client(), blobs(), tmp_path / name, DPFTRL(3, noise_multiplier=0.5, noise="secure"), **ROUNDS)
        for name in ("one", "other")
    ]
    assert not equal(runs[0].weights, runs[1].weights)
    noise = runs[0].federation.aggregator.state["noise"]
    assert len(noise) == 2 and not torch.equal(noise[0], runs[1].federation.aggregator.state["noise"][0])
    # which is what a run goes on with
    saved = torch.load(next((tmp_path / "one").rglob("last.ckpt")), weights_only=True)["federation"]["aggregator"]
    assert torch.equal(saved["noise"][1], noise[1])
    number = f"{float(noise[1][0]):.6g}"[:7]
    files = [path for path in (tmp_path / "one").rglob("*") if path.suffix in (".csv", ".json", ".yaml")]
    assert files and not [path for path in files if number in path.read_text()]


@pytest.mark.parametrize(("noise", "lost"), [("seeded", 0), ("secure", 2)])
def test_lost_rounds_count_as_further_times(noise, lost, tmp_path):
    class Ends(FederatedCallback):
        """In the fourth round, before there is a checkpoint of the third."""

        def on_round_start(self, trainer, federation, cohort):
            if federation.round == 3:
                raise ZeroDivisionError

    def private():
        return DPFTRL(3, noise_multiplier=2.0, noise=noise)

    every = ModelCheckpoint(every_n_epochs=2, save_top_k=-1, filename="{epoch}", save_last=False)
    with pytest.raises(ZeroDivisionError):
        fit(make_client(), blobs(), tmp_path, private(), callbacks=[Ends(), every], **ROUNDS)
    (checkpoint,) = tmp_path.rglob("epoch=1*.ckpt")
    resumed = fit(make_client(), blobs(), tmp_path, private(), checkpoint, **ROUNDS)
    norms = squared_sensitivity(square_root(3), 6, 2, 3) + lost
    expected = epsilon([Release(2.0 / math.sqrt(norms))], 0.025)
    assert resumed.rows[-1]["privacy/epsilon"] == pytest.approx(expected)


def test_rounds_of_another_plan_do_not_follow(tmp_path):
    fit(make_client(), blobs(), tmp_path, DPFTRL(3, noise_multiplier=1.0), callbacks=[Pause(2)], **ROUNDS)
    with pytest.raises(MisconfigurationException, match="resume with the former"):
        fit(make_client(), blobs(), tmp_path, DPFTRL(3, noise_multiplier=2.0), "last", resume_changed=True, **ROUNDS)


# Refusals


def test_who_comes_too_soon_or_too_often_is_refused():
    aggregator, shared = started(separation=3, participations=2, rounds=None)
    update = {1: {"weights": shared}}
    aggregator.aggregate(update, 0)
    with pytest.raises(MisconfigurationException, match=r"client 1 comes in round 3, 2 after .*separation=3"):
        aggregator.aggregate(update, 2)
    aggregator.aggregate(update, 3)
    with pytest.raises(MisconfigurationException, match=r"client 1 comes in round 10 for the time 3, .*ons=2"):
        aggregator.aggregate(update, 9)
    # nothing of what was refused has counted
    assert aggregator.state["rounds"] == 2 and aggregator.state["taken"] == {1: [2, 3]}


def test_a_cohort_that_is_drawn_anew_ends_a_run():
    with pytest.raises(MisconfigurationException, match=r"take trainer\.cohort=Cyclic"):
        fit(
            make_client(),
            aggregator=DPFTRL(2, noise_multiplier=1.0),
            **ROUNDS | {"cohort": Uniform(), "max_rounds": 20},
        )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"separation": 0, "epsilon": 8.0}, "separation=0 must be"),
        ({"separation": 2, "epsilon": 8.0, "participations": 0}, "participations=0 must be"),
        ({"separation": 2, "epsilon": 8.0, "bands": 3}, "bands=3 must be from 1 to aggregator.separation=2"),
        ({"separation": 2}, "give one of them"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=named):
        DPFTRL(**settings)


def test_a_federation_that_it_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"separation=4 rounds of 2 clients need 8 .* separation=2"):
        started(sampling=Sampling(2))
    with pytest.raises(MisconfigurationException, match=r"probability 0\.5.* take Cyclic"):
        fit(make_client(), aggregator=DPFTRL(1, noise_multiplier=1.0), cohort=Poisson(0.5))
    with pytest.raises(MisconfigurationException, match="participations=null"):
        started(rounds=None)
    with pytest.raises(MisconfigurationException, match=r"epsilon=4\.0 is shared out"):
        started(rounds=None, participations=2, noise_multiplier=None, epsilon=4.0)
