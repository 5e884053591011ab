import logging
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger

import pfl_lightning
from command import QUICKSTART, QUIET, pfl, refusal, summary
from pfl_lightning.cli import trainer_commands as cli
from pfl_lightning.cli.main import main
from pfl_lightning.stopping import RankLost, Stopped
from sweeps import all_but

SMALL = f"{QUICKSTART} {QUIET} --data.max_samples 300"
CHECKPOINTS = Path("runs/cwFedAvg-Digits/version_0/checkpoints")


class Remembering(DummyLogger):
    """Keeps what it is given."""

    parameters: dict = {}
    save_dir = "."

    def log_hyperparams(self, params, *args, **kwargs):
        Remembering.parameters |= params


def warned(line):
    """Runs a line; gives the warnings that its user sees."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pfl(line)
    return " ".join(str(warning.message) for warning in seen)


@pytest.fixture(scope="module")
def run_of_two_rounds(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        pfl(f"fit {SMALL} --trainer.max_rounds 2")
    return root / "runs"


@pytest.fixture
def trained(run_of_two_rounds, tmp_path):
    """Puts a run of two rounds into the working folder."""
    shutil.copytree(run_of_two_rounds, tmp_path / "runs")


@pytest.fixture
def built(monkeypatch):
    """What the command line makes of a line, without running it."""
    made = []
    monkeypatch.setattr(cli.PflCLI, "_run_subcommand", lambda self, subcommand: made.append(self))

    def build(line):
        pfl(line)
        return made[-1]

    return build


def printed(line, capsys):
    with pytest.raises(SystemExit) as ended:
        pfl(f"{line} --print_config")
    assert not ended.value.code
    return capsys.readouterr().out


def test_short_names(built):
    made = built(
        "fit --model FedProx --model.mu 0.01 --data MNIST --data.partitioner Pathological "
        "--data.partitioner.classes_per_client 3 --model.optimizer Adam --model.optimizer.lr 0.002 "
        "--model.net MLP --model.net.hidden [32] --aggregator WeightedAverage"
    )
    model, data = made.model, made.datamodule
    assert (type(model).__name__, model.mu) == ("FedProx", 0.01)
    assert (type(data).__name__, data.partitioner.classes_per_client) == ("MNIST", 3)
    assert type(model.configure_optimizers()) is torch.optim.Adam
    assert model.configure_optimizers().defaults["lr"] == 0.002
    assert model.net.classifier[0].in_features == 32
    assert type(made.config_init.fit.aggregator).__name__ == "WeightedAverage"


def test_the_shape_of_the_data_reaches_the_net(built):
    model = built(f"fit {QUICKSTART}").model
    assert (model.net.features[1].in_features, model.num_classes) == (64, 10)


def test_loggers_and_callbacks(built):
    trainer = built(f"fit {QUICKSTART} --trainer.logger TensorBoardLogger --trainer.logger.save_dir x").trainer
    assert type(trainer.logger).__name__ == "TensorBoardLogger"
    trainer = built(
        f"fit {QUICKSTART} --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/acc "
        "--trainer.precision bf16-mixed"
    ).trainer
    assert trainer.early_stopping_callback.monitor == "val/acc"
    assert trainer.precision == "bf16-mixed"


def test_later_files_and_flags_win(built, tmp_path):
    (tmp_path / "later.yaml").write_text(
        "{model: {init_args: {optimizer: {init_args: {lr: 0.5}}}}, trainer: {max_rounds: 7}}"
    )
    made = built(f"fit {QUICKSTART} --config later.yaml --trainer.max_rounds 8")
    assert made.model.configure_optimizers().defaults["lr"] == 0.5
    assert made.model.net.classifier[0].in_features == 64
    assert made.trainer.max_epochs == 8


@pytest.mark.parametrize("given", all_but(["0.4", "3"], ["1", "1.0", "0.4", "3"]))
@pytest.mark.by_default("1")
def test_clients_are_counted_by_integers_and_shared_by_fractions(built, capsys, tmp_path, given):
    (tmp_path / "given.yaml").write_text(f"trainer: {{clients_per_round: {given}}}")
    (tmp_path / "again.yaml").write_text(printed(f"fit {QUICKSTART} --config given.yaml", capsys))
    for line in (
        f"{QUICKSTART} --trainer.clients_per_round {given}",
        f"{QUICKSTART} --config given.yaml",
        "--config again.yaml",
    ):
        value = built(f"fit {line}").trainer.rounds.clients_per_round
        assert repr(value) == given


@pytest.mark.parametrize("command", ["fit", "validate", "test", "join"])
@pytest.mark.by_default("fit")
def test_what_is_printed_is_a_config(command, capsys, tmp_path):
    text = printed(f"{command} {QUICKSTART} --aggregator WeightedAverage", capsys)
    (tmp_path / "again.yaml").write_text(text)
    assert printed(f"{command} --config again.yaml", capsys) == text
    assert yaml.safe_load(text)["trainer"]["max_rounds"] == 20


@pytest.mark.parametrize(
    "line", ["--help", "fit --help", "fit --model.help FedProx", "test --data Digits --data.partitioner.help Dirichlet"]
)
def test_help(line, capsys):
    with pytest.raises(SystemExit) as ended:
        pfl(line)
    assert not ended.value.code
    assert "usage" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        pfl("--version")
    assert not ended.value.code
    assert capsys.readouterr().out == f"pfl-lightning {pfl_lightning.__version__}\n"


@pytest.mark.exhaustive
def test_new_clients_join_a_run(capsys):
    settings = f"{SMALL} --data.new_clients 2"
    pfl(f"fit {settings} --trainer.max_rounds 2")
    new = summary("cwFedAvg-Digits/version_0")["new"]
    capsys.readouterr()
    pfl(f"join {settings} --trainer.max_rounds 2 --ckpt_path last")
    found = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    expected = [new[f"{when}/acc"] for when in ("received", "joined")]
    assert list(map(float, found["acc"])) == pytest.approx(expected, abs=1e-4)
    pfl(f"join {settings} --trainer.max_rounds 2 --ckpt_path last --epochs 3 --rounds 2")
    assert "joined" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_nobody_joins_where_nobody_was_held_out(trained, capsys):
    for line, reason in (
        (f"join {SMALL} --ckpt_path last", "data.new_clients=0 leaves nobody to join"),
        (f"join {SMALL} --data.new_clients 1 --ckpt_path nowhere.ckpt", "ckpt_path='nowhere.ckpt': there is no"),
        (f"test {SMALL} --ckpt_path nowhere.ckpt", "ckpt_path='nowhere.ckpt': there is no"),
    ):
        assert refusal(line, capsys).startswith(reason)
        assert [path.name for path in Path("runs/cwFedAvg-Digits").iterdir()] == ["version_0"]


@pytest.mark.exhaustive
def test_a_run_keeps_a_config_that_runs_again(trained):
    pfl(f"fit --config {CHECKPOINTS.parent}/config.yaml")
    pfl(f"test --config {CHECKPOINTS.parent}/config.yaml --ckpt_path last")
    first, second = (summary(f"cwFedAvg-Digits/version_{version}") for version in (0, 1))
    assert first["final"] == second["final"]


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_its_new_config_and_its_whole_record(trained):
    assert "is not empty" not in warned(f"fit {SMALL} --trainer.max_rounds 3 --ckpt_path last")
    assert [path.name for path in Path("runs/cwFedAvg-Digits").iterdir()] == ["version_0"]
    config = yaml.safe_load((CHECKPOINTS.parent / "config.yaml").read_text())
    assert (config["trainer"]["max_rounds"], config["ckpt_path"]) == (3, "last")
    assert len((CHECKPOINTS.parent / "rounds.csv").read_text().splitlines()) == 4
    pfl(f"fit --config {CHECKPOINTS.parent}/config.yaml --trainer.max_rounds 4")
    assert len((CHECKPOINTS.parent / "rounds.csv").read_text().splitlines()) == 5


def test_settings_come_from_the_config_and_not_from_the_checkpoint(trained, monkeypatch):
    rates = []
    monkeypatch.setattr(
        cli.PflCLI, "after_fit", lambda self: rates.append(self.model.optimizer([torch.ones(1)])), raising=False
    )
    changed = "--model.optimizer.lr 0.03 --resume_changed true"
    pfl(f"fit {SMALL} --trainer.max_rounds 3 {changed} --ckpt_path {CHECKPOINTS}/last.ckpt")
    assert rates[0].defaults["lr"] == 0.03


def test_a_refused_checkpoint_leaves_its_run_as_it_was(trained, capsys):
    before = (CHECKPOINTS.parent / "config.yaml").read_text()
    with pytest.raises(SystemExit):
        pfl(f"fit {SMALL} --data.num_clients 5 --ckpt_path last")
    assert (CHECKPOINTS.parent / "config.yaml").read_text() == before


@pytest.mark.parametrize("which", ["best", "last", str(CHECKPOINTS / "best.ckpt")])
@pytest.mark.exhaustive
def test_evaluations_find_the_run_after_other_evaluations(which, trained, capsys):
    shown = []
    for command in ("validate", "test", "validate"):
        assert "dirpath" not in warned(f"{command} {SMALL} --ckpt_path {which}")
        shown.append(capsys.readouterr().out)
    assert "val/acc" in shown[0]
    assert "test/acc" in shown[1]
    assert shown[0] == shown[2]


@pytest.mark.exhaustive
def test_loggers_get_the_whole_config():
    Remembering.parameters = {}
    pfl(f"fit {SMALL} --trainer.max_rounds 1 --trainer.logger test_main.Remembering")
    given = Remembering.parameters
    assert given["trainer"]["max_rounds"] == 1
    assert given["data"]["init_args"]["partitioner"]["init_args"]["alpha"] == 0.3


@pytest.mark.exhaustive
def test_a_method_in_a_file_of_the_working_folder_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from pfl_lightning.methods import FedAvg\n\n\nclass Mine(FedAvg):\n    pass\n")
    # as in an installed program, for which Python looks into the program's folder and not into the working one
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "argv", f"pfl-lightning fit {SMALL} --trainer.max_rounds 1 --model mine.Mine".split())
    main()
    assert summary("Mine-Digits/version_0")["method"] == "Mine"


def test_the_package_is_the_command_line_too():
    shown = subprocess.run(
        [sys.executable, "-m", "pfl_lightning", "--help"], capture_output=True, text=True, check=True
    )
    assert "pfl-lightning COMMAND" in shown.stdout


@pytest.mark.exhaustive
def test_starting_loads_nothing_heavy_beyond_what_lightning_loads():
    heavy = ["sklearn", "matplotlib.pyplot", "wandb", "torchvision.datasets", "pandas", "PIL.Image"]
    loaded = f"print([name for name in {heavy} if name in sys.modules])"
    program = f"import sys, lightning.pytorch.cli; {loaded}; import pfl_lightning.cli.main; {loaded}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before == after


@pytest.mark.exhaustive
def test_users_are_not_told_what_they_cannot_act_upon(caplog):
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, log.name):
        log.propagate, before = True, log.propagate
        seen = warned(f"fit {SMALL} --trainer.max_rounds 1")
        log.propagate = before
    assert "GPU available" in caplog.text
    assert "litlogger" not in caplog.text
    assert "LeafSpec" not in seen


def test_a_reader_that_has_read_enough_ends_a_command_without_a_traceback():
    command = f"{sys.executable} -m pfl_lightning.cli.main methods | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("method ") and done.stderr == ""
    # the list is longer than what a pipe takes at once only on some machines
    assert done.returncode in (0, 141)


@pytest.mark.parametrize(
    ("line", "resumable", "says"),
    [
        ("compare --seeds 0", False, "stopped by SIGTERM; the same command goes on from here."),
        ("status runs", False, "stopped by SIGTERM."),
        ("fit --config 'a b.yaml'", True, "; go on with: pfl-lightning fit --config 'a b.yaml' --ckpt_path last"),
        ("fit --ckpt_path last", True, "; go on with: pfl-lightning fit --ckpt_path last"),
        ("fit --config a", False, " before there was a checkpoint; start again with: pfl-lightning fit --config a"),
    ],
)
def test_a_stopped_command_says_how_to_go_on(line, resumable, says, monkeypatch, capsys):
    def stopped(words):
        stop = Stopped(signal.SIGTERM)
        stop.resumable = resumable
        raise stop

    words = shlex.split(line)
    monkeypatch.setattr("pfl_lightning.cli.main.CommandLine", stopped)
    with pytest.raises(Stopped):
        main(words)
    assert capsys.readouterr().err.endswith(f"{says}\n")


def test_a_run_that_has_lost_a_rank_ends_with_that_rank_s_exit_code(monkeypatch, capsys):
    def lost(words):
        raise RankLost.by_exit_code(1, 137)

    monkeypatch.setattr("pfl_lightning.cli.main.CommandLine", lost)
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 137
    assert capsys.readouterr().err == "pfl-lightning: rank 1 was stopped by SIGKILL.\n"
