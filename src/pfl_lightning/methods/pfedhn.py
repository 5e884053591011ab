r"""pFedHN: a hypernetwork on the server makes each client's model from an embedding of the client.

Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628). Symbols: :math:`v_k` is client k's embedding,
:math:`\phi` the hypernetwork's weights and all embeddings, :math:`w_k = H(v_k; \phi)` the model that it makes.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Size, Tensor, nn
from torch.func import functional_call
from torch.optim import LBFGS

from pfl_lightning.client import ClientSettings, in_classifier
from pfl_lightning.messages import Message, StateDict, Updates, detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server
from pfl_lightning.settings import Unpack, check_choices, check_least


class PFedHN(FedAvg):
    """Trains the hypernetwork's model for the client, and sends the trained parameters back.

    Only parameters are made: running statistics stay with each client, whatever ``buffers`` says. The client doesn't
    keep the trained model, except a personal classifier, which is the paper's pFedHN-PC.
    Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628).

    Args:
        personal_classifier: whether each client keeps a classifier of its own.
        **kwargs: the arguments of `FedAvg`.
    """

    def __init__(self, *args: Any, personal_classifier: bool = False, **kwargs: Unpack[ClientSettings]) -> None:
        super().__init__(*args, **kwargs)
        self.personal_classifier = personal_classifier

    def is_shared(self, name: str) -> bool:
        """Share parameters, without a personal classifier."""
        stays = name in self._buffer_names or (self.personal_classifier and in_classifier(name))
        return super().is_shared(name) and not stays

    def configure_aggregator(self) -> Aggregator:
        """Return the hypernetwork."""
        return HyperNetwork()


class ModelMaker(nn.Module):
    """A perceptron with a linear output layer for each tensor of a model.

    Args:
        embedding_size: width e of an embedding.
        hidden: width of the hidden layers.
        layers: number of hidden layers after the first one.
        shapes: shapes of the model's tensors, by name.
    """

    def __init__(self, embedding_size: int, hidden: int, layers: int, shapes: dict[str, Size]) -> None:
        super().__init__()
        deeper = chain.from_iterable((nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(layers))
        self.body = nn.Sequential(nn.Linear(embedding_size, hidden), *deeper)
        # one output layer a tensor: nearly all of the hypernetwork's weights are here
        self.heads = nn.ModuleList(nn.Linear(hidden, shape.numel()) for shape in shapes.values())
        self.shapes = shapes

    def forward(self, v: Tensor) -> StateDict:
        """Return a model's tensors, by name, for an embedding.

        Args:
            v: embedding ``[e]``.
        """
        h = self.body(v)
        return {n: head(h).view(shape) for head, (n, shape) in zip(self.heads, self.shapes.items(), strict=True)}


class HyperNetwork(Aggregator):
    r"""Makes each client's model, and learns from the change by the client's training.

    .. math::

        g = \big(\nabla_\phi\, H(v_k; \phi)\big)^\top (w_k - \tilde w_k), \qquad
        u \leftarrow \rho u + \mathrm{clip}(g) + \lambda \phi, \qquad \phi \leftarrow \phi - \eta u

    where :math:`\tilde w_k` is the trained model. The paper has one client in a round, as with ``clients_per_round:
    1``. With more, all gradients are at the :math:`\phi` that made the round's models; there is one step a client, in
    the order of ids, or one a round. Momentum and decay also move the embeddings of absent clients, as in the official
    code. H has PyTorch's initialisation, so that the first models don't have the scale of the net's own.

    Models start as a random H makes them, and need rounds: on scikit-learn's digits 89 % after 15 rounds, where `Local`
    has 95 %, and 98 % after 50, where it has 97 %. With ``lr=0.03`` two of three seeds stay at
    chance (docs/results.md, "Defaults").

    The state has about :math:`2h` numbers for each of the model's, where h is the width of H: 200 by default.

    A newcomer gets the model of the mean embedding. After training it, it gets, of all models that H makes with fixed
    :math:`\phi`, the nearest to the trained one; the paper trains the embedding over rounds.
    Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628); the defaults are its official code's, which has
    ``lr=0.05`` for pFedHN-PC.

    Args:
        lr: :math:`\eta`, at least 0; 0 leaves all models as they were first made.
        embedding_lr: :math:`\eta` of the embeddings; None takes ``lr``.
        momentum: :math:`\rho`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        clip: the largest norm of g, above 0.
        embedding_size: width of an embedding, at least 1; None takes 1 + K // 4 for K clients.
        hidden: h, at least 1.
        layers: number of hidden layers after the first one, at least 0.
        step: whether to make a step for each ``client``, or one a ``round``, by the mean of the clients' gradients.
        sparse_embeddings: whether embeddings of absent clients stand still.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

    fixed_clients = True
    needs = sends = frozenset({"weights"})
    meets_newcomers = True

    def __init__(
        self,
        lr: float = 0.01,
        embedding_lr: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 1e-3,
        clip: float = 50.0,
        embedding_size: int | None = None,
        hidden: int = 100,
        layers: int = 3,
        step: Literal["client", "round"] = "client",
        sparse_embeddings: bool = False,
    ) -> None:
        super().__init__()
        check_least("aggregator", lr=(lr, 0), weight_decay=(weight_decay, 0), hidden=(hidden, 1), layers=(layers, 0))
        check_least("aggregator", **{} if embedding_lr is None else {"embedding_lr": (embedding_lr, 0)})
        check_least("aggregator", **{} if embedding_size is None else {"embedding_size": (embedding_size, 1)})
        check_choices("aggregator", step=(step, ("client", "round")))
        if not 0 <= momentum < 1:
            raise MisconfigurationException(f"aggregator.momentum={momentum} must be 0 or more and below 1.")
        if not clip > 0:
            raise MisconfigurationException(f"aggregator.clip={clip} must be above 0, such as 50.")
        self.lr, self.embedding_lr = lr, lr if embedding_lr is None else embedding_lr
        self.momentum, self.weight_decay, self.clip = momentum, weight_decay, clip
        self.embedding_size, self.hidden, self.layers = embedding_size, hidden, layers
        self.step, self.sparse_embeddings = step, sparse_embeddings

    def setup(self, server: Server) -> None:
        """Draw the embeddings and the weights of H."""
        shapes = {name: server.weights[name].shape for name in server.parameter_names()}
        # H makes a tied parameter once, and clients receive it under each of its names
        self.first = server.first_names()
        # the official code's width
        size = self.embedding_size or 1 + server.num_clients // 4
        # the caller's random state stays as it is
        with isolate_rng():
            torch.manual_seed(derive_seed(server.seed, "pfedhn"))
            embeddings = torch.randn(server.num_clients, size)
            net = ModelMaker(size, self.hidden, self.layers, shapes)
        phi = {"embeddings": embeddings, **detached(net.state_dict())}
        self.state |= {"phi": phi, "momentum": {name: torch.zeros_like(tensor) for name, tensor in phi.items()}}
        self._net = (net.to("meta"),)  # the architecture; trained weights are in the state

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Learn from the round's clients; log the mean norm of the gradients."""
        if not updates:
            return {}
        # the precision of the uploads, which may be half or double: the state follows it, in float32 or better
        trained = next(iter(next(iter(updates.values()))["weights"].values()))
        wide = torch.promote_types(trained.dtype, torch.float32)
        self.state = {part: {n: t.to(wide) for n, t in entries.items()} for part, entries in self.state.items()}
        # the phi that made the round's models, while steps of earlier clients already move the state
        start = {name: tensor.clone().requires_grad_() for name, tensor in self.state["phi"].items()}
        norms, total = [], {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for client, update in updates.items():
            gradient = self.gradient(start, client, update["weights"])
            norms.append(float(norm(gradient.values())))
            if self.step == "client":
                self.move(gradient, [client])
            else:
                total = {name: tensor + gradient[name] / len(updates) for name, tensor in total.items()}
        if self.step == "round":
            self.move(total, list(updates))
        return {"gradient_norm": sum(norms) / len(norms)}

    def gradient(self, phi: StateDict, client: int, trained: StateDict) -> StateDict:
        """Return g, by name.

        Args:
            phi: the weights that made the client's model, which require gradients.
            client: the client's id.
            trained: its trained model.
        """
        with torch.enable_grad():
            made = self.made(phi, phi["embeddings"][client])
        # the vector of the vector-Jacobian product: w_k minus the trained model stands for a gradient in w_k
        change = [tensor.detach() - trained[name] for name, tensor in made.items()]
        return dict(zip(phi, torch.autograd.grad(list(made.values()), list(phi.values()), change), strict=True))

    @torch.no_grad()
    def move(self, gradient: StateDict, clients: list[int]) -> None:
        """Make a step with momentum.

        Args:
            gradient: g, by name.
            clients: ids of the clients whose embeddings move if ``sparse_embeddings``.
        """
        # as torch's clip_grad_norm_, whose 1e-6 keeps a zero norm from 0 / 0
        shrunk = min(1.0, self.clip / (float(norm(gradient.values())) + 1e-6))
        phi, momentum = self.state["phi"], self.state["momentum"]
        for name, g in gradient.items():
            u = self.momentum * momentum[name] + shrunk * g + self.weight_decay * phi[name]
            moved = phi[name] - (self.embedding_lr if name == "embeddings" else self.lr) * u
            # taken back after the step: else momentum and decay would move the embeddings of absent clients
            if name == "embeddings" and self.sparse_embeddings:
                for after, before in ((u, momentum[name]), (moved, phi[name])):
                    rows = [row for row in range(len(after)) if row not in clients]
                    after[rows] = before[rows]
            phi[name], momentum[name] = moved, u

    def made(self, phi: StateDict, v: Tensor) -> StateDict:
        """Return H's model for an embedding, with each tied tensor once.

        Args:
            phi: the weights.
            v: the embedding.
        """
        rest = {name: tensor for name, tensor in phi.items() if name != "embeddings"}
        model: StateDict = functional_call(self._net[0], rest, (v,))
        return model

    @torch.no_grad()
    def model(self, v: Tensor) -> Message:
        """Return the payload for an embedding, with a tied parameter under each name.

        Args:
            v: the embedding.
        """
        made = self.made(self.state["phi"], v)
        return {"weights": {name: made[first] for name, first in self.first.items()}}

    def download(self, client: int) -> Message:
        """Return the client's model."""
        return self.model(self.state["phi"]["embeddings"][client])

    def welcome(self, client: int, update: Message | None) -> Message:
        """Return the model of the mean embedding, or after an update the made model nearest to the newcomer's."""
        v = self.state["phi"]["embeddings"].mean(0)
        if update is not None:
            v = nearest(partial(self.made, self.state["phi"]), v, update["weights"])
        return self.model(v)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of several tensors as one vector.

    Args:
        tensors: the tensors, at least one.
    """
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))
    return total


def nearest(make: Callable[[Tensor], StateDict], v: Tensor, model: StateDict) -> Tensor:
    """Return the embedding of the model nearest to a given one, in squared distance of the weights.

    Args:
        make: maps an embedding to a model.
        v: the initial embedding.
        model: the given model, with the names of made models.
    """
    v = v.clone().requires_grad_()
    # few unknowns and an exact gradient, for which L-BFGS needs no learning rate
    optimizer = LBFGS([v], max_iter=100, line_search_fn="strong_wolfe")

    def distance() -> float:
        optimizer.zero_grad()
        squares = torch.stack([(tensor - model[name]).square().sum() for name, tensor in make(v).items()]).sum()
        torch.autograd.backward(squares)
        return squares.item()

    with torch.enable_grad():
        optimizer.step(distance)  # type: ignore[no-untyped-call]
    found: Tensor = v.detach()
    return found
