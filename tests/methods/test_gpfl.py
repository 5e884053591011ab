import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, Spy, blobs, check_batches_of_one, equal, fit, make_client, points
from pfl_lightning.methods import GPFL
from pfl_lightning.methods.gpfl import ConditionalLayer


def test_without_scale_and_shift_the_conditional_layer_is_a_relu():
    layer, h = ConditionalLayer(HIDDEN), torch.randn(4, HIDDEN)
    for part in (layer.gamma, layer.beta):
        part[2].weight.data.zero_()
    torch.testing.assert_close(layer(h, torch.randn(HIDDEN)), h.relu())


def test_the_conditional_layer_by_hand():
    layer, h, u = ConditionalLayer(HIDDEN), torch.randn(4, HIDDEN), torch.randn(HIDDEN)

    def normalised(linear):
        z = linear(u).relu()
        return (z - z.mean()) / (z.var(unbiased=False) + 1e-5).sqrt()

    expected = (h * (normalised(layer.gamma[0]) + 1) + normalised(layer.beta[0])).relu()
    torch.testing.assert_close(layer(h, u), expected)


def test_two_rounds_of_one_client_by_a_second_implementation():
    """In float64, with the decay in the hands of the optimizer, as the official code has it."""
    lr, lam, mu, data = 0.2, 0.3, 0.1, blobs(30, batch_size=100)
    client = make_client(GPFL, magnitude=lam, decay=mu, optimizer=partial(SGD, lr=lr))
    run = fit(client, data, local_epochs=2, max_rounds=2, precision="64-true")
    part = data.part(0, "train").to("cpu", torch.float64)
    made = make_client(GPFL).double()
    net, cov, table = made.net, made.conditional, made.vectors
    shares = torch.bincount(part.y, minlength=CLASSES).double() / len(part)
    optimizer = SGD([{"params": net.parameters()}, {"params": [table, *cov.parameters()], "weight_decay": mu}], lr=lr)
    for _ in range(2):
        old = table.detach().clone()
        for _ in range(2):
            h = net.features(part.x)
            f_p, f_g = cov(h, (shares[:, None] * old).sum(0)), cov(h, old.mean(0))
            cosines = F.cosine_similarity(f_g[:, None], table[None], dim=2)
            loss = F.cross_entropy(net.classifier(f_p), part.y) + F.cross_entropy(cosines, part.y)
            loss = loss + lam * (f_g - old[part.y]).square().sum().sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    ours = {**run.federation.aggregator.global_model(), **run.federation.clients[0].personal}
    torch.testing.assert_close(ours["shares"], shares)
    for name, tensor in made.state_dict().items():
        if name != "shares":
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-11)


def test_classifier_and_shares_stay_and_all_else_travels():
    spy = Spy()
    run = fit(make_client(GPFL), callbacks=[spy])
    stays = {"net.classifier.weight", "net.classifier.bias", "shares"}
    assert all(set(state.personal) == stays for state in run.federation.clients.values())
    assert set(spy.updates[0][0]["weights"]) | stays == set(make_client(GPFL).state_dict())
    assert not equal(run.federation.clients[0].personal, run.federation.clients[1].personal)
    assert float(run.federation.clients[0].personal["shares"].sum()) == pytest.approx(1.0)


def test_cosines_bound_the_second_term():
    run = fit(make_client(GPFL), max_rounds=3)
    assert all(row["train/guide"] >= math.log(1 + (CLASSES - 1) * math.exp(-2)) for row in run.rows)


def test_predictions_are_of_the_personal_features():
    run = fit(make_client(GPFL))
    model, (x, _) = run.model, points(9, seed=1)
    model.receive(run.federation.clients[1].personal, run.federation.aggregator.download(1), None)
    expected = model.net.classifier(model.conditional(model.net.features(x), model.shares @ model.vectors))
    torch.testing.assert_close(model(x), expected)


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(GPFL, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


@pytest.mark.parametrize("name", ["magnitude", "decay"])
def test_what_is_negative_is_refused_by_name(name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}=-1 must be"):
        make_client(GPFL, **{name: -1})
