"""Nets of texts: many of them at once, and what they learn."""

from functools import partial

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from pfl_lightning.nets import Adapted, CharGRU, Transformer

TEXTS = torch.arange(24).view(2, 12) % 9
NETS = {
    "CharGRU": (partial(CharGRU, width=8, embedding=4), 0.03),
    "Transformer": (partial(Transformer, width=8, heads=2), 0.01),
}
"""Small nets, each with a rate at which it learns."""


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind((12,), 9)


@pytest.mark.parametrize(("kind", "lr"), NETS.values(), ids=NETS)
def test_many_nets_at_once(kind, lr):
    nets = [made(kind, seed) for seed in range(3)]
    stacked, _ = stack_module_state(nets)
    outputs = vmap(lambda weights: functional_call(nets[0], weights, (TEXTS,)))(stacked)
    assert outputs.shape == (3, 2, 12, 9)
    assert all(torch.allclose(some, net(TEXTS), atol=1e-6) for some, net in zip(outputs, nets, strict=True))


@pytest.mark.parametrize(("kind", "lr"), NETS.values(), ids=NETS)
def test_adapters_begin_as_the_net_without_them(kind, lr):
    torch.manual_seed(0)
    adapted = Adapted((12,), 9, net=kind)
    assert torch.equal(adapted(TEXTS), made(kind)(TEXTS))


@pytest.mark.parametrize(("kind", "lr"), NETS.values(), ids=NETS)
def test_it_learns_to_count(kind, lr):
    net = made(kind)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(net(TEXTS).flatten(0, 1), ((TEXTS + 1) % 9).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
