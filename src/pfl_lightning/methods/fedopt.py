r"""FedAvgM, FedAdagrad, FedAdam and FedYogi: server optimizers with the clients' mean change as the gradient.

Symbols: x is the server's model, :math:`\Delta = \sum_k p_k (y_k - x)` the mean change of the round's clients, so that
-Δ takes the gradient's place, and :math:`\eta_s` the server's learning rate. All arithmetic is entry by entry.
"""

from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import StateDict
from pfl_lightning.server import Mean, Server, WeightedAverage, Weighting
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack, check_choices


class ServerSteps(WeightedAverage):
    """Base class of the four: learnable parameters make steps, and buffers are averaged.

    In a round without updates nothing moves, and no moment decays.
    """

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without moments."""
        super().setup(server)
        self.learnable = server.parameter_names(remove_duplicate=False)
        self.state |= {"m": {}, "v": {}}

    def move(self, target: StateDict) -> None:
        """Make a step by the difference of a mean, or of a rule's result, from the global model.

        Args:
            target: the model of a server that only averages: x + Δ, with buffers.
        """
        x, moved = self.state["weights"], dict(target)
        for name in filter(target.__contains__, self.learnable):
            # uploads may be in half precision; moments are float32 or better
            y = target[name].to(torch.promote_types(target[name].dtype, torch.float32))
            change = y - x[name].to(y)
            # x + step, computed as y + (step - Δ): a step equal to Δ then ends at the mean bit for bit
            moved[name] = (y + (self.step(name, change) - change)).to(target[name].dtype)
        self.state["weights"] = x | moved

    def step(self, name: str, change: Tensor) -> Tensor:
        """Update the moments of an entry by Δ, and return the step.

        Args:
            name: the entry's name.
            change: Δ, in float32 or better.
        """
        raise NotImplementedError


class MomentumSettings(MeanSettings, total=False):
    """Settings of `FedAvgM` but for ``beta``, for the ``**kwargs`` of subclasses."""

    nesterov: bool


class AdaptiveSettings(MeanSettings, total=False):
    """Settings of `FedAdagrad` but for ``beta1``, for the ``**kwargs`` of subclasses."""

    tau: float
    initial: Literal["tau2", "zero"]


class FedAvgM(ServerSteps):
    r"""Federated averaging with momentum on the server.

    .. math:: m \leftarrow \beta m + \Delta, \qquad x \leftarrow x + \eta_s m

    Without damping, a steady change moves the model :math:`1/(1-\beta)` times as far. Nesterov's variant steps by
    :math:`\eta_s(\Delta + \beta m)`; other libraries differ in which of the two they call FedAvgM. With ``beta=0`` and
    :math:`\eta_s = 1` it is `WeightedAverage` bit for bit.
    Source: Hsu, Qi and Brown, 2019 (https://arxiv.org/abs/1909.06335).

    Args:
        server_lr: :math:`\eta_s`, above 0.
        beta: the momentum, in [0, 1).
        nesterov: whether to take Nesterov's step.
        weighting: client weights in :math:`\Delta`: by training ``samples``, or all alike (``uniform``).
        mean: a rule instead of the mean of uploads, as for `WeightedAverage`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def __init__(
        self,
        server_lr: float = 1.0,
        beta: float = 0.9,
        nesterov: bool = False,
        weighting: Weighting = "samples",
        mean: Mean | None = None,
    ) -> None:
        super().__init__(server_lr, weighting, mean)
        check_decays(beta=beta)
        self.beta, self.nesterov = beta, nesterov

    def step(self, name: str, change: Tensor) -> Tensor:
        """Return the step along the momentum, or Nesterov's."""
        m: StateDict = self.state["m"]
        # no factor 1 - beta on the change: a steady change adds up to 1 / (1 - beta) times itself
        m[name] = self.beta * m[name] + change if name in m else change
        return self.server_lr * (change + self.beta * m[name] if self.nesterov else m[name])


class FedAdagrad(ServerSteps):
    r"""Divides each entry's step by the root of the entry's summed squared changes.

    .. math::

        m \leftarrow \beta_1 m + (1 - \beta_1)\Delta, \qquad v \leftarrow v + \Delta^2, \qquad
        x \leftarrow x + \eta_s \frac{m}{\sqrt v + \tau}

    Bias isn't corrected, and :math:`\tau` is outside the root. Clients count by their samples, as in the paper's
    experiments; its algorithm weights them equally. Formula and defaults are those of ``flwr.serverapp``, where v
    begins at 0 (``initial=zero``) and FedAdam corrects the bias by its learning rate; Flower's older strategies have a
    :math:`\tau` of 1e-9 for FedAdagrad and FedAdam. The paper's tables have learning rates tuned for each task. In the
    first rounds every entry moves by up to :math:`\eta_s`, however little clients changed it: if the loss rises, take a
    smaller :math:`\eta_s`, such as 0.01.
    Source: Reddi et al., 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295); adap/flower@fdef7af.

    Args:
        server_lr: :math:`\eta_s`, above 0.
        beta1: decay of the first moment, in [0, 1).
        tau: degree of adaptivity, above 0: with a smaller one, the steps of all entries are more equal.
        initial: the second moment before the first round: ``tau2`` is :math:`\tau^2`, the least that the paper allows;
            ``zero``, as in other libraries, makes the first steps larger.
        weighting: client weights in :math:`\Delta`: by training ``samples``, or all alike (``uniform``).
        mean: a rule instead of the mean of uploads, as for `WeightedAverage`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        initial: Literal["tau2", "zero"] = "tau2",
        weighting: Weighting = "samples",
        mean: Mean | None = None,
    ) -> None:
        super().__init__(server_lr, weighting, mean)
        check_decays(beta1=beta1)
        check_choices("aggregator", initial=(initial, ("tau2", "zero")))
        if not tau > 0:
            raise MisconfigurationException(f"aggregator.tau={tau} must be above 0, such as 0.001.")
        self.beta1, self.tau, self.initial = beta1, tau, initial

    def step(self, name: str, change: Tensor) -> Tensor:
        """Return the first moment over the root of the second, times the learning rate."""
        m: StateDict = self.state["m"]
        v: StateDict = self.state["v"]
        m[name] = (1 - self.beta1) * change + (self.beta1 * m[name] if name in m else 0)
        # v before the first round
        first = self.tau**2 if self.initial == "tau2" else 0.0
        v[name] = self.second(v[name] if name in v else torch.full_like(change, first), change.square())
        return self.server_lr * m[name] / (v[name].sqrt() + self.tau)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the second moment after a round.

        Args:
            v: the second moment before the round.
            square: the squared change.
        """
        return v + square


class FedAdam(FedAdagrad):
    r"""`FedAdagrad` with a decaying second moment: :math:`v \leftarrow \beta_2 v + (1 - \beta_2)\Delta^2`.

    It differs from ``torch.optim.Adam`` on the server and from Flower's FedAdam, which correct the bias of young
    moments.
    Source: Reddi et al., 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Args:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        **kwargs: the other arguments of `FedAdagrad`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99, **kwargs: Unpack[AdaptiveSettings]) -> None:
        super().__init__(beta1=beta1, **kwargs)
        check_decays(beta2=beta2)
        self.beta2 = beta2

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the running mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(FedAdam):
    r"""`FedAdam` with a second moment in steps of a fixed share of the squared change.

    .. math:: v \leftarrow v - (1 - \beta_2)\,\Delta^2\,\mathrm{sign}(v - \Delta^2)

    It grows as fast as Adam's and falls more slowly.
    Source: Reddi et al., 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295). Takes the arguments of `FedAdam`.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the second moment moved towards the square, never below 0."""
        # sign(0) is 0: where v is the square already, it stays
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def check_decays(**decays: float) -> None:
    """Refuse decays outside [0, 1).

    Args:
        **decays: decays by name of the setting.

    Raises:
        MisconfigurationException: if one isn't in [0, 1).
    """
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise MisconfigurationException(f"aggregator.{name}={value} must be 0 or more and below 1, such as 0.9.")
