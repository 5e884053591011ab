"""One optimizer for the rows of a stack."""

import weakref

import torch
from torch import nn
from torch.optim import SGD

from pfl_lightning.engines.vmap.optimizers import RowsOptimizer


def test_a_step_lets_go_of_its_gradients():
    parameter = nn.Parameter(torch.zeros(2))
    entries = {"weight": torch.zeros(3, 2)}
    rows = RowsOptimizer(SGD([parameter], lr=1.0), [{}] * 3, 0, entries, {parameter: "weight"}, skips=False)
    gradients = {"weight": torch.ones(3, 2)}
    kept = weakref.ref(gradients["weight"])
    rows.step(gradients)
    gradients.clear()
    # else two stacks of gradients would be in memory during the next step
    assert kept() is None
    assert entries["weight"].eq(-1).all()
