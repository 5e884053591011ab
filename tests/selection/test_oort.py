import math
import random

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.selection import Oort, RoundStart
from pfl_lightning.selection.base import drawn_by_weight

SIZES = {client: 10 + 3 * client for client in range(12)}


def tried(rounds, losses, seconds=None, **settings):
    """One that has heard of clients: the round, from 0, and the mean squared loss of each."""
    oort = Oort(**settings)
    oort.setup(SIZES)
    for client, round in sorted(rounds.items(), key=lambda item: item[1]):
        oort.remember({client: {"loss_squared": losses[client], "seconds": (seconds or {}).get(client, 1.0)}}, round)
    return oort


def draw(oort, round, size=5, seed=0):
    return oort.choose(RoundStart(round, range(12), size, random.Random(seed), dict))


def second(round, size, seed, rounds, losses, seconds, epsilon, c, clip, percentile, alpha):
    """Oort as its formulas have it, for clients that have been tried."""
    t = round + 1
    U = {k: SIZES[k] * losses[k] ** 0.5 for k in rounds}
    order = sorted(U.values())
    q = order[min(int(clip * len(order)), len(order) - 1)]
    low = order[0] * 0.999
    T = math.inf
    if percentile is not None:
        times = sorted(seconds.values())
        T = times[min(int(len(times) * percentile / 100), len(times) - 1)]
    s = {}
    for k in sorted(rounds):
        s[k] = (min(U[k], q) - low) / (order[-1] - low) + (0.1 * math.log(t) / (rounds[k] + 1)) ** 0.5
        if percentile is not None and seconds[k] > T:
            s[k] *= (T / seconds[k]) ** alpha
    new = [k for k in range(12) if k not in rounds]
    number = max(math.floor(round_off((1 - epsilon) * size)), size - len(new))
    number = min(number, len(rounds))
    stream = random.Random(seed)
    chosen = []
    if number:
        bar = c * sorted(s.values())[-number]
        chosen = drawn_by_weight(stream, [k for k in s if s[k] >= bar], number, s)
    return chosen + drawn_by_weight(stream, new, size - number, SIZES), s


def round_off(value):
    return round(value, 6)


@pytest.mark.parametrize("percentile", [None, 10, 50])
@pytest.mark.parametrize("at", [3, 8, 40])
@pytest.mark.parametrize("size", [1, 5, 10, 12])
def test_it_is_what_its_formulas_say(percentile, at, size):
    # the default, and one that cuts the largest utilities
    clip = 0.5 if at == 8 else 0.98
    stream = random.Random(at)
    known = stream.sample(range(12), 7)
    rounds = {k: stream.randrange(at) for k in known}
    losses = {k: stream.random() * 3 for k in known}
    seconds = {k: 1 + stream.random() * 9 for k in known}
    oort = tried(rounds, losses, seconds, percentile=percentile, clip=clip)
    epsilon = max(0.9 * 0.95**at, 0.2)
    for seed in range(10):
        chosen, scores = second(at, size, seed, rounds, losses, seconds, epsilon, 0.7, clip, percentile, 2)
        assert oort.scores(sorted(rounds), at + 1) == pytest.approx(scores)
        assert draw(oort, at, size, seed) == chosen and len(set(chosen)) == size


def test_the_share_of_new_clients_falls_to_its_least():
    losses = dict.fromkeys(range(6), 1.0)
    oort = tried(dict.fromkeys(range(6), 0), losses, exploration=0.9, decay=0.5, least_exploration=0.2)
    new = [sum(client >= 6 for client in draw(oort, round)) for round in range(1, 6)]
    # of 5 clients floor(5 (1 - epsilon)) are known ones
    assert new == [3, 2, 1, 1, 1]


def test_nobody_known_or_nobody_new_is_no_error():
    oort = tried({}, {})
    assert len(set(draw(oort, 0))) == 5
    everybody = tried(dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 1.0))
    assert sorted(draw(everybody, 1, 12)) == list(range(12))
    assert len(set(draw(everybody, 1))) == 5
    nothing = tried(dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 0.0))
    assert len(set(draw(nothing, 0))) == 5


def test_what_a_site_claims_cannot_be_more_than_wrong():
    oort = Oort(percentile=10, window=1)
    oort.setup(SIZES)
    for round in range(3):
        oort.remember({0: {"loss_squared": -4.0, "seconds": -1.0}, 1: {}, 2: {"loss_squared": 1.0}}, round)
    assert oort.state["utility"] == {0: 0, 1: 0, 2: SIZES[2]} and len(set(draw(oort, 3))) == 5


def test_hard_samples_and_long_absence_make_clients_likelier():
    rounds, losses = dict.fromkeys(range(12), 4), dict.fromkeys(range(12), 1.0)
    hard = tried(rounds, losses | {2: 40.0}).scores(range(12), 9)
    assert max(hard, key=hard.get) == 2
    absent = tried(rounds | {2: 0}, dict(zip(SIZES, [1 / n**2 for n in SIZES.values()], strict=True))).scores(
        range(12), 9
    )
    assert max(absent, key=absent.get) == 2


def test_slow_clients_are_penalised_only_with_a_percentile():
    rounds, losses = dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 1.0)
    seconds = {k: 1.0 if k < 8 else 4.0 for k in range(12)}
    plain = tried(rounds, losses, seconds).scores(range(12), 5)
    paced = tried(rounds, losses, seconds, percentile=50).scores(range(12), 5)
    assert all(paced[k] == (plain[k] if k < 8 else pytest.approx(plain[k] / 16)) for k in range(12))
    assert tried(rounds, losses, seconds).state["seconds"] == {}


@pytest.mark.parametrize(
    "utilities, percentiles",
    [
        # windows of two rounds: flat, flat; up tenfold; doubled, which is neither; flat up to the end
        ([1] * 6, [10, 10, 10, 15, 15, 20]),
        ([1, 1, 10, 10, 20, 20], [10, 10, 10, 5, 5, 5]),
        ([1, 1, 1, 1, 100, 100], [10, 10, 10, 15, 15, 10]),
    ],
)
def test_the_pacer_follows_the_utility_of_windows(utilities, percentiles):
    oort = Oort(percentile=10, window=2)
    oort.setup(SIZES)
    seen = []
    for round, utility in enumerate(utilities):
        oort.remember({0: {"loss_squared": (utility / SIZES[0]) ** 2, "seconds": 1.0}}, round)
        seen.append(10 + oort.state["moved"])
    assert seen == percentiles


def test_clients_tell_squared_losses_and_pay_for_them():
    oort, spy = Oort(exploration=0.5), Spy()
    settings = {"clients_per_round": 2, "max_rounds": 4, "local_steps": 1}
    run = fit(make_client(), blobs(24, 16, 30, 20, 12), cohort=oort, callbacks=[spy], **settings)
    plain = fit(make_client(), blobs(24, 16, 30, 20, 12), **settings)
    assert [row["bytes/up"] for row in run.rows] == [row["bytes/up"] + 16 for row in plain.rows]
    assert [row["bytes/down"] for row in run.rows] == [row["bytes/down"] for row in plain.rows]
    assert "train/loss_squared" in run.rows[0] and "train/loss_squared" not in plain.rows[0]
    # with one step a client's squared loss is the square of its loss
    last = {client: round for round, cohort in enumerate(spy.cohorts) for client in cohort}
    assert oort.state["round"] == {client: round + 1 for client, round in last.items()}


def test_the_squared_loss_is_a_mean_over_samples():
    seen = {}

    class Watch(Spy):
        def on_client_fit_end(self, trainer, federation, client, outcome):
            seen[client] = outcome.metrics

    oort = Oort()
    settings = {"cohort": oort, "callbacks": [Watch()], "max_rounds": 1, "local_steps": 1}
    fit(make_client(), blobs(), **settings)
    assert all(own["loss_squared"] == pytest.approx(own["loss"] ** 2) for own in seen.values())
    sizes = oort.sizes
    assert oort.state["utility"] == pytest.approx({k: sizes[k] * own["loss"] for k, own in seen.items()})


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_any_engine_tells_the_same(engine):
    def run(engine):
        oort = Oort()
        fit(make_client(), cohort=oort, clients_per_round=2, max_rounds=4, engine=engine)
        return oort.state

    one, other = run("sequential"), run(engine)
    assert other["round"] == one["round"] and other["utility"] == pytest.approx(one["utility"], rel=1e-4)


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_it_resumes_bit_for_bit(method, tmp_path):
    def run(root, rounds, **kwargs):
        client = make_client(method, net=noisy, optimizer_lifetime="run")
        oort = Oort(exploration=0.6, decay=0.8)
        return fit(client, blobs(), root, cohort=oort, clients_per_round=2, max_rounds=rounds, **kwargs)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "halves", 3)
    resumed = run(tmp_path / "halves", 6, ckpt_path="last")
    assert same_end(whole, resumed)
    states = [each.trainer.rounds.cohort.state for each in (whole, resumed)]
    assert states[0] == states[1]
    uniform = fit(make_client(method, net=noisy, optimizer_lifetime="run"), clients_per_round=2, max_rounds=6)
    assert not equal(uniform.weights, whole.weights)


def test_a_run_of_another_choice_goes_on_with_it(tmp_path):
    settings = {"clients_per_round": 2, "resume_changed": True}
    fit(make_client(), blobs(), tmp_path, max_rounds=2, **settings)
    for rounds, percentile in ((4, None), (6, 50)):
        run = fit(
            make_client(),
            blobs(),
            tmp_path,
            cohort=Oort(percentile=percentile),
            max_rounds=rounds,
            ckpt_path="last",
            **settings,
        )
    assert len(run.rows) == 6 and min(run.trainer.rounds.cohort.state["round"].values()) >= 3


def test_the_order_in_which_clients_tell_changes_nothing():
    told = {k: {"loss_squared": 0.5 + k, "seconds": 1.0 + k % 4} for k in range(8)}
    ends = []
    for order in (told, dict(reversed(told.items()))):
        oort = Oort(percentile=20)
        oort.setup(SIZES)
        oort.remember(order, 0)
        ends.append([draw(oort, 3, 6, seed) for seed in range(10)])
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"exploration": -0.1},
        {"exploration": 1.1},
        {"decay": 0},
        {"decay": 1.1},
        {"least_exploration": -0.1},
        {"least_exploration": 1.1},
        {"cutoff": -0.1},
        {"cutoff": 1.1},
        {"clip": 0},
        {"clip": 1.1},
        {"percentile": 0},
        {"percentile": 101},
        {"penalty": -1},
        {"window": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_bad_settings_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=rf"trainer\.cohort\.{name}={value} must be"):
        Oort(**settings)


def test_its_choice_is_no_sampling_for_a_guarantee():
    # it follows the clients' losses
    assert Oort().sampling(2, 4) is None


@pytest.mark.parametrize(
    "settings",
    [
        dict.fromkeys(["exploration", "least_exploration", "cutoff", "penalty"], 0),
        {
            **dict.fromkeys(["exploration", "decay", "least_exploration", "cutoff", "clip", "window"], 1),
            "percentile": 100,
        },
    ],
)
def test_settings_at_the_ends_of_their_ranges_are_taken(settings):
    everybody = tried(dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 1.0), **settings)
    assert len(set(draw(everybody, 1))) == 5
