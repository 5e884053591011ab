"""Peak memory of a federation of large clients whose states stay with them, in memory and on the disk.

    python benchmarks/memory.py [--clients 1000] [--participation 0.01] [--rounds 2] [--net resnet18]
    python benchmarks/memory.py --ranks 4 --net mlp --clients 10000 --participation 0.1 --states rank
    python benchmarks/memory.py --updates --net wide --clients 60

Each line is a run in a process of its own, on the CPU: 1,000 ResNet-18, of which 10 take part in a round, with eight
random images each. Local keeps whole models, FedPer classifiers alone. The peak is that of resident memory
(``ru_maxrss``) from when the Trainer starts, above what the process had taken until then: libraries, data, and the
client module that all share. It has in it what one client's training takes, the updates of a round, and the checkpoint
after each round. Only clients that have taken part have a state. Mapped files count as far as they were read, though
the system takes that memory back where it needs it.

With ``--ranks`` several forked processes share the clients, without checkpoints, and a line has the smallest and the
largest peak of a rank. FedAvg keeps no states: its lines show what ranks exchange. With states in ``memory`` each rank
holds those of all clients, which for 10,000 clients is 26 GiB of Ditto's over four ranks: a line says where a process
was killed, and ``--states rank`` leaves such lines out.

With ``--updates`` all clients of FedAvg take part, and a line has an engine's peak, in MiB and in models: how many of a
round's models are in memory at once. A net ``wide`` has 16 MiB.

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
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rounds import Noise
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import Ditto, FedPer, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN, MLP, NetFactory, ResNet18

SAMPLES = 8
METHODS: dict[str, type[FedAvg]] = {"Local": Local, "FedPer": FedPer}
ON_RANKS: dict[str, type[FedAvg]] = {"FedAvg": FedAvg, "FedPer": FedPer, "Ditto": Ditto}
NETS: dict[str, NetFactory] = {"resnet18": ResNet18, "small": CNN, "mlp": MLP, "wide": partial(MLP, hidden=[1365])}
MIB = 2**20


def peak() -> int:
    """Bytes of resident memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Peaks(Callback):
    """Writes each rank's peak above what the process had taken when the rank began.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes the memory at the start."""
        self.start = peak()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the peak."""
        (self.folder / f"peak-{trainer.global_rank}").write_text(str(peak() - self.start))


def noise(args: argparse.Namespace) -> Noise:
    """Silences Lightning, and gives the clients' samples."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seed_everything(0, verbose=False)
    data = Noise(args.clients, SAMPLES, (3, 32, 32))
    data.setup()
    return data


def quiet_trainer(args: argparse.Namespace, states: str, folder: str, **settings: Any) -> FederatedTrainer:
    """Gives a trainer on the CPU that evaluates nobody."""
    return FederatedTrainer(
        max_rounds=args.rounds,
        clients_per_round=args.participation,
        client_states=states,  # type: ignore[arg-type]
        accelerator="cpu",
        limit_val_batches=0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def on_ranks(method: str, states: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs a federation on several ranks; gives the smallest and the largest peak of a rank, and seconds."""
    data = noise(args)
    client = ON_RANKS[method](NETS[args.net], data.input_shape, data.num_classes, optimizer=partial(SGD, lr=0.01))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = quiet_trainer(
            args,
            states,
            folder,
            devices=args.ranks,
            strategy=ClientParallel(start_method="fork"),
            callbacks=[Peaks(Path(folder))],
            logger=False,
            enable_checkpointing=False,
        )
        start = time.perf_counter()
        trainer.fit(client, datamodule=data)
        peaks = [int(file.read_text()) for file in Path(folder).glob("peak-*")]
    return {"least": min(peaks), "most": max(peaks), "seconds": time.perf_counter() - start}


def measure(method: str, states: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs a federation; gives the bytes of its peak and of its states, and its seconds."""
    data = noise(args)
    optimizer = partial(SGD, lr=0.01, momentum=0.9)
    client = METHODS[method](
        NETS[args.net], data.input_shape, data.num_classes, optimizer=optimizer, optimizer_lifetime=args.optimizer
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = quiet_trainer(
            args,
            states,
            folder,
            enable_checkpointing=args.checkpoints,
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


def of_updates(engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Runs FedAvg; gives the bytes of its peak and of a model, and its seconds."""
    data = noise(args)
    client = FedAvg(NETS[args.net], data.input_shape, data.num_classes, optimizer=partial(SGD, lr=0.01))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trainer = quiet_trainer(args, "memory", folder, engine=engine, logger=False, enable_checkpointing=False)
        before, start = peak(), time.perf_counter()
        trainer.fit(client, datamodule=data)
        model = num_bytes(trainer.lightning_module.aggregator.global_model())
        return {"peak": peak() - before, "model": model, "seconds": time.perf_counter() - start}


def table_of_updates(args: argparse.Namespace) -> None:
    """Prints the table of engines."""
    print(f"FedAvg, {args.clients} clients a round, {args.rounds} rounds, {args.net}")
    print(f"{'engine':<12} {'a model':>9} {'peak':>11} {'models':>7} {'time':>7}")
    for engine in ("sequential", "processes"):
        line = found("updates", engine)
        if line:
            sizes = f"{line['model'] / MIB:>5,.1f} MiB {line['peak'] / MIB:>7,.0f} MiB"
            print(f"{engine:<12} {sizes} {line['peak'] / line['model']:>7.1f} {line['seconds']:>5.0f} s", flush=True)


def found(method: str, states: str) -> dict[str, float]:
    """Measures in a process of its own; gives nothing if the system ended the process or one of its ranks."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", method, states]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        return {}
    figures: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return figures


def table_of_ranks(args: argparse.Namespace) -> None:
    """Prints the table of several ranks."""
    print(f"{args.clients} clients over {args.ranks} ranks, {args.participation:.0%} a round, {args.net}")
    print(f"{'method':<8} {'states':<7} {'peak of a rank':>24} {'time':>8}")
    for method in ON_RANKS:
        for states in args.states or ("memory", "rank"):
            line = found(method, states)
            if not line:
                print(f"{method:<8} {states:<7} ended early, for lack of memory or as said above", flush=True)
                continue
            peaks = f"{line['least'] / MIB:,.0f} to {line['most'] / MIB:,.0f} MiB"
            print(f"{method:<8} {states:<7} {peaks:>24} {line['seconds']:>6.0f} s", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--participation", type=float, default=0.01, help="fraction of the clients in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--net", choices=NETS, default="resnet18")
    parser.add_argument("--optimizer", choices=("round", "run"), default="round", help="lifetime of the momentum")
    parser.add_argument("--checkpoints", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the clients")
    parser.add_argument("--states", nargs="+", help="where states are: memory, disk or, over ranks, rank; default two")
    parser.add_argument("--folder", help="where states and checkpoints go for the time being")
    parser.add_argument("--updates", action="store_true", help="the peak of a round's updates, all clients in it")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "STATES"), help="that line alone, as JSON")
    args = parser.parse_args()
    if args.updates:
        args.participation = 1.0
    if args.one:
        if args.updates:
            print(json.dumps(of_updates(args.one[1], args)))
        else:
            print(json.dumps((measure if args.ranks == 1 else on_ranks)(*args.one, args)))
        return
    if args.updates:
        table_of_updates(args)
        return
    if args.ranks > 1:
        table_of_ranks(args)
        return
    print(f"{args.clients} clients, {args.participation:.0%} a round, {args.rounds} rounds, {args.net}")
    print(f"{'method':<8} {'states':<7} {'clients':>7} {'their states':>13} {'peak':>11} {'ratio':>6} {'time':>8}")
    for method in METHODS:
        for states in args.states or ("memory", "disk"):
            line = found(method, states)
            if not line:
                print(f"{method:<8} {states:<7} ended early, for lack of memory or as said above", flush=True)
                continue
            print(
                f"{method:<8} {states:<7} {line['clients']:>7} {line['states'] / MIB:>9,.1f} MiB "
                f"{line['peak'] / MIB:>7,.0f} MiB {line['peak'] / line['states']:>6.2f} {line['seconds']:>6.0f} s"
            )


if __name__ == "__main__":
    main()
