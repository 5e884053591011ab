r"""CCVR: after training, the classifier is fitted to virtual features, drawn from each class's mean and covariance.

Source: Luo et al., 2021 (https://arxiv.org/abs/2106.05001). Symbols: h are features of width d; client k has n_k
samples of a class, with the mean mu_k of their features and the scatter S_k, the sum of squares about it.
"""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import SGD

from pfl_lightning.client import Phase, in_classifier
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, promoted
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedgh import fit_classifier
from pfl_lightning.methods.server_optimizer import server_optimizer
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, WeightedAverage, Weighting
from pfl_lightning.settings import check_least


class CCVR(FedAvg):
    r"""Trains as `FedAvg`, and in the last of the planned rounds reports statistics of features in place of that.

    A client reports the number of its samples of each class, :math:`\mu_k` and :math:`S_k`, of the received model in
    evaluation mode, and trains nothing. The server side is `VirtualFeatures`. Of R rounds, R - 1 are of training; a run
    that ends before the last round has no calibration. The report applies to other methods too, whose models are
    averaged, by a class such as ``class Both(CCVR, FedProx)``.
    Source: Luo et al., 2021 (https://arxiv.org/abs/2106.05001). Takes the arguments of `FedAvg`.
    """

    sends = FedAvg.sends | {"class_statistics"}

    requires = frozenset({"classes", "vector features"})

    @property
    def reports(self) -> bool:
        """Whether this round is the last of the planned ones."""
        return self.round + 1 == self.num_rounds

    def local_phases(self) -> list[Phase]:
        """Train as before, and nothing in the last round."""
        # no phase, and not a loss of 0, which would still move running statistics
        return [] if self.reports else super().local_phases()

    def joining_phases(self) -> list[Phase]:
        """Train newcomers as in any other round."""
        return super().local_phases()

    def upload(self, data: ClientData) -> Message:
        """Return the model, and in the last round the statistics by class."""
        return super().upload(data) | {"class_statistics": self.statistics(data) if self.reports else {}}

    @torch.no_grad()
    def statistics(self, data: ClientData) -> dict[int, dict[str, Tensor]]:
        r"""Return ``count``, ``mean`` ``[d]`` and ``scatter`` ``[d, d]`` of the features of each class at the client.

        Args:
            data: the client's data.
        """
        chunks = [(self.net.features(x), y) for x, y in data.train.chunks()]
        features = torch.cat([features for features, _ in chunks])
        # on the CPU in float64: squares of many samples are summed
        h, sent = features.cpu().double(), promoted(features)
        y = torch.cat([target for _, target in chunks]).cpu()
        statistics = {}
        for c in data.classes:
            own = h[y == c]
            centred = own - own.mean(0)
            statistics[c] = {
                "count": torch.tensor(len(own)),
                "mean": own.mean(0).to(sent),
                "scatter": (centred.T @ centred).to(sent),
            }
        return statistics

    def configure_aggregator(self) -> Aggregator:
        """Return the average of models, with a calibrated classifier in the end."""
        return VirtualFeatures()


class VirtualFeatures(WeightedAverage):
    r"""Averages models, and after the last round fits the classifier to features drawn from each class's statistics.

    .. math::

        \mu = \frac1n \sum_k n_k \mu_k, \qquad
        \Sigma = \frac{1}{n - 1} \sum_k \bigl(S_k + n_k (\mu_k - \mu)(\mu_k - \mu)^T\bigr), \qquad n = \sum_k n_k

    are the mean and the unbiased covariance of all samples of the class, however they are divided over clients. M
    features of each class are drawn from :math:`N(\mu, \Sigma)`, and the classifier, from where training has left it,
    is fitted to them by cross-entropy. A class with fewer than two samples has no covariance, and no features. Only
    clients of the last round report; with ``clients_per_round`` that is a part of all.

    No official code was found. FL-bench divides each :math:`S_k` by :math:`n_k` and then weights it by
    :math:`n_k - 1`, so that its covariance is too small by half for clients with two samples; it calibrates before
    every test, with 200 features of each class, one pass, and the clients' learning rate. The number of passes here is
    a choice of this package.
    Source: Luo et al., 2021 (https://arxiv.org/abs/2106.05001); KarhouTam/FL-bench@06e658b.

    Args:
        virtual: M, at least 0; with 0 the classifier stays as it is.
        server_epochs: passes over the drawn features, at least 1.
        batch_size: features in a batch, at least 1.
        optimizer: builds the server's optimizer; None takes ``SGD(lr=0.01)``.
        weighting: client weights in the average: by training ``samples``, or all alike (``uniform``).

    Raises:
        MisconfigurationException: if an argument is out of its range, or the number of rounds is unknown.
    """

    needs = WeightedAverage.needs | {"class_statistics"}
    requires = frozenset({"classes"})

    def __init__(
        self,
        virtual: int = 200,
        server_epochs: int = 10,
        batch_size: int = 32,
        optimizer: OptimizerCallable | None = None,
        weighting: Weighting = "samples",
    ) -> None:
        super().__init__(weighting=weighting)
        check_least("aggregator", virtual=(virtual, 0), server_epochs=(server_epochs, 1), batch_size=(batch_size, 1))
        self.virtual, self.passes = virtual, (server_epochs, batch_size)
        self.optimizer = server_optimizer(optimizer or (lambda params: SGD(params, lr=0.01)), lr=0.01)

    def setup(self, server: Server) -> None:
        """Start from the common initial model."""
        super().setup(server)
        if server.rounds is None:
            raise MisconfigurationException(
                f"aggregator={type(self).__name__} calibrates in the last of trainer.max_rounds, which has no limit; "
                "give it one."
            )
        self.server = server
        self.names = [name for name in server.parameter_names() if in_classifier(name)]

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average models, or calibrate by a round of reports.

        Returns:
            In the last round ``virtual_loss``, the mean loss of the last pass over drawn features.
        """
        reports = [update["class_statistics"] for update in updates.values() if update["class_statistics"]]
        if not reports:
            return super().aggregate(updates, round)
        # clients that report have trained nothing: the model stays, without the rounding of a mean
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "ccvr", round))
        features, target = self.drawn(pooled(reports), generator)
        if not len(target):
            return {}
        features = features.to(self.server.dtype)
        head = {name: tensor for name, tensor in self.state["weights"].items() if in_classifier(name)}
        trained, loss = fit_classifier(
            self.server.module, head, self.names, features, target, self.optimizer, self.passes, generator
        )
        self.state["weights"] = self.state["weights"] | trained
        return {"virtual_loss": loss}

    def drawn(self, classes: dict[int, tuple[Tensor, Tensor]], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn features ``[n, d]`` and their class numbers ``[n]``.

        Args:
            classes: mean and covariance by class number.
            generator: for the draws.
        """
        features, target = [torch.zeros(0)], [torch.zeros(0, dtype=torch.int64)]
        for c, (mean, covariance) in classes.items():
            # by eigenvalues, as there may be fewer samples than dimensions, where a Cholesky factor doesn't exist
            values, vectors = torch.linalg.eigh(covariance)
            noise = torch.randn(self.virtual, len(mean), generator=generator, dtype=mean.dtype)
            # the symmetric root, in which the signs of eigenvectors don't matter
            features.append(mean + noise @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T)
            target.append(torch.full((self.virtual,), c))
        # the empty ones only stand for no class at all
        return torch.cat(features[1:] or features), torch.cat(target)


def pooled(reports: list[dict[int, dict[str, Tensor]]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the mean ``[d]`` and the unbiased covariance ``[d, d]`` of all samples by class number, in float64.

    >>> one = {"count": torch.tensor(2), "mean": torch.tensor([2.0]), "scatter": torch.tensor([[2.0]])}  # of 1 and 3
    >>> other = {"count": torch.tensor(1), "mean": torch.tensor([5.0]), "scatter": torch.tensor([[0.0]])}  # of 5
    >>> pooled([{7: one}, {7: other}])
    {7: (tensor([3.], dtype=torch.float64), tensor([[4.]], dtype=torch.float64))}

    Args:
        reports: each client's statistics, as `CCVR.statistics` returns them.
    """
    moments = {}
    for c in sorted({c for report in reports for c in report}):
        own = [report[c] for report in reports if c in report]
        counts = [int(each["count"]) for each in own]
        n = sum(counts)
        if n < 2:
            continue
        means = torch.stack([each["mean"].double() for each in own])
        shares = torch.tensor(counts, dtype=torch.float64)
        mean = shares @ means / n
        away = means - mean
        scatter = torch.stack([each["scatter"].double() for each in own]).sum(0) + away.T @ (shares[:, None] * away)
        moments[c] = mean, scatter / (n - 1)
    return moments
