r"""FedCross: several models go around the clients, and each is mixed with a partner after every round.

Source: Hu et al., 2024 (https://arxiv.org/abs/2210.08285). Symbols: w_i is the middleware model of slot i as its client
receives it, v_i the same model as the client has trained it, co(i) the partner of slot i.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Message, StateDict, Updates, weighted_mean
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, inner_products
from pfl_lightning.settings import check_choices


class FedCross(Aggregator):
    r"""Keeps as many middleware models as there are clients, and mixes each trained one with a partner.

    .. math:: w_i \leftarrow \alpha v_i + (1 - \alpha)\, v_{co(i)}

    In each round every model goes to another client, in a drawn order. Partners are of the same round's models.
    Parameters and buffers are mixed, counters aren't. The deployed model is the mean of all :math:`w_i`. It is the
    record's global model and the one of new clients, and takes the place of every model after the last of the planned
    rounds, so that a longer run begins again from it. Until then a client is evaluated by the middleware model that it
    would train next, which knows other clients' classes by its mixing alone. With
    :math:`\alpha = 0.99` models of unlike clients meet slowly: after 50 rounds on MNIST the deployed mean is far below
    FedAvg's model (docs/results.md).

    In the paper there are as many models as clients in a round. Here a model whose client stays away rests, so that the
    two agree where all clients take part. No official code was found. PFLlib's version sums cosines over pairs of
    tensors, loses the round's number, so that ``in_order`` always takes the next model there, keeps models with their
    clients, and scores clients by the models that they have just trained (TsingZ0/PFLlib@d832e76).
    Source: Hu et al., 2024 (https://arxiv.org/abs/2210.08285).

    Args:
        alpha: :math:`\alpha`, from 0.5 to 1; with 1 models never mix.
        partner: the partner of a model: the ``lowest`` or ``highest`` cosine of parameters, or ``in_order`` the next
            model in the first round, the one after it in the second, and so on.
        shuffle: whether models change their clients in each round; else model i stays with client i.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    fixed_clients = True
    needs = frozenset({"weights"})
    sends = frozenset({"weights"})

    def __init__(
        self, alpha: float = 0.99, partner: Literal["lowest", "highest", "in_order"] = "lowest", shuffle: bool = True
    ) -> None:
        super().__init__()
        if not 0.5 <= alpha <= 1:
            raise MisconfigurationException(f"aggregator.alpha={alpha} must be from 0.5 to 1, such as 0.99.")
        check_choices("aggregator", partner=(partner, ("lowest", "highest", "in_order")))
        self.alpha, self.partner, self.shuffle = alpha, partner, shuffle

    def setup(self, server: Server) -> None:
        """Start from the common initial model in every slot."""
        self.names, self.seed, self.rounds = server.parameter_names(), server.seed, server.rounds
        # one model under many references: nothing is copied before it is trained
        self.state |= {"models": [server.weights] * server.num_clients, "mean": server.weights}
        self.state["slots"] = self._slots(server.num_clients, 0)

    def _slots(self, clients: int, round: int) -> list[int]:
        """Return the slot of each client in a round.

        Args:
            clients: number of clients.
            round: the round's number.
        """
        if not self.shuffle:
            return list(range(clients))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedcross", round))
        return torch.randperm(clients, generator=generator).tolist()

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Mix the trained models, and draw each model's next client; log the mean cosine of partners."""
        if not updates:
            return {}
        slots = self.state["slots"]
        # by slot, so that results don't depend on which client had which model
        v = dict(sorted((slots[client], update["weights"]) for client, update in updates.items()))
        trained = list(v.values())
        cosine = cosines(inner_products(trained, self.names))
        partners = self._partners(cosine, round)
        models = list(self.state["models"])
        for row, slot in enumerate(v):
            mixed = weighted_mean([trained[row], trained[partners[row]]], [self.alpha, 1 - self.alpha])
            # counters are the model's own, and with alpha = 1 so is each bit
            models[slot] = {n: t if self.alpha < 1 and t.is_floating_point() else v[slot][n] for n, t in mixed.items()}
        mean = weighted_mean(models, [1 / len(models)] * len(models))
        # the end of the plan is the deployment, of one model to all
        self.state |= {
            "models": [mean] * len(models) if round + 1 == self.rounds else models,
            "mean": mean,
            "slots": self._slots(len(models), round + 1),
        }
        return {"cosine": float(cosine[range(len(v)), partners].mean())} if len(v) > 1 else {}

    def _partners(self, cosine: Tensor, round: int) -> Sequence[int]:
        """Return the row of each model's partner; a single model is its own.

        Args:
            cosine: cosines ``[m, m]`` of the round's models.
            round: the round's number.
        """
        m = len(cosine)
        if m == 1:
            return [0]
        if self.partner == "in_order":
            return [(row + round % (m - 1) + 1) % m for row in range(m)]
        # the diagonal is infinite, so that no model is its own partner, whatever the signs of cosines
        away = -cosine if self.partner == "highest" else cosine.clone()
        away.fill_diagonal_(torch.inf)
        return away.argmin(1).tolist()

    def download(self, client: int) -> Message:
        """Return the middleware model of the client's slot."""
        return {"weights": self.state["models"][self.state["slots"][client]]}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the deployed model."""
        return {"weights": self.state["mean"]}

    def global_model(self) -> StateDict:
        """Return the deployed model, the mean of all middleware models."""
        mean: StateDict = self.state["mean"]
        return mean


def cosines(products: Tensor) -> Tensor:
    """Return cosines from inner products; the cosine with a zero vector is 0.

    >>> cosines(torch.tensor([[4.0, 2.0], [2.0, 4.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])

    Args:
        products: inner products ``[n, n]``, each vector's square on the diagonal.
    """
    norms = products.diagonal().clamp_min(0).sqrt()
    return products / (norms[:, None] * norms).clamp_min(torch.finfo(products.dtype).tiny)
