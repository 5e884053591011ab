import numpy as np
import pytest
import torch

from pfl_lightning.engines.vmap import block
from pfl_lightning.engines.vmap.block import Plan

CPU = torch.device("cpu")
SIZES, SIZE, SMALLEST = (9, 7, 7, 4, 3, 1), 3, 2
"""Clients' samples, samples a batch, and the smallest batch, which leaves the last client without any."""


def batches_by_hand(order, skipped):
    """The batches of an epoch, without those that an earlier round has trained."""
    return [b for b in order.split(SIZE) if len(b) >= SMALLEST][skipped:]


def steps_by_hand(orders, begin, skipped, accumulate, most):
    """A client's steps: lists of batches, of which none reaches into the next epoch."""
    steps = []
    for epoch, order in enumerate(orders):
        own = batches_by_hand(order + begin, 0 if epoch else skipped)
        steps += [[b.tolist() for b in own[at : at + accumulate]] for at in range(0, len(own), accumulate)]
    return steps[:most]


@pytest.mark.parametrize("planned", [1, 7, 10_000])
@pytest.mark.parametrize(("pads", "apart"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("accumulate", "epochs", "most"), [(1, 2, 99), (2, 3, 99), (2, 3, 4)])
def test_a_block_s_steps_have_each_client_s_batches(planned, pads, apart, accumulate, epochs, most, monkeypatch):
    monkeypatch.setattr(block, "PLANNED", planned)
    generator = torch.Generator().manual_seed(planned)
    orders = [[torch.randperm(n, generator=generator) for _ in range(epochs)] for n in SIZES]
    begins, skipped = np.cumsum(SIZES) - SIZES, np.array([0, 1, 0, 1, 0, 0])
    expected = [
        steps_by_hand(*each, accumulate, most) for each in zip(orders, begins.tolist(), skipped.tolist(), strict=True)
    ]
    trained = [n if own else 0 for n, own in zip(SIZES, expected, strict=True)]
    flat = [torch.cat(own)[: n * epochs] for n, own in zip(trained, orders, strict=True)]
    plan = Plan(flat, begins, np.array(trained), SIZE, SMALLEST, np.full(len(SIZES), most), skipped, accumulate)
    found = [[] for _ in SIZES]
    for step in plan.steps(CPU, pads, apart):
        taken = {}
        for batch in step:
            for part in batch:
                rows = range(part.rows.start, part.rows.stop) if isinstance(part.rows, slice) else part.rows.tolist()
                sizes = [part.samples.shape[1]] * len(rows) if part.sizes is None else part.sizes.tolist()
                # a part of one size isn't filled up, and full batches may have to stay by themselves
                assert part.sizes is None or (pads and not (apart and SIZE in sizes) and min(sizes) < max(sizes))
                for row, size, samples in zip(rows, sizes, part.samples.tolist(), strict=True):
                    taken.setdefault(row, []).append(samples[:size])
                    assert set(samples[size:]) <= {samples[size - 1]}
        for row, batches in taken.items():
            found[row].append(batches)
    assert found == expected and plan.counts.tolist() == [len(own) for own in expected]
    assert plan.samples.tolist() == [sum(len(b) for step in own for b in step) for own in expected]
