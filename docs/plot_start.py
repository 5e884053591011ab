"""Draws the first pictures: the quickstart's terminal, the partition of the digits, and cwFedAvg's row norms.

python docs/plot_start.py docs     # writes quickstart.svg, partition.png and row_norms.png, in a minute
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from rich.console import Console
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import Digits, Dirichlet
from pfl_lightning.methods import WDR, FedAvg
from pfl_lightning.nets import MLP, find_output_layer
from pfl_lightning.plots import plot_class_heatmaps, plot_partition

COMMAND = "pfl-lightning fit --config quickstart"


def terminal(picture: Path) -> None:
    """Run the quickstart, and write its real output as a picture of a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "pfl_lightning", *COMMAND.split()[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    console = Console(record=True, width=90, file=open("/dev/null", "w"))
    console.print(f"$ {COMMAND}", style="bold", highlight=False)
    console.print(done.stdout, highlight=False, markup=False)
    drawn = console.export_svg(title="pfl-lightning", unique_id="quickstart")
    # a page opens without a network: the reader's own monospaced font
    picture.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


class RowNorms(FederatedCallback):
    """Norms of the output layer's rows that clients receive, by client and class, in the last round."""

    def on_aggregate_start(self, trainer, federation, updates) -> None:
        """Read the payloads of the round's clients."""
        layer = f"{find_output_layer(federation.client, 10)}.weight"
        payloads = [federation.aggregator.download(client) for client in updates]
        self.received = torch.stack([payload["weights"][layer] for payload in payloads]).norm(dim=2)


def norms(data: Digits, method: type[FedAvg], aggregator: CwFedAvg | None = None, **settings: float) -> torch.Tensor:
    """Train for 20 rounds, and return the norms of the received rows ``[clients, classes]``."""
    L.seed_everything(0, verbose=False)
    client = method(
        MLP, data.input_shape, data.num_classes, optimizer=lambda parameters: SGD(parameters, lr=0.05), **settings
    )
    callback = RowNorms()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = FederatedTrainer(max_rounds=20, local_epochs=5, callbacks=[callback], enable_model_summary=False, **quiet)
    trainer.fit(client, datamodule=data, aggregator=aggregator)
    return callback.received


def main() -> None:
    """Write the three pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    terminal(folder / "quickstart.svg")
    data = Digits(num_clients=10, partitioner=Dirichlet(alpha=0.1))
    data.setup()
    plot_partition(data.counts).savefig(folder / "partition.png", dpi=120)
    pictures = {
        "samples held": data.counts,
        "FedAvg": norms(data, FedAvg),
        "cwFedAvg": norms(data, WDR, CwFedAvg(), wdr_lambda=4),
    }
    scaled = {name: rows / rows.sum(1, keepdim=True) for name, rows in pictures.items()}
    figure = plot_class_heatmaps(scaled, "share of the client's sum")
    figure.suptitle("Digits: samples by class, and norms of the output layer's rows, as shares of a client's sum")
    figure.savefig(folder / "row_norms.png", dpi=120)


if __name__ == "__main__":
    main()
