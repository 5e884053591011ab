"""A-level results in chemistry, by school and by local education authority."""

import csv
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.checks import existing
from pfl_lightning.data.partitioners import Natural, Partitioner
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedSettings
from pfl_lightning.data.standardized_data import StandardizedData
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks import Regression

COLUMNS = {"school": "school", "authority": "lea"}
"""Column of the file that names the client, by the setting ``by``."""


class Chem97(StandardizedData):
    """31,022 pupils and their A-level points in chemistry, 0 to 10; clients are 2,410 schools or 131 authorities.

    The inputs are gender (1 for female), age in months (0 for 18.5 years) and the mean GCSE result. Inputs and target
    have mean 0 and deviation 1 over the training pupils of all clients. A school has 9 pupils in the median; 343
    schools with one or two pupils, too few to train, validate and test, are left out unless ``partitioner`` is another.

    The file is ``chem97/chem97.csv`` below ``root``, table Chem97 of the R package mlmRev
    (https://vincentarelbundock.github.io/Rdatasets/csv/mlmRev/Chem97.csv).

    Args:
        by: whose pupils make a client: one ``school``'s or one ``authority``'s.
        partitioner: how the pool is divided among the clients.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if the file is missing or has another layout.

    Source: Fielding, Yang and Goldstein, "Multilevel ordinal models for examination grades", Statistical Modelling 3,
    2003.
    """

    input_shape = (3,)

    def __init__(
        self,
        by: Literal["school", "authority"] = "school",
        partitioner: Partitioner = Natural(min_samples=3),  # noqa: B008 - immutable, and a literal for --print_config
        **kwargs: Unpack[OwnedSettings],
    ) -> None:
        check_choices("data", by=(by, tuple(COLUMNS)))
        super().__init__(Regression(), partitioner=partitioner, **kwargs)
        self.by = by

    def load(self) -> Loaded:
        """Read the pupils."""
        path = existing(self.root, "chem97", "chem97.csv", "the R package mlmRev")
        owner = COLUMNS[self.by]
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        try:
            x = [[float(row["gender"] == "F"), float(row["age"]), float(row["gcsescore"])] for row in rows]
            y = [float(row["score"]) for row in rows]
            owners = [int(row[owner]) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"{path} has no column {', '.join(map(str, error.args))}, or a value of it is no number; fetch "
                "mlmRev's table Chem97 again"
            ) from error
        self.preprocessing = {"features": ["female", "age", "gcsescore"], "targets": ["score"]}
        return Loaded(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64), owners)
