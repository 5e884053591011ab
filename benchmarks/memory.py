"""Peak memory of a federation of large clients whose states stay with them, in memory and on the disk.

    python benchmarks/memory.py [--clients 1000] [--participation 0.01] [--rounds 2] [--net resnet18]

Each line is a run in a process of its own, on the CPU: 1,000 ResNet-18, of which 10 take part in a round, with eight
random images each. Local keeps whole models, FedPer classifiers alone. The peak is that of resident memory
(``ru_maxrss``) from when the Trainer starts, above what the process had taken until then: libraries, data, and the
client module that all share. It has in it what one client's training takes, the updates of a round, and the checkpoint
after each round. Only clients that have taken part have a state. Mapped files count as far as they were read, though
the system takes that memory back where it needs it.

Clients have no validation and test samples: an evaluation runs one client after another through the same module, which
takes time and no memory of its own.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial

from lightning.pytorch import seed_everything
from rounds import Noise
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedPer, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN, NetFactory, ResNet18

SAMPLES = 8
METHODS: dict[str, type[FedAvg]] = {"Local": Local, "FedPer": FedPer}
NETS: dict[str, NetFactory] = {"resnet18": ResNet18, "small": CNN}
MIB = 2**20


def peak() -> int:
    """Bytes of resident memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(method: str, states: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs a federation; gives the bytes of its peak and of its states, and its seconds."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    data = Noise(args.clients, SAMPLES, (3, 32, 32))
    data.setup()
    optimizer = partial(SGD, lr=0.01, momentum=0.9)
    client = METHODS[method](
        NETS[args.net], data.input_shape, data.num_classes, optimizer=optimizer, optimizer_lifetime=args.optimizer
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = FederatedTrainer(
            max_rounds=args.rounds,
            clients_per_round=args.participation,
            client_states=states,  # type: ignore[arg-type]
            accelerator="cpu",
            limit_val_batches=0,
            default_root_dir=folder,
            enable_checkpointing=args.checkpoints,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        before, start = peak(), time.perf_counter()
        trainer.fit(client, datamodule=data)
        taken, seconds = peak() - before, time.perf_counter() - start
        kept = trainer.lightning_module.clients
        return {
            "peak": taken,
            "states": sum(num_bytes(vars(state)) for state in kept.values()),
            "clients": len(kept),
            "seconds": seconds,
        }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--participation", type=float, default=0.01, help="fraction of the clients in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--net", choices=NETS, default="resnet18")
    parser.add_argument("--optimizer", choices=("round", "run"), default="round", help="lifetime of the momentum")
    parser.add_argument("--checkpoints", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--folder", help="where states and checkpoints go for the time being")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "STATES"), help="that line alone, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args)))
        return
    print(f"{args.clients} clients, {args.participation:.0%} a round, {args.rounds} rounds, {args.net}")
    print(f"{'method':<8} {'states':<7} {'clients':>7} {'their states':>13} {'peak':>11} {'ratio':>6} {'time':>8}")
    for method in METHODS:
        for states in ("memory", "disk"):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", method, states]
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            found = json.loads(line)
            print(
                f"{method:<8} {states:<7} {found['clients']:>7} {found['states'] / MIB:>9,.1f} MiB "
                f"{found['peak'] / MIB:>7,.0f} MiB {found['peak'] / found['states']:>6.2f} {found['seconds']:>6.0f} s"
            )


if __name__ == "__main__":
    main()
