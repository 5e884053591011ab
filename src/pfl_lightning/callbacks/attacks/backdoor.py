"""A backdoor: a patch in the corner of an image that stands for a class."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pfl_lightning.callbacks.attacks.samples import SampleAttack, check_class
from pfl_lightning.data import ClientData, Samples, Split
from pfl_lightning.engines import Job
from pfl_lightning.federation.federation import Federation
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Task


class Backdoor(SampleAttack):
    """Trains on images of which some have a patch in a corner and the class that it shall stand for.

    The record gets ``attack/success`` with each validation: of the benign clients' test images of other classes, the
    share that their models take for the target once they have the patch, over all such images. It is of the models that
    clients receive.

    Args:
        fraction: as for `Attack`.
        target: the class that the patch stands for, from 0.
        share: of a bad client's training images, how many have it, above 0 and up to 1, rounded up.
        patch: its height and width in pixels, at least 1, in the corner where rows and columns end.
        value: what its pixels are, as the net gets them.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(
        self, fraction: float, target: int = 0, share: float = 0.5, patch: int = 2, value: float = 1.0
    ) -> None:
        super().__init__(fraction)
        if not 0 < share <= 1 or patch < 1:
            raise MisconfigurationException(
                f"Backdoor: share={share} must be above 0 and up to 1, such as 0.5, and patch={patch} at least 1, such "
                "as 2."
            )
        self.target, self.share, self.patch, self.value = target, share, patch, value

    def check(self, federation: Federation) -> None:
        """Refuses what aren't images, and classes that there aren't."""
        super().check(federation)
        check_class(self, "target", self.target, federation)
        if (shape := federation.data.input_shape) is None or len(shape) != 3 or min(shape[1:]) < self.patch:
            raise MisconfigurationException(
                f"trainer.callbacks: Backdoor puts a patch of {self.patch} x {self.patch} pixels on images, and inputs "
                f"have the shape {shape}; take LabelFlip, or larger images."
            )

    def poisoned(self, samples: Samples, client: int, federation: Federation) -> Samples:
        """Some images with the patch, as the target."""
        y = cast(Tensor, samples.y)
        seed = derive_seed(cast(int, federation.seed), "backdoor", client)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
        chosen = torch.zeros_like(y, dtype=torch.bool)
        # 0.1 of 30 is a little more than 3 in floating point
        chosen[order[: math.ceil(self.share * len(y) - 1e-9)]] = True
        x = cast(Tensor, samples.x)
        return Samples(
            torch.where(chosen[:, None, None, None], self.patched(x), x), torch.where(chosen, self.target, y)
        )

    def patched(self, x: Tensor) -> Tensor:
        """Images with the patch.

        Args:
            x: ``[n, C, H, W]``.
        """
        x = x.clone()
        x[..., -self.patch :, -self.patch :] = self.value
        return x

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures how often it succeeds."""
        federation = cast(Federation, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            federation.metrics["attack/success"] = self.success(federation)

    def success(self, federation: Federation) -> float:
        """The share of benign clients' test images of other classes that the patch makes the target; NaN of none."""
        source = Triggered(federation, self)
        clients = [c for c in sorted(federation.evaluations.groups["benign"]) if source.size(c, "test")]

        def job_of(client: int, splits: tuple[Split, ...]) -> Job:
            return federation.job(client, splits)._replace(data=ClientData(source, client))

        measured = federation.evaluations.measure(clients, ("test",), job_of)
        sizes = {client: source.size(client, "test") for client in measured}
        hits = sum(sizes[client] * splits["test"]["acc"] for client, splits in measured.items())
        return hits / total if (total := sum(sizes.values())) else float("nan")


class Triggered:
    """Clients' test images of other classes than the target, with the patch and as the target; the rest is as it is.

    Args:
        federation: whose clients these are.
        attack: has the patch.
    """

    def __init__(self, federation: Federation, attack: Backdoor) -> None:
        self._data, self._attack = federation.data, attack

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self._data.task

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """One split of each client."""
        found = self._data.parts(clients, split, device)
        return [self._changed(samples) for samples in found] if split == "test" else found

    def _changed(self, samples: Samples) -> Samples:
        x, y = cast(Tensor, samples.x), cast(Tensor, samples.y)
        others = y != self._attack.target
        return Samples(self._attack.patched(x[others]), torch.full_like(y[others], self._attack.target))

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(samples) for samples in self.parts(range(self._data.num_clients), "test")]

    def size(self, client: int, split: Split) -> int:
        """Number of samples in one split of one client."""
        return self._sizes[client] if split == "test" else self._data.size(client, split)
