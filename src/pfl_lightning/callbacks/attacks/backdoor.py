"""A backdoor attack: a patch in the corner of an image as a trigger for a class."""

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
from pfl_lightning.engines import ClientMetrics, Job
from pfl_lightning.engines.client_metrics import by_split
from pfl_lightning.federation.federation import Federation
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import Task


class Backdoor(SampleAttack):
    """Train on some images with a patch in a corner, labelled as a target class.

    The record gets ``attack/success`` with each validation: the share of the benign clients' test images of other
    classes predicted as the target once they have the patch, by the models that clients receive.

    Args:
        fraction: as for `Attack`.
        target: the class of images with the patch, from 0.
        share: the share of a bad client's training images with the patch, above 0 and up to 1, rounded up.
        patch: the patch's height and width in pixels, at least 1, in the corner where rows and columns end.
        value: the patch's pixels, in the scale of the net's inputs.

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
        """Refuse tasks without images, and classes out of range."""
        super().check(federation)
        check_class(self, "target", self.target, federation)
        if (shape := federation.data.input_shape) is None or len(shape) != 3 or min(shape[1:]) < self.patch:
            raise MisconfigurationException(
                f"trainer.callbacks: Backdoor puts a patch of {self.patch} x {self.patch} pixels on images, and inputs "
                f"have the shape {shape}; take LabelFlip, or larger images."
            )

    def poisoned(self, samples: Samples, client: int, federation: Federation) -> Samples:
        """Return samples of which some have the patch and the target class."""
        y = cast(Tensor, samples.y)
        # by client and not by round: in all rounds the same images have the patch, as if they were stored so
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
        """Return copies of images with the patch.

        Args:
            x: ``[n, C, H, W]``.
        """
        # the pool of all samples is shared by clients
        x = x.clone()
        x[..., -self.patch :, -self.patch :] = self.value
        return x

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the attack's success."""
        federation = cast(Federation, pl_module)
        # by `validate` alone there is no round to record for
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            federation.metrics["attack/success"] = self.success(federation)

    def success(self, federation: Federation) -> float:
        """Return the share of benign clients' test images of other classes predicted as the target.

        NaN if the benign clients have no such images.

        Args:
            federation: the federation.
        """
        # as an evaluation of other data: the engine, the metric and the payload are those of any evaluation
        source = Triggered(federation, self)
        clients = [c for c in sorted(federation.evaluations.groups["benign"]) if source.size(c, "test")]

        def job_of(client: int, splits: tuple[Split, ...]) -> Job:
            return federation.job(client, splits)._replace(data=ClientData(source, client))

        measured = by_split(federation.evaluations.measure(clients, ("test",), job_of)).get("test", ClientMetrics())
        # accuracies are means over each client's own images, which counts turn back into numbers of images
        sizes = {client: source.size(client, "test") for client in measured}
        hits = sum(sizes[client] * own["acc"] for client, own in measured.items())
        return hits / total if (total := sum(sizes.values())) else float("nan")


class Triggered:
    """A data source: test images of other classes than the target get the patch and the target as label.

    The accuracy on such a test split is the attack's success. Other splits are the federation's own.

    Args:
        federation: the federation.
        attack: the attack, with the patch.
    """

    def __init__(self, federation: Federation, attack: Backdoor) -> None:
        self._data, self._attack = federation.data, attack

    @property
    def task(self) -> Task:
        """The federation's task."""
        return self._data.task

    def parts(self, clients: Sequence[int], split: Split, device: torch.device | str = "cpu") -> Sequence[Samples]:
        """Return one split of each client."""
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
        """Return the number of samples in one split of one client."""
        return self._sizes[client] if split == "test" else self._data.size(client, split)
