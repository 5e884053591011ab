"""Clients with personal models, taught by each other's outputs for public samples."""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientModule, ClientSettings, Phase
from pfl_lightning.data import CHUNK, ClientData, FederatedDataModule, Samples
from pfl_lightning.data.datamodule import net_inputs
from pfl_lightning.messages import Message
from pfl_lightning.settings import Unpack


class PublicSettings(ClientSettings, total=False):
    """Settings of `PublicAnswers`, for the ``**kwargs`` of subclasses."""

    distill_epochs: int
    distill_batch_size: int


class PublicAnswers(ClientModule):
    """Trains on public samples with the server's targets, then on private ones, and sends outputs for the public ones.

    Name it before the client modules that define samples and models: ``class FedMD(PublicAnswers, Local)``. A subclass
    defines `answer`, and the loss in the phase ``distill``. A client without targets begins with its own samples.

    Args:
        distill_epochs: passes over the public samples a round, at least 0; 0 learns nothing from others.
        distill_batch_size: public samples a batch, at least 2.
        **kwargs: the arguments of `ClientModule`.

    Raises:
        MisconfigurationException: if a number is out of range.
    """

    requires = frozenset({"classes"})
    sends = frozenset({"predictions"})
    needs = frozenset({"public", "targets"})
    public: Tensor
    targets: Tensor | None

    def __init__(
        self, *args: Any, distill_epochs: int = 1, distill_batch_size: int = 256, **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if distill_epochs < 0 or distill_batch_size < 2:
            raise MisconfigurationException(
                f"model.distill_epochs={distill_epochs} must be 0 (no distillation) or more, and "
                f"model.distill_batch_size={distill_batch_size} 2 or more, such as 1 and 256."
            )
        self.distill_epochs, self.distill_batch_size = distill_epochs, distill_batch_size
        # registered without a value, which each download brings
        self.register_buffer("public", None, persistent=False)
        self.register_buffer("targets", None, persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the public samples, and the targets if the server has any."""
        self.public = payload["public"].to(self.device)
        self.targets = payload["targets"].to(self.device) if "targets" in payload else None

    def public_inputs(self) -> Tensor:
        """Return the public samples as inputs of the net."""
        x = net_inputs(self.public)
        return x.to(self.dtype) if x.is_floating_point() else x

    def local_phases(self) -> list[Phase]:
        """Distil, then train on private samples."""
        private = super().local_phases()
        if self.targets is None or self.distill_epochs == 0:
            return private
        taught = Samples(self.public_inputs(), self.targets)
        return [Phase("distill", epochs=self.distill_epochs, data=taught, batch_size=self.distill_batch_size), *private]

    def answer(self, x: Tensor) -> Tensor:
        """Return the trained model's answer to inputs, in evaluation mode.

        Args:
            x: inputs ``[n, *input_shape]``.
        """
        raise NotImplementedError

    def upload(self, data: ClientData) -> Message:
        """Return the answers to the public samples."""
        return {"predictions": torch.cat([self.answer(x) for x in torch.split(self.public_inputs(), CHUNK)])}


def samples_at_server(data: FederatedDataModule, aggregator: str) -> Samples:
    """Return the server's samples as inputs of nets.

    Args:
        data: the data module.
        aggregator: the aggregator's name, for the error.

    Raises:
        MisconfigurationException: if there are none.
    """
    if (samples := data.server_data()) is None:
        raise MisconfigurationException(
            f"aggregator {aggregator} teaches by samples that the server holds, and {type(data).__name__} gives it "
            "none; set data.public to another data set, or data.server_fraction."
        )
    return samples


def travelling_inputs(data: FederatedDataModule, aggregator: str) -> Tensor:
    """Return the server's samples for the way to clients: as stored if possible, else as inputs.

    Args:
        data: the data module.
        aggregator: the aggregator's name, for the error.

    Raises:
        MisconfigurationException: if the server has none.
    """
    ready, stored = samples_at_server(data, aggregator), data.server_samples()
    # stored bytes are a quarter of float32 inputs; clients can use them if `net_inputs` is all that the data module
    # applies
    same = stored is not None and torch.equal(net_inputs(stored.x), ready.x)
    samples: Tensor = stored.x if stored is not None and same else ready.x
    return samples


def check_answers(answers: Tensor, public: Tensor) -> None:
    """Refuse a checkpoint with more or fewer answers than public samples.

    Args:
        answers: answers, one a public sample.
        public: the public samples.

    Raises:
        MisconfigurationException: if their numbers differ.
    """
    if len(answers) != len(public):
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint has answers to {len(answers)} public samples, and there are {len(public)}; "
            "resume with the data.public_samples or data.server_fraction it was made with."
        )
