import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from federations import (
    Pause,
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    drawn_update,
    equal,
    fit,
    flat,
    gradient,
    make_client,
    near,
    noisy,
    same_end,
    set_up,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import ControlledAverage, MimicAverage
from pfl_lightning.data import Samples
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods import FedAvg, Mime, MimeLite
from pfl_lightning.nets import Net
from pfl_lightning.privacy import SecureSum

PLAIN = partial(SGD, lr=0.1)
MOMENTUM = {"beta1": 0.6}
ADAM = {"beta1": 0.6, "beta2": 0.8, "epsilon": 0.01}
RMSPROP = {"beta1": 0.0, "beta2": 0.8, "epsilon": 0.01}


def linear(input_shape, num_classes):
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


class Base:
    """The paper's table of optimizers, with the first round of an unknown v left out."""

    def __init__(self, size, beta1, beta2=None, epsilon=None):
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.m, self.v, self.known = torch.zeros(size).double(), torch.zeros(size).double(), beta2 is None

    def step(self, g):
        g = (1 - self.beta1) * g + self.beta1 * self.m
        if self.beta2 is not None:
            g = g / (self.epsilon + self.v.sqrt())
        return g if self.known else torch.zeros_like(g)

    def track(self, g):
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        if self.beta2 is not None:
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        self.known = True


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("server", [MOMENTUM, ADAM, RMSPROP], ids=["momentum", "adam", "rmsprop"])
@pytest.mark.parametrize("method", [MimeLite, Mime])
@pytest.mark.by_default(but=["samples"])
def test_rounds_of_three_clients_by_a_second_implementation(method, server, weighting):
    """In float64, in the order of the official code: c, then training, then the statistics."""
    lr, steps, data, control = 0.1, 3, blobs(24, 16, 40, batch_size=100), method is Mime
    aggregator = (ControlledAverage if control else MimicAverage)(server_lr=0.7, weighting=weighting, **server)
    run = fit(
        make_client(method, optimizer=partial(SGD, lr=lr)),
        data,
        aggregator=aggregator,
        local_epochs=steps,
        max_rounds=8 if control else 4,
        precision="64-true",
    )
    net = make_client().net.double()
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(3)]
    n = [len(part) if weighting == "samples" else 1 for part in parts]
    x = parameters_to_vector(net.parameters()).detach()
    base = Base(len(x), **server)
    for _ in range(4):
        at_x = [gradient(net, part, at=x) for part in parts]
        c = sum(share * g for share, g in zip(n, at_x, strict=True)) / sum(n)
        ends = []
        for part, own in zip(parts, at_x, strict=True):
            y = x.clone()
            for _ in range(steps):
                g = gradient(net, part, at=y)
                y = y - lr * base.step(g - own + c if control else g)
            ends.append(y)
        base.track(c)
        x = x + 0.7 * sum(share * (y - x) for share, y in zip(n, ends, strict=True)) / sum(n)
        assert run.rows[-1]["server/gradient_norm"] > 0
    assert torch.allclose(flat(run.weights, names), x, rtol=0, atol=1e-14)
    assert run.rows[-1]["server/gradient_norm"] == pytest.approx(float(c.norm()), rel=1e-12)
    state = run.federation.aggregator.state
    if server["beta1"]:
        assert torch.allclose(flat(state["m"], names), base.m, rtol=0, atol=1e-14)
    if "beta2" in server:
        assert torch.allclose(flat(state["v"], names), base.v, rtol=0, atol=1e-14)


def test_of_plain_sgd_mimelite_is_fedavg_bit_for_bit_and_of_momentum_it_is_not():
    make, settings = partial(make_client, optimizer=PLAIN, net=noisy), {"clients_per_round": 3}
    parent, off, on = (
        fit(make(method), aggregator=aggregator, **settings)
        for method, aggregator in (
            (FedAvg, WeightedAverage(weighting="uniform")),
            (MimeLite, MimicAverage(beta1=0.0)),
            (MimeLite, MimicAverage(beta1=0.5)),
        )
    )
    assert equal(parent.weights, off.weights) and parent.test() == off.test()
    assert not near(parent.weights, on.weights, atol=1e-3)


def test_a_steady_gradient_moves_the_model_as_momentum_does():
    """m takes the gradient of each round, and one local step is then that of centralised momentum, a round later."""
    data, beta, lr = blobs(60, batch_size=100), 0.8, 0.1
    run = fit(
        make_client(MimeLite, optimizer=partial(SGD, lr=lr)),
        data,
        aggregator=MimicAverage(beta1=beta),
        max_rounds=5,
        precision="64-true",
    )
    net = make_client().net.double()
    x = parameters_to_vector(net.parameters()).detach()
    m, part = torch.zeros_like(x), data.part(0, "train").to("cpu", torch.float64)
    for _ in range(5):
        m = beta * m + (1 - beta) * gradient(net, part, at=x)
        x = x - lr * m
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.weights, names), x, rtol=0, atol=1e-14)


def test_with_one_step_on_all_samples_mime_s_clients_agree_whatever_they_hold():
    spy = Spy()
    data = blobs(60, 30, 30, by_class=True, batch_size=100)
    fit(make_client(Mime, optimizer=PLAIN), data, callbacks=[spy], max_rounds=4, precision="64-true")
    for updates in spy.updates[1::2]:
        models = [update["weights"] for update in updates.values()]
        assert all(near(dict(model), dict(models[0]), atol=1e-12) for model in models)
    lite = Spy()
    fit(make_client(MimeLite, optimizer=PLAIN), data, callbacks=[lite], max_rounds=1, precision="64-true")
    apart = [update["weights"] for update in lite.updates[0].values()]
    assert not near(dict(apart[0]), dict(apart[1]), atol=1e-3)


@pytest.mark.exhaustive
def test_mime_gets_where_the_mean_gradient_is_zero_and_fedavg_does_not():
    """Two clients of different classes and many local steps of a strictly convex problem."""
    slopes = []
    for method, rounds in ((Mime, 40), (FedAvg, 20)):
        data = blobs(60, 60, by_class=True, batch_size=100)
        client = make_client(method, net=linear, optimizer=partial(SGD, lr=0.2, weight_decay=0.1))
        aggregator = ControlledAverage(beta1=0.0) if method is Mime else None
        net = fit(client, data, aggregator=aggregator, local_epochs=10, max_rounds=rounds).model.net
        mean = sum(gradient(net, data.part(k, "train")) for k in range(2)) / 2
        slopes.append((mean + 0.1 * parameters_to_vector(net.parameters())).norm().item())
    assert slopes[0] < 0.05 * slopes[1]


def test_the_correction_is_in_the_gradient_and_not_in_the_recorded_loss():
    client = make_client(Mime).double().eval()
    x, y = blobs().server_data().x.double(), blobs().server_data().y
    names = [name for name, _ in client.net.named_parameters()]
    drawn = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in client.net.named_parameters()}
    client.control.take(drawn.items())
    client.corrected.fill_(1.0)
    client.received.take((name, p + 0.1) for name, p in client.net.named_parameters())
    loss = client.training_step((x, y), 0)["loss"]
    own = torch.autograd.grad(loss, list(client.net.parameters()))
    before = gradient(client.net, Samples(x, y))
    at_x = copy.deepcopy(client.net)
    for p in at_x.parameters():
        p.data += 0.1
    expected = before + flat(drawn, names) - gradient(at_x, Samples(x, y))
    torch.testing.assert_close(parameters_to_vector(own), expected, rtol=0, atol=1e-13)
    assert float(loss) == float(nn.functional.cross_entropy(client.net(x), y))


@pytest.mark.parametrize("net", [None, noisy])
def test_reports_are_gradients_of_all_samples_in_evaluation_mode(net, monkeypatch):
    """By chunks of the client's samples, whatever it then trains."""
    spy, chunk, settings = Spy(), 7, {"net": net} if net else {}
    whole = Samples.chunks
    monkeypatch.setattr(Samples, "chunks", lambda self, size=chunk: whole(self, size))
    run = fit(make_client(MimeLite, **settings), callbacks=[spy], max_rounds=1)
    model = make_client(**settings).eval()
    names = [f"net.{name}" for name, _ in model.net.named_parameters()]
    for client in range(4):
        expected = gradient(model.net, run.data.part(client, "train"))
        torch.testing.assert_close(flat(spy.updates[0][client]["gradient"], names), expected)
    assert any(len(run.data.part(client, "train")) > 2 * chunk for client in range(4))


def test_rounds_of_reports_train_nothing_and_half_as_much_travels():
    spy = Spy()
    run = fit(make_client(Mime, net=noisy, optimizer=PLAIN), callbacks=[spy], max_rounds=4)
    before = make_client(Mime, net=noisy).state_dict()
    for number, updates in enumerate(spy.updates):
        for update in updates.values():
            assert bool(update["weights"]) != bool(update["gradient"]) == (number % 2 == 0)
    first = fit(make_client(Mime, net=noisy, optimizer=PLAIN), max_rounds=1)
    assert all(torch.equal(first.weights[name], before[name]) for name in first.weights)
    assert math.isnan(run.rows[0].get("train/loss", math.nan)) and run.rows[1]["train/loss"] > 0
    model = num_bytes({name: p for name, p in make_client(Mime, net=noisy).net.named_parameters()})
    assert run.rows[0]["bytes/up"] == 4 * (model + 8)


def test_without_reports_clients_train_as_mimelite():
    """As where nobody of a round of reports could be reached."""
    client = make_client(Mime, optimizer=PLAIN)
    server = set_up(ControlledAverage(beta1=0.5), client)
    assert server.aggregate({}, 0) == {}
    client.on_download(server.download(0), None)
    batch = (blobs().server_data().x, blobs().server_data().y)
    loss = client.training_step(batch, 0)["loss"]
    own = torch.autograd.grad(loss, list(client.net.parameters()))
    torch.testing.assert_close(parameters_to_vector(own), gradient(client.net, blobs().server_data()))
    trained = drawn_update(client, 1, gradient={})
    assert server.aggregate({0: trained}, 1) == {} and not server.state["m"]


def test_reports_count_for_one_round_of_training():
    client = make_client(Mime)
    server = set_up(ControlledAverage(beta1=0.5), client)
    report = {name: torch.ones_like(p) for name, p in client.named_parameters()}
    server.aggregate({k: {"weights": {}, "gradient": report} for k in range(2)}, 0)
    assert equal(dict(server.download(0)["control"]), report) and not server.state["m"]
    server.aggregate({1: drawn_update(client, 1, gradient={})}, 1)
    assert server.download(0)["control"] == {}
    assert all(bool((m == 0.5).all()) for m in server.state["m"].values())


def test_running_statistics_are_averaged_and_nobody_changes_nothing():
    model = make_client(net=noisy)
    server = set_up(MimicAverage(server_lr=0.5), model)
    names = {name for name, _ in model.named_parameters()}
    updates = {k: drawn_update(model, k, gradient={n: p.detach() for n, p in model.named_parameters()}) for k in (1, 3)}
    server.aggregate(updates, 0)
    mean = weighted_mean([update["weights"] for update in updates.values()], [0.5, 0.5])
    assert all(torch.equal(server.global_model()[name], mean[name]) for name in mean.keys() - names)
    before = copy.deepcopy(server.state)
    assert server.aggregate({}, 1) == {} and equal(server.state, before)


@pytest.mark.parametrize("method", [MimeLite, Mime])
def test_a_client_without_a_step_reports_all_the_same(method):
    """BatchNorm takes no batch of one sample in training, and its gradient in evaluation mode is one of many."""
    spy, data = Spy(), blobs(3, 30, 30)
    run = fit(make_client(method, net=noisy, optimizer=PLAIN), data, callbacks=[spy], max_rounds=4)
    assert data.size(0, "train") == 1
    assert any(bool(entry.any()) for entry in spy.updates[0][0]["gradient"].values())
    assert all(bool(tensor.isfinite().all()) for tensor in run.weights.values())


@pytest.mark.parametrize("method", [MimeLite, Mime])
def test_one_client_alone_learns(method):
    run = fit(make_client(method, optimizer=PLAIN), blobs(60), max_rounds=8)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


@pytest.mark.parametrize("method", [MimeLite, Mime])
@pytest.mark.by_default("Mime")
def test_order_and_a_pause_change_no_bit(method, tmp_path):
    check_order_and_resume(method, tmp_path, max_rounds=5)


def test_a_pause_between_reports_and_training_changes_no_bit(tmp_path):
    make = partial(make_client, Mime, net=noisy, optimizer=PLAIN)
    whole = fit(make(), aggregator=ControlledAverage(**ADAM), max_rounds=6)
    fit(make(), root=tmp_path, aggregator=ControlledAverage(**ADAM), callbacks=[Pause(3)], max_rounds=6)
    settings = {"aggregator": ControlledAverage(**ADAM), "ckpt_path": "last", "max_rounds": 6}
    assert same_end(whole, fit(make(), root=tmp_path, **settings))


@pytest.mark.parametrize("server", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("method", [MimeLite, Mime])
@pytest.mark.by_default("MimeLite-adam", "Mime-momentum")
def test_engines_agree(method, server):
    aggregator = ControlledAverage if method is Mime else MimicAverage
    runs = [
        fit(
            make_client(method, optimizer=PLAIN),
            aggregator=aggregator(**server),
            engine=engine,
            clients_per_round=3,
            max_rounds=6,
            accelerator="cpu",
        )
        for engine in ("sequential", "vectorised")
    ]
    assert near(runs[0].weights, runs[1].weights)


@pytest.mark.parametrize("method", [MimeLite, Mime])
def test_a_tied_parameter_makes_one_step(method):
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    before = make_client(net=net).net.features[0].weight.clone()
    weights = fit(make_client(method, net=net, optimizer=PLAIN), max_rounds=4).weights
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])
    assert not torch.equal(weights["net.features.0.weight"], before)


@pytest.mark.parametrize("method", [MimeLite, Mime])
def test_a_server_that_sees_sums_alone_does_the_same(method):
    runs = [
        fit(make_client(method, optimizer=PLAIN), max_rounds=4, secure_sum=secure) for secure in (None, SecureSum())
    ]
    assert near(runs[0].weights, runs[1].weights, atol=1e-4)


def test_a_common_parameter_has_no_statistics():
    def net(input_shape, num_classes):
        made = linear(input_shape, num_classes)
        made.classifier.bias.requires_grad_(False)
        return made

    run = fit(make_client(Mime, net=net, optimizer=PLAIN), max_rounds=4)
    assert run.federation.aggregator.state["m"].keys() == {"net.classifier.weight"}


@pytest.mark.parametrize("method", [MimeLite, Mime])
def test_it_learns_from_batches_of_one_where_classes_are_absent(method):
    check_batches_of_one(make_client(method, optimizer=partial(SGD, lr=0.02)), max_rounds=6)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"beta1": 1.0}, r"aggregator\.beta1=1\.0 must be 0 or more and below 1"),
        ({"beta2": -0.1}, r"aggregator\.beta2=-0\.1 must be 0 or more and below 1"),
        ({"epsilon": 0.0}, r"aggregator\.epsilon=0\.0 must be above 0"),
        ({"epsilon": math.nan}, r"aggregator\.epsilon=nan must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, text):
    with pytest.raises(MisconfigurationException, match=text):
        MimicAverage(**settings)


@pytest.mark.parametrize(
    ("client", "server", "text"),
    [
        (FedAvg, MimicAverage, "MimicAverage needs gradient"),
        (MimeLite, WeightedAverage, "needs (slope|offset)"),
        (Mime, MimicAverage, "needs control"),
    ],
)
def test_either_side_alone_is_refused(client, server, text):
    with pytest.raises(MisconfigurationException, match=text):
        fit(make_client(client), aggregator=server())
