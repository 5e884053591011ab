"""CPU seconds and memory of a deployment's processes on this machine, with its sites on loopback.

    python benchmarks/deployment_costs.py [--sites 3] [--rounds 4] [--hidden 8] [--together]

FedAvg on three clouds of points, with an evaluation in each round; `--together` lets it go with the next training. CPU
seconds and memory are each process's own (``RssAnon``, at its peak), looked at every 20 ms. Needs the extra flower, and
Linux.
"""

import argparse
import os
import signal
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from deployment import app, deployment

CONFIG = """
seed_everything: 0
model:
  class_path: FedAvg
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [HIDDEN]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
data:
  class_path: TensorData
  init_args:
    x: {folder}/x.pt
    y: {folder}/y.pt
    task: {{class_path: Classification, init_args: {{num_classes: 3}}}}
    num_clients: SITES
    partitioner: {{class_path: IID}}
trainer: {{max_rounds: ROUNDS, evaluate: before, accelerator: cpu, default_root_dir: "{folder}/runs"}}
"""
KINDS = {
    "flower-superlink": "SuperLink",
    "flwr-serverapp": "server's app",
    "pfl_lightning.flower.stay": "sites, resident",
    "flwr-clientapp": "sites, a message",
    "flower-supernode": "sites, SuperNode",
}
"""Names of processes by a word of the command line."""


class Costs:
    """CPU seconds and peaks of memory of all processes with an entry in their environment.

    Args:
        mark: the entry.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.seconds: dict[int, tuple[str, float]] = {}
        self.over = threading.Event()

    def watch(self) -> None:
        """Look at all processes until it is over."""
        kinds: dict[str, str] = {}
        while not self.over.wait(0.02):
            for entry in Path("/proc").glob("[0-9]*"):
                # one that has ended meanwhile, or is somebody else's
                with suppress(OSError, ValueError, StopIteration):
                    if entry.name not in kinds:
                        told = self.mark in (entry / "environ").read_bytes().split(b"\0")
                        kinds[entry.name] = self._kind(entry) if told else ""
                    if kind := kinds[entry.name]:
                        self._look(entry, kind)

    def _kind(self, entry: Path) -> str:
        words = (entry / "cmdline").read_bytes().decode(errors="replace")
        return next((kind for word, kind in KINDS.items() if word in words), "other")

    def _look(self, entry: Path, kind: str) -> None:
        ticks = (entry / "stat").read_text().rpartition(")")[2].split()[11:13]
        self.seconds[int(entry.name)] = kind, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        lines = (entry / "status").read_text().splitlines()
        own = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
        self.peaks[kind] = max(self.peaks[kind], own)


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hidden", default="8", help="sizes of hidden layers, with commas between them")
    parser.add_argument("--together", action="store_true", help="evaluate with the next training")
    own = parser.parse_args()
    sites = {f"site{client}": str(client) for client in range(own.sites)}
    text = CONFIG.replace("HIDDEN", own.hidden).replace("SITES", str(own.sites)).replace("ROUNDS", str(own.rounds))
    with deployment(sites) as deployed:
        costs = Costs(f"FLWR_HOME={deployed.folder}/flwr")
        deployed.superlink()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(deployed.register, sites))
        threading.Thread(target=costs.watch, daemon=True).start()
        for name in sites:
            deployed.supernode(name)
        settings = f'keys="sites.yaml" evaluate-with-training={str(own.together).lower()}'
        run = deployed.start("run", "pfl-lightning", "flower", "run", str(app(deployed, text)), "local", "-c", settings)
        deployed.wait(lambda: run.poll() is not None)
        costs.over.set()
        if run.returncode:
            raise RuntimeError(f"the run has ended with {run.returncode}: {deployed.said('run')}")
        print(*[line for line in deployed.said("run").splitlines() if line.startswith("round ")], sep="\n")
    totals: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in costs.seconds.values():
        totals[kind] += seconds
    for kind in [*KINDS.values(), "other"]:
        print(f"{kind:18}{totals[kind]:8.1f} CPU s{costs.peaks[kind] / 1024:8.0f} MiB at most")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    main()
