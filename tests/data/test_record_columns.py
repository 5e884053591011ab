"""Alike records in columns: they come back as they were, and a file has one tensor for each entry of all."""

import io
import math
import random

import pytest
import torch

from federations import equal
from pfl_lightning.data.record_columns import COLUMNS, FEW, SMALL, in_columns, in_rows
from pfl_lightning.messages import Row, Stack


def saved(record):
    """The record after a file, and the number of the file's tensors."""
    file = io.BytesIO()
    torch.save(record, file)
    tensors = file.getvalue().count(b"archive/data/") // 2
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True), tensors


def identical(one, other):
    """Equal with the same types, order of keys and bits of numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(identical, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, torch.Tensor):
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))
    return repr(one) == repr(other)


def state(client, text="a"):
    return {"weights": {"w": torch.full((3, 2), client / 7), "b": torch.tensor(client)}, "rest": (client, -0.0, text)}


RECORDS = {
    "states": {client: state(client) for client in range(3, 3 + FEW)},
    "few": {client: state(client) for client in range(FEW - 1)},
    "two forms": {client: state(client, "ab"[client % 2]) for client in range(2 * FEW)},
    "some alike": {client: state(client) if client % 5 else {"x": [torch.zeros(client)]} for client in range(40)},
    "list": [state(client) for client in range(FEW)],
    "large": [{"w": torch.full((SMALL // 4 + 1,), float(client)), "b": torch.ones(1)} for client in range(FEW)],
    "texts": {f"c{client}": {"acc": client / 3, "n": -client} for client in range(FEW)},
    "numbers": [*range(300)],
    "huge": [2**70] * FEW,
    "fractions": [math.nan, -0.0, math.inf] * FEW,
    "mixed": [1, 2.0, True, None] * FEW,
    "flags": [{"is": bool(client % 2), "n": 1} for client in range(2 * FEW)],
    "no records": {f"layer{k}": torch.ones(2) for k in range(FEW)},
    "signs": [{"one": torch.tensor(-0.0), "other": torch.tensor(0.0)} for _ in range(FEW)],
    "not finite": [{"x": torch.tensor([math.nan])} for _ in range(FEW)],
    "with gradient": [{"x": torch.ones(2, requires_grad=True)} for _ in range(FEW)],
    "empty": [{}, [], ()] * FEW,
    "nested": {"server": {"models": {client: state(client) for client in range(FEW)}, "round": 3}},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_records_come_back_as_they_were(record):
    assert identical(in_rows(saved(in_columns(record))[0]), record)
    assert identical(in_rows(record), record)


@pytest.mark.exhaustive
def test_records_of_drawn_forms_come_back():
    draw = random.Random(0)

    def drawn(depth):
        kind = draw.randrange(8 if depth else 5)
        if kind < 5:
            return (draw.randrange(-300, 300), draw.random(), torch.rand(draw.randrange(3)), None, "x")[kind]
        values = [drawn(depth - 1) for _ in range(draw.choice([0, 1, 2, FEW]))]
        return values if kind == 5 else tuple(values) if kind == 6 else dict(enumerate(values))

    for _ in range(200):
        record = {k: drawn(3) if draw.random() < 0.5 else {"n": k, "x": torch.rand(2)} for k in range(FEW + 3)}
        assert identical(in_rows(saved(in_columns(record))[0]), record)


def test_a_file_has_one_tensor_for_each_entry_of_all_records():
    record = {client: {"w": torch.rand(3, 2), "b": torch.rand(2), "n": client} for client in range(100)}
    # keys, places and the column of n are tensors too
    assert saved(in_columns(record))[1] <= 5 < 200 <= saved(record)[1]


def test_equal_columns_are_in_a_file_once():
    models = {client: {"w": torch.rand(100)} for client in range(FEW)}
    known = []
    twice = [in_columns(record, known) for record in (models, {k: {"own": v["w"].clone()} for k, v in models.items()})]
    first, second = (each[COLUMNS]["groups"][0]["columns"][0] for each in twice)
    assert first is second
    assert equal([in_rows(twice[0])[3]["w"], in_rows(twice[1])[3]["own"]], [models[3]["w"]] * 2)


def test_rows_of_a_stack_become_dicts_and_tensors_come_back_alone():
    stack = Stack({"w": torch.rand(FEW, 4)})
    back = in_rows(in_columns({client: {"weights": Row(stack, client)} for client in range(FEW)}))
    assert type(back[2]["weights"]) is dict and back[2]["weights"]["w"].equal(stack.entries["w"][2])
    # a client's state is saved by itself later, and would take the tensor of all with it
    assert back[2]["weights"]["w"].untyped_storage().nbytes() == 4 * 4
