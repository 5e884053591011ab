"""The samples of a data set, who holds which of them, and copies where clients train."""

from __future__ import annotations

import torch

from pfl_lightning.data.client_data import Samples
from pfl_lightning.data.division import Division
from pfl_lightning.data.memory import free_memory
from pfl_lightning.messages import num_bytes


class Pool:
    """Samples as loaded, and once more on each GPU that has room for them.

    From a copy there clients' samples need not be gathered, transformed and sent over anew in every round.

    Args:
        samples: All samples, on the CPU.
        division: Who holds which.
    """

    def __init__(self, samples: Samples, division: Division) -> None:
        self.samples = samples
        self.division = division
        self.copies: dict[torch.device, Samples] = {}

    def on(self, device: torch.device) -> Samples:
        """Return the samples, on the device if a quarter of its free memory holds them.

        Args:
            device: Where they are wanted.
        """
        if device.type == "cpu":
            return self.samples
        if device not in self.copies:
            fits = 4 * num_bytes((self.samples.x, self.samples.y)) <= free_memory(device)
            self.copies[device] = self.samples.to(device) if fits else self.samples
        return self.copies[device]
