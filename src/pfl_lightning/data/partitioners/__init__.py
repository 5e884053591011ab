"""Ways to divide a pool of samples among clients."""

from pfl_lightning.data.partitioners.base import Partitioner
from pfl_lightning.data.partitioners.dirichlet import Dirichlet, RoundedDirichlet
from pfl_lightning.data.partitioners.dominant_labels import DominantLabels
from pfl_lightning.data.partitioners.iid import IID
from pfl_lightning.data.partitioners.natural import Natural
from pfl_lightning.data.partitioners.pathological import Pathological
from pfl_lightning.data.partitioners.random_classes import RandomClasses

__all__ = [
    "IID",
    "Dirichlet",
    "DominantLabels",
    "Natural",
    "Partitioner",
    "Pathological",
    "RandomClasses",
    "RoundedDirichlet",
]
