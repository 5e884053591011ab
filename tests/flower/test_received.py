"""What a site makes of a server's payload: no more memory than came, and nothing but what its own method can get."""

import json
import tracemalloc
from functools import partial

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from federations import equal, fit, make_client, noisy
from pfl_lightning.flower.template import Refused
from pfl_lightning.flower.wire import STYPE, pack, unpack_as_sent
from pfl_lightning.methods import FedAvg, FedFomo

MIB = 1 << 20


BOMBS = {
    # 100 names of the same bytes, and windows that overlap
    "same": (FedAvg, "weights", [0] * 100, "payload.weights has an entry 'w0', which isn't wanted"),
    "windows": (FedAvg, "weights", [4 * place for place in range(100)], "payload.weights has an entry 'w0', which"),
    "gifts": (FedAvg, "gifts", [0] * 100, "the server sends 'gifts', which FedAvg with WeightedAverage"),
    "models": (FedFomo, "models", [4 * place for place in range(100)], "tensors that overlap in the message's bytes"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_message_takes_no_more_memory_than_it_has(tmp_path, case):
    """The server sends 4 MiB, and says that they are 100 tensors of 4 MiB."""
    method, entry, starts, words = BOMBS[case]
    make, peaks = partial(make_client, method), []
    grid = grid_of(make, tmp_path)
    honest = grid.app

    def app(message, context):
        if message.metadata.message_type != "train":
            return honest(message, context)
        content = message.content
        vectors = [[f"w{place}", ["t", "float32", [MIB - 100], start]] for place, start in enumerate(starts)]
        for client in context.node_config["clients"].split():
            record = content[f"record/{client}/payload"]
            tree = json.loads(record["tree"])
            kept = [pair for pair in tree[1] if pair[0] != entry]
            record["tree"] = json.dumps(["d", [*kept, [entry, ["d", vectors]]]])
        data = content["tensors"]["tensors"].data.ljust(4 * MIB, b"\0")
        content["tensors"] = ArrayRecord({"tensors": Array("uint8", (len(data),), STYPE, data)})
        tracemalloc.start()
        try:
            return honest(message, context)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    grid.app = app
    with pytest.warns(UserWarning, match=f"round 1: client 0 is left out of the aggregation: .*{words}"):
        run = deploy(grid, make, max_rounds=1)
    assert run.rows[0]["clients_refused"] == 4
    # no tensor was made; the rest is the site's own work
    assert len(peaks) == 2 and max(peaks) < 3 * MIB


def test_tensors_of_the_same_bytes_share_their_memory():
    """As where a server sends one initial model for each of 100 clients."""
    content = pack({"payload": {"models": [{"w": torch.ones(MIB)} for _ in range(100)]}})
    tracemalloc.start()
    record = unpack_as_sent(content, "payload", lambda outline: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(record["models"]) == 100 and all(torch.equal(part["w"], torch.ones(MIB)) for part in record["models"])
    assert peak < 5 * MIB


def test_what_pack_writes_is_read_again():
    """Tensors of the same bytes may have other types, and empty ones lie anywhere."""
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(16, dtype=torch.bool)]
    record = {"a": [torch.empty(0), *zeros, torch.empty(0, 3)], "b": {"n": torch.tensor(7), "last": torch.arange(5)}}
    assert equal(unpack_as_sent(pack({"it": record}), "it", lambda outline: None), record)


def test_a_truth_value_is_0_or_1():
    content = RecordDict({"record/it": ConfigRecord({"tree": '["t","bool",[2],0]'})})
    content["tensors"] = ArrayRecord({"tensors": Array("uint8", (2,), STYPE, b"\1\2")})
    with pytest.raises(Refused, match="a truth value is neither 0 nor 1"):
        unpack_as_sent(content, "it", lambda outline: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("net.classifier.bias"), "payload.weights has no entry 'net.classifier.bias'"),
        (lambda weights: weights.update(more=torch.ones(2)), "payload.weights has an entry 'more', which isn't wanted"),
        (
            lambda weights: weights.update({"net.classifier.bias": torch.ones(9)}),
            r"net.classifier.bias is float32 \[9\] and should be float32 \[3\]",
        ),
        (
            lambda weights: weights.update({"net.classifier.bias": torch.ones(3, dtype=torch.int64)}),
            r"net.classifier.bias is int64 \[3\] and should be float32 \[3\]",
        ),
        (lambda weights: weights.update({"net.classifier.bias": 1.0}), "is float and should be float32"),
    ],
)
def test_a_payload_of_another_model_is_refused_in_a_sentence(tmp_path, change, words):
    make = partial(make_client, net=noisy)
    grid = grid_of(make, tmp_path)
    honest = grid.app

    def app(message, context):
        if message.metadata.message_type == "train" and context.node_id == 12:
            rewrite(message.content, lambda records: change(records["1/payload"]["weights"]))
        return honest(message, context)

    grid.app = app
    with pytest.warns(UserWarning, match=f"client 1 is left out of the aggregation: .*{words}"):
        run = deploy(grid, make, max_rounds=1)
    assert run.rows[0]["clients"] == 3


def test_a_server_may_send_wider_floats(tmp_path):
    """As one does that computes in float64."""
    settings = {"precision": "64-true", "max_rounds": 2}
    run = deploy(grid_of(make_client, tmp_path, **settings), make_client, **settings)
    assert equal(run.weights, fit(make_client(), **settings).weights)
