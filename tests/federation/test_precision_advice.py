"""The line that says where mixed precision makes steps slower."""

import logging

import pytest
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from federations import fit, make_client
from pfl_lightning.engines import Auto, LocalWork, Processes, Sequential, Vectorised
from pfl_lightning.federation import options
from pfl_lightning.federation.options import loses

BF16 = MixedPrecision("bf16-mixed", "cpu")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [line for line in caplog.messages if line.startswith("trainer.precision")]


@pytest.mark.parametrize("engine", [Sequential, Processes, Auto, Vectorised])
@pytest.mark.parametrize(("small", "loss"), [(1_000_000, True), (10, False)])
def test_small_nets_lose_and_stacks_of_any_size(monkeypatch, engine, small, loss):
    monkeypatch.setattr(options, "SMALL", small)
    assert loses(engine(make_client(), LocalWork(), BF16)) == (loss or engine is Vectorised)
    assert not loses(engine(make_client(), LocalWork(), Precision()))


def test_of_other_devices_nothing_is_said():
    assert not loses(Sequential(make_client().to("meta"), LocalWork(), BF16))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_says_it_once(lines, precision):
    fit(make_client(), precision=precision, evaluate="both", max_rounds=2)
    said = (
        f"trainer.precision={precision!r}: on this CPU Net should train faster with '32-true', as casts take longer "
        "than what they save."
    )
    assert lines() == ([] if precision == "32-true" else [said])
