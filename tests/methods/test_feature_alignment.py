from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, SIZES, Spy, blobs, equal, fit, make_client, near, noisy, plain, points
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.class_vectors import class_means
from pfl_lightning.methods.feature_alignment import FeatureAlignment


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.by_default("plain")
def test_without_its_term_it_is_fedavg_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    aligned, average = fit(make_client(FeatureAlignment, align_lambda=0.0, **settings)), fit(make_client(**settings))
    assert equal(aligned.weights, average.weights)
    assert near([row["val/loss"] for row in aligned.rows], [row["val/loss"] for row in average.rows])


@pytest.mark.parametrize("align", ["mse", "l2"])
@pytest.mark.by_default("l2")
def test_its_term_changes_the_weights_as_soon_as_there_are_prototypes(align):
    for rounds, same in ((1, True), (2, False)):
        aligned = fit(make_client(FeatureAlignment, align=align), max_rounds=rounds)
        assert equal(aligned.weights, fit(make_client(FedAvg), max_rounds=rounds).weights) is same


@pytest.mark.parametrize("align", ["mse", "l2"])
def test_a_step_by_hand_where_one_class_has_no_prototype(align):
    """In the second round of a client that has two of the three classes."""
    data, spy = blobs(60, batch_size=100, by_class=True), Spy()
    client = make_client(FeatureAlignment, align_lambda=0.7, align=align, optimizer=partial(SGD, lr=0.1))
    assert data.num_clients == 1
    fit(client, data, max_rounds=2, callbacks=[spy])
    (first,), (second,) = (updates.values() for updates in spy.updates)
    net = make_client().net
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in first["weights"].items()})
    part, prototypes = data.part(0, "train"), first["prototypes"]
    assert len(prototypes) == 2
    h = net.features(part.x)
    gaps = h - torch.stack([prototypes[int(c)] for c in part.y])
    term = gaps.square().mean() if align == "mse" else gaps.square().sum(1).sqrt().mean()
    loss = F.cross_entropy(net.classifier(h), part.y) + 0.7 * term
    for (name, p), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        torch.testing.assert_close(second["weights"][f"net.{name}"], p - 0.1 * g)


@pytest.mark.parametrize("align", ["mse", "l2"])
def test_samples_of_unknown_classes_and_features_at_their_prototypes_add_nothing(align):
    client = make_client(FeatureAlignment, align=align)
    x, y = points(9, seed=2)
    client.prototypes.take({0: client.net.features(x[:1])[0].detach(), 1: torch.ones(HIDDEN)})
    known, unknown, met = y == 1, y == 2, torch.arange(9) == 0

    def gradient(rows):
        features = client.net.features(x[rows]).detach().requires_grad_()
        logits = client.net.classifier(features).detach()
        (grad,) = torch.autograd.grad(client.loss(features, logits, y[rows]), features)
        return grad

    assert not gradient(unknown).any() and not gradient(met).any()
    assert gradient(known).any(1).all()
    # the mean is over all samples of the batch
    torch.testing.assert_close(gradient(known | unknown)[::2] * 2, gradient(known))


def test_it_brings_features_to_their_prototypes():
    def spread(weight):
        run = fit(make_client(FeatureAlignment, align_lambda=weight), local_epochs=3)
        part, prototypes = run.data.part(0, "train"), run.federation.aggregator.download(0)["prototypes"]
        gaps = run.model.net.features(part.x) - torch.stack([prototypes[int(c)] for c in part.y])
        return gaps.square().mean().item()

    assert spread(5.0) < 0.5 * spread(0.0)


def test_a_client_sends_its_trained_model_s_means_of_its_training_samples():
    spy = Spy()
    run = fit(make_client(FeatureAlignment, net=noisy), blobs(40, 40, by_class=True), callbacks=[spy])
    model = make_client(net=noisy).eval()
    for client, update in spy.updates[-1].items():
        model.load_state_dict(update["weights"])
        expected = class_means(model.net.features, run.data.client(client), CLASSES)
        assert equal(update["prototypes"], expected)


def test_the_server_averages_prototypes_of_all_clients_alike():
    spy = Spy()
    run = fit(make_client(FeatureAlignment), blobs(24, 60, 30, by_class=True), callbacks=[spy])
    received = run.federation.aggregator.download(2)["prototypes"]
    for c, prototype in received.items():
        sent = [update["prototypes"][c] for update in spy.updates[-1].values() if c in update["prototypes"]]
        torch.testing.assert_close(prototype, sum(sent) / len(sent))
    assert run.rows[-1]["server/prototypes_fed"] == len(received) == 3


def test_bytes_are_those_of_the_model_and_of_the_classes_that_there_are():
    run = fit(make_client(FeatureAlignment), blobs(40, 60, by_class=True))
    model = sum(tensor.numel() * tensor.element_size() for tensor in run.weights.values())
    prototype = 4 * HIDDEN
    held = [int((row > 0).sum()) for row in run.data.counts]
    assert held == [1, 2]
    assert {row["bytes/up"] for row in run.rows} == {2 * (model + 8) + 3 * prototype}
    assert [row["bytes/down"] for row in run.rows] == [2 * model] + [2 * (model + 3 * prototype)] * 2


def test_counts_stay_at_home():
    spy = Spy()
    fit(make_client(FeatureAlignment), callbacks=[spy], max_rounds=1)
    assert all(set(update) == {"weights", "num_samples", "prototypes"} for update in spy.updates[0].values())
    assert len(spy.updates[0]) == len(SIZES)


@pytest.mark.parametrize("value", [-1, float("nan")])
def test_a_weight_that_is_none_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"model\.align_lambda={value}"):
        make_client(FeatureAlignment, align_lambda=value)
