r"""AdaptiveFedProx: the server raises the proximal term's weight when the loss rises, and lowers it when it falls.

Source: Li et al., 2020, appendix on :math:`\mu` (https://arxiv.org/abs/1812.06127).
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.losses import proximal
from pfl_lightning.methods.q_fedavg import LossReport
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack


class AdaptiveFedProx(LossReport):
    r"""Trains as `FedProx` with the server's :math:`\mu`, and reports the received model's loss.

    The reported loss has no proximal term, which is 0 at the received model :math:`w^t`: it is the client's part of the
    global objective :math:`f(w^t) = \sum_k p_k F_k(w^t)`, on all of its training samples, before it trains. The server
    side is `AdaptiveProximal`. Takes the arguments of `FedAvg`.
    """

    needs = LossReport.needs | {"mu"}

    mu: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.received = Frozen(trained_parameters(self, "net").items())  # w^t
        # a buffer, and no number: engines that train many clients at once read no attribute that a round changes
        self.register_buffer("mu", torch.tensor(0.0), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        r"""Load the model and :math:`\mu`, with a copy of the parameters as :math:`w^t`."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())
        self.mu.copy_(payload["mu"])

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss plus the proximal term."""
        # always computed, since a step can't branch on the value of a buffer
        term = proximal(trained_parameters(self, "net").values(), self.received.buffers())
        return super().loss(features, logits, target) + self.mu * term

    def configure_aggregator(self) -> Aggregator:
        r"""Return the server that adapts :math:`\mu`."""
        return AdaptiveProximal()


class AdaptiveProximal(WeightedAverage):
    r"""Federated averaging with a proximal weight :math:`\mu` that follows the global loss L.

    .. math::

        \mu \leftarrow \begin{cases} \mu + \delta & \text{if } L > L_{prev} \\
        \max(\mu - \delta, 0) & \text{after s rounds in a row with } L \le L_{prev} \end{cases}

    The count of rounds begins anew after each change of :math:`\mu`. The first round counts as a fall, and so does an
    equal loss. A loss that isn't finite changes nothing. L is the mean of the round's clients' losses at the received
    model, weighted as their models. Where few clients take part it changes with the cohort too.

    Rule, start, step and patience are those of FL4Health's ``strategies/fedavg_with_adaptive_constraint.py``, which
    compares mean losses during local training, weighted equally by default.
    Source: Li et al., 2020 (https://arxiv.org/abs/1812.06127); VectorInstitute/FL4Health@ce141b9.

    Args:
        mu: :math:`\mu` in the first round, at least 0.
        delta: :math:`\delta`, at least 0; 0 is `FedProx` bit for bit.
        patience: s, the rounds in a row with a fall before :math:`\mu` falls, at least 1.
        **kwargs: the arguments of `WeightedAverage` but for ``gamma``.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    needs = WeightedAverage.needs | {"received_loss"}
    sends = WeightedAverage.sends | {"mu"}
    sums_only = True
    takes_mean = True

    def __init__(self, mu: float = 1.0, delta: float = 0.1, patience: int = 5, **kwargs: Unpack[MeanSettings]) -> None:
        super().__init__(**kwargs)
        for name, value in (("mu", mu), ("delta", delta)):
            if not 0 <= value < math.inf:
                raise MisconfigurationException(f"aggregator.{name}={value} must be 0 or more, such as 0.1.")
        if patience < 1:
            raise MisconfigurationException(f"aggregator.patience={patience} must be 1 or more, such as 5.")
        self.mu, self.delta, self.patience = mu, delta, patience

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without a loss to compare with."""
        super().setup(server)
        self.server = server
        self.state |= {"mu": self.mu, "falls": 0, "loss": math.inf}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        r"""Average the models, and adapt :math:`\mu`; log both :math:`\mu` of the round and the loss."""
        logs = super().aggregate(updates, round)
        if not updates:
            return logs
        # the weight that this round's clients had, before it changes
        used = self.state["mu"]
        weights = client_weights(updates, self.weighting)
        loss = math.fsum(weights[client] * float(update["received_loss"]) for client, update in updates.items())
        # a loss that isn't finite, once kept, would make each later one a rise
        if math.isfinite(loss):
            self._adapt(loss)
        return logs | {"mu": used, "loss": loss}

    def _adapt(self, loss: float) -> None:
        r"""Change :math:`\mu` by a round's loss.

        Args:
            loss: L.
        """
        # the first loss is compared with infinity, and so is a fall
        falls = self.state["falls"] + 1 if loss <= self.state["loss"] else 0
        if falls == 0:
            self.state["mu"] += self.delta
        elif falls == self.patience:
            self.state["mu"], falls = max(self.state["mu"] - self.delta, 0.0), 0
        self.state |= {"falls": falls, "loss": loss}

    def download(self, client: int) -> Message:
        r"""Return the global model and :math:`\mu`."""
        return super().download(client) | {"mu": torch.tensor(self.state["mu"], dtype=self.server.dtype)}
