r"""Dis-PFL: sparse personal models, averaged by neighbours on a graph where masks meet.

Source: Dai et al., 2022 (https://arxiv.org/abs/2206.00187). Symbols: w_k is the model of client k, m_k the client's
mask, which is 1 at its active entries, and N_k the client's neighbours.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, promoted
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedcac import packed, unpacked
from pfl_lightning.methods.frozen import Frozen
from pfl_lightning.methods.functional import gradient_at
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.server.graph import GraphAggregator
from pfl_lightning.settings import Unpack, check_choices


class DisPFL(FedAvg):
    r"""Trains and sends the active entries of a sparse model, and then replaces the smallest ones.

    A client draws its mask when it first trains; before, it has the whole common initial model. All other entries are
    0 in training and predictions. After training it sends its entries with its mask, a bit for each. Then in each
    tensor with n active entries it drops the :math:`\lceil r_t n \rceil` smallest in size, and activates as many
    inactive ones,

    .. math:: r_t = \frac{r}{2} \left(1 + \cos \frac{\pi t}{T}\right)

    in round t of T: those with the largest gradient of the loss on a random batch, taken at all entries of the sparse
    model. They begin at the neighbours' values, or at 0. The density of a tensor is Erdős and Rényi's: in proportion
    to the sum of its dimensions over their product, so that small tensors stay whole. The server side is
    `IntersectionAverage`. Buffers, such as running statistics, stay with the client.

    The official code clips gradients before it masks them, and here ``trainer.gradient_clip_val`` counts active entries
    alone. Its script activates entries at random, the paper by gradients. Clients out of the round train there, too.
    Source: Dai et al., 2022, Algorithms 1 and 2 (https://arxiv.org/abs/2206.00187); rong-dai/DisPFL@e2f47d4.

    Args:
        density: share of active entries, above 0 and at most 1; 1 is the dense model, and drops nothing.
        anneal: r, the share of active entries that are replaced after the first round is r, in [0, 1].
        regrow: which entries become active: those of the largest ``gradient``, or ``random`` ones.
        batch: samples of the gradient, at least 1; at most the client's.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or ``optimizer_lifetime`` is ``run``.
    """

    sends = frozenset({"values", "masks"})
    offers = frozenset()

    def __init__(
        self,
        *args: Any,
        density: float = 0.5,
        anneal: float = 0.5,
        regrow: Literal["gradient", "random"] = "gradient",
        batch: int = 128,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed, advice in (
            ("density", density, 0 < density <= 1, "above 0 and at most 1, such as 0.5"),
            ("anneal", anneal, 0 <= anneal <= 1, "from 0 to 1, such as 0.5"),
            ("batch", batch, batch >= 1, "1 sample or more, such as 128"),
        ):
            if not allowed:
                raise MisconfigurationException(f"model.{name}={value} must be {advice}.")
        check_choices("model", regrow=(regrow, ("gradient", "random")))
        if self.optimizer_lifetime == "run":
            raise MisconfigurationException(
                "model.optimizer_lifetime='run' would move entries that DisPFL has dropped since, by their momentum; "
                "leave it at 'round'."
            )
        self.density, self.anneal, self.regrow, self.batch = density, anneal, regrow, batch
        w = trained_parameters(self, "net")
        none = ((name, torch.zeros_like(tensor, dtype=torch.bool)) for name, tensor in w.items())
        # all False until the client first trains
        self.mask = Frozen(none, persistent=True)  # m_k

    def is_shared(self, name: str) -> bool:
        """Share the net's parameters."""
        return super().is_shared(name) and name not in self._buffer_names

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the mix of neighbours' entries, and keep the active ones; draw the mask before the first training."""
        super().on_download(payload, data)
        if data is not None and self.training_follows and not self.is_sparse():
            self._draw()
        if self.is_sparse():
            mask, w = self.mask.tensors(), trained_parameters(self, "net")
            self.assign({f"net.{name}": tensor * mask[name] for name, tensor in w.items()})

    def is_sparse(self) -> bool:
        """Return whether the client has drawn its mask."""
        return any(bool(mask.any()) for mask in self.mask.buffers())

    def _draw(self) -> None:
        """Draw a mask, as many entries of each tensor as its density says."""
        # the id says to engines that clients with equal payloads differ, which a look at the seed doesn't
        seed = derive_seed(torch.initial_seed(), "dispfl masks", self.client_id)
        generator = torch.Generator().manual_seed(seed)
        masks = self.mask.tensors()
        counts = active_counts({name: tuple(mask.shape) for name, mask in masks.items()}, self.density)
        for name, mask in masks.items():
            chosen = torch.randperm(mask.numel(), generator=generator)[: counts[name]]
            mask.view(-1)[chosen.to(mask.device)] = True

    def adjust_gradients(self, gradients: StateDict) -> StateDict:
        """Return the gradients, 0 where entries are inactive."""
        mask = self.mask.tensors()
        return {name: gradient * mask[name.removeprefix("net.")] for name, gradient in gradients.items()}

    def upload(self, data: ClientData) -> Message:
        """Return the active entries and the mask of the round; then drop entries, and activate others."""
        mask, w = self.mask.tensors(), trained_parameters(self, "net")
        update = {
            "values": {f"net.{name}": w[name].detach()[own] for name, own in mask.items()},
            "masks": {f"net.{name}": packed(own) for name, own in mask.items()},
        }
        rate = self.anneal / 2 * (1 + math.cos(math.pi * self.round / self.num_rounds))
        scores = self._scores(data)
        for name, own in mask.items():
            own.copy_(replaced(own, w[name].detach().abs(), scores[name], math.ceil(rate * int(own.sum()))))
        return update

    def _scores(self, data: ClientData) -> StateDict:
        """Return a number for each entry, by name in the net; of the inactive ones the largest become active.

        Args:
            data: the client's data.
        """
        generator = torch.Generator().manual_seed(derive_seed(torch.initial_seed(), "dispfl"))
        w = trained_parameters(self, "net")
        if self.regrow == "random":
            return {name: torch.rand(t.shape, generator=generator).to(t.device) for name, t in w.items()}
        part = data.train.take(torch.randperm(len(data.train), generator=generator)[: self.batch])
        return {name: g.abs() for name, g in gradient_at(self, dict(w), (part.x, part.y)).items()}

    def configure_aggregator(self) -> Aggregator:
        """Return the average over neighbours, on a random graph."""
        return IntersectionAverage()


class IntersectionAverage(GraphAggregator):
    r"""Averages each entry over the client and all neighbours with an active entry.

    .. math:: w_k \leftarrow \frac{\sum_{j \in N_k \cup \{k\}} m_j \odot w_j}{\sum_{j \in N_k \cup \{k\}} m_j}

    entry by entry, and 0 where no mask has it. All count alike, so that the mean of all models may move. The client
    keeps the entries of its own new mask. An edge carries the sender's active entries and its mask; the coordinator's
    payload, ``bytes/down``, is the whole average, as it doesn't know the new mask.
    Source: Dai et al., 2022, Algorithm 1 (https://arxiv.org/abs/2206.00187); rong-dai/DisPFL@e2f47d4.

    Args:
        graph: as for `GraphAggregator`; the paper draws a ``random`` one in each round.
        degree: as for `GraphAggregator`; 10 in the paper, for 100 clients.

    Raises:
        MisconfigurationException: as for `GraphAggregator`.
    """

    needs = frozenset({"values", "masks"})

    def __init__(self, graph: str | dict[int, list[int]] = "random", degree: int = 10) -> None:
        super().__init__(graph, degree)

    def setup(self, server: Server) -> None:
        """Start from the common initial model at every client."""
        super().setup(server)
        # clients send a tied parameter under its first name alone
        self.first_names = server.first_names()

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average the entries of neighbours; log the edges' bytes, and the share of active entries."""
        if not updates:
            return {}
        hears, logs = self.spread(updates, round)
        rows = [[float(other == client or other in others) for other in hears] for client, others in hears.items()]
        models: list[StateDict] = [{} for _ in updates]
        active = total = 0
        for name, start in self.state["initial"].items():
            sent = self.first_names[name]
            values = [update["values"][sent] for update in updates.values()]
            masks = torch.stack([unpacked(update["masks"][sent], start.numel()) for update in updates.values()])
            # by the uploads: with precision=64-true the initial model is float32
            kind, wide = values[0].dtype, promoted(values[0])
            entries = torch.zeros(masks.shape, dtype=wide)
            for row, mask, own in zip(entries, masks, values, strict=True):
                # a site may send a mask of more or fewer entries, which must not end the others' run
                places = mask.nonzero().flatten()[: len(own)]
                row[places] = own[: len(places)].to(wide)
            near = torch.tensor(rows, dtype=wide)
            # where no mask has an entry, both sums are 0
            means = (near @ entries) / (near @ masks.to(wide)).clamp_min(1)
            for model, mean in zip(models, means, strict=True):
                model[name] = mean.reshape(start.shape).to(kind)
            active, total = active + int(masks.sum()), total + masks.numel()
        self.state["models"] = self.state["models"] | dict(zip(updates, models, strict=True))
        return logs | {"active": active / total}


def active_counts(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, int]:
    r"""Return the number of active entries of each tensor, by Erdős and Rényi's rule for layers.

    A tensor's density is :math:`\epsilon \sum_i n_i / \prod_i n_i` for its dimensions :math:`n_i`, at most 1, with the
    :math:`\epsilon` that gives all tensors together the density asked for. Counts are rounded down.
    Source: Evci et al., 2020 (https://arxiv.org/abs/1911.11134).

    >>> active_counts({"weight": (4, 12), "bias": (4,)}, 0.5)
    {'weight': 22, 'bias': 4}

    Args:
        shapes: the tensors' shapes, by name.
        density: above 0 and at most 1.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / math.prod(shape) if shape else 1.0 for name, shape in shapes.items()}
    whole: set[str] = set()
    while sparse := [name for name in shapes if name not in whole]:
        left = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
        epsilon = left / sum(raw[name] * sizes[name] for name in sparse)
        largest = max(raw[name] for name in sparse)
        if epsilon * largest <= 1:
            break
        # what would have more entries than there are is whole, and the others share the rest
        whole |= {name for name in sparse if raw[name] == largest}
    # 1e-9: a product that is whole may be a little less in floating point
    return {name: n if name in whole else math.floor(epsilon * raw[name] * n + 1e-9) for name, n in sizes.items()}


def replaced(mask: Tensor, size: Tensor, score: Tensor, count: int) -> Tensor:
    """Return a mask with as many active entries, some of them new.

    >>> mask = torch.tensor([True, True, False, False])
    >>> replaced(mask, torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.tensor([9.0, 2.0, 1.0, 5.0]), 1)
    tensor([ True, False, False,  True])

    Args:
        mask: the mask, of any shape.
        size: the size of each entry, of the mask's shape; the smallest active ones are dropped.
        score: a number of each entry, 0 or more; the inactive ones with the largest become active, dropped ones too.
        count: number of entries to replace, at most the active ones.
    """
    flat = mask.flatten().clone()
    dropped = size.flatten().masked_fill(~flat, math.inf).topk(count, largest=False).indices
    flat[dropped] = False
    grown = score.flatten().masked_fill(flat, -1).topk(count).indices
    flat[grown] = True
    return flat.view(mask.shape)
