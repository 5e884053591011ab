from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, Spy, blobs, check_batches_of_one, equal, fit, make_client, noisy, points
from pfl_lightning.methods import APFL, FedAvg, Local
from pfl_lightning.nets import Net

MIXES = ["outputs", "parameters"]


def normalised(input_shape, num_classes):
    """With BatchNorm, and without draws."""
    body = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return Net(body, nn.Linear(HIDDEN, num_classes))


def sent(method, **settings):
    spy = Spy()
    fit(make_client(method, net=normalised, **settings), callbacks=[spy], clients_per_round=3)
    return [{k: update["weights"] for k, update in updates.items()} for updates in spy.updates]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.by_default("0.5-parameters")
def test_the_model_that_travels_is_fedavg_s_whatever_the_share(mix, alpha):
    assert equal(sent(partial(APFL, mix=mix, alpha=alpha)), sent(FedAvg))


@pytest.mark.parametrize("mix", MIXES)
def test_with_the_whole_share_the_personal_model_is_trained_alone(mix):
    runs = [
        fit(make_client(method, net=normalised), clients_per_round=3)
        for method in (partial(APFL, mix=mix, alpha=1.0, adaptive=False), Local)
    ]
    for client, state in runs[1].federation.clients.items():
        own = runs[0].federation.clients[client].personal
        for name, tensor in state.personal.items():
            torch.testing.assert_close(own[name.replace("net.", "personal.")], tensor, rtol=1e-5, atol=1e-6)


def test_without_a_share_the_personal_model_stands_still():
    run = fit(make_client(partial(APFL, alpha=0.0, adaptive=False)))
    start = make_client().state_dict()
    for state in run.federation.clients.values():
        assert all(torch.equal(state.personal[name.replace("net.", "personal.")], t) for name, t in start.items())
    average = fit(make_client(FedAvg))
    assert [row["val/loss"] for row in run.rows] == pytest.approx([row["val/loss"] for row in average.rows])


@pytest.mark.parametrize("alpha_per", ["round", "step"])
@pytest.mark.parametrize("mix", MIXES)
def test_two_rounds_of_one_client_by_a_second_implementation(mix, alpha_per):
    lr, steps, data = 0.3, 2, blobs(30, batch_size=100)
    client = make_client(APFL, mix=mix, alpha_per=alpha_per, optimizer=partial(SGD, lr=lr))
    run = fit(client, data, local_epochs=steps, max_rounds=2, precision="64-true")
    part = data.part(0, "train").to("cpu", torch.float64)
    w, v = make_client().net.double(), make_client().net.double()
    mixed = make_client().net.double()
    alpha = torch.tensor(0.5, dtype=torch.float64)
    for step in range(2 * steps):
        a = alpha.clone().requires_grad_()
        if mix == "outputs":
            z = a * v(part.x) + (1 - a) * w(part.x).detach()
        else:
            weights = {n: a * p + (1 - a) * dict(w.named_parameters())[n].detach() for n, p in v.named_parameters()}
            z = torch.func.functional_call(mixed, weights, (part.x,))
        *slopes, slope = torch.autograd.grad(F.cross_entropy(z, part.y), [*v.parameters(), a])
        own = torch.autograd.grad(F.cross_entropy(w(part.x), part.y), list(w.parameters()))
        for p, g in zip([*v.parameters(), *w.parameters()], [*slopes, *own], strict=True):
            p.data -= lr * g
        if alpha_per == "step" or step % steps == 0:
            alpha = (alpha - lr * slope).clamp(0, 1)
    personal = run.federation.clients[0].personal
    assert float(personal["alpha"]) == pytest.approx(float(alpha), abs=1e-12) and float(alpha) != 0.5
    for name, tensor in v.state_dict().items():
        torch.testing.assert_close(personal[f"personal.{name}"], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mix", MIXES)
def test_predictions_are_of_the_mixture_of_training(mix):
    run = fit(make_client(APFL, mix=mix, net=normalised))
    model, (x, _) = run.model, points(9, seed=1)
    model.receive(run.federation.clients[1].personal, run.federation.aggregator.download(1), None)
    model.eval()
    a, w, v = model.alpha, dict(model.net.named_parameters()), dict(model.personal.named_parameters())
    if mix == "outputs":
        expected = a * model.personal(x) + (1 - a) * model.net(x)
    else:
        expected = torch.func.functional_call(model.personal, {n: a * v[n] + (1 - a) * w[n] for n in v}, (x,))
    torch.testing.assert_close(model(x), expected)
    assert expected.shape == (9, CLASSES)


def test_the_share_stays_between_0_and_1():
    run = fit(make_client(APFL, alpha_lr=100.0, alpha_per="step"))
    shares = [float(state.personal["alpha"]) for state in run.federation.clients.values()]
    assert set(shares) <= {0.0, 1.0}
    assert 0 <= run.rows[-1]["train/alpha"] <= 1


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(APFL, optimizer=partial(SGD, lr=0.02)), max_rounds=4)
    assert all(row["clients_diverged"] == 0 for row in fit(make_client(APFL, net=noisy), blobs(3, 30)).rows)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": 1.5}, r"model\.alpha=1\.5 must be from 0 to 1"),
        ({"alpha_lr": -1.0}, r"model\.alpha_lr=-1\.0 must be"),
        ({"mix": "models"}, r"model\.mix='models' must be one of outputs, parameters"),
        ({"alpha_per": "epoch"}, r"model\.alpha_per='epoch' must be one of round, step"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        make_client(APFL, **settings)
