"""Federated averaging: the server side of FedAvg, and of many methods with other client weights."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, TypedDict, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.messages import CPU, Message, RunningMean, StateDict, Updates, column, weighted_mean
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.server.means import Averaging, Mean
from pfl_lightning.transfers import moved

Weighting: TypeAlias = Literal["samples", "uniform"]
"""Weights of clients in a mean: by their numbers of training ``samples``, or all alike (``uniform``)."""


class MeanSettings(TypedDict, total=False):
    """Settings of `WeightedAverage` but for ``gamma``, for the ``**kwargs`` of subclasses."""

    server_lr: float
    weighting: Weighting
    mean: Mean | None


class WeightedAverage(Aggregator):
    r"""Federated averaging: :math:`w \leftarrow \sum_{k \in S} \frac{n_k}{\sum_{m \in S} n_m} w_k`.

    The mean is over the clients :math:`S` of the round, weighted by their numbers of training samples. Every client
    receives it, in the round or not. Source: McMahan et al., 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629).

    With a server learning rate :math:`\eta_g`, the global model moves towards the mean :math:`\bar w` and may stop
    short of it or go beyond it: :math:`w \leftarrow w + \eta_g (\bar w - w)`. This holds for learnable parameters;
    running statistics are averaged.

    A factor :math:`\gamma` below 1 puts :math:`\gamma \bar w` in place of :math:`\bar w`, so that the model's norm
    shrinks each round. In front of a BatchNorm layer the scale of weights changes no output. With half the norm their
    gradient is twice as large, and turns them four times as far: a shrunk net learns at a higher effective rate, in
    proportion to :math:`1 / \lVert w \rVert^2`. Without a normalisation the factor acts like weight decay on the
    server. All floating entries are multiplied, running statistics included, as in the released code of FedAWA;
    counters aren't. Source: the shrinking factor of Li et al., 2023 (https://arxiv.org/abs/2302.10911), as a constant.

    Args:
        server_lr: :math:`\eta_g`, above 0; 1 takes the mean itself.
        weighting: client weights in the mean: ``samples`` or ``uniform``.
        mean: a rule instead of the mean, such as `TrimmedMean`, which a few bad uploads can't move at will. A rule
            counts all clients alike, unless it says otherwise. None takes the mean.
        gamma: :math:`\gamma`, factor of the mean, or of the rule's result, above 0 and at most 1; 1 changes no bit.

    Raises:
        MisconfigurationException: if ``server_lr`` isn't positive, ``gamma`` is out of range, ``weighting`` is none of
            its choices, or a ``mean`` or ``gamma`` is given to a subclass that combines updates by a formula of its
            own.
    """

    example_level = True
    needs = frozenset({"weights", "num_samples"})
    sends = frozenset({"weights"})
    sums_only = True

    takes_mean: bool = True
    """True if the setting ``mean`` applies to all that it averages; a class with False refuses the setting.

    It isn't inherited: each class sets it.
    """

    takes_gamma: bool = True
    """True if the setting ``gamma`` multiplies the whole model that clients receive; else the setting is refused.

    It isn't inherited: each class sets it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_mean = vars(cls).get("takes_mean", False)
        cls.takes_gamma = vars(cls).get("takes_gamma", False)

    def __init__(
        self,
        server_lr: float = 1.0,
        weighting: Weighting = "samples",
        mean: Mean | None = None,
        gamma: float = 1.0,
    ) -> None:
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
                "which this would leave as it is or undo; leave it out, take aggregator=WeightedAverage, or set "
                f"takes_mean = True in {type(self).__name__} itself if its rule only averages."
            )
        if not 0 < gamma <= 1:
            raise MisconfigurationException(f"aggregator.gamma={gamma} must be above 0 and at most 1, such as 0.9.")
        if gamma != 1 and not self.takes_gamma:
            raise MisconfigurationException(
                f"aggregator.gamma={gamma}: {type(self).__name__} combines what clients send by a rule of its own, "
                "which a factor would change in part; leave it out, take aggregator=WeightedAverage, or set "
                f"takes_gamma = True in {type(self).__name__} itself if all that clients receive passes through `move`."
            )
        self.server_lr = server_lr
        self.gamma = gamma
        self.mean = mean
        self.weighting: Weighting = weighting
        if mean is not None:
            # a rule looks at single updates, which secure aggregation doesn't show
            self.sums_only = False
            self.weighting = "samples" if mean.weighted else "uniform"
        # what isn't needed isn't sent: a client's number of samples is private
        if self.weighting == "uniform":
            self.needs = self.needs - {"num_samples"}

    @property
    def name(self) -> str:
        """The class's name, with the rule's in addition where there is a rule."""
        return super().name if self.mean is None else f"{super().name}+{self.mean.name}"

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        self.state["weights"] = server.weights
        if self.mean is not None:
            self.averaging = Averaging(self.mean, server)
            # counts means, whose number seeds the rule's random draws, also after a checkpoint
            self.state["means"] = 0
        if self.server_lr != 1:
            # all names of a tied parameter: `average` changes each entry of the state dict by itself
            self.learnable = server.parameter_names(remove_duplicate=False)

    def check_sums(self) -> None:
        """Refuse ``trainer.secure_sum`` beside a rule that compares updates."""
        if self.mean is not None:
            raise MisconfigurationException(
                f"aggregator.mean={self.mean.name} compares clients' updates, and trainer.secure_sum hides them: a "
                "server can be robust against single clients or blind for them, not both; leave one of the two out."
            )
        super().check_sums()

    def running_mean(self, sizes: Mapping[int, int]) -> RunningMean | None:
        """Return the mean of the round, unless a rule or a subclass looks at single uploads."""
        own, base = type(self), WeightedAverage
        if self.mean is not None or any(
            getattr(own, name) is not getattr(base, name) for name in ("aggregate", "average", "mean_of")
        ):
            return None
        samples = self.weighting == "samples"
        return RunningMean({client: float(size) if samples else 1.0 for client, size in sizes.items()})

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Move the global model to the mean of the uploads, or towards the mean.

        Returns:
            ``left_out``, the number of clients to which a rule gave no weight; empty without such a rule.
        """
        if updates:
            self.average(updates, client_weights(updates, self.weighting))
        return {} if self.mean is None else self.left_out()

    def left_out(self) -> dict[str, float]:
        """Return the number of clients without weight in the mean, for rules with one weight a client; else nothing."""
        shares = self.state.get("shares", {})
        return {"left_out": float(sum(share == 0 for share in shares.values()))} if shares else {}

    def average(self, updates: Updates, weights: Mapping[int, float]) -> None:
        """Move the global model to a weighted mean of uploads, and keep the weights as ``state["shares"]``.

        Args:
            updates: updates by client id, at least one.
            weights: weight of each client, by id; used as they are.
        """
        self.move(self.mean_of(updates, weights))

    def move(self, target: StateDict) -> None:
        """Moves the global model to a mean times gamma, or towards it.

        Args:
            target: the mean, with buffers; changed in place.
        """
        if self.gamma != 1:
            # out of place, since a rule may return an upload's tensor
            target |= {name: self.gamma * entry for name, entry in target.items() if entry.is_floating_point()}
        if self.server_lr != 1:
            w = self.state["weights"]
            for name in filter(target.__contains__, self.learnable):
                # with precision=64-true the initial model is float32 and uploads are float64
                target[name] = torch.lerp(w[name].to(target[name]), target[name], self.server_lr)
        # keep entries missing from all uploads, as where clients send a part of the shared entries
        self.state["weights"] = self.state.get("weights", {}) | target

    def mean_of(self, updates: Updates, weights: Mapping[int, float]) -> StateDict:
        """Return the mean of uploads, or the rule's result, and keep each client's part as ``state["shares"]``.

        Args:
            updates: updates by client id, at least one.
            weights: as for `average`.
        """
        if self.mean is None:
            self.state["shares"] = dict(weights)
            return mean_model(updates, weights)
        found = self.averaging.models(updates, weights, self.state["weights"], self.state["means"])
        self.state |= {"shares": found.shares, "means": self.state["means"] + 1}
        return found.entries

    def download(self, client: int) -> Message:
        """Return the global model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """Return the global model."""
        weights: StateDict = self.state["weights"]
        return weights


def client_weights(updates: Updates, weighting: Weighting) -> dict[int, float]:
    """Return each client's weight in a mean; the weights sum to 1.

    >>> updates = {4: {"num_samples": torch.tensor(30)}, 7: {"num_samples": torch.tensor(10)}}
    >>> client_weights(updates, "samples"), client_weights(updates, "uniform")
    ({4: 0.75, 7: 0.25}, {4: 0.5, 7: 0.5})

    Args:
        updates: updates by client id, at least one; with ``num_samples`` for ``samples``.
        weighting: ``samples`` or ``uniform``.
    """
    if weighting == "uniform":
        return dict.fromkeys(updates, 1 / len(updates))
    counts = {client: float(update["num_samples"]) for client, update in updates.items()}
    total = sum(counts.values())
    return {client: count / total for client, count in counts.items()}


def mean_model(updates: Updates, weights: Mapping[int, float]) -> StateDict:
    """Return the weighted mean of uploaded models.

    Args:
        updates: updates by client id, at least one, with ``weights``.
        weights: weight of each client, by id; used as they are.
    """
    added = next(iter(updates.values()))["weights"]
    if type(added) is RunningMean and added.counts.keys() == updates.keys() and added.is_of(weights):
        return dict(added.mean())
    return weighted_mean([update["weights"] for update in updates.values()], [weights[client] for client in updates])


def moved_model(
    updates: Updates,
    weights: Mapping[int, float],
    model: StateDict,
    names: Iterable[str],
    starts: Mapping[int, StateDict] | None = None,
) -> StateDict:
    r"""Return a model moved by the clients' weighted changes: :math:`x + \sum_k \lambda_k (w_k - x_k)`.

    Args:
        updates: updates by client id, at least one, with ``weights``.
        weights: :math:`\lambda_k`, by client id; any sum.
        model: x, the model to move.
        names: the entries to move, of floating type; all others are left out.
        starts: :math:`x_k`, from which each client started, by id; None takes x for all.
    """
    entries = {}
    for name in names:
        uploads = column([update["weights"] for update in updates.values()], name)
        wide = torch.promote_types(uploads[0].dtype, torch.float32)
        x = model[name].to(uploads[0].device, wide)
        own = {} if starts is None else {client: starts[client][name].to(x) for client in updates}
        # by differences: with weights whose sum is far above 1, models would cancel and lose digits
        changes = (weights[k] * (upload.to(wide) - own.get(k, x)) for k, upload in zip(updates, uploads, strict=True))
        change = sum(changes, 0 * x)
        entries[name] = (x + change).to(uploads[0].dtype)
    return dict(zip(entries, moved([*entries.values()], CPU), strict=True))
