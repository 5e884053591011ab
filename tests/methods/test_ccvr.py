import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import (
    CLASSES,
    HIDDEN,
    Pause,
    Spy,
    blobs,
    check_batches_of_one,
    equal,
    fit,
    make_client,
    noisy,
    same_end,
    set_up,
)
from pfl_lightning import Server
from pfl_lightning.aggregators import VirtualFeatures
from pfl_lightning.methods import CCVR, FedAvg, FedProx
from pfl_lightning.methods.ccvr import pooled
from pfl_lightning.seeds import derive_seed


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def report(h, c=0):
    centred = h - h.mean(0)
    return {c: {"count": torch.tensor(len(h)), "mean": h.mean(0), "scatter": centred.T @ centred}}


@pytest.mark.parametrize("cuts", [(9,), (2, 7), (1, 1, 1, 1, 5), (1,) * 9])
def test_the_statistics_of_a_class_are_those_of_all_its_samples_however_divided(cuts):
    h = draw(9, 4) + 100
    found = pooled([report(part) for part in h.split(cuts)])
    mean, covariance = found[0]
    torch.testing.assert_close(mean, h.mean(0))
    torch.testing.assert_close(covariance, torch.cov(h.T))


def test_classes_are_apart_and_one_with_a_single_sample_is_left_out():
    h = draw(6, 4)
    reports = [report(h[:3], 2) | report(h[3:4], 1), report(h[4:], 2), {}]
    found = pooled(reports)
    assert list(found) == [2]
    torch.testing.assert_close(found[2][1], torch.cov(torch.cat([h[:3], h[4:]]).T))


def test_drawn_features_have_the_mean_and_the_covariance():
    server = VirtualFeatures(virtual=40000)
    mean, covariance = draw(3), torch.cov(draw(3, 8))
    features, target = server.drawn({2: (mean, covariance)}, torch.Generator().manual_seed(0))
    assert features.shape == (40000, 3) and (target == 2).all()
    torch.testing.assert_close(features.mean(0).double(), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(torch.cov(features.T).double(), covariance, atol=0.05, rtol=0)
    # of two samples, all features are on one line
    flat, _ = VirtualFeatures(virtual=5).drawn({0: (mean, torch.cov(draw(2, 3).T))}, torch.Generator())
    assert torch.linalg.matrix_rank(flat - flat[0], atol=1e-4) == 1


def test_the_last_round_reports_features_of_the_received_model_and_trains_nothing():
    spy = Spy()
    run = fit(make_client(CCVR, net=noisy), blobs(30, 24, 18), callbacks=[spy], max_rounds=3)
    model = make_client(CCVR, net=noisy)
    first, last = spy.updates[1][1], spy.updates[2][1]
    assert first["class_statistics"] == {} and sorted(last["class_statistics"]) == [0, 1, 2]
    # the body is the average of round two, running statistics too
    body = {name: t for name, t in last["weights"].items() if name.startswith("net.features.")}
    assert body and all(torch.equal(run.federation.aggregator.state["weights"][name], t) for name, t in body.items())
    model.assign(last["weights"])
    part = run.data.part(1, "train")
    h = model.eval().net.features(part.x).detach()
    for c in range(CLASSES):
        found, own = last["class_statistics"][c], h[part.y == c]
        assert int(found["count"]) == len(own)
        torch.testing.assert_close(found["mean"], own.mean(0), atol=1e-5, rtol=1e-5)
        expected = (own - own.mean(0)).T @ (own - own.mean(0))
        torch.testing.assert_close(found["scatter"], expected, atol=1e-4, rtol=1e-4)


def test_without_virtual_features_it_is_fedavg_of_one_round_less_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    plain = fit(make_client(FedAvg, **settings), max_rounds=2)
    ours = fit(make_client(CCVR, **settings), aggregator=VirtualFeatures(virtual=0), max_rounds=3)
    assert equal(plain.weights, ours.weights)
    calibrated = fit(make_client(CCVR, **settings), max_rounds=3)
    changed = {name for name in plain.weights if not torch.equal(plain.weights[name], calibrated.weights[name])}
    assert changed == {"net.classifier.weight", "net.classifier.bias"}


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_the_classifier_is_fitted_from_where_it_was_by_the_server_s_optimizer(dtype, close):
    model = make_client(CCVR)
    server = set_up_for(VirtualFeatures(virtual=8, server_epochs=1, batch_size=1000), model)
    # as precision=64-true does after the set-up
    model.to(dtype)
    start = {name: t.clone() for name, t in server.global_model().items()}
    reports = {k: {"class_statistics": report(draw(9, HIDDEN, seed=k) + k, c=k)} for k in (0, 2)}
    logs = server.aggregate({k: each | {"weights": start} for k, each in reports.items()}, 1)
    generator = torch.Generator().manual_seed(derive_seed(0, "ccvr", 1))
    h, y = server.drawn(pooled([each["class_statistics"] for each in reports.values()]), generator)
    w, b = (start[f"net.classifier.{part}"].to(dtype, copy=True).requires_grad_() for part in ("weight", "bias"))
    loss = F.cross_entropy(h.to(dtype) @ w.T + b, y)
    loss.backward()
    for part, old in (("weight", w), ("bias", b)):
        fitted = server.global_model()[f"net.classifier.{part}"]
        torch.testing.assert_close(fitted, (old - 0.01 * old.grad).detach(), rtol=close, atol=close)
    assert logs["virtual_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def set_up_for(aggregator, model, rounds=2):
    shared = {name: t.clone() for name, t in model.state_dict().items() if model.is_shared(name)}
    aggregator.setup(Server(4, shared, model, None, seed=0, rounds=rounds))
    return aggregator


def test_it_helps_clients_of_unlike_classes():
    data = {"by_class": True, "batch_size": 10}
    losses = [
        fit(make_client(method), blobs(40, 40, 40, **data), max_rounds=4).rows[-1]["val/loss"]
        for method in (FedAvg, CCVR)
    ]
    assert losses[1] < losses[0]


def test_a_pause_before_the_last_round_changes_no_bit(tmp_path):
    make = {"net": noisy, "optimizer_lifetime": "run"}
    whole = fit(make_client(CCVR, **make), max_rounds=3)
    fit(make_client(CCVR, **make), root=tmp_path, callbacks=[Pause(2)], max_rounds=3)
    assert same_end(whole, fit(make_client(CCVR, **make), root=tmp_path, ckpt_path="last", max_rounds=3))


def test_the_report_joins_another_method_s_training():
    class Both(CCVR, FedProx):
        pass

    spy = Spy()
    fit(make_client(Both, mu=0.5), callbacks=[spy], max_rounds=2)
    assert spy.updates[0][0]["class_statistics"] == {} and spy.updates[1][0]["class_statistics"]


def test_clients_of_one_class_and_batches_of_one_learn():
    check_batches_of_one(make_client(CCVR), max_rounds=3)


def test_classes_of_single_samples_leave_the_classifier():
    model = make_client(CCVR)
    server = set_up_for(VirtualFeatures(), model)
    before = server.global_model()
    assert server.aggregate({1: {"class_statistics": report(draw(1, HIDDEN)), "weights": before}}, 1) == {}
    assert equal(server.global_model(), before)


@pytest.mark.parametrize(("setting", "value"), [("virtual", -1), ("server_epochs", 0), ("batch_size", 0)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{setting}={value}"):
        VirtualFeatures(**{setting: value})


def test_an_unknown_number_of_rounds_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"aggregator=VirtualFeatures.*trainer\.max_rounds"):
        set_up(VirtualFeatures(), make_client(CCVR))
