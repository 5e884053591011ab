"""FedReMa: one feature extractor for all clients, and classifiers averaged over each client's peers.

Source: Liang et al., 2024 (https://arxiv.org/abs/2411.01825). Symbols: theta the feature extractor, phi_k client k's
classifier, phi^_k as uploaded, h~ a noise vector instead of features, M a temperature, A_k the peers of client k
(itself among them), G_ki the number of rounds in which i was a peer of k, CCP the critical co-learning period.
"""

import copy
from itertools import pairwise
from statistics import fmean
from typing import Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from pfl_lightning.client import CLASSIFIER, in_classifier
from pfl_lightning.messages import Message, StateDict, Updates, weighted_mean, weighted_means
from pfl_lightning.nets import feature_size
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Server, WeightedAverage, Weighting, client_weights

NO_GAP = 1e-12
"""Gaps up to this size are rounding, and separate nobody."""

Segmentation: TypeAlias = Literal["above_excl_top", "algorithm1", "above_all"]
"""Ways to cut a client's similarities, as `FedReMa` explains them."""


def is_over(mean_gaps: list[float], delta: float) -> bool:
    r"""Return True if the critical co-learning period ends with the last given round (equation 9).

    .. math:: \bar\Delta^t \le \delta \max_{\tau \le t} \bar\Delta^\tau

    >>> is_over([0.2, 0.4, 0.3], 0.5), is_over([0.2, 0.4, 0.2], 0.5)
    (False, True)

    Args:
        mean_gaps: the mean gap of each round, at least one.
        delta: the share of the largest mean gap, in [0, 1].
    """
    return mean_gaps[-1] <= delta * max(mean_gaps)


SUMS = 4
"""Classifiers in a round's sums for each client, from which on a matrix product makes all means."""


class FedReMa(WeightedAverage):
    r"""Averages feature extractors over all clients, and classifiers over each client's most relevant peers.

    In the critical co-learning period (CCP) peers are found anew each round, by the classifiers' outputs for noise:

    .. math::

        p_k = \mathrm{softmax}(\hat\varphi_k(\tilde h) / M), \quad s_{ij} = \cos(p_i, p_j), \quad
        A_k = \mathrm{MDS}(s_k), \quad
        \varphi_k = \frac{\sum_{i \in A_k} n_i \hat\varphi_i}{\sum_{i \in A_k} n_i}, \quad
        G_{ki} \leftarrow G_{ki} + 1 \;\; (i \in A_k)

    It ends for good with the first round whose mean gap is at most delta times the largest so far, see `segment` and
    `is_over`. From then on, classifiers are weighted by the number of rounds as peers:

    .. math:: \varphi_k = \sum_i G_{ki} \hat\varphi_i / \sum_i G_{ki}

    Sums are over the clients of the round. Absent clients receive the new feature extractor and keep their classifier,
    which is the common initial one until they take part; a client that first takes part after the period keeps its own.
    If the period ends in the first rounds, or while features are still poor, clients continue with few or wrong peers,
    and can end below FedAvg's single model: a smaller ``delta`` prolongs it. Rounds of fewer than three clients show no
    gap and don't end the period. The net decides which layers are the classifier; the paper's choice is ``head:
    all_fc``. The global model is the feature extractor with the mean of all classifiers.

    The official code pairs classifiers and clients by position in lists of different orders, averages classifiers in
    place, so that later clients see earlier results, and divides by M only for a row's own client; all this is left out
    here.

    Args:
        delta: the period ends at this share of the largest mean gap, in [0, 1]: 0 never ends it, 1 at once.
        temperature: M, above 0; a large one makes all classifiers alike.
        probe_max: the noise is uniform from 0 to this, above 0; the paper draws up to 1, the official code up to 0.5.
        shared_probe: whether all clients share one noise vector a round; the official code draws one for each row of S.
        segmentation: candidates for the largest gap, and the peers: ``above_excl_top`` leaves out the gap to the client
            itself and takes the clients above the largest other gap (official code); ``algorithm1`` considers all gaps
            and also takes the client just below (the paper's Algorithm 1); ``above_all`` considers all gaps and takes
            the clients above, which may be the client alone.
        weights: weights of peers in the period: by training ``samples`` (paper) or ``uniform`` (official code).

    Raises:
        MisconfigurationException: if a number is out of its range, or clients keep their classifier to themselves.
    """

    example_level = True

    fixed_clients = True
    requires = frozenset({"classes"})

    def __init__(
        self,
        delta: float = 0.5,
        temperature: float = 0.5,
        probe_max: float = 1.0,
        shared_probe: bool = True,
        segmentation: Segmentation = "above_excl_top",
        weights: Weighting = "samples",
    ) -> None:
        super().__init__()
        if not 0 <= delta <= 1:
            raise MisconfigurationException(
                f"aggregator.delta={delta} must be from 0 (the period never ends) to 1 (it ends with the first round)."
            )
        if not (0 < temperature < float("inf") and 0 < probe_max < float("inf")):
            raise MisconfigurationException(
                f"aggregator.temperature={temperature} and aggregator.probe_max={probe_max} must be above 0 and "
                "finite, such as 0.5 and 1."
            )
        self.delta = delta
        self.temperature = temperature
        self.probe_max = probe_max
        self.shared_probe = shared_probe
        self.segmentation = segmentation
        self.weights = weights

    def setup(self, server: Server) -> None:
        """Start from the common initial classifier for every client, without peers."""
        super().setup(server)
        self.relevance = Relevance(server, self.temperature, self.probe_max, self.shared_probe, self.segmentation)
        self.state |= {
            "initial": {name: server.weights[name] for name in self.relevance.names},
            "classifiers": {},
            "in_period": True,
            "mean_gaps": [],
            "peer_counts": torch.zeros(server.num_clients, server.num_clients, dtype=torch.int64),
            # of the period's last round, for plots
            "similarity": torch.zeros(0, 0, dtype=torch.float64),
            "peers": {},
            "gaps": {},
        }

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average all feature extractors, and classifiers over each client's peers; log the mean number of peers."""
        if not updates:
            return {}
        # theta; the mean classifier of the same sum is used in the global model alone
        super().aggregate(updates, round)
        in_period = self.state["in_period"]
        shares = self._co_learn(updates, round) if in_period else self._recall(updates)
        # from the uploads phi^ throughout: no average may contain another average
        self.state["classifiers"] = self.state["classifiers"] | self._averages(updates, shares)
        gap = {"gap": self.state["mean_gaps"][-1]} if in_period and len(updates) > 2 else {}
        return {"in_period": float(in_period), "peers": fmean(map(len, shares.values())), **gap}

    def _averages(self, updates: Updates, shares: dict[int, dict[int, float]]) -> dict[int, StateDict]:
        """Return the mean classifier of each client's peers; many different ones in one matrix product.

        Args:
            updates: updates by client id.
            shares: weights of the clients i in k's classifier, ``{k: {i: weight}}``.
        """
        uploads = {i: self.relevance.classifier(update) for i, update in updates.items()}
        rows = {tuple(row.items()): row for row in shares.values()}
        summed: list[str] = []
        means: list[StateDict] = [{} for _ in rows]
        # few sums keep the bits of a mean, which all clients as peers of each other share with FedAvg
        if sum(map(len, rows)) > SUMS * len(uploads):
            summed = [name for name, tensor in next(iter(uploads.values())).items() if tensor.is_floating_point()]
            weights = [[row.get(i, 0.0) for i in uploads] for row in rows.values()]
            means = weighted_means(list(uploads.values()), weights, summed)
        # counters among the rest: a product has no largest value of the peers alone
        rest = [name for name in self.relevance.names if name not in summed]
        found = {
            key: mean | weighted_mean([uploads[i] for i in row], list(row.values()), rest)
            for (key, row), mean in zip(rows.items(), means, strict=True)
        }
        return {k: found[tuple(row.items())] for k, row in shares.items()}

    def _co_learn(self, updates: Updates, round: int) -> dict[int, dict[int, float]]:
        """Run a round of the period: find and count peers, and end the period if due.

        Args:
            updates: updates by client id.
            round: the round's number, from 0.

        Returns:
            Weights of the clients i in k's classifier, ``{k: {i: weight}}``.
        """
        similarity, peers, gaps = self.relevance.compare(updates, round)
        counts = self.state["peer_counts"].clone()
        for k, members in peers.items():
            counts[k, members] += 1
        self.state |= {"peer_counts": counts, "similarity": similarity, "peers": peers, "gaps": gaps}
        if len(updates) > 2:
            # two clients have no gap between others
            mean_gaps = [*self.state["mean_gaps"], fmean(gaps.values())]
            self.state |= {"mean_gaps": mean_gaps, "in_period": not is_over(mean_gaps, self.delta)}
        return {k: client_weights({i: updates[i] for i in members}, self.weights) for k, members in peers.items()}

    def _recall(self, updates: Updates) -> dict[int, dict[int, float]]:
        """Run a round after the period: weight present clients by past rounds as peers.

        Args:
            updates: updates by client id.

        Returns:
            Weights of the clients i in k's classifier, ``{k: {i: weight}}``.
        """
        clients = list(updates)
        shares = {}
        for k in clients:
            counts = dict(zip(clients, self.state["peer_counts"][k, clients].tolist(), strict=True))
            total = sum(counts.values())
            # without a present peer, the client keeps its own classifier
            shares[k] = {i: count / total for i, count in counts.items() if count} or {k: 1.0}
        return shares

    def download(self, client: int) -> Message:
        """Return the feature extractor, and the client's own classifier."""
        return {"weights": self.state["weights"] | self.state["classifiers"].get(client, self.state["initial"])}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the global model; after an update, with the newcomer's own classifier.

        A newcomer can't have peers: the other clients' uploaded classifiers aren't kept.
        """
        own = {} if update is None else self.relevance.classifier(update)
        return {"weights": self.state["weights"] | own}


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
