"""Which server sides would learn as much from sums over clients as they do from updates."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch

from federations import Spy, TwoGroups, blobs, fit, make_client
from pfl_lightning.aggregators import CFL, Aggregator, AggregatorList, WeightedAverage
from pfl_lightning.messages import Message, Updates, detached, tensors
from pfl_lightning.methods.registry import METHODS
from sweeps import swept

ROUNDS = 4
# masks of FedSelect are empty at first; narrow nets have no sums with wide ones, so all have the whole net
WHOLE = {"widths": (1.0,)}
SETTINGS = {
    "FedClassAvg": {"contrastive": False},
    "FedFed": {"distill_rounds": ROUNDS - 2},
    "FedSelect": {"every": 1},
    "FedRolex": WHOLE,
    "FjORD": WHOLE,
    "HeteroFL": WHOLE,
}


def shifted(updates: Updates) -> Updates:
    """Updates with the same sums and numbers of samples: what one client has more the next has less."""
    moving: dict[int, Any] = dict(updates)
    generator = torch.Generator().manual_seed(0)
    for one, other in pairwise(updates):
        moving[one], moving[other] = moved(moving[one], moving[other], generator)
    return moving


def moved(one: Any, other: Any, generator: torch.Generator) -> tuple[Any, Any]:
    """Two records, floating tensors of which are moved apart."""
    if isinstance(one, torch.Tensor) and one.is_floating_point():
        shift = 0.3 * one.abs().mean() * torch.randn(one.shape, generator=generator)
        return one + shift, other - shift
    if isinstance(one, dict):
        parts = {name: moved(one[name], other[name], generator) for name in one.keys() & other.keys()}
        return tuple({**own, **{name: pair[at] for name, pair in parts.items()}} for at, own in enumerate((one, other)))
    return one, other


def sent(aggregator: Aggregator, state: dict[str, Any], updates: Updates) -> list[Message]:
    """What all clients receive after a round that began with a state."""
    aggregator.state = copy.deepcopy(state)
    aggregator.aggregate(updates, ROUNDS)
    return [detached(aggregator.download(client)) for client in range(4)]


@pytest.mark.parametrize("method", swept(METHODS))
def test_who_needs_sums_only_says_so(method):
    spy = Spy()
    own = SETTINGS.get(method.name, {})
    # as many samples each, as some count all clients alike; two kinds of clients, as some tell them apart; and clients
    # without a class where a mean is over those that have it
    data = blobs(24, 24, 24, 24, data=TwoGroups, by_class=own is WHOLE)
    # it averages all clients until it splits them
    splitting = {"CFL": CFL(eps1=1e9, eps2=0, warmup=0)}
    aggregator = splitting.get(method.name) or method.new_aggregator()
    fit(make_client(method.client, **own), data, aggregator=aggregator, max_rounds=ROUNDS, callbacks=[spy])
    # not the last round's: its loss against itself, as AdaptiveProximal compares it, is a tie that rounding decides
    # but for CCVR, which reports in the last round alone
    state, updates = detached(aggregator.state), spy.updates[-1 if method.name == "CCVR" else -2]
    if method.name == "FLOCO":
        # it looks at single changes once, where clients have no points yet
        state["centres"] = {}
    before = sent(aggregator, state, updates)
    again = sent(aggregator, state, updates)
    after = sent(aggregator, state, shifted(updates))
    assert all(torch.equal(x, y) for x, y in zip(tensors(before), tensors(again), strict=True))
    same = all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(tensors(before), tensors(after), strict=True))
    # bits of a mask have no sums in the bytes that they are packed in, nor have factors of different ranks or nets of
    # different widths
    assert same == (aggregator.sums_only or method.name in ("FedKD", "FedPM", "FjORD"))


def test_a_subclass_says_it_anew():
    class Median(WeightedAverage):
        """One that might look at each."""

    assert WeightedAverage().sums_only and not Median().sums_only
    assert AggregatorList([WeightedAverage()]).sums_only and not AggregatorList([Median()]).sums_only
