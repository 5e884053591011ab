"""Differential privacy of clients against the server too: each client noises its own update before it sends it."""

import copy
import math
import random
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.engines import Job, Outcome
from pfl_lightning.federation.stages import ConfiguredStage, Federated
from pfl_lightning.privacy.accountant import check_range
from pfl_lightning.privacy.dp_sgd import PUBLISHABLE
from pfl_lightning.privacy.local_noise import check_local, check_shared, noised
from pfl_lightning.privacy.noise import (
    Source,
    discrete_laplace,
    grid_of,
    nearest,
    secure_normal,
    seeded_normal,
    towards_zero,
)
from pfl_lightning.seeds import derive_seed
from pfl_lightning.settings import check_choices

OWNER = "trainer.local_privacy"
ADJACENCY = (
    "local: all that a client's training has read may be anything else; who takes part, and how many samples clients "
    "have, is public"
)
NOT_COVERED = (
    "a client's own model against who sees it; val and test metrics of clients, and what is chosen by them, in a "
    "simulation: sites send none; seconds, and who fails to answer for which reason; clients.csv; checkpoints, which "
    "hold personal states; callbacks at a client"
)
SEEDED = "; who knows the run's seed, from which the noise is drawn"
MOST = 500.0
"""Largest epsilon of a round: the exponential of more doesn't fit into a double."""


class Draws(NamedTuple):
    """Where one client's noise of one round comes from.

    Args:
        normal: returns so many standard normal numbers, float64.
        below: draws a uniform integer from 0 to below an integer.
        secure: whether both come from the operating system; noise then lies on a grid.
    """

    normal: Callable[[int], Tensor]
    below: Callable[[int], int]
    secure: bool

    def uniform(self) -> float:
        """Return a number above 0 and below 1, of 53 random bits."""
        return (self.below(1 << 53) + 0.5) / (1 << 53)

    def heads(self, probability: float) -> bool:
        """Return true with a probability, rounded up to a multiple of 2^-64.

        Args:
            probability: from 0 to 1.
        """
        return self.below(1 << 64) < math.ceil(math.ldexp(probability, 64))


class LocalPrivacy(ConfiguredStage):
    r"""Noises the change of each client's shared parameters, before anybody else sees it.

    Whatever a client's samples are, each possible upload of a round is at most :math:`e^{\epsilon_r}` times as likely
    as under any other samples: pure differential privacy of the whole client against the server and all others, in
    which nobody has to be trusted. The :math:`\epsilon` of a client is the sum of its rounds'.

    The whole change, of all parameters together, is one vector, so that there is one guarantee of it. Training that
    diverged counts as no change, and is noised like any other. Nothing else that depends on samples without noise
    leaves a client: no metric of training, and at sites of a deployment no metric at all.

    Args:
        round_epsilon: :math:`\epsilon_r` of a client's round, above 0 and up to 500.
        clip: C, the bound of a change's norm, above 0.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    publishable = PUBLISHABLE
    reads_updates = True
    does = MappingProxyType({"update level": "noises each update, for an epsilon of clients"})
    excludes = MappingProxyType(
        {
            "sample level": "guarantees privacy of clients, and there is no one epsilon for both units",
            "sum level": "noises each update before, for another epsilon; take one of them",
            "sums": "has noised them by then, and the sum of so much noise needs no mask",
            "parts": "has made these changes noise by then",
            "chooses": "doesn't cover that",
            "asks": "doesn't cover what is told without noise; take Uniform, Poisson or Availability",
        }
    )

    def __init__(self, round_epsilon: float, clip: float = 1.0, noise: Source | None = None) -> None:
        check_range(f"{OWNER}.round_epsilon", round_epsilon, 0 < round_epsilon <= MOST, "above 0 and up to 500")
        check_range(f"{OWNER}.clip", clip, 0 < clip < math.inf, "above 0, such as 1")
        if noise is not None:
            check_choices(OWNER, noise=(noise, ("seeded", "secure")))
        self.round_epsilon, self.clip, self.noise = round_epsilon, clip, noise
        self._spent: dict[int, float] = {}

    # A stage of the round

    @property
    def setting(self) -> str:
        """The setting, as errors name it."""
        return f"{OWNER}={type(self).__name__}"

    @property
    def spent(self) -> Mapping[int, float]:
        """The epsilon of each client's updates so far, by id."""
        return self._spent

    def check_options(self, options: Any) -> None:
        """Refuse noise from a seed at sites, and cohorts by what clients hold or tell."""
        if options.is_deployed:
            self.deployed()
        if not options.cohort.states_sampling:
            raise MisconfigurationException(
                f"trainer.cohort={type(options.cohort).__name__} chooses clients by what they hold or tell, which "
                f"{OWNER} doesn't cover; take Uniform, Poisson or Availability."
            )

    def check(self, federation: Federated) -> None:
        """Refuse clients that send more than noised weights, and servers that ask for more."""
        check_local(federation.client, federation.aggregator)
        for module in federation.client_modules:
            check_shared(module)

    def begin(self, federation: Federated) -> None:
        """Begin with nothing spent."""
        self._spent = {}

    def on_upload(self, outcome: Outcome, job: Job, module: ClientModule) -> Outcome:
        """Return the outcome with noised weights, and without metrics of the training."""
        return noised(outcome, job, module, lambda change: self.noised(change, self.draws(job.seed)))

    def spend(self, federation: Federated, cohort: Sequence[int], outcomes: Mapping[int, Outcome]) -> None:
        """Count the noised update of each client of a round, as often as it was asked for."""
        self._count(federation, cohort)

    def count_lost(self, federation: Federated, cohorts: Sequence[Sequence[int]]) -> None:
        """Count rounds without a checkpoint; seeded noise is drawn again as before, and counts once."""
        for cohort in cohorts if self.is_secure else ():
            self._count(federation, cohort, lost=True)

    def _count(self, federation: Federated, cohort: Sequence[int], lost: bool = False) -> None:
        """Count a round.

        Args:
            federation: the federation.
            cohort: the clients of the round.
            lost: whether another process made the round, of which this engine knows nothing.
        """
        for engine, own in federation.engines_of(cohort):
            for client in own:
                times = 1 if lost else engine.times_asked(client)
                self._spent[client] = self._spent.get(client, 0.0) + times * self.round_epsilon

    def state_dict(self) -> dict[str, Any]:
        """Return the epsilon of each client's updates so far."""
        return {"spent": dict(sorted(self._spent.items()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a checkpoint's epsilons."""
        self._spent = dict(state["spent"])

    def statement(self, federation: Federated, guarantee: dict[str, Any]) -> dict[str, Any]:
        """Return the guarantee of the rounds so far."""
        return self.guarantee_of(self._spent)

    def of_client(self, federation: Federated, client: int) -> dict[str, float]:
        """Return the client's epsilon."""
        return {"epsilon": self._spent.get(client, 0.0)}

    # Noise

    @abstractmethod
    def noised(self, change: Tensor, draws: Draws) -> Tensor:
        r"""Return a noised change ``[d]``, in float64.

        Args:
            change: :math:`\Delta` ``[d]``, in float64, finite.
            draws: the source of randomness.
        """

    @property
    def is_secure(self) -> bool:
        """Return whether noise comes from the operating system."""
        return self.noise == "secure"

    def deployed(self) -> "LocalPrivacy":
        """Return the settings for clients at sites, with noise from the operating system.

        Raises:
            MisconfigurationException: if the noise shall be from a seed.
        """
        if self.noise == "seeded":
            raise MisconfigurationException(
                f"{OWNER}.noise=seeded draws noise from the run's seed, which everybody in a deployment knows; take "
                "secure."
            )
        secure = copy.copy(self)
        secure.noise = "secure"
        return secure

    def draws(self, seed: int) -> Draws:
        """Return the source of a client's noise in a round.

        Args:
            seed: of the client's round; of no use to secure noise.
        """
        if self.is_secure:
            return Draws(secure_normal, secrets.randbelow, True)
        stream = random.Random(derive_seed(seed, "local privacy"))
        # a further number for each call, so that no two calls of a round draw the same
        return Draws(lambda size: seeded_normal(size, stream.getrandbits(63)), stream.randrange, False)

    def guarantee_of(self, spent: Mapping[int, float]) -> dict[str, Any]:
        r"""Return the guarantee so far, and a list of all outside of it.

        Args:
            spent: :math:`\epsilon` of each client that took part: the sum of its rounds'.
        """
        return {
            "unit": "client",
            "epsilon": max(spent.values(), default=0.0),
            "delta": 0.0,
            "adjacency": ADJACENCY,
            "sampling": "no amplification",
            "mechanism": type(self).__name__,
            "round_epsilon": self.round_epsilon,
            "accountant": "the sum over a client's rounds, exact for pure epsilon",
            "noise": "secure" if self.is_secure else "seeded: a simulation",
            "not_covered": NOT_COVERED if self.is_secure else NOT_COVERED + SEEDED,
        }


class Laplace(LocalPrivacy):
    r"""Adds Laplace noise to each entry of a change within an L1 norm.

    .. math::

        \Delta \min(1, C / \|\Delta\|_1) + \frac{2 C}{\epsilon_r} \xi, \qquad p(\xi_i) \propto e^{-|\xi_i|}

    Two changes within C are up to 2 C apart, hence the 2. With secure noise bounded changes are rounded towards zero
    to a grid of a 65,536th of the noise's scale, and noise is drawn on this grid by integers alone, so that no rounding
    of doubles tells of the change (Mironov, 2012, https://doi.org/10.1145/2382196.2382264); 30 microseconds an entry.
    Source: Dwork, McSherry, Nissim and Smith, 2006 (https://doi.org/10.1007/11681878_14).

    Args:
        round_epsilon: :math:`\epsilon_r` of a client's round, above 0 and up to 500.
        clip: C, the bound of a change's L1 norm, above 0.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.
    """

    @property
    def scale(self) -> float:
        """The noise's scale, the mean size of an entry's noise."""
        return 2 * self.clip / self.round_epsilon

    def noised(self, change: Tensor, draws: Draws) -> Tensor:
        """Return the bounded change with noise."""
        bounded = clipped_l1(change, self.clip)
        if not draws.secure:
            generator = torch.Generator().manual_seed(draws.below(1 << 63))
            one, other = torch.empty(2, len(change), dtype=torch.float64).exponential_(generator=generator)
            noise: Tensor = self.scale * (one - other)
            return bounded + noise
        grid = 2.0 ** (math.floor(math.log2(self.scale)) - 16)
        # rounded down inside, which is more noise
        drawn = [discrete_laplace(grid / self.scale, draws.below) for _ in range(len(change))]
        return towards_zero(bounded, grid) + grid * torch.tensor(drawn, dtype=torch.float64)


class PrivUnit(LocalPrivacy):
    r"""Sends a random direction that is more often near the change's own than far from it.

    With u the change's direction, a coin of probability p decides whether V is uniform on the cap
    :math:`\{v : \langle v, u \rangle \ge \gamma\}` of the unit sphere, of the mass q, or on the rest of it, and
    :math:`C V / m` is sent, where m makes the mean C u. All that is sent has the same norm. For

    .. math::

        \epsilon = \ln \frac{p}{1 - p} + \ln \frac{1 - q}{q}

    the cap is the one of the least error, :math:`\gamma = m` (PrivUnit with optimal parameters; Asi, Feldman and
    Talwar, 2022, https://arxiv.org/abs/2205.02466). Without ``norm_epsilon`` the norm isn't told: each change counts as
    one of norm C, and a change of zero as one of a random direction. With it the norm, up to C, travels by randomised
    response on a few levels, and the mean is the clipped change. Source: Bhowmick, Duchi, Freudiger, Kapoor and
    Rogers, 2018 (https://arxiv.org/abs/1812.00984).

    Args:
        round_epsilon: :math:`\epsilon_r` of a client's round in all, above 0 and up to 500.
        clip: C, the norm of what a client's direction stands for, above 0.
        norm_epsilon: the part of ``round_epsilon`` that tells the norm, above 0 and below it; None takes C.
        noise: ``seeded`` or ``secure``; None is ``secure`` in a deployment, and else ``seeded``.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    def __init__(
        self, round_epsilon: float, clip: float = 1.0, norm_epsilon: float | None = None, noise: Source | None = None
    ) -> None:
        super().__init__(round_epsilon, clip, noise)
        if norm_epsilon is not None:
            words = f"above 0 and below round_epsilon={round_epsilon:g}"
            check_range(f"{OWNER}.norm_epsilon", norm_epsilon, 0 < norm_epsilon < round_epsilon, words)
        self.norm_epsilon = norm_epsilon

    def noised(self, change: Tensor, draws: Draws) -> Tensor:
        """Return a direction of the fixed norm, times the told share of the bound.

        Raises:
            MisconfigurationException: if the change is of one number, which has no direction.
        """
        if (d := len(change)) < 2:
            raise MisconfigurationException(
                f"{OWNER}=PrivUnit sends a direction, and clients share {d} number; take Laplace."
            )
        # squares of the smallest doubles are zero
        largest = float(change.abs().max())
        unit = normalised(change / largest if largest else draws.normal(d))
        norm = float(torch.linalg.vector_norm(change))
        cap = Cap.of(self.round_epsilon - (self.norm_epsilon or 0.0), d)
        # both signs of a told norm: its noise has mean zero
        share = 1.0 if self.norm_epsilon is None else noised_share(min(norm / self.clip, 1.0), self.norm_epsilon, draws)
        return share * self.clip / cap.mean * cap.drawn(unit, draws)


class Cap(NamedTuple):
    r"""A cap of the unit sphere about a client's direction, and the coin that decides whether what is sent lies in it.

    Args:
        height: :math:`\gamma`, the least inner product with the direction.
        mass: q, the share of the sphere in the cap, up to ½.
        outside: 1 - p, the probability of the rest of the sphere.
        mean: m, the length of the mean of what is sent, above 0.
    """

    height: float
    mass: float
    outside: float
    mean: float

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, epsilon: float, d: int) -> "Cap":
        r"""Return the cap of the least error: the one whose mean is as long as it is high.

        .. math::

            m(\gamma) = \frac{(e^\epsilon - 1) A(\gamma)}{1 + (e^\epsilon - 1) q(\gamma)}, \qquad
            A(\gamma) = \int_{\langle v, u \rangle \ge \gamma} \langle v, u \rangle \, dv
            = \frac{\Gamma(d/2)}{\sqrt\pi \, \Gamma((d-1)/2)} \frac{(1 - \gamma^2)^{(d-1)/2}}{d - 1}

        has the derivative of the sign of :math:`m - \gamma`, and so its only maximum at :math:`m = \gamma`.

        Args:
            epsilon: above 0 and up to 500.
            d: dimensions, at least 2.
        """
        from scipy.special import gammaln

        odds = math.expm1(epsilon)
        log_density = float(gammaln(d / 2) - gammaln((d - 1) / 2)) - math.log(math.pi) / 2 - math.log(d - 1)

        def mean(height: float) -> float:
            first = math.exp(log_density + (d - 1) / 2 * math.log((1 - height) * (1 + height)))
            return odds * first / (1 + odds * mass_above(height, d))

        low, high = 0.0, math.nextafter(1, 0)
        # as far as doubles go
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if mean(middle) > middle else (low, middle)
        mass = mass_above(low, d)
        return cls(low, mass, (1 - mass) / (1 + odds * mass), mean(low))

    def drawn(self, unit: Tensor, draws: Draws) -> Tensor:
        """Return a direction ``[d]`` in the cap, or outside of it.

        Args:
            unit: the cap's middle ``[d]``, of norm 1.
            draws: the source of randomness.
        """
        d = len(unit)
        # the rarer side is the one rounded up, which is more noise
        outside, uniform = draws.heads(self.outside), draws.uniform()
        above = self.mass + (1 - self.mass) * uniform if outside else self.mass * uniform
        along = height_below(above, d)
        across = draws.normal(d)
        across = normalised(across - (across @ unit) * unit)
        direction = along * unit + math.sqrt(1 - along * along) * across
        # coarser than what doubles can tell of the change, as in `grid_of`
        return nearest(direction, grid_of(1 / math.sqrt(d))) if draws.secure else direction


def mass_above(height: float, d: int) -> float:
    """Return the share of the unit sphere above a height.

    Args:
        height: least inner product with a direction, from 0 to 1.
        d: dimensions, at least 2.
    """
    from scipy.special import betainc

    return float(betainc((d - 1) / 2, 0.5, (1 - height) * (1 + height))) / 2


def height_below(mass: float, d: int) -> float:
    """Return the height above which a share of the unit sphere lies.

    Args:
        mass: the share, from 0 to 1.
        d: dimensions, at least 2.
    """
    from scipy.special import betaincinv

    size = math.sqrt(max(0.0, 1 - float(betaincinv((d - 1) / 2, 0.5, 2 * min(mass, 1 - mass)))))
    return size if mass <= 0.5 else -size


def noised_share(share: float, epsilon: float, draws: Draws) -> float:
    r"""Return a share by randomised response on :math:`k = \lceil e^{\epsilon / 3} \rceil` levels, of the right mean.

    Source: Bhowmick et al., 2018, the mechanism ScalarDP (https://arxiv.org/abs/1812.00984).

    Args:
        share: from 0 to 1.
        epsilon: above 0.
        draws: the source of randomness.
    """
    k, e = math.ceil(math.exp(epsilon / 3)), math.exp(epsilon)
    level = min(math.floor(share * k), k - 1)
    # one of the two levels around it, so that the mean is right
    level += draws.heads(share * k - level)
    if draws.heads(k / (e + k)):
        other = draws.below(k)
        level = other + (other >= level)
    return ((e + k) * level - k * (k + 1) / 2) / (e - 1) / k


def clipped_l1(change: Tensor, clip: float) -> Tensor:
    r"""Return a change within an L1 norm, :math:`\Delta \min(1, C / \|\Delta\|_1)`.

    >>> clipped_l1(torch.tensor([3.0, -1.0], dtype=torch.float64), 1.0)
    tensor([ 0.7500, -0.2500], dtype=torch.float64)

    Args:
        change: :math:`\Delta` ``[d]``, in float64, finite.
        clip: C, above 0.
    """
    norm = float(change.abs().sum())
    return change * (clip / norm) if norm > clip else change


def normalised(vector: Tensor) -> Tensor:
    """Return a vector of norm 1.

    Args:
        vector: not all zeros.
    """
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit
