from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import HIDDEN, Spy, blobs, check_batches_of_one, fit, make_client, points
from pfl_lightning.methods import FedCP
from pfl_lightning.methods.fedcp import discrepancy
from pfl_lightning.nets import Net

HEAD = ("net.classifier.weight", "net.classifier.bias")


def received(seed=None, **settings):
    """A client with a classifier that isn't the received one."""
    client = make_client(FedCP, **settings)
    weights = {name: t.clone() for name, t in client.state_dict().items() if client.is_shared(name)}
    if seed is not None:
        for name in HEAD:
            weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
    client.on_download({"weights": weights}, None)
    return client, weights


def test_the_discrepancy_by_hand():
    a, b = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    kernel = sum(
        torch.exp(-(torch.cdist(torch.cat([a, b]), torch.cat([a, b])) ** 2) / (2 * w)) for w in (10, 15, 20, 50)
    )
    expected = (kernel[:4, :4] + kernel[4:, 4:] - 2 * kernel[:4, 4:]).mean()
    torch.testing.assert_close(discrepancy(a, b), expected)
    assert float(discrepancy(a, a)) == 0


def test_predictions_are_by_both_classifiers_in_the_shares_of_the_policy():
    client, weights = received(seed=1)
    client.eval()
    x, _ = points(9, seed=1)
    h = client.net.features(x)
    own = client.net.classifier.weight
    v = own.sum(0) / own.sum(0).norm()
    scores = client.policy[2](client.policy[1](client.policy[0](h * v))).reshape(9, 2, HIDDEN)
    r, s = scores.softmax(1).unbind(1)
    assert torch.allclose(r + s, torch.ones(9, HIDDEN))
    expected = client.net.classifier(r * h) + F.linear(s * h, weights[HEAD[0]], weights[HEAD[1]])
    torch.testing.assert_close(client(x), expected)
    assert torch.equal(client(x), client(x)), "no noise"
    client.train()
    assert not torch.equal(client.classify(h), client.classify(h))


def test_of_equal_classifiers_without_bias_the_policy_is_without_effect():
    def unbiased(input_shape, num_classes):
        return Net(nn.Linear(input_shape[0], HIDDEN), nn.Linear(HIDDEN, num_classes, bias=False))

    client = make_client(FedCP, net=unbiased)
    client.on_download({"weights": client.state_dict()}, None)
    x, _ = points(9, seed=1)
    torch.testing.assert_close(client(x), client.net(x))


def test_the_context_of_several_layers_is_of_their_product():
    def deep(input_shape, num_classes):
        head = nn.Sequential(nn.Linear(HIDDEN, 4), nn.Tanh(), nn.Linear(4, num_classes))
        return Net(nn.Linear(input_shape[0], HIDDEN), head)

    client = make_client(FedCP, net=deep)
    client.on_download({"weights": {}}, None)
    rows = (client.net.classifier[2].weight @ client.net.classifier[0].weight).sum(0)
    torch.testing.assert_close(client.context, (rows / rows.norm()).detach())


def test_the_classifier_stays_and_its_mean_with_the_received_one_travels():
    spy = Spy()
    run = fit(make_client(FedCP), callbacks=[spy], max_rounds=2)
    first = make_client().state_dict()
    assert all(set(state.personal) == set(HEAD) for state in run.federation.clients.values())
    state, sent = run.federation.clients[0].personal, spy.updates[1][0]["weights"]
    mean = {n: sum(u["weights"][n] * int(u["num_samples"]) for u in spy.updates[0].values()) for n in HEAD}
    total = sum(int(u["num_samples"]) for u in spy.updates[0].values())
    for name in HEAD:
        torch.testing.assert_close(sent[name], (state[name] + mean[name] / total) / 2)
        assert not torch.equal(state[name], first[name])
    assert any(name.startswith("policy.") for name in sent) and not any(name.startswith("head.") for name in sent)


def test_a_classifier_that_does_not_move_is_sent_as_it_was():
    client, weights = received()
    data = blobs(4)
    data.setup()
    sent = client.upload(data.client(0))["weights"]
    assert all(torch.equal(sent[name], weights[name]) for name in HEAD)


def test_two_steps_by_hand_with_the_noise_taken_out(monkeypatch):
    monkeypatch.setattr(F, "gumbel_softmax", lambda scores, dim: scores.softmax(dim))
    lr, data = 0.2, blobs(30, batch_size=100)
    client = make_client(FedCP, mmd=0.7, optimizer=partial(SGD, lr=lr))
    run = fit(client, data, local_epochs=2, max_rounds=1, precision="64-true")
    part = data.part(0, "train").to("cpu", torch.float64)
    made = make_client(FedCP).double()
    net, policy = made.net, made.policy
    old = make_client().net.double()
    v = F.normalize(old.classifier.weight.detach().sum(0), dim=0)
    for _ in range(2):
        h = net.features(part.x)
        r, s = policy(h * v).reshape(len(part), 2, HIDDEN).softmax(1).unbind(1)
        loss = F.cross_entropy(
            net.classifier(r * h) + F.linear(s * h, old.classifier.weight.detach(), old.classifier.bias.detach()),
            part.y,
        )
        loss = loss + 0.7 * discrepancy(h, old.features(part.x).detach())
        trained = [*net.parameters(), *policy.parameters()]
        for p, g in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            p.data -= lr * g
    ours = run.federation.aggregator.global_model()
    for name, tensor in made.state_dict().items():
        if name in HEAD:
            torch.testing.assert_close(run.federation.clients[0].personal[name], tensor, rtol=0, atol=1e-12)
        elif name in ours:
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedCP, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


def test_a_negative_weight_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.mmd=-1"):
        make_client(FedCP, mmd=-1)
