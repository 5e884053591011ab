from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from federations import CLASSES, HIDDEN, Spy, blobs, equal, fit, load_client, make_client, noisy, plain
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedAvg, Local
from pfl_lightning.methods.lg_fedavg import LGFedAvg
from pfl_lightning.nets import Net

HEAD = {"net.classifier.weight", "net.classifier.bias"}


def wide(input_shape, num_classes):
    """Another feature extractor, with features of the same width."""
    body = nn.Sequential(nn.Linear(input_shape[0], 9), nn.ReLU(), nn.Linear(9, HIDDEN))
    return Net(body, nn.Linear(HIDDEN, num_classes))


@pytest.mark.parametrize("net", [plain, noisy])
def test_of_one_client_it_is_local_training_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    lg, local = (fit(make_client(method, **settings), blobs(40)) for method in (LGFedAvg, Local))
    own = {**lg.federation.aggregator.download(0)["weights"], **lg.federation.clients[0].personal}
    assert equal(dict(sorted(own.items())), dict(sorted(local.federation.clients[0].personal.items())))
    assert [row["val/loss"] for row in lg.rows] == [row["val/loss"] for row in local.rows]


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_features_and_their_running_statistics_never_travel(buffers):
    spy = Spy()
    run = fit(make_client(LGFedAvg, net=noisy, buffers=buffers), callbacks=[spy])
    assert all(set(update["weights"]) == HEAD for updates in spy.updates for update in updates.values())
    assert set(run.federation.aggregator.download(0)["weights"]) == HEAD
    clients = run.federation.clients
    assert all(set(state.personal) == set(run.weights) - HEAD for state in clients.values())
    assert not equal(clients[0].personal, clients[1].personal)
    up_and_down = 4 * (HIDDEN * CLASSES + CLASSES)
    assert [run.rows[-1][f"bytes/{way}"] for way in ("up", "down")] == [4 * (up_and_down + 8), 4 * up_and_down]


def normed(input_shape, num_classes):
    """With BatchNorm in the classifier."""
    return Net(nn.Linear(input_shape[0], HIDDEN), nn.Sequential(nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, num_classes)))


@pytest.mark.parametrize(("buffers", "travel"), [("average", True), ("local", False)])
def test_running_statistics_of_the_classifier_follow_their_setting(buffers, travel):
    client = make_client(LGFedAvg, net=normed, buffers=buffers)
    assert client.is_shared("net.classifier.0.weight")
    assert client.is_shared("net.classifier.0.running_mean") == travel


def test_classifiers_count_by_their_samples():
    spy = Spy()
    run = fit(make_client(LGFedAvg), callbacks=[spy])
    sizes = [run.data.size(client, "train") for client in range(4)]
    assert len(set(sizes)) > 1
    uploads = [update["weights"] for update in spy.updates[-1].values()]
    mean = weighted_mean(uploads, [size / sum(sizes) for size in sizes])
    assert equal(run.federation.aggregator.global_model(), mean)


def test_it_is_neither_fedavg_nor_local():
    lg, average, local = (fit(make_client(method), max_rounds=2) for method in (LGFedAvg, FedAvg, Local))
    body = "net.features.0.weight"
    features = lg.federation.clients[0].personal[body]
    assert not torch.equal(features, local.federation.clients[0].personal[body])
    assert not torch.equal(features, average.weights[body])


def test_clients_may_have_different_feature_extractors(tmp_path):
    spy = Spy()
    run = fit(make_client(LGFedAvg, net=[plain, wide]), root=tmp_path, callbacks=[spy])
    assert all(set(update["weights"]) == HEAD for update in spy.updates[-1].values())
    features = [state.personal["net.features.0.weight"] for _, state in sorted(run.federation.clients.items())]
    assert [len(weight) for weight in features] == [HIDDEN, 9, HIDDEN, 9]
    assert not torch.equal(features[0], features[2])


def test_a_client_that_stays_away_has_its_last_features_under_the_newest_classifier(tmp_path):
    spy = Spy()
    run = fit(make_client(LGFedAvg), root=tmp_path, callbacks=[spy], clients_per_round=1, max_rounds=3)
    away = next(client for client in range(4) if client not in spy.cohorts[-1])
    model = load_client(LGFedAvg, run.last, client=away).state_dict()
    held = run.federation.job(away).state.personal
    assert equal({name: model[name] for name in held}, held)
    last = spy.updates[-1][spy.cohorts[-1][0]]["weights"]
    assert equal({name: model[name] for name in last}, last)
    never = set(range(4)) - {client for cohort in spy.cohorts for client in cohort}
    start = make_client().state_dict()
    assert equal(run.federation.job(min(never)).state.personal, {n: t for n, t in start.items() if n not in HEAD})


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    make = partial(make_client, LGFedAvg, optimizer=partial(SGD, lr=0.05))
    run = fit(make(), blobs(20, 30, by_class=True, batch_size=1), max_rounds=5)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
