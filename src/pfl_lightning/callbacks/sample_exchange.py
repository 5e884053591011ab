"""The base class of callbacks that give clients other training samples."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from lightning.pytorch import LightningModule, Trainer

from pfl_lightning.callbacks.base import FederatedCallback
from pfl_lightning.data import FederatedDataModule, Samples, Split

PartsOf: TypeAlias = Callable[..., Sequence[Samples]]
"""A function that returns one split of each of some clients, as data modules' own ``parts``."""
Exchange: TypeAlias = Callable[[Samples, int], Samples]
"""A function from a client's own training samples and id to the training samples in their place."""


class SampleExchange(FederatedCallback):
    """Give clients other training samples during a fit; samples of validation and test stay."""

    def exchange_samples(self, data: FederatedDataModule, exchange: Exchange) -> None:
        """Exchange training samples until the end of the fit.

        Args:
            data: the data module.
            exchange: returns the new samples of a client, or the client's own.
        """
        # every look-up of samples goes through `parts`, a GPU's copy of the pool included
        vars(data)["parts"] = partial(exchanged_parts, data.parts, exchange)

    def own_samples(self, data: FederatedDataModule, client: int) -> Samples:
        """Return a client's training samples without the exchange.

        Args:
            data: the data module, while its samples are exchanged.
            client: the client's id.
        """
        own: PartsOf = vars(data)["parts"].args[0]
        (samples,) = own([client], "train")
        return samples

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the data module its own samples back."""
        # the attribute of the instance hid the class's own method
        vars(cast(Any, trainer).datamodule).pop("parts", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the data module its own samples back."""
        # Lightning doesn't tear down a fit that fails, and the data module may be used again
        self.teardown(trainer, pl_module, "fit")


def exchanged_parts(
    own: PartsOf, exchange: Exchange, clients: Sequence[int], split: Split, device: torch.device | str = "cpu"
) -> Sequence[Samples]:
    """Return one split of each of some clients, with training samples exchanged.

    Args:
        own: returns the clients' own samples.
        exchange: returns the new training samples of a client.
        clients: ids of the clients.
        split: the split's name.
        device: device of the samples.
    """
    found = own(clients, split, device)
    if split != "train":
        return found
    return [exchange(samples, client) for client, samples in zip(clients, found, strict=True)]
