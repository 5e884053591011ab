"""FedGH: one classifier for clients with different feature extractors, trained by the server on mean features.

Source: Yi et al., 2023 (https://arxiv.org/abs/2303.13137).
"""

from collections.abc import Collection
from typing import cast

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.func import functional_call
from torch.optim import SGD

from pfl_lightning.client import CLASSIFIER, ClientModule
from pfl_lightning.client.at_once import at_once
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, detached
from pfl_lightning.methods.class_vectors import class_means, stacked
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.methods.server_optimizer import server_optimizer
from pfl_lightning.nets.batch_norm import on_batch_statistics
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import check_least


class FedGH(LGFedAvg):
    """Trains a personal feature extractor with the received classifier, and sends mean features by class.

    Means are of the trained feature extractor in evaluation mode, over all training samples of a class. Feature
    extractors never leave their clients and may differ, as long as their features have one width. Takes the arguments
    of `FedAvg`.
    Source: Yi et al., 2023 (https://arxiv.org/abs/2303.13137).
    """

    requires = frozenset({"classes", "vector features"})
    sends = frozenset({"prototypes"})
    offers = frozenset()

    @at_once
    def upload(self, data: ClientData) -> Message:
        """Return the mean features of the client's classes."""
        return {"prototypes": class_means(self.net.features, data, self.num_classes)}

    def configure_aggregator(self) -> Aggregator:
        """Return a server with a trained classifier."""
        return GlobalHeader()


class GlobalHeader(Aggregator):
    """Trains the classifier on the mean features of the round's clients, and sends the classifier.

    Dropout is off on the server, and every pair of mean feature and class counts the same, as in the paper: samples
    don't weight them. A class without clients in the round is only pushed down. In the official code the server's
    optimizer has a client net's parameters, so that its classifier never leaves the random start; the defaults are
    those of HtFLlib, which trains it.
    Source: Yi et al., 2023 (https://arxiv.org/abs/2303.13137).

    Args:
        server_epochs: passes over the pairs in a round, at least 0; 0 always sends the initial classifier.
        batch_size: pairs a batch, at least 1.
        optimizer: builds the optimizer, which is new in each round; None takes ``SGD(lr=0.01)``.

    Raises:
        MisconfigurationException: if a value is out of range, or the optimizer refuses its settings.
    """

    needs = frozenset({"prototypes"})
    sends = frozenset({"weights"})
    requires = frozenset({"classes"})

    def __init__(
        self, server_epochs: int = 1, batch_size: int = 10, optimizer: OptimizerCallable | None = None
    ) -> None:
        super().__init__()
        check_least("aggregator", server_epochs=(server_epochs, 0), batch_size=(batch_size, 1))
        self.server_epochs, self.batch_size = server_epochs, batch_size
        self.optimizer = server_optimizer(optimizer or (lambda params: SGD(params, lr=0.01)), lr=0.01)

    def setup(self, server: Server) -> None:
        """Start from the common initial classifier."""
        self.server = server
        self.state["weights"] = server.weights
        self.names = server.parameter_names()

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Train the classifier; log the mean loss of the last pass."""
        if not updates or not self.server_epochs:
            return {}
        features, target = stacked(updates, "prototypes")
        optimizer, passes = self.optimizer, (self.server_epochs, self.batch_size)
        # a function of seed and round, so that a resumed run draws the same batches
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "fedgh", round))
        self.state["weights"], loss = fit_classifier(
            self.server.module, self.state["weights"], self.names, features, target, optimizer, passes, generator
        )
        return {"header_loss": loss}

    def download(self, client: int) -> Message:
        """Return the classifier."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """Return the classifier, as a part of a model."""
        weights: StateDict = self.state["weights"]
        return weights


def fit_classifier(
    module: ClientModule,
    weights: StateDict,
    names: Collection[str],
    features: Tensor,
    target: Tensor,
    optimizer: OptimizerCallable,
    passes: tuple[int, int],
    generator: torch.Generator,
) -> tuple[StateDict, float]:
    """Return a classifier trained on features, with the task's loss, and its mean loss in the last pass.

    Args:
        module: the server's client module, in whose net the classifier's layers are; unchanged.
        weights: the classifier's entries, by their names in ``module``.
        names: those of them that are trained.
        features: ``[n, d]``.
        target: class numbers ``[n]``.
        optimizer: builds the optimizer.
        passes: number of passes over the features, at least 1, and of samples in a batch.
        generator: for the order of samples.
    """
    features, target = features.to(module.device), target.to(module.device)
    # copies on the clients' device: the module's own weights are the last client's, and stay; in the clients' type, as
    # with precision=64-true the initial classifier is float32
    wide = {name: torch.promote_types(weights[name].dtype, cast(torch.dtype, module.dtype)) for name in names}
    entries = {
        name: tensor.to(module.device, wide.get(name, tensor.dtype), copy=True) for name, tensor in weights.items()
    }
    trained = [entries[name].requires_grad_() for name in names]
    # the classifier's entries by their names within it, as functional_call takes them
    head: StateDict = {name.removeprefix(CLASSIFIER): tensor for name, tensor in entries.items()}
    steps = optimizer(trained)
    losses: list[float] = []
    for _ in range(passes[0]):
        losses.clear()
        for rows in torch.split(torch.randperm(len(target), generator=generator), passes[1]):
            with on_batch_statistics(module):
                logits = functional_call(module.net.classifier, head, (features[rows].to(trained[0]),))
            loss = module.task.loss(logits, target[rows])
            steps.zero_grad()
            torch.autograd.backward(loss)
            steps.step()
            losses.append(float(loss.detach()) * len(rows))
    return detached(entries), sum(losses) / len(target)
