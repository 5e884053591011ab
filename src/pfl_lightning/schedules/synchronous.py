"""Rounds whose clients train at once, with a deadline: over-selection, dropouts and simulated time."""

import math

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.federation.stages import Plan
from pfl_lightning.schedules.base import Course, Schedule, SpeedSettings, Turn
from pfl_lightning.selection.base import enough
from pfl_lightning.settings import Unpack, check_least, is_count


class Synchronous(Schedule):
    """Rounds in which all clients train from the same model, on a simulated clock.

    The round ends with the last update, or earlier by ``min_results``, ``grace`` and ``timeout``, which are a
    deployment's settings of the same names. Updates that come later are dropped, and the client's personal entries stay
    as they were before the round. Such a client works on until it has ended, and begins its next training not before.
    Without these settings and without dropouts a round is the same as with no schedule, bit for bit.

    Args:
        min_results: share of the round's clients, above 0.0 and up to 1.0, whose updates are enough to end the round; a
            whole number from 1 up counts clients of a full round.
        grace: seconds for further updates once there are enough, 0 or more.
        **kwargs: the arguments of `Schedule`.

    Raises:
        MisconfigurationException: if a value is out of range.
    """

    def __init__(self, min_results: int | float = 1.0, grace: float = 0.0, **kwargs: Unpack[SpeedSettings]) -> None:
        super().__init__(**kwargs)
        if not is_count(min_results) and not (isinstance(min_results, float) and 0 < min_results <= 1):
            raise MisconfigurationException(
                f"trainer.schedule.min_results={min_results} must be a number of clients from 1 up, or a share above "
                "0.0 and up to 1.0."
            )
        check_least("trainer.schedule", grace=(grace, 0))
        self.min_results, self.grace = min_results, grace

    def updates(self, size: int) -> int:
        """Return the number of updates that are enough."""
        return enough(self.min_results, size, size)

    def course(self, turn: Turn) -> Course:
        """Return the course of a round: the first updates count."""
        begin, busy = self.state["now"], self.state.get("busy", {})
        cohort = turn.draw(turn.clients, turn.size, 0)
        took = {client: self.took(client, turn.samples(client)) for client in cohort}
        ends = {client: max(begin, busy.get(client, begin)) + took[client] for client in cohort}
        lost = {client for client in cohort if self.is_lost(client, turn.round)}
        # a lost client is known to be lost when its update would have come
        end = min(max(ends.values(), default=begin), begin + (self.timeout or math.inf))
        answers = sorted((ends[client], client) for client in ends.keys() - lost if ends[client] <= end)
        wanted = max(1, enough(self.min_results, len(cohort), turn.size))
        if len(answers) >= wanted:
            end = min(end, answers[wanted - 1][0] + self.grace)
        # without a grace, nobody counts who comes at the same moment as the last that was waited for
        further = [answer for answer in answers[wanted:] if self.grace and answer[0] <= end]
        arrived = [client for _, client in answers[:wanted] + further]
        # a device can't train twice at once, so that who is late begins its next training late
        busy = busy | {client: ends[client] for client in ends.keys() - lost}
        state = {"now": end, "busy": {client: time for client, time in sorted(busy.items()) if time > end}}
        return Course(Plan(cohort, arrived, {}, took), end - begin, state)
