from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    HIDDEN,
    Spy,
    blobs,
    check_batches_of_one,
    drawn_update,
    equal,
    fit,
    make_client,
    noisy,
    points,
    set_up,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FisherAverage
from pfl_lightning.methods import FedAS, FedPer

HEAD = {"net.classifier.weight", "net.classifier.bias"}


def test_without_alignment_clients_train_as_fedper_s_bit_for_bit_and_with_it_do_not():
    runs = []
    for method in (partial(FedAS, align_epochs=0), FedAS, FedPer):
        spy = Spy()
        fit(make_client(method, net=noisy), aggregator=Plain() if method is not FedPer else None, callbacks=[spy])
        runs.append([{k: u["weights"] for k, u in updates.items()} for updates in spy.updates])
    assert equal(runs[0], runs[2])
    assert not equal(runs[1][2], runs[2][2])


class Plain(WeightedAverage):
    """Takes no notice of slopes."""


def test_two_rounds_of_two_clients_by_a_second_implementation():
    """In float64; the alignment of the first round is none."""
    lr, data = 0.2, blobs(24, 30, batch_size=100)
    settings = {"align_lr": 0.5, "align_batch_size": 100, "fisher_batch_size": 7}
    spy = Spy()
    client = make_client(FedAS, optimizer=partial(SGD, lr=lr), **settings)
    run = fit(client, data, max_rounds=2, precision="64-true", callbacks=[spy])
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(2)]
    own = [make_client().net.double() for _ in range(2)]
    body = {n: t.clone() for n, t in own[0].features.state_dict().items()}
    for number in range(2):
        slopes = []
        for k, part in enumerate(parts):
            net, classes = own[k], range(int(part.y.max()) + 1)
            h = net.features(part.x).detach()
            means = torch.stack([h[part.y == c].mean(0) for c in classes])
            net.features.load_state_dict(body)
            if number:
                h = net.features(part.x)
                loss = sum((h[part.y == c] - means[c]).square().mean() for c in classes)
                for p, g in zip(
                    net.features.parameters(), torch.autograd.grad(loss, net.features.parameters()), strict=True
                ):
                    p.data -= 0.5 * g
            gradients = torch.autograd.grad(F.cross_entropy(net(part.x), part.y), list(net.parameters()))
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.data -= lr * g
            total = 0.0
            for start in range(0, len(part), 7):
                batch = F.cross_entropy(net(part.x[start : start + 7]), part.y[start : start + 7])
                total += sum(float(g.square().sum()) for g in torch.autograd.grad(batch, list(net.parameters())))
            slopes.append(total)
            assert float(spy.updates[number][k]["fisher"]) == pytest.approx(total, rel=1e-10)
        ends = [net.features.state_dict() for net in own]
        body = {n: sum(s * end[n] for s, end in zip(slopes, ends, strict=True)) / sum(slopes) for n in body}
    ours = run.federation.aggregator.global_model()
    for name, tensor in body.items():
        torch.testing.assert_close(ours[f"net.features.{name}"], tensor, rtol=0, atol=1e-12)
    assert run.rows[-1]["server/max_share"] == pytest.approx(max(slopes) / sum(slopes))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_alignment_leaves_running_statistics_and_modes_as_they_are(engine):
    """In the second round clients align and train nothing else, so that a change would be the alignment's."""

    class AlignOnly(FedAS):
        def local_phases(self):
            return super().local_phases()[:1] if self.has_personal else super().local_phases()

    run = fit(make_client(AlignOnly, net=noisy, align_lr=0.5), blobs(24, 24), max_rounds=2, engine=engine)
    first = fit(make_client(AlignOnly, net=noisy, align_lr=0.5), blobs(24, 24), max_rounds=1, engine=engine)
    assert not equal(run.weights["net.features.0.weight"], first.weights["net.features.0.weight"])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(run.weights[f"net.features.1.{name}"], first.weights[f"net.features.1.{name}"])


def test_short_batches_of_the_alignment_are_those_of_each_client_alone():
    """With this seed most clients have no aim, and the others' filling is of classes without further samples."""
    ends = []
    for engine in ("sequential", "vectorised"):
        client = make_client(FedAS)
        torch.manual_seed(0)
        settings = {"engine": engine, "clients_per_round": 3, "max_rounds": 2, "precision": "64-true"}
        ends.append(fit(client, blobs(31, 12, 44, 9, 5), **settings).weights)
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=1e-9)


def test_the_alignment_is_in_evaluation_mode():
    client, (x, y) = make_client(FedAS, net=noisy), points(9, seed=1)
    client.phase = client.local_phases()[0]
    client.aims.take({c: torch.full((HIDDEN,), float(c)) for c in range(CLASSES)})
    client.eval()
    expected = client.training_step((x, y), 0)["loss"]
    client.train()
    assert torch.equal(client.training_step((x, y), 0)["loss"], expected)
    assert all(layer.training for layer in client.net.modules())


def test_clients_are_evaluated_by_the_model_that_they_trained_last():
    spy = Spy()
    run = fit(make_client(FedAS), callbacks=[spy], max_rounds=2)
    personal = run.federation.clients[1].personal
    last = spy.updates[1][1]["weights"]
    assert all(torch.equal(personal[name.replace("net.", "personal.")], tensor) for name, tensor in last.items())
    assert HEAD <= set(personal) and not HEAD & set(last)
    part = run.data.part(1, "test")
    run.model.receive(personal, run.federation.aggregator.download(1), None)
    run.model.eval()
    accuracy = float((run.model.personal(part.x).argmax(1) == part.y).float().mean())
    assert run.logger.clients[1]["test/acc"] == accuracy


def test_without_slopes_the_server_averages_by_samples():
    model = make_client(FedAS)
    updates = {k: drawn_update(model, k, 10 * k, fisher=torch.tensor(0.0)) for k in (1, 2)}
    ours, plain = set_up(FisherAverage(), model), set_up(WeightedAverage(), model)
    ours.aggregate(updates, 0)
    plain.aggregate(updates, 0)
    assert equal(ours.global_model(), plain.global_model())
    before = ours.global_model()
    assert ours.aggregate({}, 1) == {} and equal(ours.global_model(), before)


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    check_batches_of_one(make_client(FedAS, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


@pytest.mark.parametrize("name", ["align_epochs", "align_lr", "align_batch_size", "fisher_batch_size"])
def test_what_is_out_of_range_is_refused_by_name(name):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}=-1 must be"):
        make_client(FedAS, **{name: -1})
