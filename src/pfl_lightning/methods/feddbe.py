r"""FedDBE: a trained bias vector for each client's features, and a regulariser on the mean of the features.

Source: Zhang et al., 2023 (https://arxiv.org/abs/2311.14975). Symbols: h are features of d units, :math:`\bar z_k` the
client's bias, r the running mean of its features in a round, :math:`\bar g` the consensus.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.server.means.base import check_models_alone
from pfl_lightning.settings import Unpack


class FedDBE(FedAvg):
    r"""Adds a trained bias to the classifier's input, and holds the mean of the features near the consensus.

    .. math::

        L = \mathrm{CE}(\phi(h + \bar z_k)) + \frac{\kappa}{2}\,\mathrm{mean}_j\,(r_j - \bar g_j)^2, \qquad
        r \leftarrow (1 - \mu)\,r + \mu\,\mathrm{mean}_i\,h_i

    r is 0 at the start of a round, and only the current batch receives a gradient. With :math:`\mu < 1`, r is therefore
    too small at first, and the gradient is :math:`\mu` times as large, as in the official code; an unbiased mean is
    left out. The bias stays with its client and starts at 0. A client is evaluated with its bias and the received
    model.

    The first round trains nothing that lasts: its clients train without bias and regulariser and report r, whose mean
    by samples is the consensus; their models are discarded. In the paper and its official code all clients report then,
    and the consensus is fixed for the whole run, as it is here if all take part. With fewer clients a round, a client
    reports in the first round in which it takes part: it trains without bias and regulariser there too, since the
    regulariser would hold its features at the other clients' mean, and the consensus becomes the mean over all reports
    so far. Its model counts, so that no more rounds are lost. A client that joins after the run reports nothing.
    Source: Zhang et al., 2023 (https://arxiv.org/abs/2311.14975).

    Args:
        kappa: :math:`\kappa`, at least 0. The default was chosen on two data sets (docs/results.md, "Defaults"). The
            official code's script, of a CNN on Fashion-MNIST with all clients in each round, has 50, which is too much
            where few take part; the paper's values for other data and nets could not be verified.
        mu: :math:`\mu`, above 0 and up to 1.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    logs = FedAvg.logs | {"apart"}
    requires = frozenset({"vector features"})
    sends = FedAvg.sends | {"feature_mean"}
    needs = FedAvg.needs | {"consensus"}
    running: Tensor
    consensus: Tensor
    reached: Tensor

    def __init__(self, *args: Any, kappa: float = 10.0, mu: float = 1.0, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not kappa >= 0:
            raise MisconfigurationException(f"model.kappa={kappa} must be 0 (no regulariser) or more, such as 10.")
        if not 0 < mu <= 1:
            raise MisconfigurationException(f"model.mu={mu} must be above 0 and up to 1, such as 1.")
        self.kappa, self.mu = kappa, mu
        zeros = torch.zeros(feature_size(self.net))
        self.bias = nn.Parameter(zeros.clone())
        for name in ("running", "consensus"):
            self.register_buffer(name, zeros.clone(), persistent=False)
        # 1 with a consensus, 0 in the round before it: a factor that switches bias and regulariser without a branch
        self.register_buffer("reached", torch.tensor(0.0), persistent=False)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, and the consensus if the server has one."""
        super().on_download(payload, data)
        # r belongs to one round
        self.running.zero_()
        self.reached.fill_(float(bool(payload["consensus"])))
        if payload["consensus"]:
            self.consensus.copy_(payload["consensus"]["mean"])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss with the bias, plus the regulariser."""
        x, target = batch
        h = self.net.features(x)
        loss = self.loss(h, self.net.classifier(h + self.reached * self.bias), target)
        r = (1 - self.mu) * self.running + self.mu * h.mean(0)
        # detached, so that the next batch's gradient stops at this batch
        self.running.copy_(r.detach())
        apart = 0.5 * self.reached * (r - self.consensus).square().mean()
        return {"loss": loss + self.kappa * apart, "apart": apart}

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs with the client's bias."""
        outputs: Tensor = self.net.classifier(self.net.features(x) + self.bias)
        return outputs

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, and a report of the mean features; zeros after the first report."""
        return super().upload(data) | {"feature_mean": self.running * (1 - self.reached)}

    def configure_aggregator(self) -> Aggregator:
        """Return a server with a consensus of mean features."""
        return DomainConsensus()


class DomainConsensus(WeightedAverage):
    r"""Averages models, and keeps the consensus: the mean of the features in the clients' first reports.

    .. math:: \bar g = \sum_k p_k r_k

    over all reports so far. The models of the first round don't count. A rule given as ``mean`` applies to models and
    features; the server then keeps each client's r, so that the rule sees all of them at each report.
    Source: Zhang et al., 2023 (https://arxiv.org/abs/2311.14975). Takes the arguments of `WeightedAverage`.
    """

    takes_mean = True
    takes_gamma = True
    needs = WeightedAverage.needs | {"feature_mean"}
    sends = WeightedAverage.sends | {"consensus"}
    sums_only = True

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without a consensus."""
        self.summed = server.summed
        if self.mean is not None:
            check_models_alone(self.mean, self.name, "features")
        super().setup(server)
        # reported: each client's weight in the consensus, by id
        self.state |= {"consensus": {}, "reported": {}, "reports": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the models, except in the first round, and take new reports into the consensus.

        Returns:
            ``consensus_norm``, the consensus's length, in rounds with new reports.
        """
        begun = bool(self.state["consensus"])
        logs = super().aggregate(updates, round) if begun or not updates else {}
        if new := {client: update for client, update in updates.items() if not self._has_reported(client)}:
            self._take(updates, new)
            logs |= {"consensus_norm": float(torch.linalg.vector_norm(self.state["consensus"]["mean"]))}
        return logs

    def _has_reported(self, client: int) -> bool:
        """Return True if the consensus includes a client's features."""
        return bool(self.state["consensus"]) and client in self.state["reported"]

    def _take(self, updates: Updates, new: Updates) -> None:
        """Take reports into the consensus.

        Args:
            updates: updates of all clients of the round, by id; clients that reported before send zeros.
            new: updates of clients with their first report, by id, at least one.
        """
        before = sum(self.state["reported"].values())
        counts = {c: float(update["num_samples"]) if self.weighting == "samples" else 1.0 for c, update in new.items()}
        self.state["reported"] |= counts
        if self.mean is None:
            # a stand-in has a part of the sum, to which clients that have reported before add zeros
            heard, total = updates if self.summed else new, sum(counts.values())
            p = {c: (float(u["num_samples"]) if self.weighting == "samples" else 1.0) / total for c, u in heard.items()}
            mean = torch.stack([p[client] * update["feature_mean"] for client, update in heard.items()]).sum(0)
            # a running mean, by the weights of all reports before and of the new ones
            if before:
                share = sum(counts.values()) / (before + sum(counts.values()))
                # the old mean moves by the new reports' share of all weights
                mean = torch.lerp(self.state["consensus"]["mean"].to(mean), mean, share)
        else:
            self.state["reports"] |= {client: {"mean": update["feature_mean"]} for client, update in new.items()}
            sent = self.state["reports"]
            total = before + sum(counts.values())
            p = {client: self.state["reported"][client] / total for client in sent}
            none = {"mean": torch.zeros_like(next(iter(sent.values()))["mean"])}
            mean = self.averaging.entries(sent, p, none, self.state["means"], ["mean"]).entries["mean"]
        self.state["consensus"] = {"mean": mean}

    def download(self, client: int) -> Message:
        """Return the model, and after the client's own report also the consensus."""
        return super().download(client) | {"consensus": self.state["consensus"] if self._has_reported(client) else {}}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the model and the consensus."""
        return super().download(client) | {"consensus": self.state["consensus"]}
