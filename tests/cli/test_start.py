"""What is answered without torch, and that the answers are the parser's."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pfl_lightning.cli import argv
from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.configs import FOLDER
from pfl_lightning.cli.refusals import refuse_at_sight
from pfl_lightning.cli.trainer_commands import PflCLI
from pfl_lightning.cli.usage import UsageError

OWN = {
    "fit -c quickstart": [],
    "fit --config methods/fedawa --config protocols/digits_iid --model.optimizer.lr 0.1": [],
    "fit --model mine.Confident --data pfl_lightning.data.Digits": ["mine.Confident"],
    "fit '--trainer.callbacks+={class_path: mine.Own, init_args: {a: torch.nn.ReLU}}'": ["mine.Own"],
    "compare --methods local fedavg+flamby/fine_tuned_16 --table personal_heart --data.alpha 0.1 --out a/b.c": [],
    "compare --methods local mine.Confident": ["mine.Confident"],
    "advise --methods mine.Confident local": ["mine.Confident"],
    "compare --methods local fedavg+own/file --table=own/file.yaml": ["own/file", "own/file.yaml"],
    "compare --configs own --methods local": ["--configs"],
    "predict --data.path own/file.yaml": [],
}
"""Command lines, and the classes of other packages that they name."""


@pytest.mark.parametrize("line", OWN)
def test_classes_of_others_are_seen(line):
    Path("own").mkdir()
    Path("own", "file.yaml").touch()
    # for these, torchmetrics is imported with all that it finds
    assert CommandLine(shlex.split(line)).foreign == OWN[line]


PROGRAM = """
import sys
from pfl_lightning.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"torch", "lightning", "torchmetrics", "jsonargparse", "numpy"}
    print(end.code, sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""

LIGHT = {
    "--help": "0",
    "-h": "0",
    "--version": "0",
    "configs": "0",
    "configs --help": "0",
    "configs --cpy x": "2",
    "configs method5": "2",
    "methods": "0",
    "methods --format tex": "2",
    "status": "2",
    "status --help": "0",
    "": "2",
    "fitt": "2",
    "fit --config gone.yaml": "2",
}

REFUSED = [
    "",
    "fitt",
    "compar",
    "fitt --help",
    "fit --config gone.yaml",
    "fit --config gone",
    "fit --config ./gone.yaml --modle x",
    "fit --config ../gone.yaml",
    "fit --config methods/cwfedavgg",
    "fit --config cwfedavg",
    "validate --config=nowhere/at/all.yaml",
    "fit --config /nowhere/at/all.yaml",
]

LEFT = [
    "fit",
    "fit --modle FedPer",
    "fit --modle",
    "fit --config quickstart --epochs 3",
    "fit --help",
    "fit --modle x --help",
    "fit --modle x --print_config",
    "fit --model.help FedProx --modle x",
    "--config quickstart fit",
    "fit --config quickstart --trainer.max_rounds 3",
    "fit --config quickstart extra --modle x",
    "fit --trainer.max_rounds --modle x",
    "fit --trainer.max_rounds -1 --modle x",
    "fit --trainer.max_epochs 3",
    "fit --model.lr 3",
    "fit --data.partitioner.alpa 3",
    "fit --trainer.logger.ofline 1",
    "fit --trainer.callbacks+=EarlyStopping",
    "fit --trainer.callbacks+ EarlyStopping",
    "fit --config {trainer:{max_rounds:3}}",
    "fit --config null",
    "fit --config .",
    "fit -- --modle",
    "compare --methods local",
]


@pytest.mark.parametrize("line", LIGHT)
@pytest.mark.by_default("status")
def test_help_lists_and_mistakes_need_no_torch(line):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{LIGHT[line]} []"


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_at_sight_the_parser_refuses_in_the_same_words(line, capsys):
    with pytest.raises(UsageError) as refused:
        refuse_at_sight(CommandLine(line.split()))
    with pytest.raises(SystemExit) as ended:
        PflCLI.of(CommandLine(line.split()))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"pfl-lightning: error: {refused.value}\n"


@pytest.mark.parametrize("line", LEFT)
def test_what_is_not_sure_is_left_to_the_parser(line):
    refuse_at_sight(CommandLine(line.split()))


def test_a_file_of_the_user_is_there(tmp_path):
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "folder").mkdir()
    for name in ("mine.yaml", "mine", "folder"):
        refuse_at_sight(CommandLine(["fit", "--config", name]))
    with pytest.raises(UsageError, match=r"--config mien.yaml is no file; did you mean mine.yaml\?"):
        refuse_at_sight(CommandLine(["fit", "--config", "mien.yaml"]))


@pytest.mark.parametrize("way", ["-c {}", "-c{}", "-c={}", "--config {}", "--config={}"])
def test_a_configuration_is_found_however_it_is_given(way):
    line = CommandLine(["fit", *way.format("methods/FedProx").split(), "--trainer.max_rounds", "3"])
    (path, *rest) = [argument.class_of("model") for argument in line.arguments]
    assert path == "FedProx" and rest == [None]
    words = line.completed(str)
    assert str(FOLDER / "methods" / "fedprox.yaml") in "=".join(words) and words[-2:] == ["--trainer.max_rounds", "3"]
    with pytest.raises(UsageError, match=r"--config gone.yaml is no file"):
        refuse_at_sight(CommandLine(["fit", *way.format("gone.yaml").split()]))


def test_a_file_is_read_once(monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("model: FedProx\ntrainer: {local_steps: 3}")
    read = []
    monkeypatch.setattr(argv, "load", lambda text: read.append(text) or yaml.safe_load(text))
    models = []
    line = CommandLine(["fit", "-c", "mine.yaml", "--aggregator.mean", "Krum"])
    words = line.completed(lambda model: models.append(model) or "Own")
    assert words[2:] == [
        "mine.yaml",
        "--trainer.local_epochs",
        "null",
        "--aggregator",
        "Own",
        "--aggregator.mean",
        "Krum",
    ]
    assert models == ["FedProx"]
    assert len(read) == 1
