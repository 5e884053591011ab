"""Measures what methods send, keep and need, in a few small rounds of each."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import SGD

from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.cli.methods_table import CLIENTS
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Pathological, Samples, Split
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Updates, digest, num_bytes
from pfl_lightning.methods.fedbn import FedBN
from pfl_lightning.methods.registry import METHODS, Method
from pfl_lightning.nets import CNN, MLP, CifarResNet
from pfl_lightning.trainer import FederatedTrainer

NETS: dict[type[ClientModule], Any] = {FedBN: CifarResNet}
"""Nets of client modules that are about layers that the CNN hasn't."""


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

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
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
        """Note what a payload has, without what travels once."""
        self.down = [n for n in federation.aggregator.download(cohort[0]) if n not in federation.aggregator.sends_once]

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
    data, traffic, net = Crowd(), Traffic(), NETS.get(method.client, CNN)
    federation = fit(method, data, net, traffic, max_rounds=2)
    model = num_bytes(net(data.input_shape, data.num_classes).state_dict())
    own = len({digest(federation.aggregator.download(client)) for client in range(CLIENTS)}) > 1
    payload = federation.aggregator.download(0)
    kept = {name: payload[name] for name in federation.aggregator.sends_once if name in payload}
    personal = federation.clients[0].personal | kept
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


def measured() -> list[dict[str, str]]:
    """The rows of all methods."""
    # nets this small gain nothing from several threads, and lose much where something else runs
    torch.set_num_threads(1)
    with quiet():
        return [describe(method) for method in METHODS]
