"""FedDyn: dynamic regularisation makes the optima of local losses agree with the global one.

Source: Acar et al., 2021 (https://arxiv.org/abs/2111.04263). Symbols: x is the server's model, :math:`y_k` client k's
after training, :math:`g_k` the client's remembered gradient, K the number of clients and m of those in the round.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.server import Aggregator, Server, WeightedAverage, Weighting, client_weights, mean_model
from pfl_lightning.settings import Unpack, check_choices


class FedDyn(FedAvg):
    r"""Minimises a dynamically regularised loss, and then updates the remembered gradient.

    .. math::

        y_k = \arg\min_w\; F_k(w) - \langle g_k, w \rangle + \frac{\alpha_k}{2} \lVert w - x \rVert^2, \qquad
        g_k \leftarrow g_k - \alpha_k (y_k - x)

    with :math:`g_k = 0` until a client takes part. If training reaches the minimum, :math:`g_k` is the gradient of
    :math:`F_k` there; the paper's theory doesn't cover fewer steps, momentum and adaptive optimizers. The record has
    the loss :math:`F_k` alone. :math:`g_k` stays with its client, and is as large as the trained part of the net.

    The official code divides :math:`\alpha` by a client's share of the samples, relative to equal shares: the common
    optimum then minimises the loss of all samples, and without it the sum of the clients' mean losses. The official
    code also clips the gradient to norm 10 (``trainer.gradient_clip_val``), without the quadratic term; here the
    clipped gradient includes it.
    Source: Acar et al., 2021, Algorithm 1 (https://arxiv.org/abs/2111.04263).

    Args:
        alpha: :math:`\alpha`, above 0; the official code's example has 0.01.
        weighting: ``samples`` divides it by the client's samples over the mean of all clients; ``uniform`` doesn't.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``alpha`` isn't positive, or ``weighting`` is none of its choices.
    """

    needs = FedAvg.needs | {"mean_samples"}
    alpha_k: Tensor

    def __init__(
        self, *args: Any, alpha: float = 0.01, weighting: Weighting = "samples", **kwargs: Unpack[ClientSettings]
    ) -> None:
        super().__init__(*args, **kwargs)
        if not alpha > 0:
            raise MisconfigurationException(f"model.alpha={alpha} must be above 0, such as 0.01.")
        check_choices("model", weighting=(weighting, ("samples", "uniform")))
        self.alpha, self.weighting = alpha, weighting
        parameters = trained_parameters(self, "net")
        self.received = Frozen(parameters.items())  # x
        self.gradient = Frozen([(name, torch.zeros_like(p)) for name, p in parameters.items()], persistent=True)  # g_k
        self.register_buffer("alpha_k", torch.tensor(float(alpha)), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        r"""Load the model, copy x, and compute :math:`\alpha_k`."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())
        if data is not None and self.training_follows and self.weighting == "samples":
            # alpha over the client's share of the samples, relative to equal shares
            mean = payload["mean_samples"]
            samples = torch.as_tensor(data.size("train")).to(mean).clamp_min(1)
            self.alpha_k.copy_(self.alpha * mean / samples)

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        r"""Return the gradients of the regularised loss: :math:`\nabla F_k + \alpha_k (w - x) - g_k`."""
        # added to the gradients and not to the loss, so that the record has F_k
        w, x, g = trained_parameters(self, "net"), self.received.tensors(), self.gradient.tensors()
        added = {f"net.{name}": self.alpha_k * (w[name] - x[name]) - g[name] for name in w}
        return {name: gradient + added[name] for name, gradient in gradients.items()}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and update :math:`g_k`."""
        y, x, g = trained_parameters(self, "net"), self.received.tensors(), self.gradient.tensors()
        for name in g:
            # g_k <- g_k - alpha_k (y_k - x)
            g[name].sub_(self.alpha_k * (y[name] - x[name]))
        return super().upload(data)

    def configure_aggregator(self) -> Aggregator:
        """Return FedDyn's server."""
        return DynamicAverage()


class DynamicAverage(WeightedAverage):
    r"""Sends the mean of the uploads plus H, the clients' accumulated changes.

    .. math::

        H \leftarrow H + \frac1K \sum_{k \in S} (y_k - x), \qquad x \leftarrow \frac1m \sum_{k \in S} y_k + H

    This is the paper's server with :math:`s = -\alpha H`, so that it needs no :math:`\alpha`. Clients count equally,
    whatever their samples; running statistics are averaged. Clients receive x, and are evaluated by it. The global
    model (``test/global_acc``) is the mean of the round's uploads, which is less noisy at first.
    Source: Acar et al., 2021, Algorithm 1 (https://arxiv.org/abs/2111.04263).
    """

    needs = frozenset({"weights"})
    sends = WeightedAverage.sends | {"mean_samples"}
    sums_only = True
    fixed_sizes = True

    def __init__(self) -> None:
        super().__init__(weighting="uniform")

    def setup(self, server: Server) -> None:
        """Start from the common initial model, and compute the clients' mean number of samples."""
        super().setup(server)
        self.num_clients, self.learnable = server.num_clients, server.parameter_names(remove_duplicate=False)
        # all clients' sizes, known before the first round
        sizes = [server.data.size(client, "train") for client in range(server.num_clients)]
        mean_samples = torch.tensor(sum(sizes) / len(sizes), dtype=torch.float64)
        self.state |= {"drift": {}, "mean": server.weights, "mean_samples": mean_samples}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Update H and x; log the length of H."""
        if not updates:
            return {}
        x, drift = self.state["weights"], self.state["drift"]
        mean = mean_model(updates, client_weights(updates, "uniform"))
        sent = dict(mean)
        for name in self.learnable:
            # (1/K) sum (y_k - x) = (m/K) (mean - x)
            moved = len(updates) / self.num_clients * (mean[name] - x[name].to(mean[name]))
            drift[name] = moved + drift[name] if name in drift else moved
            sent[name] = mean[name] + drift[name]
        self.state |= {"weights": sent, "mean": mean}
        return {"drift_norm": sum(float(h.double().square().sum()) for h in drift.values()) ** 0.5}

    def download(self, client: int) -> Message:
        """Return x, and the clients' mean number of samples."""
        return super().download(client) | {"mean_samples": self.state["mean_samples"]}

    def global_model(self) -> StateDict:
        """Return the mean of the last uploads."""
        mean: StateDict = self.state["mean"]
        return mean
