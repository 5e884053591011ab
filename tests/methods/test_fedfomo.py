import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.func import functional_call
from torch.nn import functional as F

from federations import (
    Shuffled,
    Spy,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    noisy,
    plain,
    same_end,
)
from pfl_lightning import Server
from pfl_lightning.messages import detached, num_bytes, weighted_mean
from pfl_lightning.methods import Local
from pfl_lightning.methods.fedfomo import AffinityPool, FedFomo


def net_of(run, client, part="net."):
    return {n.removeprefix(part): t for n, t in run.federation.clients[client].personal.items() if n.startswith(part)}


def losses(run):
    return [row["val/loss"] for row in run.rows]


def model_of(seed, net=plain, scale=1):
    """A model as clients send it; a large scale makes it a bad one."""
    net = make_client(seed=seed, net=net).double().net
    with torch.no_grad():
        net.classifier.weight.mul_(scale)
    return {f"net.{name}": tensor for name, tensor in net.state_dict().items()}


def client(seeds=(1, 2), net=plain, **settings):
    """A client with an own model and a model that it started from, and its data."""
    model = make_client(partial(FedFomo, **settings), net=net).double().eval()
    model.assign(model_of(seeds[0], net))
    model.old.load_state_dict({n.removeprefix("net."): t for n, t in model_of(seeds[1], net, scale=3).items()})
    data = blobs()
    data.setup()
    return model, data.client(0).to("cpu", torch.float64)


def receive(model, models, data):
    with torch.no_grad():
        model.on_download({"models": models}, data)


def by_hand(model, models, part, order=2):
    """Delta_m by client, of the received models and of client 0's own."""
    parameters = [f"net.{name}" for name, _ in model.net.named_parameters()]

    def loss(weights):
        return float(F.cross_entropy(functional_call(model, weights, (part.x,)), part.y))

    def vector(weights):
        return torch.cat([weights[name].flatten() for name in parameters])

    old = {f"net.{name}": tensor for name, tensor in detached(model.old.state_dict()).items()}
    own = {f"net.{name}": tensor for name, tensor in detached(model.net.state_dict()).items()}
    return {
        m: (loss(old) - loss(weights)) / (float((vector(weights) - vector(old)).norm(p=order)) + 1e-5)
        for m, weights in sorted({0: own, **models}.items())
    }, {0: own, **models}


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.parametrize(("norm", "order"), [("l2", 2), ("l1", 1)])
def test_the_mix_by_hand(net, norm, order):
    model, data = client(net=net, norm=norm)
    models = {m: model_of(m + 10, net, scale=m) for m in range(1, 6)}
    deltas, candidates = by_hand(model, models, data.val, order)
    receive(model, models, data)
    positive = {m: delta for m, delta in deltas.items() if delta > 0}
    assert 1 < len(positive) < 6, "choose other seeds: all or none are helpful"
    mix = weighted_mean([candidates[m] for m in positive], [d / sum(positive.values()) for d in positive.values()])
    for name, tensor in model.net.state_dict().items():
        torch.testing.assert_close(tensor, mix[f"net.{name}"], rtol=0, atol=1e-12)
    sent = model.upload(data)["affinity"]
    assert {m: float(gain) for m, gain in sent.items()} == pytest.approx(deltas, rel=1e-6)
    # from here its next training starts
    assert equal(dict(model.old.state_dict()), dict(model.net.state_dict()))


def test_weights_are_at_least_0_and_sum_to_1_or_there_are_none(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "pfl_lightning.methods.fedfomo.weighted_mean", lambda s, a: (seen.append(a), weighted_mean(s, a))[1]
    )
    fit(make_client(FedFomo), max_rounds=4)
    assert all(min(weights) > 0 and sum(weights) == pytest.approx(1) for weights in seen)
    assert any(len(weights) > 1 for weights in seen)


@pytest.mark.exhaustive
def test_where_none_helps_the_own_model_stays_bit_for_bit():
    model, data = client(net=noisy, weigh_on="train")
    # the model that it started from is far better than all that it is offered
    best = fit(make_client(Local, net=noisy), max_rounds=20)
    model.old.load_state_dict({n: t for n, t in net_of(best, 0).items()})
    model.assign(model_of(1, noisy, scale=9))
    own = copy.deepcopy(model.net.state_dict())
    receive(model, {m: model_of(m + 10, noisy, scale=9) for m in range(1, 4)}, data)
    assert equal(dict(model.net.state_dict()), dict(own))
    assert all(gain < 0 for gain in model.gains.values())


def test_a_model_whose_loss_is_no_number_has_no_weight():
    model, data = client()
    broken = {name: torch.full_like(tensor, 1e200) for name, tensor in model_of(1).items()}
    models = {1: broken, 2: model_of(12), 3: {name: tensor * math.nan for name, tensor in broken.items()}}
    receive(model, models, data)
    without, _ = client()
    receive(without, {2: models[2]}, data)
    assert model.gains[1] == model.gains[3] == 0
    assert equal(dict(model.net.state_dict()), dict(without.net.state_dict()))
    # nor does a start whose loss is infinite give all weight to one
    model.old.load_state_dict({name.removeprefix("net."): tensor for name, tensor in broken.items()})
    receive(model, models, data)
    assert all(tensor.isfinite().all() for tensor in model.net.state_dict().values())


@pytest.mark.parametrize("net", [plain, noisy])
def test_alone_it_is_local_bit_for_bit(net):
    fomo, local = (fit(make_client(method, net=net), blobs(40)) for method in (FedFomo, Local))
    assert equal(net_of(fomo, 0), net_of(local, 0))
    assert losses(fomo) == losses(local)


def test_the_others_models_change_the_weights_from_the_second_round_on():
    fomo, local = (fit(make_client(method), max_rounds=1) for method in (FedFomo, Local))
    assert all(equal(net_of(fomo, k), net_of(local, k)) for k in range(4))
    fomo, local = (fit(make_client(method), max_rounds=2) for method in (FedFomo, Local))
    assert not any(equal(net_of(fomo, k), net_of(local, k)) for k in range(4))


def test_a_client_keeps_the_model_that_it_trained_and_the_one_that_it_started_from():
    run = fit(make_client(FedFomo), max_rounds=1)
    initial = make_client(FedFomo).net.state_dict()
    for k in range(4):
        assert equal(net_of(run, k, "old."), dict(initial))
        assert not equal(net_of(run, k), dict(initial))


def test_bytes_are_those_of_the_models_that_are_sent():
    run = fit(make_client(FedFomo, net=noisy), clients_per_round=4)
    size = num_bytes(run.model.net.state_dict())
    assert [row["bytes/down"] for row in run.rows] == [0, 4 * 3 * size, 4 * 3 * size]
    assert [row["bytes/up"] for row in run.rows] == [4 * (size + 8 + 8 * known) for known in (1, 4, 4)]


def test_payloads_are_the_kept_models_themselves():
    spy = Spy()
    run = fit(make_client(FedFomo), callbacks=[spy])
    aggregator = run.federation.aggregator
    for k in range(4):
        sent = aggregator.download(k)["models"]
        assert list(sent) == [other for other in range(4) if other != k]
        for other, model in sent.items():
            kept = aggregator.state["models"][other]
            assert all(tensor.data_ptr() == kept[name].data_ptr() for name, tensor in model.items())
            assert equal(model, spy.updates[-1][other]["weights"])


def pool(clients=6, **settings):
    aggregator = AffinityPool(**settings)
    aggregator.setup(Server(clients, {}, make_client(), blobs(), seed=0))
    return aggregator


def uploads(affinity, clients=6):
    gains = {m: torch.tensor(gain, dtype=torch.float64) for m, gain in affinity.items()}
    return {k: {"weights": {"w": torch.tensor(float(k))}, "affinity": gains if k == 0 else {}} for k in range(clients)}


def test_the_models_of_most_affinity_are_sent_and_affinities_add_up():
    aggregator = pool(num_models=2)
    aggregator.aggregate(uploads({0: 9.0, 1: -1.0, 2: 0.5, 4: 0.3}), round=0)
    assert list(aggregator.download(0)["models"]) == [2, 4]
    assert list(aggregator.download(5)["models"]) == [0, 1]
    aggregator.aggregate(uploads({2: -0.7, 4: -0.1}), round=1)
    # 3 and 5 were never weighed, which is more than what did harm
    assert list(aggregator.download(0)["models"]) == [3, 4]
    assert aggregator.state["affinity"][0] == pytest.approx({0: 9.0, 1: -1.0, 2: -0.2, 4: 0.2})


def test_random_choices_depend_on_seed_round_and_client_alone():
    sent = {}
    for round in range(4):
        aggregator = pool(20, num_models=3, epsilon=1.0, epsilon_decay=0.0)
        for past in range(round + 1):
            aggregator.aggregate(uploads({}, 20), round=past)
        for k in (7, 8):
            sent[round, k] = tuple(aggregator.download(k)["models"])
            assert sent[round, k] == tuple(aggregator.download(k)["models"])
            assert len(set(sent[round, k])) == 3 and k not in sent[round, k]
    assert len(set(sent.values())) == 8


def test_random_choices_end_when_epsilon_has_fallen_to_0():
    aggregator = pool(20, num_models=3, epsilon=0.3, epsilon_decay=0.1)
    choices = []
    for round in range(6):
        aggregator.aggregate(uploads({}, 20), round=round)
        choices.append([tuple(aggregator.download(k)["models"]) for k in range(10, 20)])
    assert any(models != (0, 1, 2) for models in choices[0])
    assert all(models == (0, 1, 2) for later in choices[2:] for models in later)


def test_more_models_than_there_are_is_all():
    aggregator = pool(num_models=9, epsilon=1.0)
    aggregator.aggregate(uploads({}), round=0)
    assert list(aggregator.download(2)["models"]) == [0, 1, 3, 4, 5]


def test_nobody_changes_nothing():
    aggregator = pool()
    aggregator.aggregate(uploads({1: 2.0}), round=0)
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(aggregator.state, before)


def test_a_client_that_stays_away_goes_on_from_its_own_models():
    spy = Spy()
    run = fit(make_client(FedFomo), callbacks=[spy], clients_per_round=2, max_rounds=5)
    last = {k: update for updates in spy.updates for k, update in updates.items()}
    assert set(spy.cohorts[-1]) < set(last)
    for k, update in last.items():
        assert equal({f"net.{n}": t for n, t in net_of(run, k).items()}, update["weights"])


@pytest.mark.exhaustive
def test_evaluation_makes_the_mix_and_leaves_no_trace():
    before, both = (fit(make_client(FedFomo, net=noisy), evaluate=when) for when in ("before", "both"))
    for k in range(4):
        assert equal(before.federation.clients[k].personal, both.federation.clients[k].personal)
    # the trained model and the mix of the next round aren't the same
    assert both.rows[-1]["val/loss"] != both.rows[-1]["val_after/loss"]


def test_running_statistics_are_mixed_or_stay():
    mixed, local = (fit(make_client(FedFomo, net=noisy, buffers=b)) for b in ("average", "local"))
    assert "net.features.1.running_mean" in mixed.federation.aggregator.state["models"][0]
    assert "net.features.1.running_mean" not in local.federation.aggregator.state["models"][0]
    assert not equal(net_of(mixed, 0), net_of(local, 0))
    assert all(math.isfinite(loss) for loss in losses(local))


@pytest.mark.filterwarnings("ignore:Total length of")
def test_data_without_a_validation_part_need_the_training_part():
    data = partial(blobs, 30, 20, val_fraction=0.0)
    with pytest.raises(MisconfigurationException, match=r"model\.weigh_on=val.* model\.weigh_on=train"):
        fit(make_client(FedFomo), data())
    run = fit(make_client(partial(FedFomo, weigh_on="train")), data())
    assert not equal(net_of(run, 0), net_of(fit(make_client(Local), data()), 0))
    model, part = client(weigh_on="train")
    deltas, _ = by_hand(model, {}, part.train)
    receive(model, {}, part)
    assert model.gains == pytest.approx(deltas)


def test_clients_of_one_class_each_run():
    run = fit(make_client(FedFomo), blobs(40, 40, 40, by_class=True), max_rounds=4)
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["val/acc"] > 0.9


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_it_trains_in_other_precisions(precision):
    run = fit(make_client(FedFomo, net=noisy), precision=precision, max_rounds=2)
    assert run.rows[-1]["clients"] == 4 and math.isfinite(losses(run)[-1])


@pytest.mark.exhaustive
def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, FedFomo, net=noisy, optimizer_lifetime="run")
    server = partial(AffinityPool, num_models=2, epsilon=0.6)
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), aggregator=server(), **settings)
    assert same_end(whole, fit(make(), aggregator=server(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, aggregator=server(), **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=server(), ckpt_path="last", **settings))


def test_a_client_is_loaded_as_the_model_that_it_trained(tmp_path):
    run = fit(make_client(FedFomo), root=tmp_path)
    assert equal(dict(load_client(FedFomo, run.last, client=1).net.state_dict()), net_of(run, 1))


@pytest.mark.parametrize("settings", [{"num_models": 0}, {"epsilon": 1.5}, {"epsilon": -0.5}, {"epsilon_decay": -1.0}])
def test_settings_out_of_range_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value}"):
        AffinityPool(**settings)
