"""CPU seconds of a round in other packages and in this one, each in a process of its own.

    pip install psutil "pfl[pytorch]" fluke-fl "flwr[simulation]"          # those to compare with
    python benchmarks/peers.py [--peers ours pfl-research fluke flower] [--workloads W5 U2] [--rounds 10]
    pip install h5py matplotlib scikit-learn                                # what PFLlib imports
    python benchmarks/peers.py --peers ours pfllib fluke --pfllib FOLDER --methods Ditto FedRep FedALA
    python benchmarks/peers.py --evaluate --engines sequential auto

All get the same samples, the same net and the same clients in each round: one local epoch of SGD at the same rate and
batch size, then the mean of the weights by numbers of samples. Ditto's personal models, with a lambda of 1, and
FedRep's classifiers get one epoch too, and FedALA mixes the last layer by 80 per cent of a client's samples. With
`--evaluate` each package evaluates all clients on held-out samples in each round, in its own way: PFLlib also takes
the loss of the training samples, and both models of Ditto; pfl-research evaluates before and after training; fluke
evaluates what each client has trained, with seven metrics. A second row of ours then has a checkpoint and a logger too.

CPU seconds are those of the process and of all its children, by psutil; a plain loop that does FedAvg's work in a
process of its own is a row of its own. Seconds of different processes depend on what else the machine does: run it on
an idle one, more than once. pfl-research and Flower may ask for other versions of the same packages; run them from
environments of their own, and compare ratios to the loop.

``moved`` is the distance of the last weights on the server from the first, and ``own`` the mean distance of what stays
with the clients: Ditto's models, and the last layers of FedRep and FedALA. Packages draw other orders of the samples,
so both agree to some percent where they do the same work, and not at all where one of them doesn't.
"""

import argparse
import contextlib
import copy
import functools
import importlib
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

LR = 0.01
BATCH = 10
LAMBDA = 1.0
"""Ditto's pull to the global model."""
SHARE_TO_MIX_BY = 80
"""Per cent of a client's samples by which FedALA learns its weights."""
METHODS = ["FedAvg", "Ditto", "FedRep", "FedALA"]


def mlp() -> nn.Sequential:
    """A perceptron for images of eight by eight pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Sequential:
    """The convolutional net of McMahan et al. (2017) in PFLlib's form, for CIFAR-10: 878,538 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def leaf_cnn() -> nn.Sequential:
    """LEAF's net for FEMNIST (Caldas et al., 2018): 6,603,710 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 62)),
    )


def equal(count: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Give all clients as many samples."""
    return lambda rng, clients: np.full(clients, count)


def uniform(low: int, high: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Draw clients' numbers of samples uniformly, both ends included."""
    return lambda rng, clients: rng.integers(low, high + 1, clients)


def log_normal(mean: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Draw clients' numbers of samples from a log-normal distribution of deviation 1, at least 1."""
    return lambda rng, clients: np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, clients)).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """A federation.

    Args:
        what: a line about it.
        net: makes the net, whose last layer is the classifier.
        shape: shape of a sample.
        classes: number of classes.
        clients: number of clients.
        sizes: draws the clients' numbers of samples.
        cohort: number of clients per round; None takes all.
    """

    what: str
    net: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    classes: int
    clients: int
    sizes: Callable[[np.random.Generator, int], np.ndarray]
    cohort: int | None = None


WORKLOADS = {
    "W1": Workload("20 clients x 150 CIFAR-shaped samples, CNN", cnn, (3, 32, 32), 10, 20, equal(150)),
    "W5": Workload("100 clients x 30 samples, MLP 64-64-10", mlp, (1, 8, 8), 10, 100, equal(30)),
    "U1": Workload("100 clients x 10 to 50 samples, MLP", mlp, (1, 8, 8), 10, 100, uniform(10, 50)),
    "U2": Workload("100 clients, log-normal sizes of mean 30, MLP", mlp, (1, 8, 8), 10, 100, log_normal(30)),
    "FEM": Workload(
        "3,400 users x 20 to 400 samples, 100 a round, LEAF's CNN",
        leaf_cnn,
        (1, 28, 28),
        62,
        3400,
        uniform(20, 400),
        100,
    ),
}


class Federation:
    """The clients' samples and the cohorts of a workload, read from the files that `write` made.

    Args:
        workload: the workload.
        folder: the files' folder.
        rounds: number of rounds.
    """

    def __init__(self, workload: Workload, folder: Path, rounds: int) -> None:
        self.workload = workload
        self.rounds = rounds
        self.x, self.y, self.bounds = self.read(folder, "")
        self.held_out = self.read(folder, "held_out_")
        self.cohorts: list[list[int]] = json.loads((folder / "cohorts.json").read_text())[:rounds]

    @staticmethod
    def write(workload: Workload, folder: Path, rounds: int) -> None:
        """Draw samples, sizes and cohorts by a fixed seed and save them."""
        rng = np.random.default_rng(0)
        sizes = workload.sizes(rng, workload.clients)
        for prefix, counts in (("", sizes), ("held_out_", np.maximum(1, sizes // 4))):
            np.save(folder / f"{prefix}bounds.npy", np.concatenate([[0], np.cumsum(counts)]))
            np.save(folder / f"{prefix}x.npy", rng.integers(0, 256, (counts.sum(), *workload.shape), dtype=np.uint8))
            np.save(folder / f"{prefix}y.npy", rng.integers(0, workload.classes, counts.sum()))
        size = workload.cohort or workload.clients
        cohorts = [sorted(rng.choice(workload.clients, size, replace=False).tolist()) for _ in range(rounds)]
        (folder / "cohorts.json").write_text(json.dumps(cohorts))

    @staticmethod
    def read(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, labels and the clients' bounds; inputs and labels stay in their files."""
        x, y = (np.load(folder / f"{prefix}{name}.npy", mmap_mode="r") for name in "xy")
        return x, y, np.load(folder / f"{prefix}bounds.npy")

    def part(self, client: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return a client's inputs in [-1, 1] and its labels, a fourth as many if they are held out."""
        x, y, bounds = self.held_out if held_out else (self.x, self.y, self.bounds)
        rows = slice(bounds[client], bounds[client + 1])
        return torch.from_numpy(np.array(x[rows])).float() / 127.5 - 1, torch.from_numpy(np.array(y[rows]))

    def net(self) -> nn.Sequential:
        """Make the net with the first weights, which are the same for all packages."""
        torch.manual_seed(0)
        return self.workload.net()


def of_tree(figure: Callable[[psutil.Process], float], *, itself: bool = True) -> float:
    """Return the sum of a figure over this process and all processes below it."""
    total = 0.0
    me = psutil.Process()
    for process in (*([me] if itself else []), *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += figure(process)
    return total


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of all below it, ended ones included."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    # psutil counts hundredths of a second, too coarse for a round of small nets in one process; its four are own and
    # children's, of user and system, and a fifth on Linux, iowait, is waiting
    return sum(usage.ru_utime + usage.ru_stime for usage in own) + of_tree(
        lambda process: sum(process.cpu_times()[:4]), itself=False
    )


def vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return a copy of all entries."""
    return nn.utils.parameters_to_vector(parameters).detach().clone()


class Clock:
    """CPU seconds and seconds of each round, peak memory, and the weights' way.

    Args:
        net: the net with its first weights.
        method: the method, of `METHODS`.
    """

    def __init__(self, net: nn.Sequential, method: str) -> None:
        # FedRep's classifier never travels
        self.first = vector((net[:-1] if method == "FedRep" else net).parameters())
        self.own_first = vector((net if method == "Ditto" else net[-1]).parameters())
        self.last = self.first
        self.own: list[Tensor] = []
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.start = self.memory = 0.0
        self._begun = (0.0, 0.0)

    def mark(self, net: nn.Module | None = None, own: Iterable[Iterable[Tensor]] = ()) -> None:
        """Note the end of a round, and the weights of server and clients if they are at hand."""
        cpu, wall = cpu_seconds(), time.perf_counter()
        if self.start:
            self.cpu.append(cpu - self._begun[0])
            self.wall.append(wall - self._begun[1])
        self.start = self.start or cpu
        self.memory = max(self.memory, of_tree(lambda process: process.memory_full_info().pss))
        if net is not None:
            self.last = vector(net.parameters())
        self.own = [vector(parameters) for parameters in own]
        # the marks themselves aren't counted
        self._begun = cpu_seconds(), time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Return medians over rounds from the third on, the CPU seconds until the end of the first, and the rest."""
        return {
            "cpu": statistics.median(self.cpu[1:]),
            "wall": statistics.median(self.wall[1:]),
            "start": self.start,
            "memory": self.memory / 2**20,
            "moved": (self.last - self.first).norm().item(),
            "own": statistics.mean((own - self.own_first).norm().item() for own in self.own or [self.own_first]),
        }


def correct(net: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[float, int]:
    """Return the loss of some samples, and how many of them the net gets right."""
    net.eval()
    with torch.no_grad():
        logits = net(part[0])
        found = nn.functional.cross_entropy(logits, part[1]).item(), int((logits.argmax(1) == part[1]).sum())
    net.train()
    return found


def plain(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """FedAvg as a plain PyTorch loop over resident tensors."""
    net = federation.net()
    weights = {name: entry.clone() for name, entry in net.state_dict().items()}
    parts = {client: federation.part(client) for cohort in federation.cohorts for client in cohort}
    everyone = range(federation.workload.clients) if args.evaluate else ()
    held_out = [federation.part(client, held_out=True) for client in everyone]
    for cohort in federation.cohorts:
        total = sum(len(parts[client][1]) for client in cohort)
        mean = {name: torch.zeros_like(entry) for name, entry in weights.items()}
        for client in cohort:
            net.load_state_dict(weights)
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            x, y = parts[client]
            for rows in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, entry in net.state_dict().items():
                mean[name] += entry * (len(y) / total)
        weights = mean
        net.load_state_dict(weights)
        for part in held_out:
            correct(net, part)
        clock.mark(net)


def ours(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """This package, with the first engine of ``--engines``."""
    from functools import partial

    from lightning.pytorch import Callback, seed_everything

    from pfl_lightning import FederatedTrainer, methods
    from pfl_lightning.data import FederatedDataModule, Loaded, Natural
    from pfl_lightning.nets import Net
    from pfl_lightning.selection import RoundStart, Selection

    class Given(Selection):
        def choose(self, start: RoundStart) -> list[int]:
            return federation.cohorts[start.round]

    class Users(FederatedDataModule):
        num_classes = federation.workload.classes
        input_shape = federation.workload.shape

        def load(self) -> Loaded:
            splits = {"train": (federation.x, federation.y, federation.bounds)}
            splits |= {"val": federation.held_out} if args.evaluate else {}
            x, y = (torch.from_numpy(np.concatenate([part[at] for part in splits.values()])) for at in (0, 1))
            # where a round has some clients only, those are read from the file, as for the other packages
            x = federation.x if federation.workload.cohort and not args.evaluate else x
            owners = [np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)) for _, _, bounds in splits.values()]
            split = np.repeat(list(splits), [len(labels) for _, labels, _ in splits.values()])
            return Loaded(x, y, np.concatenate(owners), split)

    class Marks(Callback):
        # not at the end of an epoch, which the checkpoint follows
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch:
                clock.mark()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            clock.mark()

    seed_everything(0, verbose=False)
    first = federation.net().state_dict()
    data = Users(
        num_clients=None,
        partitioner=Natural(),
        batch_size=BATCH,
        test_fraction=0,
        val_fraction=0,
        client_split="given",
    )

    def net(input_shape: Any, num_classes: Any) -> nn.Module:
        module = federation.workload.net()
        module.load_state_dict(first)
        return Net(module[:-1], module[-1])

    settings: dict[str, dict[str, float]] = {
        "FedAvg": {},
        "Ditto": {"personal_lambda": LAMBDA, "personal_epochs": 1},
        "FedRep": {"head_epochs": 1},
        "FedALA": {"rand_percent": SHARE_TO_MIX_BY},
    }
    optimizer = partial(torch.optim.SGD, lr=LR)
    make = getattr(methods, args.methods[0])
    client = make(net, Users.input_shape, Users.num_classes, optimizer=optimizer, **settings[args.methods[0]])
    bare: dict[str, Any] = {} if args.whole else {"logger": False, "enable_checkpointing": False}
    trainer = FederatedTrainer(
        max_rounds=federation.rounds,
        clients_per_round=len(federation.cohorts[0]),
        cohort=Given(),
        engine=args.engines[0],
        callbacks=[Marks()],
        accelerator="cpu",
        limit_val_batches=None if args.evaluate else 0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **bare,
    )
    trainer.fit(client, datamodule=data)
    clock.last = vector((client.net.features if args.methods[0] == "FedRep" else client.net).parameters())
    kept = {"FedAvg": (), "Ditto": "personal.", "FedRep": "net.classifier.", "FedALA": "own."}[args.methods[0]]
    states = trainer.lightning_module.clients.values() if kept else ()
    clock.own = [vector(p for name, p in state.personal.items() if name.startswith(kept)) for state in states]


def pfl_research(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """The simulation of pfl-research, with one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = federation.net()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
            loss, right = correct(self.net, (x, y))
            return {"loss": Weighted(loss * len(y), len(y)), "accuracy": Weighted(right, len(y))}

    class Marks(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            clock.mark(net)
            return False, Metrics()

    def dataset(user: int) -> Dataset:
        x, y = federation.part(user)
        rows = torch.randperm(len(y))
        return Dataset((x[rows], y[rows]), user_id=str(user))

    def held_out(user: int) -> Dataset:
        return Dataset(federation.part(user, held_out=True), user_id=str(user))

    users = iter([client for cohort in [*federation.cohorts, federation.cohorts[0]] for client in cohort])
    everyone = itertools.cycle(range(federation.workload.clients))
    net = Net()
    algorithm = FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=federation.rounds,
            evaluation_frequency=1 if args.evaluate else 10**9,
            train_cohort_size=len(federation.cohorts[0]),
            val_cohort_size=federation.workload.clients if args.evaluate else 0,
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset(dataset, lambda: next(users)),
            val_data=FederatedDataset(held_out, lambda: next(everyone)),
            postprocessors=[WeightByDatapoints()],
        ),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Marks()],
    )


def fluke(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """A method of fluke."""
    from fluke import DDict, FlukeENV
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.evaluation import ClassificationEval
    from fluke.nets import EncoderHeadNet
    from fluke.server import Server
    from fluke.utils import FederationObserver

    method = args.methods[0]
    module = importlib.import_module(f"fluke.algorithms.{method.lower()}")
    algorithm = getattr(module, {"FedAvg": "FedAVG"}.get(method, method))
    FlukeENV().set_seed(0)
    FlukeENV().set_evaluator(ClassificationEval(1, federation.workload.classes))
    FlukeENV().set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=args.evaluate)
    rounds = iter(federation.cohorts)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=LR))

    def net() -> EncoderHeadNet:
        layers = federation.net()
        return EncoderHeadNet(layers[:-1], layers[-1])

    class Given(Server):
        def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
            return [self.clients[client] for client in next(rounds)]

    class Marks(FederationObserver):
        def end_round(self, round: int) -> None:
            clock.mark(server.model, () if method == "FedAvg" else map(own, clients))

    def own(client: Any) -> Iterable[Tensor]:
        if method == "Ditto":
            return client.personalized_model.parameters()
        return (client.model.get_local() if method == "FedRep" else client.model.head).parameters()

    def loader(client: int, held_out: bool) -> FastDataLoader:
        return FastDataLoader(
            *federation.part(client, held_out),
            num_labels=federation.workload.classes,
            batch_size=BATCH,
            shuffle=not held_out,
            skip_singleton=False,
        )

    def client(index: int) -> Client:
        settings: dict[str, Any] = {
            # of FedAvg's clients nothing is kept from round to round
            "FedAvg": lambda: {"persistency": False},
            "Ditto": lambda: {"model": net(), "tau": 1, "lam": LAMBDA},
            "FedRep": lambda: {"model": net(), "tau": 1},
            "FedALA": lambda: {"ala_sample_size": SHARE_TO_MIX_BY / 100, "conergence_threshold": 0.1},
        }[method]()
        return getattr(module, f"{method}Client", Client)(
            index=index,
            train_set=loader(index, held_out=False),
            test_set=loader(index, held_out=True) if args.evaluate else None,
            optimizer_cfg=optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            local_epochs=1,
            **settings,
        )

    clients = [client(index) for index in range(federation.workload.clients)]
    server = Given(net().encoder if method == "FedRep" else net(), None, clients, weighted=True)
    run = algorithm(len(clients), None, {}, clients=clients, server=server)
    run.set_callbacks([Marks()])
    share = len(federation.cohorts[0]) / len(clients)
    with contextlib.redirect_stdout(sys.stderr):
        run.run(federation.rounds, share, finalize=False)


def pfllib(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """A method of the clone ``--pfllib``, with samples in memory and short last batches, which PFLlib drops."""
    sys.path.insert(0, str(args.pfllib / "system"))
    os.chdir(args.pfllib / "system")
    from utils import data_utils

    @functools.cache
    def samples(client: int, held_out: bool) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*federation.part(client, held_out), strict=True))

    # before the modules that import it by its name
    data_utils.read_client_data = lambda dataset, client, is_train=True, few_shot=0: samples(client, not is_train)
    from flcore.clients import clientbase
    from flcore.trainmodel.models import BaseHeadSplit

    def loader(self: Any, batch_size: int | None = None) -> Any:
        return torch.utils.data.DataLoader(samples(self.id, False), BATCH, shuffle=True)

    clientbase.Client.load_train_data = loader
    method = args.methods[0]
    server = getattr(importlib.import_module(f"flcore.servers.server{method.lower().removeprefix('fed')}"), method)
    rounds = iter([*federation.cohorts, []])

    class Done(Exception):
        pass

    def own(client: Any) -> Iterable[Tensor]:
        return (client.model_per if method == "Ditto" else client.model.head).parameters()

    class Given(server):  # type: ignore[misc, valid-type]
        def select_clients(self) -> list[Any]:
            chosen = [self.clients[client] for client in next(rounds)]
            if not chosen:
                raise Done
            return chosen

        def evaluate(self, *given: Any, **kwargs: Any) -> None:
            if args.evaluate:
                super().evaluate(*given, **kwargs)

        def evaluate_personalized(self, *given: Any, **kwargs: Any) -> None:
            if args.evaluate:
                super().evaluate_personalized(*given, **kwargs)

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            clock.mark(self.global_model, () if method == "FedAvg" else map(own, self.clients))

    layers = federation.net()
    settings = {
        **dict.fromkeys(("client_drop_rate", "train_slow_rate", "send_slow_rate", "few_shot", "num_new_clients"), 0),
        **dict.fromkeys(("random_join_ratio", "learning_rate_decay", "auto_break", "dlg_eval", "time_select"), False),
        **{"device": "cpu", "dataset": "given", "num_classes": federation.workload.classes, "algorithm": method},
        **{"global_rounds": federation.rounds, "local_epochs": 1, "batch_size": BATCH, "local_learning_rate": LR},
        **{"num_clients": federation.workload.clients, "goal": "", "save_folder_name": ""},
        **{"join_ratio": len(federation.cohorts[0]) / federation.workload.clients, "time_threthold": float("inf")},
        **{"top_cnt": 100, "eval_gap": 1, "dlg_gap": 100, "batch_num_per_client": 2, "fine_tuning_epoch_new": 0},
        **{"learning_rate_decay_gamma": 0.99, "model": BaseHeadSplit(layers[:-1], layers[-1])},
        # the last layer's weight and bias
        **{"plocal_epochs": 1, "mu": LAMBDA, "eta": 1.0, "rand_percent": SHARE_TO_MIX_BY, "layer_idx": 2},
    }
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Done):
        Given(SimpleNamespace(**settings), 0).train()


def flower(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """Flower's simulation with Ray, one CPU a client."""
    from flwr.client import Client, ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.client_manager import SimpleClientManager
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    net = federation.net()

    def load(module: nn.Module, arrays: Any) -> None:
        names = module.state_dict().keys()
        module.load_state_dict(dict(zip(names, map(torch.from_numpy, map(np.array, arrays)), strict=True)))

    class User(NumPyClient):
        def __init__(self, client: int) -> None:
            self.client = client

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            module = federation.workload.net()
            load(module, parameters)
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            x, y = federation.part(config["client"])
            for rows in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
            return [entry.numpy() for entry in module.state_dict().values()], len(y), {}

        def evaluate(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            module = federation.workload.net()
            load(module, parameters)
            part = federation.part(config["client"], held_out=True)
            loss, right = correct(module, part)
            return loss, len(part[1]), {"accuracy": right / len(part[1])}

    def given(asked: Any, clients: Iterable[int]) -> Any:
        pairs = []
        for client, (proxy, instruction) in zip(clients, asked, strict=True):
            instruction = copy.copy(instruction)
            instruction.config = {"client": client}
            pairs.append((proxy, instruction))
        return pairs

    class Given(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: SimpleClientManager) -> Any:
            asked = super().configure_fit(server_round, parameters, client_manager)
            return given(asked, federation.cohorts[server_round - 1])

        def configure_evaluate(self, server_round: int, parameters: Any, client_manager: SimpleClientManager) -> Any:
            asked = super().configure_evaluate(server_round, parameters, client_manager)
            return given(asked, range(len(asked)))

    def evaluate(server_round: int, arrays: Any, config: Any) -> None:
        if server_round:
            load(net, arrays)
            clock.mark(net)

    def server(context: Context) -> ServerAppComponents:
        strategy = Given(
            fraction_fit=1e-9,
            fraction_evaluate=float(args.evaluate),
            min_fit_clients=len(federation.cohorts[0]),
            min_available_clients=nodes,
            initial_parameters=ndarrays_to_parameters([entry.numpy() for entry in net.state_dict().values()]),
            evaluate_fn=evaluate,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=federation.rounds))

    def client(context: Context) -> Client:
        return User(0).to_client()

    nodes = federation.workload.clients if args.evaluate else len(federation.cohorts[0])
    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        num_supernodes=nodes,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


PEERS: dict[str, tuple[str | None, Callable[[Federation, Clock, argparse.Namespace], None], list[str]]] = {
    "plain": (None, plain, ["FedAvg"]),
    "ours": ("pfl_lightning", ours, METHODS),
    "pfl-research": ("pfl", pfl_research, ["FedAvg"]),
    "fluke": ("fluke", fluke, METHODS),
    "pfllib": ("h5py", pfllib, METHODS),
    "flower": ("ray", flower, ["FedAvg"]),
}
"""The module that has to be installed, the run, and the methods, by name."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        peer: the package, of `PEERS`.
        method: the method, of `METHODS`.
        words: further words of its command line.
    """

    peer: str
    method: str
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The row's name: the package, and the engine of ours."""
        return " ".join([self.peer, *(word.removeprefix("--") for word in self.words if word != "--engines")])

    def missing(self, args: argparse.Namespace) -> str | None:
        """Return why it can't run here, or None."""
        needs, _, methods = PEERS[self.peer]
        if self.method not in methods:
            return f"has no {self.method}"
        if self.peer == "pfllib" and args.pfllib is None:
            return "give --pfllib FOLDER, a clone of it"
        return f"{needs} isn't installed" if needs and importlib.util.find_spec(needs) is None else None


def rows(args: argparse.Namespace, method: str) -> list[Row]:
    """Return the rows of a method's table, the plain loop first, and of ours one for each engine."""
    found = [Row("plain", "FedAvg")]
    for peer in args.peers:
        if peer != "ours":
            found.append(Row(peer, method))
            continue
        for engine in args.engines:
            found.append(Row(peer, method, ("--engines", engine)))
            if args.evaluate:
                found.append(Row(peer, method, ("--engines", engine, "--whole")))
    return found


def measured(row: Row, name: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run a row in a process of its own and return its figures."""
    words = [*("--child", row.peer, "--workloads", name, "--rounds", str(args.rounds)), "--folder", str(folder)]
    words += ["--methods", row.method, *row.words, "--share", str(args.share)]
    words += ["--evaluate"] if args.evaluate else []
    words += ["--pfllib", str(args.pfllib.resolve())] if args.pfllib else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    if done.returncode:
        raise SystemExit(f"{row.name} on {name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return figures


def asked(name: str, share: float) -> Workload:
    """Return a workload, with a share of its clients and of a round's."""
    workload = WORKLOADS[name]
    cohort = workload.cohort and max(1, round(share * workload.cohort))
    return replace(workload, clients=max(1, round(share * workload.clients)), cohort=cohort)


def table(name: str, method: str, args: argparse.Namespace) -> None:
    """Print a row for each peer on a workload."""
    share = "" if args.share == 1 else f", {args.share:g} of the clients"
    evaluated = ", with evaluation" if args.evaluate else ""
    print(f"{name}, {method}: {WORKLOADS[name].what}{share}, {args.rounds} rounds{evaluated}")
    print(
        f"  {'':<22} {'CPU a round':>12} {'all runs':>17} {'to plain':>9} {'clock':>9} {'CPU, round 1':>13} "
        f"{'peak MiB':>9} {'moved':>8} {'own':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        Federation.write(asked(name, args.share), Path(folder), args.rounds)
        wanted = rows(args, method)
        runs: dict[Row, list[dict[str, float]]] = {row: [] for row in wanted if not row.missing(args)}
        # In turns: what else the machine does is spread over all peers.
        for _ in range(args.runs):
            for row, done in runs.items():
                done.append(measured(row, name, Path(folder), args))
                print(f"  {row.name:<22} {done[-1]['cpu']:>10.3f} s", file=sys.stderr, flush=True)
    base = statistics.median(run["cpu"] for run in runs[wanted[0]])
    for row in wanted:
        if why := row.missing(args):
            print(f"  {row.name:<22} {why}")
            continue
        figures = {key: statistics.median(run[key] for run in runs[row]) for key in runs[row][0]}
        low, high = (limit(run["cpu"] for run in runs[row]) for limit in (min, max))
        print(
            f"  {row.name:<22} {figures['cpu']:>10.3f} s {low:>7.3f} to {high:>6.3f} {figures['cpu'] / base:>9.2f} "
            f"{figures['wall']:>7.3f} s {figures['start']:>11.1f} s {figures['memory']:>9.0f} "
            f"{figures['moved']:>8.3f} {figures['own']:>8.3f}",
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables, or run one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["ours", "pfl-research", "fluke", "flower"], choices=list(PEERS))
    parser.add_argument("--workloads", nargs="+", default=["W5", "U2"], choices=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=["FedAvg"], choices=METHODS)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each run, at least 3")
    parser.add_argument("--evaluate", action="store_true", help="evaluate all clients in each round")
    parser.add_argument("--share", type=float, default=1.0, help="share of the clients, and of those of a round")
    parser.add_argument("--runs", type=int, default=1, help="runs of each, in turns; the median is printed")
    parser.add_argument("--engines", nargs="+", default=["auto"], help="engines of ours, each in a row of its own")
    parser.add_argument("--pfllib", type=Path, help="folder of a clone of PFLlib")
    parser.add_argument("--child", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rounds < 3:
        parser.error(f"--rounds {args.rounds} must be at least 3: the first two aren't counted")
    if args.child is None:
        for name in args.workloads:
            for method in args.methods:
                table(name, method, args)
        return
    torch.set_num_threads(1)
    federation = Federation(asked(args.workloads[0], args.share), args.folder, args.rounds)
    clock = Clock(federation.net(), args.methods[0])
    PEERS[args.child][1](federation, clock, args)
    (args.folder / "figures.json").write_text(json.dumps(clock.figures()))


if __name__ == "__main__":
    main()
