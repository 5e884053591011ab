"""Small federations, and what tests ask of them."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

from command import ACCELERATOR
from pfl_lightning import Aggregator, FederatedTrainer, Federation, Server
from pfl_lightning.callbacks import FederatedCallback, RoundLogger
from pfl_lightning.data import FederatedDataModule, Partitioner, Samples, Split
from pfl_lightning.engines import Job, Outcome, Sequential
from pfl_lightning.engines.processes import Processes
from pfl_lightning.messages import Updates, detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Adapted, Net

FEATURES, CLASSES, HIDDEN = 6, 3, 5
SIZES = (24, 16, 30, 20)
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


class Sizes(Partitioner):
    """Clients of given sizes, of mixed classes or, ``by_class``, of one class after the other."""

    def __init__(self, *sizes: int, by_class: bool = False) -> None:
        self.sizes, self.by_class = sizes, by_class

    def split(self, classes: list[Any], num_clients: int, rng: np.random.RandomState) -> list[Any]:
        rows = np.concatenate(classes)
        rows = rows if self.by_class else rng.permutation(rows)
        return np.split(rows, np.cumsum(self.sizes))[:num_clients]


class Blobs(FederatedDataModule):
    """Three clouds of 40 points; the server has nine public points."""

    num_classes = CLASSES
    input_shape = (FEATURES,)

    def load(self) -> tuple[Tensor, Tensor]:
        return points(120, seed=0)

    def server_data(self) -> Samples:
        return Samples(*points(9, seed=1))


class Altered(Blobs):
    """Clients whose samples are changed."""

    def alter(self, part: Samples, client: int, split: Split) -> Samples:
        raise NotImplementedError

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        parts = super().parts(clients, split, device)
        return [self.alter(part, client, split) for client, part in zip(clients, parts, strict=True)]


class TwoGroups(Altered):
    """Clients with odd ids call the classes by other names."""

    def alter(self, part: Samples, client: int, split: Split) -> Samples:
        return Samples(part.x, (part.y + client % 2) % CLASSES)


class OneClient:
    """A source of samples that has the same part of any name for its only client."""

    num_classes = CLASSES

    def __init__(self, part: Samples) -> None:
        self.part = part

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        return [self.part for _ in clients]

    def size(self, client: int, split: Split) -> int:
        return len(self.part)


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % CLASSES
    noise = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(seed))
    return noise + 2 * torch.eye(CLASSES, FEATURES)[y], y


def plain(input_shape: tuple[int, ...], num_classes: int) -> Net:
    """Without randomness and buffers."""
    return Net(nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, num_classes))


def noisy(input_shape: tuple[int, ...], num_classes: int) -> Net:
    """With BatchNorm and dropout."""
    body = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Dropout(0.3))
    return Net(body, nn.Linear(HIDDEN, num_classes))


def blobs(*sizes: int, by_class: bool = False, data: type[Blobs] = Blobs, **settings: Any) -> Blobs:
    sizes = sizes or SIZES
    partitioner = Sizes(*sizes, by_class=by_class)
    return data(num_clients=len(sizes), partitioner=partitioner, **{"batch_size": 5, **settings})


def known_by_place(run: "Run") -> dict[str, Any]:
    """The federation's state, in which rows are known by targets and places alone, as those in files are."""
    state = run.federation.federation_state()
    return {**state, "rows": state["rows"][..., 2]}


def fitting(cls: Callable[..., Any], net: Any) -> Any:
    """A net for a method, with low-rank adapters if it is about these."""
    kind = getattr(cls, "func", cls)
    return partial(Adapted, net=net, rank=2, alpha=3.0) if "adapters" in getattr(kind, "requires", ()) else net


def make_client(cls: Callable[..., FedAvg] = FedAvg, seed: int = 3, **settings: Any) -> Any:
    lightning.seed_everything(seed, verbose=False)
    settings = {"optimizer": MOMENTUM, **settings, "net": fitting(cls, settings.get("net", plain))}
    return cls(input_shape=(FEATURES,), num_classes=CLASSES, **settings)


@dataclass
class Run:
    """A trainer after ``fit``, and what is asked of it."""

    trainer: FederatedTrainer
    model: FedAvg
    data: FederatedDataModule

    @property
    def federation(self) -> Federation:
        return self.trainer.lightning_module

    @property
    def logger(self) -> RoundLogger:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, RoundLogger))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.logger.rows

    def test(self) -> dict[int, dict[str, float]]:
        """Metrics of each client on its test split, as the federation stands."""
        self.back_on_device()
        self.federation.evaluations.evaluate(range(self.data.num_clients), ("test",))
        return self.federation.evaluations.results["test"]

    def back_on_device(self) -> None:
        """Moves the model to where it trained, as after a fit Lightning has moved it to the CPU."""
        self.federation.to(self.federation.engines[0].device)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.federation.state_dict()

    @property
    def folder(self) -> Path:
        return Path(self.trainer.log_dir)

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


def make_trainer(root: Path | str = "unused", **settings: Any) -> FederatedTrainer:
    """A quiet trainer of the reference engine; one that writes nothing where no folder is given."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": ACCELERATOR, "max_rounds": 3}
    # the default, which chooses by net and machine, has tests of its own
    quiet["engine"] = "sequential"
    # by default the clock decides, which has tests of its own
    quiet["checkpoint_every"] = 1
    if settings.get("engine") in ("processes", Processes) or settings.get("devices", 1) != 1:
        # a machine has several cores, and seldom several GPUs
        quiet["accelerator"] = "cpu"
    if root == "unused":
        quiet |= {"logger": False, "enable_checkpointing": False}
    return FederatedTrainer(default_root_dir=str(root), **{**quiet, **settings})


def fit(
    model: FedAvg,
    data: FederatedDataModule | None = None,
    root: Path | str = "unused",
    aggregator: Aggregator | None = None,
    ckpt_path: Any = None,
    resume_changed: bool = False,
    **settings: Any,
) -> Run:
    data = blobs() if data is None else data
    trainer = make_trainer(root, **settings)
    trainer.fit(model, datamodule=data, aggregator=aggregator, ckpt_path=ckpt_path, resume_changed=resume_changed)
    return Run(trainer, model, data)


class Wide(Net):
    def __init__(self, input_shape, num_classes):
        body = nn.Sequential(nn.Linear(input_shape[0], 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, HIDDEN))
        super().__init__(body, nn.Linear(HIDDEN, num_classes))


class Small(Net):
    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Linear(input_shape[0], HIDDEN), nn.Linear(HIDDEN, num_classes))


NETS = [Small, Wide]
"""Networks of two architectures, for clients that share their classifier."""


class Spy(FederatedCallback):
    """Keeps the cohort and the updates of each round."""

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.updates: list[Updates] = []

    def on_round_start(self, trainer: Any, federation: Federation, cohort: list[int]) -> None:
        self.cohorts.append(cohort)

    def on_aggregate_start(self, trainer: Any, federation: Federation, updates: Updates) -> None:
        self.updates.append(detached(updates))


class Pause(FederatedCallback):
    """Ends a run after some rounds of those that it was to have."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: Any, federation: Any) -> None:
        trainer.should_stop = federation.round == self.rounds


def set_up(aggregator: Any, model: FedAvg, clients: int = 4, rounds: int | None = None) -> Any:
    """An aggregator before its first round, with a client module's weights."""
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items() if model.is_shared(name)}
    aggregator.setup(Server(clients, shared, model, None, seed=0, rounds=rounds))
    return aggregator


def drawn_update(model: FedAvg, seed: int, size: int = 10, **entries: Any) -> dict[str, Any]:
    """An update with random weights, and other entries as they are given."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else t + seed
        for name, t in model.state_dict().items()
        if model.is_shared(name)
    }
    return {"weights": weights, "num_samples": torch.tensor(size), **entries}


def flat(weights: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Some entries of a model as one vector."""
    return torch.cat([weights[name].flatten() for name in names])


def gradient(net: nn.Module, part: Samples, at: Tensor | None = None) -> Tensor:
    """The gradient of the mean cross-entropy of some samples as a vector, at other weights than the net's if given."""
    if at is not None:
        vector_to_parameters(at.clone(), net.parameters())
    return parameters_to_vector(torch.autograd.grad(F.cross_entropy(net(part.x), part.y), list(net.parameters())))


class Shuffled(Sequential):
    """Trains the clients in the reverse order, and delivers in a third."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        outcomes = list(super().run(list(jobs)[::-1]))
        yield from outcomes[::2] + outcomes[1::2]


def equal(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits; a NaN equals a NaN, as of a metric without a value."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b or (a != a and b != b))


def near(a: Any, b: Any, atol: float = 1e-5) -> bool:
    """Whether two trees are equal up to rounding."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.allclose(a.double(), b.double(), atol=atol)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(near(a[key], b[key], atol) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(near(x, y, atol) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=atol) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def same_end(one: Run, other: Run) -> bool:
    """Whether two runs end with the same model, federation and record."""
    return (
        equal(one.weights, other.weights)
        and equal(one.federation.federation_state(), other.federation.federation_state())
        and untimed(one.rows) == untimed(other.rows)
    )


def check_order_and_resume(
    method: Callable[..., FedAvg], root: Path, optimizer_lifetime: str = "run", **settings: Any
) -> None:
    """Neither the order in which clients train or deliver nor a pause after two rounds changes a bit."""
    make = partial(make_client, method, net=noisy, optimizer_lifetime=optimizer_lifetime)
    settings = {"clients_per_round": 3, "max_rounds": 3, **settings}
    whole = fit(make(), **settings)
    assert same_end(whole, fit(make(), engine=Shuffled, **settings))
    fit(make(), root=root, callbacks=[Pause(2)], **settings)
    assert same_end(whole, fit(make(), root=root, ckpt_path="last", **settings))


def check_batches_of_one(model: FedAvg, max_rounds: int) -> None:
    """Clients who lack classes learn from one sample a step."""
    run = fit(model, blobs(30, 60, by_class=True, batch_size=1), max_rounds=max_rounds)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def check_evaluated_by(run: Run, part: str) -> None:
    """A client is evaluated by a part of its module, as it is when it has received what it does."""
    held = run.data.part(2, "test")
    run.model.receive(run.federation.clients[2].personal, run.federation.aggregator.download(2), None)
    run.model.eval()
    net = run.model.get_submodule(part)
    assert run.logger.clients[2]["test/acc"] == float((net(held.x).argmax(1) == held.y).float().mean())


def untimed(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    left_out = {"bytes/evaluate", "absent"}  # of deployments alone
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name not in left_out}
        for row in rows
    ]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def load_client(cls: type[FedAvg], path: Path | str, client: int | None = None) -> Any:
    """A model from a checkpoint of a run that was configured in Python."""
    return cls.load_from_checkpoint(path, client=client, net=plain, optimizer=MOMENTUM, weights_only=True)
