"""The base class of metrics that are a sum divided by a number."""

import torch
from torch import Tensor
from torchmetrics import Metric


class Ratio(Metric):
    """A sum divided by the number of its addends, both increased by ``update``; NaN without addends.

    Args:
        dtype: type of the sum.
    """

    full_state_update = False
    plot_lower_bound = 0.0
    total: Tensor
    count: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # sums, so that states of clients and of processes add up
        self.add_state("total", torch.tensor(0, dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Return the ratio."""
        return self.total / self.count
