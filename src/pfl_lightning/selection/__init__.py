"""Selection of the clients that take part in a round."""

from pfl_lightning.selection.availability import Availability
from pfl_lightning.selection.base import RoundStart, Sampling, Selection
from pfl_lightning.selection.cyclic import Cyclic
from pfl_lightning.selection.oort import Oort
from pfl_lightning.selection.poisson import Poisson
from pfl_lightning.selection.power_of_choice import PowerOfChoice
from pfl_lightning.selection.schedule import Asynchronous, Schedule, Synchronous
from pfl_lightning.selection.uniform import Uniform

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
