"""Clients whose samples are read a batch at a time."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, FEATURES, equal, fit, known_by_place, make_client, near, plain, untimed
from pfl_lightning.data import Natural, TensorData
from pfl_lightning.data.samples import Samples
from pfl_lightning.data.streamed import Streamed
from pfl_lightning.methods import Ditto, FedAvg, PACClient
from pfl_lightning.tasks import Classification

SIZE, BATCH = 30, 4


class Leaf:
    """Inputs in a file, as it were, that notes how many are read at once."""

    def __init__(self):
        self.values = np.random.default_rng(0).normal(size=(4 * SIZE, FEATURES)).astype(np.float32)
        self.most = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        self.most = max(self.most, len(rows))
        return self.values[rows]


def data(resident, leaf):
    y = torch.arange(4 * SIZE) % CLASSES
    owners = np.arange(4 * SIZE) // SIZE
    settings = {"client": owners, "input_shape": (FEATURES,), "partitioner": Natural(), "batch_size": BATCH}
    return TensorData(leaf, y, Classification(CLASSES), resident=resident, **settings)


@pytest.mark.parametrize("engine", ["sequential", "processes", "auto"])
@pytest.mark.parametrize("method", [FedAvg, Ditto, PACClient])
@pytest.mark.by_default("FedAvg-auto", "Ditto-processes", "PACClient-sequential")
def test_the_numbers_are_those_of_clients_in_memory(method, engine, monkeypatch):
    monkeypatch.setattr("pfl_lightning.data.samples.CHUNK", BATCH)
    runs = [
        fit(make_client(method, net=plain), data(resident, Leaf()), engine=engine_of)
        for resident, engine_of in ((True, "sequential"), (False, engine))
    ]
    memory, streamed = runs
    assert equal(known_by_place(memory), known_by_place(streamed))
    # up to rounding: clients in memory with the same model are evaluated in one pass
    assert near(untimed(memory.rows), untimed(streamed.rows))


def test_no_more_is_read_at_once_than_goes_through_the_net():
    whole, parts = Leaf(), Leaf()
    for resident, leaf in ((True, whole), (False, parts)):
        fit(make_client(net=plain), data(resident, leaf), limit_val_batches=0, local_steps=7)
    assert whole.most > BATCH
    # evaluation has chunks of its own, of which a client here has one per split
    assert parts.most <= 8


def test_it_has_what_samples_have():
    pool = Samples(torch.arange(10.0)[:, None], torch.arange(10))
    whole = pool.take(torch.tensor([7, 2, 2, 9, 4]))
    streamed = Streamed(pool, torch.tensor([7, 2, 2, 9, 4]), lambda x: x + 1).to("cpu", torch.float64)
    assert len(streamed) == 5 and streamed.x.dtype == torch.float64
    assert torch.equal(streamed.x.float(), whole.x + 1) and torch.equal(streamed.y, whole.y)
    some = streamed.take(torch.tensor([4, 0])).take(slice(1))
    assert (some.x.tolist(), some.y.tolist()) == ([[5.0]], [4])
    assert [(len(x), len(y)) for x, y in streamed.chunks(2)] == [(2, 2), (2, 2), (1, 1)]
    assert torch.equal(torch.cat([x for x, _ in streamed.chunks(2)]), streamed.x)


def test_the_vectorised_engine_is_refused():
    with pytest.raises(MisconfigurationException, match=r"data\.resident=false reads clients a batch at a time"):
        fit(make_client(net=plain), data(False, Leaf()), engine="vectorised")


def test_a_run_goes_on_with_clients_read_otherwise(tmp_path):
    whole = fit(make_client(net=plain), data(True, Leaf()))
    fit(make_client(net=plain), data(True, Leaf()), tmp_path, max_rounds=2)
    resumed = fit(make_client(net=plain), data(False, Leaf()), tmp_path, ckpt_path="last")
    assert equal(known_by_place(whole), known_by_place(resumed))
