import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

flwr = pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402

from pfl_lightning.flower import template, wire  # noqa: E402
from pfl_lightning.flower.template import Refused, check_finite, check_norm, norm_of  # noqa: E402
from pfl_lightning.flower.wire import names, on_disk, pack, unpack  # noqa: E402
from pfl_lightning.messages import Restored  # noqa: E402

UPDATE = {
    "weights": {"net.w": torch.randn(3, 2), "net.b": torch.randn(2, dtype=torch.bfloat16)},
    "num_samples": torch.tensor(7),
    "prototypes": {0: torch.ones(4), 7: torch.ones(4)},
    "empty": {},
    "flag": torch.tensor(True),
    "l": [torch.zeros(0), 3],
}
CLASSES = 10
TREE = "record/5"


def travelled(content: RecordDict) -> RecordDict:
    """What arrives: everything through Flower's own bytes."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    return inflate_object_from_contents(content.object_id, contents)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_tensors_come_back(dtype, shape):
    tensor = torch.randn(shape).mul(100).to(dtype)
    back = unpack(travelled(pack({"a": {"t": tensor}})), "a", {"t": tensor})["t"]
    assert same(back, tensor)
    back.zero_()  # in memory of its own


@pytest.mark.parametrize(
    "record",
    [
        UPDATE,
        dict(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict()),
        {"a": {"b": {"c": {"d": torch.ones(2)}}}, "e": {}},
        [1, -(2**70), 0.1, 1e-320, -0.0, float("inf"), "ä\n'\"", "", None, True, False, [], (), {}],
        ({"x": (torch.ones(1), [torch.zeros(1)])}, {3: "three", -1: "minus one"}),
        {"strides": [torch.arange(24).view(4, 6).t(), torch.arange(9)[::3], torch.ones(1).expand(3, 2)]},
        {"channels": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)},
        {"one": torch.arange(6).view(2, 3)[:, 1:2][:1].t()},
        {"client": 3, "metrics": {"train/loss": 0.25}, "after": {"val": {"acc": 1.0}}, "token": "0" * 16},
    ],
)
def test_records_come_back(record):
    assert same(unpack(travelled(pack({"a": record})), "a"), record)


def test_bits_come_back():
    odd = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45])
    assert torch.equal(unpack(pack({"a": odd}), "a").view(torch.int32), odd.view(torch.int32))


def test_parameters_travel_as_values():
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_()
    back = unpack(pack({"a": {"w": layer.weight}}), "a")["w"]
    assert type(back) is torch.Tensor and not back.requires_grad and torch.equal(back, layer.weight)


def test_an_ordered_dict_is_a_template():
    module = nn.Linear(2, 3)
    assert same(unpack(pack({"a": module.state_dict()}), "a", module.state_dict()), dict(module.state_dict()))


def test_equal_tensors_travel_once_and_come_apart():
    w = torch.randn(100, 100)
    tied = {"net.embedding": w, "net.classifier": w}
    content = travelled(pack({"0": {"weights": tied}, "1": {"weights": tied}, "2": {"weights": {"net.w": w.clone()}}}))
    assert len(content["tensors"]["tensors"].data) == 4 * 100 * 100
    assert names(content) == ["0", "1", "2"]
    one, other = unpack(content, "0")["weights"].values()
    one.zero_()
    assert torch.equal(other, w) and torch.equal(unpack(content, "1")["weights"]["net.embedding"], w)


def test_a_message_without_tensors():
    content = travelled(pack({"rows": [{"client": 1}]}))
    assert unpack(content, "rows") == [{"client": 1}]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": {(1, 2): torch.ones(1)}}, "a: the key .* can't travel"),
        ({"a": {True: torch.ones(1)}}, "a: the key True"),
        ({"a": torch.ones(2, 2).to_sparse()}, "sparse"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": {1, 2}}, "a: a set can't travel"),
        ({"a": np.float64(0.5)}, "float64 can't travel"),
    ],
)
def test_what_cannot_travel(value, reason):
    with pytest.raises(TypeError, match=reason):
        pack({"r": value})


def test_too_many_names_cannot_travel():
    with pytest.raises(ValueError, match="can travel"):
        pack({"r": {"x" * 100 + str(i): 0 for i in range(20_000)}})


# What spoils a message


def tensor(dtype: Any = "float32", shape: Any = (3, 2), start: Any = 0) -> list[Any]:
    return ["t", dtype, list(shape) if isinstance(shape, tuple) else shape, start]


def tree(change: Callable[[Any], None]) -> Callable[[RecordDict], None]:
    """Changes the nesting, as JSON."""

    def spoil(content: RecordDict) -> None:
        nodes = json.loads(content[TREE]["tree"])
        change(nodes)
        content[TREE]["tree"] = json.dumps(nodes)

    return spoil


def text(new: Any) -> Callable[[RecordDict], None]:
    """Puts something in place of the nesting."""
    return lambda content: content.__setitem__(TREE, ConfigRecord({"tree": new}))


def weight(node: Any) -> Callable[[RecordDict], None]:
    """Puts something in place of the entry net.w."""
    return tree(lambda nodes: nodes[1][0][1][1][0].__setitem__(1, node))


def sent(record: Any) -> Callable[[RecordDict], None]:
    """Sends something else."""

    def spoil(content: RecordDict) -> None:
        other = pack({"5": record})
        content[TREE], content["tensors"] = other[TREE], other["tensors"]

    return spoil


def changed(**entries: Any) -> Callable[[RecordDict], None]:
    return sent(UPDATE | entries)


def array(data: bytes, stype: str = wire.STYPE) -> Callable[[RecordDict], None]:
    """Puts other bytes in place of the tensors'."""
    new = ArrayRecord({"tensors": Array("uint8", (len(data),), stype, data)})
    return lambda content: content.__setitem__("tensors", new)


def npz() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(10**6, np.float32))
    return file.getvalue()


W = UPDATE["weights"]
CLAIMS = {
    "a tensor of 4 TB": weight(tensor(shape=(10**12,))),
    "a pickled object array": weight(tensor("object", (1,))),
    "a plain pickle": array(pickle.dumps({"a": 1}), "pickle"),
    "an npz": array(npz(), "numpy.ndarray"),
    "data cut off": array(b"\0" * 20),
    "another stype": array(b"\0" * 24, "numpy.ndarray"),
    "bigger than its limit": changed(weights=W | {"net.w": torch.zeros(100, 100)}),
    "deep nesting": text('["l",[' * 50 + '["v",1]' + "]]" * 50),
    "a bomb of brackets": text("[" * 100_000),
    "a bomb of braces": text('{"a":' * 100_000),
    "no array": lambda content: content["tensors"].pop("tensors"),
    "no entry": sent({name: value for name, value in UPDATE.items() if name != "num_samples"}),
    "class 99": changed(prototypes={99: torch.ones(4)}),
    "a class by name": changed(prototypes={"0": torch.ones(4)}),
    "a prototype of another width": changed(prototypes={0: torch.ones(5)}),
    "float64 for float32": changed(weights={name: value.double() for name, value in W.items()}),
    # beyond the prototype's
    "an entry more": changed(more=torch.zeros(3)),
    "the same bytes a thousand times": text(json.dumps(["d", [[str(i), tensor()] for i in range(10_000)]])),
    "a nesting that is too long": text("[" + "0," * (1 << 20) + "0]"),
    "a nesting of bytes": text(b"[]"),
    "a nesting that is none": text("null"),
    "a number of 5,000 digits": text('["v",' + "9" * 5000 + "]"),
    "a shape below 0": weight(tensor(shape=(-3, -2))),
    "a shape of truth values": weight(tensor(shape=(True, 6))),
    "a shape with fractions": weight(tensor(shape=(3.0, 2.0))),
    "a shape that overflows": weight(tensor(shape=(2**40, 2**40))),
    "a shape of 10,000 dimensions": weight(tensor(shape=(1,) * 10_000)),
    "a shape that is none": weight(tensor(shape="3, 2")),
    "bytes before the first": weight(tensor(start=-8)),
    "bytes behind the last": weight(tensor(start=2**47)),
    "a start that is no number": weight(tensor(start=[0])),
    "a type that doesn't exist": weight(tensor("float31")),
    "a type that is none": weight(tensor(["float32"])),
    "a text for a tensor": weight(["v", "net.w"]),
    "a list for a value": weight(["v", [[1]]]),
    "a part of an unknown kind": weight(["p", "posix.system"]),
    "a part without a kind": weight([]),
    "a key twice": tree(lambda nodes: nodes[1].append(nodes[1][0])),
    "a key that is none": tree(lambda nodes: nodes[1][0].__setitem__(0, None)),
    "a key that is a list": tree(lambda nodes: nodes[1][0].__setitem__(0, ["weights"])),
    "a key without a value": tree(lambda nodes: nodes[1].append(["alone"])),
    "a tuple for a list": changed(l=(torch.zeros(0), 3)),
    "a longer list": changed(l=[torch.zeros(0), 3, 4]),
    "a truth value for a number": changed(l=[torch.zeros(0), True]),
    "a tensor for a number": changed(l=[torch.zeros(0), torch.tensor(3)]),
    "a number for a tensor": changed(num_samples=7),
    "a dict for a tensor": changed(num_samples={}),
    "something where nothing should be": changed(empty={"a": 1}),
    "two arrays": lambda content: content["tensors"].__setitem__("more", Array("uint8", (1,), wire.STYPE, b"1")),
    "another record's name": lambda content: content.pop(TREE),
    "a nesting by another name": lambda content: content.__setitem__(TREE, ConfigRecord({"json": "[]"})),
}
"""What a message claims, and nothing is made of."""

BYTES = {
    "a NaN": changed(weights=W | {"net.w": torch.full((3, 2), torch.nan)}),
    "an infinity in bfloat16": changed(weights=W | {"net.b": torch.tensor([0.0, torch.inf], dtype=torch.bfloat16)}),
    "a truth value of 7": array(b"\x07" * 1000),
    "huge but finite": changed(weights=W | {"net.w": torch.full((3, 2), 1e30)}),
}
"""What can be seen from the bytes only."""


SOUND = {
    name
    for name in CLAIMS
    if name.startswith(("no entry", "class 99", "a class by", "a prototype", "float64", "an entry more", "a text for"))
    or name.startswith(
        ("a tuple", "a longer", "a truth value for", "a tensor for", "a number for", "a dict", "something")
    )
}
"""What only a template tells from a good record."""


def received(content: RecordDict) -> Any:
    update = unpack(travelled(content), "5", UPDATE, CLASSES, limit=10_000)
    check_norm(update, UPDATE, 100)
    return update


def test_what_is_not_spoiled_is_taken():
    assert same(received(pack({"5": UPDATE})), UPDATE)


@pytest.mark.parametrize("spoil", [*CLAIMS.values(), *BYTES.values()], ids=[*CLAIMS, *BYTES])
def test_spoiled_messages_are_refused_in_a_sentence(spoil, request, monkeypatch):
    if request.node.callspec.id in CLAIMS:
        monkeypatch.setattr(wire, "made", lambda *args: pytest.fail("something is made of it"))
    content = pack({"5": UPDATE, "6": UPDATE})
    spoil(content)
    with pytest.raises(Refused) as refusal:
        received(content)
    sentence = str(refusal.value)
    assert sentence.endswith(".") and "\n" not in sentence and len(sentence) < 250


@pytest.mark.parametrize("name", [name for name in CLAIMS if name not in SOUND])
@pytest.mark.by_default(but=["the same bytes a thousand times"])
def test_what_is_unsound_in_itself_is_refused_without_a_template(name, monkeypatch):
    monkeypatch.setattr(wire, "made", lambda *args: pytest.fail("something is made of it"))
    content = pack({"5": UPDATE})
    CLAIMS[name](content)
    with pytest.raises(Refused):
        unpack(travelled(content), "5", limit=10_000)


def test_the_nesting_has_an_end():
    deep: Any = 1
    for _ in range(wire.DEPTH):
        deep = [deep]
    assert same(unpack(pack({"a": deep}), "a"), deep)
    with pytest.raises(Refused, match="deeper than 16"):
        unpack(pack({"a": [deep]}), "a")


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_has_a_template_is_finite(value):
    content = pack({"5": {"w": torch.tensor([0.0, value])}})
    assert len(unpack(content, "5")["w"]) == 2
    with pytest.raises(Refused, match=r"5.w has a NaN or an infinity"):
        unpack(content, "5", {"w": torch.zeros(2)})


def test_a_record_of_all_classes_has_room():
    like = {"prototypes": {0: torch.ones(4)}, "after": {str: {str: float}}, "l" * 300: [torch.ones(1)] * 50, "s": ""}
    numbers = {f"metric {i}": 1 / 3 for i in range(12)}
    record = {
        "prototypes": {label: torch.full((4,), label) / 7 for label in range(1000)},
        "after": {split: numbers for split in ("train", "val", "test", "val_received", "test_received")},
        "l" * 300: [torch.full((1,), i / 3) for i in range(50)],
        "s": "x" * 2000,
    }
    assert same(unpack(pack({"5": record}), "5", like, keys=1000), record)


def test_no_more_is_read_than_a_record_of_its_template_takes():
    content = pack({"5": {"w": torch.ones(3)}})
    text('["d",[["w",["t","float32",[3],' + " " * 300 + "0]]]]")(content)
    with pytest.raises(Refused, match=r"names and nesting are no text of at most \d+ characters"):
        unpack(content, "5", {"w": torch.ones(3)})
    assert "w" in unpack(content, "5")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_changed_gives_a_record_or_a_refusal(seed):
    rng = np.random.RandomState(seed)
    content = pack({"5": UPDATE})
    whole = content[TREE]["tree"]
    for _ in range(50):
        letters = list(whole)
        for place in rng.randint(len(whole), size=rng.randint(1, 4)):
            letters[place] = rng.choice([*list('[]{}",:0123456789-.etduvl \n\\'), ""])
        text("".join(letters))(content)
        try:
            update = unpack(content, "5", UPDATE, CLASSES, limit=10_000)
        except Refused as refusal:
            assert "\n" not in str(refusal)
        else:
            assert update.keys() == UPDATE.keys() and update["weights"]["net.w"].shape == (3, 2)


def test_a_spoiled_record_leaves_the_others():
    content = pack({"5": UPDATE, "6": UPDATE})
    text("[")(content)
    assert same(unpack(content, "6", UPDATE, CLASSES), UPDATE)


def test_without_a_template_no_more_than_the_limit_is_made():
    aliases = [tensor(shape=(25,))] * 1000
    content = pack({"5": torch.ones(25)})
    text(json.dumps(["l", aliases]))(content)
    assert len(unpack(content, "5")) == 1000
    with pytest.raises(Refused, match="has 100000 bytes, and may have 99999"):
        unpack(content, "5", limit=99_999)


def test_a_record_on_the_disk_is_the_same_and_its_files_have_no_names(tmp_path):
    large, small = torch.randn(200, 100).T, torch.tensor([True])
    record = {
        "weights": Restored({"a": large}, {"a": "travelled"}),
        3: [large.bfloat16(), (small, 2)],
        "s": torch.ones(()),
    }
    made = on_disk(record, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(made["weights"]["a"], large) and made["weights"].travelled == {"a": "travelled"}
    assert torch.equal(made[3][0], large.bfloat16()) and made[3][1][0] is small and made["s"] is record["s"]
    made["weights"]["a"].zero_()
    assert not torch.equal(made["weights"]["a"], large)
    with pytest.raises(OSError):
        on_disk(record, tmp_path / "nowhere")


def test_a_record_on_the_disk_keeps_kinds_and_what_is_in_it_twice(tmp_path):
    large, weight = torch.randn(200, 100), nn.Parameter(torch.zeros(200, 100))
    made = on_disk({"state": OrderedDict(a=large, b=large), "p": weight}, tmp_path)
    assert type(made["state"]) is OrderedDict and made["p"] is weight
    assert made["state"]["a"] is made["state"]["b"] is not large and torch.equal(made["state"]["a"], large)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_message_in_pieces_comes_back_in_memory_and_on_the_disk(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "PIECE", piece)
    content = pack({"5": UPDATE, "6": UPDATE})
    size = sum(len(array.data) for array in content["tensors"].values())
    assert len(content["tensors"]) == -(-size // piece)
    content = travelled(content)
    assert same(unpack(content, "6", UPDATE, CLASSES), UPDATE)
    for name in ("LARGE", "SMALL"):
        monkeypatch.setattr(wire, name, 1)
    # a run's folder may be made later
    update = unpack(content, "6", UPDATE, CLASSES, folder=tmp_path / "runs")
    assert same(update, UPDATE) and list(tmp_path.glob("**/*")) == [tmp_path / "runs"]
    # equal tensors travel once, and are two again
    update["prototypes"][0].zero_()
    assert torch.equal(update["prototypes"][7], torch.ones(4))
    del content["tensors"]
    assert torch.equal(update["weights"]["net.w"], UPDATE["weights"]["net.w"])


def test_without_room_on_the_disk_a_record_is_in_memory(tmp_path, monkeypatch):
    for name in ("LARGE", "SMALL"):
        monkeypatch.setattr(wire, name, 1)
    (tmp_path / "file").write_text("")
    assert same(unpack(pack({"5": UPDATE}), "5", UPDATE, CLASSES, folder=tmp_path / "file"), UPDATE)


@pytest.mark.parametrize("fault", ["value", "missing"])
def test_what_is_wrong_in_memory_is_wrong_on_the_disk(fault, tmp_path, monkeypatch):
    for name in ("LARGE", "SMALL", "PIECE"):
        monkeypatch.setattr(wire, name, 1)
    content = pack({"5": {"flag": torch.tensor([True, False])}})
    if fault == "value":
        content["tensors"]["tensors"].data = b"\x02"
    else:
        del content["tensors"]["tensors.1"]
    words = {"value": "neither 0 nor 1", "missing": "takes 2 bytes, of which 1 were sent"}[fault]
    with pytest.raises(Refused, match=words):
        unpack(content, "5", {"flag": torch.zeros(2, dtype=torch.bool)}, folder=tmp_path)


def test_checks_of_a_large_tensor_go_by_parts(monkeypatch):
    monkeypatch.setattr(template, "BLOCK", 4)
    base, record = torch.randn(3, 5), torch.randn(3, 5)
    norm = torch.linalg.vector_norm(record.double() - base.double()).item()
    assert norm_of({"w": record}, {"w": base}) == pytest.approx(norm, rel=1e-12)
    assert norm_of({"w": record}, {}) == pytest.approx(torch.linalg.vector_norm(record.double()).item(), rel=1e-12)
    assert norm_of({"w": torch.zeros(0)}, {"w": torch.zeros(0)}) == 0
    check_finite(record)
    record[2, 4] = torch.inf
    with pytest.raises(Refused, match="has a NaN or an infinity"):
        check_finite(record)
