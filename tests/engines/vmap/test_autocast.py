"""Weights under autocast: as they are in each step, and cast once in it."""

from contextlib import nullcontext
from functools import partial
from typing import ClassVar, NamedTuple

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from federations import CLASSES, FEATURES, blobs, make_client, plain
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.engines.vmap.layers import convolution
from pfl_lightning.messages import detached, tensors
from pfl_lightning.methods import Local
from pfl_lightning.nets import Net

SIZES = (20, 20, 20)


class Cached(Precision):
    """As bf16-mixed, but with autocast's cache, which Lightning turns off."""

    def forward_context(self):
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True)


def trained(cls, precision, within, epochs=2, net=plain):
    """What clients keep after some steps, in a context that is left after all of them."""
    data = blobs(*SIZES)
    data.setup()
    model = make_client(Local, net=net)
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


class Convolutional(Net):
    """Tells in which type its layers put out."""

    seen: ClassVar[list[tuple[str, torch.dtype]]] = []

    def __init__(self, kind, *shapes):
        layers = [nn.Unflatten(1, (1, *[1] * (kind.dims - 1), FEATURES)), kind.layer(1, 3, 1), nn.ReLU(), nn.Flatten()]
        super().__init__(nn.Sequential(*layers), nn.Linear(3 * FEATURES, CLASSES))
        for layer in self.features:
            layer.register_forward_hook(lambda layer, _, out: self.seen.append((type(layer).__name__, out.dtype)))


class Kind(NamedTuple):
    layer: type[nn.Module]
    dims: int


KINDS = [Kind(getattr(nn, f"Conv{t}{d}d"), d) for t in ("", "Transpose") for d in (1, 2, 3)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.layer.__name__)
def test_convolutions_and_what_follows_are_in_autocast_s_type(kind):
    seen = []
    for cls in (Sequential, Vectorised):
        Convolutional.seen.clear()
        trained(cls, MixedPrecision("bf16-mixed", "cpu"), nullcontext(), net=partial(Convolutional, kind))
        seen.append(dict(Convolutional.seen))
    assert seen[0] == seen[1]
    assert seen[1][kind.layer.__name__] == seen[1]["ReLU"] == torch.bfloat16


def test_so_they_are_in_an_evaluation():
    data = blobs(*SIZES)
    data.setup()
    model = make_client(Local, net=partial(Convolutional, KINDS[1]))
    start = ClientState(detached(model.state_dict()))
    engine = Vectorised(model, LocalWork(), MixedPrecision("bf16-mixed", "cpu"))
    jobs = [Job(k, 0, start, {}, data.client(k), seed=k, evaluate=("train",)) for k in range(len(SIZES))]
    Convolutional.seen.clear()
    (together,) = engine.evaluate_all(jobs)
    assert len(together.splits["train"]) == len(SIZES) and engine.evaluator.usable
    assert dict(Convolutional.seen)["ReLU"] == torch.bfloat16


def test_a_convolution_of_doubles_stays_one():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = convolution(F.conv1d, torch.ones(1, 2, 5).double(), torch.ones(3, 2, 1).double(), stride=2)
    assert found.dtype == torch.float64 and found.shape == (1, 3, 3)
