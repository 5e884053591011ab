r"""FedADMM: each client prices its distance from the common model, and sends how its model and price have changed.

Source: Gong, Li and Freris, 2022 (https://arxiv.org/abs/2204.03529). Symbols: :math:`\theta` is the server's model,
:math:`w_k` client k's model after training, :math:`y_k` its dual variable, and S the clients of the round.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.server import Aggregator, Mean, Server, WeightedAverage
from pfl_lightning.settings import Unpack, check_choices


class FedADMM(FedAvg):
    r"""Minimises an augmented Lagrangian, moves the dual variable, and sends the change of both.

    .. math::

        w_k^+ = \arg\min_w\; F_k(w) + \langle y_k, w - \theta \rangle + \frac{\rho}{2} \lVert w - \theta \rVert^2,
        \qquad y_k^+ = y_k + \rho (w_k^+ - \theta)

    .. math:: \Delta_k = (w_k^+ - w_k) + \frac{1}{\rho} (y_k^+ - y_k)

    Local training starts from :math:`\theta`; at first :math:`w_k` is the initial model and :math:`y_k = 0`. The upload
    is :math:`\theta + \Delta_k`, so that a server sees weights, and a bound on its change, as by `DPAverage`, is one on
    :math:`\Delta_k`. It equals :math:`w_k^+ + (w_k^+ - w_k)`, which needs no division by :math:`\rho`. The term is that
    of `FedDyn` with ``weighting=uniform`` and :math:`g_k = -y_k`, and with all clients in each round all models are
    `FedDyn`'s too. The record has :math:`F_k` alone. :math:`w_k` and :math:`y_k` stay with their client, each as large
    as the trained part of the net.

    The released code subtracts the received :math:`\theta` in place of :math:`w_k` (``previous="received"``), which
    keeps one model less. Then :math:`\Delta_k = 2 (w_k^+ - \theta)`: with all clients in each round, it ends where the
    mean gradient is :math:`\frac{\rho}{2}` times the way back to the initial model, which matters where :math:`\rho` is
    large. It applies dual variables to buffers too; here these are averaged.
    Source: Gong, Li and Freris, 2022 (https://arxiv.org/abs/2204.03529); YonghaiGong/FedADMM@1efef57.

    Args:
        rho: :math:`\rho`, at least 0; with 0, which has no dual variables, clients train as under `FedAvg` bit for bit.
        previous: :math:`w_k` in the upload: the client's ``own`` model after its last round, or the ``received`` one.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``rho`` is negative, or ``previous`` is none of its choices.
    """

    client_level = True
    example_level = True

    def __init__(
        self,
        *args: Any,
        rho: float = 0.01,
        previous: Literal["own", "received"] = "own",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0 <= rho < math.inf:
            raise MisconfigurationException(f"model.rho={rho} must be 0 or more, such as 0.01.")
        check_choices("model", previous=(previous, ("own", "received")))
        self.rho, self.previous = rho, previous
        parameters = trained_parameters(self, "net")
        self.received = Frozen(parameters.items())  # theta
        self.dual = Frozen([(name, torch.zeros_like(p)) for name, p in parameters.items()], persistent=True)  # y_k
        # w_k
        self.last = Frozen(parameters.items() if previous == "own" else (), persistent=True)
        # all names of a tied parameter, with its first one
        first = {id(parameter): name for name, parameter in self.net.named_parameters()}
        self.first = {name: first[id(p)] for name, p in self.net.named_parameters(remove_duplicate=False)}

    def settle_common(self) -> None:
        """Fix the common parameters, and take the weights at the federation's set-up as the first :math:`w_k`."""
        super().settle_common()
        # they may have been loaded since the module was made, and a first change is from what the server starts from
        self.last.take(trained_parameters(self, "net").items())

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        r"""Load the model, with a copy of the parameters as :math:`\theta`."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        r"""Return the gradients of the augmented Lagrangian: :math:`\nabla F_k + y_k + \rho (w - \theta)`."""
        if self.rho == 0:
            return gradients
        w, theta, y = trained_parameters(self, "net"), self.received.tensors(), self.dual.tensors()
        # a term of the gradient, not of the loss, so that the record has F_k
        added = {f"net.{name}": self.rho * (w[name] - theta[name]) + y[name] for name in w}
        return {name: gradient + added[name] for name, gradient in gradients.items()}

    @at_once
    def upload(self, data: ClientData) -> Message:
        r"""Return :math:`\theta + \Delta_k`, and update :math:`y_k` and :math:`w_k`."""
        update = super().upload(data)
        w, theta, y = trained_parameters(self, "net"), self.received.tensors(), self.dual.tensors()
        before = theta if self.previous == "received" else self.last.tensors()
        # theta + (w+ - w) + (y+ - y) / rho, in which (y+ - y) / rho = w+ - theta
        sent = {name: w[name] + (w[name] - before[name]) for name in w}
        tied = {f"net.{name}": sent[first] for name, first in self.first.items() if first in sent}
        for name in y:
            y[name].add_(self.rho * (w[name] - theta[name]))
        self.last.take(w.items())
        return update | {"weights": {name: tied.get(name, entry) for name, entry in update["weights"].items()}}

    def configure_aggregator(self) -> Aggregator:
        r"""Return the server whose step is the share of clients in the round."""
        return PrimalDualAverage()


class PrimalDualAverage(WeightedAverage):
    r"""Steps along the plain mean of the clients' changes.

    .. math:: \theta \leftarrow \theta + \eta \frac{1}{|S|} \sum_{k \in S} \Delta_k

    With :math:`\eta = |S| / K` of K clients, :math:`\theta` stays the mean of all :math:`w_k + y_k / \rho`, as in the
    alternating direction method of multipliers, and a model at which nothing moves any more is an optimum of the
    clients' mean loss. The paper and the released code take 1, whoever takes part. Such a step is faster at first, and
    too long where few take part and local training comes near its minimum: with half of four clients in each round of a
    convex problem it diverges. With ``previous="received"``, which has no such sum to keep, take 1. Running statistics
    are averaged.
    Source: Gong, Li and Freris, 2022 (https://arxiv.org/abs/2204.03529).

    Args:
        step: :math:`\eta`, above 0; None is :math:`|S| / K` of each round.
        mean: a rule instead of the mean of uploads, as for `WeightedAverage`.

    Raises:
        MisconfigurationException: if ``step`` isn't positive.
    """

    example_level = True
    fixed_clients = True
    sums_only = True
    takes_mean = True

    def __init__(self, step: float | None = None, mean: Mean | None = None) -> None:
        super().__init__(weighting="uniform", mean=mean)
        if step is not None and not step > 0:
            raise MisconfigurationException(
                f"aggregator.step={step} must be above 0, such as 1, or null, which is the share of clients in a round."
            )
        self.step = step

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        self.num_clients, self.learnable = server.num_clients, server.parameter_names(remove_duplicate=False)

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Make the step; see `WeightedAverage.average` for the arguments."""
        theta, target = self.state["weights"], self.mean_of(updates, weights)
        eta = len(updates) / self.num_clients if self.step is None else self.step
        # a step of 1 ends at the mean bit for bit
        if eta != 1:
            for name in filter(target.__contains__, self.learnable):
                target[name] = torch.lerp(theta[name].to(target[name]), target[name], eta)
        self.state["weights"] = theta | target
