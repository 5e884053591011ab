import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from federations import (
    Pause,
    Shuffled,
    Spy,
    TwoGroups,
    blobs,
    check_batches_of_one,
    drawn_update,
    equal,
    fit,
    flat,
    gradient,
    make_client,
    near,
    noisy,
    same_end,
    set_up,
)
from pfl_lightning.aggregators import FedMGDA
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import AFL, FedAvg
from pfl_lightning.methods.fedmgda import shortest
from pfl_lightning.nets import Net

PLAIN = partial(SGD, lr=0.1)


def problem(n, size, seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n, size, generator=generator, dtype=torch.float64)
    directions = directions / directions.norm(dim=1, keepdim=True)
    usual = torch.rand(n, generator=generator, dtype=torch.float64) + 0.05
    return directions, usual / usual.sum()


@pytest.mark.parametrize("epsilon", [0.0, 0.03, 0.2, 1.0])
@pytest.mark.parametrize(("n", "size"), [(1, 3), (2, 5), (7, 40), (30, 10), (40, 30), (60, 500)])
def test_no_other_weights_within_the_bounds_are_shorter(n, size, epsilon):
    """The conditions of a least convex function, and draws of other weights."""
    for seed in range(20):
        directions, usual = problem(n, size, seed)
        directions = directions + (seed % 2) * directions[0]
        low, high = (usual - epsilon).clamp_min(0), (usual + epsilon).clamp_max(1)
        gram = directions @ directions.T
        found = shortest(gram, usual, low, high)
        assert float((low - found).max()) <= 1e-15 and float((found - high).max()) <= 1e-15
        assert float(found.sum()) == pytest.approx(1, abs=1e-12)
        slope = gram @ found
        # to take from one weight and give to another never shortens it
        gives, takes = found > low + 1e-12, found < high - 1e-12
        if gives.any() and takes.any():
            assert float(slope[gives].max() - slope[takes].min()) <= 1e-9


def test_of_two_directions_it_is_known_and_of_equal_ones_any_weights_will_do():
    one = torch.tensor([[1.0, 0.0], [math.cos(2.0), math.sin(2.0)]]).double()
    bounds = torch.zeros(2), torch.ones(2)
    found = shortest(one @ one.T, torch.tensor([0.9, 0.1]).double(), *bounds)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.5]).double())
    found = shortest(
        torch.ones(3, 3).double(), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.zeros(3), torch.ones(3)
    )
    assert float(found.sum()) == pytest.approx(1, abs=1e-12) and float(found.min()) >= 0


def test_it_is_the_solver_of_others():
    optimize = pytest.importorskip("scipy.optimize", reason="the other solver is scipy's")
    directions, usual = problem(12, 8, 3)
    gram, epsilon = directions @ directions.T, 0.06
    low, high = (usual - epsilon).clamp_min(0), (usual + epsilon).clamp_max(1)
    found = shortest(gram, usual, low, high)
    theirs = optimize.minimize(
        lambda w: w @ gram.numpy() @ w,
        usual.numpy(),
        jac=lambda w: 2 * gram.numpy() @ w,
        bounds=list(zip(low.tolist(), high.tolist(), strict=True)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    assert torch.allclose(found, torch.from_numpy(theirs.x), rtol=0, atol=1e-6)
    assert float(found @ gram @ found) <= theirs.fun + 1e-12


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_of_three_clients_by_a_second_implementation(weighting):
    """In float64, as easyFL has it; the weights are those between bounds with the least length, of a fine grid."""
    lr, steps, eta, epsilon, data = 0.1, 3, 0.4, 0.25, blobs(24, 16, 40, by_class=True, batch_size=100)
    server = FedMGDA(server_lr=eta, epsilon=epsilon, decay=0.5, weighting=weighting)
    run = fit(
        make_client(optimizer=partial(SGD, lr=lr)),
        data,
        aggregator=server,
        local_epochs=steps,
        max_rounds=1,
        precision="64-true",
    )
    net = make_client().net.double()
    parts = [data.part(k, "train").to("cpu", torch.float64) for k in range(3)]
    x = parameters_to_vector(net.parameters()).detach()
    directions = []
    for part in parts:
        w = x.clone()
        for _ in range(steps):
            w = w - lr * gradient(net, part, at=w)
        directions.append((x - w) / (x - w).norm())
    rows = torch.stack(directions)
    n = torch.tensor([len(part) if weighting == "samples" else 1 for part in parts], dtype=torch.float64)
    usual, ticks = n / n.sum(), torch.linspace(-epsilon, epsilon, 1001, dtype=torch.float64)
    first, second = torch.meshgrid(usual[0] + ticks, usual[1] + ticks, indexing="ij")
    grid = torch.stack([first, second, 1 - first - second], 2).view(-1, 3)
    inside = ((grid - usual).abs() <= epsilon + 1e-12).all(1) & (grid >= 0).all(1)
    grid = grid[inside]
    best = grid[(grid @ rows).norm(dim=1).argmin()]
    shares = torch.tensor(list(run.federation.aggregator.state["shares"].values()), dtype=torch.float64)
    assert torch.allclose(shares, best, rtol=0, atol=1e-3)
    assert float((shares @ rows).norm()) <= float((best @ rows).norm()) + 1e-12
    names = [f"net.{name}" for name, _ in net.named_parameters()]
    assert torch.allclose(flat(run.weights, names), x - eta * shares @ rows, rtol=0, atol=1e-14)
    assert run.rows[0]["server/length"] == pytest.approx(float((shares @ rows).norm()), rel=1e-9)
    assert run.rows[0]["server/largest"] == pytest.approx(float(shares.max()), rel=1e-12)
    assert run.federation.aggregator.state["eta"] == 0.2


def test_a_free_step_is_of_use_for_each_client_and_that_of_the_usual_weights_is_not():
    model = make_client().double()
    names = [name for name, _ in model.named_parameters()]
    x = flat(model.state_dict(), names).clone()
    products = {}
    for epsilon in (0.0, 1.0):
        server = set_up(FedMGDA(epsilon=epsilon, weighting="uniform"), model, clients=5)
        updates = {}
        for k in range(5):
            generator = torch.Generator().manual_seed(k)
            # four clients go one way, and one the other
            way = torch.randn(len(x), generator=generator, dtype=torch.float64) + (3.0 if k < 4 else -3.0)
            own, start = {}, 0
            for name in names:
                t = model.state_dict()[name]
                own[name] = t + 0.01 * (k + 1) * way[start : start + t.numel()].view(t.shape)
                start += t.numel()
            updates[k] = {"weights": own, "num_samples": torch.tensor(10)}
        server.aggregate(updates, 0)
        moved = flat(server.global_model(), names) - x
        changes = torch.stack([flat(update["weights"], names) - x for update in updates.values()])
        products[epsilon] = (changes / changes.norm(dim=1, keepdim=True)) @ moved
        if epsilon == 0:
            assert list(server.state["shares"].values()) == [0.2] * 5
    assert float(products[0.0].min()) < -0.1
    # of all directions in the mixture the product is the same: the square of its length
    assert float(products[1.0].min()) > 0


def test_the_length_of_a_client_s_change_counts_for_nothing():
    model, ends = make_client().double(), []
    for factor in (1.0, 1000.0):
        server = set_up(FedMGDA(epsilon=0.3), model)
        updates = {k: drawn_update(model, k, size=10 + k) for k in range(3)}
        x = server.global_model()
        own = updates[1]["weights"]
        updates[1]["weights"] = {name: x[name] + factor * (t - x[name]) for name, t in own.items()}
        server.aggregate(updates, 0)
        ends.append(dict(server.global_model()))
    assert near(ends[0], ends[1], atol=1e-12)


def test_clients_that_stay_keep_their_weight_and_the_model_where_all_do():
    model = make_client().double()
    names = [name for name, _ in model.named_parameters()]
    server = set_up(FedMGDA(epsilon=1.0, weighting="uniform"), model, clients=2)
    x = copy.deepcopy(server.global_model())
    still = {"weights": copy.deepcopy(x), "num_samples": torch.tensor(10)}
    assert server.aggregate({0: still, 1: copy.deepcopy(still)}, 0)["length"] == 0
    assert equal(dict(server.global_model()), dict(x))
    moved = drawn_update(model, 1)
    server.aggregate({0: still, 1: moved}, 1)
    way = flat(moved["weights"], names) - flat(x, names)
    torch.testing.assert_close(flat(server.global_model(), names), flat(x, names) + 0.5 * way / way.norm())


def test_opposed_clients_make_no_step():
    model = make_client().double()
    server = set_up(FedMGDA(epsilon=1.0), model, clients=2)
    x = copy.deepcopy(server.global_model())
    ways = ({n: t + 1 for n, t in x.items()}, {n: t - 2 for n, t in x.items()})
    logs = server.aggregate({k: {"weights": w, "num_samples": torch.tensor(5)} for k, w in enumerate(ways)}, 0)
    assert near(dict(server.global_model()), dict(x), atol=1e-6) and logs["length"] < 1e-6
    assert logs["largest"] == pytest.approx(0.5)


def test_running_statistics_are_averaged_by_the_weights_and_nobody_changes_nothing():
    model = make_client(net=noisy)
    server = set_up(FedMGDA(epsilon=0.2), model)
    names = {name for name, _ in model.named_parameters()}
    updates = {k: drawn_update(model, k, size=10 + 5 * k) for k in (0, 1, 3)}
    server.aggregate(updates, 0)
    mean = weighted_mean([update["weights"] for update in updates.values()], list(server.state["shares"].values()))
    assert mean.keys() - names
    assert all(torch.equal(server.global_model()[name], mean[name]) for name in mean.keys() - names)
    before = copy.deepcopy(server.state)
    assert server.aggregate({}, 1) == {} and equal(server.state, before)


def test_every_client_s_loss_falls_in_each_round_and_not_that_of_a_minority_by_the_usual_weights():
    """Two small clients call the classes by other names than two large ones."""
    falls = []
    for epsilon in (0.0, 1.0):
        spy, data = Spy(), blobs(48, 8, 56, 8, batch_size=100, data=TwoGroups)
        server = FedMGDA(server_lr=0.1, epsilon=epsilon)
        # AFL's clients tell the losses at the received model, before one step on all samples
        fit(make_client(AFL, optimizer=PLAIN), data, aggregator=server, callbacks=[spy], max_rounds=20)
        losses = torch.tensor([[u["received_loss"] for u in updates.values()] for updates in spy.updates])
        falls.append(losses.diff(dim=0) < 0)
    assert bool(falls[1].all()) and not bool(falls[0][10:, 1].any())


def test_order_and_a_pause_change_no_bit(tmp_path):
    make, server = partial(make_client, net=noisy), partial(FedMGDA, server_lr=0.3, epsilon=0.2, decay=0.9)
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), aggregator=server(), **settings)
    assert same_end(whole, fit(make(), aggregator=server(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, aggregator=server(), callbacks=[Pause(2)], **settings)
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=server(), ckpt_path="last", **settings))


def test_engines_agree():
    runs = [
        fit(make_client(), aggregator=FedMGDA(server_lr=0.3), engine=engine, clients_per_round=3, accelerator="cpu")
        for engine in ("sequential", "vectorised")
    ]
    assert near(runs[0].weights, runs[1].weights, atol=1e-4)


def test_a_tied_parameter_makes_one_step():
    def net(input_shape, num_classes):
        layer = nn.Linear(input_shape[0], input_shape[0])
        return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))

    before = make_client(net=net).net.features[0].weight.clone()
    weights = fit(make_client(net=net), aggregator=FedMGDA(), max_rounds=2).weights
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])
    assert not torch.equal(weights["net.features.0.weight"], before)


def test_it_learns_from_batches_of_one_where_classes_are_absent():
    class Server(FedAvg):
        def configure_aggregator(self):
            return FedMGDA(server_lr=0.2)

    check_batches_of_one(make_client(Server, optimizer=partial(SGD, lr=0.02)), max_rounds=4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epsilon": -0.1}, r"aggregator\.epsilon=-0\.1 must be between 0 and 1"),
        ({"epsilon": math.nan}, r"aggregator\.epsilon=nan must be between 0 and 1"),
        ({"decay": 0.0}, r"aggregator\.decay=0\.0 must be above 0 and at most 1"),
        ({"server_lr": 0.0}, r"aggregator\.server_lr=0\.0 must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, text):
    with pytest.raises(MisconfigurationException, match=text):
        FedMGDA(**settings)
