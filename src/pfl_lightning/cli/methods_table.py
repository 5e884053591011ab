"""The table of methods: what a pair of client module and aggregator sends, keeps and needs, measured and stored."""

import csv
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import SGD

from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.cli.arguments import Arguments
from pfl_lightning.data import FederatedDataModule, Pathological, Samples, Split
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Updates, digest, num_bytes
from pfl_lightning.methods.registry import METHODS, Method
from pfl_lightning.nets import CNN, MLP
from pfl_lightning.runs.tables import markdown_table, text_table
from pfl_lightning.trainer import FederatedTrainer

STORED = Path(__file__).parents[1] / "methods" / "table.csv"
"""What `measured` gave, which the tests keep true."""

CLIENTS = 4
"""Clients of the federations that are measured."""

SHORT = ("method", "paper", "configuration", "up", "stays")
"""The columns of the short table."""

NOTE = f"""\
Measured, with the defaults, in the second round of {CLIENTS} clients that all take part, with the CNN and 10 classes:
what a client and round sends up and down, and what stays with the client between rounds, in bytes as a multiple of the
model's. "Of its own" says that clients receive different things; "classes" that what a client sends shows which classes
it holds, and "class counts" how many samples of each; "different nets" that clients can have networks of different
bodies whose features have one width. In all methods some clients can stay away from a round."""


class Crowd(FederatedDataModule):
    """Random images, as large as MNIST's, that notes which of its samples are asked for."""

    num_classes = 10
    input_shape = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__(
            num_clients=CLIENTS, partitioner=Pathological(classes_per_client=5), test_fraction=0.0, val_fraction=0.2
        )
        self.asked: set[str] = set()

    def load(self) -> tuple[Tensor, Tensor]:
        """Twenty images a client."""
        y = torch.arange(20 * CLIENTS) % self.num_classes
        return torch.randint(256, (len(y), *self.input_shape), dtype=torch.uint8), y

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> list[Samples]:
        """Parts; nobody but a method asks for validation data, as the Trainer is told not to validate."""
        self.asked.add(split)
        return super().parts(clients, split, device)

    def server_data(self) -> Samples:
        """Ten images."""
        self.asked.add("server")
        return self._gather(torch.arange(10))


class Traffic(FederatedCallback):
    """Keeps the names of what travels, as of the last round, and whether it shows which classes a client holds."""

    up: list[str]
    down: list[str]
    classes: bool

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Looks at a payload."""
        self.down = list(federation.aggregator.download(cohort[0]))

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Looks at the updates."""
        self.up = list(updates[min(updates)])
        held = {client: federation.data.client(client).class_counts.nonzero().flatten().tolist() for client in updates}
        self.classes = all(shows(update, set(held[client])) for client, update in updates.items())


def shows(sent: Any, classes: set[int]) -> bool:
    """Whether something has, at any depth, an entry for each of some classes and for no other.

    >>> shows({"prototypes": {0: 3.1, 4: 0.2}}, {0, 4}), shows({"weights": {"a": 3.1}}, {0, 4})
    (True, False)
    """
    return isinstance(sent, Mapping) and (set(sent) == classes or any(shows(part, classes) for part in sent.values()))


def fit(method: Method, data: Crowd, net: Any, callback: FederatedCallback, **settings: Any) -> Federation:
    """A federation of a method after a few small rounds."""
    trainer = FederatedTrainer(
        local_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[callback],
        **settings,
    )
    with isolate_rng():
        torch.manual_seed(0)
        # a large rate: clients shall become different enough for what a server makes of them to differ in float32
        client = method.client(
            net=net,
            input_shape=data.input_shape,
            num_classes=data.num_classes,
            optimizer=partial(SGD, lr=0.1),
        )
        trainer.fit(client, datamodule=data, aggregator=method.new_aggregator())
    return cast(Federation, trainer.lightning_module)


def works(method: Method, net: Any, **settings: Any) -> str:
    """Whether such a federation is made: yes, or no where it is refused."""
    try:
        fit(method, Crowd(), net, FederatedCallback(), **settings)
    except MisconfigurationException:
        return "no"
    return "yes"


def describe(method: Method) -> dict[str, str]:
    """A method's row: its names and its paper as they are, the rest measured.

    Args:
        method: the method.
    """
    data, traffic = Crowd(), Traffic()
    federation = fit(method, data, CNN, traffic, max_rounds=2)
    model = num_bytes(CNN(data.input_shape, data.num_classes).state_dict())
    own = len({digest(federation.aggregator.download(client)) for client in range(CLIENTS)}) > 1
    personal = federation.clients[0].personal
    # flags and counters are named only where there is nothing else
    named = [name for name, tensor in personal.items() if tensor.numel() > 1] or personal
    parts = dict.fromkeys(name.removeprefix("net.").split(".")[0] for name in named)
    counts = "class_counts" in traffic.up
    needs = {
        "class counts": counts,
        "classes": traffic.classes and not counts,
        "validation data": "val" in data.asked,
        "data at the server": "server" in data.asked,
    }
    paper, url = method.paper
    client, aggregator = method.pair
    bodies = [partial(MLP, hidden=(16,)), partial(MLP, hidden=(24, 16))]
    return {
        "method": method.name,
        "paper": paper,
        "url": url,
        "configuration": f"methods/{method.file}",
        "client module": client,
        "aggregator": aggregator,
        "up": amount(federation.metrics["bytes/up"] / CLIENTS / model, traffic.up),
        "down": amount(federation.metrics["bytes/down"] / CLIENTS / model, traffic.down) + own * " of its own",
        "stays": amount(num_bytes(personal) / model, parts),
        "needs": ", ".join(name for name, needed in needs.items() if needed),
        "different nets": works(method, bodies, max_rounds=2),
    }


def amount(share: float, names: Iterable[str]) -> str:
    """A share of the model's bytes, and what it is made of.

    >>> amount(1.00001, ["weights", "num_samples"]), amount(0.0012, ["class_counts"]), amount(0.0, [])
    ('1.00 weights', '<0.01 class counts', 'nothing')
    """
    listed = ", ".join(name.replace("_", " ") for name in names if name != "num_samples")
    number = f"{share:.2f}" if share >= 0.005 else "<0.01"
    return f"{number} {listed}" if share else "nothing"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """The table in Markdown, with links to the papers, and what its columns say.

    Args:
        rows: as from `describe`.
    """
    return f"{markdown_table(cells(list(map(linked, rows))))}\n\n{NOTE}"


def short(rows: Sequence[Mapping[str, str]]) -> str:
    """Five columns of the table in Markdown.

    Args:
        rows: as from `describe`.
    """
    return markdown_table(cells([{name: row[name] for name in SHORT} for row in map(linked, rows)]))


def linked(row: Mapping[str, str]) -> dict[str, str]:
    """A row with a link in Markdown to the paper, and names of classes and files as code."""
    code = {name: f"`{row[name]}`" for name in ("configuration", "client module", "aggregator")}
    return {**row, "paper": f"[{row['paper']}]({row['url']})" if row["url"] else "", **code}


def text(rows: Sequence[Mapping[str, str]]) -> str:
    """The table for terminals, and what its columns say.

    Args:
        rows: as from `describe`.
    """
    return f"{text_table(cells(rows))}\n\n{NOTE}"


def cells(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """The header and the rows, without the addresses."""
    names = [name for name in rows[0] if name != "url"]
    return [names, *([row[name] for name in names] for row in rows)]


def comma_separated(rows: Sequence[Mapping[str, str]]) -> str:
    """The table as CSV, without the line about its columns.

    Args:
        rows: as from `describe`.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().rstrip()


FORMATS = {"text": text, "markdown": markdown, "short": short, "csv": comma_separated}


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what Lightning tells of each of many small runs."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def main(args: list[str]) -> int:
    """Runs ``pfl-lightning methods``.

    Args:
        args: the command's arguments.

    Returns:
        The exit code.
    """
    parser = Arguments("methods", description=__doc__)
    parser.add_argument("--format", choices=list(FORMATS), default="text")
    parser.add_argument(
        "--measure", action="store_true", help="measure the methods anew, in the place of the figures that are stored"
    )
    given = parser.parse_args(args)
    print(FORMATS[given.format](measured() if given.measure else stored()))
    return 0


def stored() -> list[dict[str, str]]:
    """The rows of all methods, as they were measured."""
    with STORED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured() -> list[dict[str, str]]:
    """The rows of all methods."""
    # nets this small gain nothing from several threads, and lose much where something else runs
    torch.set_num_threads(1)
    with quiet():
        return [describe(method) for method in METHODS]
