r"""FedPCL: bodies learn by contrast with the class prototypes of all clients, and only prototypes travel.

Source: Tan et al., 2022 (https://arxiv.org/abs/2209.10083). Symbols: z are a sample's features, scaled to the length 1;
G_j the table of client j's prototypes, a row for each class, and G the mean of all tables.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings, Phase, in_body
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.class_vectors import ClassMessage, ClassVectors, class_table
from pfl_lightning.methods.local import Local
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, ClassMeans, Server
from pfl_lightning.settings import Unpack


class FedPCL(Local):
    r"""Trains the body by contrast of features with prototypes, and predicts by the client's own prototypes.

    .. math::

        L = \mathrm{CE}\bigl(z G^T / \tau,\, y\bigr) + \frac1K \sum_{j=1}^K \mathrm{CE}\bigl(z G_j^T / \tau,\, y\bigr)

    over the K clients that have sent a table, where :math:`G_c` stands for a row c that a table lacks. Classes without
    any prototype have no share in the softmax, and samples of such a class add nothing. There is no head: predictions
    are :math:`z G_k^T / \tau` by the client's own table, with minus infinity for classes that it lacks, whose samples
    then have an infinite loss. A client's first update has only prototypes, of the initial body, and until then it
    predicts by the net's classifier, which nothing trains. Prototypes are class means of z over the training samples,
    in evaluation mode, and aren't scaled again. The server side is `PrototypeTables`. Each client learns which classes
    each other one has.

    This is the loss of PFLlib, without the pre-trained bodies of the paper. The official code has a sum over clients
    without the first term, in which prototypes are contrasted with the features of the batch. PFLlib's rows are in the
    order in which classes first appear, while its targets are class numbers; here rows are class numbers. It clips the
    gradient's norm at 10 (``trainer.gradient_clip_val``).
    Source: Tan et al., 2022 (https://arxiv.org/abs/2209.10083); TsingZ0/PFLlib@d832e76; yuetan031/FedPCL@0c3895b, whose
    temperature is the default.

    Args:
        tau: :math:`\tau`, above 0; PFLlib takes 1 by default.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``tau`` isn't positive, or the net's features have no known width.
    """

    sends = frozenset({"prototypes"})
    needs = frozenset({"prototypes", "tables"})

    requires = frozenset({"classes", "vector features", "body"})
    caches = frozenset({"tables"})
    own: Tensor
    has: Tensor

    def __init__(self, *args: Any, tau: float = 0.07, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not tau > 0:
            raise MisconfigurationException(f"model.tau={tau} must be above 0, such as 0.07.")
        self.tau = tau
        size = feature_size(self.net)
        self.prototypes = ClassVectors(self.num_classes, size)  # G
        # G, then all G_j [1 + K, C, d]; empty before there are any. No buffer, of which each client would have one: all
        # clients have the same
        self.tables = torch.zeros(0)
        # kept with the client, which predicts by them
        self.register_buffer("own", torch.zeros(self.num_classes, size))  # G_k
        self.register_buffer("has", torch.zeros(self.num_classes, dtype=torch.bool))

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Take the mean table, and all clients' tables before training."""
        self.prototypes.take(payload["prototypes"])
        if self.training_follows:
            tables = [*payload["tables"].values()]
            self.tables = self.stacked(payload["prototypes"], tables) if tables else torch.zeros(0)

    def stacked(self, mean: ClassMessage, tables: list[ClassMessage]) -> Tensor:
        """Return the mean table and those of all clients, with rows of the mean where one of these has none.

        Args:
            mean: rows of G, by class number.
            tables: rows of each G_j.

        Returns:
            ``[1 + K, C, d]``.
        """
        like = self.prototypes.vectors

        def put(table: Tensor, places: list[int], rows: list[Tensor]) -> None:
            if rows:
                table[torch.tensor(places, device=like.device)] = torch.stack(rows).to(like.device, like.dtype)

        common = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        put(common, [*mean], [*mean.values()])
        stack = common.repeat(1 + len(tables), 1, 1)
        # all rows at once: a stack for each of the tables takes five times as long
        places = [j * len(common) + c for j, table in enumerate(tables, 1) for c in table]
        put(stack.flatten(0, 1), places, [row for table in tables for row in table.values()])
        return stack

    def local_phases(self) -> list[Phase]:
        """Train the body, and nothing before there are prototypes."""
        # no phase, and not a loss of 0, which would still move running statistics
        return [Phase(trains=in_body)] if len(self.tables) else []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of both contrasts."""
        x, target = batch
        z = self.normalized(x)
        # one product for the table of each client and for the mean
        similar = torch.einsum("nd,kcd->knc", z, self.tables.to(z)) / self.tau
        # finite, so that a batch without any known class adds 0 and not NaN
        least = torch.finfo(similar.dtype).min
        total = torch.where(self.prototypes.known, similar, least).logsumexp(2)
        of_target = similar.gather(2, target[None, :, None].expand(len(self.tables), -1, 1))[..., 0]
        losses = ((total - of_target) * self.prototypes.known[target]).mean(1)
        return {"loss": losses[0] + losses[1:].mean()}

    def normalized(self, x: Tensor) -> Tensor:
        """Return z of inputs ``[n, *input_shape]``."""
        return F.normalize(self.net.features(x), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits by the client's own prototypes, or by the classifier before there are any."""
        logits = torch.where(self.has, self.normalized(x) @ self.own.T / self.tau, -torch.inf)
        # by `where` and not by `if`, so that many clients can run at once
        return torch.where(self.has.any(), logits, self.net(x))

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the client's prototypes, and keep them."""
        means, present = class_table(self.normalized, data, self.num_classes)
        self.own.copy_(means)
        self.has.copy_(present)
        return {"prototypes": {c: means[c] for c in data.classes}}

    def configure_aggregator(self) -> Aggregator:
        """Return the tables of all clients, and their mean."""
        return PrototypeTables()


class PrototypeTables(ClassMeans):
    """Sends the last prototypes of every client, and the plain mean of the last round's for each class.

    Payloads grow with the number of clients. Source: as for `FedPCL`.
    """

    def __init__(self) -> None:
        super().__init__(weighted=False)
        self.sends = frozenset({"prototypes", "tables"})

    def setup(self, server: Server) -> None:
        """Start without any prototype."""
        super().setup(server)
        self.state["tables"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the prototypes, and replace the tables of the round's clients."""
        tables = self.state["tables"] | {client: update["prototypes"] for client, update in updates.items()}
        # by id, so that sums don't depend on the rounds in which clients first took part
        self.state["tables"] = dict(sorted(tables.items()))
        return super().aggregate(updates, round)

    def download(self, client: int) -> Message:
        """Return the mean and all tables."""
        return super().download(client) | {"tables": self.state["tables"]}
