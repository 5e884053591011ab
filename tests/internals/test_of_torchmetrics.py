"""The private name of torchmetrics that the package uses, and the public one beside it."""

import warnings

import torch
from torchmetrics import MeanSquaredError

from pfl_lightning.internals.of_torchmetrics import count_updates


def test_the_public_state_names_all_that_is_accumulated():
    metric = MeanSquaredError()
    metric.update(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    assert {name: float(value) for name, value in metric.metric_state.items()} == {"sum_squared_error": 10, "total": 2}


def test_states_from_elsewhere_count_as_updates():
    metric = MeanSquaredError()
    metric.sum_squared_error, metric.total = torch.tensor(10.0), torch.tensor(2)
    count_updates(metric, 3)
    assert metric.update_count == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(metric.compute()) == 5
    metric.reset()
    assert metric.update_count == 0
