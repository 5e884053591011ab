"""Differential privacy of samples: batches, bounds and noise of local steps."""

import math
import random
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.privacy.accountant import Release, accountant_of, bounded_epsilon, check_range, least_noise, within
from pfl_lightning.privacy.noise import Source, discrete_laplace, grid_of, nearest, secure_members, secure_normal
from pfl_lightning.privacy.settings import check_one, check_spent
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import check_choices

OWNER = "trainer.example_privacy"
ADJACENCY = "add or remove: a sample of one client is there or isn't; how many samples clients have is public"
NOT_COVERED_COLUMNS = {
    "train metrics, which a simulation shows to its reader and sites keep": ("train*",),
    "val and test metrics of clients, and what is chosen by them": ("val*", "test*", "lr"),
    "how many clients were refused or absent and why, and local work, which tells too": (
        "clients_refused",
        "clients_absent",
        "absent",
        "local/*",
    ),
    "seconds": ("time/*",),
}
"""Columns of the record that tell of samples beside what clients send, by what they are."""
NOT_COVERED = "; ".join(
    [
        "how many samples clients have; phases that stay with their client, and evaluation",
        *NOT_COVERED_COLUMNS,
        "clients.csv; checkpoints, which hold personal states",
    ]
)
SEEDED = "; who knows the run's seed, from which batches and noise are drawn"
PUBLISHABLE = ("round", "clients", "clients_diverged", "cohort*", "bytes/*", "server/*", "privacy/*", "test/global_*")
"""Columns of the record that the guarantee covers, as patterns; who has how many samples counts as public."""


@dataclass(frozen=True)
class DPSGD:
    r"""Bounds each sample's gradient and adds Gaussian noise to their sum, in each step of a client's training.

    .. math::

        g = \frac{1}{q n} \left( \sum_{i \in B} \nabla \ell_i \min(1, C / \|\nabla \ell_i\|) + z C \xi \right), \qquad
        \xi \sim \mathcal{N}(0, I)

    is the gradient that the client's optimizer gets. Each of the client's n samples is in the batch B by itself with
    probability :math:`q = \min(1, \text{batch\_size} / n)`, so that batches differ in size; one of nobody is noise.
    There are as many steps as there would be batches. What a client sends then is differentially private in each of its
    samples, against the server as well. Source: Abadi et al., 2016 (https://arxiv.org/abs/1607.00133).

    With a target ``epsilon`` z is the least noise, the same for all, with which no client goes beyond it, even if it is
    in every round of ``trainer.max_rounds``. Mostly the client with the fewest samples decides, and others spend less.

    ``noise="seeded"`` draws batches and noise from the run's seed, so that a run can be repeated: a simulation, as
    everybody who knows the seed knows the noise. ``secure`` draws both from the operating system and keeps neither;
    gradients and noise then lie on a grid (`pfl_lightning.privacy.noise`), and a run that goes on counts the rounds
    that no checkpoint has.

    Args:
        noise_multiplier: z, at least 0, such as 1; 0 is no noise and no guarantee. Either it or ``epsilon``.
        clip: C, the largest norm of one sample's gradient, above 0.
        delta: above 0 and below one over the samples of any client; None is a tenth of one over each client's own.
        samples_at_once: gradients of single samples that are held at a time, at least 1; None holds those of a batch.
        epsilon: the :math:`\epsilon` that each client's samples may have of all rounds together, above 0.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.
        counts_epsilon: the :math:`\epsilon` of the class counts that a client sends in a round, above 0, for servers
            that need them: discrete Laplace noise at the client, of the probability :math:`\propto e^{-\epsilon|k|}`;
            negative counts become 0. None refuses such servers.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    noise_multiplier: float | None = None
    clip: float = 1.0
    delta: float | None = None
    samples_at_once: int | None = None
    epsilon: float | None = None
    noise: Source | None = None
    counts_epsilon: float | None = None

    def __post_init__(self) -> None:
        z, target, clip = self.noise_multiplier, self.epsilon, self.clip
        delta, at_once = self.delta, self.samples_at_once
        check_one(OWNER, z, target)
        if z is not None:
            check_range(f"{OWNER}.noise_multiplier", z, 0 <= z < math.inf, "0 or more, such as 1")
        if target is not None:
            check_range(f"{OWNER}.epsilon", target, 0 < target < math.inf, "above 0, such as 8")
        check_range(f"{OWNER}.clip", clip, 0 < clip < math.inf, "above 0, such as 1")
        if delta is not None:
            check_range(f"{OWNER}.delta", delta, 0 < delta < 1, "above 0 and below 1, such as 1e-5")
        if at_once is not None:
            check_range(f"{OWNER}.samples_at_once", at_once, at_once >= 1, "at least 1")
        if self.noise is not None:
            check_choices(OWNER, noise=(self.noise, ("seeded", "secure")))
        if (counts := self.counts_epsilon) is not None:
            check_range(f"{OWNER}.counts_epsilon", counts, 1e-6 <= counts <= 100, "from 1e-6 to 100, such as 0.5")
            if target is not None:
                raise MisconfigurationException(
                    f"{OWNER}.counts_epsilon={counts} and {OWNER}.epsilon={target}: a target is shared out to steps "
                    "alone; give noise_multiplier."
                )

    @property
    def is_secure(self) -> bool:
        """Return whether batches and noise come from the operating system."""
        return self.noise == "secure"

    @property
    def grid(self) -> float | None:
        """Return the grid's step for bounded gradients and their noise; None rounds neither."""
        return grid_of(self.noise_multiplier * self.clip) if self.is_secure and self.noise_multiplier else None

    def deployed(self) -> "DPSGD":
        """Return the settings for clients at sites, with noise from the operating system.

        Raises:
            MisconfigurationException: if the noise shall be from a seed, or depends on clients of other sites.
        """
        if self.noise == "seeded":
            raise MisconfigurationException(
                f"{OWNER}.noise=seeded draws noise from the run's seed, which everybody in a deployment knows; take "
                "secure."
            )
        if self.epsilon is not None:
            raise MisconfigurationException(
                f"{OWNER}.epsilon={self.epsilon} asks for noise by the sizes of all clients, and a site knows its own; "
                "give noise_multiplier, such as the one that a simulation with this target records."
            )
        return replace(self, noise="secure")

    def check(self, sizes: Iterable[int]) -> None:
        """Refuse a delta at which a whole sample could be given away.

        Args:
            sizes: samples of each client.

        Raises:
            MisconfigurationException: if it could.
        """
        if self.delta is not None and self.delta * (largest := max(sizes, default=0)) >= 1:
            raise MisconfigurationException(
                f"trainer.example_privacy.delta={self.delta} must be below 1 / {largest}, one over the samples of the "
                "largest client; leave it out to take a tenth of one over each client's own."
            )

    def calibrated(self, plans: Iterable[tuple[int, Sequence[Release]]]) -> "DPSGD":
        """Return the settings with noise in place of the target.

        Args:
            plans: how many samples a client has and what it would spend at a noise multiplier of 1, for each client.

        Raises:
            MisconfigurationException: if no noise reaches the target.
        """
        # one search mostly: the smallest client comes first, and the others stay within
        target, z = cast(float, self.epsilon), 0.0
        for samples, releases in plans:
            noised = [Release(z, rate, steps) for _, rate, steps in releases]
            if not within(target, self.delta_of(samples), noised):
                z = least_noise(target, self.delta_of(samples), releases)
        return replace(self, noise_multiplier=z, epsilon=None)

    def check_spent(self, spent: Mapping[int, Sequence[Release]], sizes: Mapping[int, int], round: int) -> None:
        """Refuse steps beyond the target.

        Args:
            spent: the steps of each client, with those that nobody has seen yet.
            sizes: samples of each of them.
            round: rounds that are done.

        Raises:
            MisconfigurationException: if it does.
        """
        # epsilon is known only after a round; then the round's uploads are dropped
        if self.epsilon is not None:
            check_spent(OWNER, self.epsilon, self._largest(spent, sizes), round)

    def _largest(self, spent: Mapping[int, Sequence[Release]], sizes: Mapping[int, int]) -> float:
        return max((self.epsilon_of(releases, sizes[client]) for client, releases in spent.items()), default=0.0)

    def drawn(self, samples: int, rate: float, generator: torch.Generator) -> Tensor:
        """Return the rows of a client's batch, rising, int64.

        Args:
            samples: n.
            rate: q.
            generator: the client's, on the CPU; of no use to secure batches.
        """
        if self.is_secure:
            return secure_members(samples, rate)
        return (torch.rand(samples, generator=generator) < rate).nonzero().flatten()

    def drawn_noise(self, entries: Collection[Tensor], generator: torch.Generator) -> Tensor:
        """Draw the noise of a step, flat ``[numbers of all entries]``.

        Seeded noise is in float64 where entries are, else in float32; secure noise is in float64 always.

        Args:
            entries: the trained entries.
            generator: the client's, on the CPU; of no use to secure noise.
        """
        size = sum(entry.numel() for entry in entries)
        # noise finer than the grid would show in the last bits of a sum
        if self.grid is not None:
            return nearest(secure_normal(size) * (cast(float, self.noise_multiplier) * self.clip), self.grid)
        # a float64 sum would show its last digits beneath noise of float32
        dtype = torch.float64 if any(entry.dtype == torch.float64 for entry in entries) else torch.float32
        drawn = torch.randn(size, generator=generator, dtype=dtype)
        return drawn * (cast(float, self.noise_multiplier) * self.clip)

    @property
    def counts_release(self) -> Release | None:
        r"""Return the release by which a round's class counts are counted; None without class counts.

        A pure :math:`\epsilon` is no worse than a Gaussian mechanism of noise multiplier
        :math:`1 / 2\Phi^{-1}(1 / (1 + e^{-\epsilon}))`: both have the same worst error where type I and II are equal,
        and the Gaussian's curve of errors, which is convex, lies below the two straight lines of the other one (Dong,
        Roth and Su, 2022, https://arxiv.org/abs/1905.02383).
        """
        if self.counts_epsilon is None:
            return None
        return Release(-1 / (2 * NormalDist().inv_cdf(1 / (1 + math.exp(self.counts_epsilon)))))

    def noisy_counts(self, counts: Tensor, seed: int) -> Tensor:
        """Return class counts with discrete Laplace noise, negative ones as 0, int64 ``[num_classes]``.

        Args:
            counts: samples of each class.
            seed: of the client's round; of no use to secure noise.
        """
        # integers alone: a sum of doubles would tell of the count by its last bits
        below = secrets.randbelow if self.is_secure else random.Random(derive_seed(seed, "class counts")).randrange
        drawn = [discrete_laplace(cast(float, self.counts_epsilon), below) for _ in range(len(counts))]
        return (counts + torch.tensor(drawn, dtype=counts.dtype, device=counts.device)).clamp(min=0)

    def epsilon_of(self, releases: Sequence[Release], samples: int) -> float:
        r"""Return the :math:`\epsilon` of a client's samples.

        Args:
            releases: the client's steps and class counts so far.
            samples: how many the client has.
        """
        delta = self.delta_of(samples)
        value = bounded_epsilon(releases, delta, self.epsilon)
        steps, told = self._apart(releases)
        # for few rounds plain composition is smaller than the Gaussian bound
        return min(value, bounded_epsilon(steps, delta, self.epsilon) + told) if told else value

    def delta_of(self, samples: int) -> float:
        r"""Return the :math:`\delta` of a client's samples, by their number."""
        # one over the samples would let one sample be given away whole
        return 0.1 / samples if self.delta is None else self.delta

    def _apart(self, releases: Sequence[Release]) -> tuple[list[Release], float]:
        """Return the steps of a client, and the epsilon of the class counts by themselves."""
        counts = self.counts_release
        told = sum(release.steps for release in releases if release._replace(steps=1) == counts)
        # earlier counts with another counts_epsilon stay Gaussian: a larger epsilon, never a smaller
        steps = [release for release in releases if release._replace(steps=1) != counts]
        return steps, told * (self.counts_epsilon or 0.0)

    def statement(self, spent: Mapping[int, Sequence[Release]], sizes: Mapping[int, int]) -> dict[str, Any]:
        r"""Return the guarantee of the steps so far, and a list of all outside; :math:`\epsilon` is the largest.

        Args:
            spent: the steps of each client.
            sizes: samples of each client.
        """
        apart = [self._apart(releases) for releases in spent.values()]
        amplified = any(release.rate < 1 for releases in spent.values() for release in releases)
        value = self._largest(spent, sizes)
        counts = {
            "counts_epsilon": self.counts_epsilon,
            "counts_epsilon_total": max((told for _, told in apart), default=0.0),
        }
        return {
            "unit": "sample",
            "epsilon": value,
            "delta": max((self.delta_of(sizes[client]) for client in spent), default=self.delta),
            "adjacency": ADJACENCY,
            "sampling": "Poisson, rate batch_size over a client's samples",
            "noise_multiplier": min((z for steps, _ in apart for z, _, _ in steps), default=None),
            "releases": max((sum(release.steps for release in steps) for steps, _ in apart), default=0),
            **(counts if self.counts_epsilon is not None else {}),
            "accountant": accountant_of(amplified, value, self.epsilon),
            "noise": "secure" if self.is_secure else "seeded: a simulation",
            "not_covered": NOT_COVERED if self.is_secure else NOT_COVERED + SEEDED,
        }


def composed(releases: Sequence[Release], further: Sequence[Release]) -> list[Release]:
    """Return releases in a row, with equal ones counted together.

    >>> composed([Release(1.0, 0.5, 4)], [Release(1.0, 0.5, 2), Release(1.0, 1.0, 1)])
    [Release(noise_multiplier=1.0, rate=0.5, steps=6), Release(noise_multiplier=1.0, rate=1.0, steps=1)]
    """
    steps: dict[tuple[float, float], int] = {}
    for z, rate, count in (*releases, *further):
        steps[z, rate] = steps.get((z, rate), 0) + count
    return [Release(z, rate, count) for (z, rate), count in steps.items()]
