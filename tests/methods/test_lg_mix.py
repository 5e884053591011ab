import copy
from functools import partial

import pytest
import torch
from torch.optim import SGD

from federations import (
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    drawn_update,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    points,
    set_up,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import MixedChanges
from pfl_lightning.methods import FedAvg, LGMix, Local

STEP = partial(SGD, lr=0.1)


class Telling(LGMix):
    """It tells a fixed share."""

    share = 1.0

    def upload(self, data):
        return super().upload(data) | {"share": torch.tensor(self.share)}


def test_with_its_own_change_alone_each_client_is_local_s_bit_for_bit():
    own, local = fit(make_client(Telling), clients_per_round=3), fit(make_client(Local), clients_per_round=3)
    first = fit(make_client(Telling), max_rounds=1).federation.aggregator.state["models"]
    alone = fit(make_client(Local), max_rounds=1)
    for client, state in alone.federation.clients.items():
        assert all(torch.equal(first[client][name], tensor) for name, tensor in state.personal.items())
    # all clients that began in the first round, as later ones begin with the common model
    spy = Spy()
    fit(make_client(Telling), clients_per_round=3, callbacks=[spy])
    for client in spy.cohorts[0]:
        model = own.federation.aggregator.state["models"][client]
        personal = local.federation.clients[client].personal
        assert all(torch.equal(model[name], tensor) for name, tensor in personal.items())


def test_with_the_mean_change_alone_and_all_clients_it_is_fedavg():
    class Common(Telling):
        share = 0.0

    mixed = fit(make_client(Common, net=noisy, optimizer=STEP))
    average = fit(make_client(FedAvg, net=noisy, optimizer=STEP))
    for client in range(4):
        received = mixed.federation.aggregator.download(client)
        for name, tensor in average.federation.aggregator.global_model().items():
            # a client's counters stay its own
            if tensor.is_floating_point():
                torch.testing.assert_close(received["weights"][name], tensor)
            torch.testing.assert_close(received["global"][name], tensor)


def server(**settings):
    made = set_up(MixedChanges(**settings), make_client(LGMix).double())
    made.state["weights"] = {name: t.double() for name, t in made.state["weights"].items()}
    return made


def sent(seed, share, size=10):
    return drawn_update(make_client(LGMix).double(), seed, size, share=torch.tensor(share))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_two_rounds_of_the_server_by_hand(weighting):
    """Client 1 is in the first round alone, client 2 in the second."""
    made = server(weighting=weighting)
    rounds = [{0: sent(1, 0.3, 30), 1: sent(2, 0.9, 10)}, {0: sent(3, 0.7, 30), 2: sent(4, 0.2, 15)}]
    start = made.state["weights"]
    common, models, shares = start, {k: start for k in range(3)}, {k: [] for k in range(3)}
    for number, updates in enumerate(rounds):
        log = made.aggregate(updates, number)
        if number == 1:
            models[2] = common
        sizes = {k: float(u["num_samples"]) if weighting == "samples" else 1.0 for k, u in updates.items()}
        change = {
            n: sum(sizes[k] * (u["weights"][n] - models[k][n]) for k, u in updates.items()) / sum(sizes.values())
            for n in common
        }
        for k, u in updates.items():
            shares[k].append(float(u["share"]))
            mix = sum(shares[k]) / len(shares[k])
            moved = {n: w + mix * (u["weights"][n] - w) + (1 - mix) * change[n] for n, w in models[k].items()}
            models[k] = moved
        common = {n: w + change[n] for n, w in common.items()}
        means = [sum(shares[k]) / len(shares[k]) for k in updates]
        assert log["share"] == pytest.approx(sum(means) / len(means), abs=1e-7)
    for k in range(3):
        for name, tensor in models[k].items():
            torch.testing.assert_close(made.download(k)["weights"][name], tensor, rtol=0, atol=1e-6)
    for name, tensor in common.items():
        torch.testing.assert_close(made.download(3)["weights"][name], tensor, rtol=0, atol=1e-12)
    assert equal(made.welcome(9, None), made.download(3))


def test_the_order_of_updates_and_rounds_without_any_change_nothing():
    updates = {0: sent(1, 0.3, 30), 1: sent(2, 0.9, 10), 2: sent(5, 0.5, 7)}
    one, other = server(), server()
    before = copy.deepcopy(one.state)
    assert one.aggregate({}, 0) == {} and equal(one.state, before)
    one.aggregate(updates, 0)
    other.aggregate(dict(sorted(updates.items(), reverse=True)), 0)
    for client in range(3):
        for name, tensor in one.download(client)["weights"].items():
            torch.testing.assert_close(other.download(client)["weights"][name], tensor, rtol=0, atol=1e-12)


def test_the_share_is_of_the_traces_of_both_covariances():
    """Of batches of several sizes, and of features far from 0, where sums of squares would cancel."""
    client = make_client(LGMix)
    common = {name: 1.1 * tensor for name, tensor in client.shared_state().items()}
    weights = {name: tensor.clone() for name, tensor in client.shared_state().items()}
    client.on_download({"weights": weights, "global": common}, None)
    x, y = points(20, seed=1)
    with torch.no_grad():
        client.net.features[0].bias += 1000
    client.net.features[1] = torch.nn.Identity()
    for rows in torch.split(torch.arange(20), 7):
        client.training_step((x[rows], y[rows]), 0)
    h = client.net.features(x).detach(), client.common(x)
    traces = [torch.cov(each.double().T, correction=0).trace() for each in h]
    share = client.upload(OnlySize())["share"]
    torch.testing.assert_close(share.double(), traces[0] / sum(traces), rtol=1e-4, atol=0)
    assert 0.1 < float(share) < 1 and not torch.isclose(share, torch.tensor(0.5))
    # a round's features are forgotten at the next download
    client.on_download({"weights": weights, "global": common}, None)
    assert float(client.upload(OnlySize())["share"]) == 0.5


class OnlySize:
    def size(self, split):
        return 20


def test_features_of_the_common_model_are_in_evaluation_mode_and_of_its_own_statistics():
    client = make_client(LGMix, net=noisy)
    client.train()
    weights = {name: tensor.clone() for name, tensor in client.shared_state().items()}
    common = weights | {"net.features.1.running_mean": torch.full((5,), 3.0)}
    client.on_download({"weights": weights, "global": common}, None)
    x, _ = points(8, seed=1)
    known = copy.deepcopy(client.net.features).eval()
    known[1].running_mean.fill_(3.0)
    torch.testing.assert_close(client.common(x), known(x).detach())
    assert not client.net.features[1].running_mean.any()


def test_each_client_starts_from_its_own_model_and_learns():
    spy = Spy()
    run = fit(make_client(LGMix, net=noisy, optimizer=STEP), max_rounds=6, callbacks=[spy])
    models = [run.federation.aggregator.download(client)["weights"] for client in range(4)]
    assert all(not torch.equal(models[0]["net.classifier.weight"], m["net.classifier.weight"]) for m in models[1:])
    assert all(0 < float(update["share"]) < 1 for updates in spy.updates for update in updates.values())
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    # mixed as they are, which keeps variances above 0
    assert all((model["net.features.1.running_var"] > 0).all() for model in models)
    assert run.rows[-1]["server/share"] == pytest.approx(sum(run.federation.aggregator.state["shares"].values()) / 4)


def test_order_and_resume(tmp_path):
    check_order_and_resume(LGMix, tmp_path)


def test_engines_agree():
    runs = [fit(make_client(LGMix, net=plain), engine=engine) for engine in ("sequential", "vectorised")]
    for client in range(4):
        one, other = (run.federation.aggregator.download(client)["weights"] for run in runs)
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


def test_one_client_alone_and_clients_of_one_class_and_batches_of_one():
    run = fit(make_client(LGMix, optimizer=STEP), blobs(30))
    alone = fit(make_client(FedAvg, optimizer=STEP), blobs(30), aggregator=WeightedAverage())
    for name, tensor in alone.federation.aggregator.global_model().items():
        torch.testing.assert_close(run.federation.aggregator.download(0)["weights"][name], tensor)
    check_batches_of_one(make_client(LGMix, optimizer=STEP), max_rounds=4)
