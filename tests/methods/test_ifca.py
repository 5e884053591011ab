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
    TwoGroups,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    near,
    noisy,
    same_end,
)
from pfl_lightning import Server
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.ifca import IFCA, ClusterModels


def losses(run):
    return [row["val/loss"] for row in run.rows]


def choices(run):
    return {k: int(state.personal["cluster"]) for k, state in sorted(run.federation.clients.items())}


def server(net=noisy, seed=0, **settings):
    aggregator, module = ClusterModels(**settings), make_client(IFCA, net=net)
    weights = {name: t.detach().clone() for name, t in module.state_dict().items() if module.is_shared(name)}
    aggregator.setup(Server(4, weights, module, None, seed=seed))
    return aggregator


def upload(seed, cluster, samples=10):
    weights = {f"net.{n}": t for n, t in make_client(seed=seed, net=noisy).net.state_dict().items()}
    return {"weights": weights, "num_samples": torch.tensor(samples), "cluster": torch.tensor(cluster)}


def received(models, net=noisy):
    """A client that chose, and its data."""
    client, data = make_client(IFCA, net=net).eval(), blobs()
    data.setup()
    with torch.no_grad():
        client.on_download({"cluster_models": models}, data.client(0))
    return client, data.client(0)


def test_t12_one_model_is_fedavg_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    one = fit(make_client(IFCA, **settings), aggregator=ClusterModels(num_clusters=1))
    average = fit(make_client(FedAvg, **settings))
    assert equal({name: one.weights[name] for name in average.weights}, average.weights)
    assert near(losses(one), losses(average))


def test_several_models_change_the_weights():
    average = fit(make_client(FedAvg), max_rounds=2)
    assert not near(losses(fit(make_client(IFCA), max_rounds=2)), losses(average))


def test_the_model_of_least_training_loss_is_chosen():
    models = [upload(seed, 0)["weights"] for seed in range(5)]
    client, data = received(models)
    expected = []
    with torch.no_grad():
        for model in models:
            logits = functional_call(make_client(IFCA, net=noisy).eval(), model, (data.train.x,))
            expected.append(float(F.cross_entropy(logits, data.train.y)))
    best = expected.index(min(expected))
    assert int(client.cluster) == best > 0, "choose other seeds: the first is the best"
    assert equal({f"net.{name}": tensor for name, tensor in client.net.state_dict().items()}, models[best])
    assert int(client.upload(data)["cluster"]) == best


def test_the_first_of_equals_is_chosen_and_never_one_without_a_loss():
    model = upload(1, 0)["weights"]
    broken = {name: tensor * math.nan if tensor.is_floating_point() else tensor for name, tensor in model.items()}
    assert int(received([model, model])[0].cluster) == 0
    assert int(received([broken, model, model])[0].cluster) == 1
    assert int(received([broken, broken])[0].cluster) == 0


@pytest.mark.parametrize(("weights", "share"), [("samples", 0.25), ("uniform", 0.5)])
def test_members_are_averaged_and_a_model_without_any_stays(weights, share):
    aggregator = server(num_clusters=3, weights=weights)
    kept = aggregator.state["models"][1]
    updates = {0: upload(1, 2, 10), 1: upload(2, 0, 5), 3: upload(3, 2, 30)}
    assert aggregator.aggregate(updates, round=0) == {"clusters": 2}
    models = aggregator.download(2)["cluster_models"]
    assert equal(models[0], updates[1]["weights"]) and models[1] is kept
    mean = weighted_mean([updates[0]["weights"], updates[3]["weights"]], [share, 1 - share])
    assert equal(models[2], mean)


def test_models_start_apart_the_first_as_the_common_one_and_no_other_draw_is_disturbed():
    aggregator = server(num_clusters=4)
    models = aggregator.state["models"]
    common = make_client(IFCA, net=noisy).net.state_dict()
    assert equal(models[0], {f"net.{name}": tensor for name, tensor in common.items()})
    heads = [model["net.classifier.weight"] for model in models]
    assert len({float(head.sum()) for head in heads}) == 4
    make_client(IFCA, net=noisy)
    before = torch.get_rng_state()
    aggregator, module = ClusterModels(num_clusters=4), make_client(IFCA, net=noisy)
    state = torch.get_rng_state()
    aggregator.setup(Server(4, models[0], module, None, seed=0))
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(before, state)
    assert equal(aggregator.state["models"], models)
    assert not equal(server(num_clusters=4, seed=1).state["models"][1], models[1])


def test_models_are_drawn_in_the_precision_of_the_common_one():
    aggregator, module = ClusterModels(num_clusters=2), make_client(IFCA).double()
    aggregator.setup(Server(4, dict(module.net.state_dict(prefix="net.")), module, None, seed=0))
    assert {tensor.dtype for model in aggregator.state["models"] for tensor in model.values()} == {torch.float64}


def test_groups_find_each_other_and_are_better_off_apart(tmp_path):
    run = fit(make_client(IFCA, seed=2), blobs(data=TwoGroups), tmp_path, max_rounds=6)
    found = choices(run)
    assert found[0] == found[2] != found[1] == found[3]
    together = fit(make_client(seed=2), blobs(data=TwoGroups), max_rounds=6)
    assert run.rows[-1]["val/acc"] > together.rows[-1]["val/acc"] + 0.2
    loaded = load_client(IFCA, run.last, client=1)
    chosen = run.federation.aggregator.state["models"][found[1]]
    assert equal({f"net.{name}": tensor for name, tensor in loaded.net.state_dict().items()}, chosen)


def test_evaluation_chooses_by_training_samples_among_the_newest_models():
    run = fit(make_client(IFCA, seed=2), clients_per_round=2, max_rounds=5)
    models = run.federation.aggregator.state["models"]
    for client, values in run.federation.evaluations.results["test"].items():
        train, test = run.data.part(client, "train"), run.data.part(client, "test")
        with torch.no_grad():
            pairs = [
                tuple(float(F.cross_entropy(functional_call(run.model, m, (p.x,)), p.y)) for p in (train, test))
                for m in models
            ]
        assert values["loss"] == pytest.approx(min(pairs)[1], abs=1e-6)


def test_bytes_are_k_models_down_and_one_up():
    run = fit(make_client(IFCA, net=noisy), aggregator=ClusterModels(num_clusters=3))
    size = num_bytes(run.model.net.state_dict())
    assert {row["bytes/down"] for row in run.rows} == {4 * 3 * size}
    assert {row["bytes/up"] for row in run.rows} == {4 * (size + 8 + 8)}


def test_payloads_are_the_kept_models_themselves():
    run = fit(make_client(IFCA), max_rounds=2)
    aggregator = run.federation.aggregator
    for client in range(4):
        for sent, kept in zip(aggregator.download(client)["cluster_models"], aggregator.state["models"], strict=True):
            assert all(tensor.data_ptr() == kept[name].data_ptr() for name, tensor in sent.items())


def test_a_client_that_stays_away_keeps_the_choice_that_it_trained():
    spy = Spy()
    run = fit(make_client(IFCA, seed=2), blobs(data=TwoGroups), callbacks=[spy], clients_per_round=2, max_rounds=6)
    last = {client: int(update["cluster"]) for updates in spy.updates for client, update in updates.items()}
    assert set(spy.cohorts[-1]) < set(last) and choices(run) == dict(sorted(last.items()))


def test_nobody_changes_nothing():
    aggregator = server()
    aggregator.aggregate({0: upload(1, 1)}, round=0)
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(aggregator.state, before)


def test_running_statistics_that_stay_with_clients_are_in_no_model():
    run = fit(make_client(IFCA, net=noisy, buffers="local"))
    assert not any("running" in name for model in run.federation.aggregator.state["models"] for name in model)
    assert all(math.isfinite(loss) for loss in losses(run))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_it_trains_in_other_precisions(precision):
    run = fit(make_client(IFCA, net=noisy), precision=precision, max_rounds=2)
    dtypes = {model["net.classifier.weight"].dtype for model in run.federation.aggregator.state["models"]}
    assert dtypes == {torch.float64 if precision == "64-true" else torch.float32}


def test_one_client_and_clients_of_one_class_each_run():
    assert fit(make_client(IFCA), blobs(30)).rows[-1]["clients"] == 1
    run = fit(make_client(IFCA), blobs(40, 40, by_class=True), aggregator=ClusterModels(num_clusters=5))
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["server/clusters"] <= 2


@pytest.mark.exhaustive
def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, IFCA, net=noisy, optimizer_lifetime="run")
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), root=tmp_path / "whole", **settings)
    assert same_end(whole, fit(make(), root=tmp_path / "other", engine=Shuffled, **settings))
    fit(make(), root=tmp_path, **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), root=tmp_path, ckpt_path="last", **settings))


def test_no_models_are_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.num_clusters=0"):
        ClusterModels(num_clusters=0)
