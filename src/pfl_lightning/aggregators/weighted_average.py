"""Averaging: the server side of federated averaging, and of many a method that counts clients otherwise."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.aggregators.base import Aggregator, Server
from pfl_lightning.aggregators.means import Averaging, Mean
from pfl_lightning.messages import CPU, Message, StateDict, Updates, column, weighted_mean
from pfl_lightning.transfers import moved

Weighting: TypeAlias = Literal["samples", "uniform"]
"""How clients count in a mean: by their training ``samples``, or all alike."""


class WeightedAverage(Aggregator):
    r"""Federated averaging: :math:`w \leftarrow \sum_{k \in S} \frac{n_k}{\sum_{m \in S} n_m} w_k`.

    The mean is over the clients :math:`S` of the round, weighted by their training samples; each client receives it,
    whether it took part or not. Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).

    With a server learning rate :math:`\eta_g` the global model goes from where it is towards the mean :math:`\bar w`,
    :math:`w \leftarrow w + \eta_g (\bar w - w)`: less far than it, or further. That is of learnable parameters;
    running statistics are averaged.

    Args:
        server_lr: :math:`\eta_g`, above 0; 1 is the mean itself.
        weighting: how clients count in the mean: by their training ``samples``, or all alike (``uniform``).
        mean: a rule in the place of the mean, such as `TrimmedMean`, which few bad uploads can't move at will; None
            takes the mean. A rule counts all clients alike, unless it says otherwise itself.

    Raises:
        MisconfigurationException: if ``server_lr`` isn't positive, ``weighting`` is none of its choices, or a ``mean``
            is given to a class whose averages it wouldn't be.
    """

    example_level = True
    needs = frozenset({"weights", "num_samples"})
    sends = frozenset({"weights"})
    sums_only = True

    takes_mean: bool = True
    """Whether all that it averages goes by its ``mean``. Each class says so itself: one that doesn't refuses a mean."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mean = vars(cls).get("takes_mean", False)

    def __init__(self, server_lr: float = 1.0, weighting: Weighting = "samples", mean: Mean | None = None) -> None:
        super().__init__()
        if not server_lr > 0:
            raise MisconfigurationException(f"aggregator.server_lr={server_lr} must be above 0, such as 1.")
        if weighting not in get_args(Weighting):
            raise MisconfigurationException(
                f"aggregator.weighting={weighting!r} must be one of {', '.join(get_args(Weighting))}."
            )
        if mean is not None and not self.takes_mean:
            raise MisconfigurationException(
                f"aggregator.mean={mean.name}: {type(self).__name__} combines what clients send by a rule of its own, "
                "which this would leave as it is or undo; leave it out, or take aggregator=WeightedAverage."
            )
        self.server_lr = server_lr
        self.mean = mean
        self.weighting: Weighting = weighting
        if mean is not None:
            self.sums_only = False
            self.weighting = "samples" if mean.weighted else "uniform"
        if self.weighting == "uniform":
            self.needs = self.needs - {"num_samples"}

    @property
    def name(self) -> str:
        """With the rule's, where there is one."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Starts from the common initial model."""
        self.state["weights"] = server.weights
        if self.mean is not None:
            self.averaging = Averaging(self.mean, server)
            self.state["means"] = 0
        if self.server_lr != 1:
            self.learnable = server.parameter_names(remove_duplicate=False)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Moves the global model to the mean of the uploads, or towards it; tells how many a rule left out."""
        if updates:
            self.average(updates, client_weights(updates, self.weighting))
        return {} if self.mean is None else self.left_out()

    def left_out(self) -> dict[str, float]:
        """How many clients of the round a rule gave no share, where its shares are those of whole clients."""
        shares = self.state.get("shares", {})
        return {"left_out": float(sum(share == 0 for share in shares.values()))} if shares else {}

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Moves the global model to a weighted mean of uploads, and keeps the weights as ``state["shares"]``.

        Args:
            updates: by client id, at least one.
            weights: the weight of each of them, by client id; used as they are.
        """
        self.move(self.mean_of(updates, weights))

    def move(self, target: StateDict) -> None:
        """Moves the global model to a mean, or towards it.

        Args:
            target: the mean, with buffers; changed in place.
        """
        if self.server_lr != 1:
            w = self.state["weights"]
            for name in self.learnable:
                # the initial model is of another type than the uploads under precision=64-true
                target[name] = torch.lerp(w[name].to(target[name]), target[name], self.server_lr)
        self.state["weights"] = target

    def mean_of(self, updates: Updates, weights: Mapping[int, float]) -> StateDict:
        """The mean of uploads, or what the rule takes in its place; keeps each client's part as ``state["shares"]``.

        Args:
            updates: by client id, at least one.
            weights: as for `average`.
        """
        if self.mean is None:
            self.state["shares"] = dict(weights)
            return mean_model(updates, weights)
        found = self.averaging.models(updates, weights, self.state["weights"], self.state["means"])
        self.state |= {"shares": found.shares, "means": self.state["means"] + 1}
        return found.entries

    def download(self, client: int) -> Message:
        """The global model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """The global model."""
        weights: StateDict = self.state["weights"]
        return weights


def client_weights(updates: Updates, weighting: Weighting) -> dict[int, float]:
    """The weight of each client in a mean over all; they sum to 1.

    >>> updates = {4: {"num_samples": torch.tensor(30)}, 7: {"num_samples": torch.tensor(10)}}
    >>> client_weights(updates, "samples"), client_weights(updates, "uniform")
    ({4: 0.75, 7: 0.25}, {4: 0.5, 7: 0.5})

    Args:
        updates: by client id, at least one; with ``num_samples`` where these count.
        weighting: how clients count.
    """
    if weighting == "uniform":
        return dict.fromkeys(updates, 1 / len(updates))
    counts = {client: float(update["num_samples"]) for client, update in updates.items()}
    total = sum(counts.values())
    return {client: count / total for client, count in counts.items()}


def mean_model(updates: Updates, weights: Mapping[int, float]) -> StateDict:
    """The weighted mean of the models that clients uploaded.

    Args:
        updates: by client id, at least one, with ``weights``.
        weights: the weight of each of them, by client id; used as they are.
    """
    return weighted_mean([update["weights"] for update in updates.values()], [weights[client] for client in updates])


def moved_model(updates: Updates, weights: Mapping[int, float], model: StateDict, names: Iterable[str]) -> StateDict:
    r"""Where a model gets by changes that are weighted in any way, :math:`x + \sum_k \lambda_k (w_k - x)`.

    Args:
        updates: by client id, at least one, with ``weights``.
        weights: :math:`\lambda_k` of each of them, by client id; they need not sum to 1.
        model: x, from which the clients started.
        names: the entries to be moved, of floating type; the others are left out.
    """
    entries = {}
    for name in names:
        uploads = column([update["weights"] for update in updates.values()], name)
        wide = torch.promote_types(uploads[0].dtype, torch.float32)
        x = model[name].to(uploads[0].device, wide)
        # by differences: weights that sum to much more than 1 would cancel in digits that are lost
        change = sum((weights[k] * (upload.to(wide) - x) for k, upload in zip(updates, uploads, strict=True)), 0 * x)
        entries[name] = (x + change).to(uploads[0].dtype)
    return dict(zip(entries, moved([*entries.values()], CPU), strict=True))
