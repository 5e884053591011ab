"""Whether a round costs the same however many there were before it.

    python benchmarks/soak.py [--rounds 3000] [--engine sequential]

A federation of three tiny clients runs with its record, its logger and its checkpoints, as `FederatedTrainer` sets them
up by default. The script prints mean milliseconds of the rounds 101 to 200 and of the last hundred, with their ratio,
by the clock and by the process's own time, which other processes on the machine disturb less.
"""

import argparse
import tempfile
import time
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import IID, TensorData
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import MLP
from pfl_lightning.tasks import Classification

SAMPLES, FEATURES, CLASSES = 60, 4, 2


class Clock(Callback):
    """Times from the start of each round to that of the next, so that checkpoints and loggers count."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, float]] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        """Take the time at which a round starts."""
        self.starts.append((time.perf_counter(), time.process_time()))

    def means(self, first: int, last: int) -> tuple[float, float]:
        """Return mean milliseconds of rounds, by the clock and of the process.

        Args:
            first: the first round's number, from 1.
            last: the last round's number.
        """
        (wall, process), (wall_end, process_end) = self.starts[first - 1], self.starts[last]
        rounds = (last + 1 - first) / 1000
        return (wall_end - wall) / rounds, (process_end - process) / rounds


def samples() -> tuple[Tensor, Tensor]:
    """Return two clouds of points with their classes."""
    y = torch.arange(SAMPLES) % CLASSES
    return torch.randn(SAMPLES, FEATURES) + 2 * torch.eye(CLASSES, FEATURES)[y], y


def main() -> None:
    """Run the federation and print the two means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--engine", default="sequential")
    args = parser.parse_args()
    seed_everything(0, verbose=False)
    clock = Clock()
    data = TensorData(*samples(), Classification(CLASSES), num_clients=3, partitioner=IID())
    model = FedAvg(partial(MLP, hidden=(8,)), input_shape=(FEATURES,), num_classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            # the last round has no next one to be timed by
            max_rounds=args.rounds + 1,
            engine=args.engine,
            accelerator="cpu",
            callbacks=[clock],
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        trainer.fit(model, datamodule=data)
    early, late = clock.means(101, 200), clock.means(args.rounds - 99, args.rounds)
    for name, first, last in zip(("clock", "process"), early, late, strict=True):
        print(f"{name:<8} rounds 101 to 200: {first:.2f} ms, last hundred: {last:.2f} ms, ratio {last / first:.2f}")


if __name__ == "__main__":
    main()
