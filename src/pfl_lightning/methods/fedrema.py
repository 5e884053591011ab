"""FedReMa: one feature extractor for all clients, and classifiers averaged over each client's peers.

Source: Liang et al., 2024 (https://arxiv.org/abs/2411.01825). Symbols: theta the feature extractor, phi_k client k's
classifier, phi^_k as uploaded, h~ a noise vector instead of features, M a temperature, A_k the peers of client k
(itself among them), G_ki the number of rounds in which i was a peer of k, CCP the critical co-learning period.
"""

from statistics import fmean

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators import Server, WeightedAverage, Weighting, client_weights
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.relevance import Relevance, Segmentation


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
        self.state["classifiers"] = self.state["classifiers"] | {
            k: weighted_mean([self.relevance.classifier(updates[i]) for i in row], list(row.values()))
            for k, row in shares.items()
        }
        gap = {"gap": self.state["mean_gaps"][-1]} if in_period and len(updates) > 2 else {}
        return {"in_period": float(in_period), "peers": fmean(map(len, shares.values())), **gap}

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
