"""Sites that reach the server by another address, and strangers, for real: the commands of docs/deployment.md and the
files of examples/deploy."""

import configparser
import csv
import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deploy"
BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ['PATH']}"
PROGRAMS = ("flwr", "flower-superlink", "flower-supernode", "caddy", "openssl", "ssh-keygen")
OUTSIDE = "127.0.0.2"
"""An address of this machine that the SuperLink doesn't listen at."""
LIMIT = 900.0

FEDERATION = """
seed_everything: 0
model:
  class_path: FedAvg
  init_args:
    net: {class_path: MLP, init_args: {hidden: [8]}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
"""
DATA = """
data:
  class_path: TensorData
  init_args:
    x: FOLDER/x.pt
    y: FOLDER/y.pt
    task: {class_path: Classification, init_args: {num_classes: 3}}
    num_clients: 2
    partitioner: {class_path: IID}
"""
STRANGE = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "evil"
version = "1.0.0"
description = "evil"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:site"
""",
    "evil/__init__.py": "",
    "evil/app.py": """
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
site = ClientApp()


@server.main()
def main(grid, context):
    Path("MARKS/server").write_text("executed")
    grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])


@site.query()
def query(message, context):
    Path("MARKS/site").write_text("executed")
    return Message(RecordDict(), reply_to=message)
""",
}
"""An app whose code leaves a mark where it runs."""


class Machines:
    """Folders that stand for the machines of the page, with the processes of its commands and units.

    Args:
        folder: where the folders are.
        deployment: the module of ``examples/deployment.py``.
    """

    def __init__(self, folder, deployment):
        self.folder = folder
        self.processes = {}
        self.inside, self.door, *self.ports = deployment.free_ports(4)
        for name in ("clinics", "clinic", "stranger"):
            (folder / name / "flwr").mkdir(parents=True)
        deployment.make_samples(folder)
        caddy = (FILES / "Caddyfile").read_text()
        assert "8443" in caddy and "127.0.0.1:8000" in caddy
        (folder / "clinics" / "Caddyfile").write_text(self.here(caddy))

    def here(self, text):
        """Commands of the page or of a unit with the folders, the address and the ports of this test."""
        text = re.sub(r"/(srv/clinics?/venv|usr)/bin/", "", text).replace("/srv/clinic", f"{self.folder}/clinic")
        text = text.replace("examples/deploy", str(FILES)).replace("server.example", OUTSIDE)
        return text.replace("8000", str(self.inside)).replace("8443", str(self.door))

    def environment(self, machine):
        """What processes of a machine get; their homes also tell which are this test's."""
        home = self.folder / machine
        return os.environ | {
            "PATH": PATH,
            "HOME": str(home),
            "FLWR_HOME": str(home / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, machine, command, name):
        """A process that stays."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["/usr/bin/env", *shlex.split(command, comments=True)],
                cwd=self.folder / machine,
                env=self.environment(machine),
                stdout=log,
                stderr=log,
            )

    def run(self, machine, command):
        """A command that ends, with its exit code and what it has said."""
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=self.folder / machine,
            env=self.environment(machine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        return done.returncode, done.stdout

    def does(self, machine, command):
        """What a command says that has to succeed."""
        code, said = self.run(machine, command)
        assert code == 0, said
        return said

    def connect(self, machine, toml):
        """A connection of Flower's commands."""
        (self.folder / machine / "flwr" / "config.toml").write_text(toml)

    def wait(self, condition):
        """Waits for something to become true."""
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.2)

    def pids(self):
        """All processes of this test by id, with their machine and program."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                homes = [Path(value[5:]) for value in variables if value.startswith("HOME=")]
                if homes and homes[0].parent == self.folder:
                    found[int(entry.name)] = (homes[0].name, (entry / "comm").read_text().strip())
        return found

    def listening(self):
        """Who listens where: machine, program, address and port."""
        sockets = {}
        for table, size in (("tcp", 8), ("tcp6", 32)):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A":
                    address, _, port = words[1].partition(":")
                    zero = address == "0" * size
                    plain = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if size == 8 else address
                    sockets[words[9]] = ("*" if zero else plain, int(port, 16))
        found = set()
        for pid, who in self.pids().items():
            with suppress(OSError):
                for handle in Path("/proc", str(pid), "fd").iterdir():
                    with suppress(OSError):
                        inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(handle))
                        if inode and inode[1] in sockets:
                            found.add((*who, *sockets[inode[1]]))
        return found

    def ask(self, target, body):
        """The status by which the proxy answers a request without a signature."""
        trust = ssl.create_default_context(cafile=str(self.folder / "clinics" / "ca.pem"))
        link = http.client.HTTPSConnection(OUTSIDE, self.door, context=trust, timeout=60)
        link.request("POST", target, body, {"Content-Type": PROTOBUF_MEDIA_TYPE})
        return link.getresponse().status

    def end(self):
        """Leaves no process behind."""
        for way in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, way)
            for process in self.processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)


@pytest.fixture
def machines(tmp_path):
    spec = importlib.util.spec_from_file_location("deployment", ROOT / "examples" / "deployment.py")
    deployment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deployment)
    made = Machines(tmp_path, deployment)
    try:
        yield made
    finally:
        made.end()
        for path in sorted(tmp_path.glob("*.log")):
            print(f"--- {path.stem}\n{path.read_text(errors='replace')[-5000:]}")


def section():
    """The part of the page on TLS, its commands in order, and its connection."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    (text,) = re.findall(r"^## TLS and keys\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    block = textwrap.dedent("".join(re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)))
    commands = re.sub(r"\\\n *", "", block).splitlines()
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    return {word: line for line in commands for word in line.split()[:1]}, toml


def unit(name):
    """The command line of a unit."""
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",))
    parser.read_string((FILES / f"{name}.service").read_text().replace("\\\n", " "))
    return parser["Service"]["ExecStart"]


def test_units_have_the_commands_of_the_page():
    commands, _ = section()
    for name, program in {"superlink": "flower-superlink", "proxy": "caddy", "supernode": "flower-supernode"}.items():
        path, *words = shlex.split(unit(name))
        assert [Path(path).name, *words] == shlex.split(commands[program], comments=True)


@pytest.mark.skipif("LOOPBACK" not in os.environ, reason="takes minutes and ten processes: LOOPBACK=1 runs it")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for processes and sockets in /proc")
@pytest.mark.skipif(
    not all(shutil.which(program, path=PATH) for program in PROGRAMS),
    reason="Flower's programs, caddy, openssl or ssh-keygen aren't there",
)
def test_a_site_joins_from_another_address_and_a_stranger_does_not(machines):
    page, toml = section()
    server, site, stranger = (machines.folder / name for name in ("clinics", "clinic", "stranger"))

    # the server, its key, and the site's: the page's commands, and the units
    machines.does("clinics", machines.here(page["sh"]))
    machines.connect("clinics", machines.here(toml))
    machines.does("clinic", machines.here(page["ssh-keygen"]))
    shutil.copy(site / "clinic.pub", server)
    for folder in (site, stranger):
        shutil.copy(server / "ca.pem", folder)
    machines.start("clinics", machines.here(unit("superlink")), "superlink")
    machines.start("clinics", machines.here(unit("proxy")), "proxy")
    ports = {machines.inside, machines.door}
    machines.wait(lambda: ports <= {port for *_, port in machines.listening()})
    machines.does("clinics", machines.here(page["flwr"]))
    (site / "site.yaml").write_text(DATA.replace("FOLDER", str(machines.folder)))
    command = machines.here(unit("supernode")).replace('clients="3"', 'clients="0 1"')
    machines.start("clinic", f"{command} --port {machines.ports[0]}", "supernode")
    # a federation of one round at the site
    data = DATA.replace("FOLDER", str(machines.folder))
    trainer = f"trainer: {{max_rounds: 1, accelerator: cpu, default_root_dir: {server}/runs}}\n"
    (server / "federation.yaml").write_text(FEDERATION + data + trainer)
    program = f"{sys.executable} -m pfl_lightning"
    machines.does("clinics", f"{program} flower new app --config federation.yaml")
    (server / "app" / "sites.yaml").write_text(f"{(site / 'clinic.pub').read_text().strip()}: 0 1\n")
    command = machines.here(unit("federation")).removeprefix("pfl-lightning")
    machines.start("clinics", f"{program} {command} -c 'keys=\"sites.yaml\"'", "federation")

    # meanwhile a stranger, who has the authority's certificate, and a key of its own
    machines.connect(
        "stranger", toml.replace("/srv/clinics", str(stranger)).replace("127.0.0.1:8000", f"{OUTSIDE}:{machines.door}")
    )
    machines.does("stranger", 'ssh-keygen -q -t ecdsa -b 384 -N "" -f evil')
    marks = machines.folder / "marks"
    marks.mkdir()
    (stranger / "app" / "evil").mkdir(parents=True)
    for name, text in STRANGE.items():
        (stranger / "app" / name).write_text(text.replace("MARKS", str(marks)))
    shutil.copytree(stranger / "app", server / "evil")
    shutil.copy(stranger / "evil.pub", server)
    command = machines.here(unit("supernode")).replace("key clinic", "key evil").replace(str(site), str(stranger))
    machines.start("stranger", f"{command} --port {machines.ports[1]}", "stranger")
    for attempt in ("flwr supernode register evil.pub local", "flwr supernode list local", "flwr run app local"):
        code, said = machines.run("stranger", attempt)
        assert code != 0 and "403" in said
    register = RegisterNodeRequest(public_key=(stranger / "evil.pub").read_bytes()).SerializeToString()
    assert machines.ask("/v1/control/register-node", register) == 403
    # a site's requests come through, and are refused by the SuperLink without a site's signature
    assert machines.ask("/v1/fleet/pull-messages", b"") == 401
    with socket.socket() as direct:
        assert direct.connect_ex((OUTSIDE, machines.inside)) != 0
    machines.wait(lambda: machines.processes["stranger"].poll() is not None)
    assert machines.processes["stranger"].returncode != 0

    # the site has taken part, and of all that listens the proxy alone does so beyond the loopback
    machines.wait(lambda: machines.processes["federation"].poll() is not None)
    assert machines.processes["federation"].returncode == 0
    (path,) = (path for path in server.rglob("rounds.csv") if "checkpoints" not in str(path))
    assert [(row["clients"], row["absent"]) for row in csv.DictReader(path.open())] == [("2", "")]
    listening = machines.listening()
    print(*sorted(listening), sep="\n")
    assert {socket for socket in listening if socket[2] != "127.0.0.1"} == {("clinics", "caddy", "*", machines.door)}
    assert machines.inside in {port for *_, port in listening}

    # nothing of the stranger's has been taken or run, though on the server itself it would have been
    nodes = json.loads(machines.does("clinics", "flwr supernode list local --format json"))["nodes"]
    runs = json.loads(machines.does("clinics", "flwr list local --format json"))["runs"]
    assert len(nodes) == 1 and len(runs) == 1
    assert not list(marks.iterdir())
    machines.does("clinics", "flwr supernode register evil.pub local")
    machines.does("clinics", "flwr run evil local")
    machines.wait(lambda: {path.name for path in marks.iterdir()} == {"server", "site"})
