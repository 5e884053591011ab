r"""pFedFDA: features are normal in each class, and each client's classifier follows from its mix of their statistics.

Source: McLaughlin and Su, 2024 (https://arxiv.org/abs/2411.00329). Symbols: h are features of width d; M, with a row
for each class, and Sigma are the server's class means and common covariance, M_k and Sigma_k client k's, pi_k the
shares of its classes.
"""

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_lightning.client import Batch, ClientSettings, Phase, in_body, in_classifier
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import feature_size
from pfl_lightning.nets.base import find_output_layer
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights
from pfl_lightning.settings import Unpack

EPSILON = 1e-4
"""Share of the mean variance in a covariance, least entry of a client's covariance, and least share of a class."""
FEW = 2
"""A class with so many samples or fewer takes the server's mean."""


class PFedFDA(FedAvg):
    r"""Trains the body under the server's linear discriminant, and predicts by a mix of own and global statistics.

    .. math::

        W = M \tilde\Sigma^{-1}, \qquad b = -\tfrac12 \mathrm{diag}(M W^T) + \ln \pi_k, \qquad
        \tilde\Sigma = (1 - \epsilon) \Sigma + \epsilon \frac{\mathrm{tr} \Sigma}{d} I

    is the classifier of class means and a covariance. The body is trained by cross-entropy under the one of the
    received statistics, which stands still. With the features of its training samples the client then computes
    :math:`M_k` and :math:`\Sigma_k`, and the mixes :math:`\beta_1 M_k + (1 - \beta_1) M` and
    :math:`\beta_2 \Sigma_k + (1 - \beta_2) \Sigma`, which it sends with the body. Its own classifier is that of both
    mixes, computed anew with the received body for each evaluation. The server side is `FeatureStatistics`.

    Both :math:`\beta` are in [0, 1], with the least cross-entropy on a half of the samples by :math:`M_k` and
    :math:`\Sigma_k` of the other half, summed over both halves of each class: ten steps of L-BFGS from 0.5. Without a
    class of two samples they are 0. The halves are drawn anew in each round, by the run's seed, the round and the
    client; the official code has the seed 0 for all.

    As in the official code, :math:`\Sigma_k` has the identity added, :math:`\epsilon = 10^{-4}`, and a class with two
    samples or fewer takes its row of M. The code collects features during training, from all epochs, and this guard
    doesn't hold there; here features are of the trained body, in evaluation mode. A client's model without its samples,
    as from a checkpoint, has the classifier of its last training.
    Source: McLaughlin and Su, 2024 (https://arxiv.org/abs/2411.00329); cj-mclaughlin/pFedFDA@73c7c40.

    Args:
        beta: both :math:`\beta`, in [0, 1], instead of computed ones; 1 takes the client's own statistics alone.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if ``beta`` is out of its range, or the net's classifier isn't one linear layer.
    """

    sends = FedAvg.sends | {"class_means", "covariance"}
    needs = FedAvg.needs | {"class_means", "covariance"}

    requires = frozenset({"classes", "vector features", "body"})
    means: Tensor
    covariance: Tensor
    weight: Tensor
    bias: Tensor
    trained: Tensor

    def __init__(self, *args: Any, beta: float | None = None, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        if beta is not None and not 0 <= beta <= 1:
            raise MisconfigurationException(f"model.beta={beta} must be from 0 to 1, or null for computed ones.")
        self.beta = beta
        # a single layer may stand in a Sequential
        layers = [layer for layer in self.net.classifier.modules() if not list(layer.children())]
        layer = layers[0]
        if len(layers) > 1 or not isinstance(layer, nn.Linear) or layer.bias is None:
            found = ", ".join(type(layer).__name__ for layer in layers)
            raise MisconfigurationException(
                f"model.net={type(self.net).__name__} has a classifier of {found}, and {type(self).__name__} computes "
                "one linear layer with a bias; take a net with that, such as CNN."
            )
        self.head = find_output_layer(self, self.num_classes)
        size = layer.in_features
        # M and Sigma, and their classifier, under which the body is trained
        for name, shape in (
            ("means", [self.num_classes, size]),
            ("covariance", [size, size]),
            ("weight", [self.num_classes, size]),
            ("bias", [self.num_classes]),
        ):
            self.register_buffer(name, torch.zeros(shape), persistent=False)
        self.register_buffer("trained", torch.tensor(False))

    def is_shared(self, name: str) -> bool:
        """Share the body."""
        return super().is_shared(name) and not in_classifier(name)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the body, and compute the classifier for training, and the client's own before an evaluation."""
        super().on_download(payload, data)
        self.means.copy_(payload["class_means"])
        self.covariance.copy_(payload["covariance"])
        w, b = discriminant(wide(self.means), wide(self.covariance), self.priors(data))
        self.weight.copy_(w)
        self.bias.copy_(b)
        if data is not None and self.evaluation_follows:
            self.predict_by(*self.mixes(data), data)
        elif not self.trained:
            self.assign({f"{self.head}.weight": w, f"{self.head}.bias": b})

    def priors(self, data: ClientData | None) -> Tensor:
        r"""Return :math:`\pi_k`, the shares of classes ``[C]``; equal ones without samples.

        Args:
            data: the client's data.
        """
        counts = torch.ones(self.num_classes) if data is None else data.class_counts.cpu()
        # a class of share 0 would have a logit of minus infinity
        shares = counts.double() / counts.sum().clamp_min(1) + EPSILON
        return shares / shares.sum()

    def mixes(self, data: ClientData) -> tuple[Tensor, Tensor]:
        """Return the mixes of own and received class means ``[C, d]`` and covariances ``[d, d]``, in float64.

        Args:
            data: the client's data.
        """
        chunks = list(data.train.chunks())
        h, y = torch.cat([wide(self.net.features(x)) for x, _ in chunks]), torch.cat([y for _, y in chunks]).cpu()
        means, covariance = wide(self.means), wide(self.covariance)
        if self.beta is None:
            # a function of the run's seed, the round and the client, whatever the engine has drawn in training
            seed = derive_seed(torch.initial_seed(), "pfedfda")
            betas = best_betas(h, y, means, covariance, self.priors(data), seed)
        else:
            betas = self.beta, self.beta
        own_means, own_covariance = statistics(h, y, means, FEW)
        return torch.lerp(means, own_means, betas[0]), torch.lerp(covariance, own_covariance, betas[1])

    def predict_by(self, means: Tensor, covariance: Tensor, data: ClientData) -> None:
        """Make the classifier of class means and a covariance the client's own.

        Args:
            means: ``[C, d]``.
            covariance: ``[d, d]``.
            data: the client's data.
        """
        w, b = discriminant(means, covariance, self.priors(data))
        self.assign({f"{self.head}.weight": w, f"{self.head}.bias": b})

    def local_phases(self) -> list[Phase]:
        """Train the body."""
        return [Phase(trains=in_body)]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the task's loss under the classifier of the received statistics."""
        x, target = batch
        features = self.net.features(x)
        return {"loss": self.loss(features, F.linear(features, self.weight, self.bias), target)}

    def upload(self, data: ClientData) -> Message:
        """Return the body and both mixes, and make their classifier the client's own."""
        means, covariance = self.mixes(data)
        self.predict_by(means, covariance, data)
        self.trained.fill_(True)
        sent = {"class_means": means.to(self.means), "covariance": covariance.to(self.covariance)}
        return super().upload(data) | sent

    def configure_aggregator(self) -> Aggregator:
        """Return the means of bodies and statistics."""
        return FeatureStatistics()


class FeatureStatistics(WeightedAverage):
    r"""Averages bodies, class means and covariances, weighted by numbers of training samples.

    The first M is drawn uniformly from [0, 1), and the first :math:`\Sigma` is the identity, as in the official code.
    Source: as for `PFedFDA`.
    """

    needs = WeightedAverage.needs | {"class_means", "covariance"}
    sends = WeightedAverage.sends | {"class_means", "covariance"}
    sums_only = True

    def setup(self, server: Server) -> None:
        """Start from the common initial body, with drawn class means."""
        super().setup(server)
        shape = server.module.num_classes, feature_size(server.module.net)
        generator = torch.Generator().manual_seed(derive_seed(server.seed, "pfedfda"))
        self.state |= {"class_means": torch.rand(shape, generator=generator), "covariance": torch.eye(shape[1])}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average all three; log the mean variance of features."""
        if not updates:
            return {}
        super().aggregate(updates, round)
        weights = client_weights(updates, "samples")
        names = ("class_means", "covariance")
        self.state |= weighted_mean(list(updates.values()), [weights[client] for client in updates], names)
        return {"variance": float(self.state["covariance"].diagonal().mean())}

    def download(self, client: int) -> Message:
        """Return the body and both statistics."""
        return super().download(client) | {name: self.state[name] for name in ("class_means", "covariance")}


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on the CPU, without gradient, as small problems are solved fastest and best there.

    Args:
        tensor: the tensor.
    """
    return tensor.detach().cpu().double()


def discriminant(means: Tensor, covariance: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return weight ``[C, d]`` and bias ``[C]`` of the linear discriminant.

    >>> discriminant(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.eye(2), torch.ones(2))
    (tensor([[2., 0.],
            [0., 4.]]), tensor([-2., -8.]))

    Args:
        means: M, ``[C, d]``.
        covariance: :math:`\Sigma`, ``[d, d]``.
        priors: the classes' shares ``[C]``, above 0.
    """
    size = len(covariance)
    even = covariance.trace() / size * torch.eye(size, dtype=covariance.dtype)
    # solved, as an inverse of a large covariance loses digits
    weight = torch.linalg.solve((1 - EPSILON) * covariance + EPSILON * even, means.T).T
    return weight, priors.log() - (means * weight).sum(1) / 2


def statistics(h: Tensor, y: Tensor, means: Tensor, few: int) -> tuple[Tensor, Tensor]:
    r"""Return class means and the covariance within classes of some features.

    .. math:: \Sigma_k = \frac{1}{n - 1} \sum_i (h_i - \mu_{y_i}) (h_i - \mu_{y_i})^T + \epsilon 1 1^T + I

    Args:
        h: features ``[n, d]``.
        y: class numbers ``[n]``.
        means: other class means ``[C, d]``, for classes with few samples.
        few: such a number of samples, at least 0.
    """
    members = F.one_hot(y, len(means)).to(h)
    counts = members.sum(0)
    own = members.T @ h / counts.clamp_min(1)[:, None]
    centred = h - own[y]
    # around own means also where the others replace them, as in the official code
    covariance = centred.T @ centred / max(len(h) - 1, 1) + EPSILON + torch.eye(h.shape[1], dtype=h.dtype)
    return torch.where(counts[:, None] > few, own, means), covariance


def best_betas(
    h: Tensor, y: Tensor, means: Tensor, covariance: Tensor, priors: Tensor, seed: int
) -> tuple[float, float]:
    r"""Return both :math:`\beta`, found on two halves of each class.

    Args:
        h: features ``[n, d]`` in float64.
        y: class numbers ``[n]``.
        means: M, ``[C, d]``.
        covariance: :math:`\Sigma`, ``[d, d]``.
        priors: the classes' shares ``[C]``.
        seed: of the drawn halves.
    """
    # imported here: the import takes half a second
    from scipy.optimize import minimize

    generator = torch.Generator().manual_seed(seed)
    halves: list[list[Tensor]] = [[], []]
    for c in range(len(means)):
        rows = (y == c).nonzero().flatten()
        # a class of one sample has no two halves; each further odd one goes to the smaller part
        if len(rows) > 1:
            rows = rows[torch.randperm(len(rows), generator=generator)]
            first = sum(map(len, halves[0])) > sum(map(len, halves[1]))
            halves[first].append(rows[::2])
            halves[not first].append(rows[1::2])
    if not halves[0]:
        return 0.0, 0.0
    parts = [torch.cat(half) for half in halves]
    folds = [(*statistics(h[fit], y[fit], means, 0), h[held], y[held]) for fit, held in (parts, parts[::-1])]

    def objective(values: Any) -> tuple[float, Any]:
        b = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            loss = sum(
                F.cross_entropy(
                    F.linear(
                        h_held,
                        *discriminant(
                            torch.lerp(means, own, b[0]), torch.lerp(covariance, own_covariance, b[1]), priors
                        ),
                    ),
                    y_held,
                )
                for own, own_covariance, h_held, y_held in folds
            )
            (slope,) = torch.autograd.grad(torch.as_tensor(loss), b)
        return float(torch.as_tensor(loss).detach()), slope.numpy()

    found = minimize(objective, [0.5, 0.5], jac=True, method="L-BFGS-B", bounds=2 * [(0, 1)], options={"maxiter": 10})
    return float(found.x[0]), float(found.x[1])
