"""cwFedAvg: the server side of class-wise federated averaging; `WDR` is the client side.

Source: cwFedAvg, ICCV 2025 (https://arxiv.org/abs/2406.07800). Symbols: M clients, K classes, n_i samples of client i,
p_i = n_i / sum n, p_ij the share of class j in client i, Theta_j row j of the output layer, p~_i its estimate of p_i.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Message, StateDict, Updates, num_bytes, promoted, stacked_means, weighted_mean
from pfl_lightning.nets import find_output_layer
from pfl_lightning.server import Server, WeightedAverage, client_weights

TOGETHER, FEW, MOST = 8 * 2**20, 8, 32 * 2**20
"""Clients' starts that are computed together: 8 MiB, or eight where those are more, up to 32 MiB. Each group reads all
class models again; beyond 32 MiB each tensor is new memory, which takes longer than the product."""


def row_distribution(rows: Tensor) -> Tensor:
    r"""Return the class distribution as estimated from the norms of an output layer's rows.

    .. math:: \tilde p_j = \lVert\Theta_j\rVert_2 / \sum_k \lVert\Theta_k\rVert_2

    >>> row_distribution(torch.tensor([[3.0, 4.0], [0.0, 15.0]]))
    tensor([0.2500, 0.7500])

    Args:
        rows: the weight ``[K, d]`` of the output layer, without its bias; all zero gives the uniform distribution.
    """
    norms = torch.linalg.vector_norm(rows, dim=1)
    total = norms.sum()
    # without an `if`, so that many clients can run at once
    uniform = (total == 0) / len(norms)
    estimate: Tensor = norms / total.clamp_min(torch.finfo(norms.dtype).tiny) + uniform
    return estimate


class CwFedAvg(WeightedAverage):
    r"""Class-wise averaging: a global model for each class, mixed for each client by the class distribution.

    .. math::

        q_{ij} = \frac{p_i P_{ij}}{\sum_m p_m P_{mj}}, \qquad
        w^G_j = \sum_i q_{ij} w_i, \qquad
        \tilde w_i = \sum_j P_{ij} w^G_j

    over the clients of the round; in one matrix, :math:`\tilde W = P Q^\top W`, computed by way of the class models if
    there are fewer classes than uploads, else without them. The server keeps each client's last distribution, and the
    class models without a client in the round. A client that never took part gets a mix by the initial model's
    distribution.

    Args:
        layers: the part that is averaged by class: the ``output`` layer alone, ``all`` of the model, or a list of names
            of modules; the rest is averaged as by `WeightedAverage`.
        distribution: source of P: ``norms`` reads it from the uploaded output layer, `row_distribution`; with
            ``counts`` clients send their numbers of samples of each class (the paper's "Dist"), which tells the server
            exactly what ``norms`` only lets it guess.
        output_layer: name of the linear layer with a row a class, where the net's classifier has more than one.
    """

    example_level = True

    fixed_clients = True
    requires = frozenset({"classes"})

    caches = frozenset({"_starts", "_stacked"})
    meets_newcomers = True

    def __init__(
        self,
        layers: Literal["output", "all"] | list[str] = "output",
        distribution: Literal["norms", "counts"] = "norms",
        output_layer: str | None = None,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.distribution = distribution
        self.output_layer = output_layer
        if distribution == "counts":
            self.needs = self.needs | {"class_counts"}
        self._starts: tuple[Tensor, int, StateDict] | None = None
        self._stacked: tuple[Tensor, StateDict] | None = None

    def setup(self, server: Server) -> None:
        """Start from the common initial model for every class."""
        super().setup(server)
        classes = server.module.num_classes
        layer = find_output_layer(server.module, classes, self.output_layer)
        self.num_clients = server.num_clients
        self.rows = f"{layer}.weight"
        self.names = class_wise_entries(server.weights, [layer] if self.layers == "output" else self.layers)
        # distribution of clients before their first update; uniform without a look at the weights
        prior = torch.full((classes,), 1 / classes, dtype=torch.float64)
        if self.distribution == "norms":
            if self.rows not in server.weights:
                raise MisconfigurationException(
                    f"aggregator.distribution=norms reads {self.rows}, which {type(server.module).__name__} keeps to "
                    "itself; take distribution=counts."
                )
            prior = row_distribution(server.weights[self.rows].double())
        self.state |= {
            "prior": prior,
            "distributions": {},
            "sources": [{name: server.weights[name] for name in self.names}],
            "mix": torch.ones(classes, 1, dtype=torch.float64),
        }
        self.state["basis"] = self.state["mix"]

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Take the uploads as sources of the class models; log the number of classes with samples in the round."""
        if not updates:
            return {}
        for client, update in updates.items():
            self.state["distributions"][client] = self._distribution_of(update)
        p = torch.tensor([float(update["num_samples"]) for update in updates.values()], dtype=torch.float64)
        # p_i P_ij
        mass = (p / p.sum())[:, None] * torch.stack([self.state["distributions"][client] for client in updates])
        fed = mass.sum(0) > 0
        # a class without mass in the round has no q, and keeps its last class model below
        q = torch.where(fed, mass / mass.sum(0), 0.0)
        each = torch.eye(len(fed), dtype=torch.float64)
        unfed = each[~fed]
        # only if needed, as it reads all sources; copies, since a kept row would keep the memory of all
        kept_rows = self._mixed(unfed) if len(unfed) else {}
        kept = [{name: rows[i].clone() for name, rows in kept_rows.items()} for i in range(len(unfed))]
        sent = [update["weights"] for update in updates.values()]
        weights = client_weights(updates, self.weighting)
        # columns: the round's uploads, then the kept class models, each the source of its own class
        self.state["mix"] = torch.cat([q.T, each[:, ~fed]], 1)
        if len(sent) <= len(fed):
            self.average(updates, weights)
            self.state["sources"] = [{name: weights[name] for name in self.names} for weights in sent] + kept
            self.state["basis"] = self.state["mix"]
        else:
            # fewer class models than uploads: N starts cost 2 N K P operations by them, and 2 N N P by the uploads
            shares = [weights[client] for client in updates]
            # the mean in the same product: one pass less over all uploads
            stacks = stacked_means(sent, [*q.T[fed].tolist(), shares], self.names)
            # a copy, as a row kept or saved would keep all
            mean = {name: stack[-1].clone() for name, stack in stacks.items()}
            fresh = [{name: stack[j] for name, stack in stacks.items()} for j in range(int(fed.sum()))]
            others = [name for name in sent[0] if name not in mean]
            self.state["shares"] = weights
            self.move(mean | (weighted_mean(sent, shares, others) if others else {}))
            new, old = iter(fresh), iter(kept)
            self.state["sources"] = [next(new if has_mass else old) for has_mass in fed.tolist()]
            self.state["basis"] = each
            if not kept:
                # the class models as they are, which `_mixed` would stack again
                self._stacked = self.state["mix"], {name: stack[:-1] for name, stack in stacks.items()}
        return {"classes_fed": float(fed.sum())}

    def _distribution_of(self, update: Message) -> Tensor:
        """Return :math:`P_i`, in float64.

        Args:
            update: the client's update.
        """
        if self.distribution == "norms":
            return row_distribution(update["weights"][self.rows].double())
        counts: Tensor = update["class_counts"].double()
        return counts / counts.sum()

    def distributions(self) -> Tensor:
        """Return P ``[M, K]``, each client's last class distribution."""
        known = self.state["distributions"]
        return torch.stack([known.get(client, self.state["prior"]) for client in range(self.num_clients)])

    def mixing_matrix(self) -> Tensor:
        """Return A ``[M, S]``, the share of each source in each client's start.

        The first sources are the last round's uploads, by client id; class models without samples in that round follow.
        """
        mix: Tensor = self.state["mix"]
        return self.distributions() @ mix

    def class_models(self, names: Sequence[str] | None = None) -> StateDict:
        """Return the class models' entries, ``[K, ...]`` each.

        Args:
            names: the entries, among those averaged by class; None returns all.
        """
        return self._mixed(torch.eye(len(self.state["mix"]), dtype=torch.float64), names)

    def _mixed(self, distributions: Tensor, names: Sequence[str] | None = None) -> StateDict:
        """Return one model for each row of class distributions, as ``[n, ...]`` by name.

        Args:
            distributions: ``[n, K]``.
            names: the entries; None takes all that are averaged by class.
        """
        mix, sources = self.state["mix"], self.state["sources"]
        if self._stacked is None or self._stacked[0] is not mix:
            self._stacked = mix, {}
        stacked = self._stacked[1]
        shares = distributions @ self.state["basis"]
        mixed = {}
        for name in self.names if names is None else names:
            if name not in stacked:
                stacked[name] = torch.stack([source[name] for source in sources])
            wide = promoted(stacked[name])
            rows = shares.to(stacked[name].device, wide) @ stacked[name].flatten(1).to(wide)
            mixed[name] = rows.to(stacked[name].dtype).view(len(shares), *stacked[name].shape[1:])
        return mixed

    def download(self, client: int) -> Message:
        """Return the client's mix of the class models, over the global model."""
        return {"weights": self.state["weights"] | self._start(client)}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the mix by the newcomer's own distribution; by the initial model's before the first update."""
        own = self.state["prior"] if update is None else self._distribution_of(update)
        return {"weights": self.state["weights"] | {name: rows[0] for name, rows in self._mixed(own[None]).items()}}

    def _start(self, client: int) -> StateDict:
        mix = self.state["mix"]
        # neighbours together, as one product; one by one where most clients aren't in a round
        size = max(num_bytes(self.state["sources"][0]), 1)
        alone = self.num_clients > 2 * mix.shape[1]
        count = 1 if alone else max(1, min(max(TOGETHER // size, FEW), MOST // size))
        first = client - client % count
        if self._starts is None or self._starts[0] is not mix or self._starts[1] != first:
            # dropped first: its memory then serves the next ones, and new memory takes longer than the product
            self._starts = None
            known, prior = self.state["distributions"], self.state["prior"]
            clients = range(first, min(first + count, self.num_clients))
            self._starts = mix, first, self._mixed(torch.stack([known.get(each, prior) for each in clients]))
        return {name: rows[client - first] for name, rows in self._starts[2].items()}


def class_wise_entries(weights: StateDict, layers: Sequence[str] | Literal["all"]) -> list[str]:
    """Return the names of the floating entries of some modules.

    Args:
        weights: shared entries, by name.
        layers: names of the modules, or ``all``.

    Raises:
        MisconfigurationException: if a module has none among the shared weights.
    """
    floating = [name for name, tensor in weights.items() if tensor.is_floating_point()]
    if layers == "all":
        return floating
    for layer in layers:
        if not any(name.startswith(f"{layer}.") for name in floating):
            raise MisconfigurationException(
                f"aggregator.layers: {layer!r} has no shared weights; choose from "
                f"{', '.join(dict.fromkeys(name.rpartition('.')[0] for name in floating)) or 'nothing'}."
            )
    return [name for name in floating if any(name.startswith(f"{layer}.") for layer in layers)]
