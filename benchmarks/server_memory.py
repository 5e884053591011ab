"""Peak memory of a deployment's server with large nets, in models; sites are made-up answers in the same process.

    python benchmarks/server_memory.py [--sites 10] [--megabytes 100] [--rounds 2]

FedAvg. The peak is of the process's own memory (``RssAnon``), above what it had before the net was made; mapped files
don't count, as the system takes their memory back where it needs it. A site's message is made when the server asks for
it, and counts from then on, as one from the network does.
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn
from torch.optim import SGD

from pfl_lightning import FederatedTrainer
from pfl_lightning.data import TensorData
from pfl_lightning.flower import remote
from pfl_lightning.flower.link import VERSION, initial_of
from pfl_lightning.flower.server_app import serve
from pfl_lightning.flower.wire import RECORD, STYPE, TENSORS, pack, unpack
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.tasks import Classification

MIB = 2**20
INPUTS = 1000


class MadeUp(Grid):
    """Sites with one client each, which all send back the same trained model.

    Args:
        model: the client module.
        sites: number of sites.
        folder: where the trained model is, until a message has it.
    """

    def __init__(self, model: FedAvg, sites: int, folder: Path) -> None:
        self.sites, self.initial = sites, initial_of(model.architectures())
        self.file = folder / "update"
        weights = {name: torch.rand(tensor.shape) for name, tensor in model.state_dict().items()}
        content = pack({"update": {"weights": weights, "num_samples": torch.tensor(10)}})
        self.tree = content[RECORD + "update"]
        self.file.write_bytes(content[TENSORS][TENSORS].data)
        self._asked: dict[str, tuple[Message, dict[int, Any]]] = {}
        # whoever makes messages is a task to Flower
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

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
        """Keep what is asked, without the model, which is now another machine's."""
        names = []
        for message in messages:
            name, told = str(time.monotonic_ns()), message.metadata
            jobs = unpack(message.content, "jobs") if RECORD + "jobs" in message.content else {}
            asked = Message(pack({}), dst_node_id=told.dst_node_id, message_type=told.message_type, ttl=told.ttl)
            vars(asked.metadata)["_message_id"] = name
            self._asked[name] = asked, jobs
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answers to the given messages."""
        return [Message(self._answer(*self._asked[name]), reply_to=self._asked.pop(name)[0]) for name in message_ids]

    def _answer(self, asked: Message, jobs: dict[int, Any]) -> RecordDict:
        """A greeting, or what a client has trained."""
        if not jobs:
            greeting = {"version": VERSION, "initial": self.initial, "inputs": "", "secret": ""}
            clients = {asked.metadata.dst_node_id - 1: {"train": 10, "val": 0, "test": 0}}
            return pack({"hello": {**greeting, "clients": clients, "new": {}}})
        ((client, job),) = jobs.items()
        answer = {"round": job["round"], "kept": "", "finite": True, "seconds": 0.0, "metrics": {}, "after": {}}
        content = pack({f"{client}/answer": answer})
        data = self.file.read_bytes()
        content[RECORD + f"{client}/update"] = self.tree
        content[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(data),), STYPE, data)})
        return content


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
        remote.LARGE = sys.maxsize
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

    # ten layers of one size, as no net is one tensor
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, INPUTS), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(INPUTS, 2))
    model = FedAvg(net, (INPUTS,), 2, optimizer=lambda parameters: SGD(parameters, lr=0.1))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with TemporaryDirectory(dir=own.folder) as folder:
        grid = MadeUp(model, own.sites, Path(folder))
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
