"""A site's process that stays for the messages of a run, and the app that hands messages to it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

import tomllib

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from command import pfl
from pfl_lightning import resident
from pfl_lightning.flower import apps, stay
from pfl_lightning.flower.link import HELLO, VERSION
from pfl_lightning.flower.wire import names, pack, unpack

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
trainer: {max_rounds: 1, accelerator: cpu}
"""
pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs sockets with owners")


@pytest.fixture
def app(tmp_path):
    Path("mine.yaml").write_text(CONFIG)
    with pytest.raises(SystemExit) as ended:
        pfl("flower new clinics --config mine.yaml")
    assert ended.value.code == 0
    return Path("clinics").resolve()


@pytest.fixture
def context(app, tmp_path):
    run = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    node = {"clients": "0 2", "state-dir": str(tmp_path / "states")}
    return Context(run_id=1, node_id=7, node_config=node, state=RecordDict(), run_config=run)


@pytest.fixture
def short():
    """A folder whose name leaves room for a socket's, which has about a hundred characters at most."""
    with tempfile.TemporaryDirectory(prefix="pfl", dir="/tmp") as folder:
        yield Path(folder)


def asked() -> RecordDict:
    """Return what a server asks a site first."""
    return pack({"hello": {"version": VERSION, "num_clients": 4, "agreed": {}}})


def greeting() -> Message:
    message = Message(asked(), dst_node_id=7, message_type="query", ttl=60.0)
    vars(message.metadata)["_message_id"] = message.object_id
    return message


def clients(content: RecordDict) -> set[int]:
    return set(unpack(content, "hello", HELLO, 4)["clients"])


def test_a_new_app_hands_messages_on_and_its_process_imports_nothing_heavy(app):
    assert "from pfl_lightning.resident import client_app" in (app / "clinics" / "site.py").read_text()
    code = "import sys, pfl_lightning.resident; print({'torch', 'lightning', 'torchmetrics'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.exhaustive
def test_a_worker_is_made_once_a_run_and_gets_each_message_s_secrets(app, context):
    made = stay.Resident({"folder": str(app), "node": 7, "node_config": dict(context.node_config)})
    workers = []
    # the last message is of the same federation after it was resumed
    for run in (1, 1, 2):
        here, there = multiprocessing.Pipe()
        here.send(("query", asked(), RecordDict(), 60.0, run, dict(context.run_config)))
        assert made.serve(there)
        content, _ = here.recv()
        assert clients(content) == {0, 2}
        workers.append(made._worker)
    assert workers[0] is workers[1] is not workers[2] and not made.busy
    # whoever has brought the message is gone
    here, there = multiprocessing.Pipe()
    here.close()
    assert made.serve(there) and not made.busy
    # the federation has ended
    here, there = multiprocessing.Pipe()
    here.send(None)
    assert not made.serve(there) and here.recv() is None


@pytest.mark.parametrize("why", ["setting", "room"])
@pytest.mark.by_default("room")
def test_without_a_process_that_stays_the_app_answers_by_itself(app, context, monkeypatch, why):
    asked = []

    def connected(*_):
        asked.append(1)
        raise OSError

    monkeypatch.setattr(resident, "connected", connected)
    if why == "setting":
        context.node_config["resident"] = "false"
    reply = resident.client_app(app)(greeting(), context)
    assert clients(reply.content) == {0, 2} and len(asked) == (why == "room")


def test_a_folder_of_sockets_that_is_open_to_others_is_refused(tmp_path, short, monkeypatch):
    monkeypatch.setattr(resident.tempfile, "gettempdir", lambda: str(short))
    folder = resident.sockets()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        resident.sockets()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        resident.sockets()


@pytest.mark.exhaustive
def test_the_process_stays_for_the_next_message_and_ends_with_the_node(app, context, short, monkeypatch):
    monkeypatch.setattr(resident.tempfile, "gettempdir", lambda: str(short))
    # stands for the node
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(os, "getppid", lambda: node.pid)
    try:
        front = resident.client_app(app)
        started = []

        def counted(command, **settings):
            started.append(command)
            return start(command, **settings)

        start = subprocess.Popen
        monkeypatch.setattr(resident.subprocess, "Popen", counted)
        for _ in range(3):
            reply = front(greeting(), context)
            assert names(reply.content) == names(apps.client_app(app)(greeting(), context).content) == ["hello"]
        assert len(started) == 1
        (socket,) = resident.sockets().glob("*.sock")
    finally:
        node.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    # not waited for: a node that nobody has looked after yet is gone too
    while socket.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not socket.exists()
    node.wait()


def test_the_settings_are_no_arguments(app, context, tmp_path, short, monkeypatch):
    started = []

    class Fails:
        def __init__(self, command, stdin, text):
            started.append(command)
            self.stdin = (tmp_path / "stdin").open("w")

        def poll(self):
            return 1

        def kill(self):
            started.append("killed")

    monkeypatch.setattr(resident.tempfile, "gettempdir", lambda: str(short))
    monkeypatch.setattr(resident.subprocess, "Popen", Fails)
    with pytest.raises(TimeoutError):
        resident.connected(app, context)
    (command, killed) = started
    assert command[:3] == [sys.executable, "-m", "pfl_lightning.flower.stay"] and killed == "killed"
    assert not any("state" in word for word in command)
    assert json.loads((tmp_path / "stdin").read_text())["node_config"] == dict(context.node_config)
