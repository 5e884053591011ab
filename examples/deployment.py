"""A deployment on this machine, for real: a server and two sites with TLS and keys, and what goes wrong with them.

    python examples/deployment.py            # some minutes: every message starts Python anew
    python examples/deployment.py --calm     # nothing goes wrong
    python examples/deployment.py --stormy   # all of it goes wrong

Flower's SuperLink and two SuperNodes run on loopback. FedPer must end as it does in one process, to the bit. Then, with
SCAFFOLD, a SuperNode is killed in the middle of a round and started again, the server's app is killed and goes on from
its last checkpoint, and a SuperNode whose key nobody has registered is refused; the end must be the same all the same.
Needs the extra ``flower``.
"""

import argparse
import csv
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    net: {{class_path: MLP, init_args: {{hidden: [64]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
{aggregator}
data:
  class_path: Digits
  init_args: {{num_clients: 4, partitioner: {{class_path: Dirichlet, init_args: {{alpha: 0.3}}}}}}
trainer: {{max_rounds: {rounds}, limit_val_batches: 0, accelerator: cpu, default_root_dir: "{root}"}}
"""
METHODS = {"fedper": ("FedPer", ""), "scaffold": ("ControlVariates", "aggregator: {class_path: SCAFFOLD}")}
CLIENTS = ["0 2", "1 3"]
BIN = Path(sys.executable).parent


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
        }
        make_certificates(folder)
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
        wait_until(lambda: is_open(self.port), 120)

    def supernode(self, index: int, registered: bool = True) -> subprocess.Popen[bytes]:
        """Starts a site."""
        name = f"site{index}" if registered else "stranger"
        if not (self.folder / name).exists():
            make_key(self.folder / name)
            if registered:
                self.flwr("supernode", "register", str(self.folder / f"{name}.pub"), "local")
        settings = f'clients="{CLIENTS[index]}" state-dir="{self.folder}/states-{index}" allow="control"'
        return self.start(
            name,
            "flower-supernode",
            f"--root-certificates={self.folder}/ca.pem",
            f"--superlink=127.0.0.1:{self.port}",
            f"--port={self.ports[index if registered else 2]}",
            f"--auth-supernode-private-key={self.folder / name}",
            f"--node-config={settings}",
        )

    def flwr(self, *words: str) -> str:
        """Runs a command of Flower's to its end."""
        done = subprocess.run(
            [BIN / "flwr", *words], env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def said(self, name: str) -> str:
        """What a process has put out."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, name: str) -> None:
        """Ends a process and all that it has started, as a power cut would."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


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


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    """Waits for something to become true, and gives it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:.0f} s in vain")
        time.sleep(0.2)
    return found


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
            for process in ("superlink", "site0", "site1", "run"):
                print(f"--- {process}\n{made.said(process)[-3000:]}", file=sys.stderr)
            raise
        finally:
            for process in list(made.processes):
                made.kill(process)


def app(deployed: Deployment, method: str, rounds: int) -> Path:
    """Writes the app of a method."""
    folder = deployed.folder / method
    client, aggregator = METHODS[method]
    config = deployed.folder / f"{method}.yaml"
    root = deployed.folder / "runs" / method
    config.write_text(CONFIG.format(method=client, aggregator=aggregator, rounds=rounds, root=root))
    command("flower", "new", str(folder), "--config", str(config))
    keys = [(deployed.folder / f"site{index}.pub").read_text().strip() for index in (0, 1)]
    lines = [f"{key}: {clients}" for key, clients in zip(keys, CLIENTS, strict=True)]
    (folder / "sites.yaml").write_text("\n".join(lines) + "\n")
    return folder


def command(*words: str) -> None:
    """Runs ``pfl-lightning``, in this process."""
    try:
        pfl(list(words))
    except SystemExit as end:
        if end.code:
            raise


def in_one_process(config: Path, root: Path) -> Path:
    """The same federation without sites; gives its last checkpoint."""
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    command("fit", "--config", str(config), "--trainer.default_root_dir", str(root), *quiet)
    return checkpoint(root)


def checkpoint(root: Path) -> Path:
    """The last checkpoint of the only run in a folder."""
    (path,) = root.glob("*/*/checkpoints/last.ckpt")
    return path


def what_counts(path: Path) -> list[Any]:
    """Fingerprints of a run's model, its server's state and its payloads, and its record without times."""
    saved = torch.load(path, weights_only=True)
    with (path.parents[1] / "rounds.csv").open(newline="") as file:
        rows = [
            {name: value for name, value in row.items() if not name.startswith("time/")} for row in csv.DictReader(file)
        ]
    federation = saved["federation"]
    return [*map(digest, (saved["state_dict"], federation["aggregator"], federation["payloads"])), rows]


def compare(deployed: Deployment, method: str) -> None:
    """Fits the same federation in one process, and demands the same end."""
    there = deployed.folder / "runs" / method
    here = in_one_process(deployed.folder / f"{method}.yaml", deployed.folder / "here" / method)
    if what_counts(here) != what_counts(checkpoint(there)):
        raise AssertionError(
            f"{method} at sites and in one process differ:\n{what_counts(here)}\n{what_counts(checkpoint(there))}"
        )
    print(f"{method}: the same bits as in one process", flush=True)


def calm(deployed: Deployment) -> None:
    """FedPer, two rounds."""
    folder = app(deployed, "fedper", rounds=2)
    start = time.monotonic()
    run(deployed, folder).wait()
    print(f"fedper: two rounds and a test at two sites in {time.monotonic() - start:.0f} s", flush=True)
    compare(deployed, "fedper")


def run(deployed: Deployment, folder: Path, **settings: str) -> subprocess.Popen[bytes]:
    """Starts the app's run, and shows it until it ends."""
    words = [f'{name.replace("_", "-")}="{value}"' for name, value in {"keys": "sites.yaml", **settings}.items()]
    return deployed.start("run", "flwr", "run", str(folder), "local", "--stream", "-c", " ".join(words))


def stormy(deployed: Deployment) -> None:
    """SCAFFOLD, three rounds: a site dies in the second one, and the server's app before the third."""
    folder = app(deployed, "scaffold", rounds=3)
    stranger = deployed.supernode(0, registered=False)
    wait_until(lambda: stranger.poll() is not None or "refus" in deployed.said("stranger").lower(), 120)
    if stranger.poll() in (None, 0):
        raise AssertionError("a SuperNode with a key that isn't registered was let in")
    print("a SuperNode that isn't registered is refused", flush=True)
    first = run(deployed, folder)
    root = deployed.folder / "runs" / "scaffold"
    wait_until(lambda: list(root.glob("*/*/checkpoints/last.ckpt")), 600)
    began = states(deployed, 0)
    deployed.kill("site1")
    print("site 1 is killed in the second round", flush=True)
    wait_until(lambda: states(deployed, 0) > began, 300)
    back = supervised(deployed)
    written = checkpoint(root).stat().st_mtime_ns
    wait_until(lambda: back() and checkpoint(root).stat().st_mtime_ns > written, 600)
    print("it is back, and was asked again", flush=True)
    kill_server_app(deployed)
    first.wait()
    print("the server's app is killed, and goes on from its last checkpoint", flush=True)
    run(deployed, folder, ckpt_path="last").wait()
    compare(deployed, "scaffold")


def states(deployed: Deployment, index: int) -> int:
    """How many versions of states a site has written."""
    return len(list((deployed.folder / f"states-{index}").glob("*/*/*.pt")))


def supervised(deployed: Deployment) -> Callable[[], bool]:
    """Starts site 1 again until it stays, as a supervisor such as systemd does."""

    def stays() -> bool:
        process = deployed.processes.get("site1")
        if process is None or process.poll() is not None:
            time.sleep(3)
            deployed.supernode(1)
        return True

    return stays


def kill_server_app(deployed: Deployment) -> None:
    """Kills the process that runs the server's app, which the SuperLink has started."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            own = f"FLWR_HOME={deployed.folder}/flwr" in (entry / "environ").read_bytes().decode(errors="replace")
            if own and any(word.endswith("flwr-serverapp") for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
                return
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    raise AssertionError("the server's app isn't running any more")


def main() -> None:
    """Runs both parts, or the calm one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calm", action="store_true", help="leave out what goes wrong")
    parser.add_argument("--stormy", action="store_true", help="leave out the rest")
    given = parser.parse_args()
    with deployment() as deployed:
        deployed.superlink()
        for index in (0, 1):
            deployed.supernode(index)
        if not given.stormy:
            calm(deployed)
        if not given.calm:
            stormy(deployed)


if __name__ == "__main__":
    main()
