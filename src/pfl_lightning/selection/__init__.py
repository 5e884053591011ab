"""Selection of the clients that take part in a round."""

from pfl_lightning.selection.availability import Availability
from pfl_lightning.selection.base import Cyclic, Poisson, RoundStart, Sampling, Selection, Uniform
from pfl_lightning.selection.oort import Oort
from pfl_lightning.selection.power_of_choice import PowerOfChoice

__all__ = [
    "Availability",
    "Cyclic",
    "Oort",
    "Poisson",
    "PowerOfChoice",
    "RoundStart",
    "Sampling",
    "Selection",
    "Uniform",
]
