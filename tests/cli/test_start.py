"""What is answered without torch, and that the answers are the parser's."""

import subprocess
import sys

import pytest

from command import QUICKSTART
from pfl_lightning.cli import refusals
from pfl_lightning.cli.options import measured, text
from pfl_lightning.cli.refusals import STORED, installed, refuse_at_sight, stored
from pfl_lightning.cli.trainer_commands import PflCLI
from pfl_lightning.cli.usage import UsageError

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
    "fit --config quickstart --trainer.max_round 3": "2",
    "fit --config gone.yaml": "2",
}

REFUSED = [
    "",
    "fitt",
    "compar",
    "fitt --help",
    "fit --modle FedPer",
    "fit --modle",
    "fit --modle=FedPer --config quickstart",
    "test --config quickstart --ckpt_pth x",
    "test --resume_changed true",
    "fit --config quickstart --epochs 3",
    "join --resume_change true",
    "fit --config=quickstart --max_rounds 3",
    "fit --trainer.loger.offline true --modle x",
    "fit --trainer.calbacks+=EarlyStopping",
    "fit --modle.lr 3",
    "join -c quickstart --epoch 3",
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


@pytest.fixture
def stored_options_are_of_what_is_installed():
    if stored().versions != installed():
        pytest.skip(f"{STORED.name} is of {stored().versions}, and so isn't used with {installed()}")


@pytest.mark.parametrize("line", LIGHT)
def test_help_lists_and_mistakes_need_no_torch(line, request):
    if "--trainer.max_round " in line:
        request.getfixturevalue("stored_options_are_of_what_is_installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{LIGHT[line]} []"


@pytest.mark.usefixtures("stored_options_are_of_what_is_installed")
@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_at_sight_the_parser_refuses_in_the_same_words(line, capsys):
    with pytest.raises(UsageError) as refused:
        refuse_at_sight(line.split())
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pfl-lightning"])
        PflCLI.of(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"pfl-lightning: error: {refused.value}\n"


@pytest.mark.parametrize("line", LEFT)
def test_what_is_not_sure_is_left_to_the_parser(line):
    refuse_at_sight(line.split())


def test_a_file_of_the_user_is_there(tmp_path):
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "folder").mkdir()
    for name in ("mine.yaml", "mine", "folder"):
        refuse_at_sight(["fit", "--config", name])
    with pytest.raises(UsageError, match=r"--config mien.yaml is no file; did you mean mine.yaml\?"):
        refuse_at_sight(["fit", "--config", "mien.yaml"])


@pytest.mark.usefixtures("stored_options_are_of_what_is_installed")
def test_the_stored_options_are_the_parser_s():
    assert STORED.read_text() == text(measured()), (
        f"write what python -m pfl_lightning.cli.options prints into {STORED}"
    )


@pytest.mark.usefixtures("stored_options_are_of_what_is_installed")
def test_options_of_other_versions_are_left_to_the_parser(monkeypatch):
    line = f"fit {QUICKSTART} --trainer.max_round 3".split()
    with pytest.raises(UsageError, match=r"trainer.max_round is not an option; did you mean trainer.max_rounds\?"):
        refuse_at_sight(line)
    monkeypatch.setattr(refusals, "version", lambda name: "1.0")
    refuse_at_sight(line)
