"""The two tables among FLamby's data sets: four hospitals with heart patients, six regions with cancer patients.

Source: Ogier du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning, NeurIPS 2022.
"""

import csv
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.checks import existing
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.division import Division
from pfl_lightning.data.preprocessing import FittedOn, known_moments, trained_on
from pfl_lightning.data.samples import Loaded, Samples
from pfl_lightning.data.sources.base import OwnedData
from pfl_lightning.settings import Unpack, check_choices
from pfl_lightning.tasks import Classification, Survival

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
"""Names of the hospitals by the names of their files."""

KEPT = {0: "age", 1: "sex", 3: "trestbps", 4: "chol", 5: "fbs", 7: "thalach", 8: "exang", 9: "oldpeak"}
"""Names of the columns taken as numbers, by their position in a file."""

CODED = {2: ("cp", (2, 3, 4)), 6: ("restecg", (1, 2))}
"""Name and levels of each column that becomes columns of 0 and 1, without its first level, by its position."""

TARGET = 13


class FedHeartDisease(OwnedData):
    """FLamby's Fed-Heart-Disease: 740 patients of four hospitals, 13 features, healthy or ill.

    Four clients named Cleveland, Hungary, Long Beach and Switzerland. As in FLamby, three columns with many gaps are
    left out, then patients with a gap; chest pain and electrocardiogram become columns of 0 and 1; 34 % of each
    hospital's patients are tested on, always the same ones, with the label mix of the hospital. Features have mean 0
    and deviation 1 over training patients. Means of each hospital's own delete the level between hospitals; those of
    all keep it, and a federation can have them without the tables, from each hospital's sums.

    The files are ``heart_disease/processed.{cleveland,hungarian,switzerland,va}.data`` below ``root``, from
    https://archive.ics.uci.edu/dataset/45/heart+disease.

    Args:
        standardize: whose training patients give means and deviations: each ``client`` its own, as for FLamby's
            federated and local models, or all clients together (``table``), as for its pooled model; None leaves
            features in their units.
        **kwargs: settings of `FederatedDataModule`; ``test_fraction`` and ``download`` have no effect. FLamby has no
            validation patients, which is ``val_fraction`` 0.

    Raises:
        MisconfigurationException: if a file is missing or has another layout.

    Source: Janosi, Steinbrunn, Pfisterer, Detrano, Heart Disease, UCI, 1988.
    """

    input_shape = (13,)

    def __init__(
        self, standardize: Literal["client", "table"] | None = "client", **kwargs: Unpack[DataSettings]
    ) -> None:
        if standardize is not None:
            check_choices("data", standardize=(standardize, ("client", "table")))
        super().__init__(Classification(2), **kwargs)
        if standardize == "client" and self.central_test is not None:
            raise MisconfigurationException(
                f"data.standardize=client: patients of data.central_test={self.central_test} belong to no client, so "
                "no training patients standardize them; take table, or leave data.central_test out"
            )
        self.standardize = standardize

    def load(self) -> Loaded:
        """Read the patients without gaps, and FLamby's splits."""
        x, y, owners, splits = [], [], [], []
        for file, hospital in HOSPITALS.items():
            patients = self._patients(file)
            ill = (patients[:, TARGET] > 0).astype(np.int64)
            coded = [patients[:, column] == level for column, (_, levels) in CODED.items() for level in levels]
            x.append(np.column_stack([patients[:, list(KEPT)], *coded]))
            y.append(ill)
            owners += [hospital] * len(ill)
            splits += splits_of(ill)
        names = [*KEPT.values(), *(f"{name} {level}" for name, levels in CODED.values() for level in levels)]
        self.preprocessing = {"features": names, "targets": ["ill"]}
        if self.standardize is not None:
            self.preprocessing["standardize"] = self.standardize
        return Loaded(torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y)), owners, splits)

    def _patients(self, file: str) -> NDArray[np.float64]:
        """Return a hospital's patients without gaps in the columns that are used, [patients, 14]."""
        path = existing(self.root, "heart_disease", f"processed.{file}.data", "UCI's Heart Disease")
        try:
            table: NDArray[np.float64] = np.genfromtxt(path, delimiter=",", missing_values="?", ndmin=2)
        except ValueError as error:
            raise MisconfigurationException(f"{path} is no table of numbers; fetch UCI's file again") from error
        if table.shape[1] != TARGET + 1:
            raise MisconfigurationException(
                f"{path} has {table.shape[1]} columns, UCI's file {TARGET + 1}; fetch it again"
            )
        used = [*KEPT, *CODED, TARGET]
        return table[~np.isnan(table[:, used]).any(1)]

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Standardize features by training patients, as FLamby does: sample deviations, plus 1e-9.

        Args:
            samples: all patients.
            division: the pool positions of each client's patients.
        """
        if self.standardize is None:
            return Samples(samples.x.float(), samples.y)
        x = samples.x.numpy()
        result = np.zeros(x.shape, dtype=np.float32)
        if self.standardize == "table":
            groups = [(trained_on(division), torch.arange(len(x)))]
        else:
            groups = [(held["train"], torch.cat(list(held.values()))) for held in division.clients]
        adopted = {}
        if self.adopted.get("standardize") == self.standardize:
            adopted = known_moments(self.adopted, self.adopted_names, division.names, self.standardize)
        moments = []
        for place, (fitted, rows) in enumerate(groups):
            own = x[fitted.numpy()]
            # one patient has no sample deviation
            spread = own.std(0, ddof=1) if len(own) > 1 else np.zeros(x.shape[1])
            moments.append(adopted.get(place, (own.mean(0), spread + 1e-9)))
            result[rows.numpy()] = (x[rows.numpy()] - moments[-1][0]) / moments[-1][1]
        for name, values in zip(("mean", "deviation"), zip(*moments, strict=True), strict=True):
            by_feature = np.stack(values, axis=1).tolist()
            self.preprocessing[name] = {
                feature: numbers if self.standardize == "client" else numbers[0]
                for feature, numbers in zip(self.preprocessing["features"], by_feature, strict=True)
            }
        return Samples(torch.from_numpy(result), samples.y)

    @property
    def fitted_on(self) -> FittedOn:
        """Return the rows that decide how raw values become inputs and targets."""
        if self.standardize is None:
            return "nothing"
        return "each client" if self.standardize == "client" else "all clients"

    @property
    def agreed(self) -> dict[str, Any]:
        """Return names of classes and the way to standardize, as `FederatedDataModule.agreed`."""
        return super().agreed | {"standardize": self.standardize}


def splits_of(ill: NDArray[np.int64]) -> list[str]:
    """Return FLamby's split of each patient of a hospital: ``train`` or ``test``.

    Args:
        ill: 0 or 1 for each patient of the hospital, in the order of the file.
    """
    from sklearn.model_selection import train_test_split

    # FLamby's rule: a label of two patients or fewer is too rare to be divided
    rare = np.bincount(ill, minlength=2).min() <= 2
    _, test = train_test_split(
        np.arange(len(ill)),
        test_size=0.34,
        train_size=0.66,
        random_state=43,
        shuffle=True,
        stratify=None if rare else ill,
    )
    tested = set(test.tolist())
    return ["test" if row in tested else "train" for row in range(len(ill))]


class FedTcgaBrca(OwnedData):
    """FLamby's Fed-TCGA-BRCA: 1,088 patients with breast cancer of six regions, 39 features, survival.

    Six clients named Canada, Europe, Midwest, Northeast, South and West, and FLamby's split: 866 patients to train on,
    222 to test on. Targets are the days until death or the last visit, and 1 for a death. Features stay as they are:
    ages in years, and columns of 0 and 1.

    The files are ``tcga_brca/{brca,centers,train_test_split}.csv`` below ``root``, from FLamby's repository
    (https://github.com/owkin/FLamby, folder ``flamby/datasets/fed_tcga_brca``).

    Args:
        **kwargs: settings of `FederatedDataModule`; ``test_fraction`` and ``download`` have no effect. FLamby has no
            validation patients, which is ``val_fraction`` 0.

    Raises:
        MisconfigurationException: if a file is missing or has another layout.

    Source: The Cancer Genome Atlas, Comprehensive molecular portraits of human breast tumours, Nature 490, 2012.
    """

    input_shape = (39,)

    def __init__(self, **kwargs: Unpack[DataSettings]) -> None:
        super().__init__(Survival(), **kwargs)

    def load(self) -> Loaded:
        """Read the patients that FLamby's split names."""
        regions = {row["TSS Code"]: row["Region"] for row in self._rows("centers.csv", "TSS Code", "Region")}
        folds = {row["pid"]: row["fold"] for row in self._rows("train_test_split.csv", "pid", "fold")}
        # some patients of the file are in no fold
        patients = [row for row in self._rows("brca.csv", "pid", "E", "T") if row["pid"] in folds]
        if not patients:
            raise MisconfigurationException(
                f"data.root={self.root!r}: no patient of brca.csv is in train_test_split.csv; fetch FLamby's files "
                "again"
            )
        features = [name for name in patients[0] if name not in ("pid", "E", "T")]
        try:
            # a patient's id is TCGA-SITE-NUMBER
            owners = [regions[row["pid"].split("-")[1]] for row in patients]
            x = torch.tensor([[float(row[name]) for name in features] for row in patients])
            y = torch.tensor([[float(row["T"]), float(row["E"])] for row in patients])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"data.root={self.root!r}: brca.csv has a patient without region or a value that is no number "
                f"({error}); fetch FLamby's files again"
            ) from error
        if len(features) != self.input_shape[0]:
            raise MisconfigurationException(
                f"data.root={self.root!r}: brca.csv has {len(features)} features, FLamby's file {self.input_shape[0]}; "
                "fetch it again"
            )
        self.preprocessing = {"features": features, "targets": ["T", "E"]}
        return Loaded(x, y, owners, [folds[row["pid"]] for row in patients])

    def _rows(self, name: str, *columns: str) -> list[dict[str, str]]:
        """Return the rows of a file, which must have some columns."""
        path = existing(self.root, "tcga_brca", name, "FLamby's flamby/datasets/fed_tcga_brca")
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        if lacking := [column for column in columns if column not in (reader.fieldnames or ())]:
            raise MisconfigurationException(f"{path} has no column {lacking[0]!r}; fetch FLamby's file again")
        return rows
