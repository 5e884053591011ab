"""Plot the similarity of clients' classifiers by round, and the peers that FedReMa would choose."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from pfl_lightning.callbacks.pictures import Pictures
from pfl_lightning.client.common import shared_entries
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import Updates
from pfl_lightning.methods.fedrema import FedReMa, Relevance
from pfl_lightning.plots.similarity import plot_gaps, plot_peer_counts, plot_peers, plot_similarity
from pfl_lightning.runs.report import PackedRows
from pfl_lightning.server import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def peer_precision(peers: Mapping[int, Sequence[int]], groups: Sequence[int]) -> float:
    r"""Return the mean share of a client's peers from its own true group, :math:`|A_k \cap g(k)| / |A_k|`.

    >>> peer_precision({0: [0, 1], 2: [0, 1, 2, 3]}, groups=[0, 0, 1, 1])
    0.75

    Args:
        peers: peers by client id, each client among its own.
        groups: the group of each client ``[K]``.
    """
    return fmean(fmean(groups[i] == groups[k] for i in members) for k, members in peers.items())


class SimilarityPictures(Pictures):
    """Compare clients' classifiers as `FedReMa` does, under any method, and draw the results.

    The round's record gets

    * ``similarity/gap``: the mean over clients of the largest gap between sorted similarities;
    * ``similarity/peers``: the mean number of peers, each client counted among its own;
    * ``similarity/precision``: see `peer_precision`; only if the partitioner knows true groups (`DominantLabels`).

    The pictures are heatmaps of the similarities, the gaps, the numbers of peers with their precision, and for
    `FedReMa` how often each client was another's peer. Training doesn't change. If classifiers aren't sent, nothing is
    recorded or drawn. All data of the pictures are in the checkpoint, so a resumed run's pictures are complete.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``; None draws at the end of ``fit`` only.
        rounds: rounds, from 1, with a heatmap each, in addition to the last round.
        delta: see `FedReMa`; in a run of FedReMa the method's own setting holds.
        temperature: see `FedReMa`; likewise.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    def __init__(
        self,
        every: int | None = None,
        rounds: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500),
        delta: float = 0.5,
        temperature: float = 0.5,
    ) -> None:
        super().__init__(every)
        if not (0 <= delta <= 1 and 0 < temperature < float("inf")):
            raise MisconfigurationException(
                f"SimilarityPictures.delta={delta} must be from 0 to 1, and temperature={temperature} above 0 and "
                "finite."
            )
        self.rounds = tuple(rounds)
        self.delta, self.temperature = delta, temperature
        self.rows: list[dict[str, Any]] = []
        self.similarities: dict[int, Tensor] = {}
        self._packed = PackedRows()
        self._judge: Relevance | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far and the kept similarities."""
        return {"rows": self._packed.state(self.rows), "similarities": self.similarities}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows and similarities of a resumed run."""
        self.rows, self._packed = PackedRows.unpacked(state_dict["rows"]), PackedRows()
        self.similarities = dict(state_dict["similarities"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the classifier's entries to compare, and the true groups."""
        super().on_fit_start(trainer, pl_module)
        federation = cast(Federation, pl_module)
        # a second `fit` with the same callback object starts a new run
        if federation.round == 0:
            self.rows, self.similarities, self._packed = [], {}, PackedRows()
        data = federation.data
        group_of = getattr(data.partitioner, "group_of", None)
        self._groups = [group_of(k, data.num_clients) for k in range(data.num_clients)] if group_of else None
        # FedReMa's own measure where it runs, so that pictures show its decisions and not a second opinion
        self._own = federation.aggregator.find(FedReMa)
        self._judge = self._own.relevance if self._own else onlooker(federation, self.temperature)

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Compare the round's classifiers."""
        judge = self._judge
        if judge is None or not all(
            set(judge.names) <= update.get("weights", {}).keys() for update in updates.values()
        ):
            return
        round, clients = federation.round + 1, list(updates)
        similarity, peers, gaps = judge.compare(updates, federation.round)
        row: dict[str, Any] = {"peers": fmean(map(len, peers.values()))}
        # two clients have one similarity each: there is no gap between sorted values
        if len(clients) > 2:
            row["gap"] = fmean(gaps.values())
        if self._groups is not None:
            row["precision"] = peer_precision(peers, self._groups)
        federation.metrics |= {f"similarity/{name}": value for name, value in row.items()}
        self.rows.append(row | {"round": round, "counts": [len(members) for members in peers.values()]})
        # all clients, absent ones as NaN, so that heatmaps of different cohorts have the same axes
        whole = torch.full((federation.data.num_clients,) * 2, torch.nan, dtype=similarity.dtype)
        whole[torch.tensor(clients)[:, None], torch.tensor(clients)] = similarity
        # a matrix of all clients each round would fill the checkpoint, so only the drawn rounds are kept
        self.similarities = {r: kept for r, kept in self.similarities.items() if r in self.rounds} | {round: whole}

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Draw all rounds so far."""
        if not self.rows:
            return
        groups, names = self._groups, federation.data.client_names
        self.show(trainer, "similarity", lambda: plot_similarity(self.similarities, groups, names), where)
        self.show(trainer, "similarity_peers", self._draw_peers, where)
        if gaps := {row["round"]: row["gap"] for row in self.rows if "gap" in row}:
            delta = self.delta if self._own is None else self._own.delta
            self.show(trainer, "similarity_gap", lambda: plot_gaps(list(gaps), list(gaps.values()), delta), where)
        if (own := self._own) is not None:
            counts = own.state["peer_counts"]
            self.show(trainer, "peer_counts", lambda: plot_peer_counts(counts, groups, names), where)

    def _draw_peers(self) -> "Figure":
        rounds, peers = [row["round"] for row in self.rows], [row["counts"] for row in self.rows]
        if (groups := self._groups) is None:
            return plot_peers(rounds, peers)
        # the precision of peers drawn at random, as a line to compare with
        chance = fmean(groups.count(group) / len(groups) for group in groups)
        return plot_peers(rounds, peers, [row["precision"] for row in self.rows], chance)


def onlooker(federation: Federation, temperature: float) -> Relevance | None:
    """Return FedReMa's measure of similarity for use under another method, or None if clients send no classifier.

    Args:
        federation: the federation.
        temperature: see `FedReMa`.
    """
    client, data = federation.client, federation.data
    shared = shared_entries(client, client.state_dict())
    try:
        return Relevance(Server(data.num_clients, shared, client, data, cast(int, federation.seed)), temperature)
    except MisconfigurationException:
        return None
