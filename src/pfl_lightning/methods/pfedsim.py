r"""pFedSim: after a warm-up, each client's body is a mix of those of clients with similar heads.

Source: Tan et al., 2023 (https://arxiv.org/abs/2305.15706). Symbols: w_k is client k's model, of body theta_k and head;
phi_kj the similarity of the heads of clients k and j, a_kj the weight of theta_j in client k's body.
"""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from pfl_lightning.client.phases import in_classifier
from pfl_lightning.messages import Message, Updates, weighted_means
from pfl_lightning.nets.base import find_output_layer
from pfl_lightning.server import Server, WeightedAverage

SELF = 0.9999
"""The similarity of a client to itself, below 1 so that its logarithm is finite."""


class PFedSim(WeightedAverage):
    r"""Averages all models in a warm-up, and then mixes bodies by the similarity of heads.

    .. math::

        \varphi_{kj} = \max\Bigl(0, \frac1C \sum_c \cos(W_{k,c}, W_{j,c})\Bigr), \qquad
        a_{kj} \propto -\ln(1 - \varphi_{kj}), \qquad \varphi_{kk} = 0.9999

    with :math:`W_{k,c}` the row of class c in the weight of client k's output layer. A client receives
    :math:`\sum_j a_{kj} \theta_j` over the last bodies of all clients, and its own head. After the warm-up all clients'
    models are the global one. A similarity is computed anew where both clients take part in a round, and is 0 before
    the first such round, so that a client which has met nobody receives its own model. The server keeps every client's
    model; a new client receives the warm-up's. The body is all that is shared outside ``net.classifier``, with buffers.

    Here similarities are at most 0.9999; in FL-bench equal heads give an infinite weight. There a client is scored by
    its model after local training, which is ``trainer.evaluate=after``.
    Source: Tan et al., 2023 (https://arxiv.org/abs/2305.15706); KarhouTam/FL-bench@06e658b.

    Args:
        warmup: share of the planned rounds in the warm-up, in [0, 1], rounded down; with 1 it is `WeightedAverage`.

    Raises:
        MisconfigurationException: if ``warmup`` is out of its range, or a share of an unknown number of rounds.
    """

    requires = frozenset({"classes"})
    fixed_rounds = True

    def __init__(self, warmup: float = 0.5) -> None:
        super().__init__()
        if not 0 <= warmup <= 1:
            raise MisconfigurationException(f"aggregator.warmup={warmup} must be a share from 0 to 1, such as 0.5.")
        self.warmup = warmup

    def setup(self, server: Server) -> None:
        """Start the warm-up from the common initial model."""
        super().setup(server)
        if server.rounds is None and 0 < self.warmup < 1:
            raise MisconfigurationException(
                f"aggregator.warmup={self.warmup} is a share of trainer.max_rounds, which has no limit; give it one."
            )
        self.head = f"{find_output_layer(server.module, server.module.num_classes)}.weight"
        rounds = math.inf if self.warmup == 1 else math.floor(self.warmup * (server.rounds or 0))
        # in the state: a run that is resumed for more rounds keeps the end of its warm-up
        self.state |= {"warmup": rounds, "models": {}, "similar": {}, "mixed": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average models in the warm-up; later mix bodies, and log the mean similarity of the round's clients."""
        if not updates or round < self.state["warmup"]:
            return super().aggregate(updates, round)
        models = self.state["models"] | {client: update["weights"] for client, update in updates.items()}
        self.state["models"] = models = dict(sorted(models.items()))
        phi = similarities(torch.stack([update["weights"][self.head] for update in updates.values()]))
        for row, client in enumerate(updates):
            known = self.state["similar"].setdefault(client, {})
            known |= {other: float(phi[row, at]) for at, other in enumerate(updates) if other != client}
        # phi of all clients with a model, 0 where two have never met
        a = torch.eye(len(models), dtype=torch.float64) * SELF
        for row, client in enumerate(models):
            for at, other in enumerate(models):
                a[row, at] += self.state["similar"][client].get(other, 0.0)
        # log1p keeps digits of the many small similarities
        a = -torch.log1p(-a)
        mixes = weighted_means(list(models.values()), (a / a.sum(1, keepdim=True)).tolist())
        self.state["mixed"] = {
            client: {name: mix[name] for name in mix if not in_classifier(name)}
            for client, mix in zip(models, mixes, strict=True)
        }
        pairs = phi[~torch.eye(len(phi), dtype=torch.bool)]
        return {"similarity": float(pairs.mean())} if len(pairs) else {}

    def download(self, client: int) -> Message:
        """Return the mix of bodies with the client's own head; the global model before its first such round."""
        # a mix has no head, so that the client's own stays
        own = self.state["models"].get(client, self.state["weights"])
        return {"weights": own | self.state["mixed"].get(client, {})}


def similarities(heads: Tensor) -> Tensor:
    r"""Return :math:`\varphi`, the mean cosine of the heads' rows, from 0 to `SELF`.

    >>> similarities(torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], [[-1.0, 0.0], [0.0, -1.0]]]))
    tensor([[0.9999, 0.5000, 0.0000],
            [0.5000, 0.9999, 0.0000],
            [0.0000, 0.0000, 0.9999]])

    Args:
        heads: the weights of n output layers ``[n, C, d]``.
    """
    rows = F.normalize(heads.to(torch.promote_types(heads.dtype, torch.float32)), dim=2)
    return torch.einsum("icd,jcd->ij", rows, rows).div(heads.shape[1]).clamp(0, SELF)
