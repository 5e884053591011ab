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
from pfl_lightning.cli.advise.decide import LEAST, Verdict, answer, gain_of, picks, scores_of, smallest_shown
from pfl_lightning.cli.advise.look import Look, between, look_at, nearest_peer, own_relation, scaled, suggested
from pfl_lightning.cli.advise.page import Advice
from pfl_lightning.cli.compare.choices import choose
from pfl_lightning.cli.compare.command import Comparison
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.data import Digits, Dirichlet
from pfl_lightning.nets import MLP, CifarResNet, Net
from pfl_lightning.runs.sample_scores import Scores, write_scores
from pfl_lightning.tasks import Classification, Monitor, NextToken, Poisson, Regression

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


def rules(count, kind, clients=8, rows=60, seed=0):
    """Inputs, classes and owners of clients whose labels follow one rule, one of two opposite ones, or none."""
    rng = np.random.default_rng(seed)
    owners = np.arange(clients).repeat(rows)
    x = rng.normal(size=(len(owners), count))
    directions = rng.normal(size=(clients, count))
    own = {"same": directions[0 * owners], "opposite": directions[0 * owners] * (-1.0) ** owners[:, None]}
    own["private"], own["none"] = directions[owners], 0 * x
    y = rng.random(len(owners)) < 1 / (1 + np.exp(-2 * (x * own[kind]).sum(1)))
    return torch.tensor(x), torch.tensor(y).long(), torch.tensor(owners)


@pytest.mark.parametrize(("kind", "low", "high"), [("same", 0, 0.1), ("opposite", 0.9, 1), ("private", 0.6, 1)])
def test_clients_with_labels_of_their_own_meaning_are_seen(kind, low, high):
    x, y, owners = rules(5, kind)
    one_hot = nn.functional.one_hot(y).double()
    assert low <= own_relation(x, one_hot, owners) <= high
    # whatever a client's inputs are shifted by
    shifted = x + 9 * torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[owners]
    assert own_relation(shifted, one_hot, owners) == pytest.approx(own_relation(x, one_hot, owners))


def test_numbers_as_labels_have_a_relation_too_and_noise_has_none():
    x, y, owners = rules(5, "none")
    assert own_relation(x, nn.functional.one_hot(y).double(), owners) is None
    sign = (-1.0) ** owners[:, None]
    assert own_relation(x, x[:, :1], owners) < 0.1 and own_relation(x, sign * x[:, :1], owners) > 0.9
    # clients of one class, or of one row, tell nothing
    assert own_relation(x, nn.functional.one_hot(owners).double(), owners) is None
    assert own_relation(x[:3], x[:3, :1], torch.arange(3)) is None


def test_grouped_clients_have_near_peers():
    grouped = torch.tensor([[9, 1, 0], [9, 1, 0], [0, 1, 9], [0, 1, 9]])
    assert nearest_peer(grouped) == 0
    assert nearest_peer(torch.eye(4)) == pytest.approx(1)
    assert nearest_peer(torch.ones(4, 2)) is None and nearest_peer(torch.eye(2)) is None


def test_the_look_at_digits():
    data = Digits(num_clients=5, partitioner=Dirichlet(alpha=0.1), max_samples=400)
    data.setup()
    look = look_at(data)
    assert look.clients == ["0", "1", "2", "3", "4"]
    assert list(look.train) == [data.size(client, "train") for client in range(5)]
    assert look.labels > 0.3 and look.inputs < 0.1 and 0 < look.nearest <= 1 and 0 <= look.relation < 0.5


def looked(clients=20, labels=0.0, nearest=1.0, inputs=0.0):
    sizes = [10] * clients
    return Look([str(k) for k in range(clients)], sizes, sizes, sizes, labels, nearest, inputs, relation=0.0)


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
    always = {"local", "fedavg", "fedavg+tuned/fine_tuned", "fedper", "ditto", "knn_per", "ifca"}
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


ACC = Monitor()


def rows_with(seed=0, repeats=1, **gains):
    """Scores by method: each site's rows of 0 and 1, of which a share more is right than under Local.

    Args:
        seed: seed of the rows.
        repeats: number of training runs.
        **gains: by method, (number of rows, gain) by site.
    """
    rng = np.random.default_rng(seed)
    found = {"Local": {}} | {method: {} for method in gains}
    for site, (count, _) in next(iter(gains.values())).items():
        luck = rng.random(count)
        for repeat in range(repeats):
            found["Local"][repeat, site] = Scores((luck < 0.5).astype(float), count)
            for method, own in gains.items():
                found[method][repeat, site] = Scores((luck < 0.5 + own[site][1]).astype(float), count)
    return found


def test_a_site_takes_its_own_gain_then_that_of_all_sites_then_local():
    found = rows_with(
        Ditto={"a": (200, 0.4), "b": (200, -0.2), "c": (200, 0.01)}, APFL={site: (200, 0.1) for site in "abc"}
    )
    found["Ditto"][0, "c"] = found["Local"][0, "c"]
    assert [(pick.site, pick.method, pick.verdict) for pick in picks(found, "Local", ACC, "abcd")] == [
        ("a", "Ditto", Verdict.BETTER),
        ("b", "APFL", Verdict.BETTER),
        ("c", "APFL", Verdict.BETTER),
        # no rows there
        ("d", "APFL", Verdict.BETTER),
    ]
    assert picks(found, "Local", ACC, "a")[0].level == ()


def test_the_method_of_all_sites_is_taken_where_it_is_not_worse():
    sites = {site: (100, 0.15) for site in "abcdef"} | {"bad": (100, -0.3), "few": (4, 0.0)}
    found = picks(rows_with(Ditto=sites), "Local", ACC, list(sites))
    assert {pick.site for pick in found if pick.method == "Ditto"} == {*"abcdef", "few"}
    (bad,) = [pick for pick in found if pick.site == "bad"]
    assert (bad.method, bad.verdict) == ("Local", Verdict.NOT_BETTER) and "Ditto" in bad.reason


def test_local_stands_for_not_better_or_for_unknown():
    few = answer(rows_with(Ditto={"a": (20, 0.1)}), "Local", ACC)
    many = answer(rows_with(Ditto={"a": (5000, 0.0), "b": (5000, 0.001)}), "Local", ACC)
    worse = answer(rows_with(Ditto={"a": (100, -0.3)}), "Local", ACC)
    assert (few.method, few.verdict) == ("Local", Verdict.UNKNOWN)
    assert {many.verdict, worse.verdict} == {Verdict.NOT_BETTER} and not many.clear
    # what matters is a hundredth of a mean error
    error = {method: {("r", "a"): Scores(-np.full(400, value), 400)} for method, value in (("Local", 2.0), ("X", 1.9))}
    spread = np.random.default_rng(0).normal(scale=0.01, size=400)
    error["X"]["r", "a"] = Scores(error["X"]["r", "a"].values + spread, 400)
    assert answer(error, "Local", Monitor("mae", "min")).verdict is Verdict.BETTER
    error["X"]["r", "a"] = Scores(error["Local"]["r", "a"].values + spread, 400)
    assert answer(error, "Local", Monitor("mae", "min")).verdict is Verdict.NOT_BETTER


@pytest.mark.parametrize(("count", "verdict"), [(100, Verdict.UNKNOWN), (400, Verdict.NOT_BETTER)])
def test_no_difference_at_all_excludes_a_gain_by_the_rule_of_three(count, verdict):
    assert answer(rows_with(Ditto={"a": (count, 0.0)}), "Local", ACC).verdict is verdict


def test_of_methods_on_a_level_the_simple_one_is_taken():
    alike = rows_with(FedAvg={"a": (200, 0.20)}, Ditto={"a": (200, 0.20)})
    # right in 42 other rows
    base = alike["Local"][0, "a"].values
    alike["Ditto"][0, "a"] = Scores(base + (np.cumsum(base == 0) > (base == 0).sum() - 42) * (base == 0), 200)
    assert gain_of(alike["Ditto"], alike["FedAvg"]).mean > 0
    assert answer(alike, "Local", ACC).method == "FedAvg"
    apart = rows_with(FedAvg={"a": (200, 0.20)}, Ditto={"a": (200, 0.40)})
    assert answer(apart, "Local", ACC).clear == ("Ditto", "FedAvg")


def test_a_simple_method_on_a_level_with_a_clear_one_needs_no_correction_of_its_own():
    base = np.tile([0.0, 1.0], 200)

    def changed(gained, lost):
        values = base.copy()
        values[: 2 * gained : 2], values[1 : 2 * lost : 2] = 1.0, 0.0
        return {(0, "a"): Scores(values, 400)}

    # the same gain of five points: 20 rows for Ditto, and 62 against 42 for FedAvg
    rows = {"Local": changed(0, 0), "FedAvg": changed(62, 42), "APFL": changed(10, 9), "Ditto": changed(20, 0)}
    found = answer(rows, "Local", ACC)
    assert (found.method, found.clear) == ("FedAvg", ("FedAvg", "Ditto"))
    # without a method that is clear, nothing is claimed
    assert answer({name: own for name, own in rows.items() if name != "Ditto"}, "Local", ACC).verdict is Verdict.UNKNOWN
    # one that is clearly behind isn't taken
    assert answer(rows | {"Ditto": changed(80, 0)}, "Local", ACC).method == "Ditto"


def test_the_same_gain_at_all_seeds_is_evidence():
    found = rows_with(repeats=5, FedAvg={site: (30, 0.3) for site in "abcdef"})
    assert all(pick.method == "FedAvg" for pick in picks(found, "Local", ACC, "abcdef"))
    # also where a site has one score a run
    means = {
        method: {key: Scores(np.array([scores.values.mean()]), 1) for key, scores in own.items()}
        for method, own in found.items()
    }
    assert all(pick.method == "FedAvg" for pick in picks(means, "Local", ACC, "abcdef"))


def test_what_the_rows_would_have_shown():
    sizes = {"few": 50, "many": 5000}
    shown = {name: smallest_shown(answer(rows_with(X={"a": (n, 0.1)}), "Local", ACC)) for name, n in sizes.items()}
    assert shown["few"] > shown["many"] > 0
    assert math.isnan(smallest_shown(answer(rows_with(X={"a": (9, 0.0)}), "Local", ACC)))


def test_folds_are_joined_and_a_further_repeat_counts_when_it_is_whole(monkeypatch):
    results = [SimpleNamespace(run=SimpleNamespace(seed=seed)) for seed in range(1, 9)]
    rows = {(seed, "a"): Scores(np.array([seed, seed + 0.5]), 2) for seed in range(1, 9)}
    del rows[2, "a"]  # a site with less rows than folds
    monkeypatch.setattr("pfl_lightning.cli.advise.decide.row_scores", lambda results, part: rows)
    joined = scores_of(results, "val", folds=3)
    assert {key: scores.values.tolist() for key, scores in joined.items()} == {
        (0, "a"): [1, 1.5, 3, 3.5],
        (1, "a"): [4, 4.5, 5, 5.5, 6, 6.5],
    }
    assert joined[0, "a"].rows == 4
    assert scores_of(results[:2], "val", folds=3)[0, "a"].rows == 2
    assert scores_of(results, "test", folds=3) == rows


@pytest.mark.parametrize(("at_once", "kept"), [(False, "ab"), (True, "a")])
def test_a_site_with_few_rows_is_left_out(monkeypatch, at_once, kept):
    results = [SimpleNamespace(run=SimpleNamespace(seed=seed)) for seed in (1, 2)]
    # rows a fold; b has enough in both together
    sizes = {"a": 10, "b": 6, "c": 2}
    rows = {(seed, site): Scores(np.ones(count), count) for seed in (1, 2) for site, count in sizes.items()}
    monkeypatch.setattr("pfl_lightning.cli.advise.decide.row_scores", lambda results, part: rows)
    assert {site for _, site in scores_of(results, "val", 2, LEAST, at_once)} == set(kept)
    assert {site for _, site in scores_of(results, "test", 2, LEAST, at_once)} == {"a"}
    assert {site for _, site in scores_of(results, "val", 2)} == set(sizes)


def advice_of(folder, sites):
    """Advice by AUROC of Local and FedAvg, with each site's (gain on validation rows, validation rows)."""
    results = {}
    for method in ("Local", "FedAvg"):
        results[method] = []
        for seed in (1, 2):
            run = Run(method, seed, folder / method / str(seed), ())
            run.folder.mkdir(parents=True)
            wave, scores, lines = np.sin(np.arange(1000) + seed) / 10, [], []
            for gain, count in sites.values():
                # FedAvg's gain has a small spread over rows
                values = 0.5 + wave[:count] + ((gain or 0) + wave[5 : count + 5] / 20) * (method == "FedAvg")
                scores.append(Scores(np.float32(values if gain is not None else []), count))
                lines.append("nan,0.5" if gain is None else f"{np.mean(values)},0.5")
            write_scores(run.folder, {"val": scores, "test": scores})
            rows = [f"{k},{name},{line}" for k, (name, line) in enumerate(zip(sites, lines, strict=True))]
            for name, split in (("clients", "test"), ("client_rounds", "val")):
                table = [f"round,client,name,{split}/auroc,{split}/loss", *(f"4,{row}" for row in rows), ""]
                (run.folder / f"{name}.csv").write_text("\n".join(table))
            (run.folder / "summary.json").write_text('{"monitor": {"metric": "auroc"}}')
            results[method].append(Result(run, run.folder))
    sizes = [count for _, count in sites.values()]
    look = Look([*sites], sizes, sizes, sizes, None, None, None, None)
    settings = {"cost": lambda seeds: "1 s", "again": lambda seeds: "again"}
    return Advice("t", look, 1, {}, [], results, "Local", Monitor("auroc"), True, **settings)


def test_two_rows_dont_count_as_a_site_and_every_site_has_its_reason(tmp_path):
    sites = {"Aachen": (0.1, 50), "Celle": (-0.9, 2), "Fulda": (None, 30), "Ulm": (0.1, 40)}
    advice = advice_of(tmp_path / "few", sites)
    assert advice.overall.method == "FedAvg" and advice.overall.gains["FedAvg"].mean == pytest.approx(0.1, abs=0.01)
    assert advice.by == {"val": "client", "test": "client"}
    text = advice.write(tmp_path)
    pages = [text, *((tmp_path / f"advice.{kind}").read_text() for kind in ("md", "html"))]
    for page in pages:
        page = " ".join(page.split())
        for part in ("validation", "test"):
            assert re.search(rf"By {part} rows 2 of 4 sites count.* Celle \(2 rows.* 10\).* Fulda \(.*one class", page)
    rows = {row["site"]: row for row in read_csv(tmp_path / "advice.csv")}
    assert [*rows] == ["Aachen", "Celle", "Fulda", "Ulm"]
    for part in ("validation", "test"):
        assert "2 rows" in rows["Celle"][f"gain, {part}"] and "one class" in rows["Fulda"][f"gain, {part}"]
    assert rows["Celle"]["can't be told from"] == "any"
    (axes,) = advice.sites().figure().axes
    assert {text.get_text() for text in axes.texts} == {rows[site]["gain, test"] for site in ("Celle", "Fulda")}


def test_where_no_site_has_enough_rows_they_count_by_their_rows(tmp_path):
    advice = advice_of(tmp_path, {"A": (0.1, 8), "B": (-0.1, 2)} | {str(k): (0.1, 8) for k in range(9)})
    assert advice.by["val"] == "sample"
    share = 2 / (10 * 8 + 2)
    assert advice.overall.gains["FedAvg"].mean == pytest.approx(0.1 - 0.2 * share, abs=0.005)
    assert "by their rows" in " ".join(str(content) for _, content in advice.parts())


# Trials of the decision, with models by least squares in place of runs


def table_of(rng, sizes, inputs=10, noise=False):
    """Inputs and labels by site: all sites follow one rule, or none."""
    rule = rng.normal(size=inputs)
    rule *= 6 / np.linalg.norm(rule)
    found = []
    for size in sizes:
        x = rng.normal(size=(size, inputs))
        right = np.full(size, 0.5) if noise else 1 / (1 + np.exp(-x @ rule))
        found.append((x, np.where(rng.random(size) < right, 1.0, -1.0)))
    return found


def scores_by_folds(sites, folds=5):
    """Scores by method of each row, by models that learn from the other folds."""
    found = {method: {} for method in ("Local", "FedAvg", "FedAvg+fine_tuned", "Ditto")}
    parts = [[np.arange(len(y)) % folds == fold for _, y in sites] for fold in range(folds)]
    for is_val in parts:
        trained = [(x[~own], y[~own]) for (x, y), own in zip(sites, is_val, strict=True)]

        def fitted(x, y, start, strength):
            return start + np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ (y - x @ start))

        zero = np.zeros(sites[0][0].shape[1])
        common = fitted(np.concatenate([x for x, _ in trained]), np.concatenate([y for _, y in trained]), zero, 1.0)
        for site, ((x, y), own, mine) in enumerate(zip(sites, is_val, trained, strict=True)):
            models = [fitted(*mine, zero, 1.0), common, fitted(*mine, common, 10.0), fitted(*mine, common, 30.0)]
            for method, model in zip(found, models, strict=True):
                found[method].setdefault(str(site), []).append((x[own] @ model > 0) == (y[own] > 0))
    return {
        method: {
            (0, site): Scores(np.concatenate(each).astype(float), sum(map(len, each))) for site, each in own.items()
        }
        for method, own in found.items()
    }


def test_one_model_is_found_for_sites_that_are_alike():
    answers = [
        answer(scores_by_folds(table_of(np.random.default_rng(draw), [22] * 10)), "Local", ACC) for draw in range(8)
    ]
    assert sum(each.method == "FedAvg" for each in answers) >= 7


def test_noise_is_no_claim():
    answers = [
        answer(scores_by_folds(table_of(np.random.default_rng(draw), [45] * 10, noise=True)), "Local", ACC)
        for draw in range(20)
    ]
    assert sum(each.verdict is Verdict.BETTER for each in answers) <= 1


@pytest.mark.exhaustive
def test_of_equal_methods_one_is_advised_in_five_per_cent_of_trials_at_most():
    draws, claims, sites = 300, 0, []
    for draw in range(draws):
        rows = scores_by_folds(table_of(np.random.default_rng(1000 + draw), [45] * 10, noise=True))
        claims += answer(rows, "Local", ACC).verdict is Verdict.BETTER
        sites += [
            answer({m: {k: v for k, v in own.items() if k[1] == site} for m, own in rows.items()}, "Local", ACC)
            for site in map(str, range(10))
        ]
    bound = 0.05 + 2 * math.sqrt(0.05 * 0.95 / draws)
    assert claims / draws <= bound
    assert np.mean([each.verdict is Verdict.BETTER for each in sites]) <= bound


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
    lines = [f"{client},20,{test}" for client, (_, test) in enumerate(accuracies)]
    (folder / "clients.csv").write_text("\n".join(["client,samples,test/acc", *lines, ""]))
    (folder / "rounds.csv").write_text(f"round,cohort,bytes/up,bytes/down,test/acc\n{rounds},0,0,0,0.5\n")
    mean = sum(val for val, _ in accuracies) / len(accuracies)
    part = {"round": rounds, "val/acc": mean, "test/acc": 0.5}
    ends = {"final": part, "selected": part, "best_on_test": part, "partition": "p", "initial": f"i{run.seed}"}
    (folder / "summary.json").write_text(json.dumps(ends | {"seconds": 0.1 * rounds, "monitor": {"metric": "acc"}}))


@pytest.fixture
def made(monkeypatch):
    """Puts records in place of runs; the list of runs that were asked for, and settings of what comes out."""
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

    def tournament(methods, limit, seeds=10, rate=0.05, rates=(), folds=1):
        given = Namespace(table=None, out=Path("out"), jobs=1, vary_data=False, commands=False, collect=False)
        comparison = Comparison(given, ["--trainer.max_rounds", "4"])
        chosen = choose(methods, FOLDER / "methods")
        played = Tournament(comparison, chosen, budget(limit), 4, rate, time.perf_counter(), rates, folds)
        played.play(seeds, chosen[0].label)
        return played

    return tournament


@pytest.mark.exhaustive
def test_validation_chooses_and_test_rows_only_report(made):
    good = {"Local": (0.5, 0.7), "FedAvg": (0.4, 0.9), "Ditto": (0.8, 0.6)}
    made.accuracies = lambda run: [tuple(x + wobble(run) for x in good[run.method.split()[0]])] * 3
    assert advise(f"--methods local fedavg ditto {SMALL} --budget 1000r --seeds 4") == 0
    rows = read_csv(Path("out/advice.csv"))
    assert [(row["take"], row["answer"], row["can't be told from"]) for row in rows] == [
        ("Ditto", "better", "none")
    ] * 3
    gains = [float(rows[0][f"gain, {part}"].split()[0]) for part in ("validation", "test")]
    assert gains == pytest.approx([30, -10], abs=1)
    pages = [Path("out/advice.md").read_text(), Path("out/advice.html").read_text()]
    assert all(f"{gain:+.2f} [" in page for page in pages for gain in gains)
    # against the advice, clear on test rows: FedAvg's gain and Ditto's loss
    (said,) = [line for line in pages[0].splitlines() if line.startswith("Test rows say otherwise")]
    assert re.search(r"FedAvg \(\+\d.*; worse there: Ditto \(-\d", said)
    assert Path("out/advice.png").stat().st_size > 0 and Path("out/report.html").is_file()


@pytest.mark.parametrize(("seeds", "says"), [(4, "Further seeds tell how much"), (10, "% of the width of Ditto's")])
@pytest.mark.by_default("10-")
def test_the_width_of_intervals_is_split_where_training_was_repeated(made, seeds, says):
    levels = {"Local": 0.5, "FedAvg": 0.4, "Ditto": 0.8}
    made.accuracies = lambda run: [(levels[run.method.split()[0]] + k * wobble(run), 0.5) for k in range(3)]
    assert advise(f"--methods local fedavg ditto {SMALL} --budget 1000r --seeds {seeds}") == 0
    better = Path("out/advice.md").read_text().partition("To know better")[2]
    assert says in better


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
        (4 + 8 * 4, (2, 3), 5),
        (4 + 5 * 4, (2, 1), 5),
        (4 + 5 * 2, (1, 1), 5),
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


def test_a_refused_budget_names_what_runs_cost_without_the_imports_of_the_first(made, play, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def accuracies(run):
        # the first run reads modules from the disk; a second a round, and ten to start
        clock.now += 10 + rounds_of(run) + (0 if made.runs[1:] else 100)
        return [(0.5, 0.5)] * 3

    made.accuracies = accuracies
    with pytest.raises(MisconfigurationException) as refused:
        play(["local", "fedavg", "ditto"], "5s", seeds=5)
    # two probes, and five seeds of three methods with a round of 0.1 s in runs of 11.8 s more
    assert len(made.runs) == 2 and f"about {Budget(124 + 15 * 11.9, 'seconds')}" in str(refused.value)


def test_seeds_validate_on_the_folds_in_turn(made, play):
    play(["local", "fedavg"], "1000r", seeds=7, folds=3)

    def fold_of(run):
        return run.arguments[run.arguments.index("--data.val_fold") + 1]

    assert {(run.seed, fold_of(run)) for run in made.runs if 0 < run.seed < 10_000} == {
        (seed, str((seed - 1) % 3)) for seed in range(1, 8)
    }
    assert {(run.seed, fold_of(run)) for run in made.runs if RATE in run.arguments and not 0 < run.seed < 10_000} == {
        (0, "0"),
        (10_000, "1"),
        (10_001, "2"),
    }


def test_given_rates_are_tried(made, play):
    played = play(["local"], "1000r", seeds=1, rates=["0.1", "0.2"])
    assert {row[RATE[2:]] for row in played.trials} == {"0.1", "0.2"}


def test_a_budget_without_room_for_the_seeds_is_refused(play):
    with pytest.raises(MisconfigurationException, match=r"--budget 9 rounds is too small.*about 14 rounds"):
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


@pytest.mark.exhaustive
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
    assert [(row["site"], row["take"]) for row in rows] == [(site, "Local") for site in "012"]
    means = []
    for method in ("Local", "FedAvg"):
        (path,) = Path(f"out/{method}/seed_1").glob("*/*/client_rounds.csv")
        last = [row for row in read_csv(path) if row["round"] == "2"]
        means.append(sum(float(row["val/acc"]) for row in last) / 3)
        assert yaml.safe_load((path.parent / "config.yaml").read_text())["trainer"]["max_rounds"] == 2
    (said,) = [line for line in Path("out/advice.md").read_text().splitlines() if line.startswith("| FedAvg |")][:1]
    # by single rows, whose means are those of the sites
    assert len(np.load(next(Path("out/FedAvg/seed_1").glob("*/*/sample_scores.npz")))["val"]) > 3
    assert f"{100 * (means[1] - means[0]):+.2f} [" in said
