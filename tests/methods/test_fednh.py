import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    HIDDEN,
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
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.fednh import PROTOTYPES, CosineClassifier, FedNH, NormalizedHead
from pfl_lightning.nets import MLP, Net

SCALE = "net.classifier.scale"


def unit(*values):
    return F.normalize(torch.tensor(values, dtype=torch.float64), dim=0)


def server(rho, prototypes, clients=4):
    aggregator = FedNH(rho)
    aggregator.setup(Server(clients, {"w": torch.zeros(1), PROTOTYPES: prototypes}, None, None, seed=0))
    return aggregator


def update(w, counts, directions, size=10):
    return {
        "weights": {"w": torch.tensor([w])},
        "class_counts": torch.tensor(counts),
        "num_samples": torch.tensor(size),
        "directions": directions,
    }


@pytest.mark.parametrize(("classes", "size"), [(3, 5), (4, 4), (5, 3)])
def test_prototypes_are_orthonormal_where_they_can_be_and_unit_vectors_always(classes, size):
    v = CosineClassifier(size, classes, 1.0, True).prototypes
    torch.testing.assert_close(v.norm(dim=1), torch.ones(classes))
    orthonormal = torch.allclose(v @ v.T, torch.eye(classes), atol=1e-6)
    assert orthonormal == (classes <= size)


def test_logits_are_scaled_cosines():
    head = CosineClassifier(4, 3, 7.0, True)
    h = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    cosines = F.cosine_similarity(h[:, None], head.prototypes[None], dim=2)
    torch.testing.assert_close(head(h), 7 * cosines)
    torch.testing.assert_close(head(100 * h), head(h))
    dead = torch.zeros(2, 4, requires_grad=True)
    logits = head(dead)
    logits.sum().backward()
    assert not logits.any() and dead.grad.isfinite().all()


@pytest.mark.parametrize("net", [plain, partial(MLP, hidden=(7, HIDDEN), head="all_fc")])
def test_it_takes_the_place_of_the_net_s_classifier(net):
    client = make_client(NormalizedHead, net=net)
    names = {name for name in client.state_dict() if name.startswith("net.classifier.")}
    assert names == {SCALE, PROTOTYPES}
    assert client(points(4, seed=1)[0]).shape == (4, CLASSES)
    assert PROTOTYPES not in dict(client.named_parameters())


def test_two_rounds_by_hand():
    """Of two clients of different sizes, whose models count equally and whose directions by samples of the class."""
    rho, data = 0.6, blobs(30, 50, batch_size=100)
    make = partial(make_client, NormalizedHead, scale=2.0, optimizer=partial(SGD, lr=0.5))
    run = fit(make(), data, aggregator=FedNH(rho), local_epochs=2, max_rounds=2)
    net = make().net.double()
    theta, v = copy.deepcopy(net.state_dict()), net.classifier.prototypes.clone()
    for _ in range(2):
        ends, sums = [], torch.zeros_like(v)
        for client in range(2):
            part = data.part(client, "train").to("cpu", torch.float64)
            net.load_state_dict(theta)
            parameters = list(net.parameters())
            for _ in range(2):
                h = net.features(part.x)
                z = net.classifier.scale * (h / h.norm(dim=1, keepdim=True)) @ v.T
                for p, g in zip(parameters, torch.autograd.grad(F.cross_entropy(z, part.y), parameters), strict=True):
                    p.data -= 0.5 * g
            ends.append(copy.deepcopy(net.state_dict()))
            h = net.features(part.x).detach()
            h = h / h.norm(dim=1, keepdim=True)
            for c in range(CLASSES):
                mean = h[part.y == c].mean(0)
                sums[c] += (part.y == c).sum() * mean / mean.norm()
        v = rho * v + (1 - rho) * sums / sums.norm(dim=1, keepdim=True)
        v = v / v.norm(dim=1, keepdim=True)
        theta = {name: (ends[0][name] + ends[1][name]) / 2 for name in theta}
        theta["classifier.prototypes"] = v
    for name, tensor in theta.items():
        torch.testing.assert_close(run.weights[f"net.{name}"].double(), tensor, rtol=1e-4, atol=1e-5)
    start = make().state_dict()
    for name in (SCALE, PROTOTYPES):
        assert not torch.allclose(run.weights[name], start[name], atol=1e-3)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_with_all_smoothing_prototypes_never_move(buffers):
    settings = {"net": noisy, "buffers": buffers}
    run = fit(make_client(NormalizedHead, **settings), aggregator=FedNH(rho=1.0))
    start = make_client(NormalizedHead, **settings).state_dict()
    assert torch.equal(run.weights[PROTOTYPES], start[PROTOTYPES])
    assert not torch.equal(run.weights["net.features.0.weight"], start["net.features.0.weight"])
    moved = fit(make_client(NormalizedHead, **settings)).weights[PROTOTYPES]
    torch.testing.assert_close(moved.norm(dim=1), torch.ones(CLASSES))
    assert not torch.allclose(moved, start[PROTOTYPES], atol=1e-2)


def test_under_fedavg_s_server_it_is_the_method_whose_prototypes_never_move():
    """Bit for bit, where clients have one size."""
    still = fit(make_client(NormalizedHead), blobs(20, 20), aggregator=FedNH(rho=1.0))
    average = fit(make_client(NormalizedHead), blobs(20, 20), aggregator=WeightedAverage())
    assert equal(still.weights, average.weights)


def test_without_smoothing_prototypes_are_the_directions_and_that_of_a_class_that_nobody_has_stays():
    spy = Spy()
    data = blobs(40, 40, by_class=True)
    run = fit(make_client(NormalizedHead, net=noisy), data, aggregator=FedNH(rho=0.0), callbacks=[spy])
    start = make_client(NormalizedHead, net=noisy).state_dict()[PROTOTYPES]
    v = run.weights[PROTOTYPES]
    assert torch.equal(v[2], start[2])
    for c in range(2):
        torch.testing.assert_close(v[c], spy.updates[-1][c]["directions"][c])
        assert set(spy.updates[-1][c]["directions"]) == {c}
    assert all(math.isfinite(row["server/cosine"]) for row in run.rows)


def test_models_count_equally_and_directions_by_samples_of_their_class():
    v = torch.stack([unit(1, 0), unit(0, 1), unit(3, 4)]).float()
    aggregator = server(0.5, v)
    first = update(1.0, [9, 0, 0], {0: unit(0, 1).float()}, size=9)
    second = update(3.0, [1, 5, 0], {0: unit(1, 0).float(), 1: unit(1, 1).float()}, size=6)
    log = aggregator.aggregate({0: first, 7: second}, round=0)
    assert aggregator.state["weights"]["w"] == 2
    expected = torch.stack([F.normalize(unit(1, 0) + unit(1, 9), dim=0), F.normalize(unit(0, 1) + unit(1, 1), dim=0)])
    torch.testing.assert_close(aggregator.state["weights"][PROTOTYPES][:2].double(), expected, rtol=0, atol=1e-7)
    assert torch.equal(aggregator.state["weights"][PROTOTYPES][2], v[2])
    cosines = float(unit(1, 0) @ unit(1, 9)), float(unit(0, 1) @ unit(1, 1))
    assert log == {"cosine": pytest.approx(sum(cosines) / 2)}


@pytest.mark.parametrize("direction", [torch.zeros(2), torch.tensor([-1.0, 0.0])], ids=["dead", "opposite"])
def test_a_direction_that_leads_nowhere_leaves_the_prototype(direction):
    v = torch.eye(2)
    aggregator = server(0.5, v)
    log = aggregator.aggregate({0: update(1.0, [4, 0], {0: direction})}, round=0)
    assert torch.equal(aggregator.state["weights"][PROTOTYPES], v)
    assert log == ({} if not direction.any() else {"cosine": -1.0})


def test_the_server_s_first_prototypes_are_its_own_copy():
    v = torch.eye(2)
    aggregator = server(0.5, v)
    aggregator.aggregate({0: update(1.0, [4, 0], {0: unit(1, 1).float()})}, round=0)
    assert torch.equal(v, torch.eye(2))
    assert not torch.equal(aggregator.state["weights"][PROTOTYPES], v)


def test_nobody_taking_part_changes_nothing():
    aggregator = server(0.5, torch.eye(2))
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=0) == {} and equal(aggregator.state, before)


def test_prototypes_travel_down_and_directions_of_present_classes_up():
    spy = Spy()
    run = fit(make_client(NormalizedHead), blobs(40, 60, 20, by_class=True), callbacks=[spy])
    theta = num_bytes(make_client().net.features.state_dict()) + 4
    row, v = 4 * HIDDEN, 4 * HIDDEN * CLASSES
    assert [len(update["directions"]) for update in spy.updates[0].values()] == [1, 2, 1]
    assert run.rows[0]["bytes/down"] == 3 * (theta + v)
    assert run.rows[0]["bytes/up"] == 3 * (theta + 8 * CLASSES + 8) + 4 * row


def test_the_directions_are_of_the_trained_model_in_evaluation_mode():
    spy = Spy()
    run = fit(make_client(NormalizedHead, net=noisy), callbacks=[spy], max_rounds=1)
    model = make_client(NormalizedHead, net=noisy).eval()
    for client, sent in spy.updates[0].items():
        model.assign(sent["weights"])
        part = run.data.part(client, "train")
        with torch.no_grad():
            h = F.normalize(model.net.features(part.x))
        for c, direction in sent["directions"].items():
            torch.testing.assert_close(direction, F.normalize(h[part.y == c].mean(0), dim=0))


def test_a_fixed_scale_stays_and_a_learned_one_learns():
    for learned in (True, False):
        run = fit(make_client(NormalizedHead, scale=30.0, learn_scale=learned))
        assert (float(run.weights[SCALE]) != 30) is learned


def test_the_global_model_is_whole_and_a_checkpoint_gives_it_to_each_client(tmp_path):
    run = fit(make_client(NormalizedHead), root=tmp_path)
    part = run.data.part(1, "test")
    accuracy = run.logger.clients[1]["test/acc"]
    for client in (None, 1):
        model = load_client(NormalizedHead, run.last, client=client).eval()
        assert equal(dict(model.state_dict()), run.weights)
        assert float((model(part.x).argmax(1) == part.y).float().mean()) == accuracy
    assert accuracy > 0.5


@pytest.mark.exhaustive
def test_order_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, NormalizedHead, net=noisy, optimizer_lifetime="run")
    settings = {"clients_per_round": 3, "max_rounds": 4, "evaluate": "both"}
    whole = fit(make(), **settings)
    assert same_end(whole, fit(make(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(seed=9), root=tmp_path, ckpt_path="last", resume_changed=True, **settings))


@pytest.mark.parametrize("data", [partial(blobs, 40), partial(blobs, 30, 60, by_class=True)], ids=["one client", "two"])
def test_it_learns_from_batches_of_one_and_of_absent_classes(data):
    client = make_client(NormalizedHead, optimizer=partial(SGD, lr=0.05))
    run = fit(client, data(batch_size=1), max_rounds=5)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def narrow(input_shape, num_classes):
    """Fewer units than classes, all of them off."""
    layer = nn.Linear(input_shape[0], 2)
    nn.init.constant_(layer.bias, -100.0)
    return Net(nn.Sequential(layer, nn.ReLU()), nn.Linear(2, num_classes))


def test_dead_features_leave_everything_finite():
    run = fit(make_client(NormalizedHead, net=narrow))
    assert all(tensor.isfinite().all() for tensor in run.weights.values())
    assert torch.equal(run.weights[PROTOTYPES], make_client(NormalizedHead, net=narrow).state_dict()[PROTOTYPES])
    assert run.rows[-1]["train/loss"] == pytest.approx(math.log(CLASSES))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_smoothing_out_of_range_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.rho={value} must be from 0 to 1"):
        FedNH(rho=value)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"model\.scale={value} must be above 0"):
        make_client(NormalizedHead, scale=value)


def test_its_server_refuses_clients_without_directions():
    with pytest.raises(MisconfigurationException, match="FedNH needs directions, which FedAvg does not send"):
        fit(make_client(FedAvg), aggregator=FedNH())
