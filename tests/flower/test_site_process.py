"""The process of a site that stays, for real, and the folder of a federation at a site."""

import os
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import write_app
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from pfl_lightning import resident
from pfl_lightning.flower.apps import worker_of
from pfl_lightning.flower.link import VERSION
from pfl_lightning.flower.wire import pack, unpack
from pfl_lightning.runs.checkpoint_io import federation_in


def node(tmp_path, name="states"):
    """The settings of a node with a table of its own."""
    table = tmp_path / "table.csv"
    table.write_text(
        "age,pressure,ill\n" + "\n".join(f"{30 + row},{110 + row},{'flu cold'.split()[row % 2]}" for row in range(20))
    )
    flags = f"--data.path {table} --data.num_clients 1"
    return {"clients": "0", "state-dir": str(tmp_path / name), "flags": flags}


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs sockets of Unix")
def test_resumed_runs_have_one_process_which_ends_with_the_federation(tmp_path, monkeypatch):
    # a socket's path may be no longer than some hundred characters
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        write_app(tmp_path, "clinics")
        app = resident.client_app(tmp_path)
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

        def asked(run, kind, ckpt_path=""):
            content = pack({"hello": {"version": VERSION, "num_clients": 2, "agreed": {}}})
            settings = {"config": "app.yaml", "ckpt-path": ckpt_path}
            context = Context(run, 2, node(tmp_path), RecordDict(), settings)
            return app(Message(content, dst_node_id=2, message_type=kind), context).content

        def places():
            return list(Path(short).rglob("*.sock"))

        assert unpack(asked(1, "query"), "hello")["version"] == VERSION
        first = places()
        begun = time.monotonic()
        assert unpack(asked(2, "query", "unfinished"), "hello")["version"] == VERSION
        # its imports alone take longer
        assert places() == first and len(first) == 1 and time.monotonic() - begun < 20
        assert len(asked(2, "query.end")) == 0
        end = time.monotonic() + 20
        while places() and time.monotonic() < end:
            time.sleep(0.1)
        assert not places()
        # nobody is there any more
        assert len(asked(2, "query.end")) == 0


@pytest.mark.exhaustive
def test_each_federation_has_a_folder_of_its_own_at_a_site(tmp_path, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    settings, folders = node(tmp_path), []
    for run, name in enumerate(["a", "b", "a", "../../c"]):
        write_app(tmp_path / f"app{run}", name)
        context = Context(run, 2, settings, RecordDict(), {"config": "app.yaml"})
        folders.append(worker_of(tmp_path / f"app{run}", context).states.folder)
    assert folders[0] == folders[2] != folders[1]
    assert {folder.parent for folder in folders} == {tmp_path / "states"}


def test_who_predicts_at_a_site_names_the_federation_where_there_are_several(tmp_path):
    (tmp_path / "a" / "3").mkdir(parents=True)
    (tmp_path / "a" / "3" / "model.ckpt").touch()
    assert federation_in(tmp_path) == federation_in(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "b" / "3").mkdir(parents=True)
    (tmp_path / "b" / "3" / "model.ckpt").touch()
    with pytest.raises(MisconfigurationException, match=r"several federations; .*/a or .*/b\."):
        federation_in(tmp_path)
