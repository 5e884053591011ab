"""What a client sends and receives in a round: bytes of the real updates and payloads, beside FedClassAvg's paper.

    python benchmarks/communication.py

10 classes of 32x32 colour images. FedAvg, FedClassAvg, FedProto and FedDistill with ResNet-18 that ends in 512 features
and a classifier of 512 x 10; KT-pFL with 3,000 public images, for which the network makes no difference. Payloads are
those of a second round: in the first there is nothing to be taught yet. Bytes are of tensors alone, files are made by
torch.save; MB and KB are the paper's, in steps of 1024. The paper gives one direction of each method: the model or the
classifier that is sent, and what KT-pFL's clients receive. It rounds the classifier's file to 22 KB, of which some
hundred bytes depend on torch's version.
"""

import io
from typing import Literal

import torch
from torch import Tensor

from pfl_lightning import Server
from pfl_lightning.data import IID, FederatedDataModule
from pfl_lightning.messages import Message, detached, num_bytes
from pfl_lightning.methods import FedDistill, FedProto
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.kt_pfl import KnowledgeTransfer
from pfl_lightning.nets import MLP, NetFactory, ResNet18Features

METHODS: dict[str, tuple[type[FedAvg], NetFactory]] = {
    "FedAvg": (FedAvg, ResNet18Features),
    "KT-pFL": (KnowledgeTransfer, MLP),
    "FedClassAvg": (FedClassAvg, ResNet18Features),
    "FedProto": (FedProto, ResNet18Features),
    "FedDistill": (FedDistill, ResNet18Features),
}
REPORTED: dict[str, tuple[Literal["up", "down"], str]] = {
    "FedAvg": ("up", "43.73 MB"),
    "KT-pFL": ("down", "8.90 MB"),
    "FedClassAvg": ("up", "22 KB"),
}
UNITS = {"MB": 2**20, "KB": 2**10}


class Noise(FederatedDataModule):
    """Random images: what they show makes no difference to sizes."""

    num_classes = 10
    input_shape = (3, 32, 32)

    def load(self) -> tuple[Tensor, Tensor]:
        """Draws the pool."""
        return torch.randint(0, 256, (3000, *self.input_shape), dtype=torch.uint8), torch.arange(3000) % 10


def exchange(make: type[FedAvg], net: NetFactory) -> tuple[Message, Message]:
    """A client's update, and its payload of the round after that; without training, which changes no size.

    Args:
        make: the client module's class.
        net: the network.
    """
    torch.manual_seed(0)
    data = Noise(num_clients=2, partitioner=IID(), test_fraction=0, val_fraction=0, max_samples=200, public=Noise())
    data.setup()
    client = make(net=net, input_shape=data.input_shape, num_classes=data.num_classes).eval()
    aggregator = client.configure_aggregator()
    client.requested = client.offers & aggregator.needs
    shared = {name: tensor for name, tensor in detached(client.state_dict()).items() if client.is_shared(name)}
    aggregator.setup(Server(data.num_clients, shared, client, data, seed=0))
    with torch.no_grad():
        client.on_download(aggregator.download(0), data.client(0))
        update = detached(client.upload(data.client(0)))
    aggregator.aggregate({0: update, 1: update}, round=0)
    return update, aggregator.download(0)


def file_size(record: Message) -> int:
    """Bytes of the file that `torch.save` makes."""
    buffer = io.BytesIO()
    torch.save(record, buffer)
    return buffer.tell()


def in_bytes(reported: str) -> float:
    """Bytes of a size as the paper writes it."""
    number, unit = reported.split()
    return float(number) * UNITS[unit]


def shown(count: int) -> str:
    """A size as the paper writes it."""
    unit = "MB" if count >= UNITS["MB"] else "KB"
    return f"{count / UNITS[unit]:.2f} {unit}"


def main() -> None:
    """Prints the table."""
    print(
        f"{'':12}{'up, bytes':>14}{'down, bytes':>14}{'up, file':>12}{'down, file':>12}{'paper':>16}{'deviation':>12}"
    )
    for name, (make, net) in METHODS.items():
        up, down = exchange(make, net)
        files = {"up": file_size(up), "down": file_size(down)}
        row = f"{name:12}{num_bytes(up):14,}{num_bytes(down):14,}{shown(files['up']):>12}{shown(files['down']):>12}"
        if name in REPORTED:
            way, reported = REPORTED[name]
            row += f"{f'{reported}, {way}':>16}{files[way] / in_bytes(reported) - 1:>+12.2%}"
        print(row)


if __name__ == "__main__":
    main()
