r"""pFedHN: a hypernetwork at the server makes each client's model out of an embedding of the client.

Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628). Symbols: :math:`v_k` is client k's embedding,
:math:`\phi` the hypernetwork's weights and all embeddings, :math:`w_k = H(v_k; \phi)` the model that it makes.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.func import functional_call

from pfl_lightning.aggregators import Aggregator, Server
from pfl_lightning.choices import check_choices, check_least
from pfl_lightning.client import in_classifier
from pfl_lightning.messages import Message, StateDict, Updates, detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.model_maker import ModelMaker, nearest
from pfl_lightning.seeds import derive_seed


class PFedHN(FedAvg):
    """Trains the model that the hypernetwork made for it, and sends it back; buffers of the net stay.

    Only parameters are made: running statistics stay with each client, whatever ``buffers`` says. What is trained isn't
    kept, unless the classifier is personal, which is the paper's pFedHN-PC.
    Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628).

    Args:
        personal_classifier: whether each client keeps a classifier of its own.
        **kwargs: the arguments of `FedAvg`.
    """

    def __init__(self, personal_classifier: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.personal_classifier = personal_classifier

    def is_shared(self, name: str) -> bool:
        """Parameters, of the body alone where the classifier is personal."""
        stays = name in self._buffer_names or (self.personal_classifier and in_classifier(name))
        return super().is_shared(name) and not stays

    def configure_aggregator(self) -> Aggregator:
        """The hypernetwork."""
        return HyperNetwork()


class HyperNetwork(Aggregator):
    r"""Makes each client's model, and learns from what the client's training changed in it.

    .. math::

        g = \big(\nabla_\phi\, H(v_k; \phi)\big)^\top (w_k - \tilde w_k), \qquad
        u \leftarrow \rho u + \mathrm{clip}(g) + \lambda \phi, \qquad \phi \leftarrow \phi - \eta u

    where :math:`\tilde w_k` is the trained model. The paper has one client in a round, as has ``clients_per_round: 1``.
    With more, all gradients are at the :math:`\phi` that made the round's models; steps are one a client, in the order
    of ids, or one a round. Momentum and decay also move embeddings of clients who are absent, as in the official code.
    H starts as torch's layers do, so that the first models have not the scale of the net's own initialisation.

    The state has about :math:`2h` numbers for each of the model's, h being the width of H: 200 by default.

    A new client gets the model of the mean embedding. When it has trained that, it gets the model, of all that H makes
    with :math:`\phi` standing still, that is nearest to the trained one; the paper trains the embedding over rounds.
    Source: Shamsian et al., 2021 (https://arxiv.org/abs/2103.04628); the defaults are its official code's, which has
    ``lr=0.05`` for pFedHN-PC.

    Args:
        lr: :math:`\eta`, at least 0; 0 leaves all models as they were first made.
        embedding_lr: the same of the embeddings; None takes ``lr``.
        momentum: :math:`\rho`, in [0, 1).
        weight_decay: :math:`\lambda`, at least 0.
        clip: the largest norm of g, above 0.
        embedding_size: width of an embedding, at least 1; None takes 1 + K // 4 for K clients.
        hidden: h, at least 1.
        layers: hidden layers after the first one, at least 0.
        step: whether each ``client`` is a step, or each ``round``, by the mean of its clients' gradients.
        sparse_embeddings: whether embeddings of absent clients stand still.

    Raises:
        MisconfigurationException: if an argument is out of its range.
    """

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
        """Draws the embeddings and H."""
        shapes = {name: server.weights[name].shape for name in server.parameter_names()}
        self.first = server.first_names()
        size = self.embedding_size or 1 + server.num_clients // 4
        with isolate_rng():
            torch.manual_seed(derive_seed(server.seed, "pfedhn"))
            embeddings = torch.randn(server.num_clients, size)
            net = ModelMaker(size, self.hidden, self.layers, shapes)
        phi = {"embeddings": embeddings, **detached(net.state_dict())}
        self.state |= {"phi": phi, "momentum": {name: torch.zeros_like(tensor) for name, tensor in phi.items()}}
        self._net = (net.to("meta"),)  # its shape alone; what it learns is in the state

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Learns from the round's clients, and logs the mean norm of their gradients."""
        if not updates:
            return {}
        trained = next(iter(next(iter(updates.values()))["weights"].values()))
        wide = torch.promote_types(trained.dtype, torch.float32)
        self.state = {part: {n: t.to(wide) for n, t in entries.items()} for part, entries in self.state.items()}
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
        """g, by the names of what is learned.

        Args:
            phi: the weights that made the client's model, which require gradients.
            client: its id.
            trained: its trained model.
        """
        with torch.enable_grad():
            made = self.made(phi, phi["embeddings"][client])
        change = [tensor.detach() - trained[name] for name, tensor in made.items()]
        return dict(zip(phi, torch.autograd.grad(list(made.values()), list(phi.values()), change), strict=True))

    @torch.no_grad()
    def move(self, gradient: StateDict, clients: list[int]) -> None:
        """A step of everything by momentum, with all embeddings or those of some clients."""
        shrunk = min(1.0, self.clip / (float(norm(gradient.values())) + 1e-6))
        phi, momentum = self.state["phi"], self.state["momentum"]
        for name, g in gradient.items():
            u = self.momentum * momentum[name] + shrunk * g + self.weight_decay * phi[name]
            moved = phi[name] - (self.embedding_lr if name == "embeddings" else self.lr) * u
            if name == "embeddings" and self.sparse_embeddings:
                for after, before in ((u, momentum[name]), (moved, phi[name])):
                    rows = [row for row in range(len(after)) if row not in clients]
                    after[rows] = before[rows]
            phi[name], momentum[name] = moved, u

    def made(self, phi: StateDict, v: Tensor) -> StateDict:
        """H's tensors of an embedding, each once."""
        rest = {name: tensor for name, tensor in phi.items() if name != "embeddings"}
        model: StateDict = functional_call(self._net[0], rest, (v,))
        return model

    @torch.no_grad()
    def model(self, v: Tensor) -> Message:
        """What a client receives whose embedding it is; a tied parameter has all its names."""
        made = self.made(self.state["phi"], v)
        return {"weights": {name: made[first] for name, first in self.first.items()}}

    def download(self, client: int) -> Message:
        """The client's model."""
        return self.model(self.state["phi"]["embeddings"][client])

    def welcome(self, client: int, update: Message | None) -> Message:
        """The model of the mean embedding, and then the one that is nearest to what the newcomer has sent."""
        v = self.state["phi"]["embeddings"].mean(0)
        if update is not None:
            v = nearest(partial(self.made, self.state["phi"]), v, update["weights"])
        return self.model(v)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of several tensors as one vector."""
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))
    return total
