import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import blobs, drawn_update, equal, fit, flat, make_client, noisy, plain, points, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import CollaborationGraph
from pfl_lightning.methods import FedAvg, PFedGraph
from pfl_lightning.methods.pfedgraph import on_simplex

NAMES = [name for name, _ in make_client(net=plain).named_parameters()]


def server(**settings):
    return set_up(CollaborationGraph(**settings), make_client(PFedGraph, net=plain))


def uploads(*clients, sizes=(30, 10, 20, 40)):
    model = make_client(net=plain)
    return {client: drawn_update(model, client, sizes[client]) for client in clients}


@pytest.mark.parametrize("seed", range(3))
def test_the_projection_is_the_nearest_point_of_the_simplex(seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    a = on_simplex(points)
    assert (a >= 0).all()
    torch.testing.assert_close(a.sum(1), torch.ones(4, dtype=torch.float64))
    # optimal: what is positive has lost the same, and the rest would have to lose no more
    for row, point in zip(a, points, strict=True):
        lost = (point - row)[row > 0]
        assert float(lost.max() - lost.min()) < 1e-12 and (point[row == 0] <= lost[0] + 1e-12).all()


@pytest.mark.parametrize("alpha", [0.8, 0.3])
def test_two_clients_by_hand(alpha):
    updates = uploads(1, 3)
    graph = server(alpha=alpha)
    x = flat(graph.state["initial"], NAMES)
    y = {client: flat(update["weights"], NAMES) for client, update in updates.items()}
    cosine = float(F.cosine_similarity(y[1] - x, y[3] - x, dim=0))
    p = {1: 0.2, 3: 0.8}
    graph.aggregate(updates, 0)
    for i, j in ((1, 3), (3, 1)):
        # d/da of alpha ((a - p_i)^2 + (1 - a - p_j)^2) - a - cosine (1 - a) is 0
        a = min(max(p[i] + (1 - cosine) / (4 * alpha), 0), 1)
        payload = graph.download(i)
        torch.testing.assert_close(flat(payload["weights"], NAMES), a * y[i] + (1 - a) * y[j])
        reference = a * y[i] / y[i].norm() + (1 - a) * y[j] / y[j].norm()
        torch.testing.assert_close(flat(payload["reference"], NAMES), reference)
    # client 0 has sent nothing
    mean = flat(graph.download(0)["weights"], NAMES)
    torch.testing.assert_close(mean, 0.2 * y[1] + 0.8 * y[3])
    assert graph.download(0)["reference"] == {}


def test_cosines_above_nine_tenths_count_as_one():
    graph, model = server(), make_client(net=plain)
    x = graph.state["initial"]
    change = drawn_update(model, 5)["weights"]
    near = {name: t + 0.1 * drawn_update(model, 6)["weights"][name] for name, t in change.items()}
    updates = {
        client: {"weights": {n: x[n] + t for n, t in moved.items()}, "num_samples": torch.tensor(size)}
        for client, moved, size in ((0, change, 30), (1, near, 10))
    }
    assert graph.aggregate(updates, 0)["own_weight"] == pytest.approx(0.5)
    assert equal(graph.download(0)["weights"], graph.download(1)["weights"])


def test_a_gradient_by_hand():
    model = make_client(PFedGraph, net=plain, graph_lambda=0.3).double()
    weights = {name: tensor for name, tensor in model.state_dict().items() if model.is_shared(name)}
    r = {name: tensor.double() for name, tensor in drawn_update(make_client(net=plain), 4)["weights"].items()}
    model.receive({}, {"weights": weights, "reference": r}, None)
    x, y = points(9, seed=1)
    plainly = F.cross_entropy(model.net(x.double()), y)
    model.training_step((x.double(), y), 0)["loss"].backward()
    slopes = torch.autograd.grad(plainly, list(model.net.parameters()))
    w, v = flat(dict(model.named_parameters()), NAMES).detach(), flat(r, NAMES)
    slope = v / w.norm() - (v @ w) * w / w.norm() ** 3
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in model.net.parameters()]),
        torch.cat([s.flatten() for s in slopes]) + 0.3 * slope,
    )


def test_without_its_term_and_with_a_flat_graph_it_is_fedavg():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    one, other = (
        fit(make_client(method, **settings), aggregator=CollaborationGraph())
        for method in (lambda **own: PFedGraph(graph_lambda=0.0, **own), FedAvg)
    )
    assert equal(one.federation.aggregator.state, other.federation.aggregator.state)
    flatly = fit(make_client(PFedGraph, graph_lambda=0.0), aggregator=CollaborationGraph(alpha=1e12))
    average = fit(make_client(FedAvg), aggregator=WeightedAverage())
    for client in range(4):
        for name, tensor in flatly.federation.aggregator.download(client)["weights"].items():
            torch.testing.assert_close(tensor, average.weights[name])


def test_the_term_acts_from_the_second_round_on():
    for rounds, same in ((1, True), (2, False)):
        runs = [fit(make_client(PFedGraph, graph_lambda=weight), max_rounds=rounds).weights for weight in (0.0, 1.0)]
        assert equal(*runs) == same


def test_clients_who_stay_away_keep_their_mix():
    graph = server()
    graph.aggregate(uploads(0, 1, 2), 0)
    before = graph.download(2)
    graph.aggregate(uploads(0, 3), 1)
    assert equal(graph.download(2), before) and graph.aggregate({}, 2) == {}


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(PFedGraph), data).rows[-1]["clients_diverged"] == 0


def test_settings_out_of_range_are_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.alpha=0"):
        CollaborationGraph(alpha=0)
    with pytest.raises(MisconfigurationException, match=r"model\.graph_lambda=inf"):
        make_client(PFedGraph, graph_lambda=math.inf)
