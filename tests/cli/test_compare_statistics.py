"""Differences to a reference: a simulated null, power, and values known beforehand."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from pfl_lightning.cli.compare.significance import (
    Difference,
    difference,
    differences_to,
    interval,
    paired,
    reference_among,
    sample_interval,
    shown,
    t_interval,
)
from pfl_lightning.runs.sample_scores import Scores
from pfl_lightning.tasks import Monitor

SEEDS, CLIENTS = 3, 20


def tables(count, methods, rng, gain=0.0):
    """Accuracies of tables in which all methods are alike but for the last one's gain.

    Clients differ by 5 points, whatever the method; a training run shifts all clients of a seed together by 1 point,
    for each method anew; each client has further 3 points of noise.
    """
    for _ in range(count):
        clients = rng.normal(0.8, 0.05, CLIENTS)
        runs = rng.normal(0, 0.01, (methods, SEEDS, 1)) + rng.normal(0, 0.03, (methods, SEEDS, CLIENTS))
        runs[-1] += gain
        yield {
            f"m{method}": {(seed, str(client)): value for (seed, client), value in np.ndenumerate(clients + own)}
            for method, own in enumerate(runs)
        }


def marks(simulated):
    """Whether each comparison with the first method is marked, ``[tables, methods - 1]``."""
    return np.array([[marked for _, marked in differences_to(table, "m0").values()] for table in simulated])


@pytest.mark.exhaustive
def test_one_comparison_of_equal_methods_is_marked_in_five_per_cent_of_tables():
    found = marks(tables(3000, 2, np.random.default_rng(1)))
    # 5 % within three standard errors: a rule that marks nothing would fail too
    assert found.mean() == pytest.approx(0.05, abs=3 * math.sqrt(0.05 * 0.95 / 3000))


@pytest.mark.exhaustive
def test_tables_of_several_equal_methods_have_any_mark_in_five_per_cent_at_most():
    found = marks(tables(800, 6, np.random.default_rng(2)))
    bound = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 800)
    assert found.any(axis=1).mean() <= bound and found.mean() <= 0.05


def test_a_method_that_gains_is_found_and_others_are_not():
    found = marks(tables(200, 4, np.random.default_rng(3), gain=0.3))
    assert found[:, -1].mean() > 0.95 and found[:, :-1].mean() < 0.1


def test_clients_of_a_seed_are_averaged_before_seeds_are_tested():
    rng = np.random.default_rng(0)
    values = {(seed, str(client)): rng.normal(seed) for seed in range(4) for client in range(5)}
    reference = {key: rng.normal() for key in values if key != (3, "4")}
    by_seed = [
        np.mean([values[seed, str(k)] - reference[seed, str(k)] for k in range(5) if (seed, str(k)) in reference])
        for seed in range(4)
    ]
    test = ttest_1samp(by_seed, 0)
    found = difference(values, reference)
    assert found.probability == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    # the client that one method lacks is in neither mean
    assert found.mean == pytest.approx(np.mean(by_seed))


def sites(count, seeds, clients, rng):
    """Tables of two methods whose difference varies by seed, by client and at random, with a mean of 0 over clients."""
    for _ in range(count):
        by_seed, by_client = rng.normal(0, 0.005, (seeds, 1)), rng.normal(0, 0.02, (1, clients))
        found = by_seed + by_client + rng.normal(0, 0.01, (seeds, clients))
        values = {(seed, str(client)): value for (seed, client), value in np.ndenumerate(found)}
        yield {"m": values, "base": dict.fromkeys(values, 0.0)}


@pytest.mark.parametrize(("seeds", "clients"), [(5, 4), (3, 20), (10, 20)])
def test_for_other_clients_at_most_five_per_cent_of_equal_methods_are_marked(seeds, clients):
    def share(population):
        simulated = sites(400, seeds, clients, np.random.default_rng(4))
        return np.mean([differences_to(table, "base", population)["m"][1] for table in simulated])

    # differences of these clients are real, which further seeds find again, and those of others are chance
    assert share("clients") <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400) and share("seeds") > 0.1


def test_for_other_clients_the_null_of_equal_clients_is_kept_and_a_gain_is_found():
    def share(simulated):
        return np.mean([differences_to(table, "m0", "clients")["m1"][1] for table in simulated])

    assert share(tables(400, 2, np.random.default_rng(5))) <= 0.05
    assert share(tables(100, 2, np.random.default_rng(6), gain=0.3)) > 0.95


def test_for_other_clients_one_client_or_one_seed_has_no_interval():
    for values in ({(0, "a"): 1.0, (1, "a"): 2.0}, {(0, "a"): 1.0, (0, "b"): 2.0}):
        found = difference(values, dict.fromkeys(values, 0.0), "clients")
        assert found.mean == 1.5 and math.isnan(found.half) and math.isnan(found.probability)
    none = {(seed, client): 0.1 for seed in range(3) for client in "ab"}
    assert math.isnan(difference(none, none, "clients").half)


def test_for_other_clients_the_mean_and_the_share_are_the_same():
    rng = np.random.default_rng(7)
    values = {(seed, client): rng.normal(0.3) for seed in range(4) for client in "abcde"}
    reference = {key: 0.0 for key in values if key != (3, "e")}
    one, other = (difference(values, reference, population) for population in ("seeds", "clients"))
    assert one.mean == pytest.approx(other.mean) and one.better == other.better and one.half != other.half


def test_without_a_common_client_there_is_no_difference():
    assert difference({(0, "a"): 1.0}, {(0, "b"): 1.0, (1, "a"): 1.0}) is None
    assert differences_to({"m": {(0, "a"): 1.0}, "other": {(1, "a"): 1.0}}, "m") == {}


@pytest.mark.parametrize("gains", [[0.1], [0.0, 0.0]], ids=str)
def test_one_seed_and_no_difference_at_all_mark_nothing(gains):
    reference = {(seed, "a"): 0.5 for seed in range(len(gains))}
    values = {key: value + gains[key[0]] for key, value in reference.items()}
    found, is_marked = differences_to({"m": values, "base": reference}, "base")["m"]
    assert found.mean == pytest.approx(gains[0]) and math.isnan(found.half) and not is_marked


@pytest.mark.parametrize("population", ["seeds", "clients"])
def test_the_same_gain_at_every_seed_is_evidence_and_more_with_more_seeds(population):
    def p(seeds, gain=0.3):
        reference = {(seed, client): 0.5 for seed in range(seeds) for client in "abcdef"}
        values = {key: value + gain for key, value in reference.items()}
        return difference(values, reference, population).probability

    assert p(2) > 0.05 > p(5) and p(3) > p(5)
    # a loss is as clear as a gain
    assert p(5, -0.3) == pytest.approx(p(5))


def test_a_gain_with_little_spread_is_clearer_than_one_with_none():
    # rounding stands in for a spread that isn't there, and is no least spread
    assert t_interval([0.3, 0.301, 0.299])[2] < t_interval([0.3, 0.3, 0.3])[2]


HOSPITALS = {"Cleveland": 104, "Hungary": 89, "Long Beach": 45, "Switzerland": 16}
LARGE = {str(client): 200 for client in range(20)}


def accuracies(sizes, seeds, rng, gain=0.0):
    """Differences of two classifiers' right answers on one test set, as a client's rows by seed.

    Rows differ in difficulty and in which method suits them, whatever the seed; a seed moves a method on all rows, and
    single answers at random. The population's difference of the methods is 0 but for the gain of one of them.
    """
    of_seed = rng.normal(0, 0.03, (2, seeds, 1))
    found = {}
    for client, rows in sizes.items():
        margin = rng.normal(0.9, 1, rows) + rng.normal(0, 0.3, (2, 1, rows)) + rng.normal(0, 0.1, (2, seeds, rows))
        right = margin + of_seed + np.array([gain, 0.0])[:, None, None] > 0
        found[client] = right[0].astype(float) - right[1]
    return found


@pytest.mark.parametrize("by", ["client", "sample"])
@pytest.mark.parametrize("sizes", [HOSPITALS, LARGE], ids=["hospitals", "4,000 rows"])
@pytest.mark.by_default("hospitals")
def test_equal_methods_on_one_test_set_are_marked_in_five_per_cent(sizes, by):
    rng = np.random.default_rng(8)
    marked = [sample_interval(accuracies(sizes, 10, rng), by)[2] < 0.05 for _ in range(500)]
    assert 0.03 <= np.mean(marked) <= 0.07


def test_over_seeds_alone_most_equal_methods_on_one_small_test_set_are_marked():
    rng = np.random.default_rng(8)
    simulated = [accuracies(HOSPITALS, 10, rng) for _ in range(200)]
    over_seeds = [t_interval(list(np.mean([values.mean(1) for values in one.values()], axis=0))) for one in simulated]
    assert np.mean([p < 0.05 for *_, p in over_seeds]) > 0.4


@pytest.mark.exhaustive
def test_a_difference_of_two_points_is_found_at_four_thousand_rows():
    rng = np.random.default_rng(9)
    simulated = [accuracies(LARGE, 10, rng, gain=0.085) for _ in range(100)]
    # the shift of the margin is two points of accuracy
    assert np.mean([sample_interval(one)[0] for one in simulated]) == pytest.approx(0.02, abs=0.003)
    assert np.mean([sample_interval(one)[2] < 0.05 for one in simulated]) > 0.9


def test_a_bootstrap_of_rows_within_clients_finds_the_same_interval():
    rng = np.random.default_rng(10)
    differences = accuracies(HOSPITALS, 1, rng, gain=0.2)
    for by, shares in (
        ("client", dict.fromkeys(HOSPITALS, 0.25)),
        ("sample", {c: n / 254 for c, n in HOSPITALS.items()}),
    ):
        drawn = sum(
            share * differences[client][0][rng.integers(0, HOSPITALS[client], (4000, HOSPITALS[client]))].mean(1)
            for client, share in shares.items()
        )
        mean, half, _ = sample_interval(differences, by)
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert (mean - half, mean + half) == pytest.approx((low, high), abs=0.012)


def test_means_by_client_and_by_sample_weigh_clients_as_they_say():
    rows = {"large": np.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]), "small": np.array([[1.0, 0.0]])}
    assert sample_interval(rows)[0] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert sample_interval(rows, "sample")[0] == pytest.approx(3 / 8)
    # a score of several rows counts for all of them
    assert sample_interval(rows, "sample", {"large": 60, "small": 20})[0] == pytest.approx(20 / 80 + 10 / 80)


def test_the_order_of_clients_rows_and_seeds_does_not_matter():
    rng = np.random.default_rng(11)
    rows = accuracies(HOSPITALS, 4, rng, gain=0.1)
    turned = {client: values[::-1, ::-1] for client, values in reversed(rows.items())}
    assert sample_interval(turned) == pytest.approx(sample_interval(rows), rel=1e-9)


def test_only_clients_with_scores_of_the_same_rows_at_each_seed_are_paired():
    def scores(*values):
        return Scores(np.array(values, dtype=np.float32), len(values))

    reference = {(0, "a"): scores(0, 1), (1, "a"): scores(0, 1), (0, "b"): scores(1), (1, "b"): scores(1, 1)}
    values = {key: scores(*(1 - each.values)) for key, each in reference.items()}
    differences, rows = paired(values, reference)
    assert list(differences) == ["a"] and rows == {"a": 2}
    assert differences["a"].tolist() == [[1, -1], [1, -1]]
    assert paired(values, {}) == ({}, {})


def test_a_lower_loss_is_a_gain_with_a_negative_sign():
    loss = Monitor("mae", "min")
    one = Difference(mean=0.5, half=0.25, probability=0.01, better=1.0)
    assert shown(one, True, loss) == "-0.5 [-0.75, -0.25]* (100 %)"
    assert interval(one, Monitor()) == "+50.00 [+25.00, +75.00]"


@pytest.mark.parametrize(
    ("columns", "given", "expected"),
    [
        ([], None, "Local+sgd"),
        (["last", "over Ditto"], None, "Ditto"),
        (["over Ditto"], "FedAvg", "FedAvg+mine"),
        (["over FedPer"], None, "Local+sgd"),
        ([], "KT-pFL+weight", "KT-pFL+weight"),
    ],
)
def test_a_reference_is_found_by_names_alone(columns, given, expected):
    methods = ["Ditto", "KT-pFL", "KT-pFL+weight", "FedAvg+mine", "FedAvg+other", "Local+sgd"]
    assert reference_among(methods, columns, given) == expected
    # the order of methods matters to variants and to the last resort alone
    assert reference_among(["Ditto", "FedPer"]) == "Ditto" and reference_among(["Local"]) is None
