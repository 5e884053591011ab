"""Schedules: a simulated clock of device speeds decides which updates a round has, and how long the round takes."""

from pfl_lightning.schedules.asynchronous import Asynchronous
from pfl_lightning.schedules.base import Schedule, Turn
from pfl_lightning.schedules.synchronous import Synchronous

__all__ = ["Asynchronous", "Schedule", "Synchronous", "Turn"]
