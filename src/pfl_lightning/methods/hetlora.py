"""HetLoRA: clients train adapters of different ranks, and larger changes count for more."""

import math
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedit import AdapterAverage, AdapterSettings, FedIT
from pfl_lightning.server import Aggregator
from pfl_lightning.server.adapters import factors, norm, pairs
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack

MIB = 2**20
BYTES = 16
"""Of a trained number: itself, its gradient and two moments, in float32."""


class HetLoRA(FedIT):
    r"""Trains adapters of a rank of the client's own, which begin as the first rows of the common A and columns of B.

    The net's rank r is the largest. A client of rank :math:`r_k` receives :math:`A_{1 \ldots r_k}` and :math:`B_{1
    \ldots r_k}`, and zeros in place of the rest, which have no gradient and stay zero: its product has the rank
    :math:`r_k`, and what it sends is padded with zeros, as the paper's server does it. So adapters travel at the net's
    rank, and a small rank saves no bytes here. All ranks have the net's scale s. The paper's self-pruning, by which
    clients lower their ranks, isn't here.

    Source: Cho et al., 2024 (https://arxiv.org/abs/2401.06432).

    Args:
        ranks: ranks of the clients, in turn: client k has ``ranks[k % len(ranks)]``, from 1 to the net's rank. None
            gives all clients the net's rank, or one by one of the next two settings, again from 1 to the net's rank.
        samples_per_rank: training samples for each row of A, at least 1: a client of n has the rank
            :math:`\lfloor n / \text{samples\_per\_rank} \rfloor`.
        adapter_mib: MiB that clients have for training their adapters, in turn as ``ranks``: their rank is the largest
            whose factors, gradients and two moments of Adam fit, in float32.
        **kwargs: the arguments of `FedIT`.

    Raises:
        MisconfigurationException: if a rank is out of its range, or ranks are given in two ways.
    """

    rank: Tensor

    def __init__(
        self,
        *args: Any,
        ranks: list[int] | None = None,
        samples_per_rank: int | None = None,
        adapter_mib: list[float] | None = None,
        **kwargs: Unpack[AdapterSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        rules = {"ranks": ranks, "samples_per_rank": samples_per_rank, "adapter_mib": adapter_mib}
        if len(given := [f"model.{name}={value}" for name, value in rules.items() if value is not None]) > 1:
            raise MisconfigurationException(f"{' and '.join(given)} both set the clients' ranks; give one of them.")
        if samples_per_rank is not None and samples_per_rank < 1:
            raise MisconfigurationException(
                f"model.samples_per_rank={samples_per_rank} must be a number of samples, at least 1, such as 50."
            )
        # a number alone, which isn't a list, is refused in the same sentence
        given_mib = adapter_mib if isinstance(adapter_mib, (list, tuple)) else []
        if adapter_mib is not None and not (given_mib and all(isfinite(m) and m > 0 for m in given_mib)):
            raise MisconfigurationException(
                f"model.adapter_mib={adapter_mib} must be MiB above 0, one or more, such as [4, 16]."
            )
        self.pairs = pairs(self.state_dict())
        # a net without adapters has none, and is refused by its name before the first round
        largest = max((len(self.get_parameter(pair.a)) for pair in self.pairs), default=0)
        if ranks is not None and (not ranks or not all(1 <= rank <= largest for rank in ranks)):
            raise MisconfigurationException(
                f"model.ranks={ranks} must be ranks from 1 to that of the net's adapters, {largest}, one or more."
            )
        if adapter_mib is not None:
            row = sum(self.get_parameter(name).numel() for pair in self.pairs for name in (pair.a, pair.b)) / largest
            ranks = [min(max(int(mib * MIB / (BYTES * row)), 1), largest) for mib in adapter_mib]
        self.ranks, self.samples_per_rank = ranks, samples_per_rank
        self.has_ranks = ranks is not None or samples_per_rank is not None
        if self.has_ranks:
            # kept with the client, as load_from_checkpoint needs the rank
            self.register_buffer("rank", torch.tensor(largest))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the adapters, and cut them to the client's rank."""
        super().on_download(payload, data)
        if not self.has_ranks:
            return
        if data is not None:
            self.rank.fill_(self.own_rank(data))
        rank = int(self.rank)
        with torch.no_grad():
            for pair in self.pairs:
                # both, since then neither has a gradient
                self.get_parameter(pair.a)[rank:] = 0
                self.get_parameter(pair.b)[:, rank:] = 0

    def own_rank(self, data: ClientData) -> int:
        """Return the client's rank.

        Args:
            data: the client's data.
        """
        if self.ranks is not None:
            return self.ranks[self.client_id % len(self.ranks)]
        largest = max(len(self.get_parameter(pair.a)) for pair in self.pairs)
        return min(max(len(data.train) // (self.samples_per_rank or 1), 1), largest)

    def configure_aggregator(self) -> Aggregator:
        """Return the mean with weights by the size of products."""
        return NormAverage()


class NormAverage(AdapterAverage):
    r"""Averages adapters of different ranks, padded with zeros, by the sizes of their products.

    .. math:: p_k = \frac{\lVert \Delta_k \rVert}{\sum_m \lVert \Delta_m \rVert}, \qquad
        \lVert \Delta_k \rVert^2 = \sum_l \lVert s B_{kl} A_{kl} \rVert_F^2

    over the layers l: a client of small rank, whose product is smaller, counts for less. Where all products are 0,
    clients count as by ``weighting``. All that clients send is averaged by these weights.
    Source: as for `HetLoRA`; its weights are those of the paper by a later implementer's account.

    Args:
        by_norm: whether clients count by their products; if not, by ``weighting``. With equal ranks it is then `FedIT`.
        **kwargs: the arguments of `WeightedAverage` but for ``mean`` and ``gamma``.
    """

    def __init__(self, by_norm: bool = True, **kwargs: Unpack[MeanSettings]) -> None:
        super().__init__(**kwargs)
        self.by_norm = by_norm

    def client_weights(self, updates: Updates) -> Mapping[int, float]:
        """Return the weights by products."""
        if not self.by_norm:
            return super().client_weights(updates)
        squares = dict.fromkeys(updates, 0.0)
        for pair, scale in self.sent(updates).items():
            for client, a, b in zip(updates, *factors(updates, pair), strict=True):
                squares[client] += (scale * norm(b, a)) ** 2
        total = math.fsum(map(math.sqrt, squares.values()))
        # as in a round without steps, after which B is still 0
        if not total:
            return super().client_weights(updates)
        return {client: math.sqrt(square) / total for client, square in squares.items()}
