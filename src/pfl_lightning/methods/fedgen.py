r"""FedGen: the server's generator of features, trained against all clients' classifiers, teaches the clients.

Source: Zhu, Hong and Zhou, 2021 (https://arxiv.org/abs/2105.10056). Symbols: :math:`G(y, \epsilon)` is a feature for
class y and noise :math:`\epsilon`, :math:`\phi` the classifier and :math:`\phi_k` client k's, h the features of the
client's own samples, :math:`n_{k,y}` client k's number of samples of class y.
"""

from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam

from pfl_lightning.client import CLASSIFIER, Batch, ClientSettings
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, Updates, column, detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.frozen import FrozenModule
from pfl_lightning.methods.functional import within
from pfl_lightning.methods.losses import divergence
from pfl_lightning.methods.server_optimizer import go_on, server_optimizer
from pfl_lightning.nets import feature_size
from pfl_lightning.nets.batch_norm import on_batch_statistics
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, WeightedAverage
from pfl_lightning.settings import Unpack, check_choices, check_least


class FedGen(FedAvg):
    r"""Trains on the client's own samples, and on generated features from the server.

    .. math::

        L = \mathrm{CE}(\phi(h), y) + \beta_t\,\mathrm{KL}\big(\phi(G(y, \epsilon)) \,\Vert\, \phi(h)\big)
        + \alpha_t\,\mathrm{CE}(\phi(G(\tilde y, \epsilon)), \tilde y), \qquad
        \alpha_t = \max(10^{-4}, 0.98^t \alpha)

    and :math:`\beta_t` likewise, in round t from 0. y are the labels of the batch; :math:`\tilde y` are as many labels
    drawn uniformly from the classes that some client has. The divergence has no gradient in its first argument, and G
    is fixed, in evaluation mode. Both terms begin in the second round, when G has been trained.

    With the defaults, gradients are up to 21 times as large as those of cross-entropy. A learning rate for FedAvg may
    be far too large, so that accuracy falls to chance in the second round; the official one is 0.01.

    The official code leaves out both terms after 20 local epochs, which are one batch each there. PFLlib and HtFLlib
    have :math:`\beta = 0`, no decay, and the last term from the first round on.
    Source: Zhu et al., 2021 (https://arxiv.org/abs/2105.10056), whose official code has the defaults (for EMNIST
    ``beta=1``); the paper's own weights could not be verified.

    Args:
        alpha: weight of the generated samples, at least 0.
        beta: weight of the divergence, at least 0; if both are 0, models are those of `FedAvg` bit for bit.
        decay: factor on both weights from round to round, above 0 and up to 1.
        noise_size: numbers of noise a feature, at least 1.
        hidden: width of the generator's hidden layer, at least 1.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or the net's features have no known width.
    """

    logs = FedAvg.logs | {"generated"}
    requires = frozenset({"classes", "vector features"})
    needs = frozenset({"weights", "generator", "labels"})
    labels: Tensor

    def __init__(
        self,
        *args: Any,
        alpha: float = 10.0,
        beta: float = 10.0,
        decay: float = 0.98,
        noise_size: int = 32,
        hidden: int = 256,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_least("model", alpha=(alpha, 0), beta=(beta, 0), noise_size=(noise_size, 1), hidden=(hidden, 1))
        if not 0 < decay <= 1:
            raise MisconfigurationException(f"model.decay={decay} must be above 0 and up to 1, such as 0.98.")
        self.alpha, self.beta, self.decay = alpha, beta, decay
        self.noise_size, self.hidden = noise_size, hidden
        self.generator = FrozenModule(self.new_generator())  # G
        self.register_buffer("labels", torch.zeros(0, dtype=torch.int64), persistent=False)

    def new_generator(self) -> nn.Sequential:
        """Return a generator, which maps noise and one-hot classes ``[n, noise_size + C]`` to features ``[n, d]``."""
        hidden = nn.Linear(self.noise_size + self.num_classes, self.hidden)
        return nn.Sequential(
            hidden, nn.BatchNorm1d(self.hidden), nn.ReLU(), nn.Linear(self.hidden, feature_size(self.net))
        )

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, the generator, and the classes of the federation so far."""
        super().on_download(payload, data)
        self.generator.take(payload["generator"].items())
        # a new tensor, since the number of classes grows from round to round
        self.labels = payload["labels"].to(self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return cross-entropy, plus the generator's two terms from the second round on."""
        if self.alpha == self.beta == 0:
            return super().training_step(batch, batch_idx)
        x, y = batch
        features = self.net.features(x)
        logits = self.net.classifier(features)
        loss = self.loss(features, logits, y)
        # drawn in the first round too: an engine that can't draw random numbers in a step then refuses at once
        noise = torch.rand(2, len(y), self.noise_size, dtype=features.dtype, device=y.device)
        if not len(self.labels):
            return {"loss": loss}
        drawn = self.labels[torch.randint(len(self.labels), (len(y),), device=y.device)]
        of_batch, generated = (
            self.net.classifier(self.generator(torch.cat([part, F.one_hot(c, self.num_classes)], 1)))
            for part, c in zip(noise, (y, drawn), strict=True)
        )
        # L's second and third term
        taught, known = divergence(of_batch, logits), F.cross_entropy(generated, drawn)
        return {"loss": loss + self.weight(self.beta) * taught + self.weight(self.alpha) * known, "generated": known}

    def weight(self, first: float) -> float:
        """Return the decayed weight of this round; 0 stays 0.

        Args:
            first: the weight in the first round.
        """
        return max(1e-4, first * self.decay**self.round) if first else 0.0

    def configure_aggregator(self) -> Aggregator:
        """Return a server with a generator of features."""
        return FeatureGenerator()


class FeatureGenerator(WeightedAverage):
    r"""Averages models, and trains a generator of features by the clients' classifiers.

    .. math::

        \min_G\ \sum_k \mathrm{mean}_i\, \frac{n_{k,y_i}}{\sum_m n_{m,y_i}}\, \mathrm{CE}(\phi_k(z_i), y_i)
        + \eta\, \exp\big(-\mathrm{mean}_{ij} D_\epsilon(i, j)\, D_z(i, j)\big), \qquad z_i = G(y_i, \epsilon_i)

    over the classes of the round's clients, with uniform noise. :math:`D_\epsilon` are mean squared differences,
    :math:`D_z` mean absolute ones. The optimizer's state lives on from round to round, with 0.98 of its learning rate
    in each. The official code, by a slip, multiplies mean losses by mean shares of clients instead (``official``); the
    paper takes the loss of the clients' mean logits (``logits``).
    Source: Zhu et al., 2021 (https://arxiv.org/abs/2105.10056); the defaults are its official code's for MNIST.

    Args:
        server_steps: steps of the generator in a round, at least 0; 0 keeps the random initial generator.
        batch_size: generated features a step, at least 2.
        diversity: :math:`\eta`, at least 0.
        ensemble: combination of the clients' classifiers: ``samples`` as above, ``official``, or ``logits``.
        optimizer: builds the generator's optimizer; None takes ``Adam(lr=3e-4, weight_decay=0.01)``.
        lr_decay: factor on its learning rate from round to round, above 0 and up to 1.

    Raises:
        MisconfigurationException: if an argument is out of its range, or clients have no generator.
    """

    needs = WeightedAverage.needs | {"class_counts"}
    sends = frozenset({"weights", "generator", "labels"})

    def __init__(
        self,
        server_steps: int = 50,
        batch_size: int = 32,
        diversity: float = 1.0,
        ensemble: Literal["samples", "official", "logits"] = "samples",
        optimizer: OptimizerCallable | None = None,
        lr_decay: float = 0.98,
    ) -> None:
        super().__init__()
        check_least("aggregator", server_steps=(server_steps, 0), batch_size=(batch_size, 2), diversity=(diversity, 0))
        check_choices("aggregator", ensemble=(ensemble, ("samples", "official", "logits")))
        if not 0 < lr_decay <= 1:
            raise MisconfigurationException(f"aggregator.lr_decay={lr_decay} must be above 0 and up to 1, such as 1.")
        self.server_steps, self.batch_size, self.diversity = server_steps, batch_size, diversity
        self.ensemble, self.lr_decay = ensemble, lr_decay
        self.optimizer = server_optimizer(optimizer or partial(Adam, lr=3e-4, weight_decay=0.01), lr=3e-4)

    def setup(self, server: Server) -> None:
        """Draw the generator's initial weights."""
        super().setup(server)
        if not isinstance(server.module, FedGen):
            raise MisconfigurationException(
                f"aggregator FeatureGenerator trains a generator that model {type(server.module).__name__} doesn't "
                "have; take model FedGen."
            )
        self.server = server
        with isolate_rng():
            torch.manual_seed(derive_seed(server.seed, "fedgen"))
            net = server.module.new_generator()
        self.state |= {"generator": detached(net.state_dict()), "optimizer": {}, "labels": torch.zeros(0).long()}
        self._net = (net.to("meta"),)  # the architecture; trained weights are in the state

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Train the generator and average models; log the generator's last losses."""
        if not updates:
            return {}
        counts = torch.stack([update["class_counts"] for update in updates.values()]).double()
        # generated classes: no classifier of the round has learned any other
        held = counts.sum(0).nonzero().flatten()
        self.state["labels"] = torch.tensor(sorted({*self.state["labels"].tolist(), *held.tolist()}))
        log = self._train(updates, counts / counts.sum(0).clamp_min(1), held, round)
        super().aggregate(updates, round)
        return log

    def _train(self, updates: Updates, shares: Tensor, held: Tensor, round: int) -> dict[str, float]:
        module = cast(FedGen, self.server.module)
        device = module.device
        weights = [update["weights"] for update in updates.values()]
        wide = torch.promote_types(next(iter(weights[0].values())).dtype, torch.float32)

        def here(t: Tensor) -> Tensor:
            return t.to(device, wide if t.is_floating_point() else None, copy=True)

        # side by side, as all classifiers are called at once
        heads = {
            name: here(torch.stack(column(weights, f"{CLASSIFIER}{name}"))) for name in within(CLASSIFIER, weights[0])
        }
        net = {name: here(t) for name, t in self.state["generator"].items()}
        trained = [net[name].requires_grad_() for name, _ in self._net[0].named_parameters()]
        optimizer = self.optimizer(trained)
        for group in optimizer.param_groups:
            # the round gives the decay, so that a resumed run has the same learning rate
            group["lr"] *= self.lr_decay**round
        # the saved moments with this round's learning rate
        go_on(optimizer, self.state["optimizer"])
        generator = torch.Generator().manual_seed(derive_seed(self.server.seed, "fedgen", round))
        log = {}
        for _ in range(self.server_steps):
            y = held[torch.randint(len(held), (self.batch_size,), generator=generator)]
            noise = torch.rand(self.batch_size, module.noise_size, generator=generator, dtype=wide).to(device)
            w, y = shares[:, y].to(noise), y.to(device)
            z = functional_call(self._net[0], net, (torch.cat([noise, F.one_hot(y, module.num_classes)], 1),))
            # classifiers with BatchNorm normalise by the generated batch: their running statistics are of real features
            with on_batch_statistics(module):
                # randomness of a classifier's own, if any, is another one for each
                logits = torch.vmap(partial(functional_call, module.net.classifier), (0, None), randomness="different")(
                    heads, (z,)
                )
            losses = {"teacher_loss": teacher_loss(logits, y, w, self.ensemble), "diversity": alike(z, noise)}
            optimizer.zero_grad()
            torch.autograd.backward(losses["teacher_loss"] + self.diversity * losses["diversity"])
            optimizer.step()
            log = {name: float(loss.detach()) for name, loss in losses.items()}
        self.state |= {"generator": detached(net), "optimizer": detached(optimizer.state_dict()["state"])}
        return log

    def download(self, client: int) -> Message:
        """Return the model, the generator, and all classes of any round's clients."""
        return super().download(client) | {name: self.state[name] for name in ("generator", "labels")}


def teacher_loss(logits: Tensor, y: Tensor, shares: Tensor, ensemble: str) -> Tensor:
    """Return the loss of the clients' classifiers on generated features.

    Args:
        logits: ``[K, n, C]``.
        y: classes ``[n]``.
        shares: each client's share of all samples of the classes ``[K, n]``.
        ensemble: as for `FeatureGenerator`.
    """
    if ensemble == "logits":
        return F.cross_entropy(logits.mean(0), y)
    losses = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(len(logits), -1)
    if ensemble == "official":
        return (losses.mean(1) * shares.mean(1)).sum()
    return (losses * shares).mean(1).sum()


def alike(z: Tensor, noise: Tensor) -> Tensor:
    """Return the similarity of features from different noise, above 0 and up to 1.

    >>> alike(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]))
    tensor(0.3679)

    Args:
        z: features ``[n, d]``.
        noise: noise of each feature ``[n, e]``.
    """
    apart = (z[:, None] - z).abs().mean(2)
    return torch.exp(-((noise[:, None] - noise).square().mean(2) * apart).mean())
