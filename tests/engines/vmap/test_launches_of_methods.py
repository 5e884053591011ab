"""Rounds of more clients take no more launches, except for methods with work client by client."""

import runpy
from pathlib import Path

import pytest

from command import CONFIGS

GROWTH = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "launches.py"))["growth"]

SAMPLES = "a hook passes over samples, of which clients have different numbers"
VALUES = "a hook decides by the value of a tensor"
DRAWS = "random numbers are drawn from the client's own stream"
UNMARKED = "a hook has no mark, and changes entries client by client"
SIZES = "clients have nets of several sizes, each with steps of its own"
SERVER = "the server trains, on the samples of all clients"
REFUSED = "no block takes its clients"

ONE_BY_ONE = {
    "adaptive_fedprox": SAMPLES,
    "afl": SAMPLES,
    "apple": UNMARKED,
    "ccvr": SAMPLES,
    "dispfl": VALUES,
    "ensemble": UNMARKED,
    "fedcac": VALUES,
    "fedclassavg": REFUSED,
    "fedclassavg_cl": REFUSED,
    "fedclassavg_weight": REFUSED,
    "fedcp": DRAWS,
    "feddg_ga": SAMPLES,
    "feddistill": SAMPLES,
    "fedfed": SAMPLES,
    "fedfomo": SAMPLES,
    "fedgen": UNMARKED,
    "fedkd": VALUES,
    "fedmd": REFUSED,
    "fedphp": VALUES,
    "fedpm": DRAWS,
    "fedrolex": SIZES,
    "fedselect": VALUES,
    "fedsr": DRAWS,
    "fjord": DRAWS,
    "flexlora": UNMARKED,
    "lora_svd": UNMARKED,
    "floco": DRAWS,
    "flora": UNMARKED,
    "heterofl": SIZES,
    "hetlora": UNMARKED,
    "ifca": SAMPLES,
    "knn_per": UNMARKED,
    "kt_pfl": REFUSED,
    "mime": SAMPLES,
    "mimelite": SAMPLES,
    "pefll": SAMPLES,
    "pfedfda": SAMPLES,
    "pooled": SERVER,
    "q_fedavg": SAMPLES,
}
"""Methods whose launches grow, and why."""


@pytest.mark.parametrize("method", sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml")))
@pytest.mark.by_default("cwfedavg", "moon")
def test_launches_are_as_many_for_more_clients(method):
    found, reason = GROWTH(method), ONE_BY_ONE.get(method)
    assert bool(found.refused) == (reason is REFUSED), found
    # a hook of a client's own copies the client's entries, which aren't counted
    assert (found.grows or bool(found.alone)) == (reason not in {None, REFUSED}), found
    assert bool(found.alone) == (reason in {SAMPLES, VALUES, UNMARKED, SIZES}) or reason in {DRAWS, REFUSED}, found


def test_listed_methods_exist():
    assert all((CONFIGS / "methods" / f"{method}.yaml").is_file() for method in ONE_BY_ONE)
