r"""FedTGP: class prototypes which the server trains to be far apart.

Source: Zhang et al., 2024 (https://arxiv.org/abs/2401.03230). Symbols: :math:`P_k^c` is the mean feature of client k's
samples of class c, :math:`\hat g_c` the server's trained prototype, d the width of features.
"""

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD

from pfl_lightning.messages import Message, StateDict, Updates, detached
from pfl_lightning.methods.class_vectors import stacked
from pfl_lightning.nets import feature_size
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import check_least


class TrainablePrototypes(Aggregator):
    r"""Trains each class's prototype to be the nearest to the clients' prototypes of the class, by an adaptive margin.

    .. math::

        \min -\log \frac{e^{-(\lVert P_k^c - \hat g_c \rVert + \delta)}}{e^{-(\lVert P_k^c - \hat g_c \rVert + \delta)}
        + \sum_{j \ne c} e^{-\lVert P_k^c - \hat g_j \rVert}}, \qquad
        \delta = \min\big(\max_c \min_{j \ne c} \lVert Q_c - Q_j \rVert,\ \mathrm{cap}\big)

    with the plain mean :math:`Q_c` of the round's client prototypes of class c. The server's prototypes are outputs of
    a net, an embedding of the classes and two layers, which keeps learning from round to round by plain SGD. Every
    client receives all prototypes, also of classes without any client. There are none before the first round.

    Clients train as `FedProto`, with an ``align_lambda`` of 10. As prototypes lie far apart and their distance has ten
    times the weight, a learning rate for FedAvg may be too large, so that accuracy falls once prototypes arrive; the
    official one is 0.01.
    Source: Zhang et al., 2024 (https://arxiv.org/abs/2401.03230); the defaults are those of its official code's script,
    the paper's could not be verified.

    Args:
        server_epochs: passes over the round's client prototypes, at least 0; 0 keeps the random initial prototypes.
        lr: learning rate of the server, at least 0.
        batch_size: client prototypes a batch, at least 1.
        cap: the largest margin, at least 0.

    Raises:
        MisconfigurationException: if a value is out of range, or clients send prototypes of different widths.
    """

    needs = frozenset({"prototypes"})
    sends = frozenset({"prototypes"})
    requires = frozenset({"classes"})

    def __init__(self, server_epochs: int = 100, lr: float = 0.01, batch_size: int = 10, cap: float = 100.0) -> None:
        super().__init__()
        check_least(
            "aggregator", server_epochs=(server_epochs, 0), lr=(lr, 0), batch_size=(batch_size, 1), cap=(cap, 0)
        )
        self.server_epochs, self.lr, self.batch_size, self.cap = server_epochs, lr, batch_size, cap

    def setup(self, server: Server) -> None:
        """Draw the initial weights of the net."""
        self.seed, self.num_classes = server.seed, server.module.num_classes
        size = feature_size(server.module.net)
        # the caller's random state stays as it is
        with isolate_rng():
            torch.manual_seed(derive_seed(server.seed, "fedtgp"))
            net = nn.Sequential(
                nn.Embedding(self.num_classes, size), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size)
            )
        self._net = (net,)  # the architecture; trained weights are in the state
        self.state |= {"net": detached(net.state_dict()), "prototypes": {}}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Train the prototypes; log the margin, and the mean loss of the last pass."""
        if not updates:
            return {}
        sent, target = stacked(updates, "prototypes")
        delta = min(margin(sent, target), self.cap)
        # copies, in the prototypes' precision: the state changes only when training is over
        weights: StateDict = {n: t.to(sent.dtype, copy=True).requires_grad_() for n, t in self.state["net"].items()}
        optimizer = SGD(weights.values(), lr=self.lr)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "fedtgp", round))
        loss = 0.0
        for _ in range(self.server_epochs):
            total = 0.0
            for rows in torch.split(torch.randperm(len(target), generator=generator), self.batch_size):
                distances = torch.cdist(sent[rows], self.made(weights), compute_mode="donot_use_mm_for_euclid_dist")
                # delta moves the own class away, so that the loss is low only where it is nearer by the margin
                apart = F.one_hot(target[rows], self.num_classes) * delta
                batch_loss = F.cross_entropy(-(distances + apart), target[rows])
                optimizer.zero_grad()
                torch.autograd.backward(batch_loss)
                optimizer.step()
                total += float(batch_loss.detach()) * len(rows)
            loss = total / len(target)
        made = self.made(weights).detach()
        self.state |= {"net": detached(weights), "prototypes": dict(enumerate(made.unbind()))}
        return {"margin": delta, "prototype_loss": loss}

    def made(self, weights: StateDict) -> Tensor:
        """Return the prototypes ``[C, d]`` for given weights of the net.

        Args:
            weights: the net's weights, by name.
        """
        prototypes: Tensor = functional_call(self._net[0], weights, (torch.arange(self.num_classes),))
        return prototypes

    def download(self, client: int) -> Message:
        """Return the prototypes of all classes; none before the first round."""
        return {"prototypes": self.state["prototypes"]}


def margin(sent: Tensor, target: Tensor) -> float:
    """Return the largest distance of a class mean from the nearest other class mean; infinite with one class.

    Args:
        sent: vectors ``[n, d]``.
        target: their classes ``[n]``.
    """
    means = torch.stack([sent[target == c].mean(0) for c in sorted(set(target.tolist()))])
    distances = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist")
    # a mean is no neighbour of itself
    return float(distances.fill_diagonal_(torch.inf).min(1).values.max())
