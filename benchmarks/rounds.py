"""Seconds a round of each engine, as ratios to a plain PyTorch loop that does the same work.

    python benchmarks/rounds.py [--engines sequential processes vectorised compiled auto] [--workloads W1 W5]
    python benchmarks/rounds.py --engines sequential vectorised --workloads U1 U2 U3 --cpu    # clients as they are
    python benchmarks/rounds.py --scale          # rounds a second against the number of clients
    python benchmarks/rounds.py --evaluation     # evaluation of all clients in each round, and of 100 of them
    python benchmarks/rounds.py --checkpoints    # time and bytes of a checkpoint of many clients
    python benchmarks/rounds.py --workloads W5 --engines auto --cpu --defaults    # a round as users have it
    python benchmarks/rounds.py --accelerator gpu --precision bf16-mixed

Both run in one process and take turns, round by round: what else the machine does hits both. A round of ours is all
that `FederatedTrainer` does between two epochs of Lightning's loop (jobs, training, hand-over, aggregation, record),
without evaluation. The plain loop trains the same net on as many batches of the same size from resident tensors, one
client after another in one intra-op thread, and averages the weights. On a GPU it is on the same GPU, in float32. Both
train the same clients in each round. With `--cpu` seconds are the process's, so that what else the machine does counts
less; they leave out other processes, which `processes` starts. With `--defaults` a round of ours is from one end of an
epoch to the next, with evaluation of all clients, checkpoint and logger, on data of which a tenth is for validation and
another for the test; seconds are means then, since not each round writes a checkpoint.
"""

import argparse
import logging
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import ChannelsLast, FederatedCallback, MatmulPrecision
from pfl_lightning.callbacks.checkpoints import LastCheckpoint
from pfl_lightning.data import IID, Digits, Dirichlet, FederatedDataModule, Partitioner
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.engines import ENGINES
from pfl_lightning.engines.threads import cores
from pfl_lightning.methods.fedamp import CloudProx
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedper import FedPer
from pfl_lightning.nets import CNN, MLP, LeNet5, Net, NetFactory, ResNet18

LR = 0.01
BATCH = 10


class Sizes(Partitioner):
    """Clients of given sizes, one after another in the pool."""

    by_class = False

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def split(self, classes: list[Any], num_clients: int, rng: np.random.RandomState) -> list[Any]:
        """Cuts the pool."""
        return np.split(np.concatenate(classes), np.cumsum(self.sizes))[:num_clients]


class Noise(FederatedDataModule):
    """Random images: what they show makes no difference to the time. `samples` are each client's, or of all clients."""

    num_classes = 10

    def __init__(
        self,
        num_clients: int,
        samples: int | Sequence[int],
        input_shape: tuple[int, ...],
        held_out: float = 0.0,
    ) -> None:
        partitioner = IID() if isinstance(samples, int) else Sizes(samples)
        fractions = {"test_fraction": held_out, "val_fraction": held_out}
        super().__init__(num_clients=num_clients, partitioner=partitioner, batch_size=BATCH, **fractions)
        self.input_shape = input_shape
        self.pool_size = num_clients * samples if isinstance(samples, int) else sum(samples)

    def load(self) -> tuple[Tensor, Tensor]:
        """Draws the pool."""
        n = self.pool_size
        return torch.randint(0, 256, (n, *self.input_shape), dtype=torch.uint8), torch.arange(n) % self.num_classes


class Characters(Noise):
    """Noise of 62 classes."""

    num_classes = 62


class PlainLoop:
    """Rounds as one would write them by hand."""

    def __init__(self, net: nn.Module, data: FederatedDataModule, device: torch.device) -> None:
        self.net, self.data, self.device = net, data, device
        self.cohort: list[int] = []
        self.weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def load(self, cohort: list[int]) -> None:
        """Loads the samples of a round, which a loop over resident tensors has already."""
        if cohort != self.cohort:
            parts = [self.data.part(client, "train") for client in cohort]
            self.cohort, self.parts = cohort, [part.to(self.device, torch.float32) for part in parts]

    def __call__(self) -> None:
        """Trains the clients of a round, and averages."""
        net, uploads = self.net, []
        for part in self.parts:
            net.load_state_dict(self.weights)
            net.train()
            optimizer = SGD(net.parameters(), lr=LR)
            order = torch.randperm(len(part))
            for x, y in zip(part.x[order].split(BATCH), part.y[order].split(BATCH), strict=True):
                loss = nn.functional.cross_entropy(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            uploads.append({name: tensor.detach().clone() for name, tensor in net.state_dict().items()})
        shares = torch.tensor([float(len(part)) for part in self.parts], device=self.device)
        shares /= shares.sum()
        for name, entry in self.weights.items():
            stack = torch.stack([upload[name] for upload in uploads])
            floating = entry.is_floating_point()
            self.weights[name] = torch.tensordot(shares, stack, 1) if floating else stack.amax(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Turns(FederatedCallback):
    """Times the federation's rounds and runs a plain round after each."""

    def __init__(
        self,
        plain: Callable[[], None],
        load: Callable[[list[int]], None] = lambda cohort: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plain, self.load, self.clock = plain, load, clock
        self.seconds: dict[str, list[float]] = {"federation": [], "plain": []}

    def on_train_epoch_start(self, trainer: Any, federation: Any) -> None:
        """Starts the clock of a round."""
        self._start = self.clock()

    def on_round_start(self, trainer: Any, federation: Any, cohort: list[int]) -> None:
        """Keeps the clients."""
        self._cohort = list(cohort)

    def on_train_epoch_end(self, trainer: Any, federation: Any) -> None:
        """Stops it, and takes the other's turn."""
        self.seconds["federation"].append(self.clock() - self._start)
        self.load(self._cohort)
        start = self.clock()
        self.plain()
        self.seconds["plain"].append(self.clock() - start)


class WholeTurns(Turns):
    """Times all that lies between two plain rounds: a round with its evaluation, its row and its checkpoint."""

    def on_train_epoch_start(self, trainer: Any, federation: Any) -> None:
        """Takes the other's turn, when the last round's files are written."""
        if federation.round:
            start = time.monotonic()
            super().on_train_epoch_end(trainer, federation)
            # the plain round isn't part of the run, whose time decides on checkpoints
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, LastCheckpoint):
                    callback.written += time.monotonic() - start
        super().on_train_epoch_start(trainer, federation)

    def on_train_epoch_end(self, trainer: Any, federation: Any) -> None:
        """Waits: checkpoints are written later."""


def leaf_cnn(input_shape: tuple[int, ...], num_classes: int) -> Net:
    """LEAF's net for FEMNIST: 6,603,710 parameters for 62 classes."""
    convolutions = [nn.Conv2d(input_shape[0], 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return Net(nn.Sequential(*convolutions, nn.Linear(64 * 7 * 7, 2048), nn.ReLU()), nn.Linear(2048, num_classes))


@dataclass(frozen=True)
class Workload:
    """A federation.

    Args:
        what: a line about it.
        net: the net.
        shape: of a sample.
        clients: how many there are.
        samples: of a client, or of all clients.
        cohort: clients of a round; None takes all.
        data: makes the data from the number of clients, ``samples`` and ``shape``.
    """

    what: str
    net: NetFactory
    shape: tuple[int, ...]
    clients: int
    samples: int | Sequence[int]
    cohort: int | None = None
    data: Callable[..., FederatedDataModule] = Noise


def uniform(clients: int, low: int, high: int) -> list[int]:
    """Sizes of clients, each as likely as the next."""
    return np.random.default_rng(0).integers(low, high, clients, endpoint=True).tolist()


def log_normal(clients: int, mean: int) -> list[int]:
    """Sizes of clients, whose logarithms have a standard deviation of 1: a few clients have most samples."""
    drawn = np.random.default_rng(0).lognormal(0, 1, clients)
    return np.maximum(1, np.rint(drawn / drawn.mean() * mean)).astype(int).tolist()


def digits(clients: int, *_: Any, held_out: float = 0.0) -> FederatedDataModule:
    """Returns the digits, of clients with few classes each, as in `protocols/digits_dir0.1`."""
    return Digits(
        num_clients=clients,
        partitioner=Dirichlet(alpha=0.1, min_size=40),
        batch_size=BATCH,
        test_fraction=held_out,
        val_fraction=held_out,
    )


SMALL_MLP = partial(MLP, hidden=(64,))
WORKLOADS = {
    "W1": Workload("20 clients x 150 CIFAR-shaped samples, CNN", CNN, (3, 32, 32), 20, 150),
    "W3": Workload("20 clients x 150 MNIST-shaped samples, LeNet5", LeNet5, (1, 28, 28), 20, 150),
    "W4": Workload("4 clients x 64 CIFAR-shaped samples, ResNet-18", ResNet18, (3, 32, 32), 4, 64),
    "W5": Workload("100 clients x 30, MLP 64-64-10", SMALL_MLP, (1, 8, 8), 100, 30),
    "W6": Workload("100 clients x 50 CIFAR-shaped samples, CNN", CNN, (3, 32, 32), 100, 50),
    "W7": Workload("1,000 users x 50 CIFAR-shaped samples, cohort 50, CNN", CNN, (3, 32, 32), 1000, 50, 50),
    "U1": Workload("100 clients x 10 to 50, MLP 64-64-10", SMALL_MLP, (1, 8, 8), 100, uniform(100, 10, 50)),
    "U2": Workload("100 clients, log-normal, mean 30, MLP 64-64-10", SMALL_MLP, (1, 8, 8), 100, log_normal(100, 30)),
    "U3": Workload("10 clients, digits by Dirichlet(0.1), MLP 64-64-10", SMALL_MLP, (1, 8, 8), 10, 0, None, digits),
    "FEM": Workload(
        "3,400 users x 20 to 400 of 62 classes, cohort 100, LEAF's CNN",
        leaf_cnn,
        (1, 28, 28),
        3400,
        uniform(3400, 20, 400),
        100,
        Characters,
    ),
}


COMPILED = "compiled"
"""The engine ``vectorised`` with compiled steps."""


def compare(workload: Workload, engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a round of each side, without the first two rounds; with ``--defaults`` the mean."""
    seed_everything(0, verbose=False)
    held_out = {"held_out": 0.1} if args.defaults else {}
    data = workload.data(workload.clients, workload.samples, workload.shape, **held_out)
    data.setup()
    client = FedAvg(workload.net, data.input_shape, data.num_classes, optimizer=partial(SGD, lr=LR))
    device = torch.device("cuda" if args.accelerator == "gpu" else args.accelerator)
    plain = PlainLoop(workload.net(data.input_shape, data.num_classes).to(device), data, device)
    turns = (WholeTurns if args.defaults else Turns)(
        plain, plain.load, time.process_time if args.cpu else time.perf_counter
    )
    folder = TemporaryDirectory()
    parts: dict[str, Any] = {"limit_val_batches": 0, "logger": False, "enable_checkpointing": False}
    trainer = FederatedTrainer(
        max_rounds=args.rounds + 2,
        clients_per_round=workload.cohort or workload.clients,
        engine="vectorised" if engine == COMPILED else engine,
        compile=engine == COMPILED,
        callbacks=[
            turns,
            *([ChannelsLast()] if args.channels_last else []),
            *([MatmulPrecision(args.matmul)] if args.matmul else []),
        ],
        accelerator=args.accelerator,
        precision=args.precision,
        default_root_dir=folder.name,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({} if args.defaults else parts),
    )
    with redirect_stdout(StringIO()), folder:
        trainer.fit(client, datamodule=data)
    of_rounds = statistics.fmean if args.defaults else statistics.median
    return {side: of_rounds(seconds[2:]) for side, seconds in turns.seconds.items()}


def table(args: argparse.Namespace) -> None:
    """Prints the ratio of each engine on each workload."""
    print(f"{'workload':<62} {'engine':<11} {'round':>9} {'plain loop':>11} {'ratio':>6}")
    for name in args.workloads:
        workload = WORKLOADS[name]
        for engine in args.engines:
            seconds = compare(workload, engine, args)
            ratio = seconds["federation"] / seconds["plain"]
            print(
                f"{name + ' ' + workload.what:<62} {engine:<11} {seconds['federation']:>7.3f} s "
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


def checkpoints(args: argparse.Namespace) -> None:
    """Prints the CPU milliseconds and the size of a checkpoint, and the bytes of one model a client."""
    print(f"{'MLP 64-n-10, checkpoints':<52} {'write':>9} {'read':>9} {'size':>11} {'models':>11} {'digests':>11}")
    for name, method, clients, hidden, cohort in (
        ("FedAvg, 50 of 10,000 clients, n = 64", FedAvg, 10_000, 64, 50),
        ("FedPer, 1,000 clients, n = 64", FedPer, 1000, 64, 1000),
        ("FedAMP, 400 clients, n = 8", CloudProx, 400, 8, 400),
    ):
        seed_everything(0, verbose=False)
        data, net = Noise(clients, 20, (1, 8, 8), held_out=0.1), partial(MLP, hidden=(hidden,))
        trainer = FederatedTrainer(
            max_rounds=2,
            clients_per_round=cohort,
            engine="vectorised",
            accelerator=args.accelerator,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(method(net, (1, 8, 8), 10, optimizer=partial(SGD, lr=LR)), datamodule=data)
        writes, reads = [], []
        with TemporaryDirectory() as folder:
            path = Path(folder, "round.ckpt")
            for _ in range(args.rounds):
                start = time.process_time()
                trainer.save_checkpoint(path)
                middle = time.process_time()
                saved = read_checkpoint(path)
                writes.append(middle - start)
                reads.append(time.process_time() - middle)
            size = path.stat().st_size
        models = clients * sum(p.nbytes for p in trainer.lightning_module.client.net.parameters())
        write, read = (1000 * statistics.median(times) for times in (writes, reads))
        kib = [f"{count / 1024:>7.0f} KiB" for count in (size, models, saved["federation"]["rows"].nbytes)]
        print(f"{name:<52} {write:>6.1f} ms {read:>6.1f} ms {' '.join(kib)}", flush=True)


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
    parser.add_argument("--matmul", help="of MatmulPrecision in the federation, such as high, for TF32 on a GPU")
    parser.add_argument("--cpu", action="store_true", help="seconds of the process in place of the clock's")
    parser.add_argument("--scale", action="store_true", help="rounds a second against the number of clients")
    parser.add_argument("--evaluation", action="store_true", help="seconds of evaluation against those of the round")
    parser.add_argument("--checkpoints", action="store_true", help="time and size of a checkpoint of many clients")
    parser.add_argument("--defaults", action="store_true", help="rounds with evaluation, checkpoint and logger")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    place = torch.cuda.get_device_name() if args.accelerator == "gpu" else f"{cores()} cores, {args.threads} thread(s)"
    print(f"torch {torch.__version__}, {place}, batch {BATCH}, medians of {args.rounds} rounds")
    (scale if args.scale else evaluation if args.evaluation else checkpoints if args.checkpoints else table)(args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:,.0f} MiB")
    if args.accelerator == "gpu":
        print(f"peak memory of tensors on the GPU: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
