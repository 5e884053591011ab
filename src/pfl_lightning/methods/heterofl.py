"""HeteroFL and FedRolex: clients of small capacity train a part of the net, and each entry is averaged by itself."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import CNN, Narrow, NetFactory, find_output_layer
from pfl_lightning.nets.base import ModuleFactory
from pfl_lightning.nets.narrow import blocks_of, places_of, taken
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.server.weighted_average import MeanSettings
from pfl_lightning.settings import Unpack


def narrow_nets(
    method: str, net: list[NetFactory] | NetFactory | ModuleFactory, widths: tuple[float, ...], scale: bool
) -> list[NetFactory]:
    """Return a builder of the narrow net of each width.

    Args:
        method: name of the method with these settings.
        net: builds the whole net.
        widths: shares of the net's width, the first one 1.
        scale: as of `Narrow`.

    Raises:
        MisconfigurationException: if there are several nets, the first width isn't 1, or one is out of its range.
    """
    if isinstance(net, list):
        raise MisconfigurationException(
            f"model.net={net} is a list, and {method} makes narrow nets by model.widths; give one net."
        )
    several = isinstance(widths, (list, tuple)) and len(widths) > 0
    if not several or widths[0] != 1 or not all(0 < width <= 1 for width in widths):
        raise MisconfigurationException(
            f"model.widths={widths} must be numbers above 0 and at most 1, the first one 1, such as [1, 0.5, 0.25]."
        )
    return [Narrow(net, width, scale) for width in widths]


class HeteroFL(FedAvg):
    r"""Trains a part of the net by the client's capacity.

    Client k has the first :math:`\lceil w_k K \rceil` of each layer's K units; all that it computes, keeps and sends is
    of that size. Its logits of classes without training samples at the client are 0, in training and in its own
    predictions; the global model has all of them.

    The scale is for nets with batch norms, which undo the scale in training; without norms steps are larger, and a
    narrow net predicts unlike its training (docs/results.md, "Clients of unequal capacity").

    In training both codes normalise by each batch's own statistics. For tests the released code measures statistics of
    all clients' samples with the final net; here running statistics are averaged as all other entries, or stay with the
    client by ``buffers="local"``. A client's capacity is the same in all rounds, where the released code can draw
    another for each; `FjORD` draws widths up to the capacity.
    Source: Diao et al., 2021 (https://arxiv.org/abs/2010.01264);
    diaoenmao/HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-Heterogeneous-Clients.

    Args:
        net: builds the whole net.
        widths: shares of the net's width :math:`w_k`, above 0 and at most 1, the first one 1; dealt out to clients by
            ``assign_nets``. The first client has the whole net, which the federation also evaluates.
        scale: whether training divides the outputs of narrow layers by the width.
        mask: whether logits of classes that the client lacks are 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if the first width isn't 1, one is out of its range, or the net can't be narrowed.
    """

    requires = frozenset({"classes"})

    present: Tensor

    # `net` is the whole net's, and not the clients' as in the settings
    def __init__(  # type: ignore[misc]
        self,
        net: list[NetFactory] | NetFactory | ModuleFactory = CNN,
        *args: Any,
        widths: tuple[float, ...] = (1.0, 0.5, 0.25),
        scale: bool = True,
        mask: bool = True,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(narrow_nets("HeteroFL", net, widths, scale), *args, **kwargs)
        self.mask = mask
        # kept with the client, whose predictions outside a federation need it
        self.register_buffer("present", torch.ones(self.num_classes))

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the part of the model, and note which classes the client has."""
        super().on_download(payload, data)
        if self.mask and data is not None and self.training_follows:
            self.present.copy_((data.class_counts > 0).to(self.present))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, with 0 for classes that the client lacks."""
        logits: Tensor = self.net(x)
        return logits * self.present if self.mask else logits

    def loss(self, features: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of the masked logits."""
        return super().loss(features, logits * self.present if self.mask else logits, target)

    def configure_aggregator(self) -> Aggregator:
        """Return the mean of each entry over the clients that have it."""
        return PartAverage(by_class=self.mask, weighting="uniform")


class PartAverage(WeightedAverage):
    r"""Averages each entry over the clients whose nets have it.

    .. math:: w_i \leftarrow \frac{\sum_{k \in S : i \in I_k} p_k w_{k,i}}{\sum_{k \in S : i \in I_k} p_k}

    :math:`I_k` are the entries of client k's part: in each layer of K units the first :math:`\lceil w_k K \rceil`
    (HeteroFL), or, ``rolling``, as many from unit :math:`-t \bmod K` on in round t, so that all are trained in time
    (FedRolex). An entry that no client of the round has stays as it is. Rows of the output layer are averaged over the
    clients with training samples of the class. With equal nets, and without ``by_class``, it is `WeightedAverage`.

    FedRolex's released code counts the updates of each entry while averaging. In biases, norms and the output
    layer a client weighs more than those read before; here the order changes nothing, as in the paper.

    Source: Alam et al., 2022 (https://arxiv.org/abs/2212.01548) for rolling parts; Diao et al., 2021
    (https://arxiv.org/abs/2010.01264) for all else.

    Args:
        rolling: whether parts move by one unit a round.
        by_class: whether a client counts in the output layer for the classes that it has, as `HeteroFL` has ``mask``.
        **kwargs: the arguments of `WeightedAverage` but for ``mean`` and ``gamma``; the released codes take
            ``weighting="uniform"``.
    """

    takes_narrow = True
    # blocks of clients with one net are by the number of clients
    fixed_clients = True
    # a late update is of an earlier round's part
    reads_arrivals = True
    caches = frozenset({"_model", "_parts"})

    def __init__(
        self,
        rolling: bool = False,
        by_class: bool = True,
        **kwargs: Unpack[MeanSettings],
    ) -> None:
        super().__init__(**kwargs)
        self.rolling, self.by_class = rolling, by_class
        if by_class:
            self.needs = self.needs | {"class_counts"}

    def setup(self, server: Server) -> None:
        """Start from the whole net's initial model, and read the parts' shapes."""
        super().setup(server)
        self.state["turn"] = 0
        self.server = server
        modules = server.module.architectures()
        states = [module.state_dict() for module in modules]
        self.shapes = [{name: state[name].shape for name in server.weights} for state in states]
        self.blocks = [blocks_of(module) for module in modules]
        layer = find_output_layer(server.module, server.module.num_classes) if self.by_class else None
        self.rows = {f"{layer}.weight", f"{layer}.bias"}
        # the part of each net, and the model of which they are parts
        self._model: StateDict = {}
        self._parts: dict[int, StateDict] = {}

    def net_of(self, client: int) -> int:
        """Return the index of a client's net; newcomers take those of the first clients.

        Args:
            client: the client's id.
        """
        total = self.server.num_clients
        return self.server.module.architecture_of(client % total, total)

    def places(self, client: int, turn: int) -> dict[str, tuple[Tensor, ...]]:
        """Return where a client's entries are in the whole model, in each dimension, by name.

        Args:
            client: the client's id.
            turn: t, by how many units parts have moved.
        """
        net = self.net_of(client)
        return places_of(self.server.weights, self.shapes[net], self.blocks[net], turn if self.rolling else 0)

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Move the entries that a client of the round has to their means.

        Args:
            updates: updates by client id, at least one.
            weights: weight of each client, by id.
        """
        late = {client: update.get("arrival", {}).get("staleness", 0) for client, update in updates.items()}
        places = {client: self.places(client, self.state["turn"] - late[client]) for client in updates}
        target = {}
        for name, entry in self.state["weights"].items():
            sent = {client: update["weights"][name].cpu() for client, update in updates.items()}
            kind = next(iter(sent.values())).dtype
            if not kind.is_floating_point:
                # counters, as of batch norms, which have no parts
                target[name] = torch.stack([*sent.values()]).amax(0)
                continue
            total, share = torch.zeros(2, *entry.shape, dtype=torch.float64)
            for client, own in sent.items():
                counts = torch.full(own.shape, weights[client], dtype=torch.float64)
                if name in self.rows:
                    counts[updates[client]["class_counts"].cpu() == 0] = 0
                at = torch.meshgrid(*places[client][name], indexing="ij")
                total[at] += counts * own
                share[at] += counts
            target[name] = torch.where(share > 0, total / share, entry.double()).to(kind)
        self.state["turn"] += 1
        self.move(target)

    def download(self, client: int) -> Message:
        """Return the client's part of the model, the same tensors for all clients with a net."""
        net, model = self.net_of(client), self.state["weights"]
        if self._model is not model:
            self._model, self._parts = model, {}
        if net not in self._parts:
            places, shapes = self.places(client, self.state["turn"]), self.shapes[net]
            # an entry that the net has whole is the model's own
            self._parts[net] = {
                name: entry if entry.shape == shapes[name] else taken(entry, places[name])
                for name, entry in model.items()
            }
        return {"weights": self._parts[net]}
