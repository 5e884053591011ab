r"""PeFLL: a hypernetwork makes a client's model from an embedding of the client's samples, for newcomers too.

Source: Scott et al., 2024 (https://arxiv.org/abs/2306.05515). Symbols: :math:`\varphi` is the embedding net, H the
hypernetwork, :math:`\phi` the weights of both, :math:`v_k` client k's embedding, :math:`w_k` its model.
"""

import math
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from pfl_lightning.client import ClientSettings, Phase
from pfl_lightning.client.common import trained_parameters
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.messages import Message, StateDict, Updates, detached, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.pfedhn import ModelMaker, norm
from pfl_lightning.methods.server_optimizer import go_on, server_optimizer
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.settings import Unpack, check_least

SHARED = ("embedder.", "maker.", "moments", "fitted")
"""Beginnings of the names of the shared entries."""


class PeFLL(FedAvg):
    r"""Makes a model from the client's samples, trains the model, and sends the gradient of both nets.

    .. math::

        v_k = \frac{\mathrm{mean}_i\, \varphi(x_i, y_i) - \mu}{\sigma}, \qquad w_k = H(v_k), \qquad
        g_k = \big(\nabla_\phi\, w_k\big)^\top (w_k - \tilde w_k)

    over the client's training samples, where :math:`\tilde w_k` is the trained model, and without gradients of
    :math:`\mu` and :math:`\sigma`: the mean and deviation of the numbers in an embedding, as of the first
    round. The embedding net is a perceptron of flattened inputs and one-hot classes. Only parameters are made: running
    statistics stay with each client. A client without any training has a model by samples alone. The trained model
    is kept until the next one is made.

    In the paper H stays at the server, and a round has three exchanges: of embedding and model, of the trained model
    and the embedding's gradient, and of the embedding net's gradient. Here a client receives H too, and a round has one
    exchange, with the same numbers: the server sees no embedding and no model, but H is ``hidden`` times as large as
    the model. An update's weights are :math:`\phi - g_k`.

    The official code embeds one batch of 32 samples, divides the sum by twice the number of batches in place of the
    number of samples, and takes :math:`\mu` and :math:`\sigma` of the first client alone; here both are means over the
    first round's clients. The embedding net for images is a CNN with classes as channels, and logits of absent classes
    are multiplied by 0 in the evaluation.
    Source: Scott et al., 2024 (https://arxiv.org/abs/2306.05515); jonnyascott/PeFLL@18659a1, with whose widths of
    perceptron and H.

    Args:
        embedding_size: width of an embedding, at least 2; officially 1 + K // 4 for K clients.
        embedding_hidden: width of the embedding net's two hidden layers, at least 1.
        hidden: width of H, at least 1.
        layers: number of hidden layers of H after the first one, at least 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or inputs are several tensors.
    """

    requires = frozenset({"classes"})
    embedding: Tensor
    moments: Tensor
    fitted: Tensor

    def __init__(
        self,
        *args: Any,
        embedding_size: int = 8,
        embedding_hidden: int = 20,
        hidden: int = 100,
        layers: int = 3,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_least("model", embedding_size=(embedding_size, 2), embedding_hidden=(embedding_hidden, 1))
        check_least("model", hidden=(hidden, 1), layers=(layers, 0))
        if self.input_shape.example is not None:
            raise MisconfigurationException(
                "model PeFLL embeds inputs of one tensor, and data.input_shape has several; take a method that reads "
                "no inputs, such as PFedHN."
            )
        inputs = math.prod(self.input_shape) + self.num_classes
        self.embedder = nn.Sequential(
            *(nn.Linear(inputs, embedding_hidden), nn.ReLU(), nn.Linear(embedding_hidden, embedding_hidden), nn.ReLU()),
            nn.Linear(embedding_hidden, embedding_size),
        )
        shapes = {name: p.shape for name, p in trained_parameters(self, "net").items()}
        self.maker = ModelMaker(embedding_size, hidden, layers, shapes)  # H
        # every name of a tied parameter, which is made once
        first = {id(p): name for name, p in self.net.named_parameters()}
        pairs = [(name, first[id(p)]) for name, p in self.net.named_parameters(remove_duplicate=False)]
        self.names = {f"net.{name}": own for name, own in pairs if own in shapes}
        # kept, as a checkpoint makes the model without samples
        self.register_buffer("embedding", torch.zeros(embedding_size))
        self.register_buffer("moments", torch.tensor([0.0, 1.0]))
        self.register_buffer("fitted", torch.tensor(0.0))

    def is_shared(self, name: str) -> bool:
        """Share both nets, and the moments of embeddings."""
        return name.startswith(SHARED)

    def local_phases(self) -> list[Phase]:
        """Train the made model alone."""
        return [Phase(trains=lambda name: name.startswith("net."))]

    def embed(self, samples: Samples) -> Tensor:
        """Return the mean embedding ``[e]`` of samples.

        Args:
            samples: the client's training samples, at least one.
        """
        total: Tensor | int = 0
        for x, y in samples.chunks():
            known = F.one_hot(y, self.num_classes).to(self.embedding)
            total = total + self.embedder(torch.cat([x.flatten(1).to(self.embedding), known], 1)).sum(0)
        return torch.as_tensor(total) / len(samples)

    def made(self, embedding: Tensor) -> StateDict:
        """Return the model of a mean embedding, by names in the net.

        Args:
            embedding: ``[e]``.
        """
        return self.maker((embedding - self.moments[0]) / self.moments[1])  # type: ignore[no-any-return]

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load both nets, embed the client's samples, and make the model."""
        super().on_download(payload, data)
        if data is not None and len(data.train):
            self.embedding.copy_(self.embed(data.train))
            # a client of the first round has none but its own
            if not self.fitted:
                # no deviation of 0, as of a net whose outputs are all alike
                deviation = self.embedding.std().clamp_min(torch.finfo(torch.float32).eps)
                self.moments.copy_(torch.stack([self.embedding.mean(), deviation]))
                self.fitted.fill_(1.0)
        model = self.made(self.embedding)
        self.assign({name: model[own] for name, own in self.names.items()})

    def upload(self, data: ClientData) -> Message:
        r"""Return :math:`\phi - g_k`."""
        update = super().upload(data)
        if not self.steps_done:
            return update
        trained = trained_parameters(self, "net")
        named = {name: p for name, p in self.named_parameters() if name.startswith(SHARED)}
        with torch.enable_grad():
            model = self.made(self.embed(data.train))
        # the vector of the vector-Jacobian product: what was made minus what was trained stands for a gradient in it
        change = [tensor.detach() - trained[name].detach() for name, tensor in model.items()]
        slopes = torch.autograd.grad(list(model.values()), list(named.values()), change)
        moved = {name: p.detach() - g for (name, p), g in zip(named.items(), slopes, strict=True)}
        return {**update, "weights": {**update["weights"], **moved}}

    def configure_aggregator(self) -> Aggregator:
        """Return the server of both nets."""
        return HyperStep()


class HyperStep(WeightedAverage):
    r"""Makes a step of an optimizer on both nets, by the mean of their gradients.

    .. math:: g = \frac{1}{|S|} \sum_{k \in S} g_k

    is clipped to a norm. The optimizer's state lives on from round to round, and clients count alike.
    Source: as for `PeFLL`.

    Args:
        optimizer: builds the optimizer; None takes ``Adam(lr=2e-4)``.
        clip: the largest norm of g, above 0.

    Raises:
        MisconfigurationException: if ``clip`` isn't above 0, or the optimizer refuses its settings.
    """

    needs = frozenset({"weights"})

    def __init__(self, optimizer: OptimizerCallable | None = None, clip: float = 50.0) -> None:
        super().__init__(weighting="uniform")
        if not clip > 0:
            raise MisconfigurationException(f"aggregator.clip={clip} must be above 0, such as 50.")
        self.clip = clip
        self.optimizer = server_optimizer(optimizer or (lambda params: Adam(params, lr=2e-4)), lr=2e-4)

    def setup(self, server: Server) -> None:
        """Start from the common initial nets."""
        super().setup(server)
        self.parameters = server.parameter_names()
        self.state["optimizer"] = {}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Make a step; log the norm of the mean gradient."""
        if not updates:
            return {}
        mean = detached(weighted_mean([u["weights"] for u in updates.values()], [1 / len(updates)] * len(updates)))
        start = {name: self.state["weights"][name].to(mean[name], copy=True) for name in self.parameters}
        gradient = {name: tensor - mean[name] for name, tensor in start.items()}
        size = float(norm(gradient.values()))
        # as torch's clip_grad_norm_, whose 1e-6 keeps a zero norm from 0 / 0
        shrunk = min(1.0, self.clip / (size + 1e-6))
        for name, tensor in start.items():
            tensor.requires_grad_().grad = shrunk * gradient[name]
        steps = self.optimizer(list(start.values()))
        go_on(steps, self.state["optimizer"])
        steps.step()
        self.state |= {"weights": mean | detached(start), "optimizer": detached(steps.state_dict()["state"])}
        return {"gradient_norm": size}
