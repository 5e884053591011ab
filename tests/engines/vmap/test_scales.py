"""Loss scales of many clients, against torch's scaler of one client after another."""

from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, NAdam, RMSprop

from federations import blobs, make_client, noisy, plain
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap.engine import Unvectorisable, Vectorised
from pfl_lightning.messages import detached, tensors
from pfl_lightning.methods import Local

RAGGED = (24, 7, 30, 20, 16)


class Scaling(Precision):
    """As 16-mixed looks to an engine."""

    scaler = object()


class Spikes(Local):
    """Batches that begin with a sample of class 0 have a gradient that is finite, and isn't once it is scaled."""

    def loss(self, features, logits, target):
        spike = torch.where(target[0] == 0, 1e37, 0.0)
        return super().loss(features, logits, target) + (logits.sum() - logits.sum().detach()) * spike


class Doubled(Spikes):
    """With gradients that are the module's own, and a parameter that is a number."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.heat = nn.Parameter(torch.tensor(1.0))

    def loss(self, features, logits, target):
        return super().loss(features, self.heat * logits, target)

    def adjust_gradients(self, gradients):
        return {name: 2 * gradient for name, gradient in gradients.items()}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Scalers that grow within a round."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**16, growth_interval=2))


def rounds(cls, method, work, compile=False, **settings):
    """States of the clients after each of two rounds of an engine."""
    data = blobs(*RAGGED)
    data.setup()
    settings = {"net": noisy, "optimizer": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1)} | settings
    model = make_client(method, optimizer_lifetime="run", **settings)
    states = [ClientState(detached(model.state_dict()))] * len(RAGGED)
    # one engine, as in a run
    engine = cls(model, LocalWork(batch_size=5, **work), Scaling(), compile=compile)
    result = []
    for number in range(2):
        jobs = [Job(k, number, states[k], {}, data.client(k), seed=10 * number + k) for k in range(len(RAGGED))]
        outcomes = list(engine.run(jobs))
        assert all(outcome.finite for outcome in outcomes)
        states = [outcome.state for outcome in outcomes]
        result.append(states)
    return result


@pytest.mark.parametrize("method", [Spikes, Doubled])
@pytest.mark.parametrize("work", [{}, {"clip": 0.5}, {"clip": 0.1, "clip_algorithm": "value"}], ids=str)
def test_clients_leave_out_the_steps_that_they_would_leave_out_alone(method, work):
    alone, together = (rounds(cls, method, work) for cls in (Sequential, Vectorised))
    assert_same_steps(alone, together)
    # some have left out steps, some have not, and both have been seen
    assert len({state.scaler["scale"] for state in alone[0]}) > 2
    assert min(state.scaler["scale"] for state in alone[1]) < 2.0**16 < max(s.scaler["scale"] for s in alone[0])


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
        partial(Adam, lr=0.01, foreach=True),
        partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
        partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
        partial(Adadelta, lr=0.5),
    ],
)
@pytest.mark.by_default("optimizer1")
def test_each_client_counts_the_steps_that_it_makes(optimizer):
    # without BatchNorm, before which biases have gradients of nothing but rounding, that some optimizers scale up
    alone, together = (
        rounds(cls, Doubled, {"epochs": 2}, optimizer=optimizer, net=plain) for cls in (Sequential, Vectorised)
    )
    assert_same_steps(alone, together)
    for one, other in zip(alone, together, strict=True):
        for a, b in zip(one, other, strict=True):
            (a,), (b,) = a.optimizers.values(), b.optimizers.values()
            assert a["param_groups"] == b["param_groups"]
            assert a["state"].keys() == b["state"].keys()
            for number, state in a["state"].items():
                assert state.keys() == b["state"][number].keys()
                torch.testing.assert_close(b["state"][number]["step"], state["step"], atol=0, rtol=0)
    # of 8, 2, 8, 6 and 6 batches; they come back with different counts, and go on from them
    counts = [next(iter(client.optimizers.values()))["state"][0]["step"].item() for client in alone[0]]
    assert len({batches - count for batches, count in zip((8, 2, 8, 6, 6), counts, strict=True)}) > 2


def test_steps_of_several_batches_are_left_out_as_a_whole():
    work = {"epochs": 2, "accumulate": 2, "clip": 0.5}
    alone, together = (rounds(cls, Spikes, work) for cls in (Sequential, Vectorised))
    assert_same_steps(alone, together)
    assert len({state.scaler["scale"] for state in alone[0]}) > 1


def assert_same_steps(alone, together):
    """Clients have the same states and scales after each round."""
    for one, other in zip(alone, together, strict=True):
        assert [state.scaler for state in one] == [state.scaler for state in other]
        for a, b in zip(one, other, strict=True):
            ends = [list(tensors([state.personal, state.optimizers])) for state in (a, b)]
            assert len(ends[0]) == len(ends[1]) > 0
            for x, y in zip(*ends, strict=True):
                torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_half_precision_trains_as_one_client_after_another():
    class Half(Scaling):
        def forward_context(self):
            return torch.autocast("cpu", dtype=torch.float16)

    ends = {}
    data = blobs(*RAGGED)
    data.setup()
    for cls in (Sequential, Vectorised):
        model = make_client(Local, net=plain)
        start = ClientState(detached(model.state_dict()))
        jobs = [Job(k, 0, start, {}, data.client(k), seed=k) for k in range(len(RAGGED))]
        ends[cls] = list(cls(model, LocalWork(batch_size=5), Half()).run(jobs))
    for one, other in zip(*ends.values(), strict=True):
        for name, tensor in one.state.personal.items():
            torch.testing.assert_close(tensor, other.state.personal[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer": NAdam}, "NAdam can't .*; only Adadelta, Adam, AdamW, RMSprop, SGD without dampening can"),
        ({"optimizer": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1)}, "SGD without dampening can"),
        ({"compile": True}, r"trainer\.compile .* loss scales"),
    ],
    ids=["NAdam", "dampening", "compile"],
)
def test_what_cannot_leave_out_a_step_is_refused_in_one_sentence(settings, reason):
    with pytest.raises(Unvectorisable, match=rf"16-mixed.*{reason}|{reason}.*16-mixed"):
        rounds(Vectorised, Local, {}, **settings)
