"""Which clients take part in a round."""

from pfl_lightning.selection.base import RoundStart, Selection
from pfl_lightning.selection.poisson import Poisson
from pfl_lightning.selection.uniform import Uniform

__all__ = ["Poisson", "RoundStart", "Selection", "Uniform"]
