r"""FedSelect: single entries of the net become personal, those that moved most.

Source: Tamirisa et al., 2024 (https://arxiv.org/abs/2404.02478). Symbols: x are the received weights, v_k the client's
personal ones, m_k the client's mask, which is 1 at personal entries.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from pfl_lightning.client import Batch, ClientSettings, Phase
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, promoted
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedcac import packed, unpacked
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import loss_at
from pfl_lightning.server import Aggregator, WeightedAverage
from pfl_lightning.settings import Unpack


class FedSelect(FedAvg):
    r"""Trains personal and shared entries of one net in turn, and makes more of them personal every few rounds.

    .. math:: w_k = m_k \odot v_k + (1 - m_k) \odot x

    is the client's model. In a round it trains the personal entries for an epoch and then the shared ones for another,
    so many times over. After every third round but the first, in each tensor with "weight" in its name, a share of the
    entries that are still shared becomes personal: the ones with the largest change since the last such round, or since
    the common initial model. A tensor with a larger share of personal entries than a bound gets no more. All entries of
    a tie are taken, and so a tensor that hasn't moved becomes personal as a whole. New personal entries begin at the
    next mean. Biases are always shared, and buffers, such as running statistics, stay with the client.

    While nothing is personal, the first of the two epochs changes no weight. The optimizer is free: personal and shared
    entries are separate tensors, so that momentum and weight decay of one don't move the other.
    Source: Tamirisa et al., 2024 (https://arxiv.org/abs/2404.02478); lapisrocks/fedselect@0949f8a, which trains by
    plain SGD with lr 0.05, and draws its clients once for the whole run.

    Args:
        rate: share of a tensor's shared entries that become personal at once, above 0 and at most 1.
        bound: share of personal entries above which a tensor gets no more, from 0 to 1.
        every: number of rounds between two such changes, at least 1.
        alternations: pairs of epochs in a round, at least 1. The official code has 15, for 30 times the local steps of
            a method with one epoch a round.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    sends = FedAvg.sends | {"masks"}

    def __init__(
        self,
        *args: Any,
        rate: float = 0.25,
        bound: float = 0.8,
        every: int = 3,
        alternations: int = 1,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed, advice in (
            ("rate", rate, 0 < rate <= 1, "above 0 and at most 1, such as 0.25"),
            ("bound", bound, 0 <= bound <= 1, "from 0 to 1, such as 0.8"),
            ("every", every, every >= 1, "1 or more, such as 3"),
            ("alternations", alternations, alternations >= 1, "1 or more, such as 15"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        self.rate, self.bound, self.every, self.alternations = rate, bound, every, alternations
        x = trained_parameters(self, "net")
        self.own = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(t.detach().clone()) for name, t in x.items()})
        # entries that became personal after the client's last training are fresh: they begin at the next mean
        none = [(name, torch.zeros_like(tensor, dtype=torch.bool)) for name, tensor in x.items()]
        self.mask, self.fresh = Frozen(none, persistent=True), Frozen(none, persistent=True)  # m_k
        self.snapshot = Frozen(x.items(), persistent=True)

    def is_shared(self, name: str) -> bool:
        """Share the net's parameters."""
        return super().is_shared(name) and name not in self._buffer_names

    def entries(self) -> StateDict:
        """Return the client's model :math:`w_k`, by name in the net."""
        mask, own = self.mask.tensors(), self.personal_entries()
        return {name: torch.where(mask[name], own[name], x) for name, x in trained_parameters(self, "net").items()}

    def personal_entries(self) -> StateDict:
        """Return :math:`v_k`, by name in the net; shared entries of it are without use."""
        # a ParameterDict sorts its names, and so tensors are paired by name
        return {name.replace("/", "."): tensor for name, tensor in self.own.items()}

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the shared entries; new personal entries begin as received."""
        super().on_download(payload, data)
        own, mask, fresh = self.personal_entries(), self.mask.tensors(), self.fresh.tensors()
        with torch.no_grad():
            for name, x in trained_parameters(self, "net").items():
                own[name].copy_(torch.where(mask[name] & ~fresh[name], own[name], x))

    def local_phases(self) -> list[Phase]:
        """Train personal and shared entries in turn, an epoch each."""
        return [
            Phase(f"{name} {number}", trains, epochs=1)
            for number in range(1, self.alternations + 1)
            for name, trains in (("personal", in_own), ("shared", in_net))
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss of the client's model."""
        return {"loss": loss_at(self, self.net, self.entries(), batch)}

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the client's model."""
        logits: Tensor = functional_call(self.net, self.entries(), (x,))
        return logits

    def upload(self, data: ClientData) -> Message:
        """Return the shared entries with the mask of the round; make more entries personal if it is time."""
        update = super().upload(data) | {"masks": {name: packed(mask) for name, mask in self.mask.tensors().items()}}
        grows = self.round > 0 and self.round % self.every == 0
        w, snapshot, fresh = self.entries(), self.snapshot.tensors(), self.fresh.tensors()
        for name, mask in self.mask.tensors().items():
            grown = mask
            # a tensor that is personal as a whole has no more to give, also with the bound at 1
            if grows and "weight" in name and not mask.all() and mask.float().mean() <= self.bound:
                grown = mask | largest((w[name] - snapshot[name]).abs(), ~mask, self.rate)
            fresh[name].copy_(grown & ~mask)
            mask.copy_(grown)
        # after all tensors: changes are measured from the snapshot
        if grows:
            self.snapshot.take(w.items())
        return update

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of each entry over the clients that share it."""
        return MaskedAverage()


class MaskedAverage(WeightedAverage):
    """Averages each entry over the round's clients that share it, all alike.

    An entry that no client of the round shares stays. Source: as for `FedSelect`.
    """

    needs = frozenset({"weights", "masks"})

    def __init__(self) -> None:
        super().__init__(weighting="uniform")

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the entries; log the mean share of personal entries."""
        if not updates:
            return {}
        personal = total = 0
        weights = dict(self.state["weights"])
        for name, x in weights.items():
            parts = [(u["weights"][name], u["masks"][name.removeprefix("net.")]) for u in updates.values()]
            shared = [~unpacked(mask, x.numel()).reshape(x.shape) for _, mask in parts]
            holders = torch.stack(shared).sum(0)
            # by the uploads: with precision=64-true the initial model is float32
            wide = promoted(parts[0][0])
            sums = sum(
                (torch.where(own, w.to(wide), 0) for (w, _), own in zip(parts, shared, strict=True)), 0 * x.to(wide)
            )
            weights[name] = torch.where(holders > 0, (sums / holders.clamp_min(1)).to(parts[0][0].dtype), x)
            personal += len(parts) * x.numel() - int(holders.sum())
            total += len(parts) * x.numel()
        self.state["weights"] = weights
        return {"personal": personal / total}


def in_own(name: str) -> bool:
    """Select the tensors of personal entries."""
    return name.startswith("own.")


def in_net(name: str) -> bool:
    """Select the tensors of shared entries."""
    return name.startswith("net.")


def largest(change: Tensor, candidates: Tensor, rate: float) -> Tensor:
    """Return the mask of a tensor's entries with a change as large as those of the largest among the candidates.

    >>> largest(torch.tensor([4.0, 1.0, 3.0, 2.0]), torch.tensor([False, True, True, True]), 1 / 3)
    tensor([ True, False,  True, False])

    Args:
        change: the size of each entry's change.
        candidates: the entries, at least one, of which the share counts.
        rate: the share of candidates, which is rounded.
    """
    ordered = change[candidates].sort().values
    # as far down as the official code's index, which is past the end where the share rounds to nothing
    start = min(round((1 - rate) * len(ordered)), len(ordered) - 1)
    return change >= ordered[start]
