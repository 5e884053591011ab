"""Average updates with differential privacy of clients."""

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, Literal, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Message, StateDict, Updates
from pfl_lightning.privacy.accountant import Release, accountant_of, bounded_epsilon, has_pld, noise_for, tight_epsilon
from pfl_lightning.privacy.dp_sgd import composed
from pfl_lightning.privacy.noise import (
    Source,
    clipped,
    grid_of,
    nearest,
    next_clip,
    noise_beside_counts,
    secure_normal,
    seeded_normal,
    towards_zero,
)
from pfl_lightning.privacy.secure_sum import NoiseShare
from pfl_lightning.privacy.settings import check_noise, check_numbers, check_spent
from pfl_lightning.selection import Sampling
from pfl_lightning.server.base import Aggregator, Server
from pfl_lightning.server.weighted_average import WeightedAverage
from pfl_lightning.settings import check_choices

ADJACENCY = (
    "zero-out: all that a client contributes, in any round, is there or is zero; how many clients there are is public"
)
NOT_COVERED_COLUMNS = {
    "train, val and test metrics of clients, and what is chosen by them": ("train*", "val*", "test*", "lr"),
    "cohort, how many clients took part, diverged or were refused, bytes and local work": (
        "clients",
        "clients_*",
        "cohort*",
        "bytes/*",
        "local/*",
    ),
    "seconds": ("time/*",),
}
"""Columns of the record that tell of clients beside the models, by what they are."""
NOT_COVERED = "; ".join(
    [
        "a client's own model against who sees it",
        *NOT_COVERED_COLUMNS,
        "clients.csv; callbacks that see updates; checkpoints, which hold personal states",
    ]
)
SEEDED = "; who knows the run's seed, from which the noise is drawn"
SEEDED_COHORTS = "; who knows the run's seed, from which the noise and the cohorts are drawn"
COHORTS = "; who knows the cohorts, as the server and readers of the record do, against whom nothing is amplified"


class DPAverage(Aggregator):
    r"""Average changes of bounded norm with Gaussian noise: differential privacy of whole clients.

    .. math::

        x \leftarrow x + \frac{\eta_s}{m} \left( \sum_{k \in S} v_k \Delta_k \min(1, C / \|\Delta_k\|) + z C \xi
        \right), \qquad \xi \sim \mathcal{N}(0, I)

    where x is the model, :math:`\Delta_k = w_k - x` client k's change, and m the expected number of clients: the rate
    times all clients, or the size of the cohort, however many came. A client that diverged counts as zero, and a round
    of nobody is noise. Each row of the record and the summary have :math:`(\epsilon, \delta)`, and a list of all that
    the guarantee leaves out.

    With a ``quantile`` the bound C is learnt: :math:`C \leftarrow C e^{-\eta_C (\tilde b - \gamma)}`, where
    :math:`\tilde b` is the share of clients within C, with further noise that :math:`\epsilon` includes.
    Sources: McMahan et al., 2018 (https://arxiv.org/abs/1710.06963); Andrew et al., 2021
    (https://arxiv.org/abs/1905.03871).

    With a ``server``, such as `FedAdam`, the noisy mean is the mean by which that server makes its step: noise comes
    first, so that momentum and adaptive steps cost no privacy. The server's ``weighting`` has no effect.

    ``noise="seeded"`` draws the noise from the run's seed, so that a run can be repeated: a simulation, as everybody
    with the seed knows the noise. ``secure`` draws noise from the operating system and keeps it nowhere; sums and noise
    then lie on a grid (`pfl_lightning.privacy.noise`), and a run that goes on counts the rounds that no checkpoint has.
    Where sampling makes epsilon smaller, cohorts come from the operating system too, as sites have the seed.

    Args:
        noise_multiplier: z, at least 0; 0 gives no guarantee. Either z or ``epsilon``.
        epsilon: the :math:`\epsilon` of all rounds of ``trainer.max_rounds`` together, above 0, for which z is the
            least.
        delta: :math:`\delta`, above 0 and below one over all clients; None is a tenth of one over all clients.
        clip: C, above 0; with a ``quantile`` that of the first round.
        clip_by: ``model`` bounds each change as a whole, ``entry`` each of its L tensors by :math:`C / \sqrt{L}`.
        quantile: :math:`\gamma`, the share of changes that C shall not bound, between 0 and 1; None leaves C.
        clip_lr: :math:`\eta_C`, above 0.
        count_noise: standard deviation of the noise in the number of clients within the bound, above z / 2; None is
            m / 20.
        sample_cap: training samples from which a client counts in full, :math:`v_k = \min(n_k / \text{cap}, 1)`; None
            counts all alike, and no client sends its number of samples.
        server_lr: :math:`\eta_s`, above 0.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.
        server: FedAvgM, FedAdagrad, FedAdam, FedYogi or FedACG, or another server with a ``move``; None goes to the
            noisy mean.

    Raises:
        MisconfigurationException: if a setting is out of range, or two don't go together.
    """

    needs = frozenset({"weights"})
    sends = frozenset({"weights"})
    guarantee = "client"
    publishable = ("round", "server/*", "privacy/*", "test/global_*")

    def __init__(
        self,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        clip: float = 1.0,
        clip_by: Literal["model", "entry"] = "model",
        quantile: float | None = None,
        clip_lr: float = 0.2,
        count_noise: float | None = None,
        sample_cap: int | None = None,
        server_lr: float = 1.0,
        noise: Source | None = None,
        server: WeightedAverage | None = None,
    ) -> None:
        super().__init__()
        check_choices("aggregator", clip_by=(clip_by, ("model", "entry")))
        if noise is not None:
            check_choices("aggregator", noise=(noise, ("seeded", "secure")))
        check_noise(noise_multiplier, epsilon, clip, clip_by, quantile)
        check_numbers(
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            delta=delta,
            clip=clip,
            quantile=quantile,
            clip_lr=clip_lr,
            count_noise=count_noise,
            sample_cap=sample_cap,
            server_lr=server_lr,
        )
        self.noise_multiplier, self.epsilon, self.delta = noise_multiplier, epsilon, delta
        self.clip, self.clip_by = clip, clip_by
        self.quantile, self.clip_lr, self.count_noise = quantile, clip_lr, count_noise
        self.sample_cap, self.server_lr = sample_cap, server_lr
        self.noise = noise
        # under the argument's name, by which settings of a resumed run are compared
        self.server = checked_server(server, server_lr)
        if sample_cap is not None:
            self.needs = self.needs | {"num_samples"}

    @property
    def name(self) -> str:
        """The class's name, with the server's behind the noise."""
        return super().name if self.server is None else f"{super().name}+{self.server.name}"

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with noise by the target and the number of rounds.

        Raises:
            MisconfigurationException: if nothing can be guaranteed of this federation.
        """
        self.sampling = self._checked_sampling(server)
        self.entries = Entries(server)
        self.seed = server.seed
        # every site of a deployment is given the seed
        self.is_secure = self._secure(server.deployed)
        self.summed = server.summed
        self.bound_delta = 0.1 / server.num_clients if self.delta is None else self.delta
        if not self.bound_delta < 1 / server.num_clients:
            raise MisconfigurationException(
                f"aggregator.delta={self.delta} must be below 1 / {server.num_clients}, one over data.num_clients: "
                "what gives one client away whole would pass; leave it out to take a tenth of that."
            )
        # needs delta
        self.z = self._noise(server)
        self.count_std = self.sampling.expected / 20 if self.count_noise is None else self.count_noise
        if self.quantile is not None and not self.z < 2 * self.count_std:
            raise MisconfigurationException(
                f"aggregator.count_noise={self.count_std:g} must be above {self.z / 2:g}, half the noise multiplier: "
                "the count would spend more than there is; give more, or leave aggregator.quantile out."
            )
        self.state = {"weights": server.weights, "clip": float(self.clip), "releases": []}
        if self.server is not None:
            self.server.setup(server)
            self._keep_server()

    @property
    def hides_cohorts(self) -> bool:  # type: ignore[override]
        """Whether cohorts must follow from nothing that others have, as epsilon counts on them to be secret."""
        return self.is_secure and self.sampling.rate < 1

    def _secure(self, deployed: bool) -> bool:
        return self.noise == "secure" or (self.noise is None and deployed)

    def noise_share(self, deployed: bool) -> NoiseShare:
        """Return the noise that each client adds under ``trainer.secure_sum``, by the settings alone.

        Args:
            deployed: whether clients are sites of a deployment.
        """
        return NoiseShare(self.clip, cast(float, self.noise_multiplier), self._secure(deployed))

    def check_sums(self) -> None:
        """Refuse settings that ask for more than a sum of bounded changes with noise of each client."""
        if type(self) is not DPAverage:
            raise MisconfigurationException(
                f"aggregator={type(self).__name__} has noise of its own, and with trainer.secure_sum clients draw each "
                "round's noise by itself; take DPAverage."
            )
        # a site doesn't know how many rounds and clients epsilon is shared out to, and shall not believe the server
        if self.epsilon is not None:
            raise MisconfigurationException(
                f"aggregator.epsilon={self.epsilon}: with trainer.secure_sum clients draw the noise, and know "
                "aggregator.noise_multiplier alone; give that in its place, as "
                "pfl_lightning.privacy.noise_for(epsilon, delta, rounds) tells it."
            )
        # these would need a second sum, of counts or of weights
        for name, value in {"quantile": None, "clip_by": "model", "sample_cap": None}.items():
            if getattr(self, name) != value:
                raise MisconfigurationException(
                    f"aggregator.{name}={getattr(self, name)} isn't for trainer.secure_sum, with which clients bound "
                    "their whole changes by one clip and count alike; leave it out."
                )

    def _checked_sampling(self, server: Server) -> Sampling:
        if server.sampling is None:
            raise MisconfigurationException(
                "trainer.cohort chooses clients by what they hold or tell, or doesn't say how it draws, and "
                "aggregator=DPAverage has to know; take Uniform, Poisson or Availability."
            )
        # a server that isn't trusted knows who was drawn
        return server.sampling._replace(rate=1.0) if server.summed else server.sampling

    def _noise(self, server: Server) -> float:
        """Return the noise multiplier z."""
        if self.epsilon is None:
            return cast(float, self.noise_multiplier)
        if server.rounds is None:
            raise MisconfigurationException(
                f"aggregator.epsilon={self.epsilon} is shared out to all rounds, and how many there are isn't known; "
                "give trainer.max_rounds, or aggregator.noise_multiplier."
            )
        return noise_for(self.epsilon, self.bound_delta, server.rounds, self.sampling.rate)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Move the global model by the noisy mean of bounded changes.

        Raises:
            MisconfigurationException: if the round would go beyond ``epsilon``.
        """
        releases = self._with_further(1)
        if self.epsilon is not None:
            check_spent("aggregator", self.epsilon, self._epsilon(releases), round)
        # never by the number of updates, which one client changes
        clip, expected = self.state["clip"], self.sampling.expected
        x = self.entries.vector(self.state["weights"])
        if self.summed:
            return self._move_by_sum(x, updates, releases)
        sizes = self.entries.sizes if self.clip_by == "entry" else None
        adaptive = self.quantile is not None
        # sum and count have one guarantee together
        z = noise_beside_counts(self.z, self.count_std) if adaptive else self.z
        grid = grid_of(z * clip) if z and self.is_secure else None
        total, within = torch.zeros_like(x), 0.0
        for update in updates.values():
            # in float64, as norms of float32 are off by more than an accountant knows
            change = self.entries.vector(update["weights"]) - x
            counted = self._weight(update) * clipped(change, clip, sizes)
            total += counted if grid is None else towards_zero(counted, grid)
            within += float(torch.linalg.vector_norm(change) <= clip) - 0.5
        if z:
            # also without updates: a round of nobody must look like any other
            drawn = z * clip * self._drawn("dp", round, len(x))
            total += drawn if grid is None else nearest(drawn, grid)
        self._move(self.entries.model(x + self.server_lr / expected * total, self.state["weights"], updates))
        self._keep(releases)
        logs = {"noise_std": self.server_lr * z * clip / expected if z else 0.0, "clip": clip}
        if self.quantile is not None:
            noise = self.count_std * self._drawn("dp count", round, 1) if z else torch.zeros(1)
            if grid is not None:
                # counts of clients are multiples of a half, and so of this grid's step
                noise = nearest(noise, grid_of(min(self.count_std, 1.0)))
            share = 0.5 + (within + float(noise)) / expected
            self.state["clip"] = next_clip(clip, share, self.quantile, self.clip_lr)
            # by the noisy share, as the exact one tells of clients
            logs["clipped"] = 1 - share
        return logs

    def _move(self, target: StateDict) -> None:
        """Move the global model to a noised mean, or by the step of the server behind the noise.

        Args:
            target: the global model, changed by the noised mean.
        """
        if self.server is None:
            self.state["weights"] = target
            return
        server = self._with_state()
        server.move(target)
        self.state["weights"] = server.state["weights"]
        self._keep_server()

    def _with_state(self) -> WeightedAverage:
        """Return the server behind the noise, with its state."""
        server = cast(WeightedAverage, self.server)
        # the checkpoint has replaced the state, and the server has none of its own in between
        server.state = {"weights": self.state["weights"], **self.state["server"]}
        return server

    def _keep_server(self) -> None:
        """Take the state of the server behind the noise, as checkpoints have this aggregator's own state alone."""
        server = cast(WeightedAverage, self.server)
        self.state["server"] = {name: part for name, part in server.state.items() if name != "weights"}
        server.state = {}

    def _move_by_sum(self, x: Tensor, updates: Updates, releases: list[Release]) -> dict[str, float]:
        """Move the global model where clients have bounded their changes and added the noise.

        Args:
            x: the model as a vector.
            updates: stand-ins, each the mean of all; a round without a sum has none.
            releases: those so far, with the coming one.
        """
        # without a sum too, as clients may have helped with one that only the server has seen
        self._keep(releases)
        if not updates:
            return {}
        total = torch.stack([self.entries.vector(update["weights"]) - x for update in updates.values()]).sum(0)
        step = self.server_lr / self.sampling.expected
        self._move(self.entries.model(x + step * total, self.state["weights"], updates))
        return {"noise_std": step * self.z * self.clip, "clip": self.clip}

    def _weight(self, update: Message) -> float:
        """Return the weight of a client, 1 at most."""
        return 1.0 if self.sample_cap is None else min(float(update["num_samples"]) / self.sample_cap, 1.0)

    def _drawn(self, name: str, round: int, size: int) -> Tensor:
        """Draw standard normal numbers of a round."""
        return secure_normal(size) if self.is_secure else seeded_normal(size, self.seed, name, round)

    def count_lost(self, rounds: int) -> None:
        """Count rounds without a checkpoint, whose models may have been seen.

        Noise from a seed is drawn again as before: the same releases, which count once.

        Args:
            rounds: how many, at least 0.
        """
        if self.is_secure and rounds:
            # made again with a cohort of its own, each round is one more release of the same kind
            self._keep(self._with_further(rounds))

    def _keep(self, releases: list[Release]) -> None:
        """Keep the releases so far, and whether all of their cohorts were secret."""
        self.state["releases"] = [list(release) for release in releases]
        if self.hides_cohorts:
            self.state["hidden_cohorts"] = True
        else:
            self.state.pop("hidden_cohorts", None)

    def _releases(self) -> list[Release]:
        """Return the releases so far, without amplification those with cohorts that follow from the seed."""
        made = [Release(*release) for release in self.state["releases"]]
        # of a simulation, whose cohorts were drawn from the seed
        if self.hides_cohorts and "hidden_cohorts" not in self.state:
            made = composed([], [release._replace(rate=1.0) for release in made])
        return made

    def _with_further(self, rounds: int) -> list[Release]:
        """Return the releases so far with those of further rounds."""
        # a resumed run may go on with other noise
        return composed(self._releases(), [Release(float(self.z), float(self.sampling.rate), rounds)])

    def _epsilon(self, releases: list[Release]) -> float:
        return bounded_epsilon(releases, self.bound_delta, self.epsilon)

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """Return the guarantee of the rounds so far, and a list of all outside of the guarantee.

        Args:
            final: whether to add the tighter bound too, where dp-accounting is installed.
        """
        releases = self._releases()
        rate, value = self.sampling.rate, self._epsilon(releases)
        statement = {
            "unit": "client",
            "epsilon": value,
            "delta": self.bound_delta,
            "adjacency": ADJACENCY,
            "sampling": self._sampling_told(releases),
            "noise_multiplier": self.z,
            "releases": sum(release.steps for release in releases),
            "accountant": accountant_of(rate < 1, value, self.epsilon),
            "noise": "secure" if self.is_secure else "seeded: a simulation",
            "not_covered": NOT_COVERED + self._known_otherwise,
        }
        if final and math.isfinite(value) and rate < 1 and has_pld(0.0):
            statement["epsilon_tight"] = tight_epsilon(releases, self.bound_delta)
        return statement

    def _sampling_told(self, releases: list[Release]) -> str:
        """Return a description of how cohorts are drawn, and of what they are worth."""
        if self.sampling.rate == 1:
            return "no amplification"
        source = "the operating system" if self.is_secure else "the run's seed: a simulation"
        text = f"Poisson, rate {self.sampling.rate:g}, drawn from {source}"
        before = sum(release.steps for release in releases if release.rate == 1)
        return f"{text}; {before} rounds before without amplification" if before else text

    @property
    def _known_otherwise(self) -> str:
        """Who is left out beside those of every run."""
        if self.sampling.rate == 1:
            return "" if self.is_secure else SEEDED
        return COHORTS if self.is_secure else COHORTS + SEEDED_COHORTS

    def download(self, client: int) -> Message:
        """Return the global model."""
        return {"weights": self.state["weights"]}

    def global_model(self) -> StateDict:
        """Return the global model, by the server behind the noise if there is one."""
        if self.server is None:
            weights: StateDict = self.state["weights"]
            return weights
        # clients may receive another one, such as one moved ahead
        server = self._with_state()
        model = server.global_model()
        server.state = {}
        return model


def checked_server(server: WeightedAverage | None, server_lr: float) -> WeightedAverage | None:
    """Return the server behind the noise, or refuse one that would not act by its name.

    Args:
        server: makes steps by a mean; None without.
        server_lr: of the aggregator in front.

    Raises:
        MisconfigurationException: if the server has no step, another mean, or a second learning rate.
    """
    if server is None:
        return None
    name = type(server).__name__
    # a class that combines updates by a rule of its own inherits the plain step, and would be a plain average here
    if type(server).move is WeightedAverage.move:
        raise MisconfigurationException(
            f"aggregator.server={name} makes no step by a mean; take FedAvgM, FedAdagrad, FedAdam or FedYogi, or leave "
            "it out and set aggregator.server_lr."
        )
    if server.mean is not None:
        raise MisconfigurationException(
            f"aggregator.server.mean={server.mean.name}: the noisy mean stands in its place; leave it out."
        )
    if server_lr != 1:
        raise MisconfigurationException(
            f"aggregator.server_lr={server_lr} beside aggregator.server={name}, which has a learning rate of its own; "
            "set aggregator.server.server_lr."
        )
    return server


class Entries:
    """The parameters shared by clients, each once, in a fixed order.

    Args:
        server: the server's knowledge.

    Raises:
        MisconfigurationException: if clients share none, or buffers too, which tell of their data otherwise.
    """

    def __init__(self, server: Server) -> None:
        self.first = server.first_names()
        # a tied parameter would count twice in the norm
        self.names = list(dict.fromkeys(self.first.values()))
        client = type(server.module).__name__
        if buffers := sorted(server.weights.keys() - self.first.keys()):
            raise MisconfigurationException(
                f"model.buffers={server.module.buffers_policy!r}: clients share {buffers[0]}, statistics that "
                "aggregator=DPAverage adds no noise to; take model.buffers=local, or a net without BatchNorm."
            )
        if not self.names:
            raise MisconfigurationException(
                f"aggregator=DPAverage averages models, and {client} shares none; take a client module that does."
            )
        # in the common model's shapes, which sites can't change
        self.sizes = [server.weights[name].numel() for name in self.names]

    def vector(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the parameters as ``[d]``, a copy in float64."""
        return torch.cat([weights[name].reshape(-1).double() for name in self.names])

    def model(self, vector: Tensor, weights: StateDict, updates: Updates) -> StateDict:
        """Return a vector as a model, tied parameters under all their names.

        Args:
            vector: ``[d]``.
            weights: has the shapes, and the least types.
            updates: of the round; where clients train in a wider type, the model takes theirs.
        """
        parts = dict(zip(self.names, torch.split(vector, self.sizes), strict=True))
        sent = [update["weights"] for update in updates.values()]
        return {
            name: parts[self.first[name]]
            .view(tensor.shape)
            .to(reduce(torch.promote_types, [own[name].dtype for own in sent], tensor.dtype))
            for name, tensor in weights.items()
        }
