"""A small federation of each task, and nets for it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from federations import fitting
from pfl_lightning import FederatedTrainer
from pfl_lightning.callbacks import RoundLogger
from pfl_lightning.client import ClientModule
from pfl_lightning.data import IID, FederatedDataModule
from pfl_lightning.methods.registry import Method
from pfl_lightning.nets import Autoencoder, Net
from pfl_lightning.tasks import (
    Classification,
    MultiLabel,
    NextToken,
    Reconstruction,
    Regression,
    Segmentation,
    Survival,
    Task,
)


@dataclass(frozen=True)
class Kind:
    """A task with samples and a net for it.

    Args:
        task: the task.
        x: inputs.
        y: targets.
        net: builds the net.
        rate: learning rate that its clients learn with.
    """

    task: Task
    x: Tensor
    y: Tensor
    net: Any
    rate: float = 0.1


class OfKind(FederatedDataModule):
    """Four clients that hold samples of a kind, and a server that holds some too."""

    def __init__(self, kind: Kind, **settings: Any) -> None:
        self.kind = kind
        self.input_shape = tuple(kind.x.shape[1:])
        self.num_classes = kind.task.outputs
        own = {"num_clients": 4, "partitioner": IID(), "batch_size": 8, "test_fraction": 0.25, "val_fraction": 0.2}
        super().__init__(**own | settings)

    @property
    def task(self) -> Task:
        return self.kind.task

    def load(self) -> tuple[Tensor, Tensor]:
        return self.kind.x, self.kind.y


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flat(outputs_of: int, input_shape: tuple[int, ...], outputs: int) -> Net:
    """A net of one hidden layer."""
    features = nn.Sequential(nn.Linear(input_shape[0], outputs_of), nn.Tanh())
    return Net(features, nn.Linear(outputs_of, outputs))


def pixelwise(input_shape: tuple[int, ...], outputs: int) -> Net:
    """Convolutions that leave an image its size."""
    return Net(nn.Sequential(nn.Conv2d(input_shape[0], 4, 3, padding=1), nn.Tanh()), nn.Conv2d(4, outputs, 1))


def positionwise(input_shape: tuple[int, ...], outputs: int) -> Net:
    """An embedding and a layer at each position."""
    return Net(nn.Sequential(nn.Embedding(outputs, 6), nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, outputs))


def labels(*shape: int, classes: int, seed: int = 1) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def kinds() -> dict[str, Kind]:
    """Each task by its name, with targets that depend on the inputs."""
    x = drawn(160, 5)
    images = drawn(80, 1, 6, 6)
    masks = (images[:, 0] > 0).long() + (images[:, 0] > 1).long()
    masks[:, 0, 0] = -100
    texts = labels(96, 8, classes=7)
    following = (texts + 1) % 7
    following[::3, -1] = -100
    net = partial(flat, 8)
    # earlier for a larger first input; a third is censored, and some share a time
    times = torch.stack([(3 - x[:, 0]).clamp(min=0.1).round(decimals=1), (torch.arange(160) % 3 > 0).float()], 1)
    stripes = (drawn(80, 1, 6, 1) + drawn(80, 1, 1, 6, seed=1)).tanh()
    return {
        "Classification": Kind(Classification(3), x, x[:, :3].argmax(1), net),
        "Regression": Kind(Regression(), x, x[:, :1] * 2 + x[:, 1:2] ** 2, net, 0.05),
        "MultiLabel": Kind(MultiLabel(4), x, (x[:, :4] > 0.3).long(), net),
        "Segmentation": Kind(Segmentation(3), images, masks, pixelwise),
        "NextToken": Kind(NextToken(7), texts, following, positionwise),
        "Survival": Kind(Survival(), x, times, net),
        # stripes of a random direction, so that few numbers tell a whole image
        "Reconstruction": Kind(Reconstruction(), stripes, stripes, partial(Autoencoder, width=4, code=5, levels=1)),
    }


def client_of(kind: Kind, method: type[ClientModule], **settings: Any) -> ClientModule:
    """A client module for a kind, always with the same first weights."""
    torch.manual_seed(0)
    shape = tuple(kind.x.shape[1:])
    return method(
        net=fitting(method, kind.net),
        input_shape=shape,
        task=kind.task,
        optimizer=partial(SGD, lr=kind.rate),
        **settings,
    )


def after_a_round(method: Method, kind: Kind, engine: str) -> list[float]:
    """The clients' metrics after a round of a method."""
    record = RoundLogger()
    trainer = FederatedTrainer(
        max_rounds=1,
        engine=engine,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        callbacks=[record],
    )
    data = OfKind(kind, central_test=0.2, server_fraction=0.3)
    trainer.fit(client_of(kind, method.client), datamodule=data, aggregator=method.new_aggregator())
    return [value for row in record.clients for name, value in row.items() if name.startswith("test/")]
