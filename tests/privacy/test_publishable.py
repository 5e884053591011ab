"""Which columns of the record a guarantee covers: each is in one list or the other."""

import pytest

from federations import blobs, fit, make_client, read_csv
from pfl_lightning.callbacks.round_logger import covered
from pfl_lightning.privacy import DPSGD, DPAverage, dp_average, dp_sgd
from pfl_lightning.selection import Poisson

GUARANTEES = {
    "clients": ({"aggregator": DPAverage(noise_multiplier=1.0, quantile=0.5, count_noise=2.0)}, dp_average),
    "samples": ({"example_privacy": DPSGD(noise_multiplier=1.0)}, dp_sgd),
}


@pytest.mark.parametrize("unit", GUARANTEES)
def test_each_column_of_the_record_is_covered_or_named(unit, tmp_path):
    settings, module = GUARANTEES[unit]
    data = blobs(30, 22, 20, 16, val_fraction=0.2, central_test=0.2)
    whole = {"evaluate": "both", "test_every_round": True, "cohort": Poisson(0.5), "max_rounds": 2}
    run = fit(make_client(), data, tmp_path, **settings, **whole)
    patterns = [pattern for each in module.NOT_COVERED_COLUMNS.values() for pattern in each]
    published = read_csv(run.folder / "publishable.csv")
    assert [row["round"] for row in published] == ["1", "2"]
    assert {"privacy/epsilon", "test/global_acc"} <= published[0].keys()
    for name in run.rows[-1].keys() - published[-1].keys():
        assert covered({name: 0}, patterns), f"{name} is neither published nor named as not covered"
    # of clients' own samples nothing
    assert not [
        name for name in published[0] if name.startswith(("train/", "val/")) or name in ("test/acc", "test/loss")
    ]
    for reason in module.NOT_COVERED_COLUMNS:
        assert reason in published[0]["privacy/not_covered"]


def test_without_a_guarantee_there_is_nothing_to_tell_apart(tmp_path):
    assert not (fit(make_client(), blobs(), tmp_path, max_rounds=1).folder / "publishable.csv").exists()
