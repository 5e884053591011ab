r"""FedGloSS: sharpness-aware minimisation on the server, which goes up the last round's change before clients train.

Source: Caldarola et al., 2025 (https://arxiv.org/abs/2412.03752). Symbols: w is the server's model, :math:`\tilde w`
the one that clients receive, :math:`w_k` client k's after training, :math:`\sigma_k` the client's dual variable, and
:math:`\sigma` their mean.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client import ClientSettings
from pfl_lightning.messages import StateDict, Updates
from pfl_lightning.methods.feddyn import DynamicAverage, FedDyn
from pfl_lightning.methods.fedsam import FedSAM
from pfl_lightning.server import Aggregator, Server, Weighting
from pfl_lightning.settings import Unpack


class FedGloSS(FedDyn, FedSAM):
    r"""Trains by the gradient at the worst point nearby, with a dual variable for the distance from the received model.

    .. math::

        w_k \leftarrow w_k - \eta \left( \nabla F_k(w_k + e) - \sigma_k + \alpha (w_k - \tilde w) \right), \qquad
        e = \rho_l \frac{\nabla F_k(w_k)}{\lVert \nabla F_k(w_k) \rVert}

    and then :math:`\sigma_k \leftarrow \sigma_k - \alpha (w_k - \tilde w)`. The point is that of `FedSAM`, and the term
    is that of `FedDyn`; :math:`\sigma_k` stays with its client. The paper has :math:`1 / \beta` for :math:`\alpha`, the
    same at all clients. The server is `GlobalSharpness`.

    In the official code a local epoch after the first one starts from a :math:`\tilde w` of its own, the client's model
    at that time; the paper's is the received one, as here. The growth of both distances over the first rounds, a fifth
    of all or more, is left out; the official code grows the server's from the clients' last one.
    Source: Caldarola et al., 2025, Algorithm 1 (https://arxiv.org/abs/2412.03752); pietrocagnasso/fedgloss@cbd6cf5.

    Args:
        rho: :math:`\rho_l`, the clients' distance to the worst point, at least 0; 0 is `FedDyn` bit for bit.
        alpha: :math:`\alpha`, above 0; the official code's :math:`\beta` of 10 and 100 are 0.1 and 0.01.
        weighting: as for `FedDyn`.
        **kwargs: the arguments of `FedSAM` but for ``rho``.

    Raises:
        MisconfigurationException: if ``rho`` is negative, ``alpha`` isn't positive, or ``weighting`` is none of its
            choices.
    """

    def __init__(
        self,
        *args: Any,
        rho: float = 0.15,
        alpha: float = 0.1,
        weighting: Weighting = "uniform",
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, alpha=alpha, weighting=weighting, **kwargs)
        if not 0 <= rho < math.inf:
            raise MisconfigurationException(f"model.rho={rho} must be 0 (which is FedDyn) or more, such as 0.15.")
        # FedSAM's __init__, which FedDyn's calls, has set its own default
        self.rho = rho

    def configure_aggregator(self) -> Aggregator:
        """Return the server with an ascent before clients' training."""
        return GlobalSharpness()


class GlobalSharpness(DynamicAverage):
    r"""Sends the model moved up along the last change, and steps from where the model was.

    .. math::

        \sigma \leftarrow \sigma - \frac{\alpha}{K} \sum_{k \in S} (w_k - \tilde w), \qquad
        \Delta = \tilde w - \frac1m \sum_{k \in S} w_k, \qquad w \leftarrow w - \Delta - \frac{\sigma}{\alpha}

    .. math:: \tilde w = w + \rho \frac{\Delta}{\lVert \Delta \rVert}

    with K clients, m of them in the round. :math:`\Delta` stands for the gradient at w, which would take a round of its
    own; the norm is over all parameters together. In the first round, and after one without a change,
    :math:`\tilde w` is w. The server keeps :math:`\sigma / \alpha` as -H of `DynamicAverage`, and so needs no
    :math:`\alpha`. Running statistics are averaged, and not moved up.

    A payload has one model: clients train from :math:`\tilde w`, and are evaluated by it too. The global model
    (``test/global_acc``) is w. Its place in payloads beside :math:`\tilde w` would double what goes down.

    The official code divides the step of :math:`\sigma` by m once more, so that with more than one client in a round
    :math:`\sigma` isn't the mean of all :math:`\sigma_k`; the paper doesn't. Both weigh :math:`\Delta` by samples, with
    clients of equal sizes in all experiments; here clients count equally, as in :math:`\sigma`.
    Source: Caldarola et al., 2025, Algorithm 1 (https://arxiv.org/abs/2412.03752); pietrocagnasso/fedgloss@cbd6cf5.

    Args:
        rho: :math:`\rho`, the distance that the model is moved up, at least 0; 0 is `DynamicAverage` bit for bit,
            with w as the global model.

    Raises:
        MisconfigurationException: if ``rho`` is negative.
    """

    sums_only = True

    def __init__(self, rho: float = 0.15) -> None:
        super().__init__()
        if not 0 <= rho < math.inf:
            raise MisconfigurationException(
                f"aggregator.rho={rho} must be 0 (which is DynamicAverage) or more, such as 0.15."
            )
        self.rho = rho

    def setup(self, server: Server) -> None:
        r"""Start from the common initial model, and send it as :math:`\tilde w`."""
        super().setup(server)
        # a tied parameter counts once in a norm
        self.parameters = server.parameter_names()
        self.state["model"] = server.weights

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        r"""Update :math:`\sigma`, w and :math:`\tilde w`; log the norms of H and :math:`\Delta`."""
        if not updates:
            return {}
        # before the parent's step, which replaces what clients received
        received, model = self.state["weights"], self.state["model"]
        logs = super().aggregate(updates, round)
        target, mean = self.state["weights"], self.state["mean"]  # mean + H, and the mean
        w, change = dict(target), {}
        for name in self.learnable:
            start = received[name].to(mean[name])
            change[name] = start - mean[name]  # Delta
            # as w - Delta = mean - (received - w)
            w[name] = target[name] - (start - model[name].to(start))
        length = float(torch.stack([change[name].double().norm() for name in self.parameters]).norm())
        sent = dict(w)
        # without a change there is no direction, and 0 / 0 would be one of NaN
        if self.rho and length:
            sent |= {name: w[name] + self.rho / length * step for name, step in change.items()}
        self.state |= {"weights": sent, "model": w}
        return logs | {"change_norm": length}

    def global_model(self) -> StateDict:
        """Return w."""
        model: StateDict = self.state["model"]
        return model
