import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adam

from federations import (
    Shuffled,
    Spy,
    blobs,
    check_batches_of_one,
    equal,
    fit,
    gradient,
    load,
    make_client,
    noisy,
    plain,
    points,
    same_end,
)
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.data import Samples
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.scaffold import SCAFFOLD, ControlVariates
from pfl_lightning.nets import Net

SGD_ONLY = partial(SGD, lr=0.1)


def variates(run, clients):
    """c and all c_i, zero where a client hasn't taken part."""
    c = run.federation.aggregator.state["control"]
    return c, torch.stack([run.federation.job(client).state.personal["own"] for client in range(clients)])


def server(model, clients=4, **settings):
    aggregator = SCAFFOLD(**settings)
    aggregator.setup(Server(clients, {n: t.clone() for n, t in model.state_dict().items()}, model, None, seed=0))
    return aggregator


def update(model, seed, size=10):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else t + seed
        for name, t in model.state_dict().items()
    }
    control = torch.randn(len(model.own), generator=generator, dtype=model.own.dtype)
    return {"weights": weights, "control": control, "num_samples": torch.tensor(size)}


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_three_rounds_of_two_clients_by_hand(option, server_lr):
    """In float64, with clients of different sizes, which count equally."""
    eta, steps, data = 0.1, 4, blobs(24, 16, batch_size=100)
    run = fit(
        make_client(ControlVariates, option=option, optimizer=SGD_ONLY),
        data,
        aggregator=SCAFFOLD(server_lr=server_lr),
        local_epochs=steps,
        max_rounds=3,
        precision="64-true",
    )
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(2)]
    assert len(parts[0]) != len(parts[1])
    x = parameters_to_vector(net.parameters()).detach()
    c, own = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(2)]
    for _ in range(3):
        ends, new = [], []
        for k in range(2):
            y = x.clone()
            for step in range(steps):
                g = gradient(net, parts[k], at=y)
                if step == 0:
                    g_at_x = g
                y = y - eta * (g + c - own[k])
            new.append(g_at_x if option == "I" else own[k] - c + (x - y) / (steps * eta))
            ends.append(y)
        x = x + server_lr * ((ends[0] - x) + (ends[1] - x)) / 2
        c = c + (2 / 2) * ((new[0] - own[0]) + (new[1] - own[1])) / 2
        own = new
    ours = torch.cat([tensor.flatten() for name, tensor in run.weights.items() if name.startswith("net.")])
    assert ours.dtype == torch.float64
    assert torch.allclose(ours, x, rtol=0, atol=1e-14)
    c_ours, own_ours = variates(run, 2)
    assert torch.allclose(c_ours, c, rtol=0, atol=1e-13)
    assert torch.allclose(own_ours, torch.stack(own), rtol=0, atol=1e-13)


@pytest.mark.parametrize("clients_per_round", [1.0, 0.5])
def test_the_server_s_control_variate_is_the_mean_of_all_clients_whoever_takes_part(clients_per_round):
    for rounds in (1, 2, 5):
        model = make_client(ControlVariates, optimizer=SGD_ONLY)
        run = fit(model, clients_per_round=clients_per_round, max_rounds=rounds, precision="64-true")
        c, own = variates(run, 4)
        assert float(c.norm()) > 0.01
        assert torch.allclose(c, own.mean(0), rtol=0, atol=1e-15)
        assert run.rows[-1]["server/control_norm"] == pytest.approx(float(c.norm()))


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01), partial(Adam, lr=0.01)])
def test_the_first_round_s_steps_are_fedavg_s_and_the_second_s_are_not(net, optimizer):
    spies = Spy(), Spy()
    for method, spy in zip((ControlVariates, FedAvg), spies, strict=True):
        aggregator = SCAFFOLD() if method is ControlVariates else None
        settings = {"net": net, "optimizer": optimizer}
        fit(make_client(method, **settings), blobs(20, 20), aggregator=aggregator, callbacks=[spy], max_rounds=2)
    corrected, plainly = ([updates[0]["weights"] for updates in spy.updates] for spy in spies)
    assert equal(corrected[0], plainly[0])
    assert not equal(corrected[1], plainly[1])


def test_of_one_client_it_is_fedavg():
    runs = [fit(make_client(m, optimizer=SGD_ONLY), blobs(40), max_rounds=4) for m in (ControlVariates, FedAvg)]
    c, own = variates(runs[0], 1)
    assert torch.allclose(c, own[0], rtol=0, atol=1e-6) and float(c.norm()) > 0.01
    for name, tensor in runs[1].federation.aggregator.global_model().items():
        torch.testing.assert_close(runs[0].weights[name], tensor)


def test_the_correction_is_added_to_the_gradient_and_not_to_the_loss():
    client = make_client(ControlVariates)
    x, y = points(9, seed=1)
    part = type(blobs()).server_data(blobs())
    before = gradient(client.net, part)
    client.correction.copy_(torch.randn(len(client.own), generator=torch.Generator().manual_seed(0)))
    h = client.net.features(x)
    loss = client.loss(h, client.net.classifier(h), y)
    assert torch.equal(loss, F.cross_entropy(client.net(x), y))
    after = parameters_to_vector(torch.autograd.grad(loss, list(client.net.parameters())))
    torch.testing.assert_close(after, before + client.correction)


def linear(input_shape, num_classes):
    return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))


@pytest.mark.parametrize("option", ["I", "II"])
def test_it_gets_where_the_mean_gradient_is_zero_and_fedavg_does_not(option):
    """Two clients of different classes and many local steps of a strictly convex problem."""
    slopes = []
    for method in (partial(ControlVariates, option=option), FedAvg):
        data = blobs(60, 60, by_class=True, batch_size=100)
        client = make_client(method, net=linear, optimizer=partial(SGD, lr=0.2, weight_decay=0.1))
        net = fit(client, data, local_epochs=10, max_rounds=15).model.net
        mean = sum(gradient(net, data.part(k, "train")) for k in range(2)) / 2
        slopes.append((mean + 0.1 * parameters_to_vector(net.parameters())).norm().item())
    assert slopes[0] < 0.05 * slopes[1]


@pytest.mark.parametrize("net", [plain, noisy])
def test_option_one_is_the_gradient_at_the_received_model_also_under_momentum(net, monkeypatch):
    """By chunks of the client's samples, and in evaluation mode."""
    spy, chunk = Spy(), 7
    whole = Samples.chunks
    monkeypatch.setattr(Samples, "chunks", lambda self, size=chunk: whole(self, size))
    run = fit(make_client(ControlVariates, option="I", net=net), callbacks=[spy], max_rounds=1)
    model = make_client(net=net).eval()
    for client in range(4):
        part = run.data.part(client, "train")
        expected = gradient(model.net, part).detach()
        torch.testing.assert_close(spy.updates[0][client]["control"], expected)
        torch.testing.assert_close(run.federation.clients[client].personal["own"], expected)
    assert any(len(run.data.part(client, "train")) > 2 * chunk for client in range(4))


def test_option_two_makes_no_further_pass(monkeypatch):
    monkeypatch.delattr("pfl_lightning.methods.scaffold.mean_gradient")
    fit(make_client(ControlVariates), max_rounds=1)
    with pytest.raises(NameError):
        fit(make_client(ControlVariates, option="I"), max_rounds=1)


def test_a_client_without_a_step_or_without_a_learning_rate_keeps_its_control_variate():
    spy = Spy()
    data = blobs(3, 30, 30)
    run = fit(make_client(ControlVariates, net=noisy, optimizer=SGD_ONLY), data, callbacks=[spy])
    assert data.size(0, "train") == 1, "which BatchNorm doesn't take"
    assert all(not updates[0]["control"].any() and updates[1]["control"].any() for updates in spy.updates)
    assert not run.federation.clients[0].personal["own"].any()
    still = fit(make_client(ControlVariates, optimizer=partial(SGD, lr=0.0)), callbacks=[spy])
    assert not variates(still, 4)[0].any()
    assert all(row["clients_diverged"] == 0 for row in still.rows)


def test_the_schedule_s_rate_is_the_one_that_counts():
    """With full batches c_i is a mean of gradients, whatever the rate."""
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1)
    data = blobs(40, batch_size=100)
    make = partial(make_client, ControlVariates, optimizer=SGD_ONLY, lr_scheduler=schedule)
    spy = Spy()
    fit(make(), data, callbacks=[spy], max_rounds=2)
    net = copy.deepcopy(make_client().net)
    net.load_state_dict({name.removeprefix("net."): t for name, t in spy.updates[0][0]["weights"].items()})
    new = spy.updates[0][0]["control"] + spy.updates[1][0]["control"]
    torch.testing.assert_close(new, gradient(net, data.part(0, "train")).detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("server_lr", [1.0, 0.25, 1.5])
def test_parameters_go_the_server_s_step_and_running_statistics_are_averaged(server_lr):
    model = make_client(ControlVariates, net=noisy)
    aggregator = server(model, server_lr=server_lr)
    x = copy.deepcopy(aggregator.state["weights"])
    updates = {1: update(model, 1, size=10), 3: update(model, 3, size=1000)}
    log = aggregator.aggregate(updates, round=0)
    mean = weighted_mean([u["weights"] for u in updates.values()], [0.5, 0.5])
    parameters = dict(model.named_parameters())
    assert set(parameters) < set(mean)
    for name, tensor in aggregator.global_model().items():
        if name in parameters and server_lr != 1:
            torch.testing.assert_close(tensor, x[name] + server_lr * (mean[name] - x[name]))
        else:
            assert torch.equal(tensor, mean[name])
    assert list(aggregator.state["shares"].values()) == [0.5, 0.5]
    torch.testing.assert_close(aggregator.state["control"], (updates[1]["control"] + updates[3]["control"]) / 4)
    assert log == {"control_norm": pytest.approx(float(aggregator.state["control"].norm()))}


def test_nobody_taking_part_changes_nothing():
    aggregator = server(make_client(ControlVariates))
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=0) == {}
    assert equal(aggregator.state, before)


def test_only_its_own_control_variate_stays_with_a_client_and_two_vectors_travel():
    run = fit(make_client(ControlVariates, optimizer=SGD_ONLY))
    assert all(set(state.personal) == {"own"} for state in run.federation.clients.values())
    model = num_bytes(make_client().state_dict())
    assert run.rows[-1]["bytes/down"] == 4 * 2 * model
    assert run.rows[-1]["bytes/up"] == 4 * (2 * model + 8)


@pytest.mark.parametrize("option", ["I", "II"])
def test_order_changes_nothing_and_resuming_goes_on_bit_for_bit(option, tmp_path):
    make = partial(make_client, ControlVariates, option=option, net=noisy, optimizer=SGD_ONLY)
    settings = {"clients_per_round": 3, "max_rounds": 4, "evaluate": "both"}
    whole = fit(make(), **settings)
    assert same_end(whole, fit(make(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, **{**settings, "max_rounds": 2})
    resumed = fit(make(seed=9), root=tmp_path, ckpt_path="last", resume_changed=True, **settings)
    assert same_end(whole, resumed)
    assert load(resumed.last)["federation"]["aggregator"]["control"].any()


def test_evaluation_leaves_no_trace():
    run = fit(make_client(ControlVariates, option="I", net=noisy))
    before = copy.deepcopy(run.federation.federation_state())
    run.test()
    assert equal(run.federation.federation_state(), before)


@pytest.mark.parametrize("option", ["I", "II"])
def test_it_learns_from_batches_of_one_and_of_absent_classes(option):
    check_batches_of_one(make_client(ControlVariates, option=option, optimizer=partial(SGD, lr=0.02)), max_rounds=6)


def frozen_features(*shape):
    net = plain(*shape)
    net.features.requires_grad_(False)
    return net


def test_frozen_parameters_stand_still():
    run = fit(make_client(ControlVariates, option="I", optimizer=SGD_ONLY, net=frozen_features))
    start = make_client().state_dict()
    assert torch.equal(run.weights["net.features.0.weight"], start["net.features.0.weight"])
    assert not torch.equal(run.weights["net.classifier.weight"], start["net.classifier.weight"])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_server_step_that_is_none_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.server_lr={value} must be above 0"):
        SCAFFOLD(server_lr=value)


@pytest.mark.parametrize(("model", "aggregator"), [(FedAvg, SCAFFOLD), (ControlVariates, WeightedAverage)])
def test_either_side_alone_is_refused(model, aggregator):
    with pytest.raises(MisconfigurationException, match="needs control, which"):
        fit(make_client(model), aggregator=aggregator())
