"""A personal copy of the net, or of a part of it, beside what travels."""

import torch
from torch import Tensor, nn

from pfl_lightning.client import ClientModule
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message
from pfl_lightning.methods.copies import add_copy


class PersonalNet(ClientModule):
    """A client that is evaluated by a personal net of its own, as soon as training has given it one.

    It comes before the client module whose net travels: ``class Ditto(PersonalNet, FedAvg)``. A subclass makes the copy
    in its ``__init__``, and trains it as its method does.

    Attributes:
        personal: the copy, which stays with its client, but for what is frozen.
        has_personal: whether the client has trained it; until then it is the initial one.
    """

    personal: nn.Module
    has_personal: Tensor

    def make_personal(self, part: nn.Module) -> None:
        """Makes a copy the client's own.

        Args:
            part: the net, or a part of it.
        """
        add_copy(self, "personal", part)
        self.register_buffer("has_personal", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the personal net, as soon as there is one."""
        logits: Tensor = (self.personal if self.has_personal else self.net)(x)
        return logits

    def upload(self, data: ClientData) -> Message:
        """What travels, which the personal net doesn't; notes that there is one."""
        if self.steps_done:
            self.has_personal.fill_(True)
        return super().upload(data)
