"""The command `pfl-lightning flower`, and the app that it writes, from its configuration to the end of its run."""

import builtins
import importlib.util
import io
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

import tomllib

from flwr.app import Context, Message, RecordDict
from local_grid import LocalGrid

from command import pfl, refusal
from federations import equal, load
from pfl_lightning.flower import apps
from pfl_lightning.flower.link import MOST_SAMPLES, VERSION, Quorum
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.methods import FedPer
from pfl_lightning.runs.deployment_status import DeploymentStatus, write_status

CONFIG = """
seed_everything: 0
model:
  class_path: FedPer
  init_args:
    net: {class_path: MLP, init_args: {hidden: [8]}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
data:
  class_path: Digits
  init_args: {num_clients: 4, max_samples: 200}
trainer: {max_rounds: 1, default_root_dir: ROOT, accelerator: cpu, engine: sequential}
"""


class PowerCut(BaseException):
    """Ends a server's app without a chance to do anything about it."""


@pytest.fixture
def app(tmp_path):
    Path("mine.yaml").write_text(CONFIG.replace("ROOT", str(tmp_path / "there")))
    with pytest.raises(SystemExit) as ended:
        pfl("flower new clinics --config mine.yaml")
    assert ended.value.code == 0
    return Path("clinics")


def checkpoint(root):
    (path,) = root.glob("*/*/checkpoints/last.ckpt")
    return path


@pytest.mark.exhaustive
def test_an_app_runs_as_it_is_written(app, tmp_path):
    settings = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    run = settings["config"] | {"timeout": 20, "patience": 5}
    assert settings["components"] == {"serverapp": "clinics.server:app", "clientapp": "clinics.site:app"}
    made = {}
    for module in ("server", "site"):
        spec = importlib.util.spec_from_file_location(module, app / "clinics" / f"{module}.py")
        made[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made[module])
    nodes = {
        node: {"clients": clients, "state-dir": str(tmp_path / f"states-{node}")}
        for node, clients in ((1, "0 2"), (2, "1 3"))
    }
    grid = LocalGrid(made["site"].app, nodes, run_config=run)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run)
    made["server"].app(grid, context)
    quiet = "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
    pfl(f"fit --config mine.yaml --trainer.default_root_dir {tmp_path}/here {quiet}")
    there, here = (load(checkpoint(tmp_path / name)) for name in ("there", "here"))
    assert equal(there["state_dict"], here["state_dict"])
    assert equal(there["federation"]["payloads"], here["federation"]["payloads"])
    with pytest.raises(SystemExit) as ended:
        pfl(f"flower export --state-dir {tmp_path}/states-2 --client 3 model.ckpt")
    assert ended.value.code == 0
    exported = FedPer.load_from_checkpoint("model.ckpt", client=3, weights_only=True)
    whole = FedPer.load_from_checkpoint(checkpoint(tmp_path / "here"), client=3, weights_only=True)
    assert equal(dict(exported.state_dict()), dict(whole.state_dict()))


@pytest.mark.exhaustive
def test_a_tracker_at_the_server_is_one_of_the_app_and_status_shows_the_run(app, tmp_path, capsys):
    run = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert run["status"] == str((app / "deployment.status").resolve())
    tracker = f"--trainer.logger TensorBoardLogger --trainer.logger.save_dir {tmp_path}/tracked"
    run |= {"timeout": 20, "patience": 5, "flags": tracker, "names": "Bremen, Ulm, Kiel, Jena"}
    nodes = {1: {"clients": "Bremen, Kiel, Ulm, Jena", "state-dir": str(tmp_path / "states")}}
    apps.fitted(LocalGrid(apps.client_app(app), nodes, run_config=run), app, run)
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("round 1 of 1"))
    assert "4 of 4 clients answered; loss " in line and "validation accuracy" in line
    with pytest.raises(SystemExit) as ended:
        pfl("status clinics")
    assert ended.value.code == 0
    told = [re.split(" {2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [value for name, value in told if name == "last round"] == [line]
    assert dict(told)["state"].startswith("finished, process") and dict(told)["round"] == "1 of 1"
    sites = [value.split(":")[0] for name, value in told if name == "site"]
    assert sites == ["clients 0 (Bremen), 1 (Ulm), 2 (Kiel), 3 (Jena)"]


@pytest.mark.exhaustive
def test_an_unfinished_run_goes_on_in_its_folder(app, tmp_path):
    run = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    run |= {"timeout": 20, "patience": 5, "flags": "--trainer.max_rounds 2", "ckpt-path": "unfinished"}
    nodes = {1: {"clients": "0 1 2 3", "state-dir": str(tmp_path / "states")}}
    answers = []

    def spoil(node, kind, content):
        answers.append(kind)
        # at the start, in the second round, and in the next try before a round
        if len(answers) in (1, 5, 6):
            raise PowerCut

    grid = LocalGrid(apps.client_app(app), nodes, spoil=spoil, run_config=run)
    for _ in range(3):
        with pytest.raises(PowerCut):
            apps.fitted(grid, app, run)
    assert answers == ["query", "query", "train", "evaluate", "train", "query"]
    apps.fitted(grid, app, run)
    (path,) = (tmp_path / "there").rglob("rounds.csv")
    assert [line.partition(",")[0] for line in path.read_text().splitlines()] == ["round", "1", "2"]
    status = DeploymentStatus(app / "deployment.status")
    assert status.state == "finished" and status.unfinished is None
    write_status(status.path, {**status.content, "state": "failed"})
    assert DeploymentStatus(status.path).unfinished == path.parent / "checkpoints" / "last.ckpt"


def test_settings_of_a_quorum_are_those_of_the_app(app):
    run = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    # a new app writes the defaults out
    assert apps.quorum_in(run) == apps.quorum_in({}) == Quorum()
    other = {"min-available": 3, "min-results": 0.5, "grace": 7, "wait-for-lost": 9, "late-rounds": 1}
    assert apps.quorum_in(run | other) == Quorum(3, 0.5, 7.0, 9.0, 1)


def test_settings_of_a_server_are_those_of_the_app(tmp_path, monkeypatch):
    run, given = {"timeout": 7, "patience": 9, "max-norm": 0.0}, []
    monkeypatch.setattr(apps, "serve", lambda *args, **settings: given.append(settings))
    parts = SimpleNamespace(trainer=None, model=None, datamodule=None, aggregator=None)
    for settings in (run, run | {"max-norm": 3, "max-clients": 5, "evaluate-with-training": True}):
        apps.serve_app(None, parts, settings, tmp_path, tmp_path / "status", None)
    names = ("timeout", "patience", "max_norm", "max_clients", "together")
    assert [given[1][name] for name in names] == [7.0, 9.0, 3.0, 5, True]
    assert [given[0][name] for name in names[2:]] == [None, 0, False]


@pytest.mark.parametrize(
    ("flags", "words"),
    [("--trainer.min_clients 0", "trainer.min_clients=0"), ("--trainer.rounds 3", "settings are refused")],
)
def test_a_mistake_ends_the_servers_app_in_a_sentence(app, flags, words, capsys):
    run = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | {"flags": flags}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run)
    with pytest.raises(apps.Mistake, match=words) as ended:
        apps.server_app(app)(LocalGrid(None, {}), context)
    # as Flower logs what ends an app
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        logger.error("ServerApp raised an exception", exc_info=ended.value)
    finally:
        logger.removeHandler(handler)
    assert text.getvalue() == f"{ended.value}\n"


@pytest.mark.exhaustive
def test_packaged_configurations_stay_names(app):
    with pytest.raises(SystemExit):
        pfl("flower new other --config methods/fedper --config protocols/digits_iid --config mine.yaml")
    config = tomllib.loads(Path("other/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["config"] == "methods/fedper protocols/digits_iid configs/mine.yaml"
    assert [path.name for path in Path("other/configs").iterdir()] == ["mine.yaml"]
    arguments = apps.arguments(Path("other"), config | {"flags": "--trainer.max_rounds 7"})
    assert arguments[::2] == ["--config", "--config", "--config", "--trainer.max_rounds"]
    assert all(Path(path).is_file() for path in arguments[1:6:2]) and arguments[-1] == "7"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("flower new clinics --config mine.yaml", "clinics is there already"),
        ("flower new try --config mine.yaml", "'try' can't name an app"),
        ("flower new other", "--config is missing"),
        ("flower new other --config mine.yml", "--config mine.yml is no configuration"),
        ("flower export model.ckpt", "--client says whose model"),
        ("flower export --client 3 --state-dir nowhere model.ckpt", "client=3 has no model in state-dir='nowhere'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(app, capsys, line, words):
    assert words in refusal(line, capsys)


def test_what_a_run_is_given_reaches_its_runner(monkeypatch):
    class Runs:
        def __init__(self, *given):
            self.given = given

        def run(self):
            return int(self.given != (Path("clinics"), "server.example:8000", ["a=1", "b=2"], True, Path("ca.pem")))

    monkeypatch.setattr("pfl_lightning.flower.command.Runner", Runs)
    with pytest.raises(SystemExit) as ended:
        pfl("flower run clinics server.example:8000 -c a=1 --anew --root-certificates ca.pem -c b=2")
    assert ended.value.code == 0


def test_without_the_extra_a_sentence_names_it(app, capsys, monkeypatch):
    monkeypatch.setattr("pfl_lightning.flower.command.find_spec", lambda name: None)
    assert "pip install 'pfl-lightning[flower]'" in refusal("flower new other --config mine.yaml", capsys)


def test_the_command_itself_needs_no_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "flwr":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [name for name in sys.modules if name.startswith("pfl_lightning.flower")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("pfl_lightning.flower.command")


WRONG = (0, -1, 2.5, "many", "true", 10**20)
KEY = "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhB"


def test_a_list_of_keys_is_read_or_refused_in_a_sentence(tmp_path):
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    text = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "sites.yaml").write_text(f"{text} me@clinic: 0 3\n")
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert apps.keys_in(tmp_path / "sites.yaml") == {pem: {0: MOST_SAMPLES, 3: MOST_SAMPLES}}
    (tmp_path / "sites.yaml").write_text(f"{text}: {{clients: 0 3, max-samples: 5000}}\n")
    assert apps.keys_in(tmp_path / "sites.yaml") == {pem: {0: 5000, 3: 5000}}
    (tmp_path / "sites.yaml").write_text(f"{text}: 01\n")
    assert apps.keys_in(tmp_path / "sites.yaml", ["1", "01"]) == {pem: {1: MOST_SAMPLES}}
    ends = (
        "01",
        "none",
        "{max-samples: 3}",
        "{clients: 0, samples: 3}",
        *(f"{{clients: 0, max-samples: {n}}}" for n in WRONG),
    )
    wrongs = [f"{text}: {end}\n" for end in ends]
    for wrong in (f"{KEY}: 0 3\n", *wrongs, f"{text}: 0\n{text}: 3\n", "- 3\n", "a: b: c\n"):
        (tmp_path / "sites.yaml").write_text(wrong)
        with pytest.raises(MisconfigurationException, match=r"keys='sites\.yaml' can't be read"):
            apps.keys_in(tmp_path / "sites.yaml")


@pytest.mark.exhaustive
def test_seeds_of_server_and_sites_are_those_of_the_configuration(app):
    torch.manual_seed(9)
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    nets = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        cli = apps.configured([*apps.arguments(app, config), *apps.AT_SITES.split()])
        nets.append(cli.model.state_dict())
        assert cli.trainer.loggers == [] and cli.aggregator is None
    assert equal(dict(nets[0]), dict(nets[1]))


def test_a_site_imports_nothing_that_an_app_names_beside_the_library(app, tmp_path, monkeypatch):
    (tmp_path / "evil_cohort.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass Sel: ...")
    (tmp_path / "clinic_digits.py").write_text("from pfl_lightning.data import Digits\nclass Patients(Digits): ...")
    monkeypatch.syspath_prepend(tmp_path)
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    node = {"clients": "0 1 2 3", "state-dir": str(tmp_path / "states")}

    def greeting(flags, **settings):
        grid = LocalGrid(apps.client_app(app), {1: node | settings}, run_config=config | {"flags": flags})
        asked = pack({"hello": {"version": VERSION, "num_clients": 4, "agreed": {}}})
        grid.push_messages([Message(asked, dst_node_id=1, message_type="query", ttl=9.0)])
        (reply,) = grid._replies.values()
        return names(reply.content), reply.content

    assert greeting("")[0] == ["hello"]
    for flags in ("--trainer.cohort evil_cohort.Sel", "--aggregator evil_cohort.Sel", "--data clinic_digits.Patients"):
        found, content = greeting(flags)
        assert found[0] == "failure" and "nor a class that this site knows" in unpack(content, "failure")["reason"]
    assert not Path("imported").exists() and "evil_cohort" not in sys.modules
    # the site's own configuration names it too
    (tmp_path / "site.yaml").write_text("data: {class_path: clinic_digits.Patients, init_args: {max_samples: 100}}")
    assert greeting("--data clinic_digits.Patients", data=str(tmp_path / "site.yaml"))[0] == ["hello"]
