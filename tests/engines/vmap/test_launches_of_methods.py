"""Rounds of more clients take no more launches, except for methods with work client by client."""

import runpy
from pathlib import Path

import pytest

from command import CONFIGS

GROWTH = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "launches.py"))["growth"]

SAMPLES = "a hook passes over samples, of which clients have different numbers"
VALUES = "a hook decides by the value of a tensor"
DRAWS = "random numbers are drawn from the client's own stream"
UNMARKED = "a hook has no mark"
STEPS = "a step's operation has no rule of vmap"
REFUSED = "no block takes its clients"

ONE_BY_ONE = {
    "adaptive_fedprox": SAMPLES,
    "apple": REFUSED,
    "ccvr": SAMPLES,
    "ensemble": UNMARKED,
    "fedala": SAMPLES,
    "fedas": SAMPLES,
    "fedcac": VALUES,
    "fedclassavg": REFUSED,
    "fedclassavg_cl": REFUSED,
    "fedclassavg_weight": REFUSED,
    "fedcp": UNMARKED,
    "feddbe": UNMARKED,
    "feddg_ga": SAMPLES,
    "feddistill": SAMPLES,
    "feddyn": UNMARKED,
    "fedetf": UNMARKED,
    "fedfomo": SAMPLES,
    "fedgela": UNMARKED,
    "fedgen": UNMARKED,
    "fedgh": SAMPLES,
    "fedkd": VALUES,
    "fedlc": UNMARKED,
    "fedmd": REFUSED,
    "fednh": SAMPLES,
    "fednova": UNMARKED,
    "fedntd": STEPS,
    "fedpac": SAMPLES,
    "fedpcl": SAMPLES,
    "fedphp": VALUES,
    "fedpm": DRAWS,
    "fedproto": SAMPLES,
    "fedrema_af": SAMPLES,
    "fedrema_f": SAMPLES,
    "fedrod": UNMARKED,
    "fedrolex": "clients have nets of several sizes, each with steps of its own",
    "fedrs": UNMARKED,
    "fedselect": VALUES,
    "fedsr": DRAWS,
    "fedtgp": SAMPLES,
    "floco": UNMARKED,
    "fml": UNMARKED,
    "ifca": SAMPLES,
    "kt_pfl": REFUSED,
    "pfedfda": SAMPLES,
    "pooled": "the server trains, on the samples of all clients",
    "q_fedavg": SAMPLES,
}
"""Methods whose launches grow, by what grows them."""


@pytest.mark.parametrize("method", sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml")))
@pytest.mark.by_default("cwfedavg", "fedamp", "moon", "scaffold")
def test_launches_are_as_many_for_more_clients(method):
    found, reason = GROWTH(method), ONE_BY_ONE.get(method)
    assert bool(found.refused) == (reason is REFUSED), found
    assert found.grows == (reason not in {None, REFUSED}), found
    # work by clients is in hooks, unless the reason is about other parts of a round
    assert bool(found.alone) or not found.grows or reason in {STEPS, DRAWS, ONE_BY_ONE["pooled"]}, found


def test_listed_methods_exist():
    assert all((CONFIGS / "methods" / f"{method}.yaml").is_file() for method in ONE_BY_ONE)
