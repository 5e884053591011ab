r"""q-FedAvg: clients with higher losses have larger weights.

Source: Li et al., 2020 (https://arxiv.org/abs/1905.10497). Symbols: x is the server's model, :math:`F_k` client k's
loss at x, :math:`\Delta_k` the change by its training, and L = 1/eta the inverse of the local learning rate.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server import Aggregator, Server, WeightedAverage, Weighting, mean_loss, mean_model, moved_model
from pfl_lightning.settings import Unpack


class LossReport(FedAvg):
    """Trains as `FedAvg`, and reports the received model's loss on all of the client's training samples.

    The mean loss is computed in evaluation mode, before the client trains: one more pass over its samples. Takes the
    arguments of `FedAvg`.
    """

    sends = FedAvg.sends | {"received_loss"}
    received_loss: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("received_loss", torch.tensor(0.0), persistent=False)  # F_k

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and compute the loss before training."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            self.received_loss.fill_(mean_loss(self, data.train, self.task))

    def upload(self, data: ClientData) -> Message:
        """Return the model, and the received model's loss."""
        return super().upload(data) | {"received_loss": self.received_loss}


class QFedAvg(LossReport):
    """Reports the learning rate beside the received model's loss.

    Takes the arguments of `FedAvg`.
    Source: Li et al., 2020, Algorithm 2 (https://arxiv.org/abs/1905.10497).
    """

    sends = LossReport.sends | {"learning_rate"}

    def upload(self, data: ClientData) -> Message:
        """Return the model, the received model's loss, and the learning rate."""
        return super().upload(data) | {"learning_rate": torch.tensor(self.learning_rate)}

    def configure_aggregator(self) -> Aggregator:
        """Return q-FedAvg's server."""
        return FairAverage()


class FairAverage(WeightedAverage):
    r"""Moves the model by the clients' changes, weighted by powers of the losses.

    .. math::

        x \leftarrow x + \frac{\sum_k F_k^q L \Delta_k}{\sum_k q F_k^{q-1} \lVert L\Delta_k \rVert^2 + L F_k^q}

    which minimises :math:`\sum_k F_k^{q+1}/(q+1)`. A larger q makes clients more equal, and steps shorter: q = 1 may
    need many times the rounds of the plain mean. The norm is over all learnable parameters together; running statistics
    are averaged. With momentum or other optimizers on the clients, L is only a scale. In the paper clients are drawn by
    their samples and count equally; here all are equally likely, and may count by their samples.
    Source: Li et al., 2020, Algorithm 2 (https://arxiv.org/abs/1905.10497).

    Args:
        q: at least 0; 0 is the plain mean bit for bit. The default was chosen on two data sets (docs/results.md,
            "Defaults"). The official code's example has 5, for a linear model of Vehicle; larger values make clients
            more equal only after many more rounds.
        weighting: client weights: all alike (``uniform``), or by training ``samples``.

    Raises:
        MisconfigurationException: if ``q`` is negative.
    """

    needs = WeightedAverage.needs | {"received_loss", "learning_rate"}

    def __init__(self, q: float = 0.01, weighting: Weighting = "uniform") -> None:
        super().__init__(weighting=weighting)
        if not q >= 0:
            raise MisconfigurationException(f"aggregator.q={q} must be 0 (the plain mean) or more, such as 0.01.")
        self.q = q

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        # a tied parameter counts once in the norm, and moves under each of its names
        self.once = server.parameter_names()
        self.learnable = server.parameter_names(remove_duplicate=False)

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Make the step; see `WeightedAverage.average` for the arguments."""
        if self.q == 0:
            super().average(updates, weights)
            return
        x = self.state["weights"]
        losses = {client: float(update["received_loss"]) + 1e-10 for client, update in updates.items()}
        largest = max(losses.values())
        above, below = {}, 0.0
        for client, update in updates.items():
            # numerator and denominator are both divided by L and by the largest loss to the power of q, to keep powers
            # in range
            f, rate, y = losses[client] / largest, float(update["learning_rate"]), update["weights"]
            square = sum(float((y[name].double() - x[name].double()).square().sum()) for name in self.once)
            steep = self.q / largest * f ** (self.q - 1) * square / rate if rate else 0.0
            above[client] = weights[client] * f**self.q
            below += weights[client] * (steep + f**self.q)
        scaled = {client: share / below for client, share in above.items()}
        self.state["weights"] = mean_model(updates, weights) | moved_model(updates, scaled, x, self.learnable)
        self.state["shares"] = dict(weights)
