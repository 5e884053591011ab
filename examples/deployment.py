"""A deployment on this machine, for real: a server and two sites with TLS and keys, and what goes wrong with them.

    python examples/deployment.py     # some minutes: every message starts Python anew

Flower's SuperLink and two SuperNodes run on loopback, and a SuperNode whose key nobody has registered is refused. With
FedPer, the server's app is killed, and goes on from its last checkpoint. With SCAFFOLD, a SuperNode is killed in the
middle of a round, and is asked again when it is back. Both must end as in one process, to the bit. Needs the extra
``flower``, and Linux.
"""

import csv
import datetime
import io
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from pfl_lightning.cli.main import main as pfl
from pfl_lightning.messages import digest

CONFIG = """
seed_everything: 0
model:
  class_path: {method}
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
{aggregator}
data:
  class_path: TensorData
  init_args:
    x: {folder}/x.pt
    y: {folder}/y.pt
    task: {{class_path: Classification, init_args: {{num_classes: 3}}}}
    num_clients: 4
    partitioner: {{class_path: Dirichlet, init_args: {{alpha: 1}}}}
trainer: {{max_rounds: 2, limit_val_batches: 0, evaluate: {evaluate}, accelerator: cpu, default_root_dir: "{root}"}}
"""
METHODS = {
    "fedper": ("FedPer", "", "after"),
    "scaffold": ("ControlVariates", "aggregator: {class_path: SCAFFOLD}", "before"),
}
"""Client modules, aggregators, and when clients are evaluated: after their training no message of its own is needed."""
CLIENTS = {"site0": "0 2", "site1": "1 3"}
BIN = Path(sys.executable).parent
AT_SITES = {"bytes/evaluate", "absent"}
"""Columns that only a deployment's record has, beside times."""
LIMIT = 900.0
"""Seconds that anything may take: a busy machine is no reason to fail."""


class Deployment:
    """A SuperLink with TLS, and two SuperNodes with keys, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, *self.ports = free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            # `flwr run --stream` doesn't flush, and what it shows is waited for
            "PYTHONUNBUFFERED": "1",
        }
        make_certificates(folder)
        make_samples(folder)
        (folder / "flwr").mkdir()
        connection = f'[superlink.local]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{folder}/ca.pem"\n'
        (folder / "flwr" / "config.toml").write_text(f'[superlink]\ndefault = "local"\n\n{connection}')

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process whose output goes to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [BIN / command[0], *command[1:]],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def superlink(self) -> None:
        """Starts the server's side."""
        files = [f"--ssl-{name}={self.folder}/{file}" for name, file in TLS.items()]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        own = ["--database", str(self.folder / "link.db"), "--port", str(self.port)]
        self.start("superlink", "flower-superlink", *files, *options, *own)
        wait_until(lambda: is_open(self.port), self.processes["superlink"])

    def register(self, name: str) -> None:
        """Makes a site's key, and tells the server of it."""
        make_key(self.folder / name)
        self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "local")

    def supernode(self, name: str) -> subprocess.Popen[bytes]:
        """Starts a site, or a stranger."""
        if not (self.folder / name).exists():
            make_key(self.folder / name)
        index = [*CLIENTS, "stranger"].index(name)
        clients = CLIENTS.get(name, "0 2")
        settings = f'clients="{clients}" state-dir="{self.folder}/states-{index}" allow="control"'
        return self.start(
            name,
            "flower-supernode",
            f"--root-certificates={self.folder}/ca.pem",
            f"--superlink=127.0.0.1:{self.port}",
            f"--port={self.ports[index]}",
            f"--auth-supernode-private-key={self.folder / name}",
            f"--node-config={settings}",
        )

    def flwr(self, *words: str) -> str:
        """Runs a command of Flower's to its end."""
        done = subprocess.run(
            [BIN / "flwr", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def said(self, name: str) -> str:
        """What a process has put out."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """Ends a process and all that it has started, as a power cut would."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def apps(self, program: str, name: str = "superlink") -> list[int]:
        """Processes of a program that one of ours has started."""
        process = self.processes[name]
        return [pid for pid, words in self.descendants(process.pid) if any(word.endswith(program) for word in words)]

    def descendants(self, ancestor: int) -> Iterator[tuple[int, list[str]]]:
        """Processes that a process has started, and they have, with their command lines."""
        for entry in Path("/proc").glob("[0-9]*"):
            # one that has ended meanwhile, or is somebody else's
            with suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == ancestor:
                    yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    yield from self.descendants(int(entry.name))

    def kill_app(self, program: str) -> None:
        """Ends the server's app."""
        (pid,) = self.apps(program)
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Leaves no process behind."""
        for name in list(self.processes):
            apps = [pid for pid, _ in self.descendants(self.processes[name].pid)]
            self.kill(name)
            for pid in apps:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


TLS = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def is_open(port: int) -> bool:
    """Whether somebody listens at a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> None:
    """Waits for something to become true, while a process runs that is to bring it about."""
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {LIMIT:.0f} s in vain")
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        time.sleep(0.1)


def make_key(path: Path) -> None:
    """A site's key pair, as ``ssh-keygen -t ecdsa -b 384`` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def make_certificates(folder: Path) -> None:
    """An authority, and the server's certificate by it."""

    def certificate(name: str, key: Any, issuer: str, issuer_key: Any, extension: Any) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, issuer)]
        made = (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .sign(issuer_key, hashes.SHA256())
        )
        return made.public_bytes(Encoding.PEM)

    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    basic = x509.BasicConstraints(ca=True, path_length=None)
    alternatives = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    (folder / "ca.pem").write_bytes(certificate("authority", authority, "authority", authority, basic))
    (folder / "server.pem").write_bytes(certificate("localhost", server, "authority", authority, alternatives))
    key = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(key)
    (folder / "server.key").chmod(0o600)


@contextmanager
def deployment() -> Iterator[Deployment]:
    """A deployment that leaves no process behind."""
    with tempfile.TemporaryDirectory() as name:
        made = Deployment(Path(name))
        try:
            yield made
        except BaseException:
            for path in sorted(made.folder.glob("*.log")):
                print(f"--- {path.stem}\n{made.said(path.stem)[-5000:]}", file=sys.stderr)
            raise
        finally:
            made.end()


def make_samples(folder: Path) -> None:
    """Three clouds of points, in files that all sites read."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    torch.save(torch.randn(240, 10, generator=generator) + y[:, None], folder / "x.pt")
    torch.save(y, folder / "y.pt")


def app(deployed: Deployment, method: str) -> Path:
    """Writes the app of a method."""
    folder = deployed.folder / method
    client, aggregator, evaluate = METHODS[method]
    config = deployed.folder / f"{method}.yaml"
    root = deployed.folder / "runs" / method
    settings = {"method": client, "aggregator": aggregator, "evaluate": evaluate}
    config.write_text(CONFIG.format(root=root, folder=deployed.folder, **settings))
    command("flower", "new", str(folder), "--config", str(config))
    keys = {name: (deployed.folder / f"{name}.pub").read_text().strip() for name in CLIENTS}
    (folder / "sites.yaml").write_text("".join(f"{keys[name]}: {clients}\n" for name, clients in CLIENTS.items()))
    return folder


def command(*words: str) -> None:
    """Runs ``pfl-lightning``, in this process, without its tables."""
    try:
        with redirect_stdout(io.StringIO()):
            pfl(list(words))
    except SystemExit as end:
        if end.code:
            raise


def in_one_process(deployed: Deployment, method: str) -> None:
    """Fits the same federation without sites."""
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    root = deployed.folder / "here" / method
    command("fit", "--config", str(deployed.folder / f"{method}.yaml"), "--trainer.default_root_dir", str(root), *quiet)


def checkpoints(deployed: Deployment, method: str, where: str = "runs") -> list[Path]:
    """The last checkpoints of a method's runs."""
    return list((deployed.folder / where / method).glob("*/*/checkpoints/last.ckpt"))


def what_counts(path: Path) -> list[Any]:
    """Fingerprints of a run's model, its server's state and its payloads, and its record without times."""
    saved = torch.load(path, weights_only=True)
    with (path.parents[1] / "rounds.csv").open(newline="") as file:
        rows = [{name: value for name, value in row.items() if name not in AT_SITES} for row in csv.DictReader(file)]
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
    federation = saved["federation"]
    return [*map(digest, (saved["state_dict"], federation["aggregator"], federation["payloads"])), rows]


def compare(deployed: Deployment, method: str) -> None:
    """Demands that a federation at sites has ended as in one process."""
    ends = [what_counts(path) for where in ("here", "runs") for path in checkpoints(deployed, method, where)]
    if len(ends) != 2 or ends[0] != ends[1]:
        raise AssertionError(f"{method} in one process and at sites: {ends}")


def run(deployed: Deployment, name: str, folder: Path, **settings: str) -> subprocess.Popen[bytes]:
    """Starts the app's run, and shows it until it ends."""
    words = [f'{name.replace("_", "-")}="{value}"' for name, value in {"keys": "sites.yaml", **settings}.items()]
    return deployed.start(name, "flwr", "run", str(folder), "local", "--stream", "-c", " ".join(words))


def refused(deployed: Deployment) -> bool:
    """Whether the SuperNode that nobody has registered has ended with an error."""
    return deployed.processes["stranger"].poll() not in (None, 0)


def scenario(deployed: Deployment) -> None:
    """All of it; what has to be waited for is waited for together."""
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:4.0f} s  {text}", flush=True)

    deployed.superlink()
    with ThreadPoolExecutor() as pool:
        list(pool.map(deployed.register, ("site0", "site1")))
    for name in ("site0", "site1", "stranger"):
        deployed.supernode(name)
    fedper, scaffold = (app(deployed, method) for method in METHODS)
    tell("a server and two sites have started")

    first = run(deployed, "fedper-begins", fedper)
    wait_until(lambda: checkpoints(deployed, "fedper"), first)
    deployed.kill_app("flwr-serverapp")
    tell("fedper: the server's app is killed in the second round")

    # longer than Flower keeps a killed SuperNode out, so that the round has all clients
    second = run(deployed, "scaffold", scaffold, wait_for_lost="600")
    wait_until(lambda: checkpoints(deployed, "scaffold"), second)
    wait_until(lambda: deployed.apps("flwr-clientapp", "site1"), second)
    deployed.kill("site1")
    tell("scaffold: a site is killed in the second round")
    # this server waits for the site too
    third = run(deployed, "fedper-goes-on", fedper, ckpt_path="last")
    wait_until(lambda: refused(deployed))
    tell("a SuperNode that isn't registered is refused")
    for method in METHODS:
        in_one_process(deployed, method)
    wait_until(lambda: "Flower's error" in deployed.said("scaffold"), second)
    tell("scaffold: the server knows that the site is gone")
    back = deployed.supernode("site1")
    while second.poll() is None or third.poll() is None:
        # as a supervisor such as systemd does, should Flower not let it in yet
        if back.poll() is not None:
            back = deployed.supernode("site1")
        time.sleep(0.2)
    for method, what in (("scaffold", "the site is back, and was asked again"), ("fedper", "the server's app went on")):
        compare(deployed, method)
        tell(f"{method}: {what}; the same bits as in one process")
    with (checkpoints(deployed, "scaffold")[0].parents[1] / "rounds.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    tell(f"a phase took {float(row['time/train']):.0f} s, of which a site trained {float(row['time/site']):.2f} s")


def main() -> None:
    """Runs the scenario."""
    # whoever ends this script ends all that it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with deployment() as deployed:
        scenario(deployed)


if __name__ == "__main__":
    main()
