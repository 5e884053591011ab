import pytest
import torch
from torch.func import vmap

from pfl_lightning.engines.vmap.gradients import mapped

ENTRIES = {"w": torch.randn(3, 4, 5), "b": torch.randn(3, 4)}
BATCH = (torch.randn(3, 7, 5), {"y": torch.randn(3, 7, 4)})


def step(entries, batch):
    x, target = batch
    difference = x @ entries["w"].T + entries["b"] - target["y"]
    return {"loss": difference.square().mean(), "same": torch.tensor(2.0), "worst": difference.abs().amax()}


def test_a_step_of_all_clients_is_that_of_vmap():
    found = mapped(step, ENTRIES, BATCH, 3)
    expected = vmap(step)(ENTRIES, BATCH)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert values.shape == (3,) and torch.equal(found[name], values)


def test_gradients_flow_to_the_stacks():
    entries = {name: stack.clone().requires_grad_() for name, stack in ENTRIES.items()}
    mapped(step, entries, BATCH, 3)["loss"].sum().backward()
    for row in range(3):
        own = {name: stack[row].clone().requires_grad_() for name, stack in ENTRIES.items()}
        step(own, (BATCH[0][row], {"y": BATCH[1]["y"][row]}))["loss"].backward()
        for name, entry in own.items():
            torch.testing.assert_close(entries[name].grad[row], entry.grad)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda entries, batch: {"loss": torch.rand(()) * entries["w"].sum()}, "random"),
        (lambda entries, batch: {"loss": entries["w"].sum().item()}, "item"),
    ],
)
def test_what_vmap_refuses_is_refused_and_leaves_no_trace(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        mapped(wrong, ENTRIES, BATCH, 3)
    # as it is, outside of any level
    assert torch.rand(2).shape == (2,)
    assert torch.equal(mapped(step, ENTRIES, BATCH, 3)["loss"], vmap(step)(ENTRIES, BATCH)["loss"])
