import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, NETS, Spy, blobs, equal, fit, make_client, set_up
from pfl_lightning.aggregators import GlobalHeader
from pfl_lightning.methods import FedGH
from pfl_lightning.methods.class_vectors import class_means


def sent(seed, classes=range(CLASSES), size=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    return {"prototypes": {c: torch.randn(size, generator=generator) for c in classes}}


def test_the_classifier_by_a_second_implementation():
    """Two rounds with full batches, in which the order of pairs says nothing."""
    ours = set_up(GlobalHeader(server_epochs=3, batch_size=100, optimizer=partial(SGD, lr=0.5)), make_client(FedGH))
    head = make_client().net.classifier
    optimizer = SGD(head.parameters(), lr=0.5)
    for number in range(2):
        updates = {k: sent(10 * number + k, classes) for k, classes in ((0, [0, 1]), (2, [2]), (3, [0, 2]))}
        log = ours.aggregate(updates, number)
        x = torch.stack([v for u in updates.values() for v in u["prototypes"].values()])
        y = torch.tensor([c for u in updates.values() for c in u["prototypes"]])
        for _ in range(3):
            loss = F.cross_entropy(head(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert log == {"header_loss": pytest.approx(loss.item(), rel=1e-5)}
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(ours.download(1)["weights"][f"net.classifier.{name}"], tensor)


def test_without_passes_or_without_clients_the_classifier_stays():
    still, ours = (set_up(GlobalHeader(server_epochs=n), make_client(FedGH)) for n in (0, 1))
    before = copy.deepcopy(still.state)
    assert still.aggregate({0: sent(1)}, 0) == {} and equal(still.state, before)
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)
    ours.aggregate({0: sent(1)}, 0)
    assert not equal(ours.state, before)


def test_small_batches_are_drawn_by_seed_and_round():
    one, again, other = (set_up(GlobalHeader(batch_size=2), make_client(FedGH)) for _ in range(3))
    updates = {k: sent(k) for k in range(3)}
    for aggregator, round in ((one, 0), (again, 0), (other, 1)):
        aggregator.aggregate(updates, round)
    assert equal(one.state, again.state) and not equal(one.state, other.state)


def test_only_means_of_features_go_up_and_only_the_classifier_comes_down():
    spy = Spy()
    run = fit(make_client(FedGH, optimizer=partial(SGD, lr=0.1)), callbacks=[spy], max_rounds=2)
    update = spy.updates[1][0]
    assert set(update) == {"prototypes"}
    assert set(run.federation.aggregator.download(0)["weights"]) == {"net.classifier.weight", "net.classifier.bias"}
    personal = run.federation.clients[0].personal
    assert all(name.startswith("net.features.") for name in personal)
    body = make_client().net.features
    body.load_state_dict({name.removeprefix("net.features."): t for name, t in personal.items()})
    expected = class_means(body, run.data.client(0), CLASSES)
    torch.testing.assert_close(update["prototypes"], expected)


def test_different_bodies_share_a_classifier():
    run = fit(make_client(FedGH, net=NETS), blobs(30, 40, 20, 30))
    assert run.rows[-1]["clients_diverged"] == 0
    assert not torch.equal(run.weights["net.classifier.weight"], make_client(net=NETS[0]).net.classifier.weight)


def test_clients_of_one_class_and_batches_of_one_end_finite():
    run = fit(make_client(FedGH), blobs(20, 20, 30, by_class=True, batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


@pytest.mark.parametrize(("name", "value"), [("server_epochs", -1), ("batch_size", 0)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value} must be"):
        GlobalHeader(**{name: value})
