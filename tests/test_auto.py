"""The engine that is taken where the choice is left open."""

import pytest
from torch import nn

from federations import FEATURES, fit, make_client, same_end
from pfl_lightning.engines import Auto, Processes, Sequential, Vectorised, auto
from pfl_lightning.nets import Net
from test_vectorised import Values


def convolving(input_shape, num_classes):
    body = nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 3), nn.Flatten())
    return Net(body, nn.Linear(2 * (FEATURES - 2), num_classes))


@pytest.fixture
def taken(monkeypatch):
    """The names of the engines that ran rounds, in their order, each once."""
    names = []
    for engine in (Sequential, Processes, Vectorised):

        def spied(self, tasks, run=engine.run):
            name = type(self).__name__
            names.extend([] if name in names else [name])
            return run(self, tasks)

        monkeypatch.setattr(engine, "run", spied)
    return names


def lines(caplog):
    return [line for line in caplog.messages if "engine='auto'" in line]


def test_small_nets_without_convolutions_are_vectorised(taken, caplog):
    fit(make_client(), engine="auto")
    assert taken == ["Vectorised"]
    assert lines(caplog) == ["trainer.engine='auto' takes vectorised: Net is small and without convolutions."]


@pytest.mark.parametrize(("workers", "engine"), [(1, "sequential"), (2, "processes")])
def test_larger_steps_are_for_all_cores(taken, caplog, workers, engine):
    runs = [fit(make_client(net=convolving), engine=e, workers=workers) for e in ("sequential", "auto")]
    assert taken[-1] == engine.title()
    assert lines(caplog) == [
        f"trainer.engine='auto' takes {engine}: a step of Net is enough work for a core, {workers} at a time."
    ]
    assert same_end(*runs)


def test_so_are_large_nets(taken, monkeypatch):
    monkeypatch.setattr(auto, "LARGE_ON_CPU", 10)
    fit(make_client(), engine="auto", workers=2)
    assert taken == ["Processes"]


def test_cores_are_counted_where_nobody_says(taken, monkeypatch):
    monkeypatch.setattr(auto, "cores", lambda: 1)
    fit(make_client(net=convolving), engine="auto")
    assert taken == ["Sequential"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_that_cannot_be_vectorised_falls_back_with_the_same_result(caplog, workers):
    runs = [fit(make_client(Values), engine=e, workers=workers) for e in (Sequential, Auto)]
    assert same_end(*runs)
    first, second = lines(caplog)
    assert "takes vectorised" in first
    assert f"takes {['sequential', 'processes'][workers - 1]}: vmap" in second
