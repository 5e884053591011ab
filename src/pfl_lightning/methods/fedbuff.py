r"""FedBuff: the server steps whenever a buffer of asynchronous updates is full.

Symbols: x is the server's model, :math:`x_k` the model from which client k started, :math:`w_k` its model after
training, :math:`\tau_k` the number of the server's steps in between, K the size of the buffer, and :math:`\eta_g` the
server's learning rate.
"""

from collections.abc import Mapping

from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedopt import FedAvgM
from pfl_lightning.server import Weighting, mean_model, moved_model
from pfl_lightning.settings import check_least


class FedBuff(FedAvgM):
    r"""Adds the mean of the buffered changes to the model, each discounted by its staleness.

    .. math:: x \leftarrow x + \frac{\eta_g}{K} \sum_{k} (1 + \tau_k)^{-a} (w_k - x_k)

    The sum isn't divided by the sum of discounts, so that a buffer of stale updates moves the model less. Running
    statistics are averaged without discount, and with momentum the sum takes the place of the change in `FedAvgM`. The
    buffer is ``trainer.schedule.buffer`` of `Asynchronous`; in synchronous rounds no update is stale, and the server is
    `FedAvgM`, or `WeightedAverage` bit for bit without momentum.

    The formula is that of FLSim (``optimizers/async_aggregators.py``, ``utils/async_trainer``), up to two factors that
    its learning rates take in: it adds changes up without the division by K, and divides discounts by that of a typical
    staleness, 1 by default. Its default is no discount. For the same number of updates the method may end far below
    `FedAvg` where clients are few and unlike, as at four hospitals: fast clients count more often than slow ones, and
    each step follows the few clients in its buffer.
    Source: Nguyen et al., 2022 (https://arxiv.org/abs/2106.06639); facebookresearch/FLSim@7311f2d.

    Args:
        exponent: a, at least 0; 0 gives no discount.
        server_lr: :math:`\eta_g`, above 0.
        beta: the server's momentum, in [0, 1).
        nesterov: whether to take Nesterov's step.
        weighting: client weights: all alike (``uniform``), which is 1/K, or by training ``samples``.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    reads_arrivals = True
    example_level = True
    sums_only = True

    def __init__(
        self,
        exponent: float = 0.5,
        server_lr: float = 1.0,
        beta: float = 0.0,
        nesterov: bool = False,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, beta, nesterov, weighting)
        check_least("aggregator", exponent=(exponent, 0))
        self.exponent = exponent

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Make the step; see `WeightedAverage.average` for the arguments."""
        stale = {client: staleness(update) for client, update in updates.items()}
        discounted = {client: weights[client] * (1 + stale[client]) ** -self.exponent for client in updates}
        target = mean_model(updates, weights)
        # nothing is stale in a synchronous round, where the mean itself has the bits of federated averaging
        if any(stale.values()):
            starts = {client: update["arrival"]["weights"] for client, update in updates.items()}
            names = list(filter(target.__contains__, self.learnable))
            target |= moved_model(updates, discounted, self.state["weights"], names, starts)
        self.move(target)
        self.state["shares"] = discounted


def staleness(update: Message) -> int:
    """Return the number of the server's steps since the client's start; 0 without a schedule.

    Args:
        update: a client's update.
    """
    return int(update["arrival"]["staleness"]) if "arrival" in update else 0
