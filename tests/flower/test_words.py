"""What an operator reads: who is meant, what is wrong, and nothing of the code's own places."""

import errno
import warnings
from functools import partial
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite, write_app
from flwr.app import Context, RecordDict

from federations import make_client, noisy
from pfl_lightning.cli.status import described_deployment
from pfl_lightning.flower import states
from pfl_lightning.flower.apps import plain_warning, worker_of
from pfl_lightning.flower.client_app import answer, app_of
from pfl_lightning.flower.wire import pack, unpack
from pfl_lightning.methods import FedPer
from pfl_lightning.runs.deployment_status import DeploymentStatus

make = partial(make_client, FedPer, net=noisy)


def broken(context):
    raise OSError("no such disk")


@pytest.mark.parametrize(
    ("fault", "reason"), [("other", "its initial model is another"), ("fails", "its site failed with OSError")]
)
def test_a_refused_site_is_named_by_its_clients(tmp_path, fault, reason):
    grid = grid_of(make, tmp_path / "sites")
    works, fails = grid.app, app_of(broken)
    if fault == "other":

        def spoil(node, kind, content):
            if node == 12:
                rewrite(content, lambda records: records["hello"].update(initial="0" * 16))

        grid.spoil = spoil
    else:
        grid.app = lambda message, context: (fails if context.node_id == 12 else works)(message, context)
    path = tmp_path / "state"
    names = ["Bremen", "Ulm", "Kiel", "Jena"]
    # a site that doesn't get as far as a greeting tells its own setting
    told = "1 (Ulm), 3 (Jena)" if fault == "other" else "1 3"
    with (
        pytest.warns(UserWarning) as warned,
        pytest.raises(MisconfigurationException, match=r"clients 1 \(Ulm\), 3"),
    ):
        deploy(grid, make, serving={"patience": 0.2, "names": names, "status": path})
    said = [str(each.message) for each in warned if "is refused" in str(each.message)]
    assert len(said) == 1 and said[0].startswith(f"site of clients {told} at node 12 is refused: {reason}")
    shown = dict(described_deployment(DeploymentStatus(path)))["refused"]
    assert shown.startswith(f"clients {told}, node 12: {reason}")


def test_a_warning_is_a_line_without_a_place_in_the_code():
    line = plain_warning(UserWarning("node 12\n is refused"), UserWarning, __file__, 7)
    assert line == "pfl-lightning: warning: node 12 is refused\n"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--data.path site.csv --data.num_clients 1", "data.features: there is no column 'pressure'"),
        ("--data.colour red", "data.colour is not a setting of TableData."),
    ],
)
def test_a_site_s_wrong_setting_is_one_sentence(tmp_path, monkeypatch, capfd, flags, sentence):
    monkeypatch.chdir(tmp_path)
    # the app's processes keep it; here it is the tests' own
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    write_app(tmp_path, "clinics")
    Path("site.csv").write_text("age,presure,ill\n30,110,cold\n31,120,flu\n")
    node = {"clients": "0", "state-dir": str(tmp_path / "states"), "flags": flags}
    context = Context(1, 2, node, RecordDict(), {"config": "app.yaml"})
    hello = pack({"hello": {"version": "", "num_clients": 2, "agreed": {}}})
    told = unpack(answer("query", hello, lambda: worker_of(tmp_path, context), 60.0, "0"), "failure")
    assert told["reason"].startswith(sentence) and "Namespace" not in told["reason"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_at_a_site_is_told_with_its_place_and_advice(tmp_path, monkeypatch, capsys):
    def full(content, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "save", full)
    grid = grid_of(make, tmp_path, max_rounds=1)
    with pytest.warns(UserWarning, match="client 0 is left out"):
        deploy(grid, make, max_rounds=1, min_clients=1)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("round 1"))
    assert f"refused 0: {tmp_path}/11/0/" in line and "No space left on device at the site; make room there" in line
