"""FedReMa: one body for all, and for each client a classifier averaged over its most relevant peers.

Source: Liang et al., 2024 (https://arxiv.org/abs/2411.01825). Symbols: theta the body, phi_k client k's classifier,
phi^_k as uploaded, h~ a vector of noise in the place of features, M a temperature, A_k the peers of client k (itself
among them), G_ki how often k had i among its peers, CCP the critical co-learning period.
"""

from statistics import fmean

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Server, WeightedAverage, Weighting, client_weights
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.relevance import Relevance, Segmentation


def is_over(mean_gaps: list[float], delta: float) -> bool:
    r"""Whether the critical co-learning period ends with the last of its rounds (equation 9).

    .. math:: \bar\Delta^t \le \delta \max_{\tau \le t} \bar\Delta^\tau

    >>> is_over([0.2, 0.4, 0.3], 0.5), is_over([0.2, 0.4, 0.2], 0.5)
    (False, True)

    Args:
        mean_gaps: the mean gap of each round, at least one.
        delta: the share of the largest, in [0, 1].
    """
    return mean_gaps[-1] <= delta * max(mean_gaps)


class FedReMa(WeightedAverage):
    r"""Averages bodies over all clients, and classifiers over each client's most relevant peers.

    In the critical co-learning period (CCP) peers are found anew each round, by what classifiers make of noise:

    .. math::

        p_k = \mathrm{softmax}(\hat\varphi_k(\tilde h) / M), \quad s_{ij} = \cos(p_i, p_j), \quad
        A_k = \mathrm{MDS}(s_k), \quad
        \varphi_k = \frac{\sum_{i \in A_k} n_i \hat\varphi_i}{\sum_{i \in A_k} n_i}, \quad
        G_{ki} \leftarrow G_{ki} + 1 \;\; (i \in A_k)

    It ends for good with the round whose mean gap is at most delta times the largest so far, see `segment` and
    `is_over`. From then on how often clients were peers decides:

    .. math:: \varphi_k = \sum_i G_{ki} \hat\varphi_i / \sum_i G_{ki}

    Sums are over the clients of the round. Those that stay away receive the new body and keep their classifier, which
    is the common initial one until they first take part; one that first does so after the period keeps its own.
    Where the period ends in the first rounds, or features are still poor when it ends, clients go on with few or wrong
    peers, and can end below FedAvg's single model: a smaller ``delta`` prolongs it.
    Rounds of fewer than three clients show no gap and don't end the period. What counts as the classifier is the net's
    choice; the paper's is ``head: all_fc``. The global model is the body with the mean of all classifiers.

    The official code pairs classifiers and clients by position in lists of different orders, averages classifiers in
    place, so that later clients see earlier results, and divides by M on a row's own client alone; none of it is here.

    Args:
        delta: the period ends at this share of the largest mean gap, in [0, 1]: 0 never ends it, 1 at once.
        temperature: M, above 0; a large one makes all classifiers alike.
        probe_max: the noise is uniform from 0 to this, above 0; the paper draws up to 1, the official code up to 0.5.
        shared_probe: whether one vector of noise a round is for all; the official code draws one for each row of S.
        segmentation: which gaps may be the largest, and who is a peer: ``above_excl_top`` leaves the gap to the client
            itself out and takes who is above the largest of the others (official code); ``algorithm1`` looks at all
            gaps and takes the client just below too (the paper's Algorithm 1); ``above_all`` looks at all gaps and
            takes who is above, which may be the client alone.
        weights: of peers in the period: by their training ``samples`` (paper) or ``uniform`` (official code).

    Raises:
        MisconfigurationException: if a number is out of its range, or clients keep their classifier to themselves.
    """

    example_level = True

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
        """Starts with the common initial classifier for every client, and no peers."""
        super().setup(server)
        self.relevance = Relevance(server, self.temperature, self.probe_max, self.shared_probe, self.segmentation)
        self.state |= {
            "initial": {name: server.weights[name] for name in self.relevance.names},
            "classifiers": {},
            "in_period": True,
            "mean_gaps": [],
            "peer_counts": torch.zeros(server.num_clients, server.num_clients, dtype=torch.int64),
            # of the last round of the period, to look at
            "similarity": torch.zeros(0, 0, dtype=torch.float64),
            "peers": {},
            "gaps": {},
        }

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Averages the bodies of all, and each client's classifier over its peers."""
        if not updates:
            return {}
        # theta; the mean classifier, of the same sum, is the global model's alone
        super().aggregate(updates, round)
        in_period = self.state["in_period"]
        shares = self._co_learn(updates, round) if in_period else self._recall(updates)
        # from phi^ throughout: nobody's average may contain another's
        self.state["classifiers"] = self.state["classifiers"] | {
            k: weighted_mean([self.relevance.classifier(updates[i]) for i in row], list(row.values()))
            for k, row in shares.items()
        }
        gap = {"gap": self.state["mean_gaps"][-1]} if in_period and len(updates) > 2 else {}
        return {"in_period": float(in_period), "peers": fmean(map(len, shares.values())), **gap}

    def _co_learn(self, updates: Updates, round: int) -> dict[int, dict[int, float]]:
        """A round of the period: finds peers, counts them, and ends the period; shares of i in k's classifier."""
        similarity, peers, gaps = self.relevance.compare(updates, round)
        counts = self.state["peer_counts"].clone()
        for k, members in peers.items():
            counts[k, members] += 1
        self.state |= {"peer_counts": counts, "similarity": similarity, "peers": peers, "gaps": gaps}
        if len(updates) > 2:
            mean_gaps = [*self.state["mean_gaps"], fmean(gaps.values())]
            self.state |= {"mean_gaps": mean_gaps, "in_period": not is_over(mean_gaps, self.delta)}
        return {k: client_weights({i: updates[i] for i in members}, self.weights) for k, members in peers.items()}

    def _recall(self, updates: Updates) -> dict[int, dict[int, float]]:
        """A round after the period: shares by how often i was a peer of k, of those that are there."""
        clients = list(updates)
        shares = {}
        for k in clients:
            counts = dict(zip(clients, self.state["peer_counts"][k, clients].tolist(), strict=True))
            total = sum(counts.values())
            shares[k] = {i: count / total for i, count in counts.items() if count} or {k: 1.0}
        return shares

    def download(self, client: int) -> Message:
        """The body, and the client's own classifier."""
        return {"weights": self.state["weights"] | self.state["classifiers"].get(client, self.state["initial"])}

    def welcome(self, client: int, update: Message | None) -> Message:
        """The global model, with the mean of all classifiers; once it has a classifier the newcomer keeps its own.

        Who its peers are can't be said: the classifiers that others sent are not kept.
        """
        own = {} if update is None else self.relevance.classifier(update)
        return {"weights": self.state["weights"] | own}
