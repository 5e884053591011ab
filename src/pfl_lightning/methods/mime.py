r"""MimeLite and Mime: local steps by the server's momentum or Adam, whose statistics stand still during a round.

Source: Karimireddy et al., 2020 (https://arxiv.org/abs/2008.03606). Symbols: x is the server's model, :math:`y_i` the
model in training of client i, :math:`f_i` its loss, with :math:`\zeta` on a batch, S the clients of the round, and m
and v the server's statistics. All arithmetic is entry by entry.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.client.at_once import at_once
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, promoted, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedopt import check_decays
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import gradient_at, mean_gradient, trainable, within
from pfl_lightning.server import Aggregator, Server, WeightedAverage, Weighting, client_weights
from pfl_lightning.settings import Unpack


class MimeLite(FedAvg):
    r"""Trains by steps of the server's optimizer with fixed statistics, and reports the gradient at the received model.

    .. math::

        y_i \leftarrow y_i - \eta\, U(\nabla f_i(y_i; \zeta)), \qquad
        U(g) = \frac{(1 - \beta_1)\, g + \beta_1 m}{\epsilon + \sqrt v} = a g + b

    The server sends a and b (``slope`` and ``offset``), which are fixed for the round: however many steps a client
    makes, its own samples don't enter the momentum. The client reports :math:`\nabla f_i(x)` over all of its training
    samples, in evaluation mode, for which each download before training needs a further pass; the server puts it into m
    and v. Local optimizers should be plain SGD, whose learning rate is :math:`\eta`: its own momentum would be added to
    the server's. The server side is `MimicAverage`. Takes the arguments of `FedAvg`.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/2008.03606).
    """

    needs = FedAvg.needs | {"slope", "offset"}
    sends = FedAvg.sends | {"gradient"}

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        entries = {name: torch.zeros_like(parameter) for name, parameter in trained_parameters(self, "net").items()}
        self.slope = Frozen((name, torch.ones_like(entry)) for name, entry in entries.items())  # a
        self.offset, self.gradient = Frozen(entries.items()), Frozen(entries.items())  # b and the gradient at x

    @property
    def reports(self) -> bool:
        """Whether clients report a gradient in this round, which they do in each."""
        return True

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model and the optimizer's step, and compute the gradient before training."""
        super().on_download(payload, data)
        self.slope.take(within("net.", payload["slope"]).items())
        self.offset.take(within("net.", payload["offset"]).items())
        if data is not None and self.training_follows and self.reports:
            self.gradient.take(mean_gradient(self, data.train).items())

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        """Return the step of the server's optimizer, U(g), which plain SGD then makes."""
        a, b = self.slope.tensors(), self.offset.tensors()
        short = {name: name.removeprefix("net.") for name in gradients}
        return {name: a[short[name]] * g + b[short[name]] for name, g in gradients.items()}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and the gradient at the received one."""
        gradient = {f"net.{name}": entry for name, entry in self.gradient.tensors().items()}
        return super().upload(data) | {"gradient": gradient if self.reports else {}}

    def configure_aggregator(self) -> Aggregator:
        """Return MimeLite's server."""
        return MimicAverage()


class Mime(MimeLite):
    r"""`MimeLite` whose gradients are corrected by the mean gradient of a round's clients at the received model.

    .. math::

        y_i \leftarrow y_i - \eta\, U\bigl(\nabla f_i(y_i; \zeta) - \nabla f_i(x; \zeta) + c\bigr), \qquad
        c = \frac{1}{|S|} \sum_{j \in S} \nabla f_j(x)

    A round of the paper has two exchanges, as c has to be known before training: here these are two rounds. In rounds
    0, 2, 4, … clients train nothing and report :math:`\nabla f_i(x)`; in the rounds between they train with c. A run
    so needs twice as many rounds, and an even number of them. With fewer than all clients in a round, those that train
    are others than those of c. Where no client has reported, training is MimeLite's.

    The recorded loss is the task's, without the correction; each batch takes two passes. Dropout draws other units in
    the two, and BatchNorm's running statistics follow the first alone. The server side is `ControlledAverage`. Takes
    the arguments of `FedAvg`.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/2008.03606).
    """

    needs = MimeLite.needs | {"control"}

    corrected: Tensor

    def __init__(self, *args: Any, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        entries = trained_parameters(self, "net").items()
        self.received, self.control = Frozen(entries), Frozen(entries)  # x and c
        self.register_buffer("corrected", torch.tensor(0.0), persistent=False)

    @property
    def reports(self) -> bool:
        """Whether this round is one of reports, without training."""
        return self.round % 2 == 0

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, the optimizer's step and c, and in a round of reports compute the gradient."""
        super().on_download(payload, data)
        self.received.take(trained_parameters(self, "net").items())
        self.corrected.fill_(float(bool(payload["control"])))
        if payload["control"]:
            self.control.take(within("net.", payload["control"]).items())

    def local_phases(self) -> list[Phase]:
        """Train as before, and nothing in a round of reports."""
        # no phase, and not a loss of 0, which would still move running statistics
        return [] if self.reports else super().local_phases()

    def joining_phases(self) -> list[Phase]:
        """Train newcomers as in a round of training."""
        return super().local_phases()

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss, with the corrected gradient."""
        values = super().training_step(batch, batch_idx)
        x, c = self.received.tensors(), self.control.tensors()
        at_x = gradient_at(self, x, batch)
        # a term of value 0 whose gradient is c minus that of the batch at x
        own = [(w * (c[name] - at_x[name])).sum() for name, w in trainable(self.net).items() if name in x]
        term = self.corrected * torch.stack(own).sum()
        return values | {"loss": values["loss"] + (term - term.detach())}

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the gradient in a round of reports, as the server has the model that it sent, or else the model."""
        return super().upload(data) | ({"weights": {}} if self.reports else {})

    def configure_aggregator(self) -> Aggregator:
        """Return Mime's server."""
        return ControlledAverage()


class MimicAverage(WeightedAverage):
    r"""Averages models, and updates the statistics of an optimizer by the clients' mean gradient.

    .. math::

        g = \frac{1}{|S|} \sum_{i \in S} \nabla f_i(x), \qquad m \leftarrow \beta_1 m + (1 - \beta_1)\, g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2, \qquad x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i

    ====================  ===============  =================
    mimicked optimizer    :math:`\beta_1`  :math:`\beta_2`
    ====================  ===============  =================
    SGD                   0                None
    SGD with momentum     above 0          None
    RMSProp               0                a number
    Adam                  above 0          a number
    ====================  ===============  =================

    Without :math:`\beta_2` nothing divides the step. Young moments aren't corrected for their bias. While v is unknown,
    clients of RMSProp and Adam make no steps, so that their first round finds v alone: the paper's formula would divide
    by :math:`\epsilon`. Running statistics are averaged.

    FedJAX takes any optimizer of optax, counts clients by samples (``weighting=samples``), and has the factor
    :math:`1 - \beta_1` of momentum in the learning rate, which has to be so much smaller for equal steps. Its Adam
    puts each batch's gradient into v too, and corrects for bias.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/2008.03606); google/fedjax@c57ee19.

    Args:
        beta1: :math:`\beta_1`, in [0, 1).
        beta2: :math:`\beta_2`, in [0, 1), or None.
        epsilon: :math:`\epsilon`, above 0.
        server_lr: step of learnable parameters towards the mean, above 0; the paper's is 1.
        weighting: client weights in both means: all alike (``uniform``), or by training ``samples``.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    needs = WeightedAverage.needs | {"gradient"}
    sends = WeightedAverage.sends | {"slope", "offset"}
    sums_only = True

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float | None = None,
        epsilon: float = 1e-3,
        server_lr: float = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, weighting)
        check_decays(beta1=beta1, **({} if beta2 is None else {"beta2": beta2}))
        if not 0 < epsilon < math.inf:
            raise MisconfigurationException(f"aggregator.epsilon={epsilon} must be above 0, such as 0.001.")
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without moments."""
        super().setup(server)
        self.server, self.parameters = server, server.parameter_names()
        # a and b are numbers where they are the same for all entries of a tensor
        first = 1 - self.beta1 if self.beta2 is None else 0.0
        self.state |= {"m": {}, "v": {}, "slope": dict.fromkeys(self.parameters, first)}
        self.state["offset"] = dict.fromkeys(self.parameters, 0.0)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the models, and update the moments; log the length of the mean gradient."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        return self.track(self.mean_gradient(updates))

    def mean_gradient(self, updates: Updates) -> StateDict:
        """Return g, the mean of the clients' gradients.

        Args:
            updates: updates by client id, at least one.
        """
        shares = client_weights(updates, self.weighting)
        mean = weighted_mean([update["gradient"] for update in updates.values()], [shares[k] for k in updates])
        # of half precision, squares would be lost
        return {name: entry.to(promoted(entry)) for name, entry in mean.items()}

    def track(self, gradient: StateDict) -> dict[str, float]:
        """Update the moments by a mean gradient, with a and b of the next round, and return the gradient's length.

        Args:
            gradient: g.
        """
        m, v, slope, offset = (self.state[name] for name in ("m", "v", "slope", "offset"))
        for name, g in gradient.items():
            if self.beta1:
                m[name] = (1 - self.beta1) * g + (self.beta1 * m[name] if name in m else 0)
                offset[name] = self.beta1 * m[name]
            if self.beta2 is not None:
                v[name] = (1 - self.beta2) * g.square() + (self.beta2 * v[name] if name in v else 0)
                scale = 1 / (self.epsilon + v[name].sqrt())
                slope[name], offset[name] = (1 - self.beta1) * scale, offset[name] * scale
        return {"gradient_norm": sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5}

    def download(self, client: int) -> Message:
        """Return the model, and the optimizer's step as a and b."""
        dtype = self.server.dtype
        step = {
            part: {name: torch.as_tensor(entry, dtype=dtype) for name, entry in self.state[part].items()}
            for part in ("slope", "offset")
        }
        return super().download(client) | step


class ControlledAverage(MimicAverage):
    r"""`MimicAverage` in pairs of rounds: c is the mean gradient of the first, with which clients train in the second.

    The moments take c after the second, so that both rounds have the same. What a client reported counts for no longer
    than one round of training. Takes the arguments of `MimicAverage`.
    Source: Karimireddy et al., 2020, Algorithm 1 (https://arxiv.org/abs/2008.03606); google/fedjax@c57ee19.
    """

    sends = MimicAverage.sends | {"control"}
    sums_only = True

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without moments and without c."""
        super().setup(server)
        self.state["control"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take c from reports, or average trained models and update the moments; log the length of c."""
        # by what came, and not by the round: an update may come in a later round than it was asked for
        trained = {client: update for client, update in updates.items() if update["weights"]}
        reports = {client: update for client, update in updates.items() if update["gradient"]}
        logs = {}
        if trained:
            WeightedAverage.aggregate(self, trained, round)
            logs = self.track(self.state["control"]) if self.state["control"] else {}
            self.state["control"] = {}
        if reports:
            self.state["control"] = self.mean_gradient(reports)
        return logs

    def download(self, client: int) -> Message:
        """Return the model, the optimizer's step, and c if there is one."""
        return super().download(client) | {"control": self.state["control"]}
