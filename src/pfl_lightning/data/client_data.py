"""The data that one federated client holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Split = Literal["train", "val", "test"]
"""The part of a client's samples that is meant."""

CHUNK = 1024
"""Samples that go through a net at once where it doesn't learn from them."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Samples:
    """One part (train, val or test) of one client's samples.

    Args:
        x: Inputs as the net takes them, shape [n, ...], usually float and normalised.
        y: Class labels, shape [n], int64 in [0, num_classes).
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def chunks(self, size: int = CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and labels of so many samples at a time, in their order.

        >>> samples = Samples(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 2]))
        >>> [y.tolist() for x, y in samples.chunks(2)]
        [[0, 1], [2]]

        Args:
            size: samples per chunk; the last one may have fewer.
        """
        return zip(torch.split(self.x, size), torch.split(self.y, size), strict=True)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Samples:
        """Return the same samples on another device; nothing is copied if they are there already.

        Args:
            device: Where to put the tensors.
            dtype: Floating type of the inputs; None, and inputs that are integers, keep theirs.
        """
        x, y = self.x.to(device, dtype if self.x.is_floating_point() else None), self.y.to(device)
        return self if x is self.x and y is self.y else Samples(x, y)


class Source(Protocol):
    """Where clients' samples come from: a `FederatedDataModule`."""

    num_classes: int

    def parts(self, clients: Sequence[int], stage: Split, device: torch.device | str = ...) -> list[Samples]:
        """One part of each client."""

    def size(self, client: int, stage: Split) -> int:
        """Number of samples in one part of one client."""


class ClientData:
    """The three disjoint parts of one client, each made when it is first asked for.

    Args:
        source: gives the parts of clients.
        client: Client id.
        device: Where the parts shall be.
        dtype: Floating type of their inputs; None keeps it.
    """

    def __init__(
        self, source: Source, client: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.source = source
        self.client = client
        self.num_classes = source.num_classes
        self._place = (device, dtype)

    @cached_property
    def train(self) -> Samples:
        """Samples to train on, never empty."""
        return self.part("train")

    @cached_property
    def val(self) -> Samples:
        """Samples to select on; empty when the data module's ``val_fraction`` is 0."""
        return self.part("val")

    @cached_property
    def test(self) -> Samples:
        """Samples to report on; empty when the data module's ``test_fraction`` is 0."""
        return self.part("test")

    def part(self, stage: Split) -> Samples:
        """One part by its name, gathered anew.

        Args:
            stage: Which part.
        """
        (part,) = self.source.parts([self.client], stage, self._place[0])
        return part.to(*self._place)

    def size(self, stage: Split) -> int:
        """Number of samples in a part, which needn't be gathered for it."""
        return self.source.size(self.client, stage)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClientData:
        """Return the same client on another device.

        Args:
            device: Where its parts shall be.
            dtype: Floating type of their inputs; None keeps it.
        """
        return ClientData(self.source, self.client, device, dtype)

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class, n_ij, shape [num_classes], int64."""
        return torch.bincount(self.train.y, minlength=self.num_classes)


def gather(clients: Sequence[ClientData], stage: Split) -> list[Samples]:
    """Return the same part of several clients, gathered at once where all of them come from one source.

    Each client keeps its part, as if it had been asked for it.

    Args:
        clients: The clients, all on one device.
        stage: Which part.
    """
    groups: dict[Any, list[ClientData]] = {}
    for client in clients:
        if stage not in vars(client):
            groups.setdefault((id(client.source), *client._place), []).append(client)
    for (_, device, dtype), group in groups.items():
        parts = group[0].source.parts([client.client for client in group], stage, device)
        for client, part in zip(group, parts, strict=True):
            # where `cached_property` looks first
            vars(client)[stage] = part.to(device, dtype)
    return [getattr(client, stage) for client in clients]
