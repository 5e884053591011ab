r"""FedFed: clients share a part of each sample, enough for a classifier, with noise, and train on all shared parts.

Source: Yang et al., 2023 (https://arxiv.org/abs/2310.05077). Symbols: x is a sample, y its class, q the generator,
:math:`x_r = q(x)` the performance-robust features and :math:`x_s = x - x_r` the performance-sensitive ones; f is a
classifier that judges features, and :math:`\phi` the model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from pfl_lightning.client import Batch, ClientModule, ClientSettings, Phase
from pfl_lightning.data import ClientData
from pfl_lightning.messages import Message, StateDict, Updates, detached, weighted_mean
from pfl_lightning.methods.copies import add_copy
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets.inputs import InputShape
from pfl_lightning.seeds import derive_seed
from pfl_lightning.server import Aggregator, Server, WeightedAverage, client_weights
from pfl_lightning.settings import Unpack, check_least

DISTILLED = ("generator.", "judge.")
"""Beginnings of the names of the entries that the first rounds train."""


def is_distilled(name: str) -> bool:
    """Return whether an entry is of the generator or of its classifier.

    Args:
        name: the entry's name.
    """
    return name.startswith(DISTILLED)


def distilled(client: ClientModule) -> StateDict:
    """Return the travelling entries of generator and classifier, as references.

    Args:
        client: the client module.
    """
    return {n: t for n, t in client.state_dict().items() if is_distilled(n) and n not in client.common_names}


class FedFed(FedAvg):
    r"""Distils features in the first rounds, shares them with noise in one, and trains on own and shared samples.

    Rounds 0 to T - 1 train q and f, both averaged over clients, by

    .. math::

        L = \lambda_r\, \mathrm{mean}\,(x_r - x)^2 + \frac{\lambda_k}{3 z}\, \mathrm{KL}\big(\mathcal N(\mu, s^2)
        \,\Vert\, \mathcal N(0, 1)\big) + \lambda_s\, \mathrm{CE}(f(x_s + \epsilon_i), y)
        + \lambda_x\, \mathrm{CE}(f(x), y)

    with a new draw of each noise :math:`\epsilon_i \sim \mathcal N(0, \sigma_i^2)` for each sample. q is a variational
    autoencoder; between its halves are z numbers, drawn by :math:`\mu(x)` and :math:`s(x)`. :math:`\lambda_r` keeps
    :math:`x_s` small, and :math:`\lambda_s` useful. In round T nothing is trained: each client of the round sends
    :math:`x_s + \epsilon_i` of all its training samples for each i, with their classes, by the averaged q in evaluation
    mode. From round T + 1 on clients train :math:`\phi`, which until then is the initial model, as their parent does,
    on batches of n own samples and n drawn shared ones of each noise: each class that was shared is equally probable,
    and so is each of its samples.

    The second part applies to other methods too, by a class such as ``class Both(FedFed, FedProx)``. A run that ends by
    round T has trained no model. All shared features travel to each client in each later round, where the paper sends
    them once. They hold images as inputs of the net, so that random augmentations have no part in them.

    **Privacy.** Shared features are data: a version of every training sample, with its class, which the server and all
    clients can look at. Their noise guarantees nothing: it is calibrated to no bound of :math:`\lVert x_s \rVert`,
    neither here nor in the official code. Of two noisy versions the mean has less noise than either, and who knows
    the run's seed, as a deployment's server does, can take all of it off. Guarantees of differential privacy are
    refused.

    The official code has images of [0, 1] and a sigmoid behind q; here images are of [-1, 1], with a tanh, so that its
    noises of 0.15 and 0.25 are 0.3 and 0.5, and its :math:`\lambda_r` of 5, which its curriculum always multiplies by
    10, is 12.5. It draws one noise for a whole batch of 64 samples, so that differences of shared features have none.
    It draws shared samples for each epoch without replacement, and f has initial weights of its own. Left out are its
    steps of f on mixed samples and of q on mosaics in front of each epoch, other weights for clients with few samples
    or one common class, and random augmentations.
    Source: Yang et al., 2023 (https://arxiv.org/abs/2310.05077); visitworld123/FedFed@57f4a19, whose are the defaults.

    Args:
        distill_rounds: T, at least 0; 0 is the parent bit for bit.
        noise: the standard deviations :math:`\sigma_i` in the unit of inputs, each at least 0; without any, no round
            shares, and later ones are those of the parent. For images q has BatchNorm, and no batch is of one sample.
        reconstruction: :math:`\lambda_r`, at least 0.
        divergence: :math:`\lambda_k`, at least 0.
        sensitive: :math:`\lambda_s`, at least 0.
        whole: :math:`\lambda_x`, at least 0.
        width: channels of q, an even number; for inputs that are no images with sides divisible by 4, such as rows of
            tables, q is a perceptron with a hidden layer of this width.
        latent: z, at least 1; None takes as many numbers as the encoder has, officially 2,048 for images of 32 x 32.
        distill_lr: learning rate of AdamW in the first rounds, above 0.
        **kwargs: the arguments of `FedAvg`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or inputs are several tensors or whole numbers.
    """

    logs = FedAvg.logs | {"reconstruction", "divergence"}
    requires = frozenset({"classes"})
    sends = FedAvg.sends | {"generator", "shared_features"}
    needs = frozenset({"weights", "generator", "shared_features"})
    model_needs = frozenset({"weights"})
    bank: Tensor
    held: Tensor
    counts: Tensor
    starts: Tensor

    def __init__(
        self,
        *args: Any,
        distill_rounds: int = 15,
        noise: Sequence[float] = (0.3, 0.5),
        reconstruction: float = 12.5,
        divergence: float = 0.005,
        sensitive: float = 2.0,
        whole: float = 0.4,
        width: int = 32,
        latent: int | None = None,
        distill_lr: float = 1e-3,
        **kwargs: Unpack[ClientSettings],
    ) -> None:
        super().__init__(*args, **kwargs)
        check_least("model", distill_rounds=(distill_rounds, 0), reconstruction=(reconstruction, 0))
        check_least("model", divergence=(divergence, 0), sensitive=(sensitive, 0), whole=(whole, 0))
        check_least("model", **{} if latent is None else {"latent": (latent, 1)})
        if width < 2 or width % 2:
            raise MisconfigurationException(f"model.width={width} must be an even number of 2 or more, such as 32.")
        if any(sigma < 0 for sigma in noise):
            raise MisconfigurationException(f"model.noise={list(noise)} must have numbers of 0 or more, such as 0.3.")
        if not distill_lr > 0:
            raise MisconfigurationException(f"model.distill_lr={distill_lr} must be above 0, such as 0.001.")
        if self.input_shape.example is not None:
            raise MisconfigurationException(
                "model FedFed distils features of inputs of one tensor, and data.input_shape has several; take a "
                "method that shares no inputs, such as FedGen."
            )
        self.distill_rounds, self.noise, self.distill_lr = distill_rounds, tuple(noise), distill_lr
        self.reconstruction, self.divergence, self.sensitive, self.whole = reconstruction, divergence, sensitive, whole
        # not without rounds for it: its BatchNorm would have batches of one sample left out, also of nets without any
        if distill_rounds:
            self.generator = Generator(self.input_shape, width, latent)  # q
            add_copy(self, "judge", self.net)  # f
        # what each download brings: shared features, sorted by class, and where each class is among them
        self.register_buffer("bank", torch.zeros(0), persistent=False)
        for name in ("held", "counts", "starts"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64), persistent=False)

    @property
    def distils(self) -> bool:
        """Whether this round trains the generator."""
        return self.round < self.distill_rounds

    @property
    def shares(self) -> bool:
        """Whether clients share features in this round, and train nothing."""
        return bool(self.noise) and 0 < self.distill_rounds == self.round

    def is_personal(self, name: str) -> bool:
        """Keep nothing of generator and classifier, which come with each download as long as clients use both."""
        return super().is_personal(name) and not is_distilled(name)

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the model if this round has trained one."""
        return {} if self.distils or self.shares else super().shared_state()

    def local_phases(self) -> list[Phase]:
        """Train generator and classifier, then for one round nothing, then the model."""
        if self.distils:
            return [Phase("distill", trains=is_distilled, scheduled=False)]
        return [] if self.shares else self.joining_phases()

    def joining_phases(self) -> list[Phase]:
        """Train a newcomer's model."""

        def without(phase: Phase) -> Phase:
            return replace(phase, trains=lambda name: phase.trains(name) and not is_distilled(name))

        return [without(phase) for phase in super().local_phases()]

    def local_optimizer(self, phase: Phase, parameters: list[nn.Parameter]) -> Optimizer:
        """Return AdamW for the generator, and the configured optimizer for the model."""
        if phase.name == "distill":
            return AdamW(parameters, lr=self.distill_lr, weight_decay=1e-6)
        return super().local_optimizer(phase, parameters)

    def on_download(self, payload: Message, data: ClientData | None) -> None:
        """Load the model, generator and classifier in the first rounds, and shared features if any were sent."""
        super().on_download(payload, data)
        self.assign(payload["generator"])
        shared = payload["shared_features"]
        # new tensors, as there are none before the round of sharing
        self.bank = shared["x"].to(self.device, self.dtype) if shared else self.bank.new_zeros(0)
        self.counts = shared["counts"].to(self.device) if shared else self.counts.new_zeros(0)
        self.held, self.starts = self.counts.nonzero().flatten(), self.counts.cumsum(0) - self.counts

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of generator and classifier, or the parent's loss of own and shared samples."""
        x, y = batch
        if self.phase.name == "distill":
            return self.distillation(x, y)
        if not len(self.bank):
            return super().training_step(batch, batch_idx)
        shared, classes = self.drawn(len(y), y.device)
        return super().training_step((torch.cat([x, *shared]), torch.cat([y, *classes])), batch_idx)

    def distillation(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return L and the first two parts.

        Args:
            x: inputs ``[n, *input_shape]``.
            y: classes ``[n]``.
        """
        check_floating(x)
        robust, mean, log_variance = self.generator.sampled(x)
        noise = [s * torch.randn(x.shape, dtype=x.dtype, device=x.device) for s in self.noise]
        logits = self.judge_of(torch.cat([*(x - robust + e for e in noise), x]))
        known = len(noise) * len(y)
        distance = F.mse_loss(robust, x)
        # three is the official code's number of colours, of grey images too
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean() / 3
        loss = self.reconstruction * distance + self.divergence * divergence
        loss = loss + self.whole * self.task_loss(logits[known:], y)
        if noise:
            loss = loss + self.sensitive * self.task_loss(logits[:known], y.repeat(len(noise)))
        return {"loss": loss, "reconstruction": distance, "divergence": divergence}

    def judge_of(self, x: Tensor) -> Tensor:
        """Return f's logits ``[n, C]``.

        Args:
            x: inputs, or features of inputs, ``[n, *input_shape]``.
        """
        logits: Tensor = self.get_submodule("judge")(x)
        return logits

    def drawn(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return drawn shared features ``[noises, n, *input_shape]``, and their classes ``[noises, n]``.

        Args:
            n: number of features of each noise.
            device: where to draw.
        """
        noises = self.bank.shape[1]
        # float32 also in half precision, which hasn't numbers enough for many rows
        which, row = torch.rand(2, noises, n, dtype=torch.float32, device=device)
        classes = self.held[(which * len(self.held)).long()]
        rows = self.starts[classes] + (row * self.counts[classes]).long()
        return self.bank[rows, torch.arange(noises, device=device)[:, None]], classes

    def upload(self, data: ClientData) -> Message:
        """Return the trained entries, or in the round of sharing the noisy features of all training samples."""
        return super().upload(data) | {
            "generator": distilled(self) if self.distils else {},
            "shared_features": self.shared(data) if self.shares else {},
        }

    @torch.no_grad()
    def shared(self, data: ClientData) -> dict[str, Tensor]:
        r"""Return ``x`` ``[n, noises, *input_shape]``, which are :math:`x_s + \epsilon_i`, and ``y`` ``[n]``.

        Args:
            data: the client's data.
        """
        generator = torch.Generator().manual_seed(derive_seed(torch.initial_seed(), "fedfed"))
        sigmas = torch.tensor(self.noise, dtype=torch.float64)
        made, classes = [], []
        for x, y in data.train.chunks():
            check_floating(x)
            sensitive = (x - self.generator(x)).unsqueeze(1)
            scale = sigmas.to(sensitive).view(-1, *[1] * (x.dim() - 1))
            # of a generator on the CPU: the same numbers on each device
            noise = torch.randn(len(x), len(sigmas), *x.shape[1:], generator=generator).to(sensitive)
            made.append(sensitive + scale * noise)
            classes.append(y)
        return {"x": torch.cat(made), "y": torch.cat(classes)}

    def configure_aggregator(self) -> Aggregator:
        """Return the server with the shared features."""
        return FeatureBank()


class FeatureBank(WeightedAverage):
    """Averages generators in the first rounds and models in the last ones, and sends all clients the shared features.

    Features are kept in the order of clients' ids, sorted by class. The generator travels until clients have used it.
    Takes the arguments of `WeightedAverage` but for ``mean`` and ``gamma``; ``server_lr`` is of the model alone.
    Source: as for `FedFed`.

    Raises:
        MisconfigurationException: if an argument is out of its range, or clients have no generator.
    """

    needs = WeightedAverage.needs | {"generator", "shared_features"}
    sends = frozenset({"weights", "generator", "shared_features"})

    def setup(self, server: Server) -> None:
        """Start with the initial generator, and without features."""
        super().setup(server)
        module = server.module
        if not isinstance(module, FedFed):
            raise MisconfigurationException(
                f"aggregator FeatureBank averages a generator that model {type(module).__name__} doesn't have; take "
                "model FedFed."
            )
        self.classes = module.num_classes
        self.end = module.distill_rounds + bool(module.distill_rounds and module.noise)
        self.state |= {"generator": detached(distilled(module)), "shared_features": {}, "next": 0}

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Average trained entries, or keep shared features and log their number."""
        log: dict[str, float] = {}
        distilling = {client: update for client, update in updates.items() if update["generator"]}
        if distilling:
            shares = client_weights(distilling, self.weighting)
            generators = [update["generator"] for update in distilling.values()]
            self.state["generator"] = detached(weighted_mean(generators, list(shares.values())))
        if parts := [update["shared_features"] for update in updates.values() if update["shared_features"]]:
            log["shared"] = float(self.keep(parts))
        log |= super().aggregate({client: update for client, update in updates.items() if update["weights"]}, round)
        self.state["next"] = round + 1 if updates else self.state["next"]
        return log

    def keep(self, parts: list[dict[str, Tensor]]) -> int:
        """Keep clients' shared features, and return their number.

        Args:
            parts: each client's ``x`` ``[n, noises, *input_shape]`` and ``y`` ``[n]``.
        """
        # clients whose round of sharing ends later, as under a schedule, add to what is there
        if known := self.state["shared_features"]:
            parts = [{"x": known["x"], "y": torch.arange(self.classes).repeat_interleave(known["counts"])}, *parts]
        x, y = (torch.cat(detached([part[name] for part in parts])) for name in ("x", "y"))
        counts = torch.bincount(y, minlength=self.classes)
        self.state["shared_features"] = {"x": x[y.argsort(stable=True)], "counts": counts}
        return len(y)

    def download(self, client: int) -> Message:
        """Return the model, the generator as long as clients use one, and then the shared features."""
        used = self.state["next"] < self.end
        own = {"generator": self.state["generator"] if used else {}, "shared_features": self.state["shared_features"]}
        return super().download(client) | own

    def global_model(self) -> StateDict:
        """Return the model, with generator and classifier."""
        generator: StateDict = self.state["generator"]
        return super().global_model() | generator


class Generator(nn.Module):
    """The variational autoencoder q, from inputs to performance-robust features of the same shape.

    Args:
        shape: shape of an input, ``[C, H, W]`` with H and W divisible by 4 for convolutions.
        width: channels, an even number, or width of the hidden layer where inputs are no such images.
        latent: number of latent numbers; None takes the encoder's.
    """

    def __init__(self, shape: InputShape, width: int, latent: int | None) -> None:
        super().__init__()
        if len(shape) == 3 and not shape[1] % 4 and not shape[2] % 4:
            channels, small = shape[0], (width, shape[1] // 4, shape[2] // 4)
            size, half = width * small[1] * small[2], width // 2
            encoder = [
                *(halving(nn.Conv2d, channels, half), nn.BatchNorm2d(half), nn.ReLU()),
                *(halving(nn.Conv2d, half, width), nn.BatchNorm2d(width), nn.ReLU()),
                *(Residual(width), nn.BatchNorm2d(width), Residual(width), nn.Flatten()),
            ]
            decoder = [
                *(nn.Unflatten(1, small), Residual(width), nn.BatchNorm2d(width), Residual(width)),
                *(nn.BatchNorm2d(width), halving(nn.ConvTranspose2d, width, half), nn.BatchNorm2d(half)),
                *(nn.LeakyReLU(), nn.Tanh(), halving(nn.ConvTranspose2d, half, channels)),
                *(nn.BatchNorm2d(channels), nn.Tanh()),
            ]
        else:
            # no bound of the outputs, as numbers of tables have none
            size, inputs = width, math.prod(shape)
            encoder = [nn.Flatten(), nn.Linear(inputs, width), nn.ReLU()]
            decoder = [nn.ReLU(), nn.Linear(width, inputs), nn.Unflatten(1, tuple(shape))]
        latent = latent or size
        self.encoder, self.decoder = nn.Sequential(*encoder), nn.Sequential(*decoder)
        self.mean, self.log_variance = nn.Linear(size, latent), nn.Linear(size, latent)
        self.back = nn.Linear(latent, size)

    def sampled(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return features of drawn latent numbers, and the distribution's mean and logarithm of the variance.

        Args:
            x: inputs ``[n, *shape]``.
        """
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        drawn = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
        return self.decoder(self.back(drawn)), mean, log_variance

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the mean latent numbers, as in evaluation mode."""
        features: Tensor = self.decoder(self.back(self.mean(self.encoder(x))))
        return features


class Residual(nn.Module):
    """A residual block of convolutions with one normalisation.

    Args:
        width: channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.change = nn.Sequential(nn.LeakyReLU(), first, nn.BatchNorm2d(width), nn.LeakyReLU(), second)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus its change."""
        changed: Tensor = x + self.change(x)
        return changed


def halving(kind: type[nn.Conv2d] | type[nn.ConvTranspose2d], before: int, after: int) -> nn.Module:
    """Return a convolution to half of each side of an image, or a transposed one to the double.

    Args:
        kind: ``Conv2d`` or ``ConvTranspose2d``.
        before: channels of the input.
        after: channels of the output.
    """
    return kind(before, after, kernel_size=4, stride=2, padding=1, bias=False)


def check_floating(x: Tensor) -> None:
    """Refuse inputs of whole numbers.

    Args:
        x: inputs.

    Raises:
        MisconfigurationException: if they are whole numbers.
    """
    if not x.is_floating_point():
        raise MisconfigurationException(
            f"model FedFed takes features off inputs, and this data has whole numbers ({x.dtype}), as of texts; take a "
            "method that shares no inputs, such as FedGen."
        )
