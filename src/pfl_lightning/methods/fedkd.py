r"""FedKD: a personal teacher and a student teach each other, and the student's changes travel as low-rank factors.

Source: Wu et al., 2022 (https://arxiv.org/abs/2108.13323). Symbols: T is the teacher, S the student, z their logits, q
the softmax of z, h their features; x is the received student, y the one after training.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, promoted, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.personal_net import PersonalNet
from pfl_lightning.nets import Net, feature_size
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.settings import Unpack


class FedKD(PersonalNet, FedAvg):
    r"""Mutual distillation of a personal teacher and a student, whose change is sent as factors of low rank.

    .. math::

        L_T &= \mathrm{CE}_T + \frac{\mathrm{KL}(q_S \Vert q_T) / C + \mathrm{MSE}(h_T, W h_S)}
        {\mathrm{CE}_T + \mathrm{CE}_S} \\
        L_S &= \mathrm{CE}_S + \frac{\mathrm{KL}(q_T \Vert q_S) / C + \mathrm{MSE}(h_T, W h_S)}
        {\mathrm{CE}_T + \mathrm{CE}_S}

    T, S and the linear map W minimise the sum of both, and the gradient passes through every part of it, denominators
    too. T and W stay with the client, which is evaluated by T once it has taken part. Of each parameter of S with two
    dimensions or more, as a matrix with a row for each unit, the client sends the change's factors of `cut`; of all
    other entries their values. A matrix ``[p, q]`` whose factors of rank r have no fewer numbers, :math:`r (p + q) \ge
    p q`, is sent whole, and nothing of its change is cut, as often with small layers. The server side is
    `LowRankAverage`.

    The facts are the released code's and PFLlib's: divergences are means over samples and classes. Here T and S have
    the same architecture and start from the common initial model, as in PFLlib, which compresses the student's
    parameters and not their change; the released code compares all layers of transformers without W. In both a matrix
    that needs its full rank is sent as zero. PFLlib clips the gradients of T, S and W at the norm 10, each for itself,
    and gives S a learning rate of its own (``mentee_learning_rate``); here all three have the optimizer's. Where a
    client's losses go to 0, as with samples of one class, the fractions grow: give ``trainer.gradient_clip_val``.
    Source: Wu et al., 2022 (https://arxiv.org/abs/2108.13323); wuch15/FedKD@9b9e63f; TsingZ0/PFLlib@d832e76.

    Args:
        distill: weight of the two fractions, at least 0; with 0 T is `Local`'s, and S `FedAvg`'s but for the factors.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``distill`` is negative, or the net's features have no known width.
    """

    sends = frozenset({"factors", "rest"})
    offers = frozenset()
    needs = frozenset({"energy", "factors", "rest"})
    logs = FedAvg.logs | {"personal_loss"}

    requires = frozenset({"classes", "vector features"})
    personal: Net
    energy: Tensor

    def __init__(self, *args: Any, distill: float = 1.0, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if not distill >= 0:
            raise MisconfigurationException(f"model.distill={distill} must be 0 (no distillation) or more, such as 1.")
        self.distill = distill
        self.make_personal(self.net)  # T
        size = feature_size(self.net)
        self.projection = nn.Linear(size, size, bias=False)  # W
        named = self.named_parameters(remove_duplicate=False)
        matrices = [(name, p) for name, p in named if self.is_shared(name) and is_matrix(p)]
        # kept between rounds, as the server sends a change of it
        self.received = Frozen(matrices, persistent=True)  # x
        self.register_buffer("energy", torch.ones((), dtype=torch.float64), persistent=False)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the student, or add its change to the student of the client's last round."""
        if "weights" in payload:
            super().on_download(payload, data)
        else:
            self.assign(moved(self.received.tensors(), payload["factors"]) | payload["rest"])
        # after both ways, so that the next change is added to what the server believes the client to hold
        self.received.take(self.state_dict().items())
        self.energy.copy_(payload["energy"])

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the sum of both losses, and T's loss for the record."""
        x, target = batch
        h_t, h_s = (net.features(x) for net in (self.personal, self.net))
        z_t, z_s = self.personal.classifier(h_t), self.net.classifier(h_s)
        loss_t, loss_s = self.loss(h_t, z_t, target), self.loss(h_s, z_s, target)
        if self.distill > 0:
            log_t, log_s = z_t.log_softmax(1), z_s.log_softmax(1)
            # above 0 also where both nets are sure of all samples
            scale = self.distill / (loss_t + loss_s).clamp_min(torch.finfo(torch.float32).eps)
            hidden = F.mse_loss(self.projection(h_s), h_t)
            # by hand, as torch's divergence is slow for many clients at once
            to_t, to_s = (log_s.exp() * (log_s - log_t)).mean(), (log_t.exp() * (log_t - log_s)).mean()
            loss_t, loss_s = loss_t + scale * (to_t + hidden), loss_s + scale * (to_s + hidden)
        return {"loss": loss_t + loss_s, "personal_loss": loss_t}

    def upload(self, data: ClientData) -> Message:
        """Return the factors of the student's change, and its other entries."""
        weights, energy = super().upload(data)["weights"], float(self.energy)
        # on the CPU under each engine, so that ranks don't depend on the device
        changes = {name: weights[name].cpu() - x.cpu() for name, x in self.received.tensors().items()}
        return {
            "factors": {name: cut(change, energy) for name, change in changes.items()},
            "rest": {name: entry for name, entry in weights.items() if name not in changes},
        }

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of the changes, cut anew."""
        return LowRankAverage()


class LowRankAverage(WeightedAverage):
    r"""Moves the student by the mean of the clients' changes, which is cut to low rank as theirs are.

    .. math:: x \leftarrow x + \mathrm{cut}_{T_t}\Bigl(\frac{1}{|S|} \sum_{k \in S} (y_k - x)\Bigr), \qquad
        T_t = T_0 + \frac{t + 1}{R} (T_1 - T_0)

    in round t of R, from 0, with :math:`\mathrm{cut}_{T_t}` for clients and server; all clients count alike. Entries
    without factors take the mean. A client whose update is in the last mean receives the change's factors, and any
    other client the whole student. Source: as for `FedKD`.

    Args:
        start: :math:`T_0`, share of the squared singular values that factors keep at first, from 0 to 1; 1 keeps all.
        end: :math:`T_1`, the share in the last round, from 0 to 1.

    Raises:
        MisconfigurationException: if a share is out of its range, or shares differ in a run without a limit of rounds.
    """

    needs = frozenset({"factors", "rest"})
    sends = frozenset({"weights", "energy", "factors", "rest"})
    fixed_rounds = True

    def __init__(self, start: float = 0.95, end: float = 0.98) -> None:
        super().__init__(weighting="uniform")
        for name, value in (("start", start), ("end", end)):
            if not 0 <= value <= 1:
                raise MisconfigurationException(f"aggregator.{name}={value} must be a share from 0 to 1, such as 0.95.")
        self.start, self.end = start, end

    def setup(self, server: Server) -> None:
        """Start from the common initial student."""
        super().setup(server)
        if server.rounds is None and self.start != self.end:
            raise MisconfigurationException(
                f"aggregator.end={self.end} is the share in the last of trainer.max_rounds, which has no limit; give "
                "it one."
            )
        self.rounds = server.rounds or 1
        self.state |= {"factors": {}, "rest": {}, "holders": [], "round": 0}

    def energy(self) -> float:
        """Return the share :math:`T_t` of the next round with updates."""
        done: int = self.state["round"]
        return self.start + min((done + 1) / self.rounds, 1) * (self.end - self.start)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Move the student; log the mean share of matrices' numbers that clients' factors have."""
        updates = {client: update for client, update in updates.items() if fits(client, update["factors"])}
        if not updates:
            return {}
        x, share = self.state["weights"], 1 / len(updates)
        rest = weighted_mean([u["rest"] for u in updates.values()], [share] * len(updates))
        factors, sent = {}, 0
        for name in next(iter(updates.values()))["factors"]:
            pairs = [update["factors"][name] for update in updates.values()]
            # a mean of reconstructed matrices, as factors of different clients have no mean; by the uploads, as with
            # precision=64-true the initial student is float32
            mean = torch.stack([joined(pair).to(promoted(pair[0])) for pair in pairs]).mean(0)
            factors[name] = cut(mean.reshape(x[name].shape), self.energy())
            sent += sum(factor.numel() for pair in pairs for factor in pair)
        students = {name: x[name].to(torch.promote_types(x[name].dtype, u.dtype)) for name, (u, _) in factors.items()}
        self.state |= {
            "weights": {**x, **rest, **moved(students, factors)},
            "factors": factors,
            "rest": rest,
            "holders": list(updates),
            "round": round + 1,
        }
        return {"sent": share * sent / max(sum(x[name].numel() for name in factors), 1)}

    def download(self, client: int) -> Message:
        """Return the change to a client that holds the last student, and the whole student to any other."""
        entries = ("factors", "rest") if client in self.state["holders"] else ("weights",)
        # in float64, as clients compare sums of squares with it
        energy = torch.tensor(self.energy(), dtype=torch.float64)
        return {name: self.state[name] for name in entries} | {"energy": energy}


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter has several units with several inputs each.

    Args:
        parameter: the parameter, of any shape.
    """
    return parameter.dim() > 1 and parameter.shape[0] > 1 and parameter[0].numel() > 1


@torch.no_grad()
def cut(matrix: Tensor, energy: float) -> list[Tensor]:
    r"""Return two factors of a matrix, on the CPU, with the least rank r that keeps more than a share of its square.

    .. math:: M = U \Sigma V^T \approx (U_r \Sigma_r) V_r^T, \qquad
        r = \min \Bigl\{ r : \sum_{i \le r} \sigma_i^2 > T \sum_i \sigma_i^2 \Bigr\}

    or the full rank without such an r. Where the factors would have as many numbers as the matrix, they are the matrix
    itself and an empty second factor.

    >>> [list(factor.shape) for factor in cut(torch.diag(torch.tensor([3.0, 1.0, 0.0, 0.0])), energy=0.89)]
    [[4, 1], [1, 4]]

    Args:
        matrix: ``[p, ...]``, taken as ``[p, q]``; of zeros, it has rank 0.
        energy: T, from 0 to 1.

    Returns:
        ``[p, r]`` and ``[r, q]``, or ``[p, q]`` and ``[0, q]``.
    """
    flat = matrix.detach().cpu().flatten(1)
    whole = [flat, flat[:0]]
    # of a diverged client: a decomposition of NaN is an error
    if not flat.isfinite().all():
        return whole
    u, sigma, v = torch.linalg.svd(flat.to(promoted(flat)), full_matrices=False)
    squares = sigma.double().square().cumsum(0)
    # as many as have too small a sum, and one more
    rank = min(int((squares <= energy * squares[-1]).sum()) + 1, len(sigma)) if squares[-1] > 0 else 0
    if rank * sum(flat.shape) >= flat.numel():
        return whole
    return [(u[:, :rank] * sigma[:rank]).to(flat), v[:rank].to(flat)]


def fits(client: int, factors: dict[str, list[Tensor]]) -> bool:
    """Return whether each pair of factors has a product, and warn of a client with other ones, which it left out.

    Args:
        client: the client's id.
        factors: the factors, by name.
    """
    for name, (left, right) in factors.items():
        # ranks are the client's to choose, so that no template has checked them
        if left.shape[1] != len(right) and (len(right) > 0 or left.shape[1] != right.shape[1]):
            rank_zero_warn(
                f"client {client} is left out of the aggregation: its factors of {name} have {left.shape[1]} columns "
                f"and {len(right)} rows."
            )
            return False
    return True


def joined(factors: list[Tensor]) -> Tensor:
    """Return the matrix ``[p, q]`` of two factors from `cut`.

    Args:
        factors: the factors.
    """
    left, right = factors
    return left if left.shape[1] > len(right) else left @ right


def moved(entries: StateDict, factors: dict[str, list[Tensor]]) -> StateDict:
    """Return entries plus their changes, in the entries' types.

    Args:
        entries: the entries, by name.
        factors: the factors of each entry's change, by name.
    """
    return {name: x + joined(factors[name]).to(x).view(x.shape) for name, x in entries.items()}
