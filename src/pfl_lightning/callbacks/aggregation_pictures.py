"""Table and pictures of the weights with which a server averages its clients."""

from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.callbacks.pictures import Pictures
from pfl_lightning.callbacks.round_logger import RoundLogger
from pfl_lightning.federation.federation import Federation
from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.plots import (
    plot_distances,
    plot_server_terms,
    plot_weight_heatmaps,
    plot_weights,
    plot_weights_against,
)
from pfl_lightning.runs.report import Row, write_rows
from pfl_lightning.server import WeightedAverage, inner_products

COLUMNS = ("round", "client", "share", "sample_share", "norm")


class AggregationPictures(Pictures):
    r"""Record and draw the weights :math:`\lambda_k` of an averaging server, for any method with such weights.

    ``RUN_FOLDER/aggregation.csv`` has a row for each round and client:

    * ``share``: the client's weight :math:`\lambda_k`;
    * ``sample_share``: the client's share :math:`n_k / n` of the round's training samples;
    * ``norm``: the norm of the client vector :math:`\tau_k = \theta_k - \theta_g` over the shared parameters, where
      :math:`\theta_g` is the global model before the round.

    The pictures in ``RUN_FOLDER/pictures/``:

    * ``weights``, ``weights_heatmap``: :math:`\lambda_k` by round, beside :math:`n_k / n`;
    * ``weights_vs_norms``: :math:`\lambda_k` against :math:`n_k / n` and :math:`\lVert\tau_k\rVert` in the last round;
    * ``objective``: the terms that the server logs, and its seconds, by round;
    * ``distances``: distances between client vectors against distances between label distributions, for all pairs of
      the last round.

    The rows are part of the checkpoint, so a resumed run's table is complete. The cost is one product of the client
    vectors with each other per round. Without a logger nothing is recorded; a server without weights gives a warning,
    and nothing is recorded either. A picture that fails gives a warning, and the run goes on. Source of the pictures:
    FedAWA's analysis of its weights.

    Args:
        every: number of rounds between pictures, in ``pictures/round_N/``, and between writings of the table; None
            draws and writes at the end of ``fit`` only.

    Raises:
        MisconfigurationException: if ``every`` is less than 1.
    """

    def __init__(self, every: int | None = None) -> None:
        super().__init__(every)
        self._table = torch.empty(0, len(COLUMNS), dtype=torch.float64)
        self._clients: list[int] = []
        self._gram = torch.empty(0, 0, dtype=torch.float64)
        self._keeps = False

    def state_dict(self) -> dict[str, Any]:
        """Return the rows so far, and the last round's inner products of client vectors."""
        return {"table": self._table, "gram": self._gram}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows of a resumed run."""
        self._table, self._gram = state_dict["table"], state_dict["gram"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the run's folder, and drop rows of rounds that this federation hasn't made."""
        super().on_fit_start(trainer, pl_module)
        self._keeps = self.folder is not None
        # a second `fit` with the same callback object starts a new run, whose table must not begin with the old rows
        self._table = self._table[self._table[:, 0] <= cast(Federation, pl_module).round]

    def on_aggregate_start(self, trainer: Trainer, federation: Federation, updates: Updates) -> None:
        """Compute the client vectors' inner products, while uploads and the old global model exist."""
        if self._keeps:
            # a cohort may differ from the clients that sent an update: some can be lost
            self._clients = list(updates)
            self._gram = gram_matrix(updates, global_parameters(federation))

    def on_aggregate_end(self, trainer: Trainer, federation: Federation, logs: dict[str, float]) -> None:
        """Add the round's rows, and draw after every ``every`` rounds."""
        if not self._keeps:
            return
        # a server can be made of several aggregators; the averaging one keeps the weights
        average = federation.aggregator.find(WeightedAverage)
        if average is None or not average.state.get("shares"):
            rank_zero_warn(
                f"AggregationPictures: {type(federation.aggregator).__name__} keeps no weights of a model average; "
                "nothing is drawn."
            )
            self._keeps = False
            return
        # a client without a weight, such as one whose update was refused, has weight 0
        shares = average.state["shares"]
        sizes = [federation.data.size(client, "train") for client in self._clients]
        norms = self._gram.diagonal().sqrt().tolist()
        rows = [
            [federation.round + 1, client, shares.get(client, 0.0), size / sum(sizes), norm]
            for client, size, norm in zip(self._clients, sizes, norms, strict=True)
        ]
        self._table = torch.cat([self._table, torch.tensor(rows, dtype=torch.float64)])
        super().on_aggregate_end(trainer, federation, logs)

    def draw(self, trainer: Trainer, federation: Federation, where: str) -> None:
        """Write the table and draw the pictures."""
        if self.folder is None or not len(self._table):
            return
        write_rows(self.folder / "aggregation.csv", [csv_row(row) for row in self._table.tolist()])
        rounds, weights, samples = by_round(self._table, federation.data.num_clients)
        last = self._table[self._table[:, 0] == rounds[-1]]
        clients, title, names = last[:, 1].long(), f"Round {rounds[-1]}", federation.data.client_names

        self.show(trainer, "weights", lambda: plot_weights(rounds, weights, samples, names), where)
        self.show(trainer, "weights_heatmap", lambda: plot_weight_heatmaps(rounds, weights, samples, names), where)
        self.show(
            trainer,
            "weights_vs_norms",
            lambda: plot_weights_against(last[:, 2], last[:, 3], last[:, 4], clients.tolist(), title, names),
            where,
        )
        self.show(trainer, "objective", lambda: plot_server_terms(record_so_far(trainer, federation)), where)
        # distances need a pair of clients, and labels at the server
        if len(clients) > 1 and federation.data.knows_classes:
            labels, vectors = label_distances(federation.data.counts[clients]), vector_distances(self._gram)
            self.show(trainer, "distances", lambda: plot_distances(labels, vectors, title), where)


def global_parameters(federation: Federation) -> StateDict:
    """Return the global model's floating-point parameters, without buffers."""
    # buffers, such as BatchNorm's running means, aren't trained and would distort the norms
    names = {name for name, parameter in federation.client.named_parameters() if parameter.is_floating_point()}
    return {name: tensor for name, tensor in federation.aggregator.global_model().items() if name in names}


def gram_matrix(updates: Updates, theta_g: StateDict) -> Tensor:
    r"""Return products :math:`\langle\tau_j, \tau_k\rangle` of client vectors :math:`\tau_k = \theta_k - \theta_g`.

    Only entries common to all uploads count; computed in float64.

    >>> updates = {3: {"weights": {"w": torch.tensor([3.0, 4.0])}}, 5: {"weights": {"w": torch.tensor([1.0, 0.0])}}}
    >>> gram_matrix(updates, {"w": torch.zeros(2)})
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)

    Args:
        updates: updates by client id, S of them.
        theta_g: the entries of the global model to compare.

    Returns:
        The matrix ``[S, S]``; NaN if uploads and global model have no common entry.
    """
    uploads = [update.get("weights", {}) for update in updates.values()]
    names = [name for name in theta_g if all(name in upload for upload in uploads)]
    if not names:
        return torch.full((len(uploads), len(uploads)), torch.nan, dtype=torch.float64)
    return inner_products(uploads, names, origin=theta_g)[:-1, :-1]


def vector_distances(gram: Tensor) -> dict[str, Tensor]:
    r"""Return cosine and L2 distances of all pairs of vectors, each ``[pairs]``.

    >>> {name: distances.tolist() for name, distances in vector_distances(torch.tensor([[9.0, 0], [0, 16]])).items()}
    {'cosine distance of client vectors': [1.0], 'L2 distance of client vectors': [5.0]}

    Args:
        gram: inner products of the vectors ``[S, S]``; a zero vector gives NaN for the cosine.
    """
    j, k = torch.triu_indices(len(gram), len(gram), offset=1)
    squares = gram.diagonal()
    return {
        "cosine distance of client vectors": 1 - gram[j, k] / (squares[j] * squares[k]).sqrt(),
        # for equal vectors rounding may give a small negative number
        "L2 distance of client vectors": (squares[j] + squares[k] - 2 * gram[j, k]).clamp(min=0).sqrt(),
    }


def label_distances(counts: Tensor) -> Tensor:
    r"""Return total variations :math:`\frac12\sum_c |p_{jc} - p_{kc}|` of pairs of label distributions, ``[pairs]``.

    >>> label_distances(torch.tensor([[5, 5, 0], [0, 3, 3], [8, 8, 0]]))
    tensor([0.5000, 0.0000, 0.5000], dtype=torch.float64)

    Args:
        counts: samples by client and class ``[S, K]``.
    """
    p = counts.double() / counts.sum(1, keepdim=True)
    j, k = torch.triu_indices(len(p), len(p), offset=1)
    return torch.cdist(p, p, p=1)[j, k] / 2


def by_round(table: Tensor, num_clients: int) -> tuple[list[int], Tensor, Tensor]:
    """Return rounds, weights and shares of samples, the latter two ``[rounds, clients]`` with NaN for absent clients.

    Args:
        table: the rows ``[rows, 5]``, in ascending order of rounds.
        num_clients: number of clients in the federation.
    """
    # every round between first and last: a round without rows must show as a gap
    rounds = range(int(table[0, 0]), int(table[-1, 0]) + 1)
    weights, samples = torch.full((2, len(rounds), num_clients), torch.nan, dtype=torch.float64)
    cells = table[:, 0].long() - rounds[0], table[:, 1].long()
    weights[cells], samples[cells] = table[:, 2], table[:, 3]
    return list(rounds), weights, samples


def csv_row(values: list[float]) -> Row:
    """Return a row of the table by column name.

    >>> csv_row([3.0, 7.0, 0.25, 0.2, 1.5])
    {'round': 3, 'client': 7, 'share': 0.25, 'sample_share': 0.2, 'norm': 1.5}
    """
    round, client, *others = values
    return dict(zip(COLUMNS, (int(round), int(client), *others), strict=True))


def record_so_far(trainer: Trainer, federation: Federation) -> list[Row]:
    """Return the rows of the run's record, with the current round's metrics as the last row."""
    records = [callback for callback in trainer.callbacks if isinstance(callback, RoundLogger)]  # type: ignore[attr-defined]
    # the record gets this round's row only after validation
    rows = [*(row for record in records[:1] for row in record.rows), federation.metrics]
    return list({row["round"]: row for row in rows if row}.values())
