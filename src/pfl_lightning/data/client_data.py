"""The data that one federated client holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Stage = Literal["train", "val", "test"]
"""The part of a client's samples that is meant."""


# eq=False: comparing tensors gives a tensor, so a generated __eq__ would raise
@dataclass(frozen=True, eq=False)
class Part:
    """One part (train, val or test) of one client's samples.

    Args:
        x: Inputs as the net takes them, shape [n, ...], usually float and normalised.
        y: Class labels, shape [n], int64 in [0, num_classes).
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Part:
        """Return the same samples on another device; nothing is copied if they are there already.

        Args:
            device: Where to put the tensors.
            dtype: Floating type of the inputs; None, and inputs that are integers, keep theirs.
        """
        floating = self.x.is_floating_point()
        return Part(self.x.to(device, dtype if floating else None), self.y.to(device))


class ClientData:
    """The three disjoint parts of one client, each made when it is first asked for.

    Args:
        gather: gives a part by its name.
        num_classes: Number of classes in the whole federation, not only at this client.
        device: Where the parts shall be.
        dtype: Floating type of their inputs; None keeps it.
    """

    def __init__(
        self,
        gather: Callable[[Stage], Part],
        num_classes: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._gather = gather
        self.num_classes = num_classes
        self._place = (device, dtype)

    @cached_property
    def train(self) -> Part:
        """Samples to train on, never empty."""
        return self.part("train")

    @cached_property
    def val(self) -> Part:
        """Samples to select on; empty when the data module's ``val_fraction`` is 0."""
        return self.part("val")

    @cached_property
    def test(self) -> Part:
        """Samples to report on; empty when the data module's ``test_fraction`` is 0."""
        return self.part("test")

    def part(self, stage: Stage) -> Part:
        """One part by its name, gathered anew.

        Args:
            stage: Which part.
        """
        return self._gather(stage).to(*self._place)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> ClientData:
        """Return the same client on another device.

        Args:
            device: Where its parts shall be.
            dtype: Floating type of their inputs; None keeps it.
        """
        return ClientData(self._gather, self.num_classes, device, dtype)

    @property
    def class_counts(self) -> Tensor:
        """Number of training samples of each class, n_ij, shape [num_classes], int64."""
        return torch.bincount(self.train.y, minlength=self.num_classes)
