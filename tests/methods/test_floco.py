import math
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import (
    CLASSES,
    HIDDEN,
    Pause,
    Spy,
    blobs,
    check_batches_of_one,
    drawn_update,
    equal,
    fit,
    make_client,
    near,
    noisy,
    points,
    set_up,
)
from pfl_lightning.aggregators import SubregionAverage
from pfl_lightning.methods import FLOCO, FedAvg
from pfl_lightning.methods.floco import SimplexLinear, principal_scores, subregions

LAYER = "net.classifier"


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def simplex_layer(endpoints=3, radius=0.2):
    torch.manual_seed(5)
    return SimplexLinear(nn.Linear(4, 2), endpoints, radius).double()


def test_before_a_point_shares_are_uniform_on_the_simplex():
    layer = simplex_layer()
    torch.manual_seed(0)
    drawn = torch.stack([layer.shares() for _ in range(4000)])
    torch.testing.assert_close(drawn.sum(1), torch.ones(4000, dtype=torch.float64))
    assert drawn.min() >= 0
    # each share of a uniform point has the mean 1 / M and the variance (M - 1) / (M^2 (M + 1))
    torch.testing.assert_close(drawn.mean(0), torch.full((3,), 1 / 3).double(), atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.full((3,), 2 / 36).double(), atol=0.006, rtol=0)
    torch.testing.assert_close(layer.eval().shares(), torch.full((3,), 1 / 3).double())


def test_with_a_point_shares_are_within_the_radius_of_it():
    layer = simplex_layer()
    layer.centre.copy_(torch.tensor([0.7, 0.3, 0.0]))
    away = torch.stack([layer.shares() for _ in range(2000)]) - layer.centre
    lengths = away.abs().sum(1)
    assert 0.19 < lengths.max() <= 0.2 and lengths.min() < 0.01
    assert abs(lengths.mean() - 0.1) < 0.01 and away.mean(0).abs().max() < 0.01
    assert torch.equal(layer.eval().shares(), layer.centre)


def test_the_layer_mixes_its_endpoints_by_one_draw_for_a_batch():
    layer = simplex_layer()
    features = draw(6, 4)
    torch.manual_seed(1)
    shares = layer.shares()
    torch.manual_seed(1)
    outputs = layer(features)
    weight = sum(share * endpoint for share, endpoint in zip(shares, layer.weight, strict=True))
    torch.testing.assert_close(outputs, features @ weight.T + layer.bias)
    # every endpoint learns by its share
    (gradient,) = torch.autograd.grad(outputs.sum(), layer.weight)
    torch.testing.assert_close(gradient, shares[:, None, None] * features.sum(0).expand(3, 2, 4))


def by_hand(changes, endpoints):
    """The official projection of clients, with components' signs by their largest entry, in NumPy."""
    rows = changes.numpy() - changes.numpy().mean(0)
    values, vectors = np.linalg.eigh(rows.T @ rows)
    scores = []
    for component in vectors.T[np.argsort(values)[::-1]][:endpoints]:
        largest = component[np.argmax(np.abs(component))]
        scores.append(rows @ component * np.sign(largest))
    kappa = np.stack(scores, 1)
    best, least = None, np.inf
    for z in np.linspace(1e-4, 1, 1000):
        betas = []
        for row in kappa:
            ordered = np.sort(row)[::-1]
            excess = np.cumsum(ordered) - z
            count = np.count_nonzero(ordered - excess / np.arange(1, len(row) + 1) > 0)
            betas.append(np.maximum(row - excess[count - 1] / count, 0))
        betas = np.array(betas) / np.sum(betas, 1, keepdims=True)
        energy = 0.0
        for i in range(len(betas)):
            for j in range(i):
                energy += 1 / max(np.linalg.norm(betas[i] - betas[j]), 1e-4) ** 2
        if energy < least:
            best, least = betas, energy
    return torch.from_numpy(best)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_points_are_those_of_the_official_rule(scale):
    changes = scale * draw(7, 12, seed=2)
    torch.testing.assert_close(subregions(changes, 4), by_hand(changes, 4), atol=1e-8, rtol=0)


def test_points_are_on_the_simplex_and_unlike_clients_are_apart():
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    changes = 5 * torch.eye(3, 8, dtype=torch.float64)[groups] + 0.01 * draw(6, 8)
    found = subregions(changes, 3)
    assert found.min() >= 0
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64))
    apart = torch.cdist(found, found)
    same = groups[:, None] == groups
    assert apart[same].max() < 0.1 * apart[~same].min()


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_fewer_clients_than_endpoints_have_points_too(clients):
    found = subregions(draw(clients, 20), 5)
    assert found.shape == (clients, 5) and torch.isfinite(found).all()
    torch.testing.assert_close(found.sum(1), torch.ones(clients, dtype=torch.float64))
    if clients == 1:
        torch.testing.assert_close(found, torch.full((1, 5), 0.2, dtype=torch.float64))


def test_equal_clients_have_equal_points():
    found = subregions(draw(1, 20).expand(4, 20), 3)
    assert torch.isfinite(found).all() and torch.equal(found, found[:1].expand(4, 3))


def test_scores_are_distances_along_the_components():
    rows = draw(5, 9)
    scores = principal_scores(rows, 4)
    # four components hold all distances between five points
    torch.testing.assert_close(torch.pdist(scores), torch.pdist(rows))
    assert (scores.square().sum(0).diff() < 0).all()


@pytest.mark.parametrize("before", [1, 2])
def test_points_of_float64_uploads_are_float64(before):
    model = make_client(FLOCO, endpoints=3)
    server = set_up(SubregionAverage(before / 4), model, rounds=4)
    name = f"{LAYER}.weight"
    # all but the last client take part in the first round alone
    x, rounds, changes = server.state["weights"][name].double(), [(0, 1, 2, 3), (3,)][:before], {}
    for number, clients in enumerate(rounds):
        updates = {client: drawn_update(model.double(), client + number) for client in clients}
        changes |= {k: (update["weights"][name] - x).flatten() for k, update in updates.items()}
        server.aggregate(updates, number)
        x = server.state["weights"][name]
    expected = by_hand(torch.stack([*changes.values()]), 3)
    for client in range(4):
        torch.testing.assert_close(server.download(client)["centre"], expected[client], rtol=1e-12, atol=1e-12)


def test_one_endpoint_is_fedavg_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    runs = [
        fit(make_client(FedAvg, **settings)),
        fit(make_client(partial(FLOCO, endpoints=1), **settings), aggregator=SubregionAverage(tau=0)),
    ]
    weights = [dict(run.weights) for run in runs]
    weights[1].pop(f"{LAYER}.centre")
    weights[1][f"{LAYER}.weight"] = weights[1][f"{LAYER}.weight"][0]
    assert equal(*({name: each[name] for name in weights[0]} for each in weights))
    # clients with entries of their own are evaluated one by one, which rounds otherwise
    assert near(*([row["val/loss"] for row in run.rows] for run in runs))


def test_without_a_radius_a_client_s_layer_stands_still_after_its_point():
    model = make_client(FLOCO, endpoints=3, rho=0.0).double()
    centre = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    shared = {name: t for name, t in model.state_dict().items() if model.is_shared(name)}
    model.on_download({"weights": shared, "centre": centre}, None)
    x, y = points(9, seed=1)
    head = model.net.classifier
    weight = torch.einsum("m,mod->od", centre, head.weight)
    expected = F.cross_entropy(model.net.features(x.double()) @ weight.T + head.bias, y)
    for _ in range(2):
        torch.testing.assert_close(model.training_step((x.double(), y), 0)["loss"], expected)
    torch.testing.assert_close(model.eval()(x.double()), model.net.features(x.double()) @ weight.T + head.bias)


@pytest.mark.parametrize(
    ("tau", "rounds", "first"),
    # half of the rounds, a half rounded down, the soonest, a share of less than one round, one round, and never
    [(0.5, 4, 2), (0.5, 5, 2), (0, 4, 1), (0, None, 1), (0.1, 4, 1), (0.5, 1, 1), (1, 4, None), (1, None, None)],
)
def test_clients_have_points_after_a_share_of_the_rounds(tau, rounds, first):
    model = make_client(FLOCO, endpoints=2)
    server = set_up(SubregionAverage(tau), model, rounds=rounds)
    with_points = []
    for number in range(rounds or 4):
        server.aggregate({k: drawn_update(model, 10 * number + k) for k in range(3)}, number)
        if all(server.download(k)["centre"].any() for k in range(3)):
            with_points.append(number + 1)
    assert with_points == ([] if first is None else list(range(first, (rounds or 4) + 1)))
    # nothing of single clients stays at the server without need
    assert server.state["changes"] == {}


def test_another_number_of_rounds_moves_the_share_and_is_refused_on_resuming(tmp_path):
    clients = partial(make_client, FLOCO, endpoints=2)
    fit(clients(), root=tmp_path, callbacks=[Pause(1)], max_rounds=4)
    with pytest.raises(MisconfigurationException, match=r"other settings of trainer\.max_rounds"):
        fit(clients(), root=tmp_path, ckpt_path="last", max_rounds=6)
    asked = fit(clients(), root=tmp_path, ckpt_path="last", max_rounds=6, resume_changed=True)
    # a point in round 3, half of six
    assert ["server/distance" in row for row in asked.rows] == [False, False, True, False, False, False]


def test_the_server_averages_and_finds_points_from_the_last_changes_before_tau():
    model = make_client(FLOCO, endpoints=3)
    server = set_up(SubregionAverage(tau=0.5), model, rounds=4)
    name = f"{LAYER}.weight"
    rounds = [{k: drawn_update(model, 10 * number + k) for k in each} for number, each in enumerate([(0, 1), (1, 3)])]
    starts = []
    for number, updates in enumerate(rounds):
        starts.append(server.download(0)["weights"][name])
        assert not server.download(0)["centre"].any()
        logs = server.aggregate(updates, number)
    changes = [rounds[0][0]["weights"][name] - starts[0]]
    changes += [rounds[1][k]["weights"][name] - starts[1] for k in (1, 3)]
    expected = subregions(torch.stack([change.flatten() for change in changes]), 3)
    for client, point in zip((0, 1, 3), expected, strict=True):
        assert near(server.download(client)["centre"], point.float())
    assert logs["distance"] == pytest.approx(float(torch.pdist(expected).mean()))
    # who never took part, and who comes later, has none
    assert not server.download(2)["centre"].any() and not server.welcome(9, None)["centre"].any()
    assert server.state["changes"] == {}
    mean = (rounds[1][1]["weights"][name] + rounds[1][3]["weights"][name]) / 2
    assert near(server.global_model()[name], mean)
    before = dict(server.state)
    assert server.aggregate({}, 2) == {} and equal(server.state, before)
    # points stay
    server.aggregate(rounds[0], 2)
    assert equal(server.state["centres"], before["centres"])


def test_clients_of_other_classes_get_other_points_and_keep_them_to_themselves():
    spy = Spy()
    run = fit(
        make_client(FLOCO, net=noisy, endpoints=3),
        blobs(30, 30, 30, by_class=True),
        callbacks=[spy],
        max_rounds=4,
    )
    centres = run.federation.aggregator.state["centres"]
    assert sorted(centres) == [0, 1, 2]
    assert torch.pdist(torch.stack([*centres.values()])).min() > 0.1
    assert f"{LAYER}.centre" not in spy.updates[-1][0]["weights"]
    assert spy.updates[-1][0]["weights"][f"{LAYER}.weight"].shape == (3, CLASSES, HIDDEN)
    assert torch.equal(run.federation.clients[1].personal[f"{LAYER}.centre"], centres[1])
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_clients_of_one_class_and_batches_of_one_learn():
    check_batches_of_one(make_client(FLOCO), max_rounds=8)


@pytest.mark.parametrize(("setting", "value"), [("endpoints", 0), ("rho", -0.1), ("rho", math.nan)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(FLOCO, **{setting: value})


@pytest.mark.parametrize("tau", [-0.1, 1.1, 10, math.nan])
def test_a_share_out_of_range_is_refused_by_name(tau):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.tau={tau}"):
        SubregionAverage(tau)


def test_a_server_without_a_number_of_rounds_or_without_endpoints_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.tau=0\.5.*trainer\.max_rounds"):
        set_up(SubregionAverage(), make_client(FLOCO))
    with pytest.raises(MisconfigurationException, match=r"aggregator=SubregionAverage.*model=FedAvg"):
        set_up(SubregionAverage(), make_client(), rounds=4)
