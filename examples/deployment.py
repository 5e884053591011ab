"""A deployment on this machine, for real: a server and two sites with TLS and keys, and all of them killed once.

    python examples/deployment.py     # some minutes: Flower takes up to one to believe that somebody is dead

Flower's SuperLink and two SuperNodes run on loopback, and a SuperNode whose key nobody has registered is refused. While
`pfl-lightning flower run` runs a federation of SCAFFOLD, the server's app is killed, then one site while nothing is
asked of it, the other in the middle of a round, and at last the SuperLink. What is killed is started again, as systemd
does; the run goes on by itself, and ends as in one process, to the bit. Needs the extra ``flower``, and Linux.
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
from collections.abc import Callable, Iterator, Mapping
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
  class_path: ControlVariates
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
aggregator: {{class_path: SCAFFOLD}}
data:
  class_path: TensorData
  init_args:
    x: {folder}/x.pt
    y: {folder}/y.pt
    task: {{class_path: Classification, init_args: {{num_classes: 3}}}}
    num_clients: 4
    partitioner: {{class_path: Dirichlet, init_args: {{alpha: 1}}}}
trainer: {{max_rounds: 3, evaluate: before, accelerator: cpu, engine: sequential, default_root_dir: "{folder}/runs"}}
"""
CLIENTS = {"site0": "0 2", "site1": "1 3"}
BIN = Path(sys.executable).parent
AT_SITES = {"bytes/evaluate", "absent"}
"""Columns that only a deployment's record has, beside times."""
LIMIT = 900.0
"""Seconds that anything may take: a busy machine is no reason to fail."""


class Deployment:
    """A SuperLink with TLS, and SuperNodes with keys, in a folder of their own.

    Args:
        folder: the folder.
        sites: each site's clients.
    """

    def __init__(self, folder: Path, sites: Mapping[str, str]) -> None:
        self.folder, self.sites = folder, sites
        # one for the SuperLink, and one for a stranger
        self.port, *self.ports = free_ports(len(sites) + 2)
        self.config = folder / "federation.yaml"
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
        self.wait(lambda: is_open(self.port), self.processes["superlink"])

    def register(self, name: str) -> None:
        """Makes a site's key, and tells the server of it."""
        make_key(self.folder / name)
        self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "local")

    def supernode(self, name: str, more: str = "") -> subprocess.Popen[bytes]:
        """Starts a site, or a stranger, with further settings."""
        if not (self.folder / name).exists():
            make_key(self.folder / name)
        index = [*self.sites, "stranger"].index(name)
        clients = self.sites.get(name, "0 2")
        settings = f'clients="{clients}" state-dir="{self.folder}/states-{index}" allow="control" {more}'
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

    def wait(self, condition: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> None:
        """Waits for something to become true, while a process runs that is to bring it about."""
        end = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {LIMIT:.0f} s in vain")
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"{process.args} ended with {process.returncode}")
            # as a supervisor such as systemd does: Flower may not let a killed site in again yet
            for name in self.sites.keys() & self.processes.keys():
                if self.processes[name].poll() is not None:
                    self.supernode(name)
            time.sleep(0.2)

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
def deployment(sites: Mapping[str, str]) -> Iterator[Deployment]:
    """A deployment that leaves no process behind."""
    with tempfile.TemporaryDirectory() as name:
        made = Deployment(Path(name), sites)
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


def app(deployed: Deployment, text: str = CONFIG) -> Path:
    """Writes the app of a configuration, with the keys of its sites."""
    folder = deployed.folder / "clinics"
    deployed.config.write_text(text.format(folder=deployed.folder))
    command("flower", "new", str(folder), "--config", str(deployed.config))
    keys = {name: (deployed.folder / f"{name}.pub").read_text().strip() for name in deployed.sites}
    (folder / "sites.yaml").write_text(
        "".join(f"{keys[name]}: {clients}\n" for name, clients in deployed.sites.items())
    )
    return folder


def command(*words: str) -> None:
    """Runs ``pfl-lightning``, in this process, without its tables."""
    try:
        with redirect_stdout(io.StringIO()):
            pfl(list(words))
    except SystemExit as end:
        if end.code:
            raise


def in_one_process(deployed: Deployment) -> None:
    """Fits the same federation without sites."""
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    command(
        "fit", "--config", str(deployed.config), "--trainer.default_root_dir", str(deployed.folder / "here"), *quiet
    )


def checkpoints(deployed: Deployment, where: str = "runs") -> list[Path]:
    """The last checkpoints of runs."""
    return list((deployed.folder / where).glob("*/*/checkpoints/last.ckpt"))


def rows_of(checkpoint: Path) -> list[dict[str, str]]:
    """The record of a checkpoint's run."""
    with (checkpoint.parents[1] / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def what_counts(path: Path) -> list[Any]:
    """Fingerprints of a run's model, its server's state and its payloads, and its record without times."""
    saved = torch.load(path, weights_only=True)
    rows = [{name: value for name, value in row.items() if name not in AT_SITES} for row in rows_of(path)]
    rows = [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]
    federation = saved["federation"]
    return [*map(digest, (saved["state_dict"], federation["aggregator"], federation["payloads"])), rows]


def compare(deployed: Deployment) -> None:
    """Demands that the federation at sites has ended as in one process, without an absent client."""
    ends = [what_counts(path) for where in ("here", "runs") for path in checkpoints(deployed, where)]
    if len(ends) != 2 or ends[0] != ends[1]:
        raise AssertionError(f"in one process and at sites: {ends}")
    if any(row["absent"] for row in rows_of(checkpoints(deployed)[0])):
        raise AssertionError("a client was absent")


def begins(deployed: Deployment, round: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a round is at work: the one before is in the record."""

    def written() -> bool:
        with suppress(OSError):
            return any(len(rows_of(path)) >= round - 1 for path in checkpoints(deployed))
        return False

    deployed.wait(written, process)


def refused(deployed: Deployment) -> bool:
    """Whether the SuperNode that nobody has registered has ended with an error."""
    return deployed.processes["stranger"].poll() not in (None, 0)


def scenario(deployed: Deployment) -> None:
    """All of it."""
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:4.0f} s  {text}", flush=True)

    deployed.superlink()
    with ThreadPoolExecutor() as pool:
        list(pool.map(deployed.register, CLIENTS))
    for name in (*CLIENTS, "stranger"):
        deployed.supernode(name)
    folder = app(deployed)
    tell("a server and two sites have started")

    # longer than Flower keeps a killed SuperNode out, so that each round has all clients
    settings = 'keys="sites.yaml" wait-for-lost=600'
    run = deployed.start("run", "pfl-lightning", "flower", "run", str(folder), "local", "-c", settings)
    begins(deployed, 2, run)
    deployed.kill_app("flwr-serverapp")
    tell("the server's app is killed in the second round")
    deployed.kill("site0")
    tell("a site is killed")
    deployed.wait(lambda: refused(deployed))
    tell("a SuperNode that isn't registered is refused")
    in_one_process(deployed)
    deployed.supernode("site0")
    begins(deployed, 3, run)
    deployed.wait(lambda: deployed.apps("flwr-clientapp", "site1"), run)
    deployed.kill("site1")
    tell("the other site is killed in the third round")
    deployed.supernode("site1")
    # because Flower says that the site is gone, or because its answer is overdue: whichever comes first
    deployed.wait(lambda: deployed.apps("flwr-clientapp", "site1"), run)
    tell("the site is back, and asked again")
    deployed.kill("superlink")
    tell("the SuperLink is killed in the same round")
    deployed.superlink()
    deployed.wait(lambda: run.poll() is not None)
    if run.returncode:
        raise AssertionError(f"`pfl-lightning flower run` has ended with {run.returncode}")
    compare(deployed)
    tell("the run has ended by itself, with the bits of one process")
    rows = rows_of(checkpoints(deployed)[0])
    phase, trained = (min(float(row[name]) for row in rows) for name in ("time/train", "time/site"))
    tell(f"the shortest phase took {phase:.0f} s, of which a site trained {trained:.2f} s")


def main() -> None:
    """Runs the scenario."""
    # whoever ends this script ends all that it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with deployment(CLIENTS) as deployed:
        scenario(deployed)


if __name__ == "__main__":
    main()
