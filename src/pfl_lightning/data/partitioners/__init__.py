"""Ways to divide a pool of labelled samples among the clients."""

from pfl_lightning.data.partitioners.base import Partitioner
from pfl_lightning.data.partitioners.dirichlet import Dirichlet
from pfl_lightning.data.partitioners.iid import IID
from pfl_lightning.data.partitioners.pathological import Pathological

__all__ = ["IID", "Dirichlet", "Partitioner", "Pathological"]
