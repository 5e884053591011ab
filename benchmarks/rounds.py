"""Seconds a round of the sequential engine, as ratios to a plain PyTorch loop that does the same work.

    python benchmarks/rounds.py [--rounds 9] [--threads 1]

Both run in one process and take turns, round by round: what else the machine does hits both. A round of ours is all
that `FederatedTrainer` does between two epochs of Lightning's loop (tasks, training, hand-over, aggregation, record),
without evaluation. The plain loop trains the same net on as many batches of the same size from resident tensors, and
averages the weights.
"""

import argparse
import logging
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import SGD

from pfl_lightning import FedAvg, FederatedTrainer
from pfl_lightning.data import IID, FederatedDataModule
from pfl_lightning.nets import CNN, MLP, NetFactory

LR = 0.01
BATCH = 10


class Noise(FederatedDataModule):
    """Random images: what they show makes no difference to the time."""

    num_classes = 10

    def __init__(self, num_clients: int, samples: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(num_clients=num_clients, partitioner=IID(), batch_size=BATCH, test_fraction=0, val_fraction=0)
        self.input_shape = input_shape
        self.samples = samples

    def load(self) -> tuple[Tensor, Tensor]:
        """Draws the pool."""
        n = self.num_clients * self.samples
        return torch.randint(0, 256, (n, *self.input_shape), dtype=torch.uint8), torch.arange(n) % 10


def plain_round(net: nn.Module, weights: dict[str, Tensor], data: Noise) -> Callable[[], None]:
    """A round as one would write it by hand."""
    parts = [data.part(client, "train") for client in range(data.num_clients)]

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
        for name in weights:
            weights[name] = torch.stack([upload[name] for upload in uploads]).mean(0)

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


def compare(net: NetFactory, data: Noise, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, without the first two of each side."""
    seed_everything(0, verbose=False)
    data.setup()
    client = FedAvg(net, data.input_shape, data.num_classes, optimizer=partial(SGD, lr=LR))
    twin = net(data.input_shape, data.num_classes)
    turns = Turns(plain_round(twin, {name: t.clone() for name, t in twin.state_dict().items()}, data))
    trainer = FederatedTrainer(
        max_rounds=rounds + 2,
        callbacks=[turns],
        accelerator="cpu",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, datamodule=data)
    return {side: seconds[2:] for side, seconds in turns.seconds.items()}


WORKLOADS: dict[str, Callable[[], tuple[NetFactory, Noise]]] = {
    "20 clients x 150, CNN of 878,538 parameters": lambda: (CNN, Noise(20, 150, (3, 32, 32))),
    "100 clients x 30, MLP 64-64-10": lambda: (partial(MLP, hidden=(64,)), Noise(100, 30, (1, 8, 8))),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each side, at least 5")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(
        f"torch {torch.__version__}, {args.threads} thread(s), batch {BATCH}, medians of {max(args.rounds, 5)} rounds"
    )
    print(f"{'workload':<45} {'federation':>11} {'plain':>9} {'ratio':>6}")
    for name, make in WORKLOADS.items():
        seconds = compare(*make(), rounds=max(args.rounds, 5))
        federation, plain = (statistics.median(seconds[side]) for side in ("federation", "plain"))
        print(f"{name:<45} {federation:>9.3f} s {plain:>7.3f} s {federation / plain:>6.2f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process: {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
