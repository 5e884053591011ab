"""``pfl-lightning compare``: as its user sees it, most of it with a stand-in for ``fit``."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import CONFIGS, QUIET, forked, pfl, refusal, wait_for
from federations import blobs, equal, fit, load, make_client, read_csv
from pfl_lightning.cli.compare import runs
from pfl_lightning.cli.compare.choices import Choice, choose, stored_table
from pfl_lightning.cli.compare.results import STEPS, factors
from pfl_lightning.cli.compare.runs import Run
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.cli.load_config import complaint
from pfl_lightning.methods import FedProx
from pfl_lightning.plots.runs import plot_curves, plot_mean_curves
from wandb_files import records

STAND_IN = '''
"""Leaves a record as fit does; what it does else is in plan.json, by method and seed, or by method."""
import json, os, sys, time
from pathlib import Path

words = sys.argv[1:]
files = {"local": "Local", "fedavg": "FedAvg", "fedprox": "FedProx", "fedper": "FedPer", "ditto": "Ditto"}
given = words[words.index("--model" if "--model" in words else "--config") + 1]
model = given if "--model" in words else files[Path(given).stem]
seed = int(words[words.index("--seed_everything") + 1])
plans = json.loads(Path("plan.json").read_text()) if Path("plan.json").exists() else {}
plan = plans.get(f"{model} {seed}", plans.get(model, {}))
shown = {name: os.environ.get(name) for name in ("WANDB_RUN_GROUP", "WANDB_NAME", "OMP_NUM_THREADS")}
with open("calls.jsonl", "a") as file:
    file.write(json.dumps({"model": model, "seed": seed, "words": words, "pid": os.getpid(), **shown}) + "\\n")
root = words[words.index("--trainer.default_root_dir") + 1]
folder = Path(root, f"{model}-Data", "version_0")
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.yaml").write_text("")
while plan.get("until") and not Path(plan["until"]).exists():
    time.sleep(0.01)
Path(f"begun_{model}").touch()
if plan.get("fails"):
    print("some warning")
    sys.exit(plan["fails"])
if plan.get("killed"):
    os.kill(os.getpid(), 9)
accuracy = plan.get("accuracy", 0.5 + seed / 10)
if "by_mu" in plan:
    accuracy = plan["by_mu"][words[words.index("--model.mu") + 1]]
cell = "" if accuracy is None else accuracy
(folder / "rounds.csv").write_text(
    "round,cohort,bytes/up,bytes/down,clients,local/steps,local/samples,test/acc,val/acc_mean\\n"
    f"1,0 1,1048576,0,2,{plan.get('steps', 6)},{plan.get('samples', 40)},{cell},\\n"
    f"2,{plan.get('cohort', '1 2')},3145728,0,1,0,20,{cell},{plan.get('val', '')}\\n"
    + "".join(f"{k},1 2,0,0,0,0,0,{value},\\n" for k, value in enumerate(plan.get("later", []), 3))
)
tested = plan.get("clients", [cell, cell])
names = plan.get("names", [""] * len(tested))
rows = [f"{k},{name},20,{value}" for k, (name, value) in enumerate(zip(names, tested))]
(folder / "clients.csv").write_text("\\n".join(["client,name,samples,test/acc", *rows, ""]))
if scores := plan.get("scores"):
    import numpy as np

    counts = [len(each) for each in scores]
    test = {"test": np.concatenate(scores).astype("f4"), "test_counts": counts, "test_rows": counts}
    none = {"val": np.empty(0, "f4"), "val_counts": [0] * len(scores), "val_rows": [0] * len(scores)}
    np.savez(folder / "sample_scores.npz", **test, **none)
part = {"round": 2, "val/acc": accuracy, "test/acc": accuracy} | plan.get("central", {})
(folder / "summary.json").write_text(json.dumps({
    "final": part, "selected": part, "best_on_test": part, "best_global": plan.get("central", {}), "seconds": 1.5,
    **{name: plan[name] for name in ("new", "privacy") if name in plan},
    "monitor": {"metric": "acc", "mode": "max"},
    "partition": plan.get("partition", "p"), "initial": plan.get("initial", f"i{seed}"),
}))
'''

OUT = Path("runs/compare-Digits")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts the stand-in in fit's place; gives a function that says what it does."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(runs, "PROGRAM", "stand_in")
    monkeypatch.setattr(runs, "WHOLE", "json")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    # that parser takes half a second for each line; tests of what it refuses ask it
    for name in ("command", "tuning"):
        monkeypatch.setattr(f"pfl_lightning.cli.compare.{name}.complaint", lambda args: None)
    return lambda **plans: (tmp_path / "plan.json").write_text(
        json.dumps({name.replace("_", " "): plan for name, plan in plans.items()})
    )


def compare(line: str) -> int:
    """Runs ``pfl-lightning compare LINE``; gives the exit code."""
    with pytest.raises(SystemExit) as ended:
        pfl(f"compare {line}")
    return ended.value.code


def calls() -> list[dict]:
    path = Path("calls.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def called() -> set[tuple[str, int]]:
    return {(call["model"], call["seed"]) for call in calls()}


def alive(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return shown != "" and not shown.startswith("Z")


# Settings that each method gets for itself


def mu_of(call) -> str:
    return call["words"][call["words"].index("--model.mu") + 1]


@pytest.mark.exhaustive
def test_each_method_gets_the_value_that_is_best_on_validation(stand_in, capsys):
    stand_in(FedProx={"by_mu": {"0": 0.3, "0.1": 0.7, "1": 0.5}}, Ditto={"by_mu": {"0": 0.2, "0.1": 0.1, "1": 0.4}})
    line = "--methods FedProx Ditto --data Digits --seeds 0 1 --trainer.max_rounds 9 --tune model.mu=0,0.1,1"
    assert compare(f"{line} --tune_rounds 3") == 0
    # of two values of an option the later one counts
    assert [call["words"].count("3") for call in calls()] == [1] * 6 + [0] * 4
    assert [(call["model"], call["seed"], mu_of(call)) for call in calls()[6:]] == [
        *(("FedProx", 0, "0.1"), ("Ditto", 0, "1"), ("FedProx", 1, "0.1"), ("Ditto", 1, "1"))
    ]
    out = capsys.readouterr().out
    assert "FedProx: mu=0.1, best validation 0.7 of 3 trials" in out
    assert "Chosen on validation: FedProx mu=0.1; Ditto mu=1." in (OUT / "comparison.md").read_text()
    assert "[1/6] FedProx mu=0, seed 0: 30.00 %" in out
    notes = (OUT / "comparison.md").read_text()
    assert "Tried for each method at seed 0, one of the table's seeds, for 3 rounds: mu 0, 0.1, 1." in notes
    assert "(try more values by --tune): Ditto mu=1." in notes
    assert "Ditto: mu=1, best validation 0.4 of 3 trials; mu=1 is at the edge of the grid" in out
    tried = read_csv(OUT / "tuning.csv")
    assert [float(row["validation"]) for row in tried] == [0.3, 0.7, 0.5, 0.2, 0.1, 0.4]
    assert [row["model.mu"] for row in tried] == ["0", "0.1", "1"] * 2
    Path("calls.jsonl").unlink()
    assert compare(f"{line} --tune_rounds 3") == 0
    assert not calls()


def test_a_trial_on_several_folds_counts_by_its_mean(stand_in, capsys):
    # the stand-in's accuracy is that of the value, whichever fold validates
    stand_in(FedProx={"by_mu": {"0": 0.3, "1": 0.5}})
    assert compare("--methods FedProx --data Digits --tune model.mu=0,1 --tune_folds 3 --data.val_fraction 0.34") == 0
    folds = [
        words[words.index("--data.val_fold") + 1] for call in calls() if "--data.val_fold" in (words := call["words"])
    ]
    assert folds == ["0", "1", "2"] * 2 and len(calls()) == 7
    assert [float(row["validation"]) for row in read_csv(OUT / "tuning.csv")] == pytest.approx([0.3, 0.5])
    assert "on each of 3 folds: mu 0, 1." in (OUT / "comparison.md").read_text()


@pytest.mark.exhaustive
def test_a_method_without_a_value_is_left_out(stand_in, capsys):
    stand_in(FedProx={"by_mu": {"0": None, "1": None}}, Ditto={"by_mu": {"0": 0.2, "1": 0.4}})
    assert compare("--methods FedProx Ditto --data Digits --tune model.mu=0,1") == 0
    assert "FedProx: no trial has a validation value, so it is left out" in capsys.readouterr().out
    assert [row["method"] for row in read_csv(OUT / "comparison.csv")] == ["Ditto"]
    assert "Left out, without a validation value in any trial: FedProx." in (OUT / "comparison.md").read_text()


@pytest.fixture
def asked(stand_in, monkeypatch):
    """Has command lines looked at by their parser, as they are but for tests."""
    for name in ("command", "tuning"):
        monkeypatch.setattr(f"pfl_lightning.cli.compare.{name}.complaint", complaint)
    return stand_in


@pytest.mark.exhaustive
def test_methods_without_a_setting_run_untuned(asked, capsys):
    asked(FedProx={"by_mu": {"0": 0.3, "1": 0.5}})
    line = "--methods FedProx Local --data Digits --tune model.mu=0,1"
    assert compare(line) == 0
    assert [call["model"] for call in calls()] == ["FedProx", "FedProx", "FedProx", "Local"]
    assert [mu_of(call) for call in calls()[:3]] == ["0", "1", "1"] and "--model.mu" not in calls()[3]["words"]
    assert "Local: it has no model.mu, and runs untuned" in capsys.readouterr().out.splitlines()
    notes = (OUT / "comparison.md").read_text()
    assert "Untuned, with no model.mu: Local." in notes and "Chosen on validation: FedProx mu=1." in notes
    Path("calls.jsonl").unlink()
    assert compare(line) == 0
    assert not calls()


@pytest.mark.exhaustive
def test_a_method_is_tuned_by_the_settings_that_it_has(asked, capsys):
    asked(FedProx={"by_mu": {"0": 0.3, "1": 0.5}})
    rates = "model.init_args.optimizer.init_args.lr=0.1,0.2"
    assert compare(f"--methods FedProx Local --data Digits --tune {rates} --tune model.mu=0,1") == 0
    tried = [call["model"] for call in calls()]
    assert [tried.count(model) for model in ("FedProx", "Local")] == [5, 3]
    notes = (OUT / "comparison.md").read_text()
    assert "Tuned in part, with no model.mu: Local." in notes
    assert "Chosen on validation: FedProx lr=0.1,mu=1; Local lr=0.1." in notes


@pytest.mark.exhaustive
def test_trials_that_failed_are_counted(stand_in, capsys):
    stand_in(FedProx={"by_mu": {"0": 0.3}})
    assert compare("--methods FedProx --data Digits --tune model.mu=0,1") == 0
    assert "FedProx: mu=0, best validation 0.3 of 2 trials, 1 of them without one" in capsys.readouterr().out
    assert "Trials without a validation value: FedProx 1 of 2." in (OUT / "comparison.md").read_text()


@pytest.mark.exhaustive
def test_tuning_that_was_killed_goes_on_to_the_same_table(stand_in):
    plan = {"FedProx": {"by_mu": {"0": 0.3, "1": 0.5}}, "Ditto": {"by_mu": {"0": 0.4, "1": 0.2}}}
    line = "--methods FedProx Ditto --data Digits --seeds 0 1 --tune model.mu=0,1 --columns last"
    stand_in(**plan)
    assert compare(f"{line} --out whole") == 0
    # among the trials, then among the runs
    for stops, run in (("Ditto", ("Ditto", 0)), ("Ditto_1", ("Ditto", 1))):
        Path("calls.jsonl").unlink()
        stand_in(**plan | {stops: plan["Ditto"] | {"until": "never"}})
        begun = forked(pfl, f"compare {line} --out killed")
        wait_for(lambda run=run: run in called(), begun)
        begun.kill()
        begun.join()
    stand_in(**plan)
    assert compare(f"{line} --out killed") == 0
    tables = [Path(out, "comparison.md").read_text() for out in ("whole", "killed")]
    assert tables[0] == tables[1] and "FedProx mu=1; Ditto mu=0" in tables[0]


TUNING_MISTAKES = {
    "model.muu=0,1": "compare: --tune model.muu is a setting of no method here: model.muu is not a setting of FedProx; "
    "did you mean model.mu?",
    "trainer.local_step=3": "--tune trainer.local_step is a setting of no method here: trainer.local_step is not an "
    "option; did you mean trainer.local_steps",
    "model.mu=0,x": "compare: --tune model.mu=x: model.mu=x must be a number.",
    "model.mu=0 --tune model.mu=1": "compare: --tune model.mu is given twice; give all of its values in one.",
}


@pytest.mark.parametrize("line", TUNING_MISTAKES)
@pytest.mark.by_default(but=["trainer.local_step=3"])
def test_settings_that_no_method_has_are_refused(line, asked, capsys):
    message = refusal(f"compare --methods Local FedProx --data Digits --tune {line}", capsys)
    assert TUNING_MISTAKES[line] in message
    assert not calls() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--data MINST", "data=MINST is no known class; did you mean MNIST"),
        ("--data Digits --trainer.max_rounds x", "trainer.max_rounds=x must be an integer."),
        ("--data Digits --trainer.max_round 3", "trainer.max_round is not an option; did you mean trainer.max_rounds"),
        ("--data Digits --model.muu 3", "model.muu is not a setting of Local; choose from"),
        ("", "nothing is given for data"),
    ],
)
@pytest.mark.by_default(but=["-nothing is given for data"])
def test_what_no_run_takes_is_refused_before_any(line, says, asked, capsys):
    assert says in refusal(f"compare --methods Local FedPer {line}", capsys)
    assert not calls() and not Path("runs").exists()


@pytest.mark.exhaustive
def test_what_one_method_takes_is_no_mistake(asked, capsys):
    assert compare("--methods Local FedProx --data Digits --model.mu 1") == 0
    assert called() == {("Local", 0), ("FedProx", 0)}


@pytest.mark.exhaustive
def test_commands_are_printed_and_what_they_leave_is_collected(stand_in, capsys):
    line = "--methods Local FedAvg --data Digits --seeds 0 1"
    assert compare(f"{line} --commands") == 0
    commands = capsys.readouterr().out.splitlines()
    assert not calls()
    assert [command.split()[:2] for command in commands] == [["pfl-lightning", "fit"]] * 4
    for command in commands[:3]:
        subprocess.run([sys.executable, "stand_in.py", *command.split()[2:]], check=True)
    assert compare(f"{line} --commands") == 0
    assert capsys.readouterr().out.splitlines() == commands[3:]
    assert compare(f"{line} --collect") == 0
    assert "runs that have finished: 3 of 4" in capsys.readouterr().out
    assert len(calls()) == 3
    assert [row["seeds"] for row in read_csv(OUT / "comparison.csv")] == ["0 1", "0"]


def test_commands_are_those_of_trials_until_all_of_a_method_s_are_made(stand_in, capsys):
    stand_in(FedProx={"by_mu": {"0": 0.3, "1": 0.5}})
    line = "--methods FedProx --data Digits --tune model.mu=0,1 --commands"
    for made in range(2):
        assert compare(line) == 0
        out, err = capsys.readouterr()
        trials = out.splitlines()
        assert len(trials) == 2 - made and all("/tuning/" in trial for trial in trials)
        assert err == "FedProx: its runs' commands can be told once all of its trials are made\n"
        subprocess.run([sys.executable, "stand_in.py", *trials[0].split()[2:]], check=True)
    assert compare(line) == 0
    out, err = capsys.readouterr()
    (run,) = out.splitlines()
    assert "--model.mu 1 " in run and "/tuning/" not in run
    assert err == "FedProx: mu=1, best validation 0.5 of 2 trials; mu=1 is at the edge of the grid\n"


# Tables that a file describes


@pytest.mark.exhaustive
def test_a_table_is_its_file_and_flags_behind_it_win(stand_in, capsys, tmp_path):
    options = "vary_data: true\nfit: --data Digits --data.batch_size 8\npaper: {Local: 51.5}"
    (tmp_path / "mine.yaml").write_text(f"methods: [Local, FedAvg]\nseeds: [0, 1]\n{options}")
    assert compare("--table mine --seeds 1 --data.batch_size 4") == 0
    assert called() == {("Local", 1), ("FedAvg", 1)}
    words = calls()[0]["words"]
    assert [words[at + 1] for at, word in enumerate(words) if word == "--data.batch_size"] == ["8", "4"]
    assert words[words.index("--data.seed") + 1] == "1"
    table = Path("runs/compare-mine/comparison.md").read_text().splitlines()
    assert table[0].endswith(" paper |")
    assert table[2].endswith("| 51.5 |") and table[3].endswith("| - |")


@pytest.mark.exhaustive
def test_a_table_has_a_grid_unless_one_is_given_by_hand(stand_in, tmp_path):
    stand_in(FedProx={"by_mu": {"0": 0.3, "1": 0.7, "2": 0.5}})
    (tmp_path / "mine.yaml").write_text("methods: [FedProx]\nfit: --data Digits\ntune: ['model.mu=0,1']")
    assert compare("--table mine") == 0
    assert [mu_of(call) for call in calls()] == ["0", "1", "1"]
    assert compare("--table mine --out other --tune model.mu=2") == 0
    assert [mu_of(call) for call in calls()[3:]] == ["2", "2"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "tables").glob("*.yaml")))
def test_every_table_of_the_package_names_runs_that_there_are(name, stand_in, capsys):
    assert compare(f"--table {name} --seeds 0 --commands") == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(commands) > 1
    for command in commands:
        assert all(path.is_file() for path in runs.files(command))
    labels = {Path(command[command.index("--trainer.default_root_dir") + 1]).parent.name for command in commands}
    assert stored_table(["--table", name]).paper.keys() <= labels


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seeds: [0]", "has no methods"),
        ("methods: [Local]\nround: 3", "round=3 is no entry"),
        ("methods: Local", "methods='Local' is no entry"),
        ("methods: [Local]\nseeds: 2020-99-99", "seeds='2020-99-99' is no entry"),
        ("methods: [Local]\nseeds: !!int x", "mine.yaml: the configuration is not valid YAML: invalid literal"),
        ("methods: [Local", "mine.yaml: the configuration is not valid YAML: while parsing"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text, says, stand_in, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    assert says in refusal("compare --table mine.yaml", capsys)


def test_the_largest_seed_is_one_and_the_next_is_none(stand_in, capsys):
    line = "compare --methods Local --data Digits --trainer.max_rounds 1 --commands --seeds"
    assert "seeds from 0 to 4294967295" in refusal(f"{line} 4294967296", capsys)
    assert compare(f"{line.removeprefix('compare ')} 4294967295") == 0
    assert "--seed_everything 4294967295" in capsys.readouterr().out


# Client by client


def table_of(out=OUT) -> dict[str, dict[str, str]]:
    """Cells of comparison.md by method and title."""
    head, _, *rows = (out / "comparison.md").read_text().partition("\n\n")[0].splitlines()
    titles, *cells = (line.strip("| ").split(" | ") for line in (head, *rows))
    return {row[0]: dict(zip(titles, row, strict=True)) for row in cells}


def test_the_best_alone_is_bold_and_differences_have_intervals_and_stars(stand_in):
    own, names = [0.50, 0.60, 0.55], ["Bremen", "Erfurt", "Kiel"]
    # gains over Local by seed, of all clients: 20, 21 and 22 points; -2, 2 and 3; none
    gains = {"FedPer": (0.20, 0.21, 0.22), "FedProx": (-0.02, 0.02, 0.03), "Local": (0, 0, 0), "Ditto": (0, 0, 0)}
    stand_in(
        **{
            f"{method}_{seed}": {
                "clients": [value + gain for value in own],
                "names": names,
                "accuracy": 0.8 if method == "Ditto" else 0.9,
            }
            for method, by_seed in gains.items()
            for seed, gain in enumerate(by_seed)
        }
    )
    assert compare("--methods Local FedPer FedProx Ditto --data Digits --seeds 0 1 2") == 0
    table = table_of()
    # 2.484 is t's 97.5 % quantile of two degrees of freedom times 1 / sqrt(3)
    assert table["FedPer"]["over Local (by client)"] == "+21.00 [+18.52, +23.48]* (100 %)"
    assert table["FedProx"]["over Local (by client)"] == "+1.00 [-5.57, +7.57] (67 %)"
    # the same difference at each seed has no interval
    assert (table["Ditto"]["over Local (by client)"], table["Local"]["over Local (by client)"]) == ("+0.00 (0 %)", "-")
    bold = {(method, title) for method, row in table.items() for title, cell in row.items() if cell[:2] == "**"}
    # three methods share the first place of the weighted mean
    weighted = {(method, "last (by sample)") for method in ("Local", "FedPer", "FedProx")}
    assert bold == {("FedPer", "last (by client)"), *weighted}
    notes = " ".join((OUT / "comparison.md").read_text().split())
    assert "after Holm's correction for 2 comparisons" in notes and notes.count("Reported round") == 1
    latex = (OUT / "comparison.tex").read_text()
    assert latex.count(r"\textbf{") == 4 and latex.count("{") == latex.count("}")
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in body} == {len(table["Local"]) - 1}
    by_client = read_csv(OUT / "by_client.csv")
    assert [row["client"] for row in by_client[:3]] == names
    (row,) = (row for row in by_client if (row["client"], row["method"]) == ("Erfurt", "FedPer"))
    numbers = [float(row[name]) for name in ("mean", "std", "gain over Local", "low", "high")]
    assert numbers == pytest.approx([0.81, 0.01, 0.21, 0.21 - 0.0248413, 0.21 + 0.0248413])
    assert "| Bremen | +21.00 [+18.52, +23.48] | +1.00 [-5.57, +7.57]" in (OUT / "by_client.md").read_text()
    assert (OUT / "by_client.tex").read_text().count(r"\begin{table}") == 2
    assert (OUT / "report.html").read_text().count("<h2>By client</h2>") == 1


def right(*counts):
    """Scores of clients, each with so many right rows of so many, and the clients' accuracies."""
    scores = [[1.0] * share + [0.0] * (rows - share) for share, rows in counts]
    accuracies = [share / rows for share, rows in counts]
    whole = sum(share for share, _ in counts) / sum(rows for _, rows in counts)
    return {"scores": scores, "clients": accuracies, "accuracy": whole}


def test_intervals_are_over_test_rows_where_all_seeds_share_them_and_both_means_are_told(stand_in):
    stand_in(
        Local=right((60, 100), (14, 16)) | {"val": 0.7},
        # better by sample, and worse by client
        FedAvg=right((66, 100), (12, 16)) | {"val": 0.6},
        FedPer=right((70, 100), (14, 16)) | {"val": 0.8},
    )
    line = "--methods Local FedAvg FedPer --data Digits --seeds 0 1 2"
    assert compare(line) == 0
    table, notes = table_of(), " ".join((OUT / "comparison.md").read_text().split())
    titles = ["over Local (by client)", "over Local (by sample)"]
    assert [name for name in table["FedPer"] if name.startswith("over ")] == titles
    for title, share in zip(titles, (0.5, 100 / 116), strict=True):
        # ten rows of the hundred differ, the same at each seed: their variance over rows, and none over seeds
        half = 1.98 * share * math.sqrt(0.1 * 0.9 / 99)
        mean, low, high = map(float, re.findall(r"[+-][\d.]+", table["FedPer"][title])[:3])
        assert mean == pytest.approx(10 * share, abs=0.01)
        assert (low, high) == pytest.approx((mean - 100 * half, mean + 100 * half), abs=0.1)
        row = {row["method"]: row for row in read_csv(OUT / "comparison.csv")}["FedPer"]
        told = [100 * float(row[f"{title} {name}"]) for name in ("mean", "low", "high")]
        assert told == pytest.approx((mean, low, high), abs=0.01) and row[f"{title} star"] == "True"
    assert "The two means disagree: Local is better than FedAvg by client, and worse by sample." in notes
    assert "from 3 methods: FedPer." in notes
    # over seeds the same rows count as certain
    assert compare(f"{line} --interval seeds") == 0
    assert "for these test rows alone" in (OUT / "comparison.md").read_text()


@pytest.mark.exhaustive
def test_a_reference_that_validation_prefers_is_no_gain_and_without_validation_nothing_is_chosen(stand_in):
    methods = ("Local", "FedAvg", "FedPer")
    for values, words in (((0.8, 0.6, 0.8), "choose Local, the reference"), (("", "", ""), "No row validates")):
        stand_in(**{name: right((60, 100)) | {"val": value} for name, value in zip(methods, values, strict=True)})
        out = Path("runs", words.split()[-1])
        assert compare(f"--methods {' '.join(methods)} --data Digits --out {out}") == 0
        assert words in " ".join((out / "comparison.md").read_text().split())


@pytest.mark.exhaustive
def test_where_rows_differ_by_seed_or_have_no_scores_intervals_are_over_seeds(stand_in):
    own = {"Local": 60, "FedAvg": 66}
    for kind in ("partition", "scores"):
        plans = {
            f"{name}_{seed}": right((share + seed, 100)) | ({kind: f"p{seed}"} if kind == "partition" else {kind: None})
            for name, share in own.items()
            for seed in (0, 1)
        }
        stand_in(**plans)
        assert compare(f"--methods Local FedAvg --data Digits --seeds 0 1 --interval samples --out runs/{kind}") == 0
        notes = " ".join(Path(f"runs/{kind}/comparison.md").read_text().split())
        assert "--interval samples needs scores of the same test rows" in notes and "by Student's t over seeds" in notes


@pytest.mark.exhaustive
def test_unnamed_clients_of_other_partitions_are_not_compared_by_client(stand_in):
    stand_in(FedAvg_1={"partition": "q"})
    assert compare("--methods FedAvg --data Digits --seeds 0 1 --vary_data") == 0
    assert "no table by client" in (OUT / "comparison.md").read_text()
    assert not list(OUT.glob("by_client*"))


@pytest.mark.exhaustive
def test_intervals_hold_for_other_clients_where_these_stay(stand_in):
    stand_in(
        FedPer_0={"clients": [0.5, 0.7]},
        FedPer_1={"clients": [0.6, 1.0]},
        FedAvg={"clients": [0.4, 0.4]},
        Local_0={"partition": "q", "clients": [0.5, 0.7]},
        Local_1={"clients": [0.6, 1.0]},
    )
    line = "--methods FedPer FedAvg --data Digits --seeds 0 1"
    for options, cell in {"": "+30.00 [-97.06, +157.06]", "--interval clients": "+30.00 [-160.59, +220.59]"}.items():
        assert compare(f"{line} {options}") == 0
        assert table_of()["FedPer"]["over FedAvg (by client)"].startswith(cell)
        assert "each with other clients" not in (OUT / "comparison.md").read_text()
    # each seed has clients of its own
    assert compare("--methods Local FedAvg --data Digits --seeds 0 1 --reference FedAvg --interval clients") == 0
    assert table_of()["Local"]["over FedAvg (by client)"].startswith("+30.00 [-97.06, +157.06]")
    notes = (OUT / "comparison.md").read_text()
    assert "--interval clients needs the same clients" in notes and "over seeds, each with other clients" in notes


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ("--reference FedPer", "over FedPer"),
        ("--columns last,over~Local", "over FedAvg"),
    ],
)
@pytest.mark.by_default("--columns last,over~Local-over FedAvg")
def test_the_reference_is_the_one_given_or_chosen_by_names_alone(stand_in, options, title):
    stand_in(FedPer={"clients": [0.1, 0.2]}, FedAvg={"clients": [0.3, 0.3]})
    line = ["--methods", "FedPer", "FedAvg", "--data", "Digits"]
    with pytest.raises(SystemExit):
        pfl(["compare", *line, *(word.replace("~", " ") for word in options.split())])
    reference, sign = title.removeprefix("over "), 1 if title == "over FedPer" else -1
    other = {"FedPer": "FedAvg", "FedAvg": "FedPer"}[reference]
    row = table_of()
    titles = [f"{title} (by client)", f"{title} (by sample)"]
    assert row[reference][titles[0]] == "-" and row[other][titles[0]].startswith(f"{15 * sign:+.2f} (")
    # the stand-in's two means differ
    assert [name for name in row[other] if name.startswith("over ")] == titles


@pytest.mark.exhaustive
def test_columns_that_are_asked_for(stand_in, capsys):
    own = {"Local": [0.1, 0.9], "FedPer": [0.3, 0.8], "Ditto": [0.4, 0.8]}
    later = [k / 100 for k in range(1, 11)]
    stand_in(**{name: {"clients": values, "accuracy": 0.5, "later": later} for name, values in own.items()})
    asked = ["last", "mean of last five", "ten best", "std over clients", "rank"]
    content = {"methods": list(own), "fit": "--data Digits", "columns": asked}
    Path("mine.yaml").write_text(json.dumps(content))
    assert compare("--table mine.yaml --out runs/compare-Digits") == 0
    lines = (OUT / "comparison.md").read_text().splitlines()
    head, _, *rows = (line.strip("| ").split(" | ") for line in lines[:5])
    assert head == ["method", "last (by sample)", *asked[1:]]
    # twelve rounds: two of 50 %, and those of 1 to 10 %; at the second client two share the second place
    assert [row[2:] for row in rows] == [
        ["8.00", "15.20", "40.00", "2.00"],
        ["8.00", "15.20", "25.00", "2.25"],
        ["8.00", "15.20", "20.00", "1.75"],
    ]
    assert "Rank: the mean over seeds and clients" in capsys.readouterr().out
    assert "over Local" not in lines[0] and "Over Local" not in " ".join(lines)


def work_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("Unequal work")]


@pytest.mark.exhaustive
def test_unequal_work_has_a_column_and_a_sentence(stand_in, capsys):
    # 6 steps and 60 samples are usual; FedPer's steps are within five per cent of that, and Local trains nothing
    stand_in(
        FedProx={"steps": 180, "samples": 1780},
        Ditto={"steps": 12, "samples": 100},
        FedPer={"steps": 6.2, "samples": 160},
        Local={"steps": 0},
    )
    assert compare("--methods FedAvg FedProx Ditto FedPer Local --data Digits") == 0
    head, _, *rows = (line.strip("| ").split(" | ") for line in (OUT / "comparison.md").read_text().splitlines()[:7])
    steps, samples = ([row[head.index(title)] for row in rows] for title in ("local steps", "samples read"))
    assert (steps, samples) == (["6", "180", "12", "6", "0"], ["60", "1800", "120", "180", "60"])
    assert work_of(capsys.readouterr().out) == [
        "Unequal work: FedProx makes 30 times the local steps of FedAvg, Ditto 2 times.",
        "Unequal work: FedPer reads 3 times the samples of FedAvg.",
    ]


def test_the_usual_work_is_the_most_frequent_and_else_the_least():
    def of(**work):
        return factors({method: {STEPS: (steps, None)} for method, steps in work.items()}, STEPS)

    # within five per cent the frequent value counts, not the least
    assert of(a=12.5, b=12.25, c=12.5, d=25.0) == {"d": 2.0}
    assert of(a=10.0, b=5.0) == {"a": 2.0} and of(a=5.0, b=10.0, c=10.0) == {"a": 0.5}
    assert of(a=0.0, b=5.0) == of(a=0.0) == of() == {}


@pytest.mark.exhaustive
def test_equal_work_has_neither_unless_asked_for(stand_in, capsys):
    stand_in(FedPer={"steps": 6.2})
    assert compare("--methods FedAvg FedPer --data Digits") == 0
    assert not work_of(capsys.readouterr().out)
    assert "local steps" not in (OUT / "comparison.md").read_text()
    content = {"methods": ["FedAvg"], "fit": "--data Digits", "columns": ["samples read"]}
    Path("mine.yaml").write_text(json.dumps(content))
    assert compare("--table mine.yaml --out runs/compare-Digits") == 0
    assert "| method | samples read |" in (OUT / "comparison.md").read_text()


@pytest.mark.exhaustive
def test_what_a_target_costs(stand_in):
    header = "round,cohort,bytes/up,bytes/down,time/train,time/evaluate,val/acc,test/acc\n"
    rounds = {
        "Local": [(0, 1.5, 0.4), (0, 1.5, 0.7)],
        "FedPer": [(3, 2.0, ""), (1, 0.5, 0.6), (9, 9.0, 0.9)],
        "Ditto": [(1, 1.0, 0.1)],
    }
    stand_in(**{name: {} for name in rounds})
    assert compare("--methods Local FedPer Ditto --data Digits") == 0
    for name, rows in rounds.items():
        (path,) = (OUT / name).glob("*/*/*/rounds.csv")
        lines = [f"{k},0 1,{mib * 2**20},{mib * 2**20},{s},1,{v},0.5" for k, (mib, s, v) in enumerate(rows, 1)]
        path.write_text(header + "\n".join(lines) + "\n")
    columns = ["--columns", "last, rounds to 60, MiB to 60, seconds to 60"]
    with pytest.raises(SystemExit):
        pfl(["compare", "--methods", *rounds, "--data", "Digits", *columns])
    lines = (OUT / "comparison.md").read_text().splitlines()
    assert [line.strip("| ").split(" | ")[2:] for line in lines[2:5]] == [
        ["2", "0.00", "5.0"],
        ["2", "8.00", "4.5"],
        ["never", "never", "never"],
    ]
    assert any(line.startswith("To a target") for line in lines)
    # a clock of devices adds up beside the measured time, and runs without one have no such cost
    (path,) = (OUT / "FedPer").glob("*/*/*/rounds.csv")
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([f"{first},time/simulated", *(f"{line},1000" for line in others)]) + "\n")
    columns[1] = "last, seconds to 60, simulated seconds to 60"
    with pytest.raises(SystemExit):
        pfl(["compare", "--methods", *rounds, "--data", "Digits", *columns])
    lines = (OUT / "comparison.md").read_text().splitlines()
    assert [line.strip("| ").split(" | ")[2:] for line in lines[2:5]] == [
        ["5.0", "-"],
        ["4.5", "2000.0"],
        ["never", "-"],
    ]


@pytest.mark.exhaustive
def test_columns_of_several_rounds_want_as_many(stand_in):
    Path("mine.yaml").write_text(
        json.dumps({"methods": ["Local"], "columns": ["last", "mean of last five", "ten best"]})
    )
    compare("--table mine.yaml --data Digits --out runs/compare-Digits")
    assert (OUT / "comparison.md").read_text().startswith("| method | last (by sample) |\n")


# With fit itself


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("compared")
    data = CONFIGS / "protocols" / "digits_iid.yaml"
    settings = f"--config {data} {QUIET} --data.max_samples 300 --trainer.max_rounds 2 --trainer.clients_per_round 0.5"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(root / name.lower()))
        # as this process has: other numbers of threads give other bits
        patch.setenv("OMP_NUM_THREADS", "1")
        wandb = "--trainer.logger WandbLogger --trainer.logger.offline true"
        assert compare(f"--methods FedPer {settings} --seeds 3 --out out {wandb}") == 0
        for method in ("FedPer", "FedProx"):
            pfl(f"fit --model {method} {settings} --seed_everything 3")
    return root


@pytest.mark.exhaustive
def test_a_run_is_what_fit_does(compared):
    (one,) = (compared / "out/FedPer/seed_3").glob("*/*/checkpoints/last.ckpt")
    (other,) = (compared / "runs").glob("FedPer-*/*/checkpoints/last.ckpt")
    assert equal(load(one)["state_dict"], load(other)["state_dict"])
    assert equal(load(one)["federation"], load(other)["federation"])


@pytest.mark.exhaustive
def test_every_run_has_its_configuration_beside_it(compared):
    (row,) = read_csv(compared / "out/runs.csv")
    assert row["method"] == "FedPer"
    assert "class_path: pfl_lightning.methods.FedPer" in (compared / "out" / row["config"]).read_text()
    assert read_csv(compared / "out/comparison.csv")[0]["configs"] == row["config"]


@pytest.mark.exhaustive
def test_methods_start_alike(compared):
    (row,) = read_csv(compared / "out/runs.csv")
    (path,) = (compared / "runs").glob("FedProx-*/*/summary.json")
    other = json.loads(path.read_text())
    assert row["seed"] == "3" and all(row[name] == str(other[name]) for name in ("partition", "initial"))


@pytest.mark.exhaustive
def test_the_table_is_there_in_all_forms(compared):
    out = compared / "out"
    text = (out / "comparison.md").read_text()
    titles = ["method", "best on validation", "last (by sample)", "last (by client)", "best on test", "worst decile"]
    assert text.startswith(f"| {' | '.join([*titles, 'MiB up', 'MiB down'])} |")
    assert text.endswith("Same partition, cohorts and initial weights for all methods at each seed.\n")
    assert r"\begin{tabular}" in (out / "comparison.tex").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.html").read_text().count("<svg") == 4


@pytest.mark.exhaustive
def test_runs_are_logged_to_one_group_of_weights_and_biases(compared):
    (path,) = (compared / "out/FedPer/seed_3/wandb").glob("offline-run-*/run-*.wandb")
    (run,) = [record.run for record in records(path) if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_group, run.display_name) == ("out", "FedPer seed 3")
    # the run's own folder bears its id
    assert [folder.name for folder in path.parents[2].glob("lightning_logs/*")] == [run.run_id]


# Fingerprints


def fingerprints(run) -> tuple[str, str]:
    return run.logger.summary["partition"], run.logger.summary["initial"]


def test_the_partition_and_the_initial_net_have_fingerprints(tmp_path):
    first = fit(make_client(), root=tmp_path / "a", max_rounds=1)
    assert fingerprints(first) == fingerprints(fit(make_client(FedProx, mu=1.0), root=tmp_path / "b", max_rounds=2))
    other_net = fit(make_client(seed=4), root=tmp_path / "c", max_rounds=1)
    other_data = fit(make_client(), blobs(24, 16, 30, 21), tmp_path / "d", max_rounds=1)
    assert fingerprints(other_net)[0] == fingerprints(first)[0] != fingerprints(other_data)[0]
    assert fingerprints(other_net)[1] != fingerprints(first)[1] == fingerprints(other_data)[1]


def test_a_resumed_run_keeps_the_fingerprint_of_its_first_start(tmp_path):
    first = fit(make_client(seed=3), root=tmp_path, max_rounds=1)
    resumed = fit(make_client(seed=4), root=tmp_path, max_rounds=2, ckpt_path=first.last, resume_changed=True)
    assert fingerprints(resumed) == fingerprints(first)


# With the stand-in


def test_mean_and_spread_are_over_seeds(stand_in, capsys):
    assert compare("--methods Local FedAvg --data Digits --seeds 0 1 2") == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("Local  "))
    assert line.count("60.00 ± 10.00") == 5
    assert line.split()[-4:] == ["2.00", "0.00", "1.5", "-"]
    assert "[6/6] FedAvg, seed 2: 70.00 % after 2 rounds, 1.5 seconds" in out
    row = read_csv(OUT / "comparison.csv")[1]
    assert (row["method"], row["seeds"], float(row["bytes/up mean"])) == ("FedAvg", "0 1 2", 2 * 2**20)
    assert float(row["final/test/acc mean"]) == pytest.approx(0.6)
    assert float(row["final/test/acc std"]) == pytest.approx(0.1)


@pytest.mark.exhaustive
def test_one_seed_has_no_spread(stand_in):
    compare("--methods Local --data Digits")
    assert "| Local | 50.00 | 50.00 |" in (OUT / "comparison.md").read_text()


def test_columns_that_nobody_has_are_left_out(stand_in):
    stand_in(FedAvg={"accuracy": None, "central": {"test/global_acc": 0.25}}, Local={"accuracy": None})
    assert compare("--methods FedAvg Local --data Digits") == 0
    head, _, first, second = (OUT / "comparison.md").read_text().splitlines()[:4]
    assert head.startswith("| method | server: best on validation | server: last | server: best on test | MiB up |")
    assert first.startswith("| FedAvg | 25.00 | 25.00 | 25.00 |") and second.startswith("| Local | - | - | - |")


@pytest.mark.exhaustive
def test_new_clients_have_columns(stand_in, capsys):
    stand_in(FedAvg={"new": {"received/acc": 0.25, "joined/acc": 0.375, "gap": 0.125}})
    assert compare("--methods FedAvg Local --data Digits --data.new_clients 2") == 0
    head, _, first, second = (OUT / "comparison.md").read_text().splitlines()[:4]
    assert " | new: received | new: joined | MiB up |" in head
    assert " | 25.00 | 37.50 | 2.00 |" in first and " | - | - | 2.00 |" in second
    assert "New clients took no part" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_epsilon_has_a_column(stand_in):
    stand_in(FedAvg={"privacy": {"unit": "client", "epsilon": 7.99999}})
    assert compare("--methods FedAvg Local --data Digits") == 0
    head, _, first, second = (OUT / "comparison.md").read_text().splitlines()[:4]
    assert " | epsilon | MiB up |" in head and " | 8 | 2.00 |" in first and " | - | 2.00 |" in second


def test_what_has_finished_is_not_run_again(stand_in, capsys):
    compare("--methods Local --data Digits --seeds 0")
    assert "made earlier" not in capsys.readouterr().out
    Path("calls.jsonl").unlink()
    compare("--methods Local FedAvg --data Digits --seeds 0 1")
    assert called() == {("Local", 1), ("FedAvg", 0), ("FedAvg", 1)}
    printed = capsys.readouterr().out
    assert "[4/4]" in printed and len(read_csv(OUT / "runs.csv")) == 4
    assert "runs: 4, 1 of them made earlier" in printed
    assert [", made earlier" in line for line in printed.splitlines() if line[:1] == "["] == [True, False, False, False]


@pytest.mark.exhaustive
def test_every_run_goes_on_where_it_stopped(stand_in):
    compare("--methods Local --data Digits")
    assert calls()[0]["words"][-2:] == ["--ckpt_path", "last"]


def test_a_method_that_fails_does_not_stop_the_others(stand_in, capsys):
    stand_in(FedPer={"fails": "pfl-lightning: error: model.mu=-1 must be 0 or more."}, FedProx_1={"killed": True})
    assert compare("--methods FedPer FedProx Local --data Digits --seeds 0 1") == 1
    assert called() >= {("Local", 0), ("Local", 1)}
    out = capsys.readouterr().out
    assert "[1/6] FedPer, seed 0: failed: model.mu=-1 must be 0 or more." in out
    assert "FedPer failed with seed 0, 1: model.mu=-1 must be 0 or more." in out
    assert "FedProx failed with seed 1: ended by SIGKILL" in out
    failed = [row["failed"] for row in read_csv(OUT / "comparison.csv")]
    assert failed[0].startswith("FedPer failed") and failed[1].startswith("FedProx failed") and not failed[2]
    assert (OUT / "comparison.md").read_text().splitlines()[2].endswith("| - | seed 0, 1 |")


@pytest.mark.exhaustive
def test_a_failed_run_is_tried_again(stand_in):
    stand_in(Local={"fails": "no."})
    assert compare("--methods Local --data Digits") == 1
    stand_in()
    assert compare("--methods Local --data Digits") == 0


@pytest.mark.exhaustive
def test_a_folder_of_other_settings_is_refused(stand_in, capsys, tmp_path):
    data = tmp_path / "data.yaml"
    data.write_text("data: {class_path: Digits}")
    compare("--methods Local --config data.yaml --out a")
    seed = Path("a/Local/seed_0")
    refused = f"compare: {seed} holds a run of other settings, which are in settings.txt there; give another --out"
    assert refused in refusal("compare --methods Ditto Local --config data.yaml --trainer.max_rounds 9 --out a", capsys)
    assert not Path("a/Ditto").exists()
    data.write_text("data: {class_path: MNIST}")
    assert refused in refusal("compare --methods Local --config data.yaml --out a", capsys)
    assert len(calls()) == 1


@pytest.mark.exhaustive
def test_methods_with_the_same_numbers_are_named(stand_in, capsys):
    stand_in(FedAvg={"accuracy": 0.7}, FedPer_1={"accuracy": 0.61})
    assert compare("--methods Local FedAvg FedPer FedProx Ditto --data Digits --seeds 0 1") == 0
    # FedPer is like the others at one seed alone
    sentence = "Local, FedProx and Ditto gave the same numbers to the last digit"
    assert f"\n{sentence}" in capsys.readouterr().out
    assert sentence in (OUT / "comparison.md").read_text()


def test_methods_without_accuracies_are_not_called_the_same(stand_in, capsys):
    stand_in(Local={"accuracy": None}, FedAvg={"accuracy": None})
    assert compare("--methods Local FedAvg --data Digits") == 0
    assert "the same numbers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plan", "words"),
    [({"partition": "q"}, "partitions"), ({"initial": "j"}, "initial weights"), ({"cohort": "0 2"}, "cohorts")],
)
@pytest.mark.by_default("plan0-partitions")
def test_what_is_not_the_same_is_named(stand_in, capsys, plan, words):
    stand_in(FedAvg_1=plan)
    assert compare("--methods Local FedAvg --data Digits --seeds 0 1") == 0
    out = capsys.readouterr().out
    assert f"seed 1: FedAvg and Local had different {words}." in out
    assert "seed 0: FedAvg" not in out and "Same partition" not in out
    # one line for all seeds of a pair
    stand_in(FedAvg_0=plan, FedAvg_1=plan)
    assert compare("--methods Local FedAvg --data Digits --seeds 0 1 --out runs/both") == 0
    assert f"seeds 0, 1: FedAvg and Local had different {words}." in capsys.readouterr().out


@pytest.mark.exhaustive
def test_jobs_run_at_the_same_time_with_one_thread_each(stand_in):
    stand_in(Local={"until": "begun_FedAvg"}, FedAvg={})
    compare("--methods Local FedAvg --data Digits --jobs 2")
    assert {call["OMP_NUM_THREADS"] for call in calls()} == {"1"}


@pytest.mark.exhaustive
def test_threads_are_left_alone_where_one_runs_at_a_time_or_they_are_set(stand_in, monkeypatch):
    compare("--methods Local --data Digits")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    compare("--methods FedAvg --data Digits --jobs 2")
    assert [call["OMP_NUM_THREADS"] for call in calls()] == [None, "3"]


def test_an_interrupted_comparison_takes_its_runs_along(stand_in, monkeypatch, capsys):
    stand_in(Local={"until": "never"}, FedAvg={"until": "never"})

    sleep = time.sleep

    def interrupt(seconds):
        monkeypatch.setattr(time, "sleep", sleep)
        while len(called()) < 2:
            sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", interrupt)
    handler = signal.getsignal(signal.SIGTERM)
    assert compare("--methods Local FedAvg --data Digits --jobs 2") == 128 + signal.SIGTERM
    assert not any(alive(call["pid"]) for call in calls())
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "the same command goes on from here" in capsys.readouterr().err


def test_a_comparison_that_is_killed_takes_its_runs_along(stand_in):
    stand_in(Local={"until": "never"}, FedAvg={"until": "never"})
    process = forked(pfl, "compare --methods Local FedAvg --data Digits --jobs 2")
    wait_for(lambda: len(called()) == 2, process)
    process.kill()
    process.join()
    pids = [call["pid"] for call in calls()]
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = list(filter(alive, pids))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_where_there_is_no_fork_each_run_is_a_new_python(stand_in, monkeypatch, capsys):
    monkeypatch.setattr("pfl_lightning.cli.compare.command.new_starter", lambda environment: None)
    stand_in(FedAvg={"fails": 3})
    assert compare("--methods Local FedAvg --data Digits") == 1
    assert called() == {("Local", 0), ("FedAvg", 0)}
    assert "FedAvg, seed 0: failed" in capsys.readouterr().out


def test_a_run_that_will_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "GRACE", 0.1)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(99)"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    runs.end([process])
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.exhaustive
def test_a_run_is_not_started_twice(stand_in, capsys):
    stand_in(Local={"until": "stop"})
    other = forked(pfl, "compare --methods Local --data Digits")
    wait_for(called, other)
    assert compare("--methods Local --data Digits") == 1
    assert f"failed: {OUT}/Local/seed_0: process {other.pid} on" in capsys.readouterr().out
    Path("stop").touch()
    other.join()
    assert compare("--methods Local --data Digits") == 0
    assert len(calls()) == 1


@pytest.mark.exhaustive
def test_seeds_share_their_partition_unless_it_is_to_vary(stand_in):
    compare("--methods Local --data Digits --seeds 0 7")
    compare("--methods Local --data Digits --seeds 0 7 --vary_data --out varied")
    seeds = [
        call["words"][call["words"].index("--data.seed") + 1] if "--data.seed" in call["words"] else None
        for call in calls()
    ]
    assert seeds == [None, None, "0", "7"]


@pytest.mark.exhaustive
def test_runs_share_a_group_of_weights_and_biases(stand_in, monkeypatch):
    compare("--methods Local --data Digits")
    monkeypatch.setenv("WANDB_RUN_GROUP", "mine")
    compare("--methods FedAvg --data Digits")
    assert [call["WANDB_RUN_GROUP"] for call in calls()] == ["compare-Digits", "mine"]
    assert [call["WANDB_NAME"] for call in calls()] == ["Local seed 0", "FedAvg seed 0"]


def test_a_logger_writes_into_the_run_s_folder_and_goes_on_in_it(tmp_path):
    run = Run("fedavg", 0, tmp_path, ("--trainer.logger", "WandbLogger"))
    assert run.command[-4:] == ["--trainer.logger.save_dir", str(tmp_path), "--ckpt_path", "last"]
    for number, name in enumerate(("a1b2", "c3d4")):
        folder = tmp_path / "lightning_logs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        os.utime(folder, (number, number))
    assert run.command[-4:-2] == ["--trainer.logger.version", "c3d4"]


# Names and mistakes


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs" / "methods"
    folder.mkdir(parents=True)
    for name in ("fedavg", "fedprox", "own"):
        (folder / f"{name}.yaml").write_text(f"# {name}")
    (tmp_path / "mu.yaml").write_text("# mu")
    (tmp_path / "whole.yaml").write_text("model: {class_path: WDR}")
    return folder


def test_a_method_is_a_name_a_path_or_a_class(configs):
    chosen = choose(["fedavg", str(configs / "own.yaml"), "FedPer", "mine.Mine", "FedProx+mu.yaml"], configs)
    assert [choice.label for choice in chosen] == ["FedAvg", "own", "FedPer", "Mine", "FedProx+mu"]
    files = [("--config", str(configs / f"{name}.yaml")) for name in ("fedavg", "own", "fedprox")]
    assert [choice.arguments for choice in chosen[:2]] == files[:2]
    assert [choice.arguments for choice in chosen[2:4]] == [("--model", "FedPer"), ("--model", "mine.Mine")]
    assert (chosen[4].arguments, chosen[4].winning) == (files[2], ("--config", "mu.yaml"))


def test_files_behind_a_plus_win_over_all_files_and_flags_over_them():
    choice = Choice("a+b", ("--config", "a"), ("--config", "b"))
    mine = ["--config", "a", "--config", "b"]
    assert list(choice.among(["--x", "1"])) == [*mine, "--x", "1"]
    for data in (["--config", "data"], ["-c", "data"], ["--config=data"], ["--y=2", "-c", "first", "--config=data"]):
        assert list(choice.among([*data, "--x", "1"])) == [*mine[:2], *data, *mine[2:], "--x", "1"]


@pytest.mark.exhaustive
def test_options_of_fit_stand_behind_the_method(stand_in, configs):
    compare("--methods FedProx+mu.yaml --data Digits --model.mu=-0 -c mu.yaml --seeds 4")
    words = calls()[0]["words"]
    options = words[words.index("--config") :]
    assert options[0] == "--config" and Path(options[1]) == FOLDER / "methods" / "fedprox.yaml"
    assert options[2:7] == ["--data", "Digits", "--model.mu=-0", "-c", "mu.yaml"]
    assert options[7:11] == ["--config", "mu.yaml", "--seed_everything", "4"]


MISTAKES = {
    "--methods fedavgg": "compare: --methods fedavgg is no method and no client module; did you mean",
    "--methods FedPorx": "--methods FedPorx is no method and no client module; did you mean FedProx or FedP",
    "--methods gone.yaml": "compare: gone.yaml is no file; did you mean",
    "--methods fedavg+gone": "compare: --methods fedavg+gone: gone is no file; behind a + give",
    "--methods fedavg fedprox fedavg": "compare: --methods has two called FedAvg; leave one out, or rename",
    "--methods": "compare: --methods: expected at least one argument.",
    "": "compare: the following arguments are required: --methods.",
    "--methods fedavg --seeds": "compare: --seeds: expected at least one argument.",
    "--methods fedavg --seeds one": "compare: --seeds: invalid int value: 'one'.",
    "--methods fedavg --reference Local": "--reference Local is not among the methods compared; give one of FedAvg",
    "--methods fedavg --tune model.mu": "compare: --tune model.mu must be a setting with values to try, such as",
    "--methods fedavg --tune_folds 3": "compare: --tune_folds 3 must be at least 1, and goes with --tune.",
    "--methods fedavg --tune_rounds 3": "compare: --tune_rounds 3 must be at least 1, and goes with --tune.",
    "--methods fedavg --jobs 0": "compare: --jobs 0 must be at least 1.",
    "--table flamby_heart --seeds -1": "compare: --seeds -1 must be seeds from 0 to 4294967295, such as --seeds 0 1 2.",
    "--methods fedavg --seeds 0 4294967296": "compare: --seeds 4294967296 must be seeds from 0 to 4294967295",
    "--methods fedavg --columns lst,rank": "--columns: 'lst' is no column; choose from last, best on validation",
    "--methods fedavg --config gone.yaml": "compare: --config gone.yaml is no file",
    "--methods fedavg --config whole.yaml": "--config whole.yaml names a model",
    "--methods fedavg --model FedPer": "compare: --model can't be given here: give --methods.",
    "--methods fedavg --seed_everything 3": "compare: --seed_everything can't be given here: give --seeds.",
    "--methods fedavg --ckpt_path=last": "compare: --ckpt_path can't be given here: a comparison goes on by itself",
    "--methods fedavg --vary_data --data.seed 3": "compare: --data.seed can't be given here: --vary_data sets it.",
    "--methods fedavg --trainer.logger false": "compare: --trainer.logger false is no logger; leave it out",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_end_in_a_sentence(line, stand_in, configs, capsys):
    assert MISTAKES[line] in refusal(f"compare {line}", capsys)
    assert not calls() and not Path("runs").exists()


def test_help_tells_of_it(capsys):
    for line, words in {"--help": "  compare ", "compare --help": "--vary_data"}.items():
        with pytest.raises(SystemExit) as ended:
            pfl(line)
        assert not ended.value.code
        assert words in capsys.readouterr().out


# Curves


def test_curves_are_means_in_a_band_of_the_rounds_that_all_runs_have():
    rows = [{"round": str(round), "val/acc": str(round / 10)} for round in (1, 2, 3)]
    other = [{"round": str(round), "val/acc": str(round / 10 + 0.2)} for round in (1, 2)] + [{"round": "3"}]
    (axes,) = plot_mean_curves({"a": [rows, other], "b": [rows]}).axes
    first, second = axes.lines
    assert first.get_xdata().tolist() == [1, 2] and second.get_xdata().tolist() == [1, 2, 3]
    assert first.get_ydata() == pytest.approx([0.2, 0.3])
    (band,) = axes.collections
    low, high = band.get_paths()[0].get_extents().get_points()[:, 1]
    # 0.1 and 0.3, 0.2 and 0.4
    assert (low, high) == pytest.approx((0.2 - 0.02**0.5, 0.3 + 0.02**0.5))
    assert len(plot_curves({"a": rows}).axes[0].collections) == 0


@pytest.mark.parametrize(("metric", "top"), [("val/acc", 1.0), ("val/loss", 0.95 + 0.005**0.5)])
def test_no_band_of_accuracies_goes_beyond_what_they_can_be(metric, top):
    runs = [[{"round": round, metric: value} for round in (1, 2)] for value in (0.9, 1.0)]
    (axes,) = plot_mean_curves({"a": runs}, metric).axes
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().get_points()[1, 1] == pytest.approx(top)


def test_many_names_stand_beside_the_curves():
    rows = [{"round": str(round), "val/acc": str(round / 10)} for round in (1, 2)]
    few, many = (plot_mean_curves({f"method {n}": [rows] for n in range(count)}) for count in (8, 44))
    assert few.axes[0].get_legend() and not few.legends
    assert not many.axes[0].get_legend()
    (legend,) = many.legends
    assert len(legend.get_texts()) == 44
    many.draw_without_rendering()
    inside = many.bbox.get_points()
    box = legend.get_window_extent().get_points()
    assert (inside[0] <= box[0]).all() and (box[1] <= inside[1]).all()
    assert box[0, 0] >= many.axes[0].get_window_extent().x1
    assert len({(line.get_color(), line.get_linestyle()) for line in many.axes[0].lines}) == 44
