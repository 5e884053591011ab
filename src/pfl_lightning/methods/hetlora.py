"""HetLoRA: clients train adapters of different ranks, and larger changes count for more."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedit import AdapterAverage, FedIT
from pfl_lightning.server import Aggregator
from pfl_lightning.server.adapters import factors, norm, pairs
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack


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
            gives all clients the net's rank.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a rank is out of its range.
    """

    rank: Tensor

    def __init__(self, *args: Any, ranks: list[int] | None = None, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.pairs = pairs(self.state_dict())
        # a net without adapters has none, and is refused by its name before the first round
        largest = max((len(self.get_parameter(pair.a)) for pair in self.pairs), default=0)
        if ranks is not None and (not ranks or not all(1 <= rank <= largest for rank in ranks)):
            raise MisconfigurationException(
                f"model.ranks={ranks} must be ranks from 1 to that of the net's adapters, {largest}, one or more."
            )
        self.ranks = ranks
        if ranks is not None:
            # kept with the client, as load_from_checkpoint needs the rank
            self.register_buffer("rank", torch.tensor(largest))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the adapters, and cut them to the client's rank."""
        super().on_download(payload, data)
        if self.ranks is None:
            return
        if data is not None:
            self.rank.fill_(self.ranks[self.client_id % len(self.ranks)])
        rank = int(self.rank)
        with torch.no_grad():
            for pair in self.pairs:
                # both, since then neither has a gradient
                self.get_parameter(pair.a)[rank:] = 0
                self.get_parameter(pair.b)[:, rank:] = 0

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
