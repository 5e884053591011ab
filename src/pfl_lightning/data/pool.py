"""The samples of a data set, their division, and copies on GPUs."""

import torch
from torch import Tensor

from pfl_lightning.data.division import Division
from pfl_lightning.data.memory import free_memory
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.trees import leaves_of
from pfl_lightning.messages import num_bytes


class Pool:
    """All samples as loaded, and one copy on each GPU with room for them.

    With a copy on the GPU, clients' samples need not be gathered and transformed on the CPU and sent to the GPU in
    every round.

    Args:
        samples: all samples, on the CPU.
        division: the pool positions of each client's samples.
        strata: group of each sample, int64 [N]; zeros without groups.
    """

    def __init__(self, samples: Samples, division: Division, strata: Tensor) -> None:
        self.samples = samples
        self.strata = strata
        self.division = division
        self.copies: dict[torch.device, Samples] = {}
        # memory maps and readers are read one client at a time; a copy on a GPU would read them as a whole
        self._in_memory = all(isinstance(leaf, Tensor) for leaf in leaves_of(samples.x))

    def on(self, device: torch.device) -> Samples:
        """Return the samples, on the device if all are in memory and fit into a quarter of the device's free memory.

        Args:
            device: the device of the clients' training.
        """
        if device.type == "cpu" or not self._in_memory:
            return self.samples
        if device not in self.copies:
            # a quarter, since gathered samples, nets, gradients and optimizer states of the clients need the rest
            fits = 4 * num_bytes((self.samples.x, self.samples.y)) <= free_memory(device)
            self.copies[device] = self.samples.to(device) if fits else self.samples
        return self.copies[device]
