"""Columns of a pool that say of each sample who holds it, its split and its time."""

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import TensorData
from pfl_lightning.data.columns import check_times
from pfl_lightning.tasks import Regression


@pytest.mark.parametrize(
    "times",
    [
        ["2024-05-31", "2024-06-01"],
        ["2024-05-31 23:59", "2024-05-31T23:59:59.5Z", "2024-05-31 12:00:00+02:00"],
        ["Q1 2024", "Q2 2024"],
        ["2024-W01", "2024-W22"],
        ["09", "10", "11"],
        ["20240531", "20241101"],
        [9, 10, 2],
        np.array(["2024-05-31", "2024-06-01"], dtype="datetime64[D]"),
    ],
    ids=str,
)
def test_times_that_sort(times):
    check_times(np.asarray(times))


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (["2024-05-31", "2020-99-99", "2024-02-30"], "row 1 .* '2020-99-99'"),
        (["2024-05-31 10:00", "2024-05-31 25:00"], "row 1 .* '2024-05-31 25:00'"),
        (["2024-05-31", "2024-06-01", "soon"], "row 2 .* 'soon'"),
        (["31.12.2023", "1.5.2024"], r"row 0 .* '31\.12\.2023'.* 2024-05-31"),
        (["2024-5-31", "2024-10-01"], "row 0 .* '2024-5-31'"),
        (["8", "9", "oops"], "row 2 .* 'oops'"),
        (["9", "10", "11"], "doesn't sort as a number"),
    ],
    ids=str,
)
def test_times_that_sort_otherwise_than_they_passed_are_refused(times, says):
    with pytest.raises(MisconfigurationException, match=says):
        check_times(np.asarray(times))


@pytest.mark.parametrize("client_split", ["time", "random"])
def test_times_are_looked_at_where_samples_are_split_by_them(client_split):
    times = ["2024-05-31"] * 19 + ["2020-99-99"]
    x = np.ones((20, 2))
    data = TensorData(x, x[:, 0], Regression(), client=[0] * 20, time=times, client_split=client_split)
    if client_split == "random":
        data.setup()
        return
    with pytest.raises(MisconfigurationException, match=r"the time in row 19 .* '2020-99-99'"):
        data.setup()
