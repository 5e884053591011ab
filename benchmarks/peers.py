"""CPU seconds of a round of FedAvg in other packages and in this one, each in a process of its own.

    pip install psutil "pfl[pytorch]" fluke-fl "flwr[simulation]"          # those to compare with
    python benchmarks/peers.py [--peers ours pfl-research fluke flower] [--workloads W5 U2] [--rounds 10]
    python benchmarks/peers.py --peers ours pfllib --pfllib FOLDER          # a clone of PFLlib

All get the same samples, the same net and the same clients in each round: one local epoch of SGD at the same rate and
batch size, then the mean of the weights by numbers of samples. Nobody evaluates. CPU seconds are those of the process
and of all its children, by psutil; a plain loop that does the same work in a process of its own is a row of its own.
Seconds of different processes depend on what else the machine does: run it on an idle one, more than once.

``moved`` is the distance of the last weights from the first. Packages draw other orders of the samples, so it agrees to
some percent where they do the same work, and not at all where one of them doesn't.
"""

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


def mlp() -> nn.Module:
    """A perceptron for images of eight by eight pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    """The convolutional net of McMahan et al. (2017) in PFLlib's form, for CIFAR-10: 878,538 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def leaf_cnn() -> nn.Module:
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
        net: makes the net.
        shape: shape of a sample.
        classes: number of classes.
        clients: number of clients.
        sizes: draws the clients' numbers of samples.
        cohort: number of clients per round; None takes all.
    """

    what: str
    net: Callable[[], nn.Module]
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
        self.x = np.load(folder / "x.npy", mmap_mode="r")
        self.y = np.load(folder / "y.npy", mmap_mode="r")
        self.bounds = np.load(folder / "bounds.npy")
        self.cohorts: list[list[int]] = json.loads((folder / "cohorts.json").read_text())[:rounds]

    @staticmethod
    def write(workload: Workload, folder: Path, rounds: int) -> None:
        """Draw samples, sizes and cohorts by a fixed seed and save them."""
        rng = np.random.default_rng(0)
        sizes = workload.sizes(rng, workload.clients)
        np.save(folder / "bounds.npy", np.concatenate([[0], np.cumsum(sizes)]))
        np.save(folder / "x.npy", rng.integers(0, 256, (sizes.sum(), *workload.shape), dtype=np.uint8))
        np.save(folder / "y.npy", rng.integers(0, workload.classes, sizes.sum()))
        size = workload.cohort or workload.clients
        cohorts = [sorted(rng.choice(workload.clients, size, replace=False).tolist()) for _ in range(rounds)]
        (folder / "cohorts.json").write_text(json.dumps(cohorts))

    def part(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's inputs in [-1, 1] and its labels."""
        rows = slice(self.bounds[client], self.bounds[client + 1])
        return torch.from_numpy(np.array(self.x[rows])).float() / 127.5 - 1, torch.from_numpy(np.array(self.y[rows]))

    def net(self) -> nn.Module:
        """Make the net with the first weights, which are the same for all packages."""
        torch.manual_seed(0)
        return self.workload.net()


def of_tree(figure: Callable[[psutil.Process], float]) -> float:
    """Return the sum of a figure over this process and all processes below it."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += figure(process)
    return total


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and of all below it, ended ones included."""
    # the four are own and children's, of user and system; iowait, a fifth on Linux, is waiting
    return of_tree(lambda process: sum(process.cpu_times()[:4]))


class Clock:
    """CPU seconds and seconds of each round, peak memory, and the weights' way.

    Args:
        net: the net with its first weights.
    """

    def __init__(self, net: nn.Module) -> None:
        self.first = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        self.last = self.first
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.start = self.memory = 0.0
        self._begun = (0.0, 0.0)

    def mark(self, net: nn.Module | None = None) -> None:
        """Note the end of a round, and the weights if they are at hand."""
        cpu, wall = cpu_seconds(), time.perf_counter()
        if self.start:
            self.cpu.append(cpu - self._begun[0])
            self.wall.append(wall - self._begun[1])
        self.start = self.start or cpu
        self.memory = max(self.memory, of_tree(lambda process: process.memory_full_info().pss))
        if net is not None:
            self.last = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        # the marks themselves aren't counted
        self._begun = cpu_seconds(), time.perf_counter()

    def figures(self) -> dict[str, float]:
        """Return means over the rounds from the third on, the CPU seconds until the end of the first, and the rest."""
        return {
            "cpu": statistics.mean(self.cpu[1:]),
            "wall": statistics.mean(self.wall[1:]),
            "start": self.start,
            "memory": self.memory / 2**20,
            "moved": (self.last - self.first).norm().item(),
        }


def plain(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """A plain PyTorch loop over resident tensors."""
    net = federation.net()
    weights = {name: entry.clone() for name, entry in net.state_dict().items()}
    parts = {client: federation.part(client) for cohort in federation.cohorts for client in cohort}
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
        clock.mark(net)


def ours(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """This package, with the engine of ``--engine``."""
    from functools import partial

    from lightning.pytorch import Callback, seed_everything

    from pfl_lightning import FederatedTrainer
    from pfl_lightning.data import FederatedDataModule, Loaded, Natural
    from pfl_lightning.methods import FedAvg
    from pfl_lightning.selection import RoundStart, Selection

    class Given(Selection):
        def choose(self, start: RoundStart) -> list[int]:
            return federation.cohorts[start.round]

    class Users(FederatedDataModule):
        num_classes = federation.workload.classes
        input_shape = federation.workload.shape

        def load(self) -> Loaded:
            owners = np.repeat(np.arange(len(federation.bounds) - 1), np.diff(federation.bounds))
            return Loaded(torch.from_numpy(np.array(federation.x)), torch.from_numpy(np.array(federation.y)), owners)

    class Marks(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.mark()

    seed_everything(0, verbose=False)
    first = federation.net().state_dict()
    data = Users(
        num_clients=None,
        partitioner=Natural(),
        batch_size=BATCH,
        test_fraction=0,
        val_fraction=0,
        client_split="random",
    )

    def net(input_shape: Any, num_classes: Any) -> nn.Module:
        module = federation.workload.net()
        module.load_state_dict(first)
        return module

    client = FedAvg(net, Users.input_shape, Users.num_classes, optimizer=partial(torch.optim.SGD, lr=LR))
    trainer = FederatedTrainer(
        max_rounds=federation.rounds,
        clients_per_round=len(federation.cohorts[0]),
        cohort=Given(),
        engine=args.engine,
        callbacks=[Marks()],
        accelerator="cpu",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(client, datamodule=data)
    clock.last = nn.utils.parameters_to_vector(client.net.parameters()).detach().clone()


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
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = federation.net()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
            return {}

    class Marks(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            clock.mark(net)
            return False, Metrics()

    def dataset(user: int) -> Dataset:
        x, y = federation.part(user)
        rows = torch.randperm(len(y))
        return Dataset((x[rows], y[rows]), user_id=str(user))

    users = iter([client for cohort in [*federation.cohorts, federation.cohorts[0]] for client in cohort])
    net = Net()
    algorithm = FederatedAveraging()
    algorithm.run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=federation.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=len(federation.cohorts[0]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=FederatedDataset(dataset, lambda: next(users)),
            val_data=FederatedDataset(dataset, lambda: next(users)),
            postprocessors=[WeightByDatapoints()],
        ),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Marks()],
    )


def fluke(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """FedAvg of fluke."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server
    from fluke.utils import FederationObserver

    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)
    rounds = iter(federation.cohorts)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=LR))

    class Given(Server):
        def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
            return [self.clients[client] for client in next(rounds)]

    class Marks(FederationObserver):
        def end_round(self, round: int) -> None:
            clock.mark(server.model)

    def loader(client: int) -> FastDataLoader:
        return FastDataLoader(
            *federation.part(client),
            num_labels=federation.workload.classes,
            batch_size=BATCH,
            shuffle=True,
            skip_singleton=False,
        )

    clients = [
        Client(index, loader(index), None, optimizer, nn.CrossEntropyLoss(), local_epochs=1, persistency=False)
        for index in range(federation.workload.clients)
    ]
    server = Given(federation.net(), None, clients, weighted=True)
    run = FedAVG(len(clients), None, {}, clients=clients, server=server)
    run.set_callbacks([Marks()])
    share = len(federation.cohorts[0]) / len(clients)
    with contextlib.redirect_stdout(sys.stderr):
        run.run(federation.rounds, share, finalize=False)


def pfllib(federation: Federation, clock: Clock, args: argparse.Namespace) -> None:
    """PFLlib's FedAvg from the clone ``--pfllib``, with samples in memory and short last batches, which it drops."""
    sys.path.insert(0, str(args.pfllib / "system"))
    os.chdir(args.pfllib / "system")
    from flcore.clients import clientbase
    from flcore.servers import serverbase
    from flcore.servers.serveravg import FedAvg

    def read(dataset: str, client: int, is_train: bool = True, few_shot: int = 0) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*federation.part(client), strict=True)) if is_train else []

    def loader(self: Any, batch_size: int | None = None) -> Any:
        if self.id not in parts:
            parts[self.id] = read("", self.id)
        return torch.utils.data.DataLoader(parts[self.id], BATCH, shuffle=True)

    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    clientbase.read_client_data = serverbase.read_client_data = read
    clientbase.Client.load_train_data = loader
    rounds = iter([*federation.cohorts, []])

    class Done(Exception):
        pass

    class Given(FedAvg):
        def select_clients(self) -> list[Any]:
            chosen = [self.clients[client] for client in next(rounds)]
            if not chosen:
                raise Done
            return chosen

        def evaluate(self, *args: Any, **kwargs: Any) -> None:
            pass

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            clock.mark(self.global_model)

    settings = {
        **dict.fromkeys(("client_drop_rate", "train_slow_rate", "send_slow_rate", "few_shot", "num_new_clients"), 0),
        **dict.fromkeys(("random_join_ratio", "learning_rate_decay", "auto_break", "dlg_eval", "time_select"), False),
        **{"device": "cpu", "dataset": "given", "num_classes": federation.workload.classes, "algorithm": "FedAvg"},
        **{"global_rounds": federation.rounds, "local_epochs": 1, "batch_size": BATCH, "local_learning_rate": LR},
        **{"model": federation.net(), "num_clients": federation.workload.clients, "goal": "", "save_folder_name": ""},
        **{"join_ratio": len(federation.cohorts[0]) / federation.workload.clients, "time_threthold": float("inf")},
        **{"top_cnt": 100, "eval_gap": 1, "dlg_gap": 100, "batch_num_per_client": 2, "fine_tuning_epoch_new": 0},
        "learning_rate_decay_gamma": 0.99,
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

    class Given(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: SimpleClientManager) -> Any:
            asked = super().configure_fit(server_round, parameters, client_manager)
            cohort = federation.cohorts[server_round - 1]
            given = []
            for client, (proxy, instruction) in zip(cohort, asked, strict=True):
                instruction = copy.copy(instruction)
                instruction.config = {"client": client}
                given.append((proxy, instruction))
            return given

    def evaluate(server_round: int, arrays: Any, config: Any) -> None:
        if server_round:
            load(net, arrays)
            clock.mark(net)

    def server(context: Context) -> ServerAppComponents:
        size = len(federation.cohorts[0])
        strategy = Given(
            fraction_fit=1e-9,
            fraction_evaluate=0.0,
            min_fit_clients=size,
            min_available_clients=size,
            initial_parameters=ndarrays_to_parameters([entry.numpy() for entry in net.state_dict().values()]),
            evaluate_fn=evaluate,
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=federation.rounds))

    def client(context: Context) -> Client:
        return User(0).to_client()

    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        num_supernodes=len(federation.cohorts[0]),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


PEERS: dict[str, tuple[str | None, Callable[[Federation, Clock, argparse.Namespace], None]]] = {
    "plain": (None, plain),
    "ours": ("pfl_lightning", ours),
    "pfl-research": ("pfl", pfl_research),
    "fluke": ("fluke", fluke),
    "pfllib": (None, pfllib),
    "flower": ("ray", flower),
}
"""The module that has to be installed, and the run, by name."""


def missing(peer: str, args: argparse.Namespace) -> str | None:
    """Return why a peer can't run here, or None."""
    if peer == "pfllib" and args.pfllib is None:
        return "give --pfllib FOLDER, a clone of it"
    needs = PEERS[peer][0]
    return f"{needs} isn't installed" if needs and importlib.util.find_spec(needs) is None else None


def measured(peer: str, name: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run a peer in a process of its own and return its figures."""
    words = [*("--child", peer, "--workloads", name, "--rounds", str(args.rounds)), "--folder", str(folder)]
    words += ["--engine", args.engine, "--share", str(args.share)]
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
        raise SystemExit(f"{peer} on {name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return figures


def asked(name: str, share: float) -> Workload:
    """Return a workload, with a share of its clients and of a round's."""
    workload = WORKLOADS[name]
    cohort = workload.cohort and max(1, round(share * workload.cohort))
    return replace(workload, clients=max(1, round(share * workload.clients)), cohort=cohort)


def table(args: argparse.Namespace) -> None:
    """Print a row for each peer on each workload."""
    for name in args.workloads:
        share = "" if args.share == 1 else f", {args.share:g} of the clients"
        print(f"{name}: {WORKLOADS[name].what}{share}, {args.rounds} rounds")
        print(
            f"  {'':<14} {'CPU a round':>12} {'all runs':>17} {'to plain':>9} {'clock':>9} {'CPU, round 1':>13} "
            f"{'peak MiB':>9} {'moved':>8}"
        )
        with tempfile.TemporaryDirectory() as folder:
            Federation.write(asked(name, args.share), Path(folder), args.rounds)
            here = [peer for peer in ["plain", *args.peers] if not missing(peer, args)]
            runs: dict[str, list[dict[str, float]]] = {peer: [] for peer in here}
            # In turns: what else the machine does is spread over all peers.
            for _ in range(args.runs):
                for peer in here:
                    runs[peer].append(measured(peer, name, Path(folder), args))
                    print(f"  {peer:<14} {runs[peer][-1]['cpu']:>10.3f} s", file=sys.stderr, flush=True)
            base = statistics.median(run["cpu"] for run in runs["plain"])
            for peer in ["plain", *args.peers]:
                if why := missing(peer, args):
                    print(f"  {peer:<14} {why}")
                    continue
                figures = {key: statistics.median(run[key] for run in runs[peer]) for key in runs[peer][0]}
                low, high = (limit(run["cpu"] for run in runs[peer]) for limit in (min, max))
                print(
                    f"  {peer:<14} {figures['cpu']:>10.3f} s {low:>7.3f} to {high:>6.3f} {figures['cpu'] / base:>9.2f} "
                    f"{figures['wall']:>7.3f} s {figures['start']:>11.1f} s {figures['memory']:>9.0f} "
                    f"{figures['moved']:>8.3f}",
                    flush=True,
                )


def main() -> None:
    """Print the table, or run one peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["ours", "pfl-research", "fluke", "flower"], choices=list(PEERS))
    parser.add_argument("--workloads", nargs="+", default=["W5", "U2"], choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each run, at least 3")
    parser.add_argument("--share", type=float, default=1.0, help="share of the clients, and of those of a round")
    parser.add_argument("--runs", type=int, default=1, help="runs of each, in turns; the median is printed")
    parser.add_argument("--engine", default="auto", help="engine of ours")
    parser.add_argument("--pfllib", type=Path, help="folder of a clone of PFLlib")
    parser.add_argument("--child", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds {args.rounds} must be at least 3: the first two aren't counted")
    if args.child is None:
        table(args)
        return
    torch.set_num_threads(1)
    federation = Federation(asked(args.workloads[0], args.share), args.folder, args.rounds)
    clock = Clock(federation.net())
    PEERS[args.child][1](federation, clock, args)
    (args.folder / "figures.json").write_text(json.dumps(clock.figures()))


if __name__ == "__main__":
    main()
