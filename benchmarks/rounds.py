"""Seconds a round of each engine, as ratios to a plain PyTorch loop that does the same work.

    python benchmarks/rounds.py [--engines sequential processes vectorised compiled auto] [--workloads W1 W5]
    python benchmarks/rounds.py --scale          # rounds a second against the number of clients
    python benchmarks/rounds.py --evaluation     # evaluation of all clients in each round, and of 100 of them
    python benchmarks/rounds.py --accelerator gpu --precision bf16-mixed

Both run in one process and take turns, round by round: what else the machine does hits both. A round of ours is all
that `FederatedTrainer` does between two epochs of Lightning's loop (jobs, training, hand-over, aggregation, record),
without evaluation. The plain loop trains the same net on as many batches of the same size from resident tensors, one
client after another in one intra-op thread, and averages the weights. On a GPU it is on the same GPU, in float32.
"""

import argparse
import logging
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import ChannelsLast
from pfl_lightning.data import IID, FederatedDataModule
from pfl_lightning.engines import ENGINES
from pfl_lightning.engines.processes import cores
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN, MLP, LeNet5, NetFactory, ResNet18

LR = 0.01
BATCH = 10


class Noise(FederatedDataModule):
    """Random images: what they show makes no difference to the time."""

    num_classes = 10

    def __init__(self, num_clients: int, samples: int, input_shape: tuple[int, ...], held_out: float = 0.0) -> None:
        fractions = {"test_fraction": held_out, "val_fraction": held_out}
        super().__init__(num_clients=num_clients, partitioner=IID(), batch_size=BATCH, **fractions)
        self.input_shape = input_shape
        self.samples = samples

    def load(self) -> tuple[Tensor, Tensor]:
        """Draws the pool."""
        n = self.num_clients * self.samples
        return torch.randint(0, 256, (n, *self.input_shape), dtype=torch.uint8), torch.arange(n) % 10


def plain_round(net: nn.Module, data: Noise, cohort: int, device: torch.device) -> Callable[[], None]:
    """A round as one would write it by hand."""
    parts = [data.part(client, "train").to(device, torch.float32) for client in range(cohort)]
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def run() -> None:
        uploads = []
        for part in parts:
            net.load_state_dict(weights)
            net.train()
            optimizer = SGD(net.parameters(), lr=LR)
            order = torch.randperm(len(part))
            for x, y in zip(part.x[order].split(BATCH), part.y[order].split(BATCH), strict=True):
                loss = nn.functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            uploads.append({name: tensor.detach().clone() for name, tensor in net.state_dict().items()})
        for name, entry in weights.items():
            stack = torch.stack([upload[name] for upload in uploads])
            weights[name] = stack.mean(0) if entry.is_floating_point() else stack.amax(0)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


class Turns(Callback):
    """Times the federation's rounds and runs a plain round after each."""

    def __init__(self, plain: Callable[[], None]) -> None:
        self.plain = plain
        self.seconds: dict[str, list[float]] = {"federation": [], "plain": []}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of a round."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops it, and takes the other's turn."""
        self.seconds["federation"].append(time.perf_counter() - self._start)
        start = time.perf_counter()
        self.plain()
        self.seconds["plain"].append(time.perf_counter() - start)


@dataclass(frozen=True)
class Workload:
    """A federation of equal clients.

    Args:
        what: a line about it.
        net: the net.
        shape: of a sample.
        clients: how many there are.
        samples: of a client.
        cohort: clients of a round; None takes all.
    """

    what: str
    net: NetFactory
    shape: tuple[int, ...]
    clients: int
    samples: int
    cohort: int | None = None


WORKLOADS = {
    "W1": Workload("20 clients x 150 CIFAR-shaped samples, CNN", CNN, (3, 32, 32), 20, 150),
    "W3": Workload("20 clients x 150 MNIST-shaped samples, LeNet5", LeNet5, (1, 28, 28), 20, 150),
    "W4": Workload("4 clients x 64 CIFAR-shaped samples, ResNet-18", ResNet18, (3, 32, 32), 4, 64),
    "W5": Workload("100 clients x 30, MLP 64-64-10", partial(MLP, hidden=(64,)), (1, 8, 8), 100, 30),
    "W6": Workload("100 clients x 50 CIFAR-shaped samples, CNN", CNN, (3, 32, 32), 100, 50),
    "W7": Workload("1,000 users x 50 CIFAR-shaped samples, cohort 50, CNN", CNN, (3, 32, 32), 1000, 50, 50),
}


COMPILED = "compiled"
"""The engine ``vectorised`` with compiled steps."""


def compare(workload: Workload, engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a round of each side, without the first two rounds."""
    seed_everything(0, verbose=False)
    data = Noise(workload.clients, workload.samples, workload.shape)
    data.setup()
    cohort = workload.cohort or workload.clients
    client = FedAvg(workload.net, data.input_shape, data.num_classes, optimizer=partial(SGD, lr=LR))
    device = torch.device("cuda" if args.accelerator == "gpu" else args.accelerator)
    turns = Turns(plain_round(workload.net(data.input_shape, data.num_classes).to(device), data, cohort, device))
    trainer = FederatedTrainer(
        max_rounds=args.rounds + 2,
        clients_per_round=cohort,
        engine="vectorised" if engine == COMPILED else engine,
        compile=engine == COMPILED,
        callbacks=[turns, *([ChannelsLast()] if args.channels_last else [])],
        accelerator=args.accelerator,
        precision=args.precision,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, datamodule=data)
    return {side: statistics.median(seconds[2:]) for side, seconds in turns.seconds.items()}


def table(args: argparse.Namespace) -> None:
    """Prints the ratio of each engine on each workload."""
    print(f"{'workload':<58} {'engine':<11} {'round':>9} {'plain loop':>11} {'ratio':>6}")
    for name in args.workloads:
        workload = WORKLOADS[name]
        for engine in args.engines:
            seconds = compare(workload, engine, args)
            ratio = seconds["federation"] / seconds["plain"]
            print(
                f"{name + ' ' + workload.what:<58} {engine:<11} {seconds['federation']:>7.3f} s "
                f"{seconds['plain']:>9.3f} s {ratio:>6.2f}",
                flush=True,
            )


def scale(args: argparse.Namespace) -> None:
    """Prints rounds a second against the number of clients."""
    print(f"{'clients x 30, MLP 64-64-10':<28} " + " ".join(f"{engine:>11}" for engine in args.engines))
    for clients in (10, 30, 100, 300, 1000):
        workload = replace(WORKLOADS["W5"], clients=clients)
        speeds = [1 / compare(workload, engine, args)["federation"] for engine in args.engines]
        print(f"{clients:<28} " + " ".join(f"{speed:>9.2f}/s" for speed in speeds), flush=True)


class Parts(Callback):
    """Keeps the CPU seconds of each round: the round proper, and its evaluation."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the round proper."""
        self._start = time.process_time()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the evaluation."""
        self._middle = time.process_time()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops it."""
        self.seconds.append((self._middle - self._start, time.process_time() - self._middle))


def evaluation(args: argparse.Namespace) -> None:
    """Prints the CPU seconds of evaluation beside those of the round proper, for growing numbers of clients."""
    print(f"{'50 of n clients x 20, MLP 64-64-10':<36} {'engine':<11} {'round':>9} {'evaluation':>11} {'of 100':>9}")
    for clients in (100, 1000, 10_000):
        for engine in args.engines:
            medians = []
            for part in (1.0, 100):
                seed_everything(0, verbose=False)
                data, parts = Noise(clients, 20, (1, 8, 8), held_out=0.1), Parts()
                trainer = FederatedTrainer(
                    max_rounds=args.rounds + 2,
                    clients_per_round=50,
                    evaluate_clients=part,
                    engine=engine,
                    callbacks=[parts],
                    accelerator=args.accelerator,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                net = partial(MLP, hidden=(64,))
                trainer.fit(FedAvg(net, (1, 8, 8), 10, optimizer=partial(SGD, lr=LR)), datamodule=data)
                medians.append([statistics.median(times) for times in zip(*parts.seconds[2:], strict=True)])
            (proper, everybody), (_, some) = medians
            print(f"n = {clients:<32} {engine:<11} {proper:>7.3f} s {everybody:>9.3f} s {some:>7.3f} s", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each side")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--engines", nargs="+", default=["sequential"], choices=[*ENGINES, COMPILED])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W5"], choices=list(WORKLOADS))
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--precision", default="32-true", help="of the federation; the plain loop stays in float32")
    parser.add_argument("--channels_last", action="store_true", help="in the federation, not in the plain loop")
    parser.add_argument("--scale", action="store_true", help="rounds a second against the number of clients")
    parser.add_argument("--evaluation", action="store_true", help="seconds of evaluation against those of the round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    place = torch.cuda.get_device_name() if args.accelerator == "gpu" else f"{cores()} cores, {args.threads} thread(s)"
    print(f"torch {torch.__version__}, {place}, batch {BATCH}, medians of {args.rounds} rounds")
    (scale if args.scale else evaluation if args.evaluation else table)(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:,.0f} MiB")
    if args.accelerator == "gpu":
        print(f"peak memory of tensors on the GPU: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
