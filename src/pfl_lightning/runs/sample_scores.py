"""The file of single rows' scores in a run's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pfl_lightning.data import Split
from pfl_lightning.runs.whole_files import replacing

FILE = "sample_scores.npz"


class Scores(NamedTuple):
    """A client's scores on a split, whose mean is the client's metric."""

    values: NDArray[np.float32]
    """The scores ``[n]``, of rows, or of equal parts of the rows; empty if there are none."""
    rows: int
    """Number of rows."""


def write_scores(folder: Path, scores: Mapping[Split, Sequence[Scores]]) -> int:
    """Write the scores of all clients, and return the size of the file in bytes.

    For each split, ``SPLIT`` has the scores of all clients one after another, ``SPLIT_counts`` the number of each
    client's scores, and ``SPLIT_rows`` the number of its rows.

    Args:
        folder: the run's folder.
        scores: by split, the scores of each client in the order of ids.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, own in scores.items():
        arrays[split] = np.concatenate([np.empty(0, np.float32), *(each.values for each in own)])
        arrays[f"{split}_counts"] = np.array([len(each.values) for each in own], dtype=np.int64)
        arrays[f"{split}_rows"] = np.array([each.rows for each in own], dtype=np.int64)
    with replacing(folder / FILE) as path, path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return (folder / FILE).stat().st_size


def read_scores(folder: Path, split: Split) -> list[Scores]:
    """Return each client's scores in the order of ids; an empty list without the file.

    Args:
        folder: the run's folder.
        split: the split.
    """
    if not (folder / FILE).is_file():
        return []
    with np.load(folder / FILE, allow_pickle=False) as arrays:
        counts, rows = arrays[f"{split}_counts"], arrays[f"{split}_rows"]
        values = np.split(arrays[split], np.cumsum(counts)[:-1]) if len(counts) else []
    return [Scores(*each) for each in zip(values, rows.tolist(), strict=True)]
