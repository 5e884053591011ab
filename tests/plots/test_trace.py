"""Tracing follows a round and touches nothing."""

import copy
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision

from federations import CLASSES, blobs, equal, make_client, noisy
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.methods import WDR, FedPer, FedProx, Local
from pfl_lightning.methods.cwfedavg import row_distribution
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.plots import trace_distribution

WORK = LocalWork(batch_size=5)


@pytest.fixture(scope="module")
def data():
    module = blobs(by_class=True)
    module.setup()
    return module.client(0)


def everything(client):
    """All that a trace could change in a module."""
    return copy.deepcopy(
        (
            dict(client.named_parameters()),
            dict(client.named_buffers()),
            [(part.training, [p.requires_grad for p in part.parameters()]) for part in client.modules()],
            [p.grad is None for p in client.parameters()],
            {name: getattr(client, name) for name in ("client_id", "round", "steps_done", "learning_rate")},
            sorted(vars(client)),
            client.phase.name,
        )
    )


@pytest.mark.parametrize("method", [FedAvg, WDR, FedProx, FedPer, Local])
def test_a_trace_starts_at_the_given_weights_and_leaves_the_module_alone(method, data):
    client = make_client(method, net=noisy)
    client.client_id, client.round = 2, 4
    client.net.train()
    before = everything(client)
    trace = trace_distribution(client, data, WORK, seed=1)
    assert equal(before, everything(client))
    assert torch.equal(trace[0], row_distribution(client.net.classifier.weight.detach()))
    # BatchNorm takes no batch of one sample, which is what is left of 16
    assert len(data.train) == 16 and trace.shape == (4, CLASSES)
    torch.testing.assert_close(trace.sum(1), torch.ones(len(trace)))
    assert not torch.equal(trace[0], trace[-1])


def test_a_trace_ends_where_the_engine_ends(data):
    client = make_client(WDR, wdr_lambda=1.0)
    trace = trace_distribution(client, data, WORK, seed=1)
    job = Job(0, 0, ClientState(), {"weights": copy.deepcopy(client.net.state_dict(prefix="net."))}, data, 1)
    (outcome,) = Sequential(client, WORK, Precision()).run([job])
    assert torch.equal(trace[-1], row_distribution(outcome.update["weights"]["net.classifier.weight"]))


def test_a_trace_draws_nothing_from_the_random_state(data):
    client = make_client(net=noisy)

    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    first = trace_distribution(client, data, WORK, seed=1)
    assert equal(before, states())
    assert torch.equal(first, trace_distribution(client, data, WORK, seed=1))
    assert not torch.equal(first, trace_distribution(client, data, WORK, seed=2))


def test_factories_that_refuse_copies_are_shared(data):
    class Factory:
        def __call__(self, parameters):
            return torch.optim.SGD(parameters, lr=0.1)

        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    client = make_client(optimizer=torch.optim.SGD)
    client.optimizer = Factory()
    assert len(trace_distribution(client, data, WORK)) > 1


def test_the_regulariser_leads_to_the_class_distribution(data):
    p = data.class_counts / len(data.train)
    work = LocalWork(epochs=10, batch_size=5)
    ends = [trace_distribution(make_client(WDR, wdr_lambda=x), data, work)[-1] for x in (0.0, 2.0)]
    without, held = (float(torch.linalg.vector_norm(p - end)) for end in ends)
    assert held < without / 2
