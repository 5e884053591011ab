"""Each command that README and the pages of the documentation show runs here, or in the test that is named for it."""

import configparser
import re
import shlex
import sys
from pathlib import Path

import pytest

from command import QUIET, pfl
from tiny_datasets import write

ROOT = Path(__file__).parents[1]
OTHERWISE = {
    r"pip install": "what CI begins with",
    r"pytest": "what CI ends with",
    r"python benchmarks/": "takes minutes and measures this machine",
    r"flower-|flwr |pfl-lightning flower": "tests/flower/test_loopback.py, and tests/flower/test_command.py",
    r"tensorboard|wandb (sweep|agent)": "needs a browser or an account",
    r"python examples/sweep_optuna": "tests/test_examples.py",
    r"python docs/ledger": "tests/test_ledger.py",
    r"python \.ci/systems": "a job of ci.yml on each system; tests/test_systems.py plays Windows",
    r"pfl-lightning predict": "tests/cli/test_predict.py",
    r"pfl-lightning matrix": "tests/cli/test_matrix.py",
    r"pfl-lightning fit .*--data TableData": "tests/data/sources/test_table_data.py",
    r"pfl-lightning fit .*--data PFLlibData": "tests/data/sources/test_pfllib_data.py",
    r"pfl-lightning join --data": "tests/cli/test_earlier_run.py",
    r"pfl-lightning advise": "tests/cli/test_advise.py",
    r"pfl-lightning adapters": "tests/data/sources/test_chat_data.py",
    r"pfl-lightning compare .*digit_domains": "needs images; tests/data/test_digit_domains.py",
    r"pfl-lightning compare .*(chem97|schools)": "needs the pupils' file; tests/data/test_schools_and_roles.py",
    r"pfl-lightning compare .*headlines": "needs a model's weights, which benchmarks/headlines.py writes",
    r"pfl-lightning compare .*protocols/flamby": "needs the hospitals' files; tests/data/test_flamby.py",
}
"""Commands that don't run here, and where they do, or why not."""
LEDGER = {"claims", "privacy", "results", "robustness"}
"""Pages whose commands are those of `test_documents`."""
COMMAND = re.compile(
    r"^ {4,}((?:pfl-lightning|python|pip|pytest|flower|flwr|wandb|tensorboard)[ -](?:.*\\\n)*.*)", re.MULTILINE
)


def shown(page):
    """Commands of a page, each in one line and without remarks."""
    lines = [" ".join(line.replace("\\\n", " ").split()) for line in COMMAND.findall(page.read_text())]
    return [re.sub(r" +# .*", "", line) for line in lines]


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / page for folder in (".", "data") for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
SELDOM = re.compile(
    r"compare|compression|Logger|ckpt_path|protocols/mnist|PowerOfChoice|Poisson|clients_per_round 0\.3"
)
"""Commands that the exhaustive tests run: they take long, or have the branches of another one of their page."""


def commands():
    """Each command once, if often with other numbers of rounds: they run for a few here."""
    known = {}
    for page in PAGES:
        for number, line in enumerate(shown(page) if page.stem not in LEDGER else ()):
            for part in map(str.strip, line.split("&&")):
                if not any(re.match(pattern, part) for pattern in OTHERWISE):
                    known.setdefault(
                        re.sub(r" --trainer\.max_rounds \d+", "", part),
                        pytest.param(
                            part,
                            id=f"{page.stem}-{number}-{part.split()[1]}",
                            marks=pytest.mark.exhaustive if SELDOM.search(part) else (),
                        ),
                    )
    return list(known.values())


def call(line):
    """Runs a command, which must not fail."""
    try:
        pfl(shlex.split(line)[1:])
    except SystemExit as ended:
        assert not ended.code


def small(line):
    """The command with little to do."""
    words = ""
    if "mnist" in line:
        words = f" --data.root {write('MNIST', Path('files'), 1000)} --data.max_samples 900 --data.num_clients 5"
    if " compare " in line:
        fewer = re.sub(r"(--methods \S+ \S+)( [A-Za-z]\w*)*", r"\1", re.sub(r"(--seeds \d)( \d)*", r"\1", line))
        return f"{fewer}{words} --trainer.max_rounds 2"
    rounds = 3 if "ckpt_path" in line else 2
    return f"{line}{words} {QUIET}" + ("" if " test " in line else f" --trainer.max_rounds {rounds}")


def before(line):
    """What must have run for a command to have something to go on with."""
    if "--ckpt_path" in line:
        run = re.sub(r" --ckpt_path \w+", "", line).replace(" test ", " fit ").replace(" join ", " fit ")
        call(small(run))
    if "clients.csv" in line:
        Path("clients.csv").write_text("client,rate\n" + "".join(f"{client},0.8\n" for client in range(10)))
    if "mine.FourBits" in line:
        page = (ROOT / "docs" / "compression.md").read_text()
        Path("mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    if " status " in line:
        started = "compare --methods Local" if "compare" in line else "fit --model FedPer"
        digits = f"{started} --config protocols/digits_dir0.1 --trainer.max_rounds 1"
        call(f"pfl-lightning {digits}" if "compare" in line else f"pfl-lightning {digits} {QUIET}")


@pytest.mark.parametrize("line", commands())
@pytest.mark.by_default(but=["participation", "methods-"])
def test_a_command_that_is_shown_runs(line, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for logger, package in {"Wandb": "wandb", "TensorBoard": "tensorboard", "MLFlow": "mlflow"}.items():
        if f"logger {logger}" in line:
            pytest.importorskip(package, reason=f"needs the extra {package}")
    line = re.sub(r" --data\.root DATA", "", line)
    # the command itself finds files of the working folder, and tests call it within this process
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    before(line)
    quick = re.match(r"pfl-lightning (configs|methods|status)|.*\.help", line)
    call(line if quick else small(line))


def test_every_command_is_either_here_or_has_a_place():
    lines = [line for page in PAGES if page.stem not in LEDGER for line in shown(page)]
    assert len(lines) > 30
    assert all(any(re.match(pattern, line) for line in lines) for pattern in OTHERWISE)


def test_no_call_of_pytest_hides_how_many_tests_passed():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    always = options["tool:pytest"]["addopts"].split()
    scripts = [*PAGES, *(ROOT / ".ci").iterdir(), *(ROOT / ".github" / "workflows").iterdir()]
    calls = [call.split() for script in scripts for call in re.findall(r"\bpytest .*", script.read_text())]
    assert sum("-q" in call for call in calls) > 3
    # the second one leaves out the line with the counts
    assert all([*always, *call].count("-q") < 2 and "-qq" not in call for call in calls)
