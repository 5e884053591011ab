"""benchmarks/peers.py: the rows of its tables, and packages that do the same work."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("psutil", reason="which counts the CPU seconds of processes")

FILE = Path(__file__).parents[1] / "benchmarks" / "peers.py"
SCRIPT = runpy.run_path(str(FILE))

# A package with the names that the script reads of PFLlib, whose method moves each weight by 1 and each client by 2.
STUB = {
    "utils/data_utils.py": "def read_client_data(*args, **kwargs):\n    raise AssertionError('not replaced')\n",
    "flcore/clients/clientbase.py": "class Client:\n    pass\n",
    "flcore/trainmodel/models.py": """
from torch import nn

class BaseHeadSplit(nn.Module):
    def __init__(self, base, head):
        super().__init__()
        self.base, self.head = base, head
""",
    "flcore/servers/serverditto.py": """
from copy import deepcopy

from flcore.clients.clientbase import Client
from utils.data_utils import read_client_data

class Ditto:
    def __init__(self, args, times):
        assert (args.mu, args.plocal_epochs, args.local_epochs) == (1.0, 1, 1)
        self.args, self.global_model, self.evaluations = args, args.model, []
        self.clients = [Client() for _ in range(args.num_clients)]
        for number, client in enumerate(self.clients):
            client.id, client.model_per = number, deepcopy(args.model)

    def train(self):
        for _ in range(self.args.global_rounds + 1):
            selected = self.select_clients()
            self.evaluate()
            self.evaluate_personalized()
            for client in selected:
                assert len(client.load_train_data().dataset) == 30
                for parameter in client.model_per.parameters():
                    parameter.data += 2
            self.aggregate_parameters()

    def evaluate(self):
        self.evaluations += [len(read_client_data("", client.id, is_train=False)) for client in self.clients]
        print(self.evaluations)

    def evaluate_personalized(self):
        self.evaluate()

    def aggregate_parameters(self):
        for parameter in self.global_model.parameters():
            parameter.data += 1
""",
}


@pytest.fixture
def pfllib(tmp_path, monkeypatch):
    """Write the stub and return its folder; modules and folder are as before afterwards."""
    for name, text in STUB.items():
        path = tmp_path / "pfllib" / "system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path / "pfllib"


def figures(folder, *words, share=0.05, rounds=3):
    """Return the figures of a peer on W5, in this process."""
    workload = SCRIPT["asked"]("W5", share)
    SCRIPT["Federation"].write(workload, folder, rounds)
    SCRIPT["main"](
        [*words, "--workloads", "W5", "--share", str(share), "--rounds", str(rounds), "--folder", str(folder)]
    )
    return json.loads((folder / "figures.json").read_text())


def arguments(*words):
    """Return the parsed words of a table."""
    found = []
    main = SCRIPT["main"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(main.__globals__, "table", lambda name, method, args: found.append(args))
        main(list(words))
    return found[0]


def test_rows_are_of_each_engine_and_with_evaluation_as_users_have_it_too():
    args = arguments("--peers", "ours", "fluke", "--engines", "sequential", "auto")
    assert [row.name for row in SCRIPT["rows"](args, "Ditto")] == ["plain", "ours sequential", "ours auto", "fluke"]
    args = arguments("--peers", "ours", "--engines", "auto", "--evaluate")
    assert [row.name for row in SCRIPT["rows"](args, "FedAvg")] == ["plain", "ours auto", "ours auto whole"]


def test_a_row_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args, row = arguments(), SCRIPT["Row"]
    assert row("pfl-research", "Ditto").missing(args) == "has no Ditto"
    assert "--pfllib FOLDER" in row("pfllib", "Ditto").missing(args)
    assert row("fluke", "Ditto").missing(args) == "fluke isn't installed"
    assert row("plain", "FedAvg").missing(args) is None


def test_two_rounds_are_too_few(capsys):
    with pytest.raises(SystemExit):
        SCRIPT["main"](["--rounds", "2"])
    assert "--rounds 2" in capsys.readouterr().err


def test_held_out_samples_are_a_fourth_and_others_than_those_of_training(tmp_path):
    SCRIPT["Federation"].write(SCRIPT["asked"]("U1", 0.1), tmp_path, 3)
    federation = SCRIPT["Federation"](SCRIPT["asked"]("U1", 0.1), tmp_path, 3)
    for client in range(10):
        (x, y), (held_x, held_y) = federation.part(client), federation.part(client, held_out=True)
        assert len(held_x) == len(held_y) == max(1, len(y) // 4)
        assert not (x[:, None] == held_x).flatten(2).all(2).any()


def test_ours_does_the_work_of_the_plain_loop_with_and_without_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = figures(tmp_path, "--child", "plain")["moved"]
    bare = figures(tmp_path, "--child", "ours", "--engines", "sequential")["moved"]
    assert bare == pytest.approx(plain, rel=0.1)
    assert not list(tmp_path.rglob("*.ckpt"))
    words = ["--child", "ours", "--engines", "sequential", "--evaluate", "--whole"]
    assert figures(tmp_path, *words)["moved"] == bare
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("method", SCRIPT["METHODS"])
def test_ours_reports_what_stays_with_the_clients(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = figures(tmp_path, "--child", "ours", "--engines", "sequential", "--methods", method)
    assert found["moved"] > 0
    assert (found["own"] > 0) == (method != "FedAvg")
    if method in ("Ditto", "FedRep"):
        # three rounds of personal training go further than the mean of all clients
        assert found["own"] > found["moved"]


@pytest.mark.parametrize("evaluate", [False, True])
def test_pfllib_gets_samples_settings_and_cohorts(evaluate, pfllib, tmp_path, capsys):
    words = ["--child", "pfllib", "--methods", "Ditto", "--pfllib", str(pfllib)]
    found = figures(tmp_path, *words, *(["--evaluate"] if evaluate else []))
    size = 64 * 64 + 64 + 640 + 10
    assert found["moved"] == pytest.approx(3 * size**0.5, rel=1e-4)
    assert found["own"] == pytest.approx(6 * size**0.5, rel=1e-4)
    # each evaluation has the seven held-out samples of each of the five clients
    assert ("[7, 7, 7, 7, 7]" in capsys.readouterr().err) == evaluate
