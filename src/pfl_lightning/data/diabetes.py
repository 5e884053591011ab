"""The diabetes data set of scikit-learn."""

import numpy as np
import torch

from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.standardized_data import StandardizedData
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Regression

BANDS = {35: "under 35", 45: "35 to 44", 55: "45 to 54", 65: "55 to 64", 200: "65 and over"}
"""Age bands of a client's patients, each by the age below which it ends."""


class Diabetes(StandardizedData):
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
