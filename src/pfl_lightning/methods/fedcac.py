"""FedCAC: critical parameters are averaged over similar clients, all other parameters over all.

Source: Wu et al., 2023 (https://arxiv.org/abs/2309.11103). Symbols: :math:`x_k` is client k's received model,
:math:`y_k` its model after training, :math:`M_k` the mask of its critical parameters, t the round, from 1 on.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.server import Aggregator, Server, WeightedAverage, inner_products, mean_model
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack


class FedCAC(FedAvg):
    r"""Trains as `FedAvg`, and sends a mask of the critical parameters.

    These are the :math:`\lfloor \tau n \rfloor` of a tensor's n entries with the largest :math:`\lvert (y_k - x_k)\,
    y_k \rvert`; entries that didn't move aren't critical, and ties at the margin all are. A mask takes one bit a
    parameter.
    Source: Wu et al., 2023 (https://arxiv.org/abs/2309.11103), whose official code (Fling) has the defaults for
    CIFAR-10.

    Args:
        tau: :math:`\tau`, the share of critical parameters in each tensor, in [0, 1]; 0 is `FedAvg` bit for bit.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``tau`` is out of its range.
    """

    sends = FedAvg.sends | {"critical"}

    def __init__(self, *args: Any, tau: float = 0.5, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= tau <= 1:
            raise MisconfigurationException(f"model.tau={tau} must be from 0 (which is FedAvg) to 1, such as 0.5.")
        self.tau = tau
        self.received = Frozen(self.learnable().items())  # x_k

    def learnable(self) -> StateDict:
        """Return the trained and shared parameters, a tied one under each name."""
        trained = {id(parameter) for parameter in trained_parameters(self, "net").values()}
        named = self.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if id(p) in trained and self.is_shared(name)}

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and copy the received parameters."""
        super().on_download(payload, data)
        self.received.take(self.learnable().items())

    def upload(self, data: ClientData) -> Message:
        """Return the model, and the mask of critical parameters."""
        y, x = self.learnable(), self.received.tensors()
        masks = {name: packed(critical(((y[name] - x[name]) * y[name]).abs(), self.tau)) for name in y}
        return super().upload(data) | {"critical": masks}

    def configure_aggregator(self) -> Aggregator:
        """Return FedCAC's server."""
        return CriticalAverage()


class CriticalAverage(WeightedAverage):
    r"""Sends each client the mean of all models, with critical parameters averaged over similar clients.

    .. math::

        O_{kj} = 1 - \frac{\lVert M_k - M_j \rVert_1}{2 \lVert M_k \rVert_1}, \qquad
        C_k = \{k\} \cup \{j: O_{kj} \ge \bar O + \tfrac{t}{\beta} (O_{max} - \bar O)\}, \qquad
        x_k \leftarrow M_k \odot \frac{1}{|C_k|} \sum_{j \in C_k} y_j + (1 - M_k) \odot \sum_j p_j y_j

    over the clients of the round; mean and maximum are over all pairs of different clients. After :math:`\beta` rounds
    critical parameters are the client's own alone. Absent clients keep their mask and its last average, and get the new
    mean around it; a client that never took part gets the mean. Whether the paper counts rounds from 0 or 1, and how it
    treats absent clients, could not be verified.
    Source: Wu et al., 2023 (https://arxiv.org/abs/2309.11103).

    Args:
        beta: :math:`\beta`, the number of rounds of collaboration, above 0.
        **kwargs: the arguments of `WeightedAverage`.

    Raises:
        MisconfigurationException: if ``beta`` isn't positive.
    """

    needs = WeightedAverage.needs | {"critical"}

    def __init__(self, beta: float = 100.0, **kwargs: Unpack[MeanSettings]) -> None:
        super().__init__(**kwargs)
        if not beta > 0:
            raise MisconfigurationException(f"aggregator.beta={beta} must be above 0, such as 100.")
        self.beta = beta

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without masks."""
        super().setup(server)
        self.state |= {"critical": {}, "own": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average over all and over similar clients; log the mean overlap, and the mean number of similar clients."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        overlap = overlaps([update["critical"] for update in updates.values()])
        # without the diagonal: a client overlaps fully with itself
        pairs = overlap[~torch.eye(len(updates), dtype=torch.bool)]
        middle, largest = (float(pairs.mean()), float(pairs.max())) if len(pairs) else (0.0, 0.0)
        reached = (round + 1) / self.beta
        # in this form the threshold at t = beta is the maximum bit for bit
        threshold = (1 - reached) * middle + reached * largest
        together = 0
        for row, (client, update) in enumerate(updates.items()):
            alike = {k: u for j, (k, u) in enumerate(updates.items()) if k == client or overlap[row, j] >= threshold}
            mean = mean_model(alike, dict.fromkeys(alike, 1 / len(alike)))
            # kept whole, also outside the mask: `download` picks the critical entries
            self.state["own"][client] = {name: mean[name] for name in update["critical"]}
            self.state["critical"][client] = update["critical"]
            together += len(alike)
        return {"overlap": middle, "together": together / len(updates)}

    def download(self, client: int) -> Message:
        """Return the mean of all, with the client's critical parameters."""
        weights = dict(self.state["weights"])
        for name, own in self.state["own"].get(client, {}).items():
            mask = unpacked(self.state["critical"][client][name], own.numel()).reshape(own.shape)
            weights[name] = torch.where(mask, own, weights[name])
        return {"weights": weights}


def critical(sensitivity: Tensor, share: float) -> Tensor:
    """Return the mask of a tensor's largest entries.

    >>> critical(torch.tensor([3.0, 0.0, 2.0, 1.0]), 0.5), critical(torch.tensor([3.0, 0.0]), 1.0)
    (tensor([ True, False,  True, False]), tensor([ True, False]))

    Args:
        sensitivity: of any shape, at least 0; zeros are never in the mask.
        share: share of the entries in the mask, in [0, 1], rounded down.
    """
    count = int(share * sensitivity.numel())
    if not count:
        return torch.zeros_like(sensitivity, dtype=torch.bool)
    # the smallest of the largest; all entries at least as large are critical, ties included
    margin = sensitivity.flatten().topk(count).values[-1]
    return (sensitivity >= margin) & (sensitivity > 0)


def overlaps(masks: list[dict[str, Tensor]]) -> Tensor:
    r"""Return the overlap of each client's mask with each.

    .. math:: 1 - \lVert M_k - M_j \rVert_1 / (2 \lVert M_k \rVert_1)

    Args:
        masks: K packed masks, by name, at least one. An empty mask has the overlap 0 with all.

    Returns:
        ``[K, K]`` in float64, 1 on the diagonal of masks that aren't empty.
    """
    bits = [{name: unpacked(mask, 8 * len(mask)) for name, mask in named.items()} for named in masks]
    both = inner_products(bits, list(masks[0]))
    sizes = both.diagonal()
    # |M_k - M_j|_1 = |M_k| + |M_j| - 2 <M_k, M_j> for masks of 0 and 1
    differing = sizes[:, None] + sizes - 2 * both
    return torch.where(sizes[:, None] > 0, 1 - differing / (2 * sizes[:, None].clamp_min(1)), 0.0)


def packed(mask: Tensor) -> Tensor:
    """Return a mask as bits, eight in a byte ``[ceil(n / 8)]``; `unpacked` is the inverse.

    Args:
        mask: n booleans, of any shape.
    """
    flat = torch.nn.functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8))
    return (flat.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)


def unpacked(bits: Tensor, size: int) -> Tensor:
    """Return the first n entries of a packed mask, flat.

    >>> unpacked(packed(torch.tensor([[True, False, True]])), 3)
    tensor([ True, False,  True])

    Args:
        bits: as from `packed`.
        size: n.
    """
    each = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> each & 1).flatten()[:size].bool()
