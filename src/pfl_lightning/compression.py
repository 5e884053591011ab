"""Compression of clients' updates with error feedback: fewer bytes travel, and a residual stays with the client."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.engines import Job, Outcome
from pfl_lightning.federation.stages import ConfiguredStage, Federated, Plan
from pfl_lightning.messages import Message, Restored, StateDict, Updates, promoted

__all__ = ["Compression", "EightBits", "HalfPrecision", "Sign", "TopK"]

Packed = dict[str, Any]
"""Weights as they travel, by name: a record of tensors for a parameter, and any other entry as it is."""


class Compression(ConfiguredStage):
    r"""Compresses the change of each parameter in a client's update, and keeps the error for the next round.

    .. math::

        p = w - x + e, \qquad e \leftarrow p - C(p)

    where x is the received parameter, w the trained one and e the residual, 0 at first. The server restores and
    aggregates :math:`x + C(p)`. The residual stays with the client, in checkpoints, or at the client's site. Buffers
    and all other entries of updates travel whole, and so do weights in rounds without received ones. Sums, means and
    residuals are in float32 or wider. Source: Karimireddy et al., 2019 (https://arxiv.org/abs/1901.09847).
    """

    reads_updates = True
    does = MappingProxyType({"parts": "sends the largest or coarsest parts of each client's change"})
    excludes = MappingProxyType({"sums": "sends other parts of each client's update"})

    @property
    def setting(self) -> str:
        """The setting, as errors name it."""
        return f"trainer.compression={type(self).__name__}"

    @abstractmethod
    def pack(self, change: Tensor) -> StateDict:
        """Return the record of a parameter's change; names, types and shapes depend on the length alone.

        Args:
            change: p, flat ``[n]``, finite, on the CPU; n is at least 1.
        """

    @abstractmethod
    def unpack(self, packed: StateDict, size: int) -> Tensor:
        """Return the change :math:`C(p)` ``[n]`` of a record.

        Args:
            packed: as from `pack`.
            size: n.

        Raises:
            ValueError: if the record is of no change of this size.
        """

    def check(self, federation: Federated) -> None:
        """Refuse methods without weights in both directions."""
        client, aggregator = federation.client, federation.aggregator
        if "weights" not in client.sends or "weights" not in aggregator.sends:
            raise MisconfigurationException(
                f"{self.setting} compresses the difference of sent and received weights, and {type(client).__name__} "
                f"with {aggregator.name} doesn't exchange them both ways; leave it out, or take a method such as "
                "FedAvg."
            )

    def on_deliver(self, federation: Federated, plan: Plan, updates: Updates) -> Updates:
        """Return the updates with weights in plain dicts, as servers may keep them in their state."""
        return {client: update | {"weights": dict(update["weights"])} for client, update in updates.items()}

    @torch.no_grad()
    def on_upload(self, outcome: Outcome, job: Job, module: ClientModule) -> Outcome:
        """Return a client's outcome with compressed weights, and with the residual in the state.

        Args:
            outcome: the outcome of the client's training.
            job: the client's job, with the received weights and the residual so far.
            module: the client module of the client's architecture.
        """
        received = job.payload.get("weights")
        if received is None or not outcome.finite or outcome.refused:
            # nothing is compressed, and so the residual keeps waiting for the next round
            return outcome._replace(state=replace(outcome.state, residual=job.state.residual))
        weights = outcome.update["weights"]
        # on the CPU for every engine, so that a deployment has the bits of a simulation
        packed, residual = {}, {}
        for name in self.compressed_names(weights, module):
            change = difference(weights[name], received[name]).flatten()
            if name in job.state.residual:
                change = change + job.state.residual[name].flatten()
            packed[name] = self.pack(change)
            left = change - self.unpack(packed[name], len(change))
            residual[name] = left.view(weights[name].shape)
        # copies, as rows of a stack would keep the whole stack alive
        travelling = {name: packed[name] if name in packed else weights[name].clone() for name in weights}
        update = {**outcome.update, "weights": self.restored(travelling, received, weights)}
        return outcome._replace(update=update, state=replace(outcome.state, residual=residual))

    def compressed_names(self, weights: Mapping[str, Tensor], module: ClientModule) -> list[str]:
        """Return the names of compressed weights: parameters of floating types.

        Args:
            weights: a client's weights, by name.
            module: the client module.
        """
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return [n for n, t in weights.items() if n in parameters and t.is_floating_point() and t.numel()]

    def restored(self, travelling: Packed, received: StateDict, like: Mapping[str, Tensor]) -> Restored:
        """Return restored weights, beside the compressed form.

        Args:
            travelling: weights in compressed form.
            received: the weights that the client received.
            like: weights with the types and shapes of the trained ones.

        Raises:
            ValueError: if a record is of no change of its parameter.
        """
        weights = {}
        for name, part in travelling.items():
            if isinstance(part, Tensor):
                weights[name] = part
                continue
            # in the type of the residual, so that client and server round the sum once and alike
            start = received[name].detach().to("cpu", promoted(like[name]))
            change = self.unpack(part, like[name].numel()).view(like[name].shape)
            weights[name] = (start + change).to(like[name].dtype)
        return Restored(weights, travelling)

    def look(self, like: Message, module: ClientModule) -> Message:
        """Return the look of a compressed update, for a comparison with updates from elsewhere.

        Args:
            like: template of the uncompressed update.
            module: the client module.
        """
        weights = like["weights"]
        packed = {
            name: self.pack(torch.zeros(weights[name].numel(), dtype=promoted(weights[name])))
            for name in self.compressed_names(weights, module)
        }
        return {**like, "weights": {name: packed.get(name, weights[name]) for name in weights}}


class TopK(Compression):
    """Sends the largest changes of each parameter, with places: 8 bytes an entry.

    Source: Stich, Cordonnier and Jaggi, 2018 (https://arxiv.org/abs/1809.07599).

    Args:
        share: share of each parameter's entries, above 0 and up to 1, rounded up; above ½ more bytes travel than
            without compression.

    Raises:
        MisconfigurationException: if ``share`` is out of its range.
    """

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise MisconfigurationException(f"TopK: share={share} must be above 0 and up to 1, such as 0.01.")
        self.share = share

    def pack(self, change: Tensor) -> StateDict:
        """Return the largest entries ``values`` and their places ``indices``, ascending."""
        # 0.07 * 100 is a little above 7 in floating point
        count = max(1, math.ceil(round(self.share * len(change), 6)))
        indices = change.abs().topk(count, sorted=False).indices.sort().values
        kind = torch.int32 if len(change) < 1 << 31 else torch.int64
        return {"indices": indices.to(kind), "values": change[indices]}

    def unpack(self, packed: StateDict, size: int) -> Tensor:
        """Return the entries in their places, and zeros."""
        indices = packed["indices"].long()
        # a site may send any indices, and index_copy takes equal ones in any order
        if int(indices[0]) < 0 or int(indices[-1]) >= size or bool((indices.diff() <= 0).any()):
            raise ValueError(f"indices are not ascending from 0 to {size - 1}")
        return packed["values"].new_zeros(size).index_copy(0, indices, packed["values"])


class Sign(Compression):
    r"""Sends the sign of each entry, times the mean size of a parameter's: :math:`\frac{\|p\|_1}{n} \text{sign}(p)`.

    A bit an entry, and 4 bytes a parameter. Source: Karimireddy et al., 2019 (https://arxiv.org/abs/1901.09847).
    """

    def pack(self, change: Tensor) -> StateDict:
        """Return the signs ``bits``, eight a byte, 1 for entries from 0 up, and the mean size ``scale``."""
        return {"bits": torch.from_numpy(np.packbits((change >= 0).numpy())), "scale": change.abs().mean()}

    def unpack(self, packed: StateDict, size: int) -> Tensor:
        """Return the signs times the scale."""
        positive = torch.from_numpy(np.unpackbits(packed["bits"].numpy(), count=size)).bool()
        scale = packed["scale"]
        return torch.where(positive, scale, -scale)


class EightBits(Compression):
    r"""Sends each entry as the nearest of 255 steps, multiples of a parameter's largest change over 127.

    A byte an entry, and 4 bytes a parameter. Rounding is to the nearest and not by chance, since the residual makes up
    for its error. Source of quantisation: Alistarh et al., 2017 (https://arxiv.org/abs/1610.02132).
    """

    def pack(self, change: Tensor) -> StateDict:
        """Return the steps ``values`` and their size ``scale``."""
        scale = change.abs().max() / 127
        # the scale is 0 for a change of zeros, and where a step is too small for the type
        steps = torch.where(scale > 0, change / scale, torch.zeros_like(change))
        return {"values": steps.round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def unpack(self, packed: StateDict, size: int) -> Tensor:
        """Return the steps times their size."""
        return packed["values"].to(packed["scale"].dtype) * packed["scale"]


class HalfPrecision(Compression):
    """Sends each entry in float16: 2 bytes an entry.

    Entries of more than 65,504 in size are sent as this number, and the residual keeps what is missing. Source of
    half precision with its range: IEEE 754-2008, binary16.
    """

    def pack(self, change: Tensor) -> StateDict:
        """Return the rounded ``values``."""
        most = torch.finfo(torch.float16).max
        return {"values": change.clamp(-most, most).half()}

    def unpack(self, packed: StateDict, size: int) -> Tensor:
        """Return the entries in float32."""
        return packed["values"].float()


def difference(one: Tensor, other: Tensor) -> Tensor:
    """Return the difference of two tensors in float32 or wider, on the CPU."""
    wide = promoted(one)
    return one.detach().to("cpu", wide) - other.detach().to("cpu", wide)
