"""FedAWA: the server fits the client weights of the average to the clients' updates.

Source: FedAWA, CVPR 2025 (https://arxiv.org/abs/2503.15842). Symbols: theta_g the global model, theta_k the upload of
client k, tau_k = theta_k - theta_g its client vector, T the logits, lambda = softmax(T) the weights, K participants.
"""

import math
from typing import Literal, TypeAlias, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl_lightning.messages import StateDict, Updates, weighted_mean
from pfl_lightning.methods.feddisco import disco_shares
from pfl_lightning.methods.server_optimizer import server_optimizer
from pfl_lightning.server import Server, WeightedAverage, client_weights, inner_products
from pfl_lightning.settings import check_choices

Init: TypeAlias = Literal["log_size", "raw_size", "uniform", "disco"]
"""Initial logit of a client."""
RegTerm: TypeAlias = Literal["aggregate", "per_client"]
"""Object of the second term: the mean of the uploads, or on average each upload."""
Group: TypeAlias = Literal["model", "module", "tensor", "block"]
"""Unit of the model with weights of its own."""

ROUNDING = 1e-13
"""A difference of squared norms counts as 0 below this share of its terms."""
SMALLEST_SHARE = 1e-6
"""Replacement of a share of 0 in a logarithm."""


class FedAWA(WeightedAverage):
    r"""Adaptive weight aggregation: learns the weights of the average from the client vectors, without data.

    .. math::

        \theta_g \leftarrow \gamma \sum_k \lambda_k \theta_k, \qquad
        \lambda = \operatorname{softmax}(T), \qquad
        \min_T \; \sum_k \lambda_k \lVert \tau_k - \tau_g \rVert_2
        + 1 - \cos\Bigl(\sum_k \lambda_k \theta_k, \theta_g\Bigr), \qquad
        \tau_g = \sum_k \lambda_k \tau_k

    over the clients of the round. The server keeps the logits T by client; each round takes ``server_steps`` on the
    logits of its clients, with a new optimizer, so that one step of Adam moves each logit by its learning rate, up or
    down. Norms are over parameters; buffers are averaged with the same weights. Every one-hot :math:`\lambda` makes the
    first term 0: a long optimisation ends with one client's model, and the method is a few steps a round.

    The paper's FedAWA-L has separate weights for each layer (``group=module``): each group of parameters g has
    :math:`\lambda_g = \operatorname{softmax}(T_g)` and an objective of its own, and one optimizer steps on the sum of
    objectives. A buffer takes the weights of the parameter before it, which is of its own module if that has any. A
    group whose parameters didn't move, such as a frozen layer, keeps its weights. ``state["group_shares"]`` holds the
    weights by group and client, ``state["shares"]`` their means over groups, weighted by numbers of parameters.

    The objective is the paper's. The optimizer, its one step a round, and the lifetime of the logits are the released
    code's: we know of no word of the paper on them. Two choices are ours, where the code's own look like slips: logits
    begin with the samples' shares (``log_size``) instead of nearly equal weights whatever the sizes, and the average
    takes the weights after the step (``post``) instead of weights from the round before.
    Source: FedAWA, CVPR 2025 (https://arxiv.org/abs/2503.15842).

    Args:
        preset: sets ``init``, ``reg_term`` and ``apply`` where they are None: ``paper`` to ``log_size``, ``aggregate``
            and ``post``, of which ``reg_term`` is the paper's and the others are ours; ``official`` to the released
            code's ``raw_size``, ``per_client`` and ``pre``.
        init: a client's initial logit: ``log_size``, the logarithm of its number of samples, with which the weights
            begin as `WeightedAverage`'s; ``raw_size``, its share of the samples of the round, with which they begin
            nearly equal; ``uniform``, 0; ``disco``, the logarithm of its weight in `FedDisco` with the defaults,
            taken as at least 1e-6.
        reg_term: the second term: ``aggregate`` as above, or ``per_client``,
            :math:`\sum_k \lambda_k (1 - \cos(\theta_k, \theta_g))`.
        apply: whether the average takes the weights of ``post``, after the last step, or of ``pre``, before it.
        server_steps: steps on the logits a round, at least 0; 0 leaves the weights at ``init``.
        optimizer: builds the optimizer of a round from the logits; None takes ``Adam(lr=0.001, betas=(0.5, 0.999))``.
        reg_distance: the second term's distance: ``cosine``, or ``euclidean``, the mean of squared differences.
        gamma: factor of the average, in (0, 1], as in `WeightedAverage`; 1 keeps it a mean.
        group: the unit with weights of its own: the whole ``model``, or, for FedAWA-L, whose released code lacks it,
            each ``module`` that has parameters, weight and bias together; each ``tensor``; or each ``block``, a module
            with a matrix or a kernel among its parameters and the modules without one that follow it, such as a
            convolution and its normalisation.

    Raises:
        MisconfigurationException: if ``server_steps`` or ``gamma`` are out of range, ``group`` is none of its
            choices, the optimizer refuses its settings, or clients share no parameters.
    """

    example_level = True
    takes_gamma = True

    def __init__(
        self,
        preset: Literal["paper", "official"] = "paper",
        init: Init | None = None,
        reg_term: RegTerm | None = None,
        apply: Literal["post", "pre"] | None = None,
        server_steps: int = 1,
        optimizer: OptimizerCallable | None = None,
        reg_distance: Literal["cosine", "euclidean"] = "cosine",
        gamma: float = 1.0,
        group: Group = "model",
    ) -> None:
        super().__init__(gamma=gamma)
        if server_steps < 0:
            raise MisconfigurationException(f"aggregator.server_steps={server_steps} must be 0 or more, such as 1.")
        check_choices("aggregator", group=(group, get_args(Group)))
        # the preset fills in what isn't set; a setting given by the user wins
        official = preset == "official"
        self.init = init or ("raw_size" if official else "log_size")
        self.reg_term = reg_term or ("per_client" if official else "aggregate")
        self.apply = apply or ("pre" if official else "post")
        self.server_steps = server_steps
        self.optimizer = server_optimizer(optimizer, lr=0.001)
        self.reg_distance = reg_distance
        self.group: Group = group
        if self.init == "disco":
            self.needs = self.needs | {"class_counts"}

    def setup(self, server: Server) -> None:
        """Start from the common initial model, without logits."""
        super().setup(server)
        shared = server.weights
        self.parameters = set(server.parameter_names())
        if not self.parameters:
            raise MisconfigurationException(
                f"aggregator {type(self).__name__} weighs clients by the parameters that they share, and model "
                f"{type(server.module).__name__} shares none; take aggregator WeightedAverage."
            )
        self.groups = groups = self.grouping(shared)
        counts = [sum(shared[name].numel() for name in group if name in self.parameters) for group in groups.values()]
        self.sizes = torch.tensor(counts, dtype=torch.float64)
        self.state["logits"] = {}

    def grouping(self, shared: StateDict) -> dict[str, list[str]]:
        """Return the names of shared entries by group, in order.

        Args:
            shared: the shared entries, by name.
        """
        if self.group == "model":
            return {"model": list(shared)}
        modules = {name: name.rpartition(".")[0] for name in shared if name in self.parameters}
        if self.group == "tensor":
            keys = {name: name for name in modules}
        else:
            with_kernel = {module for name, module in modules.items() if shared[name].ndim > 1}
            starts = with_kernel if self.group == "block" else set(modules.values())
            keys = {name: module for name, module in modules.items() if module in starts}
        # an entry without a key goes to the group before it; the first entries go to the first group
        key = next(iter((keys or modules).values()))
        groups: dict[str, list[str]] = {}
        for name in shared:
            key = keys.get(name, key)
            groups.setdefault(key, []).append(name)
        return groups

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Fit the weights and average; log both terms at the used weights, and the largest weight."""
        if not updates:
            return {}
        # inner products once, so that no step touches the models
        grams, all_logits = self.grams(updates), self.state["logits"]
        # a client's first logit may depend on the whole round, as by `raw_size`
        if new := [client for client in updates if client not in all_logits]:
            first = self.first_logits(updates)
            all_logits |= {client: torch.full_like(self.sizes, first[client]) for client in new}
        # [G, K], a leaf: the optimizer sees this round's clients alone
        logits = torch.stack([all_logits[client] for client in updates], 1).requires_grad_()
        weights = logits.softmax(1)
        optimizer = self.optimizer([logits])
        for _ in range(self.server_steps):
            weights = logits.softmax(1)
            optimizer.zero_grad()
            torch.autograd.backward(torch.cat(self.objective(weights, grams)).sum())
            optimizer.step()
        logits = logits.detach()
        weights = logits.softmax(1) if self.apply == "post" else weights.detach()
        # copies: a checkpoint would store a row's view together with all other rows of the round
        all_logits |= {client: own.clone() for client, own in zip(updates, logits.T, strict=True)}
        self.mix(updates, weights)
        sim, reg = self.objective(weights, grams)
        largest = float(weights.max())
        # a collapse to one client is the objective's minimum, and no error of the optimizer
        if len(updates) > 1 and largest > 0.9:
            rank_zero_warn(
                f"round {round + 1}: one client has {largest:.2f} of the weight; FedAWA's objective is least where one "
                "has all, so take fewer aggregator.server_steps or a smaller learning rate if that isn't meant."
            )
        return {"sim": float(sim.sum()), "reg": float(reg.sum()), "max_weight": largest}

    def first_logits(self, updates: Updates) -> dict[int, float]:
        """Return initial logits for the round's clients, known ones included.

        Args:
            updates: updates by client id.
        """
        if self.init == "uniform":
            return dict.fromkeys(updates, 0.0)
        if self.init == "log_size":
            return {client: math.log(update["num_samples"]) for client, update in updates.items()}
        if self.init == "raw_size":
            return client_weights(updates, "samples")
        # FedDisco's own defaults
        shares = disco_shares(updates, a=0.5, b=0.1, metric="kl")
        return {client: math.log(max(share, SMALLEST_SHARE)) for client, share in shares.items()}

    def grams(self, updates: Updates) -> Tensor:
        r"""Return inner products of :math:`\tau_1, \ldots, \tau_K, \theta_g` in float64, which determine the objective.

        Args:
            updates: updates by client id.

        Returns:
            One matrix a group, ``[G, K + 1, K + 1]``.
        """
        models = [update["weights"] for update in updates.values()]
        groups = [[name for name in entries if name in self.parameters] for entries in self.groups.values()]
        return torch.stack([inner_products(models, names, self.state["weights"]) for names in groups])

    def objective(self, weights: Tensor, grams: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return both terms, one value a group.

        With :math:`A_{jk} = \langle\tau_j, \tau_k\rangle`, the first is of :math:`\lVert\tau_k - \tau_g\rVert^2 =
        A_{kk} - 2 (A\lambda)_k + \lambda^\top A \lambda`; no step needs the vectors themselves.

        Args:
            weights: lambda, ``[G, K]``.
            grams: as from `grams`, ``[G, K + 1, K + 1]``.

        Returns:
            ``sim`` and ``reg``, ``[G]`` each.
        """
        products, along, size = grams[:, :-1, :-1], grams[:, :-1, -1], grams[:, -1, -1:]
        squares = products.diagonal(dim1=1, dim2=2)  # ||tau_k||^2
        with_mean = (products @ weights[:, :, None])[:, :, 0]  # <tau_k, tau_g>
        square_of_mean = (weights * with_mean).sum(1, keepdim=True)  # ||tau_g||^2
        gaps = root(squares - 2 * with_mean + square_of_mean, squares + square_of_mean)
        sim = (weights * gaps).sum(1)
        if self.reg_term == "aggregate":
            # the mean of the uploads is sum lambda_k theta_k = theta_g + tau_g
            distance = self.distance(square_of_mean, (weights * along).sum(1, keepdim=True), size)[:, 0]
            return sim, distance
        return sim, (weights * self.distance(squares, along, size)).sum(1)

    def distance(self, square: Tensor, along: Tensor, size: Tensor) -> Tensor:
        r"""Return the distance of :math:`\theta_g + \tau` from :math:`\theta_g`.

        Args:
            square: :math:`\lVert\tau\rVert^2`, a row a group.
            along: :math:`\langle\tau, \theta_g\rangle`, of the same shape.
            size: :math:`\lVert\theta_g\rVert^2`, ``[G, 1]``.
        """
        if self.reg_distance == "euclidean":
            return square / self.sizes[:, None]
        # as PyTorch's cosine: a zero norm gives the cosine 0
        norms = root(size + 2 * along + square, size + square).clamp_min(1e-8) * size.sqrt().clamp_min(1e-8)
        return 1 - (size + along) / norms

    def mix(self, updates: Updates, weights: Tensor) -> None:
        """Make the weighted mean of the uploads, times gamma, the global model, each group by its own weights.

        Args:
            updates: updates by client id.
            weights: lambda, ``[G, K]``, in the order of the updates.
        """
        # one number a client for the record: the mean over groups by size
        means = (self.sizes / self.sizes.sum()) @ weights
        group_shares: dict[str, dict[int, float]] = {}
        mixed: StateDict = {}
        for (group, names), row in zip(self.groups.items(), weights.tolist(), strict=True):
            group_shares[group] = dict(zip(updates, row, strict=True))
            mixed |= weighted_mean([update["weights"] for update in updates.values()], row, names)
        self.move(mixed)
        self.state |= {"shares": dict(zip(updates, means.tolist(), strict=True)), "group_shares": group_shares}


def root(squares: Tensor, scale: Tensor) -> Tensor:
    """Return the square root, with value and gradient 0 where a difference is only rounding.

    Args:
        squares: differences of squared norms.
        scale: sum of the terms of each difference.
    """
    positive = squares > ROUNDING * scale
    return torch.where(positive, squares, 1.0).sqrt() * positive
