"""The samples of a data set, who holds which of them, and copies where clients train."""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_lightning.data.division import Division
from pfl_lightning.data.memory import free_memory
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.trees import leaves_of
from pfl_lightning.messages import num_bytes


class Pool:
    """Samples as loaded, and once more on each GPU that has room for them.

    From a copy there clients' samples need not be gathered, transformed and sent over anew in every round.

    Args:
        samples: All samples, on the CPU.
        division: Who holds which.
        strata: Number of the group of each sample, shape [N]; 0 for all where there are none.
    """

    def __init__(self, samples: Samples, division: Division, strata: Tensor) -> None:
        self.samples = samples
        self.strata = strata
        self.division = division
        self.copies: dict[torch.device, Samples] = {}
        self._in_memory = all(isinstance(leaf, Tensor) for leaf in leaves_of(samples.x))

    def on(self, device: torch.device) -> Samples:
        """Return the samples, on the device if all are in memory and a quarter of its free memory holds them.

        Args:
            device: Where they are wanted.
        """
        if device.type == "cpu" or not self._in_memory:
            return self.samples
        if device not in self.copies:
            fits = 4 * num_bytes((self.samples.x, self.samples.y)) <= free_memory(device)
            self.copies[device] = self.samples.to(device) if fits else self.samples
        return self.copies[device]
