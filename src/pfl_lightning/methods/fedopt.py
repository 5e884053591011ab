r"""FedAvgM, FedAdagrad, FedAdam and FedYogi: a server that takes the clients' mean change for a gradient.

Symbols: x is the server's model, :math:`\Delta = \sum_k p_k (y_k - x)` the mean change of the clients of the round, so
that -Δ stands for the gradient, and :math:`\eta_s` the server's learning rate. All arithmetic is entry by entry.
"""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.aggregators import Mean, Server, WeightedAverage, Weighting
from pfl_lightning.choices import check_choices
from pfl_lightning.messages import StateDict


class ServerSteps(WeightedAverage):
    """What the four have in common: learnable parameters make steps, and buffers are averaged.

    In a round to which nobody contributed nothing moves, and no moment decays.
    """

    def setup(self, server: Server) -> None:
        """Starts from the common initial model, without moments."""
        super().setup(server)
        self.learnable = server.parameter_names(remove_duplicate=False)
        self.state |= {"m": {}, "v": {}}

    def move(self, target: StateDict) -> None:
        """Make a step by the difference of a mean from the global model.

        Args:
            target: the mean of the uploads, with buffers: x + Δ.
        """
        x, moved = self.state["weights"], dict(target)
        for name in self.learnable:
            # uploads may be of half precision; moments are not
            y = target[name].to(torch.promote_types(target[name].dtype, torch.float32))
            change = y - x[name].to(y)
            # x + step, in an order in which the change itself as a step ends at the mean bit for bit
            moved[name] = (y + (self.step(name, change) - change)).to(target[name].dtype)
        self.state["weights"] = moved

    def step(self, name: str, change: Tensor) -> Tensor:
        """Takes the change of an entry into its moments, and gives the step that it makes."""
        raise NotImplementedError


class FedAvgM(ServerSteps):
    r"""Federated averaging with momentum at the server.

    .. math:: m \leftarrow \beta m + \Delta, \qquad x \leftarrow x + \eta_s m

    Nothing is damped, so that a steady change moves the model :math:`1/(1-\beta)` times as far. Nesterov's variant goes
    :math:`\eta_s(\Delta + \beta m)`; ports differ in which of the two they call FedAvgM. Without momentum and with
    :math:`\eta_s = 1` it is `WeightedAverage` bit for bit.
    Source: Hsu, Qi and Brown, 2019 (https://arxiv.org/abs/1909.06335).

    Args:
        server_lr: :math:`\eta_s`, above 0.
        beta: the momentum, in [0, 1).
        nesterov: whether to look ahead.
        weighting: how clients count in :math:`\Delta`: by their training ``samples``, or all alike (``uniform``).
        mean: a rule in the place of the mean of uploads, as for `WeightedAverage`.

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
        """Along the momentum, or ahead of it."""
        m: StateDict = self.state["m"]
        m[name] = self.beta * m[name] + change if name in m else change
        return self.server_lr * (change + self.beta * m[name] if self.nesterov else m[name])


class FedAdagrad(ServerSteps):
    r"""A server whose steps shrink with all the change that an entry has seen.

    .. math::

        m \leftarrow \beta_1 m + (1 - \beta_1)\Delta, \qquad v \leftarrow v + \Delta^2, \qquad
        x \leftarrow x + \eta_s \frac{m}{\sqrt v + \tau}

    There is no correction of bias, and :math:`\tau` is outside of the root. Clients count by their samples, as in the
    paper's experiments, where its algorithm has them all alike. The defaults are those of ``flwr.serverapp``, which
    follow the paper, whose text was not at hand; Flower's older strategies of FedAdagrad and FedAdam have a
    :math:`\tau` of 1e-9. The paper's tables have learning rates that are tuned for each task. In the first rounds every
    entry moves by up to :math:`\eta_s`, however little clients changed it: where that undoes what they have learned,
    and the loss is higher than before, :math:`\eta_s` is to be smaller, such as 0.01.
    Source: Reddi et al., 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295).

    Args:
        server_lr: :math:`\eta_s`, above 0.
        beta1: decay of the first moment, in [0, 1).
        tau: how adaptive it is, above 0: the smaller, the more equal are the steps of all entries.
        initial: the second moment before the first round: ``tau2`` is :math:`\tau^2`, the least that the paper allows;
            ``zero``, which ports have, makes the first steps larger.
        weighting: how clients count in :math:`\Delta`: by their training ``samples``, or all alike (``uniform``).
        mean: a rule in the place of the mean of uploads, as for `WeightedAverage`.

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
        """The first moment over the root of the second."""
        m: StateDict = self.state["m"]
        v: StateDict = self.state["v"]
        m[name] = (1 - self.beta1) * change + (self.beta1 * m[name] if name in m else 0)
        first = self.tau**2 if self.initial == "tau2" else 0.0
        v[name] = self.second(v[name] if name in v else torch.full_like(change, first), change.square())
        return self.server_lr * m[name] / (v[name].sqrt() + self.tau)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The second moment after a round.

        Args:
            v: before it.
            square: of the change.
        """
        return v + square


class FedAdam(FedAdagrad):
    r"""As `FedAdagrad`, with a second moment that forgets: :math:`v \leftarrow \beta_2 v + (1 - \beta_2)\Delta^2`.

    It is not ``torch.optim.Adam`` at the server, which corrects the bias of young moments.
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

    def __init__(self, beta1: float = 0.9, beta2: float = 0.99, **kwargs: Any) -> None:
        super().__init__(beta1=beta1, **kwargs)
        check_decays(beta2=beta2)
        self.beta2 = beta2

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """A running mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * square


class FedYogi(FedAdam):
    r"""As `FedAdam`, with a second moment that moves by steps of the square's size, whatever its own.

    .. math:: v \leftarrow v - (1 - \beta_2)\,\Delta^2\,\mathrm{sign}(v - \Delta^2)

    It grows as fast as Adam's and falls more slowly.
    Source: Reddi et al., 2021, Algorithm 2 (https://arxiv.org/abs/2003.00295). Takes the arguments of `FedAdam`.
    """

    example_level = True
    sums_only = True
    takes_mean = True

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Towards the square, never below 0."""
        return v - (1 - self.beta2) * square * torch.sign(v - square)


def check_decays(**decays: float) -> None:
    """Refuses decays that don't decay.

    Raises:
        MisconfigurationException: if one isn't in [0, 1).
    """
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise MisconfigurationException(f"aggregator.{name}={value} must be 0 or more and below 1, such as 0.9.")
