"""FedDPA: beside the common adapters, each client has adapters of its own."""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import Batch, Phase
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict
from pfl_lightning.methods.fedit import AdapterAverage, AdapterSettings, FedIT
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.server import Aggregator
from pfl_lightning.server.adapters import pairs
from pfl_lightning.settings import Unpack


class FedDPA(FedIT):
    r"""Trains the common adapters as `FedIT`, and adapters of the client's own beside them.

    .. math:: y = W_0 x + (1 - a)\, s B A x + a\, s B_k A_k x

    is a client's layer. In each round but the first, a client first trains its own :math:`A_k` and :math:`B_k` on this
    sum, with A and B as received, and then A and B alone, without its own. That is the paper's FedDPA-T. Its own
    adapters never leave the client; they begin with a random :math:`A_k` and :math:`B_k = 0`. Until they are trained,
    the received model predicts. What else the net trains belongs to the common part.

    Two adapters are one of twice the rank, which is how they are computed, and how folders of adapters have them: no
    layer changes, and any net with adapters will do. With dropout in the adapters both have the same mask. At
    prediction the paper chooses the weight of each prompt anew, by its likeness to the client's training prompts; here
    a is the same for all.

    Source: Yang et al., 2024 (https://arxiv.org/abs/2403.19211); Lydia-yang/FedDPA@cf638c1, which counts clients
    equally.

    Args:
        local_weight: a, from 0 to 1; 0 is `FedIT` with equal clients, bit for bit.
        **kwargs: the arguments of `FedIT`.

    Raises:
        MisconfigurationException: if ``local_weight`` is out of its range.
    """

    client_level = True
    example_level = True

    has_own: Tensor

    def __init__(self, *args: Any, local_weight: float = 0.5, **kwargs: Unpack[AdapterSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= local_weight <= 1:
            raise MisconfigurationException(
                f"model.local_weight={local_weight} must be from 0 (which is FedIT) to 1, such as 0.5."
            )
        self.local_weight = local_weight
        self.pairs = pairs(self.state_dict())
        own: StateDict = {}
        for pair in self.pairs:
            a, b = self.get_parameter(pair.a), self.get_parameter(pair.b)
            own |= {key(pair.a): rows_like(a, len(a)), key(pair.b): torch.zeros_like(b)}
        self.own = nn.ParameterDict({name: nn.Parameter(tensor.detach()) for name, tensor in own.items()})
        # a buffer, so that it stays with the client as its adapters do
        self.register_buffer("has_own", torch.tensor(False))

    def local_phases(self) -> list[Phase]:
        """Train the client's own adapters, except in the first round, then the common ones."""
        # nothing of its own adapters leaves the client, so private training adds no noise to them
        own = Phase("own", lambda name: name.startswith("own."), stays=True)
        common = Phase("common", lambda name: name.startswith("net."))
        return [own, common] if self.round and self.local_weight else [common]

    def both(self, weight: float | Tensor) -> StateDict:
        """Return both adapters of each layer as one of twice the rank, by name in the net.

        Args:
            weight: a.
        """
        # by `named_parameters`: engines put plain tensors in the places of parameters, which `get_parameter` refuses
        common, entries = dict(self.net.named_parameters()), {}
        for pair in self.pairs:
            a, b = pair.a.removeprefix("net."), pair.b.removeprefix("net.")
            entries[a] = torch.cat([common[a], self.own[key(pair.a)]])
            entries[b] = torch.cat([(1 - weight) * common[b], weight * self.own[key(pair.b)]], 1)
        return entries

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss by the common adapters, or by both in the phase of the client's own."""
        if self.phase.name != "own":
            return super().training_step(batch, batch_idx)
        return {"loss": loss_at(self, self.net, self.both(self.local_weight), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by both adapters, or by the common ones before the client has trained its own."""
        if not self.local_weight:
            return super().forward(x)
        outputs: Tensor = functional_call(self.net, self.both(self.local_weight * self.has_own), (x,))
        return outputs

    def adapter_state(self) -> StateDict:
        """Return both adapters as one of twice the rank, once the client has trained its own."""
        return self.both(self.local_weight) if self.local_weight and self.has_own else super().adapter_state()

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the update of the common adapters, and note the training of the client's own."""
        # a client without a batch has trained nothing
        if self.steps_done and self.round:
            self.has_own.fill_(True)
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of the common adapters, in which all clients count alike."""
        return AdapterAverage(weighting="uniform")


def rows_like(a: Tensor, rows: int) -> Tensor:
    """Return random rows of a factor A, as linear layers begin.

    Args:
        a: the factor ``[r, ...]``.
        rows: number of rows.
    """
    bound = 1 / math.sqrt(a[0].numel())
    return a.new_empty(rows, *a.shape[1:]).detach().uniform_(-bound, bound)


def key(name: str) -> str:
    """Return a factor's name as that of the client's own factor, since names of parameters can't have dots.

    Args:
        name: the factor's name.
    """
    return name.replace(".", "/")
