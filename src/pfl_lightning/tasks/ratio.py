"""Metrics that are a sum over a number."""

import torch
from torch import Tensor
from torchmetrics import Metric


class Ratio(Metric):
    """A sum over the number of its addends, to both of which ``update`` adds; NaN of nothing.

    Args:
        dtype: of the sum.
    """

    full_state_update = False
    plot_lower_bound = 0.0
    total: Tensor
    count: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """The ratio."""
        return self.total / self.count
