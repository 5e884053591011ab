"""Turn a model into one vector, and back."""

from collections.abc import Mapping
from functools import reduce

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.aggregators.base import Server
from pfl_lightning.messages import StateDict, Updates


class Entries:
    """The parameters shared by clients, each once, in a fixed order.

    Args:
        server: the server's knowledge.

    Raises:
        MisconfigurationException: if clients share none, or buffers too, which tell of their data otherwise.
    """

    def __init__(self, server: Server) -> None:
        self.first = server.first_names()
        # a tied parameter would count twice in the norm
        self.names = list(dict.fromkeys(self.first.values()))
        client = type(server.module).__name__
        if buffers := sorted(server.weights.keys() - self.first.keys()):
            raise MisconfigurationException(
                f"model.buffers={server.module.buffers_policy!r}: clients share {buffers[0]}, statistics that "
                "aggregator=DPAverage adds no noise to; take model.buffers=local, or a net without BatchNorm."
            )
        if not self.names:
            raise MisconfigurationException(
                f"aggregator=DPAverage averages models, and {client} shares none; take a client module that does."
            )
        # in the common model's shapes, which sites can't change
        self.sizes = [server.weights[name].numel() for name in self.names]

    def vector(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the parameters as ``[d]``, a copy in float64."""
        return torch.cat([weights[name].reshape(-1).double() for name in self.names])

    def model(self, vector: Tensor, weights: StateDict, updates: Updates) -> StateDict:
        """Return a vector as a model, tied parameters under all their names.

        Args:
            vector: ``[d]``.
            weights: has the shapes, and the least types.
            updates: of the round; where clients train in a wider type, the model takes theirs.
        """
        parts = dict(zip(self.names, torch.split(vector, self.sizes), strict=True))
        sent = [update["weights"] for update in updates.values()]
        return {
            name: parts[self.first[name]]
            .view(tensor.shape)
            .to(reduce(torch.promote_types, [own[name].dtype for own in sent], tensor.dtype))
            for name, tensor in weights.items()
        }
