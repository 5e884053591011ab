"""The base class of regressions whose inputs and target are standardised."""

import torch

from pfl_lightning.data.division import Division
from pfl_lightning.data.preprocessing import FittedOn, known_moments, standardized
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.sources.base import OwnedData


class StandardizedData(OwnedData):
    """A regression whose inputs and target have mean 0 and deviation 1 over the training samples of all clients.

    Subclasses name the columns, ``features`` and ``targets``, in ``preprocessing`` when they load.
    """

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Standardize inputs and target by the training samples of all clients.

        Args:
            samples: all samples, with inputs [n, features] and one target each.
            division: the pool positions of each client's samples.
        """
        # the target too: values far from 0 and 1 would need a learning rate of their own
        names = self.preprocessing["features"] + self.preprocessing["targets"]
        columns = torch.column_stack([samples.x, samples.y])
        known = known_moments(self.adopted, self.adopted_names, division.names, "table")
        values, [(mean, deviation)] = standardized(columns, division, "table", known)
        for name, numbers in (("mean", mean), ("deviation", deviation)):
            self.preprocessing[name] = dict(zip(names, numbers.tolist(), strict=True))
        return Samples(values[:, :-1].contiguous(), values[:, -1].contiguous())

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide how raw values become inputs and targets."""
        return "all clients"
