r"""Oort: select clients with high losses, clients not selected for long, and fast clients.

Source: Lai et al., 2021 (https://arxiv.org/abs/2010.06081). Symbols: :math:`U_k` is the utility of client k's last
training, in round :math:`t_k`; t is the round, from 1; m clients take part in a round.
"""

import math
from collections.abc import Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.selection.base import Reports, RoundStart, Selection, drawn_by_weight

UNCERTAINTY = 0.1
"""Weight of the time since a client's last training."""
STEP = 5.0
"""Change of the percentile in one step of the pacer."""
FLAT, STEEP = 0.1, 5.0
"""Relative changes of utility that move the percentile: at most the first raises, at least the second lowers."""


class Oort(Selection):
    r"""Draw most clients by score, and the rest among the clients never tried, by training samples.

    .. math::

        U_k = n_k \sqrt{\overline{\ell_k^2}}, \qquad
        s_k = \frac{\min(U_k, q) - 0.999 \min_j U_j}{\max_j U_j - 0.999 \min_j U_j} + \sqrt{\frac{0.1 \ln t}{t_k}}

    q is a quantile of the utilities. With a ``percentile``, the score :math:`s_k` of a client that took longer than T
    seconds is multiplied by :math:`(T / \text{seconds}_k)^\alpha`, where T is this percentile of the clients' seconds.
    The pacer then compares the utilities of the last two windows of rounds: a change of at most 10 % raises the
    percentile of T by 5, a fivefold change or more lowers it by 5. Without a percentile, seconds don't count and
    clients aren't asked for them.

    :math:`\lfloor (1 - \epsilon) m \rfloor` clients are drawn by score, among the clients whose score is at least the
    cutoff times the last score that a selection by rank would take; all other places go to new clients, as long as
    there are any.

    Differences from the paper: :math:`\overline{\ell_k^2}` is the mean over all batches of the round's training of the
    batch's squared loss, weighted by samples, instead of the mean of samples' squared losses, since a training step
    yields no losses of single samples; with ``data.batch_size=1`` and one local epoch the two are equal. :math:`n_k`
    counts all training samples. No client is excluded for frequent selection. The paper's constants could not be
    verified: the defaults are the official code's, except ``percentile``, which is 10 there: a simulation has no clock,
    and with seconds no two runs are equal, resumed or not.

    Args:
        exploration: :math:`\epsilon` in the first round, from 0 to 1.
        decay: factor on :math:`\epsilon` after each round, above 0 and up to 1.
        least_exploration: lower bound of :math:`\epsilon`, from 0 to 1.
        cutoff: from 0 to 1; 0 admits every tried client.
        clip: the quantile q of utilities, above 0 and up to 1; 1 clips nothing.
        percentile: the percentile of seconds, above 0 and up to 100; None ignores seconds.
        penalty: :math:`\alpha`, at least 0.
        window: rounds per window of the pacer, at least 1.

    Raises:
        MisconfigurationException: if a setting is out of its range.
    """

    def __init__(
        self,
        exploration: float = 0.9,
        decay: float = 0.95,
        least_exploration: float = 0.2,
        cutoff: float = 0.7,
        clip: float = 0.98,
        percentile: float | None = None,
        penalty: float = 2.0,
        window: int = 20,
    ) -> None:
        super().__init__()
        ranges = {
            "exploration": (exploration, 0 <= exploration <= 1, "from 0 to 1, such as 0.9"),
            "decay": (decay, 0 < decay <= 1, "above 0 and up to 1, such as 0.95"),
            "least_exploration": (least_exploration, 0 <= least_exploration <= 1, "from 0 to 1, such as 0.2"),
            "cutoff": (cutoff, 0 <= cutoff <= 1, "from 0 to 1, such as 0.7"),
            "clip": (clip, 0 < clip <= 1, "above 0 and up to 1, such as 0.98"),
            "percentile": (percentile, percentile is None or 0 < percentile <= 100, "above 0 and up to 100, or null"),
            "penalty": (penalty, penalty >= 0, "0 or more, such as 2"),
            "window": (window, window >= 1, "at least 1, such as 20"),
        }
        for name, (value, right, words) in ranges.items():
            if not right:
                raise MisconfigurationException(f"trainer.cohort.{name}={value} must be {words}.")
        self.exploration, self.decay, self.least_exploration = exploration, decay, least_exploration
        self.cutoff, self.clip, self.percentile = cutoff, clip, percentile
        self.penalty, self.window = penalty, window
        # seconds are only asked for where they count, since each report reveals something of a client
        self.asks = frozenset({"loss_squared"} if percentile is None else {"loss_squared", "seconds"})

    def setup(self, sizes: Mapping[int, int]) -> None:
        """Start without any tried client.

        Args:
            sizes: training samples of all clients, by id.
        """
        super().setup(sizes)
        self.state = {"utility": {}, "round": {}, "seconds": {}, "sums": [], "moved": 0.0}

    def choose(self, start: RoundStart) -> list[int]:
        """Return the cohort of the round.

        Args:
            start: the beginning round.
        """
        tried = [client for client in start.clients if client in self.state["utility"]]
        new = [client for client in start.clients if client not in self.state["utility"]]
        epsilon = max(self.exploration * self.decay**start.round, self.least_exploration)
        # 1e-9: a product that is a whole number but for rounding, such as (1 - 0.9) * 10 = 0.9999999999999998, counts
        # as one
        count = min(max(math.floor((1 - epsilon) * start.size + 1e-9), start.size - len(new)), len(tried))
        exploited = self._exploited(start, tried, count) if count else []
        return exploited + drawn_by_weight(start.random, new, start.size - count, self.sizes)

    def _exploited(self, start: RoundStart, tried: Sequence[int], count: int) -> list[int]:
        """Draw some of the tried clients by score."""
        scores = self.scores(tried, start.round + 1)
        last = sorted(scores.values(), reverse=True)[count - 1]
        admitted = [client for client in tried if scores[client] >= self.cutoff * last]
        return drawn_by_weight(start.random, admitted, count, scores)

    def scores(self, clients: Sequence[int], t: int) -> dict[int, float]:
        """Return the scores s of tried clients, by id.

        Args:
            clients: ids of the clients, at least one.
            t: number of the round, from 1.
        """
        utilities = {client: self.state["utility"][client] for client in clients}
        ranked = sorted(utilities.values())
        q = ranked[min(int(len(ranked) * self.clip), len(ranked) - 1)]
        least = 0.999 * ranked[0]
        # 1e-4, so that utilities of 0 everywhere make no division by 0
        width = max(ranked[-1] - least, 1e-4)
        scores = {
            client: (min(utility, q) - least) / width
            + math.sqrt(UNCERTAINTY * math.log(t) / self.state["round"][client])
            for client, utility in utilities.items()
        }
        limit = self._limit()
        for client in clients:
            if (seconds := self.state["seconds"].get(client, 0.0)) > limit:
                scores[client] *= (limit / seconds) ** self.penalty
        return scores

    def _limit(self) -> float:
        """Return T in seconds, infinite if seconds don't count."""
        ranked = sorted(self.state["seconds"].values())
        if self.percentile is None or not ranked:
            return math.inf
        percentile = self.percentile + self.state["moved"]
        limit: float = ranked[min(int(len(ranked) * percentile / 100), len(ranked) - 1)]
        return limit

    def remember(self, reports: Reports, round: int) -> None:
        """Keep the utilities of the trained clients, and move the percentile.

        Args:
            reports: losses, and seconds if they count, of each client whose update counts.
            round: number of the round, from 0.
        """
        # a client without a batch reports no loss; a wrong, negative report counts as 0
        utilities = {
            k: self.sizes[k] * math.sqrt(max(values.get("loss_squared", 0.0), 0.0)) for k, values in reports.items()
        }
        self.state["utility"] |= utilities
        self.state["round"] |= dict.fromkeys(utilities, round + 1)
        if self.percentile is None:
            return
        self.state["seconds"] |= {
            k: max(values["seconds"], 0.0) for k, values in reports.items() if "seconds" in values
        }
        self.state["sums"] = [*self.state["sums"], sum(utilities.values())][-2 * self.window :]
        if len(self.state["sums"]) == 2 * self.window and (round + 1) % self.window == 0:
            self._pace(self.percentile)

    def _pace(self, start: float) -> None:
        """Move the percentile, which started at ``start``."""
        before, now = sum(self.state["sums"][: self.window]), sum(self.state["sums"][self.window :])
        change, percentile = abs(now - before), start + self.state["moved"]
        if change <= FLAT * before:
            percentile = min(percentile + STEP, 100.0)
        elif change >= STEEP * before:
            percentile = max(percentile - STEP, STEP)
        self.state["moved"] = percentile - start
