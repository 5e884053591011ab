"""Measure the table of methods: run each method for two small rounds, and count bytes."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import SGD

from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.cli.usage import UsageError
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule, Pathological, Samples, Split
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Updates, detached, digest, num_bytes
from pfl_lightning.methods.fedbn import FedBN
from pfl_lightning.methods.registry import METHODS, Method
from pfl_lightning.nets import CNN, MLP, Adapted, CifarResNet
from pfl_lightning.server import Aggregator
from pfl_lightning.trainer import FederatedTrainer

CLIENTS = 4
"""Number of clients in the measured federations, which ``methods_table.NOTE`` names too."""


def net_of(client: type[ClientModule], net: Any = CNN) -> Any:
    """Return a builder of a net with the layers that a client module is about, such as BatchNorm or adapters.

    Args:
        client: the client module.
        net: builds the net that is used without such layers.
    """
    if client is FedBN:
        return CifarResNet
    return partial(Adapted, net=net) if "adapters" in client.requires else net


class Crowd(FederatedDataModule):
    """Random images in the format of MNIST; records which splits a method reads."""

    num_classes = 10
    input_shape = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__(
            num_clients=CLIENTS, partitioner=Pathological(classes_per_client=5), test_fraction=0.0, val_fraction=0.2
        )
        self.asked: set[str] = set()

    def load(self) -> tuple[Tensor, Tensor]:
        """Return 20 random images per client, with balanced labels."""
        y = torch.arange(20 * CLIENTS) % self.num_classes
        return torch.randint(256, (len(y), *self.input_shape), dtype=torch.uint8), y

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Record the split and return the samples.

        Only a method asks for validation samples here: `fit` turns Lightning's validation off.
        """
        self.asked.add(split)
        return super().parts(clients, split, device)

    def server_data(self) -> Samples:
        """Record the request and return ten images."""
        self.asked.add("server")
        return self._gather(torch.arange(10))


class Traffic(FederatedCallback):
    """Record the last round's entries, if updates reveal a client's classes, and if the server weighs by samples."""

    up: list[str]
    down: list[str]
    classes: bool

    def __init__(self) -> None:
        self.weighs: set[str] = set()

    def on_round_start(self, trainer: Trainer, federation: Federation, cohort: list[int]) -> None:
        """Record the payload's entries, except entries sent once per run."""
        self.down = [n for n in federation.aggregator.download(cohort[0]) if n not in federation.aggregator.sends_once]

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Record the updates' entries, and compare their keys with each client's classes."""
        self.up = list(updates[min(updates)])
        held = {client: federation.data.client(client).class_counts.nonzero().flatten().tolist() for client in updates}
        self.classes = all(shows(update, set(held[client])) for client, update in updates.items())
        # in each round, as a server may do so in the first alone
        self.weighs.add(weighs_by_samples(federation.aggregator, updates, federation.round))


def weighs_by_samples(aggregator: Aggregator, updates: Updates, round: int) -> str:
    """Return "yes" if a server sends something else once a client reports more samples, and all else is the same.

    Else return "no", or nothing if the server takes nothing of updates at all.

    Args:
        aggregator: the server before it takes the updates; its state is the same afterwards.
        updates: the updates.
        round: the round's number, from 0.
    """
    before = aggregator.state

    def after(given: Updates) -> str:
        aggregator.state = deepcopy(before)
        with isolate_rng():
            aggregator.aggregate(detached(given), round)
        sent = [aggregator.download(client) for client in range(CLIENTS)]
        return digest([sent, aggregator.global_model()])

    # the largest, as a count of all samples or of those of a class may be 0
    client = max(updates, key=lambda client: int(updates[client].get("num_samples", 0)))
    digests = after(updates), after({**updates, client: multiplied(updates[client])}), after({})
    aggregator.state = before
    if digests[0] == digests[2]:
        return ""
    return "no" if digests[0] == digests[1] else "yes"


def multiplied(sent: Any, inside: str = "") -> Any:
    """Return an update, or a part of one, that reports three times as many samples, in all and of each class.

    >>> multiplied({"num_samples": torch.tensor(4), "weights": {"steps": torch.tensor(4)}})
    {'num_samples': tensor(12), 'weights': {'steps': tensor(4)}}

    Args:
        sent: the update.
        inside: the name of the entry that has the part.
    """
    if isinstance(sent, Mapping):
        return {name: multiplied(part, name if isinstance(name, str) else inside) for name, part in sent.items()}
    return 3 * sent if inside in ("num_samples", "class_counts", "count") else sent


def shows(sent: Any, classes: set[int]) -> bool:
    """Return True if a mapping within ``sent`` has exactly the given classes as keys, at any depth.

    >>> shows({"prototypes": {0: 3.1, 4: 0.2}}, {0, 4}), shows({"weights": {"a": 3.1}}, {0, 4})
    (True, False)

    Args:
        sent: an update or a part of one.
        classes: the classes that the client holds.
    """
    return isinstance(sent, Mapping) and (set(sent) == classes or any(shows(part, classes) for part in sent.values()))


def fit(method: Method, data: Crowd, net: Any, callback: FederatedCallback, **settings: Any) -> Federation:
    """Train a method for a few small rounds on the CPU, and return the federation.

    Args:
        method: the method.
        data: the data.
        net: a net's class, or a list of them for clients with different nets.
        callback: observes the rounds.
        **settings: further settings of the Trainer.
    """
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
    # measuring must not depend on the order of methods, nor change the caller's random state
    with isolate_rng():
        torch.manual_seed(0)
        # a large learning rate, so that clients drift apart: personal payloads must differ even in float32
        client = method.client(
            net=net,
            input_shape=data.input_shape,
            num_classes=data.num_classes,
            optimizer=partial(SGD, lr=0.1),
        )
        trainer.fit(client, datamodule=data, aggregator=method.new_aggregator())
    return cast(Federation, trainer.lightning_module)


def works(method: Method, net: Any, **settings: Any) -> str:
    """Return "yes" if a method trains with a net, "no" if the method refuses."""
    try:
        fit(method, Crowd(), net, FederatedCallback(), **settings)
    except MisconfigurationException:
        return "no"
    return "yes"


def describe(method: Method) -> dict[str, str]:
    """Measure one method, and return a row of the table.

    Args:
        method: the method.
    """
    data, traffic, net = Crowd(), Traffic(), net_of(method.client)
    federation = fit(method, data, net, traffic, max_rounds=2)
    model = num_bytes(net(data.input_shape, data.num_classes).state_dict())
    # personal payloads: clients receive different bytes
    differ = len({digest(federation.aggregator.download(client)) for client in range(CLIENTS)}) > 1
    payload = federation.aggregator.download(0)
    # entries sent once per run stay with the client, though the aggregator counts them as payload
    kept = {name: payload[name] for name in federation.aggregator.sends_once if name in payload}
    personal = federation.clients[0].personal | kept
    # flags and counters are single numbers, and would hide the parts that matter in the column
    named = [name for name, tensor in personal.items() if tensor.numel() > 1] or personal
    parts = dict.fromkeys(name.removeprefix("net.").split(".")[0] for name in named)
    # class counts reveal more than classes, so the table names only the former
    counts = "class_counts" in traffic.up
    needs = {
        "class counts": counts,
        "classes": traffic.classes and not counts,
        "validation data": "val" in data.asked,
        "data at the server": "server" in data.asked,
    }
    bodies = [partial(MLP, hidden=hidden) for hidden in ((16,), (24, 16))]
    if "adapters" in method.client.requires:
        bodies = [net_of(method.client, body) for body in bodies]
    return facts(method) | {
        "up": amount(federation.metrics["bytes/up"] / CLIENTS / model, traffic.up),
        "down": amount(federation.metrics["bytes/down"] / CLIENTS / model, traffic.down) + differ * " of its own",
        "stays": amount(num_bytes(personal) / model, parts),
        "weighs by samples": max(traffic.weighs, key=("", "no", "yes").index),
        "needs": ", ".join(name for name, needed in needs.items() if needed),
        "different nets": works(method, bodies, max_rounds=2),
    }


def facts(method: Method) -> dict[str, str]:
    """Return the columns of a method's row that need no run.

    Args:
        method: the method.
    """
    paper, url = method.paper
    client, aggregator = method.pair
    return {
        "method": method.name,
        "paper": paper,
        "url": url,
        "configuration": f"methods/{method.file}",
        "client module": client,
        "aggregator": aggregator,
    }


def amount(share: float, names: Iterable[str]) -> str:
    """Return bytes as a multiple of the model's, with the names of the entries.

    >>> amount(1.00001, ["weights", "num_samples"]), amount(0.0012, ["class_counts"]), amount(0.0, [])
    ('1.00 weights', '<0.01 class counts', 'nothing')
    """
    # every method sends num_samples; a column full of it would say nothing
    listed = ", ".join(name.replace("_", " ") for name in names if name != "num_samples")
    number = f"{share:.2f}" if share >= 0.005 else "<0.01"
    return f"{number} {listed}" if share else "nothing"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and Lightning's log lines, which repeat for each of a hundred runs."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def measured(names: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of some methods.

    Args:
        names: the methods' names; none for all.

    Raises:
        UsageError: if a name is no method's.
    """
    known = [method.name for method in METHODS]
    for name in names:
        if name not in known:
            raise UsageError(f"methods: --measure {name} is no method{suggestion(name, known)}")
    # nets this small gain nothing from several threads, and lose much where something else runs
    torch.set_num_threads(1)
    with quiet():
        return [describe(method) for method in METHODS if not names or method.name in names]
