"""SCAFFOLD: local steps corrected by the difference between the client's gradient and the global one.

Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/1910.06378). Symbols: x is the server's model, y_i
the client's after its K steps of size eta, c_i the control variate of client i, c the server's; N clients, S of them in
the round. Control variates are vectors of all trained parameters, one after the other.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from pfl_lightning.client import ClientModule, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.functional import mean_gradient
from pfl_lightning.server import Aggregator, Mean, Server, WeightedAverage
from pfl_lightning.server.means.base import check_models_alone
from pfl_lightning.settings import Unpack


class ControlVariates(ClientModule):
    r"""Corrects each gradient by :math:`c - c_i`, and then computes a new control variate.

    .. math::

        y_i \leftarrow y_i - \eta\,(g_i(y_i) + c - c_i), \qquad
        c_i^+ = \begin{cases} g_i(x) & \text{option I} \\
        c_i - c + \frac{1}{K \eta} (x - y_i) & \text{option II} \end{cases}

    The correction is the gradient of a linear term of the loss, whose value is subtracted again: the recorded loss is
    the cross-entropy. The paper's steps are plain SGD. Other optimizers work with the correction too, but option II
    computes the mean gradient from the client's total change, and is wrong if steps aren't :math:`\eta` times a
    gradient: momentum 0.9 makes it up to ten times too large. A client without steps keeps its control variate. The
    server side is `SCAFFOLD`.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/1910.06378).

    Args:
        option: ``II``, the choice of the paper's experiments; ``I`` takes the gradient of all the client's training
            samples at the received model, in evaluation mode, for which each download before training needs a further
            pass.
        **kwargs: the arguments of `FedAvg`.
    """

    sends = ClientModule.sends | {"control"}
    needs = ClientModule.needs | {"control"}
    own: Tensor
    correction: Tensor
    received: Tensor
    gradient: Tensor

    def __init__(self, *args: Any, option: Literal["I", "II"] = "II", **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.option = option
        zeros = torch.zeros_like(self.vector())
        self.register_buffer("own", zeros)  # c_i
        for name in ("correction", "received", "gradient"):  # c - c_i, x, g_i(x)
            self.register_buffer(name, zeros.clone(), persistent=False)

    def vector(self) -> Tensor:
        """Return all trained parameters of the net as a vector ``[P]``."""
        vector: Tensor = parameters_to_vector(trained_parameters(self, "net").values())
        return vector

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load x and c, and under option I compute the gradient at x before training."""
        super().on_download(payload, data)
        # c - c_i, fixed for the round
        self.correction.copy_(payload["control"]).sub_(self.own)
        self.received.copy_(self.vector())
        if self.option == "I" and data is not None and self.training_follows:
            self.gradient.copy_(parameters_to_vector(mean_gradient(self, data.train).values()))

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the task's loss, with the corrected gradient."""
        # a term of value 0 whose gradient is c - c_i
        term = (self.vector() * self.correction).sum()
        return super().loss(features, logits, target) + (term - term.detach())

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and the change of the control variate."""
        way = self.steps_done * self.learning_rate  # K eta
        if self.option == "I":
            new = self.gradient
        else:
            # option II: c_i - c + (x - y_i) / (K eta), where K eta = way
            new = (self.received - self.vector()) / way - self.correction if way else self.own
        change = new - self.own
        self.own.add_(change)
        return super().upload(data) | {"control": change}

    def configure_aggregator(self) -> Aggregator:
        """Return SCAFFOLD's server."""
        return SCAFFOLD()


class SCAFFOLD(WeightedAverage):
    r"""Moves the model to the plain mean of the uploads, and updates the server's control variate.

    .. math::

        x \leftarrow x + \eta_g \frac{1}{|S|} \sum_{i \in S} (y_i - x), \qquad
        c \leftarrow c + \frac1N \sum_{i \in S} (c_i^+ - c_i)

    so that c is the mean of all :math:`c_i`. Clients count equally, whatever their samples. Only learnable parameters
    take the step :math:`\eta_g`; running statistics are averaged.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/1910.06378).

    Args:
        server_lr: :math:`\eta_g`, above 0; 1, the paper's choice, is the mean itself.
        mean: a rule instead of both means over S, of the models and of the control variates' changes, each for itself.

    Raises:
        MisconfigurationException: if ``server_lr`` isn't positive.
    """

    example_level = True
    fixed_clients = True
    needs = frozenset({"weights", "control"})
    sends = WeightedAverage.sends | {"control"}
    sums_only = True
    takes_mean = True

    def __init__(self, server_lr: float = 1.0, mean: Mean | None = None) -> None:
        super().__init__(server_lr, "uniform", mean)

    def setup(self, server: Server) -> None:
        """Start from the common initial model and c = 0."""
        if self.mean is not None:
            check_models_alone(self.mean, self.name, "control variates")
        super().setup(server)
        self.num_clients = server.num_clients
        parameters = parameters_to_vector(trained_parameters(server.module, "net").values())
        self.state["control"] = torch.zeros_like(parameters, device="cpu", requires_grad=False)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Update x and c; log the length of c."""
        if not updates:
            return {}
        logs = super().aggregate(updates, round)
        c = self.state["control"]
        changes = {client: {"control": update["control"]} for client, update in updates.items()}
        share = 1 / self.num_clients
        if self.mean is not None:
            one = dict.fromkeys(changes, 1.0)
            none = {"control": torch.zeros_like(c)}
            found = self.averaging.entries(changes, one, none, self.state["means"], ["control"])
            # the rule gives a mean over S, and c takes the sum over S divided by N
            changes, share = {0: found.entries}, len(updates) / self.num_clients
        self.state |= weighted_mean([*changes.values(), {"control": c}], [*[share] * len(changes), 1.0])
        return logs | {"control_norm": float(torch.linalg.vector_norm(self.state["control"]))}

    def download(self, client: int) -> Message:
        """Return the model and the control variate."""
        return super().download(client) | {"control": self.state["control"]}
