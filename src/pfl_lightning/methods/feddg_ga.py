r"""FedDG-GA: clients whose own model loses most by averaging count for more in the next average.

Source: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023
(https://github.com/MediaBrain-SJTU/FedDG-GA). Symbols: x is the server's model, :math:`y_k` client k's model after
local training, :math:`M_k` the error on client k's validation samples, :math:`a_k` its weight in the average, R the
number of rounds.
"""

import math
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.server import Aggregator, Server, WeightedAverage, mean_loss
from pfl_lightning.server.weighted_average import client_weights
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks.base import number_of_classes

Preset: TypeAlias = Literal["paper", "official"]
"""Rules for the weights: the ``paper``'s, or those of the ``official`` code."""


class FedDGGA(FedAvg):
    r"""Trains as `FedAvg`, and reports the errors of the received and of the trained model on validation samples.

    Both are computed in evaluation mode: two more passes over the client's validation samples in a round. The server
    learns :math:`M_k(x)` when the client trains again, since x exists only after the round in which :math:`y_k` was
    sent. These samples also select the reported round, and have then had a say in the weights of clients.
    Source: Zhang et al., 2023 (https://github.com/MediaBrain-SJTU/FedDG-GA).

    Args:
        error: :math:`M_k`: the task's mean ``loss``, or 1 minus the accuracy (``acc``), as in the official code's
            example, which needs classes.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``error`` is none of its choices or needs classes that the task lacks, or a client
            has no validation samples.
    """

    sends = FedAvg.sends | {"received_error", "trained_error"}
    received_error: Tensor

    def __init__(self, *args: Any, error: Literal["loss", "acc"] = "loss", **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        check_choices("model", error=(error, ("loss", "acc")))
        if error == "acc":
            number_of_classes(self.task, "model.error=acc", "take model.error=loss")
        self.error = error
        self.register_buffer("received_error", torch.tensor(0.0, dtype=torch.float64), persistent=False)  # M_k(x)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and compute its error before training."""
        super().on_download(payload, data)
        if data is not None and self.training_follows:
            self.received_error.fill_(self._error(data))

    def upload(self, data: ClientData) -> Message:
        """Return the model, and both errors."""
        trained = torch.tensor(self._error(data), dtype=torch.float64)  # M_k(y_k)
        return super().upload(data) | {"received_error": self.received_error, "trained_error": trained}

    def _error(self, data: ClientData) -> float:
        """Return the error of the model as it is; infinite where the loss isn't a number."""
        if not len(data.val):
            raise MisconfigurationException(
                f"model FedDGGA: client {self.client_id} has no validation samples to measure gaps by; take "
                "data.val_fraction=0.1, or give each client some."
            )
        if self.error == "loss":
            return mean_loss(self, data.val, self.task)
        hits = sum(int((self.task.predictions(self(x))["classes"] == y).sum()) for x, y in data.val.chunks())
        return 1 - hits / len(data.val)

    def configure_aggregator(self) -> Aggregator:
        """Return an average by adjusted weights."""
        return GeneralizationAdjustment()


class GeneralizationAdjustment(WeightedAverage):
    r"""Averages models by weights that follow the clients' generalization gaps.

    .. math::

        g_k = M_k(x_r) - M_k(y_k), \qquad
        a_k \leftarrow \frac{[a_k + d_r (g_k - \bar g) / \max_j |g_j - \bar g|]_0^1}
        {\sum_j [a_j + d_r (g_j - \bar g) / \max_i |g_i - \bar g|]_0^1}, \qquad d_r = d\,\frac{R - r + 1}{R}

    from :math:`a_k = 1/K`, where :math:`x_r = \sum_k a_k y_k` is the average of round r = 1, 2, …, and
    :math:`[\cdot]_0^1` clips to [0, 1]. A client whose model gets worse by averaging has a large gap, and a larger
    weight next time. A client at 0 goes on reporting, and comes back with a gap above the mean. Running statistics are
    averaged by the same weights.

    The paper has all clients in all rounds. With fewer, gaps are known of clients in two successive rounds; the others
    keep their weights, and the weights of a round's clients are divided by their sum. Where all gaps are equal, weights
    stay; where all weights of a round's clients are 0, they count alike. Errors that aren't finite are left out.

    Weights never look at numbers of samples. On scikit-learn's digits it has 82 % after 15 rounds, where `FedAvg` has
    73 %, and 91 % after 50 beside 88 %; on MNIST with 50 samples a client 80 % beside 82 % (docs/results.md,
    "Defaults"). Gaps on three or four validation samples are mostly chance.

    Source: Zhang et al., 2023 (https://github.com/MediaBrain-SJTU/FedDG-GA).

    Args:
        step: d, at least 0; 0 is the plain mean in which clients count alike, bit for bit.
        preset: ``paper``; or ``official``, the released code's rule: gaps without the mean taken out,
            :math:`d_r = \frac{d}{3}\frac{R - r + 2}{R}`, where the 3 is the number of its domains.

    Raises:
        MisconfigurationException: if ``step`` is negative, or ``preset`` is none of its choices.
    """

    fixed_clients = True
    fixed_rounds = True
    needs = frozenset({"weights", "received_error", "trained_error"})

    def __init__(self, step: float = 0.2, preset: Preset = "paper") -> None:
        super().__init__(weighting="uniform")
        check_choices("aggregator", preset=(preset, ("paper", "official")))
        if not 0 <= step < math.inf:
            raise MisconfigurationException(
                f"aggregator.step={step} must be 0 (all clients alike) or more, such as 0.2."
            )
        self.step, self.preset = step, preset

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with equal weights."""
        super().setup(server)
        self.rounds = server.rounds
        # by client: a_k, and M_k(y_k) of the last round's clients
        self.state |= {"a": dict.fromkeys(range(server.num_clients), 1 / server.num_clients), "trained": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Adjust the weights by the gaps of the round before, and average.

        Returns:
            The largest and the smallest weight, ``largest`` and ``smallest``, among the round's clients.
        """
        if not updates:
            return {}
        before = self.state["trained"]
        gaps = {k: float(update["received_error"]) - before[k] for k, update in updates.items() if k in before}
        # the round before is number `round`, counted from 1
        self.state["a"] = self.adjusted(self.state["a"], gaps, round)
        self.state["trained"] = {k: float(update["trained_error"]) for k, update in updates.items()}
        own = {k: self.state["a"][k] for k in updates}
        total = math.fsum(own.values())
        # equal weights as the plain mean has them, without the rounding of a sum
        alike = total == 0 or len(set(own.values())) == 1
        weights = client_weights(updates, "uniform") if alike else {k: a / total for k, a in own.items()}
        self.average(updates, weights)
        return {"largest": max(weights.values()), "smallest": min(weights.values())}

    def adjusted(self, a: dict[int, float], gaps: dict[int, float], round: int) -> dict[int, float]:
        """Return the weights after an adjustment, of sum 1; the same ones where no gap differs.

        Args:
            a: weights of all clients.
            gaps: gaps of clients that took part in the round and in the next one.
            round: number of the round, from 1.
        """
        gaps = {k: gap for k, gap in gaps.items() if math.isfinite(gap)}
        if not gaps:
            return a
        official = self.preset == "official"
        mean = 0.0 if official else math.fsum(gaps.values()) / len(gaps)
        largest = max(abs(gap - mean) for gap in gaps.values())
        # rounding of the mean would make equal gaps differ
        if largest <= 1e-12 * max(map(abs, gaps.values())) or self.step == 0:
            return a
        past = 0.0 if self.rounds is None else (round - (2 if official else 1)) / self.rounds
        step = self.step * max(0.0, 1 - past) / (3 if official else 1)
        moved = {k: min(max(w + step * (gaps[k] - mean) / largest if k in gaps else w, 0.0), 1.0) for k, w in a.items()}
        total = math.fsum(moved.values())
        return {k: w / total for k, w in moved.items()} if total else dict.fromkeys(a, 1 / len(a))
