"""Average updates with correlated noise: differential privacy of clients without sampling."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.messages import Updates
from pfl_lightning.privacy.accountant import Release, noise_for
from pfl_lightning.privacy.dp_average import DPAverage
from pfl_lightning.privacy.noise import Source
from pfl_lightning.selection import Sampling
from pfl_lightning.server.base import Server
from pfl_lightning.server.weighted_average import WeightedAverage
from pfl_lightning.settings import check_least

HISTORY = "; checkpoints, which also hold the noise of the last rounds, a part of that of the next ones"


class DPFTRL(DPAverage):
    r"""Average bounded changes with noise correlated over rounds, for clients with few rounds in turn.

    .. math::

        x_{t+1} = x_t + \frac{\eta_s}{m} \left( \sum_{k \in S_t} \bar\Delta_k + z C w_t \right), \qquad
        w_t = \xi_t - \sum_{i=1}^{p-1} c_i w_{t-i}, \qquad c_i = c_{i-1} \frac{2i - 1}{2i}, \quad c_0 = 1

    with :math:`\bar\Delta_k` the changes bounded by C and :math:`\xi_t` standard normal: the banded matrix
    factorization of sums, with p bands of the square root's coefficients. Noise of one round is partly made up for in
    the next ones, so that the sum of all rounds has less noise than with `DPAverage` at the same :math:`\epsilon`, and
    no cohort needs to be random. Each client comes at most k times, and at least b rounds apart; other rounds are
    refused. With :math:`p \le b` a client's contributions never share a noise number, so that all rounds are one
    Gaussian mechanism of noise multiplier :math:`z / \sqrt{\sum_j \sum_i c_i^2}`, exactly: j runs over the client's
    rounds, and i over the bands within the run.

    ``trainer.cohort=Cyclic`` gives such rounds. With b = 1 it is `DPAverage` without amplification, bit for bit.
    Sources: Kairouz et al., 2021 (https://arxiv.org/abs/2103.00039); Choquette-Choo et al., 2023
    (https://arxiv.org/abs/2306.08153); Kalinin and Lampert, 2024 (https://arxiv.org/abs/2405.13763).

    The last p - 1 of the :math:`w_t` are in `state`, and so in checkpoints, whatever ``noise`` is: a resumed run goes
    on with these numbers. With secure noise each lost round adds 1 to the sum over j.

    Args:
        separation: b, at least 1: a client comes in round t + b at the earliest after round t.
        participations: k, at least 1; None is as often as b allows in ``trainer.max_rounds``.
        bands: p, from 1 to b; None is b. More bands cost memory, one model each.
        noise_multiplier: z, at least 0; 0 gives no guarantee. Either z or ``epsilon``.
        epsilon: the :math:`\epsilon` of all rounds of ``trainer.max_rounds`` together, above 0.
        delta: as for `DPAverage`.
        clip: C, above 0.
        clip_by: as for `DPAverage`.
        sample_cap: as for `DPAverage`.
        server_lr: :math:`\eta_s`, above 0.
        noise: as for `DPAverage`.
        server: as for `DPAverage`.

    Raises:
        MisconfigurationException: if a setting is out of range, or two don't go together.
    """

    guarantee = "client"

    def __init__(
        self,
        separation: int,
        participations: int | None = None,
        bands: int | None = None,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        clip: float = 1.0,
        clip_by: Literal["model", "entry"] = "model",
        sample_cap: int | None = None,
        server_lr: float = 1.0,
        noise: Source | None = None,
        server: WeightedAverage | None = None,
    ) -> None:
        super().__init__(
            noise_multiplier,
            epsilon,
            delta,
            clip,
            clip_by,
            sample_cap=sample_cap,
            server_lr=server_lr,
            noise=noise,
            server=server,
        )
        check_least("aggregator", separation=(separation, 1))
        if participations is not None:
            check_least("aggregator", participations=(participations, 1))
        if bands is not None and not 1 <= bands <= separation:
            raise MisconfigurationException(
                f"aggregator.bands={bands} must be from 1 to aggregator.separation={separation}: a client's rounds "
                "would share noise."
            )
        self.separation, self.participations, self.bands = separation, participations, bands

    def setup(self, server: Server) -> None:
        """Start from the common initial model, with noise by the target and the participation of clients.

        Raises:
            MisconfigurationException: if nothing can be guaranteed of this federation.
        """
        if self.participations is None and server.rounds is None:
            raise MisconfigurationException(
                "aggregator.participations=null counts a client's rounds up to trainer.max_rounds, which isn't given; "
                "give either."
            )
        # a bound for each client, whichever rounds they are
        self.times = self.participations or -(-cast(int, server.rounds) // self.separation)
        self.coefficients = square_root(self.bands or self.separation)
        super().setup(server)
        # of a run that goes on these are the checkpoint's, where other ones would make a mechanism that nobody counts
        plan = [self.z, float(self.clip), len(self.coefficients), self.separation, self.times]
        self.state |= {"noise": [], "taken": {}, "rounds": 0, "lost": 0, "plan": plan}
        self.plan = plan

    def _checked_sampling(self, server: Server) -> Sampling:
        sampling = super()._checked_sampling(server)
        if sampling.rate < 1:
            raise MisconfigurationException(
                f"trainer.cohort draws each client anew with probability {sampling.rate:g}, and aggregator=DPFTRL "
                "bounds how often a client comes; take Cyclic."
            )
        if sampling.expected * self.separation > server.num_clients:
            raise MisconfigurationException(
                f"aggregator.separation={self.separation} rounds of {sampling.expected:g} clients need "
                f"{sampling.expected * self.separation:g} clients, and data.num_clients={server.num_clients}; take "
                f"separation={max(1, int(server.num_clients // sampling.expected))}, or a smaller "
                "trainer.clients_per_round."
            )
        return sampling

    def _noise(self, server: Server) -> float:
        if self.epsilon is None or server.rounds is None:
            return super()._noise(server)
        # of all rounds, as the target is
        whole = squared_sensitivity(self.coefficients, server.rounds, self.times, self.separation)
        return math.sqrt(whole) * noise_for(self.epsilon, self.bound_delta, 1)

    def aggregate(self, updates: Updates, round: int) -> dict[str, float]:
        """Move the global model by the noisy mean of bounded changes.

        Raises:
            MisconfigurationException: if a client comes too soon or too often, or the round would go beyond
                ``epsilon``.
        """
        if self.state["plan"] != self.plan:
            raise MisconfigurationException(
                "aggregator=DPFTRL goes on from rounds with noise_multiplier, clip, bands, separation, participations "
                f"{self.state['plan']}, and has {self.plan} now; resume with the former, or begin anew."
            )
        # before anything changes: a refused round leaves the state
        taken = {client: self._counted(client, round) for client in updates}
        logs = super().aggregate(updates, round)
        self.state["taken"] |= taken
        self.state["rounds"] += 1
        # of a round's own noise, of which later rounds take back a part
        share = sum(weight**2 for weight in inverse(self.coefficients, self.state["rounds"]))
        return logs | {"noise_std": logs["noise_std"] * math.sqrt(share)}

    def _counted(self, client: int, round: int) -> list[int]:
        """Return how often a client has come with this round, and the round; refuse more than was declared."""
        times, last = self.state["taken"].get(client, [0, -self.separation])
        if times >= self.times:
            raise MisconfigurationException(
                f"client {client} comes in round {round + 1} for the time {times + 1}, and aggregator.participations="
                f"{self.times}; give more, or take trainer.cohort=Cyclic."
            )
        if round - last < self.separation:
            raise MisconfigurationException(
                f"client {client} comes in round {round + 1}, {round - last} after its last one, and "
                f"aggregator.separation={self.separation}; give less, or take trainer.cohort=Cyclic."
            )
        return [times + 1, round]

    def _drawn(self, name: str, round: int, size: int) -> Tensor:
        """Draw the correlated noise of a round, in units of a round's fresh noise."""
        # in units of fresh noise, so that clip and multiplier stay out of the history
        drawn, history = super()._drawn(name, round, size), self.state["noise"]
        for weight, earlier in zip(self.coefficients[1:], reversed(history), strict=False):
            drawn = drawn - weight * earlier
        # older ones have no weight in what follows
        kept = len(self.coefficients) - 1
        self.state["noise"] = [*history, drawn][-kept:] if kept else []
        return drawn

    def count_lost(self, rounds: int) -> None:
        """Count rounds without a checkpoint, whose models may have been seen.

        Args:
            rounds: how many, at least 0.
        """
        if self.is_secure and rounds:
            # their fresh noise numbers are others than those of the rounds made again
            self.state["lost"] += rounds
            self.state["releases"] = [list(release) for release in self._with_further(0)]

    def _with_further(self, rounds: int) -> list[Release]:
        """Return the one Gaussian mechanism of all rounds so far and further ones."""
        # rounds that made noise: the count of columns of the encoder
        made = self.state["rounds"] + rounds
        squared = squared_sensitivity(self.coefficients, made, self.times, self.separation)
        # a client is in a round's number by one time at most, its own or one of the bands before, weighted by 1 at most
        squared += self.state["lost"]
        return [Release(float(self.z) / math.sqrt(squared), 1.0, 1)] if squared else []

    def privacy(self, final: bool = False) -> dict[str, Any]:
        """Return the guarantee of the rounds so far, and a list of all outside of the guarantee.

        Args:
            final: as for `DPAverage`.
        """
        statement = super().privacy(final)
        lost = f", and {self.state['lost']} lost rounds" if self.state["lost"] else ""
        return statement | {
            "sampling": f"no sampling, each client at most {self.times} times, {self.separation} rounds apart{lost}",
            "releases": self.state["rounds"],
            "not_covered": statement["not_covered"] + HISTORY,
        }


@lru_cache(maxsize=8)
def square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of :math:`(1 - x)^{-1/2}`, the square root of summing: 1, 1/2, 3/8, 5/16, ….

    >>> square_root(4)
    (1.0, 0.5, 0.375, 0.3125)

    Args:
        bands: how many, at least 1.
    """
    coefficients = [1.0]
    for i in range(1, bands):
        coefficients.append(coefficients[-1] * (2 * i - 1) / (2 * i))
    return tuple(coefficients)


@lru_cache(maxsize=8)
def inverse(coefficients: Sequence[float], rounds: int) -> tuple[float, ...]:
    """Return the weights of one round's fresh noise in this round and in the following ones.

    Args:
        coefficients: c, the first one 1.
        rounds: how many weights, at least 1.
    """
    weights = [1.0]
    for _ in range(1, rounds):
        weights.append(-sum(c * w for c, w in zip(coefficients[1:], reversed(weights), strict=False)))
    return tuple(weights)


def squared_sensitivity(coefficients: Sequence[float], rounds: int, times: int, separation: int) -> float:
    """Return the largest square by which one client can move all noised numbers, for changes of norm 1 at most.

    Columns of the matrix of coefficients don't overlap where a client's rounds are a band apart, and later columns are
    cut off by the last round, so that the earliest rounds are the worst case.

    Args:
        coefficients: c of at most ``separation`` bands.
        rounds: of the run, at least 0.
        times: how often a client comes at most.
        separation: rounds from one time to the next at least.
    """
    first = [place for place in range(0, rounds, separation)][:times]
    return sum(sum(weight**2 for weight in coefficients[: rounds - place]) for place in first)
