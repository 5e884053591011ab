"""The engine that is taken where the choice is left open."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from federations import blobs, fit, make_client, same_end
from pfl_lightning.engines import Auto, ClientState, Job, LocalWork, Processes, Sequential, Vectorised, auto, threads
from pfl_lightning.messages import detached
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.selection import Selection


class Values(FedAvg):
    """Its loss depends on values, so that it can't be vectorised."""

    def loss(self, features, logits, target):
        loss = super().loss(features, logits, target)
        return loss * 2 if loss > 1 else loss


@pytest.fixture
def taken(monkeypatch):
    """The names of the engines that ran rounds, in their order, each once."""
    names = []
    for engine in (Sequential, Processes, Vectorised):

        def spied(self, jobs, run=engine.run):
            name = type(self).__name__
            names.extend([] if name in names else [name])
            return run(self, jobs)

        monkeypatch.setattr(engine, "run", spied)
    return names


def lines(caplog):
    return [line for line in caplog.messages if "engine='auto'" in line]


def test_small_nets_are_vectorised(taken, caplog):
    fit(make_client(), engine="auto")
    assert taken == ["Vectorised"]
    (line,) = lines(caplog)
    assert line.startswith("trainer.engine='auto' takes vectorised: Net is small")


@pytest.mark.parametrize(("workers", "engine"), [(1, "sequential"), (2, "processes")])
@pytest.mark.by_default("1-sequential")
def test_larger_steps_are_for_all_cores(taken, caplog, monkeypatch, workers, engine):
    monkeypatch.setattr(auto, "PARAMETERS", 10)
    runs = [fit(make_client(), engine=e, workers=workers) for e in ("sequential", "auto")]
    assert taken[-1] == engine.title()
    assert lines(caplog) == [
        f"trainer.engine='auto' takes {engine}: a step of Net is enough work for a core, {workers} at a time."
    ]
    assert same_end(*runs)


@pytest.mark.parametrize(("count", "engine"), [(1, "Processes"), (2, "Sequential")])
def test_threads_share_out_the_operations_of_large_nets(taken, caplog, monkeypatch, count, engine):
    monkeypatch.setattr(auto, "PARAMETERS", 10)
    monkeypatch.setattr(threads, "SMALL", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    fit(make_client(), engine="auto", workers=2)
    torch.set_num_threads(before)
    assert taken == [engine]
    assert count == 1 or "a step of Net is enough work for a core, or for several" in lines(caplog)[0]


@pytest.mark.parametrize("limit", ["PARAMETERS", "OUTPUTS_FOR_CORES"])
def test_they_are_those_of_nets_with_many_weights_and_of_nets_that_put_out_much(taken, monkeypatch, limit):
    monkeypatch.setattr(auto, limit, 10)
    fit(make_client(), engine="auto", accelerator="cpu", workers=2)
    assert taken == ["Processes"]


@pytest.mark.parametrize(("limit", "engine"), [("OUTPUTS_FOR_CORES", "Vectorised"), ("OUTPUTS", "Sequential")])
def test_one_core_keeps_nets_vectorised_that_several_would_share_out(taken, monkeypatch, limit, engine):
    monkeypatch.setattr(auto, limit, 10)
    fit(make_client(), engine="auto", accelerator="cpu", workers=1)
    assert taken == [engine]


def test_rounds_of_too_unequal_clients_are_not_vectorised(taken, caplog):
    # a client of twelve batches and three of one: 15 batches in 12 steps
    unequal, cpu = {"val_fraction": 0.0, "test_fraction": 0.0}, {"workers": 1, "accelerator": "cpu"}
    runs = [fit(make_client(), blobs(60, 5, 4, 3, **unequal), engine=e, **cpu) for e in ("sequential", "auto")]
    assert same_end(*runs) and taken == ["Sequential"]
    assert "takes sequential: of a round's 4 clients 1.2 on average take a step together" in lines(caplog)[0]
    assert len(lines(caplog)) == 1


class Recurrent(nn.Module):
    """Reads the numbers of a sample one after another."""

    def __init__(self, input_shape, outputs, kind=nn.LSTM, batch_first=True):
        super().__init__()
        self.rnn, self.head, self.batch_first = kind(1, 4, batch_first=batch_first), nn.Linear(4, outputs), batch_first

    def forward(self, x):
        x = x.unsqueeze(2)
        outputs, _ = self.rnn(x if self.batch_first else x.transpose(0, 1))
        return self.head(outputs[:, -1] if self.batch_first else outputs[-1])


@pytest.mark.parametrize(
    ("kind", "batch_first", "steps", "engine"),
    [
        (nn.LSTM, True, 6, "Vectorised"),
        (nn.LSTM, True, 5, "Sequential"),
        (nn.LSTM, False, 6, "Vectorised"),
        (nn.LSTM, False, 5, "Sequential"),
        (nn.GRU, True, 5, "Vectorised"),
    ],
)
def test_a_long_lstm_is_faster_client_by_client(taken, caplog, monkeypatch, kind, batch_first, steps, engine):
    monkeypatch.setattr(auto, "LSTM_STEPS", steps)
    model = make_client(net=partial(Recurrent, kind=kind, batch_first=batch_first))
    fit(model, blobs(*[10] * 8), engine="auto", workers=1, accelerator="cpu", max_rounds=1)
    assert taken == [engine]
    (line,) = lines(caplog)
    assert ("an LSTM of 6 steps of time" in line) == (engine == "Sequential")


@pytest.mark.parametrize(("clients", "engine"), [(5, "Sequential"), (6, "Vectorised")])
def test_an_lstm_needs_as_many_clients_as_steps_of_time(taken, caplog, clients, engine):
    fit(make_client(net=Recurrent), blobs(*[10] * clients), engine="auto", workers=1, accelerator="cpu", max_rounds=1)
    assert taken == [engine]
    assert "6 clients a step" in lines(caplog)[0]


@pytest.mark.parametrize(
    ("sizes", "settings", "smallest", "expected"),
    [
        ((30, 30, 30), {}, 1, 3.0),
        # three of four batches are full, and the rest is of one size or of two
        ((20, 15), {}, 1, 2.0),
        ((20, 15), {}, 2, 4 / 3),
        ((20, 11), {}, 2, 3 / 2),
        ((20, 0, 5), {}, 1, 3 / 2),
        ((0, 0), {}, 1, 0.0),
        ((20, 15, 5), {"last_batch": "drop"}, 2, 4 / 3),
        ((20, 15, 5), {"last_batch": "wrap"}, 2, 5 / 2),
        ((100, 10, 10), {"limit": 2}, 1, 4 / 2),
        ((100, 10, 10), {"limit": 0.1}, 1, 3.0),
        ((100, 10, 0), {"epochs": None, "steps": 5}, 1, 2.0),
    ],
)
def test_clients_of_a_step(sizes, settings, smallest, expected):
    work = LocalWork(**{"batch_size": 10, **settings})
    assert auto.clients_a_step(np.array(sizes), work, smallest) == pytest.approx(expected)


def test_cores_are_counted_where_nobody_says(taken, monkeypatch):
    monkeypatch.setattr(auto, "cores", lambda: 1)
    monkeypatch.setattr(auto, "PARAMETERS", 10)
    fit(make_client(), engine="auto", accelerator="cpu")
    assert taken == ["Sequential"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.by_default("1")
def test_a_method_that_cannot_be_vectorised_falls_back_with_the_same_result(caplog, workers):
    runs = [fit(make_client(Values), engine=e, workers=workers) for e in (Sequential, Auto)]
    assert same_end(*runs)
    (line,) = lines(caplog)
    assert f"takes {['sequential', 'processes'][workers - 1]}: Values can't be vectorised (vmap" in line


@pytest.mark.parametrize("settings", [{"evaluate": "both", "test_every_round": True}, {"num_sanity_val_steps": -1}])
def test_the_choice_is_said_once(settings, caplog):
    fit(make_client(), engine="auto", **settings)
    assert [line.split(":")[0] for line in lines(caplog)] == ["trainer.engine='auto' takes vectorised"]


@pytest.mark.parametrize("first", [4, 1])
def test_rounds_of_two_engines_are_told_in_one_line(first, taken, caplog):
    class Alternating(Selection):
        def choose(self, start):
            return list(start.clients)[: 5 - first if start.round % 2 else first]

    data = blobs(*[20] * 4, val_fraction=0.0, test_fraction=0.0)
    fit(make_client(), data, engine="auto", max_rounds=3, cohort=Alternating(), workers=1, accelerator="cpu")
    assert sorted(taken) == ["Sequential", "Vectorised"]
    (line,) = lines(caplog)
    assert f"takes {taken[0].lower()}:" in line and "3 clients a step" in line
    assert first == 4 or "and vectorised" in line


@pytest.mark.parametrize(("batch_size", "engine"), [(10, Vectorised), (1000, Sequential)])
def test_on_a_device_it_is_vectorised_unless_a_batch_fills_it(monkeypatch, batch_size, engine):
    monkeypatch.setattr(auto, "FILLING", 1000)
    data = blobs()
    data.setup()
    # a device that counts as one, and needs none
    model = make_client().to("meta")
    one = Auto(model, LocalWork(batch_size=batch_size), Precision())
    job = Job(0, 0, ClientState(), {}, data.client(0), seed=0)
    assert type(one._chosen(job)) is engine
    reason = "a batch of Net fills meta by itself" if engine is Sequential else "many small clients fill meta"
    assert list(one._reasons.values()) == [reason]


def test_clients_are_evaluated_as_they_come(monkeypatch):
    monkeypatch.setattr(auto, "PARAMETERS", 10)
    data = blobs()
    data.setup()
    model = make_client()
    payload = {"weights": detached(model.state_dict())}
    made = []

    def jobs():
        for client in range(4):
            made.append(client)
            yield Job(client, 0, ClientState(), payload, data.client(client), seed=0, evaluate=("train",))

    with torch.no_grad():
        results = Auto(model, LocalWork(), Precision(), workers=1).evaluate_all(jobs())
        assert next(results).clients == [0] and made == [0]
        assert [each.clients for each in results] == [[1], [2], [3]]
