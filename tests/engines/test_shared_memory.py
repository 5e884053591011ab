"""Records on their way out of a forked process: the same tensors, by a file that both processes reach."""

import os

import pytest
import torch

from pfl_lightning.engines import shared_memory
from pfl_lightning.engines.shared_memory import Shelf

TENSORS = {
    "floats": torch.arange(6.0).view(2, 3),
    "bfloat16": torch.arange(4.0).bfloat16(),
    "counter": torch.tensor(7),
    "turned": torch.arange(6.0).view(3, 2).t(),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "booleans": torch.tensor([True, False]),
    # of which the tensor in it goes over the shelf
    "parameter": torch.nn.Parameter(torch.ones(2)),
}
OTHERS = {
    "part": torch.arange(6.0)[1:4],
    "repeated": torch.ones(1).expand(3),
    "empty": torch.empty(0),
    "complex": torch.ones(2, dtype=torch.complex64),
    "leaf": torch.ones(2, requires_grad=True),
}


def passed(shelf, record):
    """A record that went over a shelf, and the length of what didn't."""
    rest = shelf.pack(record)
    return shelf.unpack(rest), len(rest)


def same(one, other):
    return (
        one.dtype == other.dtype
        and one.stride() == other.stride()
        and type(one) is type(other)
        and one.requires_grad == other.requires_grad
        and torch.equal(one, other)
    )


def size(shelf):
    """Bytes of its file."""
    return os.fstat(shelf._file.fileno()).st_size


@pytest.fixture(params=["memory", "temporary"])
def shelf(request, monkeypatch):
    if request.param == "temporary":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    return Shelf()


@pytest.mark.parametrize("name", [*TENSORS, *OTHERS])
def test_a_tensor_arrives_as_it_was(name, shelf):
    tensor = (TENSORS | OTHERS)[name]
    record, _ = passed(shelf, {"client": 3, "weights": [tensor]})
    assert record["client"] == 3
    assert same(record["weights"][0], tensor)
    assert size(shelf) == (0 if name in OTHERS else tensor.nbytes)


def test_tensors_are_not_in_what_is_sent(shelf):
    large = {str(k): torch.full((1000,), float(k)) for k in range(3)}
    record, rest = passed(shelf, large)
    assert all(same(record[k], large[k]) for k in large)
    assert rest < 500


def test_what_goes_in_several_calls_is_whole(shelf, monkeypatch):
    for name in ("pwritev", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, parts, at, call=call: call(file, [parts[0][:7]], at))
    record, _ = passed(shelf, TENSORS)
    assert all(same(record[name], tensor) for name, tensor in TENSORS.items() if name != "parameter")


def test_what_was_fetched_makes_place_and_nothing_else_does(shelf):
    records = [torch.full((1000,), float(k)) for k in range(4)]
    waiting = [shelf.pack(record) for record in records[:2]]
    assert torch.equal(shelf.unpack(waiting[0]), records[0])
    # the second one is still there
    waiting.append(shelf.pack(records[2]))
    arrived = [shelf.unpack(rest) for rest in waiting[1:]]
    assert size(shelf) == 12_000
    again, _ = passed(shelf, records[3])
    assert size(shelf) == 12_000
    # copies: they stay what they were
    assert all(map(torch.equal, [*arrived, again], records[1:]))


def test_the_next_worker_finds_it_clear(shelf, monkeypatch):
    monkeypatch.setattr(shared_memory, "KEPT", 1000)
    as_forked = shelf._packed, shelf._end
    shelf.unpack(shelf.pack(torch.ones(1000)))
    # as it is in the process that forked the worker, which packs nothing itself
    shelf._packed, shelf._end = as_forked
    shelf.clear()
    assert size(shelf) == 1000
    assert torch.equal(passed(shelf, torch.arange(9))[0], torch.arange(9))
    assert shelf._end == 72
