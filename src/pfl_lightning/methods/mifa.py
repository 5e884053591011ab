r"""MIFA: the server remembers each client's latest change, and steps by the mean of all, whoever takes part.

Source: Gu et al., 2021 (https://arxiv.org/abs/2106.04159). Symbols: x is the server's model, :math:`w_k` client k's
model after training at the learning rate :math:`\eta_k`, :math:`G_k` the client's latest change over its learning rate,
and N the number of clients.
"""

from collections.abc import Mapping

import torch

from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server import Aggregator, Server, WeightedAverage, mean_model


class MIFA(FedAvg):
    """Trains as `FedAvg`, and tells the learning rate.

    Takes the arguments of `FedAvg`.
    Source: Gu et al., 2021, Algorithm 1 (https://arxiv.org/abs/2106.04159).
    """

    sends = FedAvg.sends | {"learning_rate"}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and the learning rate."""
        return super().upload(data) | {"learning_rate": torch.tensor(self.learning_rate, dtype=torch.float64)}

    def configure_aggregator(self) -> Aggregator:
        """Return MIFA's server."""
        return LatestAverage()


class LatestAverage(WeightedAverage):
    r"""Moves the model by the mean of all clients' latest changes, of those in the round and of those away.

    .. math::

        G_k \leftarrow \frac{x - w_k}{\eta_k} \quad (k \in S), \qquad x \leftarrow x - \eta \frac1N \sum_{k=1}^N G_k

    with :math:`\eta` as the mean learning rate of the round's clients S. Clients count equally, however often they
    come: where some come seldom, the mean of those in the round leans to the others, and here it doesn't. Where all
    come, it is `WeightedAverage` with ``weighting=uniform``, bit for bit at equal learning rates. Running statistics
    are averaged over S. The server keeps N changes, each as large as the model's parameters, in checkpoints too.

    The paper has all clients take part in the first round, and the official code waits until each has come once. Here
    nobody waits: :math:`G_k` is 0 until client k comes, as in the official code's ``fdu_no_wait``, so that first steps
    are short if few come.
    Source: Gu et al., 2021, Algorithm 1 (https://arxiv.org/abs/2106.04159); hmgxr128/MIFA_code@c1099d9.
    """

    needs = frozenset({"weights", "learning_rate"})
    fixed_clients = True

    def __init__(self) -> None:
        super().__init__(weighting="uniform")

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with no client remembered."""
        super().setup(server)
        self.num_clients, self.learnable = server.num_clients, server.parameter_names(remove_duplicate=False)
        # -eta_k G_k and eta_k of each client so far, by id
        self.state |= {"changes": {}, "rates": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Make the step, and log how many clients are remembered."""
        super().aggregate(updates, round)
        return {"remembered": float(len(self.state["rates"]))} if updates else {}

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Make the step; see `WeightedAverage.average` for the arguments."""
        x, changes, rates = self.state["weights"], self.state["changes"], self.state["rates"]
        for client, update in updates.items():
            rates[client] = float(update["learning_rate"])
            changes[client] = {}
            for name in self.learnable:
                w = update["weights"][name].cpu()
                # uploads may be in half precision, which has too few digits for sums
                w = w.to(torch.promote_types(w.dtype, torch.float32))
                changes[client][name] = w - x[name].to(w)
        # eta / eta_k of all remembered, as a mean of ratios, which is 1 to the last bit where rates are equal; a client
        # without a learning rate hasn't moved
        scales = {
            client: sum(rates[other] / rate for other in updates) / len(updates) if rate else 0.0
            for client, rate in sorted(rates.items())
        }
        target = mean_model(updates, weights)
        # where all come at one rate, nothing is remembered from before, and the mean of models has all digits
        if len(updates) < self.num_clients or set(scales.values()) != {1.0}:
            for name in self.learnable:
                step = sum(scale / self.num_clients * changes[client][name] for client, scale in scales.items())
                target[name] = (x[name].to(step) + step).to(target[name].dtype)
        self.state |= {"weights": x | target, "shares": dict(weights)}
