"""Attacks on training samples: bad clients train honestly on forged samples."""

from abc import abstractmethod
from typing import cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.attacks.base import Attack
from pfl_lightning.callbacks.sample_exchange import SampleExchange
from pfl_lightning.data import Samples
from pfl_lightning.federation.federation import Federation
from pfl_lightning.tasks import Classification


class SampleAttack(SampleExchange, Attack):
    """Change the training samples of bad clients during a fit.

    Samples of validation and test stay as they are, and so do the class counts told by clients. Takes the arguments of
    `Attack`.
    """

    @abstractmethod
    def poisoned(self, samples: Samples, client: int, federation: Federation) -> Samples:
        """Return a bad client's forged training samples.

        Args:
            samples: the client's own training samples.
            client: the client's id.
            federation: the federation.
        """

    def check(self, federation: Federation) -> None:
        """Refuse tasks without one class a sample, and samples read from disk batch by batch."""
        super().check(federation)
        if not isinstance(federation.data.task, Classification):
            raise MisconfigurationException(
                f"trainer.callbacks: {type(self).__name__} changes classes, and the task is {federation.data.task}; "
                "take an attack on uploads, such as SignFlip."
            )
        if not federation.data.resident:
            raise MisconfigurationException(
                f"data.resident=false reads clients a batch at a time, and {type(self).__name__} changes all that a "
                "client has at once; leave it out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put forged samples in place of bad clients' training samples."""
        super().on_fit_start(trainer, pl_module)
        federation = cast(Federation, pl_module)
        if bad := self.bad(federation):
            self.exchange_samples(
                federation.data,
                lambda samples, client: self.poisoned(samples, client, federation) if client in bad else samples,
            )


class LabelFlip(SampleAttack):
    r"""Train on wrong classes: :math:`y \to K - 1 - y`, or all samples of one class as another.

    Args:
        fraction: as for `Attack`.
        source: the class of the samples to change, from 0; None changes all samples.
        target: the wrong class, from 0; None is :math:`K - 1 - y`.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    def __init__(self, fraction: float, source: int | None = None, target: int | None = None) -> None:
        super().__init__(fraction)
        self.source, self.target = source, target

    def check(self, federation: Federation) -> None:
        """Refuse classes out of range."""
        super().check(federation)
        check_class(self, "source", self.source, federation)
        check_class(self, "target", self.target, federation)

    def poisoned(self, samples: Samples, client: int, federation: Federation) -> Samples:
        """Return samples with wrong classes."""
        y = cast(torch.Tensor, samples.y)
        flipped = cast(Classification, federation.data.task).num_classes - 1 - y
        wrong = flipped if self.target is None else torch.full_like(y, self.target)
        return Samples(samples.x, wrong if self.source is None else torch.where(y == self.source, wrong, y))


def check_class(attack: Attack, name: str, value: int | None, federation: Federation) -> None:
    """Refuse a class out of range.

    Args:
        attack: the attack.
        name: the setting's name.
        value: the class; None is no class to check.
        federation: the federation, with the task's number of classes.

    Raises:
        MisconfigurationException: if the class is out of range.
    """
    classes = cast(Classification, federation.data.task).num_classes
    if value is not None and not 0 <= value < classes:
        raise MisconfigurationException(
            f"{type(attack).__name__}: {name}={value} must be a class number from 0 to {classes - 1}."
        )
