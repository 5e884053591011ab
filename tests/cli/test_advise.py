"""``pfl-lightning advise``: the look, the tournament within its budget, and the advice by validation."""

import json
import math
import re
import shutil
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from command import QUIET, pfl, refusal
from federations import read_csv
from pfl_lightning.cli.advise.command import Budget, Tournament, budget
from pfl_lightning.cli.advise.look import Look, between, look_at, nearest_peer, scaled, suggested
from pfl_lightning.cli.advise.page import EVERYWHERE, HERE, NOTHING, leader, picks, seeds_for_half
from pfl_lightning.cli.compare.choices import choose
from pfl_lightning.cli.compare.command import Comparison
from pfl_lightning.cli.compare.significance import differences_to
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.data import Digits, Dirichlet, Loaded, Natural
from pfl_lightning.nets import MLP, CifarResNet, Net
from pfl_lightning.tasks import Classification, NextToken, Poisson, Regression


def values(**gains):
    """Values by method: at three seeds, the sites' numbers with a little noise, as (seed, site): value."""
    noise = (-0.001, 0.0, 0.001)
    return {
        method: {(seed, site): number + noise[(seed + turn) % 3] for site, number in sites.items() for seed in range(3)}
        for turn, (method, sites) in enumerate(gains.items())
    }


# The look


def test_the_share_between_clients_is_zero_by_chance_and_finds_a_known_share():
    generator = torch.Generator().manual_seed(0)
    owners = torch.arange(40).repeat_interleave(50)
    noise = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    assert between(noise, owners) < 0.01
    # means of deviation 1 beside noise of deviation 2: a fifth of the variance
    means = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    assert between(2 * noise + means[owners], owners) == pytest.approx(0.2, abs=0.05)


def test_without_several_clients_or_variance_nothing_is_between_them():
    assert between(torch.ones(4, 1), torch.tensor([0, 0, 1, 1])) is None
    assert between(torch.rand(4, 1), torch.zeros(4, dtype=torch.int64)) is None
    assert between(torch.rand(3, 1), torch.arange(3)) is None


def test_inputs_that_differ_by_their_labels_alone_are_no_shift():
    classes = torch.tensor([0, 0, 0, 1] * 25 + [1, 1, 1, 0] * 25)
    generator = torch.Generator().manual_seed(1)
    x = 5.0 * classes[:, None] + torch.randn(200, 2, generator=generator)
    owners = torch.arange(2).repeat_interleave(100)
    assert between(scaled(x.double(), None), owners) > 0.2
    assert between(scaled(x.double(), classes), owners) < 0.02


def test_grouped_clients_have_near_peers():
    grouped = torch.tensor([[9, 1, 0], [9, 1, 0], [0, 1, 9], [0, 1, 9]])
    assert nearest_peer(grouped) == 0
    assert nearest_peer(torch.eye(4)) == pytest.approx(1)
    assert nearest_peer(torch.ones(4, 2)) is None and nearest_peer(torch.eye(2)) is None


def test_the_look_at_digits():
    data = Digits(num_clients=5, partitioner=Dirichlet(alpha=0.1), max_samples=400)
    data.setup()
    look = look_at(data)
    assert look.clients == ["0", "1", "2", "3", "4"] and not look.drawn and look.overlap("val") == 0
    assert list(look.train) == [data.size(client, "train") for client in range(5)]
    assert look.labels > 0.3 and look.inputs < 0.1 and 0 < look.nearest <= 1


def looked(clients=20, labels=0.0, nearest=1.0, inputs=0.0):
    sizes = [10] * clients
    return Look([str(k) for k in range(clients)], sizes, sizes, sizes, labels, nearest, inputs, frozenset())


@pytest.mark.parametrize(
    ("look", "more"),
    [
        (looked(), set()),
        (looked(clients=4), {"apfl"}),
        (looked(labels=0.5), {"cwfedavg"}),
        (looked(labels=0.5, nearest=0.1), {"cwfedavg", "fedrema"}),
        (looked(labels=0.5, nearest=None), set()),
        (looked(inputs=0.3), set()),
        (looked(labels=None, nearest=None, inputs=None), set()),
    ],
)
def test_what_the_look_suggests(look, more):
    always = {"local", "fedavg", "fedavg+tuned/fine_tuned", "fedper", "ditto", "knn_per"}
    assert suggested(look, MLP((4,), 3), Classification(3)).keys() == always | more


def test_the_net_decides_too():
    linear = Net(nn.Flatten(), nn.Linear(4, 3))
    assert not {"fedper", "fedrema"} & suggested(looked(labels=0.5, nearest=0.1), linear, Classification(3)).keys()
    assert "fedbn" in suggested(looked(inputs=0.3), CifarResNet((3, 8, 8), 3), Classification(3))
    assert "fedbn" not in suggested(looked(), CifarResNet((3, 8, 8), 3), Classification(3))


@pytest.mark.parametrize(("task", "takes"), [(Regression(), True), (Poisson(), False), (NextToken(3), False)])
def test_neighbours_need_classes_or_quantities(task, takes):
    assert ("knn_per" in suggested(looked(labels=None), MLP((4,), task.outputs), task)) == takes


# The choice


def test_a_site_takes_its_own_clear_gain_then_that_of_all_sites_then_none():
    found = values(
        Local={"a": 0.5, "b": 0.5, "c": 0.5},
        Ditto={"a": 0.9, "b": 0.5, "c": 0.4},
        APFL={"a": 0.6, "b": 0.6, "c": 0.4},
    )
    # no spread at all at b: no interval, and nothing clear, but a method of all sites that gains there too
    for seed in range(3):
        found["Local"][seed, "b"], found["APFL"][seed, "b"], found["Ditto"][seed, "b"] = 0.5, 0.6, 0.5
    assert leader(found, "Local") == "Ditto"
    assert [(pick.site, pick.method, pick.reason) for pick in picks(found, "Local")] == [
        ("a", "Ditto", HERE),
        ("b", "Ditto", EVERYWHERE),
        ("c", "Local", NOTHING),
    ]
    assert picks(found, "Local")[0].level == ()
    assert picks(found, "Local")[1].level == ("Local", "APFL")


def test_one_seed_and_noise_say_nothing():
    one = {"Local": {(0, "a"): 0.5}, "Ditto": {(0, "a"): 0.9}}
    assert leader(one, "Local") is None
    (pick,) = picks(one, "Local")
    assert (pick.method, pick.reason, pick.level) == ("Local", NOTHING, ("Ditto",))
    noisy = {"Local": {(s, "a"): 0.5 for s in range(3)}, "Ditto": {(s, "a"): 0.5 + s for s in (0, 1, -1)}}
    assert leader(noisy, "Local") is None
    assert leader({"Ditto": {(0, "a"): 1.0}}, "Local") is None


def test_a_site_without_the_reference_gets_no_advice():
    found = values(Local={"a": 0.5}, Ditto={"a": 0.9, "b": 0.9})
    assert [pick.site for pick in picks(found, "Local")] == ["a"]


@pytest.mark.parametrize(("seeds", "overlap"), [(2, 0.0), (3, 0.0), (5, 0.0), (10, 0.0), (3, 0.25), (4, 0.1)])
def test_so_many_seeds_halve_the_interval(seeds, overlap):
    from scipy.stats import t

    def width(count):
        return t.ppf(0.975, count - 1) * math.sqrt(1 / count + overlap)

    more = seeds_for_half(seeds, overlap)
    assert width(more) <= width(seeds) / 2 < width(more - 1)


def test_rows_bound_what_seeds_can_do():
    assert seeds_for_half(10, 0.25) is None and seeds_for_half(6, 0.25) is None


SITES = {"a": 160, "b": 140, "c": 70, "d": 24}
"""Rows of each site, a fifth of which validates at each seed."""


def tournaments(count, seeds, rng, gain=0.0, methods=5):
    """Values of tournaments in which no method is better for further rows of a site, but for the last one's gain.

    A tenth of a site's rows are right under a method and wrong under the reference, or the other way round, at all
    seeds; a further twentieth at one seed alone. Each seed draws the rows that validate.
    """

    def by_luck(share, *shape):
        return rng.choice([-1.0, 0.0, 1.0], shape, p=[share / 2, 1 - share, share / 2])

    for _ in range(count):
        found = {"Local": {(seed, site): 0.8 for seed in range(seeds) for site in SITES}}
        found |= {f"m{method}": {} for method in range(methods)}
        for site, rows in SITES.items():
            luck, size = by_luck(0.1, methods, rows), rows // 5
            for seed in range(seeds):
                own = luck[:, rng.permutation(rows)[:size]] + by_luck(0.05, methods, size)
                for method, value in enumerate(own.mean(1)):
                    found[f"m{method}"][seed, site] = 0.8 + value + gain * (method == methods - 1)
        yield found


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [3, 10])
def test_of_equal_methods_any_is_advised_in_five_per_cent_of_tournaments_at_most(seeds):
    def shares(overlap):
        simulated = list(tournaments(250, seeds, np.random.default_rng(seeds)))
        clear = [
            [is_clear for _, is_clear in differences_to(each, "Local", overlap=overlap).values()] for each in simulated
        ]
        here = [pick.reason == HERE for each in simulated for pick in picks(each, "Local", overlap)]
        return np.mean(clear), np.mean(np.any(clear, axis=1)), np.mean(here)

    of_comparisons, of_tables, of_sites = shares(0.25)
    bound = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 250)
    assert of_comparisons <= 0.05 and of_tables <= bound and of_sites <= bound
    if seeds == 10:
        # seeds taken for independent, although they share rows
        assert shares(0.0)[1] > 0.15


def test_a_gain_for_further_rows_is_found():
    simulated = list(tournaments(40, 10, np.random.default_rng(1), gain=0.2))
    assert np.mean([leader(each, "Local", 0.25) == "m4" for each in simulated]) > 0.9


@pytest.mark.parametrize(
    ("drawn", "val", "test"),
    [({"val"}, 10 / 30, 0.0), ({"val", "test"}, 10 / 50, 20 / 40), ({"test"}, 0.0, 20 / 30), (set(), 0.0, 0.0)],
)
def test_the_overlap_of_seeds_that_draw_rows(drawn, val, test):
    look = Look(["a", "b"], [20, 10], [6, 4], [15, 5], None, None, None, frozenset(drawn))
    assert (look.overlap("val"), look.overlap("test")) == pytest.approx((val, test))


@pytest.mark.parametrize(
    ("split", "drawn"),
    [(None, {"val", "test"}), (["train", "train", "test"] * 8, {"val"}), (["train", "val", "test"] * 8, set())],
)
def test_rows_that_the_data_name_are_not_drawn(split, drawn):
    class Named(Digits):
        def load(self):
            return Loaded(torch.randn(24, 4), torch.arange(24) % 10, ["a", "b"] * 12, split)

    data = Named(num_clients=None, partitioner=Natural(), test_fraction=0.25, val_fraction=0.25)
    data.setup()
    assert look_at(data).drawn == drawn


# The tournament, with records of runs that never were


def rounds_of(run):
    """The number of rounds that a run's words ask for; of several the last one holds."""
    return int([after for word, after in pairwise(run.arguments) if word == "--trainer.max_rounds"][-1])


def record(run, accuracies):
    """Leaves a run's record: ``accuracies`` are (validation, test) by client."""
    rounds = rounds_of(run)
    folder = run.folder / "Run" / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    lines = [f"{rounds},{client},{val}" for client, (val, _) in enumerate(accuracies)]
    # an earlier round says the opposite
    early = [f"0,{client},{1 - val}" for client, (val, _) in enumerate(accuracies)]
    (folder / "client_rounds.csv").write_text("\n".join(["round,client,val/acc", *early, *lines, ""]))
    lines = [f"{client},{test}" for client, (_, test) in enumerate(accuracies)]
    (folder / "clients.csv").write_text("\n".join(["client,test/acc", *lines, ""]))
    (folder / "rounds.csv").write_text(f"round,cohort,bytes/up,bytes/down,test/acc\n{rounds},0,0,0,0.5\n")
    mean = sum(val for val, _ in accuracies) / len(accuracies)
    part = {"round": rounds, "val/acc": mean, "test/acc": 0.5}
    ends = {"final": part, "selected": part, "best_on_test": part, "partition": "p", "initial": f"i{run.seed}"}
    (folder / "summary.json").write_text(json.dumps(ends | {"seconds": 0.1 * rounds, "monitor": {"metric": "acc"}}))


@pytest.fixture
def made(monkeypatch):
    """Puts records in the place of runs; the list of runs that were asked for, and settings of what comes out."""
    asked = SimpleNamespace(runs=[], fails={}, accuracies=lambda run: [(0.5 + wobble(run), 0.5)] * 3)

    def run_all(runs, jobs, environment, report, starter):
        failures = {}
        for run in runs:
            if run.finished is None:
                asked.runs.append(run)
                if run.method in asked.fails:
                    failures[run] = asked.fails[run.method]
                else:
                    record(run, asked.accuracies(run))
            report(run, failures.get(run, ""))
        return failures

    monkeypatch.setattr("pfl_lightning.cli.compare.command.run_all", run_all)
    monkeypatch.setattr("pfl_lightning.cli.compare.command.new_starter", lambda environment: None)
    return asked


SMALL = "--data Digits --data.num_clients 3 --data.max_samples 120 --model.net MLP --trainer.max_rounds 4 --out out"


def advise(line):
    """Runs ``pfl-lightning advise LINE``; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        pfl(f"advise {line}")
    return ended.value.code


def wobble(run):
    """A number by seed and method, so that differences have a spread."""
    return 0.01 * Random(f"{run.method} {run.seed}").random()


@pytest.fixture
def play(made, monkeypatch):
    """Plays a tournament of some methods with runs of four rounds, as told by records."""
    monkeypatch.setattr("pfl_lightning.cli.advise.command.complaint", lambda args: None)

    def tournament(methods, limit, seeds=10, rate=0.05, rates=()):
        given = Namespace(table=None, out=Path("out"), jobs=1, vary_data=False, commands=False, collect=False)
        comparison = Comparison(given, ["--trainer.max_rounds", "4"])
        chosen = choose(methods, FOLDER / "methods")
        played = Tournament(comparison, chosen, budget(limit), 4, rate, time.perf_counter(), rates)
        played.play(seeds, chosen[0].label)
        return played

    return tournament


def test_validation_chooses_and_test_rows_only_report(made):
    good = {"Local": (0.5, 0.7), "FedAvg": (0.4, 0.9), "Ditto": (0.8, 0.6)}
    made.accuracies = lambda run: [tuple(x + wobble(run) for x in good[run.method.split()[0]])] * 3
    assert advise(f"--methods local fedavg ditto {SMALL} --budget 1000r --seeds 4") == 0
    rows = read_csv(Path("out/advice.csv"))
    assert [(row["take"], row["why"], row["can't be told from"]) for row in rows] == [("Ditto", HERE, "none")] * 3
    gains = [float(rows[0][f"over Local, {part}"].split()[0]) for part in ("validation", "test")]
    assert gains == pytest.approx([30, -10], abs=1)
    pages = [Path("out/advice.md").read_text(), Path("out/advice.html").read_text()]
    assert all(f"{gain:+.2f} [" in page for page in pages for gain in gains)
    # clear on test rows too: FedAvg's gain and Ditto's loss
    (said,) = [line for line in pages[0].splitlines() if line.startswith("On test rows")]
    assert re.search(r"better than Local: FedAvg \(\+\d.*; worse than Local: Ditto \(-\d", said)
    assert Path("out/advice.png").stat().st_size > 0 and Path("out/report.html").is_file()


RATE = "--model.init_args.optimizer.init_args.lr"


def rate_of(run):
    return run.arguments[run.arguments.index(RATE) + 1]


def test_the_best_rate_on_validation_is_taken_by_each_method(made, play):
    best = {"Local": "Local lr=0.05", "FedAvg": "FedAvg lr=0.25"}
    made.accuracies = lambda run: [(0.9 if run.method in best.values() else 0.3 + wobble(run), 0.5)] * 3
    played = play(["local", "fedavg"], "1000r", seeds=2)
    last = {run.method: rate_of(run) for run in made.runs if run.seed == 2}
    assert last == {"Local": "0.05", "FedAvg": "0.25"}
    grid = {(method, x) for method in best for x in ("0.05", "0.25", "0.01", "1.25")}
    seeds = (0, 10_000, 10_001)
    assert {(row["method"], row[RATE[2:]], row["seed"]) for row in played.trials} == {
        (*each, seed) for each in grid for seed in seeds
    }
    assert all((row["validation"] == 0.9) == best[row["method"]].endswith(row[RATE[2:]]) for row in played.trials)


def test_rates_beyond_the_edge_are_tried_by_the_methods_at_the_edge(made, play):
    want = {"Local": 2.0, "FedAvg": 0.002}
    # the nearer to the wanted rate, the better
    made.accuracies = lambda run: (
        [
            (
                0.9 - 0.1 * abs(math.log(float(rate_of(run)) / want[run.method.split()[0]]))
                if RATE in run.arguments
                else 0.5,
                0.5,
            )
        ]
        * 3
    )
    played = play(["local", "fedavg"], "1000r", seeds=2)
    assert {label: list(tried) for label, tried in played.tried.items()} == {
        "Local": ["0.05", "0.25", "0.01", "1.25", "6.25"],
        "FedAvg": ["0.05", "0.25", "0.01", "1.25", "0.002", "0.0004"],
    }
    assert {label: trial.name for label, trial in played.chosen.items()} == {"Local": "lr=1.25", "FedAvg": "lr=0.002"}


def test_the_mean_over_seeds_chooses_the_rate_and_stays_with_a_larger_budget(made, play):
    values = {("0.05", 0): 0.8, ("0.05", 10_000): 0.3, ("0.25", 0): 0.7, ("0.25", 10_000): 0.9}
    made.accuracies = lambda run: (
        [(values.get((rate_of(run), run.seed), 0.5) if RATE in run.arguments else 0.5, 0.5)] * 3
    )
    # the probe, four rates at one seed, and two seeds: 2 + 6 x 4 rounds
    assert play(["local"], "26r", seeds=2).chosen["Local"].name == "lr=0.05"
    assert play(["local"], "1000r", seeds=4).chosen["Local"].name == "lr=0.05"
    shutil.rmtree("out")
    assert play(["local"], "1000r", seeds=2).chosen["Local"].name == "lr=0.25"


def test_without_a_rate_nothing_is_tuned(made, play):
    play(["local", "fedavg"], "1000r", seeds=2, rate=None)
    assert not any(RATE in run.arguments for run in made.runs)


@pytest.mark.parametrize(
    ("rounds", "plan", "seeds"),
    [
        # two methods: a probe has 2 x 2 rounds, and a sweep of whole runs 2 x 4
        (4 + 9 * 8, (4, 4), 5),
        (4 + 8 * 8, (4, 3), 5),
        (4 + 6 * 8 + 7, (4, 3), 3),
        (4 + 6 * 4, (2, 3), 3),
        (4 + 3 * 4, (2, 1), 3),
        (4 + 3 * 2, (1, 1), 3),
    ],
)
def test_the_budget_is_kept(made, play, rounds, plan, seeds):
    # the middle rate is the best one, and no rate beyond the edges is tried
    made.accuracies = lambda run: [(0.9 if "lr=0.05" in run.method else 0.5, 0.5)] * 3
    played = play(["local", "fedavg"], f"{rounds}r")
    stored = json.loads(Path("out/plan.json").read_text())
    assert (stored["rounds"], stored["rates"]) == plan
    assert {run.seed for run in made.runs} == set(range(seeds + 1))
    assert sum(map(rounds_of, made.runs)) == played.rounds_made <= rounds


def test_time_is_measured_and_a_slow_sweep_stops_the_next(made, play, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def accuracies(run):
        # a second a round and ten to start; from the second seed on, the machine is a hundred times slower
        clock.now += (100 if 1 < run.seed < 10_000 else 1) * (10 + rounds_of(run))
        return [(0.9 if "lr=0.05" in run.method else 0.5, 0.5)] * 3

    made.accuracies = accuracies
    played = play(["local", "fedavg"], "20m")
    assert played.overhead == pytest.approx(12 - 0.2) and played.per_round == {"Local": 0.1, "FedAvg": 0.1}
    # the first run of the second seed shows it, and the other one isn't begun
    assert [(run.method, run.seed) for run in made.runs[-3:]] == [("Local", 1), ("FedAvg", 1), ("Local", 2)]
    # the probe, four rates at three seeds, and a seed
    assert played.left == 1200 - 24 - 12 * 28 - 28 - 1400
    assert [len(each) for each in played.results.values()] == [1, 1]


def test_given_rates_are_tried(made, play):
    played = play(["local"], "1000r", seeds=1, rates=["0.1", "0.2"])
    assert {row[RATE[2:]] for row in played.trials} == {"0.1", "0.2"}


def test_a_budget_without_room_for_three_seeds_is_refused(play):
    with pytest.raises(MisconfigurationException, match=r"--budget 9 rounds is too small.*about 10 rounds"):
        play(["local", "fedavg"], "9r")


def test_more_seeds_go_on_from_finished_runs_by_the_same_plan(made, play):
    play(["local", "fedavg"], "28r", seeds=2)
    first = len(made.runs)
    later = play(["local", "fedavg"], "1000r", seeds=4)
    assert [run.seed for run in made.runs[first:]] == [3, 3, 4, 4]
    assert later.rounds == 2 and [len(each) for each in later.results.values()] == [4, 4]


def test_a_method_that_cant_run_is_left_out_and_the_reference_must_run(made, play):
    made.fails = {"FedAvg": "no reason at all"}
    played = play(["local", "fedavg", "ditto"], "1000r", seeds=1)
    assert played.left_out == made.fails and list(played.results) == ["Local", "Ditto"]
    assert {run.method for run in made.runs if run.seed == 1} == {"Local", "Ditto"}
    with pytest.raises(MisconfigurationException, match="FedAvg failed: no reason at all"):
        play(["fedavg", "local"], "1000r")


def test_a_seed_that_fails_is_told(made, play):
    made.fails = {"Ditto lr=0.05": "a rate too large"}
    played = play(["local", "ditto"], "1000r", seeds=1)
    assert not played.failures and "lr=0.05" not in played.chosen["Ditto"].name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--budget 10", "'10' is no budget"),
        ("--budget 0m", "'0m' is no budget"),
        ("--seeds 0", "--seeds 0 must be at least 1"),
        ("--rates 0.1", "--rates 0.1 leaves no choice"),
        ("--data.val_frction 0.1", "val_fraction"),
        ("--model FedAvg", "--model can't be given here"),
        ("--methods fedavgg", "fedavgg is no method"),
    ],
)
def test_mistakes_are_told_before_any_run(made, capsys, line, words):
    assert words in refusal(f"advise {SMALL} {line}", capsys)
    assert not made.runs


def test_budgets():
    assert budget("1.5h") == Budget(5400.0, "seconds") and budget("90s").amount == 90
    assert str(budget("300r")) == "300 rounds" and str(budget("2m")) == "2 min 0 s"


# The whole, with runs in this process


def test_advice_for_digits(monkeypatch):
    def run_all(runs, jobs, environment, report, starter):
        for run in runs:
            if run.finished is None:
                pfl(["fit", *QUIET.split(), *run.arguments, "--trainer.default_root_dir", str(run.folder)])
            report(run, "")
        return {}

    monkeypatch.setattr("pfl_lightning.cli.compare.command.run_all", run_all)
    monkeypatch.setattr("pfl_lightning.cli.compare.command.new_starter", lambda environment: None)
    assert advise(f"--methods local fedavg {SMALL} --budget 10r --seeds 1") == 0
    rows = read_csv(Path("out/advice.csv"))
    assert [(row["site"], row["take"], row["why"]) for row in rows] == [(site, "Local", NOTHING) for site in "012"]
    means = []
    for method in ("Local", "FedAvg"):
        (path,) = Path(f"out/{method}/seed_1").glob("*/*/client_rounds.csv")
        last = [row for row in read_csv(path) if row["round"] == "2"]
        means.append(sum(float(row["val/acc"]) for row in last) / 3)
        assert yaml.safe_load((path.parent / "config.yaml").read_text())["trainer"]["max_rounds"] == 2
    assert f"{100 * (means[1] - means[0]):+.2f} on validation rows" in Path("out/advice.md").read_text()
