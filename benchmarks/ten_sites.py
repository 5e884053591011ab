"""Ten sites on this machine: one is killed, one is slow, and one joins late; how long each round takes.

    python benchmarks/ten_sites.py     # some minutes; needs the extra flower, and Linux

Nine sites begin. In round 2 of 6 one of them is killed for good, one takes 20 s longer than the others in each round,
and the tenth joins before round 4. Prints each round's line, as the server's app does, then a table: seconds, who was
absent, and the seconds as a share of the slowest site's answer.
"""

import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from deployment import Deployment, app, begins, checkpoints, deployment, rows_of

SITES = {f"site{client}": str(client) for client in range(10)}
KILLED, SLOW, LATE = "site3", "site5", "site9"
SECONDS = 20
NAMES = ", ".join(SITES)
CONFIG = """
seed_everything: 0
model:
  class_path: FedAvg
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
data:
  class_path: TensorData
  init_args:
    x: {folder}/x.pt
    y: {folder}/y.pt
    task: {{class_path: Classification, init_args: {{num_classes: 3}}}}
    num_clients: 10
    partitioner: {{class_path: IID}}
trainer: {{max_rounds: 6, evaluate: after, accelerator: cpu, default_root_dir: "{folder}/runs"}}
"""
SETTINGS = f'keys="sites.yaml" names="{NAMES}" min-available=9 min-results=0.7 grace=12 late-rounds=1'
DATA = '''"""Data of a site that takes its time."""

import time

from pfl_lightning.data import TensorData


class SlowData(TensorData):
    """Reads training samples with a delay."""

    def parts(self, clients, split, device="cpu"):
        if split == "train":
            time.sleep(SECONDS)
        return super().parts(clients, split, device)
'''


def begin(deployed: Deployment, name: str) -> None:
    """Start a site, the slow one with data of its own class."""
    more = ""
    if name == SLOW:
        text = CONFIG.format(folder=deployed.folder)
        site = deployed.folder / "slow.yaml"
        site.write_text(text[text.index("data:") : text.index("trainer:")].replace("TensorData", "slow_data.SlowData"))
        more = f'data="{site}"'
    deployed.supernode(name, more)


def scenario(deployed: Deployment) -> None:
    """Run the federation, and print what became of it."""
    (deployed.folder / "slow_data.py").write_text(DATA.replace("SECONDS", str(SECONDS)))
    deployed.environment["PYTHONPATH"] = f"{deployed.folder}:{deployed.environment.get('PYTHONPATH', '')}"
    deployed.superlink()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(deployed.register, SITES))
    for name in SITES.keys() - {LATE}:
        begin(deployed, name)
    run = deployed.start("run", "pfl-lightning", "flower", "run", str(app(deployed, CONFIG)), "local", "-c", SETTINGS)
    begins(deployed, 2, run)
    time.sleep(1)
    deployed.kill(KILLED)
    begins(deployed, 3, run)
    begin(deployed, LATE)
    deployed.wait(lambda: run.poll() is not None)
    lines = [line for line in deployed.said("run").splitlines() if line.startswith("round ")]
    print(*lines, sep="\n")
    # a late answer counts in the next round, so that the slow site's own time is told by some rounds alone
    slowest = max(float(re.search(r"after ([\d.]+) s", line)[1]) for line in lines)
    print(f"the slowest site's answer took {slowest:.1f} s")
    names = list(SITES)
    for line, row in zip(lines, rows_of(checkpoints(deployed)[0]), strict=True):
        took = float(re.search(r", ([\d.]+) s:", line)[1])
        absent = ", ".join(names[int(client)] for client in row["absent"].split()) or "nobody"
        print(f"round {row['round']}  {took:6.1f} s  {took / slowest:5.2f}  absent: {absent}")
    if run.returncode:
        raise RuntimeError(f"the run has ended with {run.returncode}: {deployed.said('run')}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with deployment(SITES) as deployed:
        scenario(deployed)
