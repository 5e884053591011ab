from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    FEATURES,
    NETS,
    Spy,
    blobs,
    check_order_and_resume,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    points,
    same_end,
)
from pfl_lightning.methods import FedAvg, FedMRL, Local
from pfl_lightning.nets import Net


def slim(input_shape, num_classes):
    """Three features, of which BatchNorm keeps statistics."""
    body = nn.Sequential(nn.Linear(input_shape[0], 3), nn.BatchNorm1d(3), nn.Tanh())
    return Net(body, nn.Linear(3, num_classes))


class Apart(FedMRL):
    """Its projection lets the own features through, and nothing else, and stands still."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        size = self.net.projection.out_features
        kept = [torch.zeros(size, self.net.small_size), torch.eye(size)]
        self.net.projection.weight.data = torch.cat(kept, 1)
        self.net.projection.bias.data.zero_()

    def adjust_gradients(self, gradients):
        return {name: 0 * g if "projection" in name else g for name, g in gradients.items()}


def test_without_the_small_net_s_features_and_loss_it_is_local_bit_for_bit():
    apart, local = fit(make_client(Apart, omega=0.0)), fit(make_client(Local))
    for client, state in local.federation.clients.items():
        own = apart.federation.clients[client].personal
        assert all(torch.equal(own[name], tensor) for name, tensor in state.personal.items())


def test_a_step_by_hand():
    model = make_client(FedMRL, small=slim, omega=0.7).double()
    x, y = points(9, seed=1)
    x = x.double()
    log = model.training_step((x, y), 0)
    log["loss"].backward()
    p = {name: t.detach().clone().requires_grad_() for name, t in model.named_parameters()}

    def linear(name, h):
        return h @ p[f"net.{name}.weight"].T + p[f"net.{name}.bias"]

    h = linear("small.features.0", x)
    h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    common = torch.tanh(h * p["net.small.features.1.weight"] + p["net.small.features.1.bias"])
    z = linear("projection", torch.cat([common, torch.tanh(linear("features.0", x))], 1))
    small = F.cross_entropy(linear("small.classifier", z[:, :3]), y)
    (F.cross_entropy(linear("classifier", z), y) + 0.7 * small).backward()
    torch.testing.assert_close(log["small_loss"], small)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, p[name].grad)
    # the last numbers of a representation have no gradient of the small net's loss
    assert not torch.autograd.grad(model.training_step((x, y), 0)["small_loss"], model.net.projection.bias)[0][3:].any()


def test_the_small_net_alone_travels_with_its_statistics_and_all_parts_learn():
    spy = Spy()
    run = fit(make_client(FedMRL, net=noisy, small=slim), callbacks=[spy])
    sent = spy.updates[-1][0]["weights"]
    assert set(sent) == {f"net.small.{name}" for name in slim((FEATURES,), CLASSES).state_dict()}
    start = make_client(FedMRL, net=noisy, small=slim).state_dict()
    assert all(not torch.equal(run.federation.aggregator.global_model()[name], start[name]) for name in sent)
    first, second = (run.federation.clients[client].personal for client in (0, 1))
    for name in ("net.features.0.weight", "net.projection.weight", "net.classifier.bias"):
        assert not torch.equal(first[name], start[name]) and not torch.equal(first[name], second[name])
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_running_statistics_stay_where_they_are_made_if_so_set():
    spy = Spy()
    run = fit(make_client(FedMRL, small=slim, buffers="local"), callbacks=[spy])
    assert "net.small.features.1.running_mean" in run.federation.clients[0].personal
    assert not any("running" in name for name in spy.updates[0][0]["weights"])


def test_omega_of_zero_leaves_the_shared_classifier_still_and_not_the_shared_features():
    sent = fit(make_client(FedMRL, small=slim, omega=0.0)).federation.aggregator.global_model()
    start = make_client(FedMRL, small=slim).state_dict()
    # the mean of equal weights is rounded
    torch.testing.assert_close(sent["net.small.classifier.weight"], start["net.small.classifier.weight"])
    moved = sent["net.small.features.0.weight"] - start["net.small.features.0.weight"]
    assert moved.abs().max() > 0.01


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_with_different_nets_share_the_small_one(engine):
    run = fit(make_client(FedMRL, net=NETS, small=slim, optimizer=partial(SGD, lr=0.1)), engine=engine)
    entries = [set(run.federation.clients[client].personal) for client in range(4)]
    assert entries[0] == entries[2] != entries[1] == entries[3]
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    # the first net, where none is given
    made = make_client(FedMRL, net=NETS)
    assert [type(each.net.small) for each in made.architectures()] == [NETS[0]] * 2


def test_the_small_net_starts_apart_from_the_personal_one_which_starts_as_without_the_method():
    model, average = make_client(FedMRL), make_client(FedAvg)
    assert torch.equal(model.net.features[0].weight, average.net.features[0].weight)
    assert not torch.equal(model.net.small.features[0].weight, average.net.features[0].weight)


def test_frozen_features_of_the_small_net_never_travel():
    def frozen(input_shape, num_classes):
        net = plain(input_shape, num_classes)
        net.features.requires_grad_(False)
        return net

    spy = Spy()
    run = fit(make_client(FedMRL, small=frozen), callbacks=[spy])
    assert set(spy.updates[0][0]["weights"]) == {"net.small.classifier.weight", "net.small.classifier.bias"}
    assert not any("small" in name for name in run.federation.clients[0].personal)


def test_order_and_resume(tmp_path):
    check_order_and_resume(partial(FedMRL, small=slim), tmp_path)


def test_engines_agree():
    runs = [fit(make_client(FedMRL, net=plain, small=slim), engine=engine) for engine in ("sequential", "vectorised")]
    for name, tensor in runs[0].weights.items():
        torch.testing.assert_close(runs[1].weights[name], tensor)
    assert same_end(runs[0], fit(make_client(FedMRL, net=plain, small=slim)))


@pytest.mark.parametrize("data", [blobs(30), blobs(30, 45, by_class=True), blobs(30, batch_size=1)])
def test_it_trains_where_there_is_little(data):
    run = fit(make_client(FedMRL), data)
    assert run.rows[-1]["clients_diverged"] == 0
    assert equal(*(run.federation.aggregator.download(0) for _ in range(2)))


def test_a_wider_shared_net_and_a_negative_weight_are_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.small=Net has 5 features, and model\.net=Net 3"):
        make_client(FedMRL, net=slim, small=plain)
    with pytest.raises(MisconfigurationException, match=r"model\.omega=-1 must be"):
        make_client(FedMRL, omega=-1)
