"""APPLE: each client's model is a mix of all clients' core models, with learned weights.

Source: Luo and Wu, 2022 (https://arxiv.org/abs/2110.08394). Symbols: c_m the core model of client m, rho_im its weight
in the model of client i (its directed relationship), p_m = n_m / n, M clients.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from pfl_lightning.client import Batch, ClientModule, ClientSettings, Phase
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Others, Pool, StateDict
from pfl_lightning.server import Aggregator, ModelPool, Server
from pfl_lightning.server.model_pool import rows_of_others
from pfl_lightning.settings import Unpack


class APPLE(ClientModule):
    r"""Trains a core model, and the weights of all clients' cores in the client's own model.

    .. math::

        w_i = \sum_m \rho_{im} c_m, \qquad
        \min_{c_i, \rho_i} \; F_i(w_i) + \lambda(r) \frac\mu2 \lVert \rho_i - p \rVert^2, \qquad
        \lambda(r) = \frac{1 + \cos(\pi r / R)}2 \;\; (r < R), \; 0 \;\; (r \ge R)

    by :math:`c_i \leftarrow c_i - \eta \rho_{ii} g` and :math:`\rho_{im} \leftarrow \rho_{im} - \eta_2 (\langle g, c_m
    \rangle + \lambda(r) \mu (\rho_{im} - p_m))`, where :math:`g = \nabla F_i(w_i)`. The model in ``net`` is the core;
    evaluation and prediction use :math:`w_i`. Cores travel, and the other clients' cores are fixed in a round;
    :math:`\rho_i` stays with its client. All cores start from the common initial model; the official code draws one for
    each client.

    A machine whose clients train holds all cores once more, whatever the number of its clients. The optimizer's
    momentum and weight decay apply to core and weights, as in the official code. Only parameters are mixed and sent:
    buffers, such as BatchNorm's running statistics, stay with each client, whatever ``buffers`` says.

    PFLlib has another rule, ``mode=pfllib``: :math:`\eta` is M times the optimizer's learning rate, which makes up for
    :math:`\rho_{ii}` near 1/M; :math:`\rho_i` begins with 1/M each; in its gradient the mean over tensors of the mean
    of :math:`g \odot c_m` stands for the inner product, and is smaller by orders of magnitude; the penalty fades a
    round later; and a client's next core, which it also sends, is its personalised model :math:`w_i`, by which it is
    evaluated. In PFLlib itself :math:`w_i` lacks the last batch's step, and clients see the new cores of clients before
    them in a round.
    Source: Luo and Wu, 2022 (https://arxiv.org/abs/2110.08394).

    Args:
        rho_lr: :math:`\eta_2`, at least 0; the schedule of the learning rate changes it too.
        mu: weight of the penalty, at least 0.
        penalty_share: R as a share of the run's rounds, in [0, 1]; 0 is without the penalty. A resumed run with another
            number of rounds fades by the new one.
        mode: ``paper`` as above, or ``pfllib``, whose learning rate may be too much for a large M.
        start: the first :math:`\rho_i`: p by ``samples``, 1/M each (``uniform``), or the client's ``own`` core alone,
            which is `Local` while ``rho_lr`` is 0; None takes the mode's, ``samples`` or ``uniform``.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if a value is out of its range.
    """

    needs = frozenset({"models", "shares"})
    caches = frozenset({"cores"})

    p: Tensor
    own: Tensor

    def __init__(
        self,
        *args: Any,
        rho_lr: float = 0.01,
        mu: float = 0.1,
        penalty_share: float = 0.2,
        mode: Literal["paper", "pfllib"] = "paper",
        start: Literal["samples", "uniform", "own"] | None = None,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value in (("rho_lr", rho_lr), ("mu", mu)):
            if not 0 <= value < math.inf:
                raise MisconfigurationException(f"model.{name}={value} must be 0 or more, and finite.")
        if not 0 <= penalty_share <= 1:
            raise MisconfigurationException(
                f"model.penalty_share={penalty_share} must be a share of the rounds from 0 to 1, such as 0.2."
            )
        self.rho_lr, self.mu, self.penalty_share = rho_lr, mu, penalty_share
        self.pfllib = mode == "pfllib"
        self.start = start or ("uniform" if self.pfllib else "samples")
        # empty until the first download brings the number of clients
        self.rho = nn.Parameter(torch.empty(0))
        # new at each download: p, and 1 in the client's own place [M]
        self.register_buffer("p", torch.empty(0), persistent=False)
        self.register_buffer("own", torch.empty(0), persistent=False)
        # c_m by name [M, ...], which is no buffer, of which each client would have one: all clients have the same
        self.cores: StateDict = {}

    def is_personal(self, name: str) -> bool:
        """Keep everything; the core also travels."""
        return True

    def is_shared(self, name: str) -> bool:
        """Share the core's parameters."""
        return super().is_shared(name) and name not in self._buffer_names

    def assign(self, entries: Mapping[str, Tensor]) -> None:
        r"""Resize :math:`\rho_i` if necessary, then copy the entries."""
        self._make_room(entries)
        super().assign(entries)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        r"""Resize :math:`\rho_i` if necessary, then load the entries."""
        self._make_room(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _make_room(self, entries: Mapping[str, Tensor]) -> None:
        r"""Resize :math:`\rho_i` for entries to be loaded, and forget the other cores until the next download.

        Args:
            entries: entries to be loaded.
        """
        if "rho" in entries:
            self.rho.data, self.cores = self.rho.new_empty(entries["rho"].shape), {}

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the other clients' cores; the client's own is in place."""
        models, self.p = payload["models"], payload["shares"].to(self.rho)
        count = len(self.p)
        # the payload has all cores but the client's own, whose id is the one left over
        (own,) = set(range(count)) - set(models)
        self.own = (torch.arange(count, device=self.p.device) == own).to(self.p)
        if not len(self.rho):
            starts = {"samples": self.p, "uniform": torch.full_like(self.p, 1 / count), "own": self.own}
            self.rho.data = starts[self.start].clone()
        core = trained_parameters(self, "net").items()
        self.cores = {name: rows_of_others(models, f"net.{name}", count, c.detach()) for name, c in core}

    def mixture(self) -> StateDict:
        """Return :math:`w_i`, by the net's names."""
        # not in half precision, where a small weight is lost beside a much larger one
        with torch.autocast(self.device.type, enabled=False):
            mixed = {}
            for name, c in trained_parameters(self, "net").items():
                rho = self._slowed(c.numel()) if self.pfllib else self.rho
                # the client's own core is the trained one, in place of what others have received of it
                mixed[name] = rho @ self.own * c + torch.tensordot(rho * (1 - self.own), self.cores[name], 1)
            return mixed

    def _slowed(self, size: int) -> Tensor:
        r"""Return :math:`\rho_i` with PFLlib's smaller gradient: a mean over a tensor's entries and over tensors.

        Args:
            size: number of the tensor's entries.
        """
        rho = self.rho.detach()
        return rho + (self.rho - rho) / (size * len(self.cores))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of :math:`w_i`; of the core without other cores, and in evaluation under PFLlib's mode."""
        alone = not self.cores or (self.pfllib and not self.training)
        logits: Tensor = functional_call(self.net, {} if alone else self.mixture(), (x,))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of :math:`w_i` plus the penalty."""
        x, target = batch
        loss = self.task_loss(self(x), target)
        weight = self.mu * self.fade()
        return {"loss": loss + weight / 2 * (self.rho - self.p).square().sum() if weight else loss}

    def fade(self) -> float:
        r"""Return :math:`\lambda(r)`."""
        r = max(0, self.round - 1) if self.pfllib else self.round
        rounds = self.penalty_share * self.num_rounds
        return (1 + math.cos(math.pi * r / rounds)) / 2 if r < rounds else 0.0

    def upload(self, data: ClientData) -> Message:
        """Return the core, which in PFLlib's mode becomes :math:`w_i`."""
        if self.pfllib and self.steps_done:
            self.assign({f"net.{name}": tensor for name, tensor in self.mixture().items()})
        return super().upload(data)

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        r"""Return the configured optimizer, with a separate learning rate for :math:`\rho_i`."""
        core = [parameter for parameter in parameters if parameter is not self.rho]
        optimizer = super().local_optimizer(phase, core)
        optimizer.add_param_group({"params": [self.rho], "lr": self.rho_lr})
        optimizer.param_groups[0]["lr"] *= len(self.rho) if self.pfllib else 1
        return optimizer

    def configure_aggregator(self) -> Aggregator:
        """Return a pool of cores."""
        return CorePool()


class CorePool(ModelPool):
    """Sends each client all other clients' cores and p; cores start from the common initial model.

    Clients tell their numbers of training samples before the first round.
    """

    sends = frozenset({"models", "shares"})
    fixed_sizes = True
    caches = frozenset({"_pool"})

    def __init__(self) -> None:
        super().__init__()
        self._pool = Pool({})

    def setup(self, server: Server) -> None:
        """Start from the common initial model for every client."""
        self.server, clients = server, range(server.num_clients)
        n = torch.tensor([server.data.size(client, "train") for client in clients], dtype=torch.float64)
        self.state |= {"models": dict.fromkeys(clients, server.weights), "shares": n / n.sum()}

    def download(self, client: int) -> Message:
        """Return the cores by client id, and p ``[M]``."""
        if self._pool.models is not self.state["models"]:
            self._pool = Pool(self.state["models"])
        return {"models": Others(self._pool, client), "shares": self.state["shares"].to(self.server.dtype)}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return all cores, and p ``[M + 1]`` with the newcomer in the last place."""
        sizes = [self.server.data.size(each, "train") for each in (*self.state["models"], client)]
        n = torch.tensor(sizes, dtype=torch.float64)
        return {"models": self.state["models"], "shares": (n / n.sum()).to(self.server.dtype)}
