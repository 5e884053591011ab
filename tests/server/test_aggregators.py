import copy
import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import FEATURES, Spy, blobs, check_order_and_resume, equal, fit, make_client, noisy
from pfl_lightning import Aggregator, AggregatorList, Server, WeightedAverage
from pfl_lightning.aggregators import (
    ClassMeans,
    CriticalAverage,
    CwFedAvg,
    DomainConsensus,
    FedAWA,
    FisherAverage,
    client_weights,
    mean_model,
)
from pfl_lightning.messages import detached, weighted_mean
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.nets import Net
from pfl_lightning.privacy import SecureSum
from pfl_lightning.server.means import CoordinateMedian
from pfl_lightning.server.weighted_average import moved_model


def update(samples, **weights):
    return {
        "weights": {name: torch.tensor(value) for name, value in weights.items()},
        "num_samples": torch.tensor(samples),
    }


def server(weights):
    return Server(num_clients=2, weights=weights, module=None, data=None, seed=0)


class InTurn(WeightedAverage):
    """Its clients train one after another, the last first."""

    def turns(self, clients, round):
        return sorted(clients, reverse=True)


@pytest.mark.parametrize("parts", [(Aggregator, InTurn), (InTurn, Aggregator)])
def test_a_list_has_the_turns_of_the_one_that_has_some(parts):
    assert AggregatorList([part() for part in parts]).turns([0, 2, 1], 3) == [2, 1, 0]
    assert AggregatorList([Aggregator(), WeightedAverage()]).turns([0, 2, 1], 3) is None


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


def test_clients_count_by_their_samples_or_all_alike():
    updates = {1: update(1, w=[2.0]), 4: update(3, w=[6.0])}
    assert client_weights(updates, "samples") == {1: 0.25, 4: 0.75}
    assert client_weights(updates, "uniform") == {1: 0.5, 4: 0.5}
    assert mean_model(updates, {4: 0.75, 1: 0.25})["w"].tolist() == [5.0]


def test_a_model_moves_by_weighted_changes_whatever_their_sum():
    updates, model = {1: update(1, w=[2.0, 0.0]), 4: update(3, w=[6.0, 1.0])}, {"w": torch.tensor([1.0, 1.0])}
    assert moved_model(updates, {1: 0.5, 4: 2.0}, model, ["w"])["w"].tolist() == [11.5, 0.5]
    starts = {1: {"w": torch.tensor([0.0, 2.0])}, 4: {"w": torch.tensor([5.0, 1.0])}}
    assert moved_model(updates, {1: 0.5, 4: 2.0}, model, ["w"], starts)["w"].tolist() == [4.0, 0.0]


def test_clients_that_count_alike_are_not_asked_for_their_samples():
    alike = WeightedAverage(weighting="uniform")
    alike.setup(server({"w": torch.zeros(1)}))
    alike.aggregate({0: {"weights": {"w": torch.ones(1)}}, 3: {"weights": {"w": torch.zeros(1)}}}, round=0)
    assert alike.global_model()["w"].tolist() == [0.5] and alike.state["shares"] == {0: 0.5, 3: 0.5}
    assert alike.needs == {"weights"} and WeightedAverage().needs == {"weights", "num_samples"}


def test_weightings_give_different_means():
    averages = [WeightedAverage(), WeightedAverage(1.0, "samples"), WeightedAverage(weighting="uniform")]
    by_samples, the_same, alike = (fit(make_client(net=noisy), aggregator=each).weights for each in averages)
    assert equal(by_samples, the_same) and not equal(by_samples, alike)


def test_a_full_step_is_the_mean_bit_for_bit_wherever_the_model_was(average):
    updates = {0: update(30, w=[0.1, math.pi]), 5: update(11, w=[-7.3, 1e-8])}
    average.state["weights"] = {"w": torch.tensor([1e30, -0.7])}
    average.aggregate(updates, round=0)
    assert equal(average.global_model(), mean_model(updates, client_weights(updates, "samples")))


@pytest.mark.parametrize("server_lr", [0.5, 1.0, 2.0])
def test_parameters_take_the_step_and_running_statistics_do_not(server_lr):
    spy, aggregator = Spy(), WeightedAverage(server_lr, "uniform")
    run = fit(make_client(net=noisy), aggregator=aggregator, max_rounds=1, callbacks=[spy])
    start = make_client(net=noisy).state_dict()
    mean = weighted_mean([update["weights"] for update in spy.updates[0].values()], [0.25] * 4)
    for name, tensor in run.weights.items():
        way = server_lr if name in dict(run.model.named_parameters()) else 1.0
        expected = start[name] + way * (mean[name] - start[name])
        torch.testing.assert_close(tensor, expected.to(tensor.dtype))


def test_a_step_towards_nobody_s_updates_is_none():
    aggregator = WeightedAverage(1.5, "uniform")
    fit(make_client(), aggregator=aggregator)
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=3) == {}
    assert equal(aggregator.state, before)


def test_a_step_is_taken_where_clients_share_a_part():
    runs = [fit(make_client(FedPer), aggregator=WeightedAverage(server_lr)) for server_lr in (1.0, 1.5)]
    assert not equal(*(run.weights for run in runs))


@pytest.mark.parametrize("cls", [WeightedAverage, FedAWA])
def test_gamma_multiplies_all_floating_entries_and_no_counter(cls):
    whole, shrunk = (fit(make_client(net=noisy), aggregator=cls(gamma=gamma), max_rounds=1) for gamma in (1.0, 0.75))
    kinds = set()
    for name, tensor in whole.weights.items():
        kinds.add((name in dict(whole.model.named_parameters()), tensor.is_floating_point()))
        expected = 0.75 * tensor if tensor.is_floating_point() else tensor
        torch.testing.assert_close(shrunk.weights[name], expected, rtol=1e-6, atol=0)
    # parameters, running statistics and a counter
    assert kinds == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("cls", [WeightedAverage, FedAWA])
def test_with_gamma_1_no_bit_changes(cls):
    plain, off = (fit(make_client(net=noisy), aggregator=each) for each in (cls(), cls(gamma=1.0)))
    assert equal(plain.weights, off.weights)
    assert equal(plain.federation.aggregator.state, off.federation.aggregator.state)


def test_gamma_multiplies_the_mean_before_the_step_of_the_server():
    moved = WeightedAverage(0.5, gamma=0.5)
    moved.setup(Server(2, {"weight": torch.tensor([[8.0]])}, nn.Linear(1, 1, bias=False), data=None, seed=0))
    moved.aggregate({0: update(30, weight=[[2.0]]), 5: update(10, weight=[[6.0]])}, round=0)
    # the mean is 3, half of it 1.5, and half of the way from 8 to there ends at 4.75
    assert moved.global_model()["weight"].tolist() == [[4.75]] and moved.state["shares"] == {0: 0.75, 5: 0.25}


def test_gamma_multiplies_the_result_of_a_rule_and_no_upload():
    shrunk = WeightedAverage(mean=CoordinateMedian(), gamma=0.5)
    shrunk.setup(Server(3, {"weight": torch.zeros(1, 2)}, nn.Linear(2, 1, bias=False), data=None, seed=0))
    sent = ([[1.0, 2.0]], [[4.0, 8.0]], [[100.0, -100.0]])
    updates = {client: update(1, weight=weight) for client, weight in enumerate(sent)}
    before = detached(updates)
    shrunk.aggregate(updates, round=0)
    assert shrunk.global_model()["weight"].tolist() == [[2.0, 1.0]] and equal(updates, before)


class Shrunk(FedAvg):
    def configure_aggregator(self):
        return WeightedAverage(gamma=0.8)


def test_gamma_shrinks_each_round_in_any_engine_and_behind_a_sum(tmp_path):
    def run(cls=Shrunk, **settings):
        return fit(make_client(cls), max_rounds=2, **settings).weights

    one, whole = run(), run(FedAvg)
    for other in (run(engine="vectorised"), run(secure_sum=SecureSum(bits=30))):
        assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-4
    assert max(float((one[name] - whole[name]).abs().max()) for name in one) > 0.05
    check_order_and_resume(Shrunk, tmp_path)


def test_a_server_with_a_rule_of_its_own_refuses_gamma_until_it_says_otherwise():
    class Mine(WeightedAverage):
        pass

    class Declared(WeightedAverage):
        takes_gamma = True

    for own in (FisherAverage, CriticalAverage):
        with pytest.raises(MisconfigurationException, match=rf"aggregator.gamma=0.9: {own.__name__} combines"):
            own(gamma=0.9)
        assert own(gamma=1.0).gamma == 1
    with pytest.raises(MisconfigurationException, match=r"gamma=0.9: Mine .* takes_gamma = True"):
        Mine(gamma=0.9)
    assert Declared(gamma=0.9).gamma == 0.9
    assert DomainConsensus(gamma=0.9).gamma == 0.9


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": -0.5}, "gamma=-0.5"),
        ({"gamma": 1.01}, "gamma=1.01"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"server_lr": 0}, "server_lr=0"),
        ({"server_lr": -1}, "server_lr=-1"),
        ({"weighting": "size"}, "weighting='size'"),
    ],
)
def test_settings_of_the_average_are_refused_by_name(settings, named):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{named} must be"):
        WeightedAverage(**settings)


def test_a_list_s_state_is_that_of_its_parts_and_reaches_them_again():
    def together():
        made = AggregatorList([WeightedAverage(), ClassMeans(weighted=False)])
        made.aggregators[0].setup(server({"w": torch.zeros(2)}))
        made.aggregators[1].setup(server({}))
        return made

    one, other = together(), together()
    one.aggregate({0: update(30, w=[1.0, 2.0]) | {"prototypes": {2: torch.ones(3)}}}, round=0)
    other.state = one.state
    assert other.state == one.state and other.aggregators[0].state is one.aggregators[0].state
    assert equal(other.download(0), one.download(0))


def test_a_list_may_have_its_parts_before_or_after_its_state():
    class Late(AggregatorList):
        def __init__(self):
            Aggregator.__init__(self)
            self.aggregators = [Aggregator()]

    class Early(AggregatorList):
        def __init__(self):
            self.aggregators = [Aggregator()]
            Aggregator.__init__(self)

    assert Late().state == Early().state == {"0": {}}


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
