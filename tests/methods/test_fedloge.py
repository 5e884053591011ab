import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    HIDDEN,
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    equal,
    fit,
    make_client,
    near,
    noisy,
    points,
)
from pfl_lightning.methods import FedAvg, FedLoGe
from pfl_lightning.methods.fedetf import simplex
from pfl_lightning.methods.fedloge import sparse_simplex
from pfl_lightning.nets import Net


class Fixed(nn.Module):
    """A classifier that nothing trains."""

    def __init__(self, frame):
        super().__init__()
        self.frame = nn.Parameter(frame, requires_grad=False)

    def forward(self, z):
        return z @ self.frame


def under(frame):
    """A net with the features of `noisy` and a fixed classifier."""

    def net(input_shape, num_classes):
        return Net(noisy(input_shape, num_classes).features, Fixed(frame))

    return net


def features(run):
    return {name: tensor for name, tensor in run.weights.items() if name.startswith("net.features.")}


def trained(**settings):
    """A client that has taken part, with a personal head unlike the global one."""
    model = make_client(FedLoGe, **settings).eval()
    with torch.no_grad():
        for parameter in model.personal.parameters():
            parameter.mul_(torch.linspace(0.5, 2, CLASSES).view(-1, *[1] * (parameter.dim() - 1)))
    model.has_personal.fill_(True)
    return model


@pytest.mark.parametrize(("size", "classes"), [(5, 3), (64, 10)])
def test_a_sparse_simplex_has_its_zeros_one_length_and_angles_of_a_simplex(size, classes):
    frame = sparse_simplex(size, classes, 0.6)
    assert ((frame == 0).sum(0) == int(0.6 * size)).all()
    expected = classes / (classes - 1) * torch.eye(classes) - 1 / (classes - 1)
    products = frame.T @ frame
    torch.testing.assert_close(products.diagonal(), torch.ones(classes))
    start = F.normalize(torch.where(frame == 0, 0, simplex(size, classes)), dim=0)
    assert (products - expected).norm() < (start.T @ start - expected).norm()
    # two entries a vector leave too few angles to choose from
    if size == 64:
        torch.testing.assert_close(products, expected, rtol=0, atol=1e-5)
    assert torch.equal(sparse_simplex(size, classes, 0.6), frame)
    assert torch.equal(sparse_simplex(size, classes, 0.0), simplex(size, classes))


def test_the_loss_is_three_cross_entropies():
    model, (x, y) = trained(norm=0.3), points(9, seed=1)
    z = model.net.features(x)
    logits = [z @ model.frame, model.net.classifier(z), model.personal(z)]
    expected = sum(F.cross_entropy(each, y) for each in logits)
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], expected)
    assert model.frame.norm(dim=0).tolist() == pytest.approx([0.3] * CLASSES)


def test_features_learn_from_the_fixed_classifier_and_heads_from_their_own_terms():
    model, (x, y) = trained(), points(9, seed=1)
    model.training_step((x, y), 0)["loss"].backward()
    mine = {name: parameter.grad for name, parameter in model.named_parameters()}
    twin = trained()
    F.cross_entropy(twin.net.features(x) @ twin.frame, y).backward()
    z = twin.net.features(x).detach()
    F.cross_entropy(twin.net.classifier(z), y).backward()
    F.cross_entropy(twin.personal(z), y).backward()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad)


@pytest.mark.parametrize("lifetime", ["round", "run"])
def test_features_are_those_of_fedavg_under_the_fixed_classifier_bit_for_bit(lifetime):
    settings = {"optimizer_lifetime": lifetime}
    data = partial(blobs, 30, 45, by_class=True)
    ours = fit(make_client(FedLoGe, net=noisy, **settings), data())
    other = fit(make_client(FedLoGe, net=noisy, sparsity=0.0, **settings), data())
    average = fit(make_client(FedAvg, net=under(0.1 * sparse_simplex(HIDDEN, CLASSES, 0.6)), **settings), data())
    assert equal(features(ours), features(average))
    # zeros change what features learn
    assert not near(features(other), features(average), atol=1e-4)


def test_predictions_by_hand():
    x, _ = points(9, seed=2)
    for realign in (True, False):
        model = trained(realign=realign, scale=2.5)
        z, head, own = model.net.features(x), model.net.classifier, model.personal
        weight, vectors = head.weight, own.weight
        both = torch.stack([w * v.norm() if realign else w for w, v in zip(weight, vectors, strict=True)])
        common = torch.stack([2.5 * w / w.norm() if realign else w for w in weight])
        torch.testing.assert_close(model(x), z @ both.T + head.bias + own(z))
        assert torch.equal(model.predicting_module()(x), model(x))
        model.has_personal.fill_(False)
        torch.testing.assert_close(model(x), z @ common.T + head.bias)
        assert torch.equal(model.predicting_module()(x), model(x))


def test_without_realignment_they_are_the_sums_of_the_heads():
    """And training is the same, whatever predictions are."""
    x, _ = points(9, seed=2)
    runs = [fit(make_client(FedLoGe, realign=realign)) for realign in (True, False)]
    assert equal(*({name: run.weights[name] for name in run.weights} for run in runs))
    model = trained(realign=False)
    z = model.net.features(x)
    torch.testing.assert_close(model(x), model.net.classifier(z) + model.personal(z))


def test_a_class_vector_of_length_0_gives_the_bias():
    model = make_client(FedLoGe).eval()
    with torch.no_grad():
        model.net.classifier.weight[1] = 0
    outputs = model(points(9, seed=2)[0])
    assert outputs.isfinite().all() and (outputs[:, 1] == model.net.classifier.bias[1]).all()


def test_two_rounds_by_a_second_implementation():
    """In float64, full batches: features by the fixed classifier, both heads by features of the step's beginning."""
    eta, steps = 0.1, 3
    data = blobs(24, 16, batch_size=100)
    run = fit(
        make_client(FedLoGe, norm=1.0, optimizer=partial(SGD, lr=eta)),
        data,
        local_epochs=steps,
        max_rounds=2,
        precision="64-true",
    )
    net, frame = make_client().net.double(), run.model.frame
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(2)]
    n = [len(part) for part in parts]
    x = {name: p.detach().clone() for name, p in net.named_parameters()}
    own = [{name: x[f"classifier.{name}"] for name in ("weight", "bias")} for _ in parts]
    for _ in range(2):
        ends = []
        for k, part in enumerate(parts):
            w = dict(x)
            for _ in range(steps):
                net.load_state_dict(w)
                net.zero_grad()
                z = net.features(part.x)
                F.cross_entropy(z @ frame, part.y).backward()
                F.cross_entropy(net.classifier(z.detach()), part.y).backward()
                v = {name: t.clone().requires_grad_() for name, t in own[k].items()}
                F.cross_entropy(F.linear(z.detach(), v["weight"], v["bias"]), part.y).backward()
                own[k] = {name: (t - eta * t.grad).detach() for name, t in v.items()}
                w = {name: (p - eta * p.grad).detach() for name, p in net.named_parameters()}
            ends.append(w)
        x = {name: sum(c * w[name] for c, w in zip(n, ends, strict=True)) / sum(n) for name in x}
    for name, tensor in x.items():
        torch.testing.assert_close(run.weights[f"net.{name}"], tensor, rtol=0, atol=1e-13)
    for k, state in run.federation.clients.items():
        for name, tensor in own[k].items():
            torch.testing.assert_close(state.personal[f"personal.{name}"], tensor, rtol=0, atol=1e-13)


def test_the_personal_head_stays_and_the_fixed_classifier_is_nowhere():
    spy = Spy()
    run = fit(make_client(FedLoGe), callbacks=[spy], max_rounds=1)
    sent = set(spy.updates[0][0]["weights"])
    assert sent == {f"net.{name}" for name, _ in make_client().net.named_parameters()}
    kept = {"personal.weight", "personal.bias", "has_personal"}
    assert all(set(state.personal) == kept for state in run.federation.clients.values())
    average = fit(make_client(FedAvg), max_rounds=1)
    assert run.rows[0]["bytes/up"] == average.rows[0]["bytes/up"]


def test_the_server_s_model_is_tested_with_vectors_of_one_length():
    run = fit(make_client(FedLoGe), blobs(20, 30, 45, by_class=True, central_test=0.2), test_every_round=True)
    part = run.data.central_data()
    model = make_client(FedLoGe)
    model.load_state_dict(run.weights, strict=False)
    hits = (model.eval().by_common(part.x).argmax(1) == part.y).float().mean()
    assert run.rows[-1]["test/global_acc"] == pytest.approx(float(hits))


def test_engines_agree():
    runs = [fit(make_client(FedLoGe), engine=engine, accelerator="cpu") for engine in ("sequential", "vectorised")]
    assert near(runs[0].weights, runs[1].weights)
    assert near(*({k: state.personal for k, state in sorted(run.federation.clients.items())} for run in runs))


def test_order_and_a_pause_change_no_bit(tmp_path):
    check_order_and_resume(FedLoGe, tmp_path)


def test_one_client_and_batches_of_one_learn():
    fit(make_client(FedLoGe), blobs(12, batch_size=5), max_rounds=2)
    check_batches_of_one(make_client(FedLoGe, norm=1.0, optimizer=partial(SGD, lr=0.05)), max_rounds=4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sparsity", 1.0),
        ("sparsity", -0.1),
        ("sparsity", math.nan),
        ("norm", 0.0),
        ("scale", -1.0),
        ("scale", math.inf),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value} must be"):
        make_client(FedLoGe, **{setting: value})


def test_nets_that_do_not_fit_are_refused():
    def deep(input_shape, num_classes):
        return Net(nn.Linear(input_shape[0], HIDDEN), nn.Sequential(nn.Linear(HIDDEN, num_classes), nn.Identity()))

    def narrow(input_shape, num_classes):
        return Net(nn.Linear(input_shape[0], 2), nn.Linear(2, num_classes))

    with pytest.raises(MisconfigurationException, match="has a classifier of several layers"):
        make_client(FedLoGe, net=deep)
    with pytest.raises(MisconfigurationException, match="gives vectors of length 2"):
        make_client(FedLoGe, net=narrow)
