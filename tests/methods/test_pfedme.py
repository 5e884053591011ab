import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

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
    points,
    same_end,
)
from pfl_lightning.aggregators import WeightedAverage
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.pfedme import PFedMe

ME = partial(PFedMe, moreau_lambda=4.0, personal_steps=3, personal_lr=0.1)
STEP = partial(SGD, lr=0.05)


def frozen(input_shape, num_classes):
    net = plain(input_shape, num_classes)
    net.features.requires_grad_(False)
    return net


def training(cls, **settings):
    """In float64 and in training mode, as engines set it."""
    model = make_client(cls, **settings).double()
    for module in model.modules():
        module.training = True
    return model


def batch(n, seed=0):
    x, y = points(n, seed)
    return x.double(), y


def models(run, prefix="personal."):
    """Each client's personal net, under the net's names."""
    return {
        client: {name.removeprefix(prefix): t for name, t in state.personal.items() if name.startswith(prefix)}
        for client, state in sorted(run.federation.clients.items())
    }


def global_model(run):
    return {name.removeprefix("net."): tensor for name, tensor in run.weights.items() if name.startswith("net.")}


def close(one, other):
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name])


@pytest.mark.parametrize(("beta", "weighting"), [(1.0, "uniform"), (1.5, "uniform"), (0.5, "samples")])
def test_two_rounds_by_hand(beta, weighting):
    data = blobs(30, 20, batch_size=100)
    settings = {"precision": "64-true", "local_epochs": 3, "max_rounds": 2}
    run = fit(make_client(ME, optimizer=STEP), data, aggregator=WeightedAverage(beta, weighting), **settings)
    net = make_client().net.double()
    parameters = dict(net.named_parameters())

    def slope(theta, part):
        net.load_state_dict(theta)
        return dict(
            zip(
                parameters,
                torch.autograd.grad(F.cross_entropy(net(part.x.double()), part.y), list(net.parameters())),
                strict=True,
            )
        )

    parts = [data.part(client, "train") for client in range(2)]
    shares = [len(part) / sum(map(len, parts)) for part in parts] if weighting == "samples" else [0.5, 0.5]
    w = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for _ in range(2):
        ends, thetas = [], []
        for part in parts:
            own, theta = w, w
            for _ in range(3):
                for _ in range(3):
                    g = slope(theta, part)
                    theta = {n: t - 0.1 * (g[n] + 4.0 * (t - own[n])) for n, t in theta.items()}
                own = {n: t - 0.05 * 4.0 * (t - theta[n]) for n, t in own.items()}
            ends.append(own)
            thetas.append(theta)
        mean = weighted_mean(ends, shares)
        w = {n: (1 - beta) * t + beta * mean[n] for n, t in w.items()}
    close(global_model(run), w)
    for client in range(2):
        close(models(run)[client], thetas[client])


def test_the_loss_is_a_moreau_envelope_with_its_own_gradient():
    model = training(partial(PFedMe, personal_steps=80, personal_lr=0.05))
    data = batch(12)

    def envelope(weights):
        model.net.load_state_dict(weights)
        return model.training_step(data, 0)["loss"]

    start = copy.deepcopy(model.net.state_dict())
    envelope(start).backward()
    gradient = {name: parameter.grad.clone() for name, parameter in model.net.named_parameters()}
    for name, parameter in model.net.named_parameters():
        torch.testing.assert_close(gradient[name], 15.0 * (parameter - model.personal.get_parameter(name)).detach())
    step = 1e-5
    above, below = (envelope({n: t + sign * gradient[n] for n, t in start.items()}) for sign in (step, -step))
    expected = sum(float(g.square().sum()) for g in gradient.values())
    assert float((above - below).detach()) / (2 * step) == pytest.approx(expected, rel=1e-5)


def test_without_its_weight_the_global_model_stays_and_personal_ones_are_local_ones_of_the_round():
    run = fit(make_client(partial(PFedMe, moreau_lambda=0.0, personal_steps=1, personal_lr=0.1)), max_rounds=2)
    assert equal(global_model(run), dict(make_client().net.state_dict()))
    one = fit(make_client(partial(PFedMe, moreau_lambda=0.0, personal_steps=1, personal_lr=0.1)), max_rounds=1)
    local = fit(make_client(Local, optimizer=partial(SGD, lr=0.1)), max_rounds=1)
    for client, own in models(one).items():
        close(own, {n.removeprefix("net."): t for n, t in local.federation.clients[client].personal.items()})


def test_the_weight_holds_personal_models_near_the_client_s():
    def distance(weight):
        model = training(partial(PFedMe, moreau_lambda=weight, personal_lr=0.02))
        model.training_step(batch(12), 0)
        pairs = zip(model.personal.parameters(), model.net.parameters(), strict=True)
        return sum(float((theta - w).detach().square().sum()) for theta, w in pairs)

    far, near, nearer = map(distance, (0.0, 20.0, 60.0))
    assert far > near > nearer > 0


def test_more_steps_and_another_rate_make_other_models():
    clients = ME, partial(ME, personal_steps=4), partial(ME, personal_lr=0.05)
    biases = [fit(make_client(client), max_rounds=1).weights["net.classifier.bias"] for client in clients]
    assert len({tuple(bias.tolist()) for bias in biases}) == 3


def test_what_a_net_has_frozen_stays():
    run = fit(make_client(ME, net=frozen))
    start = make_client(net=frozen).net.state_dict()
    assert torch.equal(global_model(run)["features.0.weight"], start["features.0.weight"])
    assert not any("features.0.weight" in own for own in models(run).values())
    for own in (*models(run).values(), global_model(run)):
        assert not torch.equal(own["classifier.weight"], start["classifier.weight"])


def test_running_statistics_are_those_of_the_personal_passes_and_travel():
    spy = Spy()
    run = fit(make_client(ME, net=noisy), blobs(30), max_rounds=1, callbacks=[spy])
    steps = -(-run.data.size(0, "train") // 5)
    own, sent = models(run)[0], spy.updates[0][0]["weights"]
    assert own["features.1.num_batches_tracked"] == 3 * steps
    assert own["features.1.running_mean"].abs().max() > 0
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(sent[f"net.features.1.{name}"], own[f"features.1.{name}"])
    assert not torch.equal(sent["net.classifier.weight"], own["classifier.weight"])


def test_clients_are_evaluated_by_their_personal_models_and_those_without_by_the_received_one():
    spy = Spy()
    run = fit(make_client(ME), callbacks=[spy], clients_per_round=2, max_rounds=2)
    trained = models(run)
    assert set(trained) == set(spy.cohorts[0]) | set(spy.cohorts[1]) and len(trained) < 4
    net = make_client().net
    for client, values in run.federation.evaluations.results["test"].items():
        net.load_state_dict(trained.get(client, global_model(run)))
        part = run.data.part(client, "test")
        assert values["loss"] == pytest.approx(float(F.cross_entropy(net(part.x), part.y).detach()))


def test_clients_can_be_evaluated_by_the_models_that_they_send():
    spy = Spy()
    local = fit(make_client(partial(ME, predict="local"), net=noisy), callbacks=[spy])
    personal = fit(make_client(ME, net=noisy))
    assert equal(global_model(local), global_model(personal))
    for client, own in models(local).items():
        assert equal({f"net.{name}": tensor for name, tensor in own.items()}, spy.updates[-1][client]["weights"])
        assert not equal(own, models(personal)[client])


def test_the_server_s_model_is_tested_as_the_global_one():
    data = blobs(central_test=0.2)
    run = fit(make_client(ME), data, test_every_round=True)
    net = make_client().net
    net.load_state_dict(global_model(run))
    part = data.central_data()
    hits = (net(part.x).argmax(1) == part.y).float().mean()
    assert run.rows[-1]["test/global_acc"] == pytest.approx(float(hits))


def test_only_the_client_s_model_travels():
    me, average = fit(make_client(ME, net=noisy)), fit(make_client(net=noisy))
    for direction in ("bytes/up", "bytes/down"):
        assert [row[direction] for row in me.rows] == [row[direction] for row in average.rows]
    for state in me.federation.clients.values():
        assert num_bytes(state.personal) == num_bytes(average.weights) + 1  # and a flag


@pytest.mark.exhaustive
def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    def run(root="unused", **settings):
        model = make_client(ME, net=noisy, optimizer_lifetime="run")
        settings = {"clients_per_round": 3, "max_rounds": 4, **settings}
        return fit(model, root=root, aggregator=WeightedAverage(1.5, "uniform"), **settings)

    whole = run()
    assert same_end(whole, run(engine=Shuffled))
    run(tmp_path, max_rounds=2)
    assert same_end(whole, run(tmp_path, ckpt_path="last"))


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (blobs(30, 45, by_class=True), {}),  # classes that a client, and one that nobody, holds
        (blobs(30), {}),
        (blobs(8, 8, batch_size=1), {}),
        (blobs(30, 24), {"precision": "bf16-mixed"}),
    ],
)
def test_it_trains_where_there_is_little(data, settings):
    run = fit(make_client(ME), data, **settings)
    assert run.rows[-1]["clients_diverged"] == 0
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]
    assert all(tensor.isfinite().all() for own in models(run).values() for tensor in own.values())


def test_a_client_without_a_batch_has_no_personal_model_and_sends_what_it_received():
    spy = Spy()
    run = fit(make_client(ME, net=noisy), blobs(40, 3), max_rounds=2, callbacks=[spy])
    states = run.federation.clients
    assert states[0].personal["has_personal"] and not states[1].personal["has_personal"]
    uploads = [updates[client]["weights"] for updates in spy.updates for client in (0, 1)]
    received = weighted_mean(uploads[:2], [0.5, 0.5])
    assert equal(uploads[3], received)


def test_a_client_is_loaded_from_a_checkpoint_with_its_personal_model(tmp_path):
    run = fit(make_client(ME), root=tmp_path)
    x = run.data.part(1, "test").x
    net = make_client().net
    for weights, client in ((models(run)[1], 1), (global_model(run), None)):
        net.load_state_dict(weights)
        assert torch.equal(load_client(PFedMe, run.last, client=client)(x), net(x))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("moreau_lambda", -1), ("personal_steps", 0), ("personal_lr", 0), ("personal_lr", 0.2)],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(partial(PFedMe, **{setting: value}))
