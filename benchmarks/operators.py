"""What an operator reads when sites, apps and the server die: each case for real, with the truth beside it.

    python benchmarks/operators.py               # ten sites, 15 minutes on two cores; the extra flower, Linux
    python benchmarks/operators.py --sites 3     # three

A federation of FedPer loses an answer, a site, the server's app and the SuperLink, and has to end with the simulation's
bits. A second one runs at the same sites, of which one has no room on its disk, one is slow, and a further one has a
wrong setting. At last a run is begun where nobody starts it. Prints a row per case: what was done, what was read, and
the seconds until the state read was true.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from deployment import Deployment, begins, checkpoints, command, compare, in_one_process, rows_of

from pfl_lightning.cli.status import described_deployment
from pfl_lightning.runs.deployment_status import FILE, DeploymentStatus

CONFIG = """
seed_everything: 0
model:
  class_path: FedPer
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
data:
  class_path: TensorData
  init_args:
    x: {folder}/x.pt
    y: {folder}/y.pt
    task: {{class_path: Classification, init_args: {{num_classes: 3}}}}
    num_clients: {sites}
    partitioner: {{class_path: IID}}
trainer: {{max_rounds: {rounds}, evaluate: after, accelerator: cpu, engine: {engine}, default_root_dir: "{root}"}}
"""
DATA = '''"""Data of a site without room on its disk, and of one that takes its time."""

import errno
import time

from pfl_lightning.data import TensorData


class FullData(TensorData):
    """Has no room left for training."""

    def parts(self, clients, split, device="cpu"):
        if split == "train":
            raise OSError(errno.ENOSPC, "No space left on device", "/srv/clinic/states")
        return super().parts(clients, split, device)


class SlowData(TensorData):
    """Reads training samples with a delay."""

    def parts(self, clients, split, device="cpu"):
        if split == "train":
            time.sleep(SECONDS)
        return super().parts(clients, split, device)
'''
LOSSY = '''"""A SuperNode that drops an answer where a file says so, as any does after an error of the SuperLink's."""

from pathlib import Path

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

push = start_client_internal._push_messages


def lossy(*, send, **others):
    def sent(message, *more):
        if message.metadata.message_type == "train" and LOSE.exists():
            LOSE.unlink()
            raise RuntimeError("500: database is locked")
        return send(message, *more)

    push(send=sent, **others)


LOSE = Path("lose")
start_client_internal._push_messages = lossy
flower_supernode()
'''
WAIT = (
    "from pfl_lightning.flower import runner; runner.UNSTARTED = 30.0; from pfl_lightning.cli.main import main; main()"
)
"""The program of ``pfl-lightning`` that gives a run 30 s to start."""


class Sites(Deployment):
    """A deployment whose first site may lose an answer, and which notes what its operator reads.

    Args:
        folder: the folder.
        sites: each site's clients.
    """

    def __init__(self, folder: Path, sites: Mapping[str, str]) -> None:
        super().__init__(folder, sites)
        self.rows: list[tuple[str, str, str]] = []
        self.begun = time.monotonic()
        self.settings: dict[str, str] = {}
        # sockets of the processes that stay, so that they can be counted
        self.environment |= {"TMPDIR": str(folder), "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        self.program = folder / "lossy"
        self.program.write_text(f"#!{sys.executable}\n{LOSSY}")
        self.program.chmod(0o700)

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """A process; the first site's SuperNode is the one that may lose an answer."""
        lossy = words[0] == "flower-supernode" and name == "site0"
        return super().start(name, str(self.program) if lossy else words[0], *words[1:])

    def supernode(self, name: str, more: str = "") -> subprocess.Popen[bytes]:
        """Starts a site, with the further settings that it had before where it comes back by itself."""
        self.settings[name] = more or self.settings.get(name, "")
        return super().supernode(name, self.settings[name])

    def note(self, case: str, read: str, seconds: str = "") -> None:
        """Adds a row of the table, and prints it."""
        self.rows.append((case, read, seconds))
        print(f"{time.monotonic() - self.begun:5.0f} s  {case}: {read} {seconds}", flush=True)

    def until(self, condition: Callable[[], str]) -> tuple[str, float]:
        """Waits for a text, and returns it with the seconds that it took."""
        begun, found = time.monotonic(), ""

        def holds() -> bool:
            nonlocal found
            found = condition()
            return bool(found)

        self.wait(holds)
        return found, time.monotonic() - begun

    def residents(self) -> int:
        """The processes that stay at sites."""
        found = 0
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                found += "pfl_lightning.flower.stay" in words and str(self.folder) in words
        return found


def state_of(app: Path) -> DeploymentStatus:
    """The state of an app's deployment, as ``pfl-lightning status`` reads it."""
    return DeploymentStatus(app / FILE)


def line(app: Path, label: str, part: str = "") -> str:
    """The first line of ``pfl-lightning status`` with a label, and with a text in it; empty without one."""
    lines = described_deployment(state_of(app))
    return next((text for name, text in lines if name == label and part in text), "")


def said(deployed: Deployment, name: str, part: str) -> str:
    """The last line of a process that has a text in it; empty without one."""
    return next((text for text in reversed(deployed.said(name).splitlines()) if part in text), "")


def made(deployed: Deployment, name: str, rounds: int, root: str, engine: str) -> Path:
    """Writes an app."""
    sites, root = len(deployed.sites), str(deployed.folder / root)
    text = CONFIG.format(folder=deployed.folder, sites=sites, rounds=rounds, root=root, engine=engine)
    # read by the simulation too
    deployed.config.write_text(text)
    command("flower", "new", str(deployed.folder / name), "--config", str(deployed.config))
    return deployed.folder / name


def first(deployed: Sites, rounds: int) -> None:
    """A federation with deaths, to the bits of the simulation."""
    app = made(deployed, "clinics", rounds, "runs", "sequential")
    read = subprocess.run([sys.executable, "-m", "pfl_lightning", "status", str(app)], capture_output=True, text=True)
    deployed.note("`status` before the first word", f"{read.stdout.strip()} (exit {read.returncode})")
    run = deployed.start("run", "pfl-lightning", "flower", "run", str(app), "local", "-c", "wait-for-lost=600")

    begins(deployed, 2, run)
    (deployed.folder / "lose").touch()
    waits, seconds = deployed.until(lambda: line(app, "now", "waiting for client 0"))
    again, more = deployed.until(lambda: said(deployed, "run", "asked again"))
    deployed.note("an answer is lost", f"{waits}; then: {again.partition(': ')[2]}", f"{seconds:.0f} + {more:.0f}")

    victim = list(deployed.sites)[-1]
    client = deployed.sites[victim]
    deployed.kill(victim)
    time.sleep(5)
    early = line(app, "site", f"clients {client}:")
    late, seconds = deployed.until(lambda: said_lost(line(app, "site", f"clients {client}:")))
    deployed.note("a site is killed", f"after 5 s: {early}; then: {late}", f"{5 + seconds:.0f}")
    deployed.supernode(victim)

    deployed.until(lambda: line(app, "site", f"clients {client}: connected"))
    deployed.kill_app("flwr-serverapp")
    dead, seconds = deployed.until(lambda: state_of(app).state == "dead" and line(app, "state"))
    deployed.note("the server's app is killed", dead, f"{seconds:.1f}")
    deployed.until(lambda: str(state_of(app).state == "running" or ""))
    deployed.note("its run goes on", f"{deployed.residents()} processes stay at {len(deployed.sites)} sites")

    deployed.kill("superlink")
    _, seconds = deployed.until(lambda: str(state_of(app).state not in ("running", "waiting") or ""))
    deployed.note("the SuperLink is killed", f"{line(app, 'state')}; {line(app, 'reason')}", f"{seconds:.1f}")
    deployed.superlink()
    deployed.until(lambda: str(run.poll() is not None or ""))
    if run.returncode:
        raise RuntimeError(f"the run has ended with {run.returncode}")
    in_one_process(deployed)
    compare(deployed)
    ended = len(rows_of(checkpoints(deployed)[0]))
    left, seconds = deployed.until(lambda: "" if deployed.residents() else "no process stays")
    deployed.note(
        "the end", f"{ended} of {rounds} rounds, equal to the simulation bit for bit; {left}", f"{seconds:.1f}"
    )


def said_lost(text: str) -> str:
    """A site's line that no longer says that it is connected."""
    return "" if ": connected" in text else text


def second(deployed: Sites, rounds: int) -> None:
    """Another federation at the same sites, of which some are in trouble."""
    before = models(deployed, "clinics")
    app = made(deployed, "others", rounds, "others", "vectorised")
    (deployed.folder / "trouble.py").write_text(DATA.replace("SECONDS", "15"))
    full, *_, slow = deployed.sites
    for name, kind in ((full, "FullData"), (slow, "SlowData")):
        deployed.kill(name)
        own = deployed.folder / f"{name}.yaml"
        text = deployed.config.read_text()
        own.write_text(text[text.index("data:") : text.index("trainer:")].replace("TensorData", f"trouble.{kind}"))
        deployed.supernode(name, f'data="{own}"')
    deployed.register("stranger")
    deployed.supernode("stranger", 'flags="--data.colour red"')
    settings = f"min-results={len(deployed.sites) - 2} grace=2 timeout=300"
    run = deployed.start("others", "pfl-lightning", "flower", "run", str(app), "local", "-c", settings)
    wrong, seconds = deployed.until(lambda: said(deployed, "others", "is refused"))
    deployed.note("a site has a wrong setting", wrong, f"{seconds:.0f}")
    answered, _ = deployed.until(lambda: said(deployed, "others", "; refused"))
    deployed.note("a site's disk is full", answered)
    advice, _ = deployed.until(
        lambda: said(deployed, "others", "late and don't count") or ("no advice" if run.poll() is not None else "")
    )
    deployed.note("a site is slow", advice)
    deployed.until(lambda: str(run.poll() is not None or ""))
    same = "the first one's models are as they were" if models(deployed, "clinics") == before else "models are lost"
    deployed.note("a second federation at the same sites", f"{len(models(deployed, 'others'))} models; {same}")


def models(deployed: Deployment, app: str) -> dict[str, str]:
    """Fingerprints of an app's models at sites."""
    found = sorted(deployed.folder.glob(f"states-*/{app}/*/model.ckpt"))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def unstarted(deployed: Sites) -> None:
    """A run that nobody starts."""
    for process in deployed.apps("flower-superexec"):
        os.kill(process, signal.SIGKILL)
    words = ["flower", "run", str(deployed.folder / "clinics"), "local", "--anew"]
    done = subprocess.run(
        [sys.executable, "-c", WAIT, *words],
        env=deployed.environment,
        cwd=deployed.folder,
        capture_output=True,
        text=True,
    )
    told = " ".join(done.stderr.splitlines()[-1:])
    deployed.note("Flower's executor is killed, and a run begun", f"{told} (exit {done.returncode})", "30")


@contextmanager
def closing(folder: Path, sites: int) -> Iterator[Sites]:
    """Sites that leave no process behind."""
    made = Sites(folder, {f"site{client}": str(client) for client in range(sites)})
    try:
        yield made
    except BaseException:
        for path in sorted(folder.glob("*.log")):
            print(f"--- {path.stem}\n{made.said(path.stem)[-3000:]}", file=sys.stderr)
        raise
    finally:
        made.end()


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10, help="number of sites, from 3 up")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the first federation")
    given = parser.parse_args()
    # whoever ends this script ends all that it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with tempfile.TemporaryDirectory() as name, closing(Path(name), given.sites) as deployed:
        deployed.superlink()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(deployed.register, deployed.sites))
        for name in deployed.sites:
            deployed.supernode(name)
        first(deployed, given.rounds)
        second(deployed, 8)
        unstarted(deployed)
        print("\n| case | what was read | seconds until it was true |\n| --- | --- | --- |")
        for row in deployed.rows:
            print(f"| {' | '.join(text.replace(str(deployed.folder), 'FOLDER').replace('|', '/') for text in row)} |")


if __name__ == "__main__":
    main()
