"""The diabetes data set of scikit-learn."""

import numpy as np
import torch

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.preprocessing import FittedOn, known_moments, standardized
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Regression

BANDS = {35: "under 35", 45: "35 to 44", 55: "45 to 54", 65: "55 to 64", 200: "65 and over"}
"""Age bands of a client's patients, each by the age below which it ends."""


class Diabetes(OwnedData):
    """442 patients, 10 measurements each, and the progression of diabetes one year later; needs no files.

    Each client holds the patients of one sex and age band: 10 clients of 22 to 72 patients. Measurements and target
    have mean 0 and deviation 1 over the training patients of all clients.

    Args:
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Source: Efron et al., "Least Angle Regression", Annals of Statistics, 2004.
    """

    input_shape = (10,)

    def __init__(self, **kwargs: Unpack[DataSettings]) -> None:
        super().__init__(Regression(), **kwargs)

    def load(self) -> Loaded:
        """Read the patients."""
        from sklearn.datasets import load_diabetes

        # scikit-learn's scaling is over all patients, test patients included, and would hide ages
        bunch = load_diabetes(scaled=False)
        age, sex = bunch.data[:, 0], bunch.data[:, 1].astype(int)
        bands = np.array(list(BANDS.values()))[np.searchsorted(list(BANDS), age, side="right")]
        owners = [f"sex {code}, {band}" for code, band in zip(sex, bands, strict=True)]
        self.preprocessing = {"features": list(bunch.feature_names), "targets": ["progression"]}
        return Loaded(torch.from_numpy(bunch.data), torch.from_numpy(bunch.target), owners)

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Standardize measurements and target by the training patients of all clients.

        Args:
            samples: all patients.
            division: the pool positions of each client's patients.
        """
        # the target too: values up to 346 would need a learning rate of their own
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
