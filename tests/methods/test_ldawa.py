import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import FEATURES, HIDDEN, Shuffled, Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import WDR, FedAvg, FedPer, FedProx, Local
from pfl_lightning.methods.ldawa import LDAWA
from pfl_lightning.nets import Net

BODY, BIAS, HEAD = "net.features.0.weight", "net.features.0.bias", "net.classifier.weight"
MEAN, COUNTER = "net.features.1.running_mean", "net.features.1.num_batches_tracked"


def server(warmup=0, net=noisy, weights=None, **settings):
    """An aggregator of a model in float64, with other weights than the net's where they are given."""
    module = make_client(net=net).double()
    initial = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    aggregator = LDAWA(warmup, **settings)
    aggregator.setup(Server(5, initial | (weights or {}), module, None, seed=0))
    return aggregator


def uploads(aggregator, clients=3, **fixed):
    """Models that differ from the global one and from each other, at clients 2, 4, ..."""
    generator = torch.Generator().manual_seed(1)
    updates = {}
    for client in range(clients):
        weights = {
            name: tensor + 0.7 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if tensor.is_floating_point()
            else tensor + client
            for name, tensor in aggregator.state["weights"].items()
        }
        updates[2 + 2 * client] = {"weights": weights, "num_samples": torch.tensor(10 + 7 * client)}
    return updates


def of(updates, name):
    return [update["weights"][name] for update in updates.values()]


def cos(one, other):
    product = float(one.norm() * other.norm())
    return float((one * other).sum()) / product if product else 1.0


def by_the_paper(updates, before, name):
    """Tensors of the clients, each times its cosine with the global one, over the number of clients."""
    tensors = of(updates, name)
    return sum(min(1.0, cos(tensor, before[name])) * tensor for tensor in tensors) / len(tensors)


@pytest.mark.parametrize("tensors", ["parameters", "all"])
def test_each_tensor_follows_the_formula_and_buffers_do_where_asked(tensors):
    aggregator = server(tensors=tensors, weights={MEAN: torch.linspace(-1, 2, HIDDEN, dtype=torch.float64)})
    before, updates = aggregator.global_model(), uploads(aggregator)
    aggregator.aggregate(updates, round=0)
    after = aggregator.global_model()
    parameters = dict(make_client(net=noisy).named_parameters())
    assert len(parameters) == 6 and set(after) == set(before)
    for name in after:
        if name in parameters or (tensors == "all" and name == MEAN):
            assert torch.allclose(after[name], by_the_paper(updates, before, name), rtol=0, atol=1e-12)
        elif name == COUNTER:
            assert after[name] == max(of(updates, name)) and after[name].dtype == torch.int64
        elif tensors == "parameters":
            assert torch.allclose(after[name], sum(of(updates, name)) / 3, rtol=0, atol=1e-12)
    plain = sum(of(updates, MEAN)) / 3
    assert torch.allclose(after[MEAN], plain) == (tensors == "parameters")


def test_every_model_where_the_global_one_is_leaves_it_there():
    aggregator = server()
    before = aggregator.global_model()
    for clients in (1, 2, 3, 5):
        updates = {k: {"weights": before, "num_samples": torch.tensor(k + 1)} for k in range(clients)}
        assert aggregator.aggregate(updates, round=0) == {"cosine": 1.0}
        for name, tensor in aggregator.global_model().items():
            torch.testing.assert_close(tensor, before[name], rtol=1e-15, atol=0)


def test_an_orthogonal_layer_adds_nothing_and_a_turned_one_counts_negatively():
    before = torch.zeros(HIDDEN, FEATURES, dtype=torch.float64)
    before[0, 0] = 3.0
    aggregator = server(weights={BODY: before})
    updates = uploads(aggregator, clients=2)
    orthogonal, turned = torch.zeros_like(before), -2 * before
    orthogonal[1, 1] = 5.0
    updates[2]["weights"][BODY], updates[4]["weights"][BODY] = orthogonal, turned
    aggregator.aggregate(updates, round=0)
    # half of minus the turned layer: not renormalised either
    assert torch.equal(aggregator.global_model()[BODY], before)


def test_the_model_is_no_longer_than_its_clients_models_are_on_average():
    aggregator = server(net=noisy)
    updates = uploads(aggregator, clients=5)
    aggregator.aggregate(updates, round=0)
    for name, _ in make_client(net=noisy).named_parameters():
        mean = sum(float(tensor.norm()) for tensor in of(updates, name)) / 5
        assert float(aggregator.global_model()[name].norm()) < mean


@pytest.mark.parametrize("zero", ["global", "client"])
def test_a_zero_tensor_counts_as_if_it_had_not_turned(zero):
    weights = {BIAS: torch.zeros(HIDDEN, dtype=torch.float64)} if zero == "global" else {}
    aggregator = server(weights=weights)
    updates = uploads(aggregator)
    if zero == "client":
        updates[4]["weights"][BIAS] = torch.zeros(HIDDEN, dtype=torch.float64)
        first, _, last = of(updates, BIAS)
        cosines = [cos(tensor, aggregator.global_model()[BIAS]) for tensor in (first, last)]
        expected = (cosines[0] * first + cosines[1] * last) / 3
    else:
        expected = sum(of(updates, BIAS)) / 3
    aggregator.aggregate(updates, round=0)
    assert torch.allclose(aggregator.global_model()[BIAS], expected, rtol=0, atol=1e-12)


def test_shares_are_the_mean_cosines_over_the_number_of_clients():
    aggregator = server()
    before, updates = aggregator.global_model(), uploads(aggregator)
    logs = aggregator.aggregate(updates, round=0)
    means = {}
    for client, update in updates.items():
        cosines = [min(1, cos(update["weights"][name], before[name])) for name in aggregator.names]
        means[client] = sum(cosines) / 6
    assert aggregator.state["shares"] == pytest.approx({client: value / 3 for client, value in means.items()}, abs=1e-9)
    assert logs["cosine"] == pytest.approx(sum(means.values()) / 3, abs=1e-9)


def test_it_warms_up_as_fedavg_bit_for_bit():
    spy = Spy()
    average = {rounds: fit(make_client(net=noisy), max_rounds=rounds) for rounds in (3, 4)}
    ours = {
        rounds: fit(make_client(net=noisy), aggregator=LDAWA(), max_rounds=rounds, callbacks=[spy]) for rounds in (3, 4)
    }
    assert equal(ours[3].weights, average[3].weights) and not equal(ours[4].weights, average[4].weights)
    assert equal(ours[3].federation.aggregator.state, average[3].federation.aggregator.state)
    assert len(ours[4].rows) == 4 and all(0 < row["server/cosine"] <= 1 for row in ours[4].rows)
    # the angle is to the model before the round, not to the initial one or the new mean
    for name in (BODY, HEAD):
        expected = by_the_paper(spy.updates[-1], average[3].weights, name)
        torch.testing.assert_close(ours[4].weights[name], expected, rtol=0, atol=1e-6)


def test_without_warm_up_the_first_round_is_weighted():
    weighted, average = (fit(make_client(), aggregator=a, max_rounds=1) for a in (LDAWA(0), WeightedAverage()))
    assert not equal(weighted.weights, average.weights)


def test_samples_count_only_in_the_warm_up():
    for warmup in (0, 1):
        aggregators = server(warmup), server(warmup)
        for aggregator, factor in zip(aggregators, (1, 5), strict=True):
            updates = uploads(aggregator)
            updates[4]["num_samples"] *= factor
            aggregator.aggregate(updates, round=0)
        assert equal(*(aggregator.global_model() for aggregator in aggregators)) == (warmup == 0)


def test_nobody_takes_part():
    aggregator = server()
    aggregator.aggregate(uploads(aggregator), round=0)
    before = dict(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(before, aggregator.state)


def test_the_order_of_uploads_changes_nothing():
    runs = [fit(make_client(), aggregator=LDAWA(1), engine=engine) for engine in ("sequential", Shuffled)]
    assert equal(*(run.federation.federation_state() for run in runs))


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.exhaustive
def test_partial_participation_resumes_bit_for_bit_within_and_after_the_warm_up(tmp_path, cut):
    def run(root, rounds, ckpt_path=None):
        settings = {"max_rounds": rounds, "clients_per_round": 0.5, "ckpt_path": ckpt_path}
        return fit(make_client(net=noisy), None, root, LDAWA(2), **settings)

    whole = run(tmp_path / "whole", 5)
    assert same_end(whole, run(tmp_path / "half", 5, run(tmp_path / "half", cut).last))


@pytest.mark.parametrize(("method", "settings"), [(FedProx, {"mu": 0.1}), (WDR, {}), (FedPer, {})])
def test_other_clients_under_it(method, settings):
    spy = Spy()
    client, other = (make_client(method, net=noisy, **settings) for _ in range(2))
    ours = fit(client, aggregator=LDAWA(0), max_rounds=1, callbacks=[spy])
    assert not equal(ours.weights, fit(other, aggregator=WeightedAverage(), max_rounds=1).weights)
    expected = by_the_paper(spy.updates[0], make_client(net=noisy).state_dict(), BODY)
    torch.testing.assert_close(ours.weights[BODY], expected, rtol=0, atol=1e-6)


def test_one_client_keeps_what_points_the_same_way():
    assert fit(make_client(), blobs(40), aggregator=LDAWA(0)).rows[-1]["clients"] == 1
    aggregator = server()
    double = {name: 2 * tensor for name, tensor in aggregator.global_model().items()}
    aggregator.aggregate({7: {"weights": double, "num_samples": torch.tensor(3)}}, round=0)
    for name, tensor in aggregator.global_model().items():
        torch.testing.assert_close(tensor, double[name], rtol=1e-15, atol=0)


def test_tied_weights_stay_tied():
    def tied(shape, classes):
        first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        second.weight = first.weight
        return Net(nn.Sequential(first, nn.Tanh(), second), nn.Linear(FEATURES, classes))

    weights = fit(make_client(net=tied), aggregator=LDAWA(0)).federation.aggregator.global_model()
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])


def test_half_precision_models_stay_so():
    module = make_client().to(torch.bfloat16)
    aggregator = LDAWA(0)
    aggregator.setup(Server(2, {n: t.detach().clone() for n, t in module.state_dict().items()}, module, None, seed=0))
    before, updates = aggregator.global_model(), uploads(aggregator)
    aggregator.aggregate(updates, round=0)
    double = [{name: tensor.double() for name, tensor in u["weights"].items()} for u in updates.values()]
    cosines = [min(1, cos(model[BODY], before[BODY].double())) for model in double]
    expected = weighted_mean(double, [value / 3 for value in cosines])[BODY]
    assert aggregator.global_model()[BODY].dtype == torch.bfloat16
    torch.testing.assert_close(aggregator.global_model()[BODY].double(), expected, rtol=2**-7, atol=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.warmup=-1 must be"):
        LDAWA(warmup=-1)
    with pytest.raises(MisconfigurationException, match="LDAWA needs num_samples and weights, which Local"):
        fit(make_client(Local), aggregator=LDAWA())
    assert isinstance(make_client(FedAvg).configure_aggregator(), WeightedAverage)
