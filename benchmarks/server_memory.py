"""Peak memory of a deployment's server with large nets, in models; sites are made-up answers in the same process.

    python benchmarks/server_memory.py [--sites 10] [--megabytes 100] [--rounds 2]

FedAvg. The peak is of the process's own memory (``RssAnon``), above what it had before the net was made; mapped files
don't count, as the system takes their memory back where it needs it. Messages go through Flower's own division into
objects, as over the network: the server's are held whole and as objects, and a site's come as objects, which are read
from a file when the server asks for them.
"""

import argparse
import sys
import threading
from collections.abc import Iterable
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import TensorData
from pfl_lightning.flower import remote, wire
from pfl_lightning.flower.link import VERSION, initial_of
from pfl_lightning.flower.server_app import serve
from pfl_lightning.flower.wire import RECORD, pack, unpack
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.tasks import Classification

MIB = 2**20
INPUTS = 1000
ANSWER = {"kept": "", "finite": True, "seconds": 0.0, "metrics": {}, "after": {}}
"""A site's answer about a client, without the round."""


class MadeUp(Grid):
    """Sites with one client each, which all send back the same trained model, from a process of their own.

    Args:
        model: the client module.
        sites: number of sites.
    """

    def __init__(self, model: FedAvg, sites: int) -> None:
        self.sites = sites
        self._asked: dict[str, tuple[int, str, dict[int, int]]] = {}
        # whoever makes messages is a task to Flower
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self._line, there = Pipe()
        Process(target=answer, args=(there, model), daemon=True).start()

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    @property
    def run(self) -> Any:
        """Nothing."""

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Never called."""
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """All sites."""
        return list(range(1, self.sites + 1))

    def get_nodes(self) -> list[NodeInfo]:
        """All sites."""
        return [NodeInfo(node_id=node, public_key=b"") for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Make objects of all messages, as for the network, and keep what is asked."""
        names = []
        for message in messages:
            name, told = message.object_id, message.metadata
            jobs = unpack(message.content, "jobs") if RECORD + "jobs" in message.content else {}
            self._asked[name] = told.dst_node_id, told.message_type, {k: job["round"] for k, job in jobs.items()}
            objects = get_all_nested_objects(message)
            del message
            # Flower makes all of them before the last one is sent
            sent = [objects.pop(part).deflate() for part in list(objects)]
            names.append(name)
            del sent
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answers to the given messages."""
        replies = []
        for name in message_ids:
            self._line.send((name, *self._asked.pop(name)))
            parts = {}
            while part := self._line.recv():
                parts[part] = self._line.recv_bytes()
            # the message itself comes last
            replies.append(cast(Message, inflate_object_from_contents(list(parts)[-1], parts)))
        return replies


def answer(line: Connection, model: FedAvg) -> None:
    """Send the objects of sites' messages: a greeting, or what a client has trained."""
    initial = initial_of(model.architectures())
    weights = {name: torch.rand(tensor.shape) for name, tensor in model.state_dict().items()}
    while True:
        name, node, kind, rounds = line.recv()
        asked = Message(pack({}), dst_node_id=node, message_type=kind, ttl=60.0)
        vars(asked.metadata)["_message_id"] = name
        records: dict[str, Any] = {}
        for client, round in rounds.items():
            records[f"{client}/answer"] = {"round": round, **ANSWER}
            records[f"{client}/update"] = {"weights": weights, "num_samples": torch.tensor(10)}
        if not rounds:
            clients = {node - 1: {"train": 10, "val": 0, "test": 0}}
            greeting = {"version": VERSION, "initial": initial, "inputs": "", "secret": ""}
            records["hello"] = {**greeting, "clients": clients, "new": {}}
        for part, parts in get_all_nested_objects(Message(pack(records), reply_to=asked)).items():
            line.send(part)
            line.send_bytes(parts.deflate())
        line.send("")


def own_memory() -> int:
    """Bytes of this process's memory that no file stands for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    """Print the peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hold", action="store_true", help="hold all updates in memory")
    parser.add_argument("--folder", type=Path, help="for files, on a disk; the system's temporary folder by default")
    own = parser.parse_args()
    if own.hold:
        remote.LARGE = wire.LARGE = sys.maxsize
    width = own.megabytes * 10**6 // 4 // INPUTS // 10
    data = TensorData(
        torch.zeros(20, INPUTS), torch.arange(20) % 2, Classification(num_classes=2), num_clients=own.sites
    )
    base = peak = own_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, own_memory())

    def net(shape: tuple[int, ...], classes: int) -> nn.Module:
        # ten layers of one size, as no net is one tensor
        layers: list[nn.Module] = []
        for _ in range(5):
            layers += [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, INPUTS), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(INPUTS, classes))

    model = FedAvg(net, (INPUTS,), 2, optimizer=lambda parameters: SGD(parameters, lr=0.1))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with TemporaryDirectory(dir=own.folder) as folder:
        grid = MadeUp(model, own.sites)
        trainer = FederatedTrainer(
            max_rounds=own.rounds,
            limit_val_batches=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=folder,
        )
        threading.Thread(target=watch, daemon=True).start()
        federation = serve(grid, trainer, model, data, timeout=60.0, patience=10.0, poll=0.01)
        done.set()
    took = int(federation.metrics.get("clients", 0))
    print(f"{own.sites} sites, {took} updates, {size / MIB:.0f} MiB a model: {(peak - base) / size:.1f} models at most")


if __name__ == "__main__":
    main()
