"""Weights under autocast: as they are in each step, and cast once in it."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.utils._python_dispatch import TorchDispatchMode

from federations import blobs, make_client, plain
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import detached, tensors
from pfl_lightning.methods import Local

SIZES = (20, 20, 20)


class Cached(Precision):
    """As bf16-mixed, but with autocast's cache, which Lightning turns off."""

    def forward_context(self):
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True)


def trained(cls, precision, within, epochs=2):
    """What clients keep after some steps, in a context that is left after all of them."""
    data = blobs(*SIZES)
    data.setup()
    model = make_client(Local, net=plain)
    start = ClientState(detached(model.state_dict()))
    jobs = [Job(k, 0, start, {}, data.client(k), seed=k) for k in range(len(SIZES))]
    engine = cls(model, LocalWork(batch_size=5, epochs=epochs), precision)
    with within:
        return [outcome.state.personal for outcome in engine.run(jobs)]


@pytest.mark.parametrize(
    ("cls", "precision"),
    [
        (Sequential, MixedPrecision("bf16-mixed", "cpu")),
        (Vectorised, MixedPrecision("bf16-mixed", "cpu")),
        (Vectorised, Cached()),
    ],
    ids=["Sequential", "Vectorised", "Vectorised, cached"],
)
def test_no_step_sees_the_weights_of_another(cls, precision):
    # a federation's rounds are within autocast, and as long as one is entered, its cache isn't emptied
    inside = trained(cls, precision, torch.autocast("cpu", enabled=False))
    alone = trained(cls, MixedPrecision("bf16-mixed", "cpu"), nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(tensors(inside), tensors(alone), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*map(tensors, inside[:2]), strict=True))


class Casts(TorchDispatchMode):
    """Counts the casts to bfloat16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        return result


def test_a_step_casts_each_stack_once():
    counts = []
    for epochs in (1, 2):
        with Casts() as casts:
            trained(Vectorised, MixedPrecision("bf16-mixed", "cpu"), nullcontext(), epochs)
        counts.append(casts.count)
    # of 3 steps more: two layers' weights and biases, the samples, and the gradient of the logits
    assert counts[1] - counts[0] == 3 * (4 + 2)
