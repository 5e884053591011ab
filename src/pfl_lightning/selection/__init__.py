"""Selection of the clients that take part in a round."""

from pfl_lightning.selection.availability import Availability
from pfl_lightning.selection.base import Cyclic, Poisson, RoundStart, Sampling, Selection, Uniform
from pfl_lightning.selection.oort import Oort
from pfl_lightning.selection.power_of_choice import PowerOfChoice
from pfl_lightning.selection.schedule import Asynchronous, Schedule, Synchronous

__all__ = [
    "Asynchronous",
    "Availability",
    "Cyclic",
    "Oort",
    "Poisson",
    "PowerOfChoice",
    "RoundStart",
    "Sampling",
    "Schedule",
    "Selection",
    "Synchronous",
    "Uniform",
]
