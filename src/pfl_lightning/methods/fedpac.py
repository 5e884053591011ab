"""FedPAC: features aligned to global prototypes, and for each client a personal combination of all classifiers.

Source: Xu et al., 2023 (https://arxiv.org/abs/2306.11867). Symbols: n_i samples of client i, pi_c the share of class c
in them, mu_c the mean of its features h; V_i and H_i, whose row c is pi_c mu_c, the client's statistics; alpha_i the
weights of all clients' classifiers in client i's.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import Phase, in_classifier
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, weighted_means
from pfl_lightning.methods.alternate_training import AlternateAlignment
from pfl_lightning.methods.class_vectors import ClassVectors, class_table
from pfl_lightning.methods.feature_alignment import AlignmentSettings
from pfl_lightning.nets import feature_size
from pfl_lightning.server import Aggregator, AggregatorList, ClassMeans, Server, WeightedAverage
from pfl_lightning.settings import Unpack

NEGLIGIBLE = 1e-3
"""Classifiers with a smaller weight are left out of a combination."""
FLOOR = 1e-10
"""The least curvature of a problem, as a share of its largest: makes the solution unique and bounds rounding errors."""
CLIENTS = 256
"""Problems that are solved at once, which bounds the memory."""
GUESSES = 40
"""Guesses at the clients with weight, for many problems at once; a problem without a right one is solved by itself."""


class PACClient(AlternateAlignment):
    r"""Trains the received classifier on the received features, then the features with alignment to prototypes.

    Before training, the client computes the statistics by which the server combines its classifier, with the received
    feature extractor and all of its n training samples:

    .. math::

        H_c = \pi_c\,\mu_c, \qquad
        V = \frac1n \Big( \sum_c \pi_c\, \mathrm{E}\big[\lVert h \rVert^2 \mid c\big] - \sum_c \lVert H_c \rVert^2 \Big)

    The features of a class without a global prototype are drawn to the client's own mean from before training; nothing
    is drawn before the server has any prototype. Its server side is `ClassifierCombination` beside `ClassMeans`, which
    averages prototypes by class counts.

    Args:
        head_epochs: passes over the training data in the classifier's phase; None as for `AlternateTraining`.
        head_lr: learning rate of the classifier's phase instead of the optimizer's; the schedule changes it too.
        **kwargs: the arguments of `AlternateAlignment`.

    Raises:
        MisconfigurationException: if ``head_lr`` isn't positive.
    """

    offers = AlternateAlignment.offers | {"statistics"}

    def __init__(
        self, *args: Any, head_epochs: int | None = 1, head_lr: float = 0.1, **kwargs: Unpack[AlignmentSettings]
    ) -> None:
        # the next class but one takes it, which type checkers don't follow
        super().__init__(*args, head_epochs=head_epochs, **kwargs)  # type: ignore[call-arg]
        if not head_lr > 0:
            raise MisconfigurationException(f"model.head_lr={head_lr} must be above 0, such as 0.1.")
        self.head_lr = head_lr
        # mu_c, and E[||h||^2 | c] in the last column, by the received feature extractor
        self.own = ClassVectors(self.num_classes, feature_size(self.net) + 1)

    @at_once
    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model and the prototypes, and before training compute the client's statistics."""
        super().on_download(payload, data)
        if data is None or not self.training_follows:
            return
        self.own.put(*class_table(self._features_and_square, data, self.num_classes))
        if payload["prototypes"]:
            # the own mean where the server has no prototype of the class
            classes = torch.arange(self.num_classes, device=self.device)
            self.prototypes.vectors.copy_(self.prototypes(classes, default=self.own.vectors[:, :-1]))
            self.prototypes.known.logical_or_(self.own.known)

    def _features_and_square(self, x: Tensor) -> Tensor:
        features = self.net.features(x)
        return torch.cat([features, features.square().sum(1, keepdim=True)], 1)

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the configured optimizer, with ``head_lr`` in the classifier's phase."""
        optimizer = super().local_optimizer(phase, parameters)
        if phase.name == "head":
            for group in optimizer.param_groups:
                group["lr"] = self.head_lr
        return optimizer

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the model, the prototypes, and the statistics from before training."""
        update = super().upload(data)
        return update | ({"statistics": self._statistics(data)} if "statistics" in self.requested else {})

    def _statistics(self, data: ClientData) -> Message:
        """Return V and H, where H has no rows for absent classes, which are 0.

        Args:
            data: the client's data.
        """
        n = data.size("train")
        pi = data.class_counts.to(self.own.vectors) / n
        means = pi[:, None] * self.own.vectors[:, :-1]
        # rounding can make a difference of squares negative
        variance = (pi @ self.own.vectors[:, -1] - means.square().sum()).clamp_min(0) / n
        return {"variance": variance, "means": {c: means[c] for c in data.classes}}

    def configure_aggregator(self) -> Aggregator:
        """Return a combination of classifiers for each client, and a mean of prototypes by class counts."""
        return AggregatorList([ClassifierCombination(), ClassMeans()])


class ClassifierCombination(WeightedAverage):
    r"""Averages feature extractors by samples, and combines the round's classifiers for each client.

    .. math:: \varphi_i = \sum_j \alpha_{ij}\, \hat\varphi_j

    over the clients of the round, with the weights of `combination_weights`; weights below 0.001 are dropped, and the
    others scaled to sum to 1. An absent client keeps its last classifier, at first the common initial one. The global
    model is the mean of all of the round's models. ``state["combinations"]`` has each client's last weights, ``{client:
    {client: weight}}``.
    """

    requires = frozenset({"classes"})

    needs = WeightedAverage.needs | {"statistics"}

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        self.shape = server.module.num_classes, feature_size(server.module.net)
        self.state |= {"initial": classifier_of(server.weights), "classifiers": {}, "combinations": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average and combine; log the mean weight of clients' own classifiers, and the mean size of a combination."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        variances = torch.stack([update["statistics"]["variance"] for update in updates.values()]).double()
        # H with zero rows for absent classes
        means = torch.zeros(len(updates), *self.shape, dtype=torch.float64)
        sent = [update["statistics"]["means"] for update in updates.values()]
        places = torch.tensor([(k, c) for k, rows in enumerate(sent) for c in rows]).T
        means[tuple(places)] = torch.stack([row for rows in sent for row in rows.values()]).to(means)
        weights = combination_weights(variances, means.flatten(1))
        models = [update["weights"] for update in updates.values()]
        combined = weighted_means(models, weights.tolist(), filter(in_classifier, models[0]))
        self.state["classifiers"] |= dict(zip(updates, combined, strict=True))
        for client, row in zip(updates, weights.tolist(), strict=True):
            mix = {other: weight for other, weight in zip(updates, row, strict=True) if weight > 0}
            self.state["combinations"][client] = mix
        mixed = float((weights > 0).sum(1).double().mean())
        return {"own_classifier": float(weights.diagonal().mean()), "classifiers_mixed": mixed}

    def download(self, client: int) -> Message:
        """Return the averaged feature extractor with the client's own classifier."""
        return {"weights": self.state["weights"] | self.state["classifiers"].get(client, self.state["initial"])}

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the global model, with the mean of all classifiers.

        A combination would need the other clients' statistics, which aren't kept.
        """
        return {"weights": self.state["weights"]}


def classifier_of(weights: StateDict) -> StateDict:
    """Return the entries of a model's classifier.

    Args:
        weights: the model, by name.
    """
    return {name: tensor for name, tensor in weights.items() if in_classifier(name)}


def combination_weights(variances: Tensor, means: Tensor) -> Tensor:
    r"""Return the weights of all clients' classifiers in each client's combination, by bias and variance.

    .. math:: \alpha_i = \arg\min_\alpha \alpha^\top \big(\mathrm{diag}(V) + D_i\big)\, \alpha, \qquad
        (D_i)_{ab} = \langle H_i - H_a,\, H_i - H_b \rangle, \qquad \alpha \ge 0,\ \sum_j \alpha_j = 1

    Clients with equal statistics H count by :math:`1/V_j`:

    >>> combination_weights(torch.tensor([1.0, 4.0]), torch.ones(2, 3))
    tensor([[0.8000, 0.2000],
            [0.8000, 0.2000]], dtype=torch.float64)

    Args:
        variances: V ``[K]``, at least 0.
        means: each client's H, flattened ``[K, C * d]``.

    Returns:
        ``[K, K]`` in float64, row i for client i; a client whose problem isn't solved takes its own classifier alone.
    """
    variances, means = variances.double(), means.double()
    # only differences of H count, which have more digits beside smaller numbers
    means = means - means.mean(0)
    gram = means @ means.T
    weights = torch.cat(
        [least_at_once(variances, gram, rows) for rows in torch.split(torch.arange(len(gram)), CLIENTS)]
    )
    for i in weights.isnan().any(1).nonzero().flatten():
        # D_i from K^2 inner products: <H_i - H_a, H_i - H_b> multiplied out
        bias = gram[i, i] - gram[i] - gram[i][:, None] + gram
        weights[i] = least_on_simplex(torch.diag(variances) + bias)
    kept = torch.where(weights < NEGLIGIBLE, 0, weights)
    sums = kept.sum(1, keepdim=True)
    return torch.where(sums > 0, kept / sums, torch.eye(len(gram), dtype=kept.dtype))


def least_at_once(variances: Tensor, gram: Tensor, clients: Tensor) -> Tensor:
    r"""Return the weights of some clients' problems, which on the simplex differ in their linear terms alone.

    .. math:: \alpha^\top P_i\, \alpha = \alpha^\top Q\, \alpha - 2\, g_i^\top \alpha + G_{ii}, \qquad
        Q = \mathrm{diag}(V) + G, \qquad G_{ab} = \langle H_a, H_b \rangle

    where :math:`P_i = \mathrm{diag}(V) + D_i`, and :math:`g_i` is row i of G. If S are the clients with weight,
    :math:`Q_{SS}\, \alpha_S = g_{iS} + \lambda \mathbf 1`, and no other client has a smaller slope
    :math:`(Q \alpha - g_i)_j` than :math:`\lambda`. S is guessed: first the clients of least :math:`(P_i)_{jj}`, and
    then without those whose weight became negative, and with those of the smallest slopes, until nothing is left to
    mend. Few weights are above 0, so the systems are small.

    Args:
        variances: V ``[K]`` in float64.
        gram: G ``[K, K]`` in float64.
        clients: numbers of the clients whose problems are solved ``[n]``.

    Returns:
        ``[n, K]``; NaN in the row of a problem without a right guess, or with too little curvature for this.
    """
    count = len(gram)
    solved = torch.full((len(clients), count), torch.nan, dtype=gram.dtype)
    q, g, left = torch.diag(variances) + gram, gram[clients], torch.arange(len(clients))
    nearness = gram.diagonal() - 2 * g + variances
    support = torch.zeros_like(solved, dtype=torch.bool)
    support.scatter_(1, nearness.topk(min(16, count), largest=False).indices, True)
    for _ in range(GUESSES):
        # the supports side by side, filled up by rows and columns of the unit matrix
        inside, at = support.byte().topk(int(support.sum(1).max()))
        inside = inside.bool()
        own = q[at[:, :, None], at[:, None, :]].where(inside[:, :, None] & inside[:, None, :], 0)
        own.diagonal(dim1=1, dim2=2).add_((~inside).to(own))
        root, failed = torch.linalg.cholesky_ex(own)
        ends = root.diagonal(dim1=1, dim2=2).aminmax(dim=1)
        flat = (failed > 0) | ~(ends.min.square() > 100 * FLOOR * ends.max.square())
        parts = torch.stack([g.gather(1, at), torch.ones_like(g).gather(1, at)], 2) * inside[:, :, None]
        linear, constant = torch.cholesky_solve(parts, root).unbind(2)
        slope = (1 - linear.sum(1, keepdim=True)) / constant.sum(1, keepdim=True)  # lambda
        weights = torch.zeros_like(g).scatter_(1, at, linear + slope * constant)
        least = (slope - (g * weights).sum(1, keepdim=True)) + gram.diagonal()[clients[left], None]
        missing = weights @ q - g - slope
        wrong, lacking = support & (weights < 0), ~support & (missing < -1e-10 * least)
        right = ~(wrong | lacking).any(1) & ~flat
        solved[left[right]] = weights[right]
        # all at once would be far too many
        added = min(count, max(8, at.shape[1] // 4))
        best = missing.where(lacking, torch.inf).topk(added, largest=False).indices
        support = (support & ~wrong) | (lacking & torch.zeros_like(lacking).scatter_(1, best, True))
        remain = ~right & ~flat
        support, g, left = support[remain], g[remain], left[remain]
        if not len(left):
            break
    return solved


def least_on_simplex(matrix: Tensor) -> Tensor:
    r"""Return the :math:`\alpha \ge 0` with :math:`\sum_j \alpha_j = 1` and the least :math:`\alpha^\top P \alpha`.

    With :math:`P = A^\top A` it is the direction of the :math:`u \ge 0` that minimises
    :math:`\lVert A u \rVert^2 + (\mathbf 1^\top u - 1)^2`, because for :math:`u = t \alpha` the best t leaves
    :math:`q / (1 + q)` of :math:`q = \alpha^\top P \alpha`: non-negative least squares, solved by an active set.

    Args:
        matrix: P ``[K, K]`` in float64, symmetric and positive semidefinite up to rounding.

    Returns:
        ``[K]``; all 0 if the solver gives up.
    """
    # imported here: the import takes half a second, and no other method needs it
    from scipy.optimize import nnls

    values, vectors = torch.linalg.eigh(matrix)
    # scaled to a largest eigenvalue of 1, which doesn't change the minimum, so that FLOOR is relative
    values = (values / values[-1].clamp_min(torch.finfo(values.dtype).tiny)).clamp_min(FLOOR)
    root = values.sqrt()[:, None] * vectors.T
    # the last row is (1^T u - 1)^2, the rows above it A u
    aim = torch.zeros(len(values) + 1, dtype=torch.float64)
    aim[-1] = 1
    try:
        solution, _ = nnls(torch.cat([root, torch.ones_like(values)[None]]).numpy(), aim.numpy())
    except RuntimeError:
        return torch.zeros_like(values)
    weights = torch.from_numpy(solution)
    return weights / weights.sum()
