import pytest
import torch
from torch import nn

from federations import FEATURES, Spy, blobs, equal, fit, make_client, noisy
from pfl_lightning import Aggregator, AggregatorList, Server, WeightedAverage
from pfl_lightning.messages import detached
from pfl_lightning.methods import CwFedAvg, FedPer
from pfl_lightning.nets import Net


def update(samples, **weights):
    return {
        "weights": {name: torch.tensor(value) for name, value in weights.items()},
        "num_samples": torch.tensor(samples),
    }


def server(weights):
    return Server(num_clients=2, weights=weights, module=None, data=None, seed=0)


@pytest.fixture
def average():
    aggregator = WeightedAverage()
    aggregator.setup(server({"w": torch.zeros(2)}))
    return aggregator


def test_weighted_average_by_hand(average):
    average.aggregate({0: update(30, w=[1.0, 2.0]), 5: update(10, w=[5.0, -2.0])}, round=0)
    assert average.download(3)["weights"]["w"].tolist() == [2.0, 1.0]
    assert average.global_model()["w"].tolist() == [2.0, 1.0]


def test_one_client_s_model_is_the_average_of_one(average):
    alone = update(7, w=[0.1, 0.7])
    average.aggregate({2: alone}, round=0)
    assert equal(average.download(0)["weights"], alone["weights"])


def test_nobody_s_updates_leave_the_model_alone(average):
    average.aggregate({1: update(3, w=[1.0, 1.0])}, round=0)
    before = detached(average.state)
    assert average.aggregate({}, round=1) == {}
    assert equal(before, average.state)


def test_averaging_changes_no_upload(average):
    updates = {0: update(1, w=[1.0, 2.0]), 1: update(1, w=[3.0, 4.0])}
    before = detached(updates)
    average.aggregate(updates, round=0)
    average.aggregate(updates, round=1)
    assert equal(before, updates)


def test_the_base_class_sends_nothing_and_has_no_model():
    aggregator = Aggregator()
    aggregator.setup(server({}))
    assert aggregator.aggregate({}, 0) == aggregator.download(0) == aggregator.global_model() == aggregator.state == {}


def test_shared_running_statistics_are_averaged_and_their_counters_take_the_maximum():
    spy = Spy()
    run = fit(make_client(net=noisy), blobs(32, 15), max_rounds=1, callbacks=[spy])
    uploads = [u["weights"] for u in spy.updates[0].values()]
    counter = "net.features.1.num_batches_tracked"
    assert run.weights[counter] == max(u[counter] for u in uploads) != min(u[counter] for u in uploads)
    shares = torch.tensor([float(u["num_samples"]) for u in spy.updates[0].values()])
    mean = "net.features.1.running_mean"
    expected = (torch.stack([u[mean] for u in uploads]) * (shares / shares.sum())[:, None]).sum(0)
    torch.testing.assert_close(run.weights[mean], expected)


def test_local_running_statistics_stay_with_their_clients():
    run = fit(make_client(net=noisy, buffers="local"), max_rounds=1)
    name = "net.features.1.running_mean"
    means = [state.personal[name] for state in run.federation.clients.values()]
    assert not equal(means[0], means[1])
    assert equal(run.weights[name], torch.zeros(5))


def test_the_first_of_a_kind_is_found_alone_and_among_others():
    average, other = WeightedAverage(), Aggregator()
    assert average.find(WeightedAverage) is average.find(Aggregator) is average
    assert average.find(CwFedAvg) is other.find(WeightedAverage) is None
    together = AggregatorList([other, AggregatorList([Aggregator(), average])])
    assert together.find(WeightedAverage) is average and together.find(CwFedAvg) is None
    assert together.find(AggregatorList) is together


def test_a_server_names_the_parameters_that_clients_share():
    def tied(shape, classes):
        first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)
        second.weight = first.weight
        return Net(nn.Sequential(first, nn.BatchNorm1d(FEATURES), second), nn.Linear(FEATURES, classes))

    module = make_client(FedPer, net=tied)
    weights = {name: tensor for name, tensor in module.state_dict().items() if module.is_shared(name)}
    shared = Server(2, weights, module, None, seed=0)
    names = [f"net.features.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")]
    assert shared.parameter_names(remove_duplicate=False) == names
    assert shared.parameter_names() == names[:-1]
