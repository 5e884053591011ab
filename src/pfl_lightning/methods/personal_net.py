"""A personal copy of the net, or of a part, beside the shared net."""

import torch
from torch import Tensor, nn

from pfl_lightning.client import ClientModule
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.methods.copies import add_copy


class PersonalNet(ClientModule):
    """A client evaluated by a personal net, from the first training on.

    Name it before the client module whose net travels: ``class Ditto(PersonalNet, FedAvg)``. The subclass calls
    `make_personal` in its ``__init__``, and trains the personal net as its method does.

    Attributes:
        personal: the copy, which stays with its client, except frozen parameters, which are common.
        has_personal: whether the client has trained; until then the received model is evaluated.
    """

    personal: nn.Module
    has_personal: Tensor

    def make_personal(self, part: nn.Module) -> None:
        """Add the personal copy.

        Args:
            part: the net, or a part of it.
        """
        add_copy(self, "personal", part)
        # a buffer and no attribute, so that it stays with the client as the copy does
        self.register_buffer("has_personal", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the personal net, or of the received one before the first training."""
        logits: Tensor = (self.personal if self.has_personal else self.net)(x)
        return logits

    def predicting_module(self) -> nn.Module:
        """Return the personal net, or the received one before the first training."""
        return self.personal if self.has_personal else self.net

    def adapter_state(self) -> StateDict:
        """Return the adapters of the personal net, or nothing before the first training."""
        return dict(self.personal.named_parameters()) if self.has_personal else {}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the update of the shared net, and note the training."""
        # a client without a batch, such as one with too few samples, has trained nothing
        if self.steps_done:
            self.has_personal.fill_(True)
        return super().upload(data)
