import random

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, equal, fit, make_client, same_end
from pfl_lightning import WeightedAverage
from pfl_lightning.methods import FedAvg
from pfl_lightning.selection import Poisson, RoundStart


def cohorts(rate, clients, rounds):
    starts = (RoundStart(round, clients, len(clients), random.Random(round), dict) for round in range(rounds))
    return [Poisson(rate).choose(start) for start in starts]


def test_each_client_comes_by_itself_at_the_rate():
    drawn = cohorts(0.25, range(8), 4000)
    together = sum(2 in cohort and 5 in cohort for cohort in drawn) / 4000
    assert all(abs(sum(client in cohort for cohort in drawn) / 4000 - 0.25) < 0.03 for client in range(8))
    assert abs(together - 0.0625) < 0.015
    # binomial: a draw of fixed size has no variance
    sizes = [len(cohort) for cohort in drawn]
    assert abs(sum((size - 2) ** 2 for size in sizes) / 4000 - 1.5) < 0.15


def test_at_rate_1_everybody_comes():
    assert cohorts(1.0, range(5), 3) == [[0, 1, 2, 3, 4]] * 3


def test_a_round_of_nobody_is_recorded_and_leaves_all_as_it_is(recwarn):
    spy = Spy()
    run = fit(make_client(FedAvg), callbacks=[spy], cohort=Poisson(0.2), max_rounds=8)
    empty = [k for k, cohort in enumerate(spy.cohorts) if not cohort]
    assert 0 < len(empty) < 8
    for k in empty:
        row = run.rows[k]
        assert row["clients"] == row["clients_diverged"] == row["clients_absent"] == row["bytes/down"] == 0
        assert row["cohort"] == "" and "train/loss" not in row
        assert k == 0 or row["val/acc"] == run.rows[k - 1]["val/acc"]
    assert not [warning for warning in recwarn if "min_clients" in str(warning.message)]


def test_the_aggregator_is_told_of_a_round_of_nobody():
    class Noisy(WeightedAverage):
        def aggregate(self, updates, round):
            super().aggregate(updates, round)
            return {"seen": len(updates)}

    run = fit(make_client(FedAvg), aggregator=Noisy(), cohort=Poisson(0.2), max_rounds=8)
    assert [row["server/seen"] for row in run.rows] == [row["clients"] for row in run.rows]
    assert 0 in [row["server/seen"] for row in run.rows]


def test_it_resumes_bit_for_bit(tmp_path):
    whole = fit(make_client(), blobs(), tmp_path / "whole", cohort=Poisson(0.3), max_rounds=6)
    fit(make_client(), blobs(), tmp_path / "halves", cohort=Poisson(0.3), max_rounds=3)
    resumed = fit(make_client(), blobs(), tmp_path / "halves", cohort=Poisson(0.3), max_rounds=6, ckpt_path="last")
    assert same_end(whole, resumed)
    assert not equal(whole.weights, fit(make_client(), cohort=Poisson(0.6), max_rounds=6).weights)


@pytest.mark.parametrize("rate", [0, 1.1, -0.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort\.rate="):
        Poisson(rate)


@pytest.mark.parametrize("share", [0.5, 2, 1])
def test_a_size_beside_the_rate_is_refused(share):
    with pytest.raises(MisconfigurationException, match=f"clients_per_round={share} fixes"):
        fit(make_client(), cohort=Poisson(0.5), clients_per_round=share)


def test_a_class_in_the_place_of_a_selection_is_refused():
    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort="):
        fit(make_client(), cohort=Poisson)
