"""Relevance of clients as peers, by similarity of the classifiers' outputs for noise.

Source: Liang et al., 2024 (https://arxiv.org/abs/2411.01825). Symbols: phi^_k client k's uploaded classifier, h~ a
noise vector instead of features, M a temperature, S the similarities, A_k the peers of client k, itself among them.
"""

import copy
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.aggregators import Server
from pfl_lightning.client import CLASSIFIER, in_classifier
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.nets import feature_size
from pfl_lightning.seeds import derive_seed

NO_GAP = 1e-12

Segmentation: TypeAlias = Literal["above_excl_top", "algorithm1", "above_all"]


def probe_similarity(probabilities: Tensor, own: int) -> Tensor:
    r"""Return the similarities of all clients' outputs to one client's, for one input.

    .. math:: s_{ij} = \cos(p_i, p_j), \qquad s_{ii} = 1

    >>> probe_similarity(torch.tensor([[0.6, 0.8], [0.8, 0.6], [1.0, 0.0]], dtype=torch.float64), own=1)
    tensor([0.9600, 1.0000, 0.8000], dtype=torch.float64)

    Args:
        probabilities: class probabilities p ``[K, C]`` of one input, a row a client.
        own: position i of the client.

    Returns:
        Row ``[K]`` of S, in (0, 1].
    """
    similarities = F.cosine_similarity(probabilities[own], probabilities, dim=1).clamp(max=1)
    # exactly 1, so that rounding can't put another client above the client itself
    similarities[own] = 1
    return similarities


def segment(similarities: Tensor, segmentation: Segmentation = "above_excl_top") -> tuple[list[int], float]:
    r"""Return a client's peers by maximum difference segmentation (MDS): similarities in order, cut at the largest gap.

    .. math:: m = \arg\max_i \Delta_i, \qquad \Delta_i = s_{(i+1)} - s_{(i)}

    The lowest of equal gaps counts. Without a gap above 1e-12, or with fewer than three clients, all are peers.

    >>> s = torch.tensor([0.5, 0.52, 0.51, 0.9, 0.91, 0.92, 1.0, 0.53], dtype=torch.float64)
    >>> members, gap = segment(s)
    >>> members, round(gap, 12)
    ([3, 4, 5, 6], 0.37)
    >>> segment(s, "algorithm1")[0]
    [3, 4, 5, 6, 7]

    Args:
        similarities: similarities ``[K]`` of one client to all, to itself the highest.
        segmentation: as for `FedReMa`.

    Returns:
        Positions of its peers, its own among them, and the gap; 0 if there is none.
    """
    values = similarities.tolist()
    order = sorted(range(len(values)), key=values.__getitem__)
    gaps = [values[above] - values[below] for below, above in pairwise(order)]
    if segmentation == "above_excl_top":
        gaps = gaps[:-1]
    gap = max(gaps) if len(values) > 2 else 0.0
    if gap < NO_GAP:
        return sorted(order), 0.0
    # gap i is between ranks i and i + 1; Algorithm 1 also takes the client below the gap
    start = gaps.index(gap) + (segmentation != "algorithm1")
    return sorted(order[start:]), gap


class Relevance:
    r"""Finds each client's peers from the classifiers of a round; keeps no memory of earlier rounds.

    .. math::

        p_k = \mathrm{softmax}(\hat\varphi_k(\tilde h) / M), \qquad s_{ij} = \cos(p_i, p_j), \qquad
        A_k = \mathrm{MDS}(s_k)

    Args:
        server: the server's knowledge.
        temperature: M, as for `FedReMa`.
        probe_max: the noise is uniform from 0 to this.
        shared_probe: whether all rows of S share one noise vector a round.
        segmentation: as for `FedReMa`.

    Raises:
        MisconfigurationException: if clients keep their classifier to themselves.
    """

    def __init__(
        self,
        server: Server,
        temperature: float = 0.5,
        probe_max: float = 1.0,
        shared_probe: bool = True,
        segmentation: Segmentation = "above_excl_top",
    ) -> None:
        net = server.module.net
        self.names = [name for name in server.weights if in_classifier(name)]
        kept = [name for name, _ in net.classifier.named_parameters(CLASSIFIER[:-1]) if name not in server.weights]
        if kept:
            raise MisconfigurationException(
                f"FedReMa compares the classifiers that clients send, and {type(server.module).__name__} keeps "
                f"{kept[0]} to itself; take model FedAvg, or another aggregator."
            )
        # a copy, since engines train in the module; classifiers are small enough for the CPU
        self.head = copy.deepcopy(net.classifier).double().cpu().eval()
        self.probe_size = feature_size(net)
        self.seed = server.seed
        self.temperature = temperature
        self.probe_max = probe_max
        self.shared_probe = shared_probe
        self.segmentation = segmentation

    @torch.no_grad()
    def compare(self, updates: Updates, round: int) -> tuple[Tensor, dict[int, list[int]], dict[int, float]]:
        """Return similarities of classifiers, and the peers and gaps of each client.

        Args:
            updates: updates by client id, in the order of the ids, at least one.
            round: the round's number, from 0, which seeds the noise.

        Returns:
            S ``[n, n]`` in float64, in the order of the updates; the peers of each client, by id; their gaps.
        """
        clients = list(updates)
        streams = [(round,)] if self.shared_probe else [(round, k) for k in clients]
        probes = torch.stack([self.probe(*stream) for stream in streams])
        # [n, n, C]: client i's probabilities for the noise of row k
        p = torch.stack([self.probabilities(update, probes) for update in updates.values()])
        p = p.expand(-1, len(clients), -1)
        similarity = torch.stack([probe_similarity(p[:, row], row) for row in range(len(clients))])
        segments = {k: segment(row, self.segmentation) for k, row in zip(clients, similarity, strict=True)}
        peers = {k: [clients[position] for position in members] for k, (members, _) in segments.items()}
        return similarity, peers, {k: gap for k, (_, gap) in segments.items()}

    def probe(self, *key: int) -> Tensor:
        """Return a noise vector ``[d]``, a function of the seed and a key.

        Args:
            *key: numbers that select the vector.
        """
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedrema", *key))
        return self.probe_max * torch.rand(self.probe_size, generator=generator, dtype=torch.float64)

    def probabilities(self, update: Message, probes: Tensor) -> Tensor:
        """Return class probabilities p ``[n, C]`` of probes, by the classifier of an update.

        Args:
            update: the client's update.
            probes: ``[n, d]``.
        """
        entries = {
            name.removeprefix(CLASSIFIER): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in self.classifier(update).items()
        }
        return F.softmax(functional_call(self.head, entries, (probes,)) / self.temperature, dim=1)

    def classifier(self, update: Message) -> StateDict:
        """Return the classifier's entries of an update, phi^.

        Args:
            update: the client's update.
        """
        return {name: update["weights"][name] for name in self.names}
