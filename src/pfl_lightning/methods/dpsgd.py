"""D-PSGD: clients average with their neighbours on a graph, without a model of all.

Sources: Lian et al., 2017 (https://arxiv.org/abs/1705.09056), and with local steps Sun et al., 2023
(https://arxiv.org/abs/2104.11375). Symbols: w_k is the model of client k, W the graph's matrix of weights.
"""

from pfl_lightning.messages import Updates, weighted_means
from pfl_lightning.server.graph import GraphAggregator, metropolis


class GossipAverage(GraphAggregator):
    r"""Mixes models of neighbours: the mean of a client's trained model and the neighbours' is the client's next one.

    .. math:: w_k \leftarrow \sum_j W_{kj} w_j

    with the weights of `metropolis`, whose rows and columns sum to 1, so that the mean of all models stays as it is.
    Only clients of the round have edges in it. All entries that travel are mixed, running statistics too. On the full
    graph it is the plain mean of FedAvg with ``weighting: uniform``. The client side is free: under `FedPer` or
    `FedRep` clients mix the body, and keep their classifiers.

    With one local step it is D-PSGD with the step before the mix; the paper's Algorithm 1 adds the gradient at
    :math:`w_k` to the mix. With more steps and momentum it is DFedAvgM, of Sun et al., 2023.
    Source: Lian et al., 2017, Algorithm 1 (https://arxiv.org/abs/1705.09056).

    Args:
        graph: as for `GraphAggregator`.
        degree: as for `GraphAggregator`.

    Raises:
        MisconfigurationException: as for `GraphAggregator`.
    """

    example_level = True
    needs = frozenset({"weights"})

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Mix the models of the round's clients; log the edges' bytes."""
        if not updates:
            return {}
        hears, logs = self.spread(updates, round)
        mixes = weighted_means([update["weights"] for update in updates.values()], metropolis(hears))
        # clients that stay away keep their models
        self.state["models"] = self.state["models"] | dict(zip(updates, mixes, strict=True))
        return logs
