"""Every method with ``precision=64-true``: servers compute and send in float64."""

import pytest
import torch

from federations import fit, make_client
from pfl_lightning.methods.registry import METHODS
from sweeps import swept

SETTINGS = {"FedClassAvg": {"contrastive": False}, "FedFed": {"distill_rounds": 0}}
AS_GIVEN = {"public"}
"""Entries of payloads that are no result, but samples as they were read."""


def floats(record, path=()):
    """Yield the path and the tensor of each floating entry of a record."""
    if isinstance(record, torch.Tensor):
        if record.is_floating_point():
            yield path, record
    elif isinstance(record, (dict, list, tuple)):
        for name, value in record.items() if isinstance(record, dict) else enumerate(record):
            yield from floats(value, (*path, name))


@pytest.mark.parametrize(
    "method", swept(METHODS, ("FedKD", "FedPM", "FedEx-LoRA", "FedNH", "FedGH", "APPLE", "FedAvg"))
)
def test_payloads_are_float64(method):
    client = make_client(method.client, **SETTINGS.get(method.name, {}))
    run = fit(client, aggregator=method.new_aggregator(), max_rounds=2, precision="64-true")
    sent = {client: run.federation.aggregator.download(client) for client in range(4)}
    narrow = {path[1] for path, tensor in floats(sent) if tensor.dtype != torch.float64}
    assert narrow <= AS_GIVEN
