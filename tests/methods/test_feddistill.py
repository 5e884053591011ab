from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, Altered, Spy, blobs, equal, fit, make_client, noisy, plain, points
from pfl_lightning.aggregators import ClassMeans
from pfl_lightning.methods import Local
from pfl_lightning.methods.feddistill import FedDistill


def models(run):
    return {client: state.personal for client, state in sorted(run.federation.clients.items())}


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.parametrize(("gamma", "data"), [(0.0, blobs), (1.0, partial(blobs, 40))], ids=["no term", "one client"])
@pytest.mark.by_default(but=["no term-noisy"])
def test_without_its_term_and_of_one_client_it_is_local_bit_for_bit(net, gamma, data):
    runs = [fit(make_client(m, net=net), data()) for m in (partial(FedDistill, gamma=gamma), Local)]
    assert equal(*map(models, runs))
    assert equal(*([row["val/loss"] for row in run.rows] for run in runs))


def test_clients_without_a_class_in_common_train_as_local():
    data = partial(blobs, 40, 40, 40, by_class=True)
    assert equal(*(models(fit(make_client(method), data())) for method in (FedDistill, Local)))


@pytest.mark.parametrize("target", ["prob", "raw_logits"])
@pytest.mark.by_default("prob")
def test_its_term_changes_the_models_as_soon_as_there_are_outputs(target):
    for rounds, same in ((1, True), (2, False)):
        settings = partial(FedDistill, target=target), Local
        assert equal(*(models(fit(make_client(m), max_rounds=rounds)) for m in settings)) is same


@pytest.mark.parametrize("target", ["prob", "raw_logits"])
def test_a_step_by_hand(target):
    """In the second round of a client whose other class nobody else has."""
    data, spy = blobs(40, 60, by_class=True, batch_size=100), Spy()
    client = make_client(FedDistill, gamma=0.7, target=target, optimizer=partial(SGD, lr=0.1))

    class Shared(Altered):
        def alter(self, part, client, split):
            return type(part)(part.x, part.y.clamp(max=1))

    data.__class__ = Shared  # classes 0; 1; and class 0 of a few samples of the second
    fit(client, data, max_rounds=2, callbacks=[spy])
    second = spy.updates[1][1]
    net, part = make_client().net, data.part(1, "train")

    def step(loss):
        for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            p.data -= 0.1 * g

    step(F.cross_entropy(net(part.x), part.y))
    others = spy.updates[0][0]["outputs"]
    logits = net(part.x)
    taught = torch.stack([others.get(int(c), torch.zeros(CLASSES)) for c in part.y])
    step(F.cross_entropy(logits, part.y) - 0.7 * (taught * logits.log_softmax(1)).sum(1).mean())
    with torch.no_grad():
        outputs = net(part.x).softmax(1) if target == "prob" else net(part.x)
    for c, mean in second["outputs"].items():
        torch.testing.assert_close(mean, outputs[part.y == c].mean(0))


def test_a_sample_of_a_class_that_nobody_else_has_adds_nothing():
    client = make_client(FedDistill)
    client.outputs.take({0: torch.tensor([0.8, 0.2, 0.0])})
    x, y = points(6, seed=1)
    logits = client.net(x).detach().requires_grad_()
    (both,) = torch.autograd.grad(client.loss(None, logits, y), logits)
    (alone,) = torch.autograd.grad(F.cross_entropy(logits, y), logits)
    torch.testing.assert_close(both[y > 0], alone[y > 0])
    taught = (logits.softmax(1) - client.outputs.vectors[0])[y == 0] / 6
    torch.testing.assert_close(both[y == 0], (alone[y == 0] + taught).detach())


def test_a_client_receives_the_mean_of_the_others_and_sends_its_own():
    spy = Spy()
    run = fit(make_client(FedDistill, net=noisy), callbacks=[spy])
    model = make_client(net=noisy).eval()
    sent = spy.updates[-1]
    for client, update in sent.items():
        model.load_state_dict(models(run)[client])
        part = run.data.part(client, "train")
        with torch.no_grad():
            outputs = model(part.x).softmax(1)
        for c, received in run.federation.aggregator.download(client)["outputs"].items():
            torch.testing.assert_close(update["outputs"][c], outputs[part.y == c].mean(0))
            others = [u["outputs"][c] for other, u in sent.items() if other != client]
            torch.testing.assert_close(received, sum(others) / len(others))
            assert float(received.sum()) == pytest.approx(1, abs=1e-6)


def test_bytes_are_those_of_the_classes_that_there_are():
    run = fit(make_client(FedDistill), blobs(40, 60, 20, by_class=True))
    output = 4 * CLASSES
    held = [set(torch.nonzero(row).flatten().tolist()) for row in run.data.counts]
    assert held == [{0}, {1, 2}, {2}]
    assert {row["bytes/up"] for row in run.rows} == {4 * output}
    # client 0 receives classes 1 and 2; client 1 receives 0, and 2 of client 2; client 2 receives all
    assert [row["bytes/down"] for row in run.rows] == [0, 7 * output, 7 * output]


def test_including_the_own_part_is_the_server_s_choice():
    with_own = fit(make_client(FedDistill), aggregator=ClassMeans("outputs", weighted=False))
    assert not equal(models(with_own), models(fit(make_client(FedDistill))))


def test_a_negative_weight_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.gamma=-1"):
        make_client(FedDistill, gamma=-1)
