import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import FEATURES, Spy, blobs, check_evaluated_by, fit, make_client, near, points, set_up
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import LowRankAverage
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedKD, Local
from pfl_lightning.methods.fedkd import cut, joined
from pfl_lightning.nets import Net

W = "net.features.0.weight"


def big(input_shape, num_classes):
    """A net whose matrices have factors smaller than they are."""
    body = nn.Sequential(nn.Linear(input_shape[0], 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
    return Net(body, nn.Linear(40, num_classes))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("energy, rank", [(0.5, 1), (0.89, 1), (0.91, 2), (1.0, 2)])
def test_the_rank_is_the_least_that_keeps_more_than_the_share(energy, rank):
    # squares 9 and 1: the first has 0.9 of both
    wide = torch.zeros(10, 12)
    wide[0, 0], wide[1, 1] = 3, 1
    left, right = cut(wide, energy)
    # the share of 1 needs all, and its factors would be larger than the matrix
    assert (left.shape, right.shape) == (((10, 12), (0, 12)) if energy == 1 else ((10, rank), (rank, 12)))
    expected = wide if rank == 2 else wide * (wide == 3)
    torch.testing.assert_close(joined([left, right]), expected)


def test_factors_are_the_truncated_decomposition():
    matrix = drawn(30, 4, 5)
    u, sigma, v = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
    share = sigma.square().cumsum(0) / sigma.square().sum()
    rank = next(r for r in range(1, 21) if share[r - 1] > 0.6)
    left, right = cut(matrix, 0.6)
    assert left.shape[1] == rank < 12
    torch.testing.assert_close(left @ right, u[:, :rank] @ torch.diag(sigma[:rank]) @ v[:rank])
    # full rank travels as it is, and nothing without a change
    assert torch.equal(joined(cut(matrix, 1.0)), matrix.flatten(1))
    nothing = cut(torch.zeros(3, 4), 0.9)
    assert num_bytes(nothing) == 0 and not joined(nothing).any()
    assert joined(cut(torch.full((2, 3), torch.nan), 0.9)).isnan().all()


def test_without_distillation_the_teacher_is_locals_bit_for_bit_and_the_student_fedavgs():
    settings = {"clients_per_round": 3}
    kd = fit(make_client(FedKD, distill=0), aggregator=LowRankAverage(1, 1), **settings)
    local = fit(make_client(Local), **settings)
    average = fit(make_client(FedAvg), aggregator=WeightedAverage(weighting="uniform"), **settings)
    for client, state in local.federation.clients.items():
        own = kd.federation.clients[client].personal
        assert all(torch.equal(own[name.replace("net.", "personal.")], t) for name, t in state.personal.items())
    assert near({n: t for n, t in kd.weights.items() if n.startswith("net.")}, dict(average.weights), atol=1e-6)


def test_a_step_by_hand():
    model = make_client(FedKD, distill=0.7).double()
    nn.init.normal_(model.personal.classifier.weight)
    x, y = points(9, seed=1)
    x = x.double()
    model.training_step((x, y), 0)["loss"].backward()
    p = {name: t.detach().clone().requires_grad_() for name, t in model.named_parameters()}

    def outputs(part):
        h = torch.tanh(F.linear(x, p[f"{part}.features.0.weight"], p[f"{part}.features.0.bias"]))
        return h, F.linear(h, p[f"{part}.classifier.weight"], p[f"{part}.classifier.bias"])

    (h_t, z_t), (h_s, z_s) = outputs("personal"), outputs("net")
    q_t, q_s = z_t.softmax(1), z_s.softmax(1)
    n = F.cross_entropy(z_t, y) + F.cross_entropy(z_s, y)
    both = (q_s * (q_s / q_t).log()).mean() + (q_t * (q_t / q_s).log()).mean()
    (n + 0.7 * (both + 2 * (h_t - h_s @ p["projection.weight"].T).square().mean()) / n).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, p[name].grad)


def test_the_server_by_hand_cuts_the_mean_of_the_changes():
    model = make_client(FedKD, net=big)
    server = LowRankAverage(0.3, 0.5)
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items() if model.is_shared(name)}
    server.setup(Server(4, shared, model, None, seed=0, rounds=4))
    x = server.state["weights"][W].clone()
    assert float(server.download(0)["energy"]) == pytest.approx(0.35)
    changes = {client: drawn(40, FEATURES, seed=client) for client in (0, 2)}
    updates = {}
    for client, change in changes.items():
        zeros = {name: cut(torch.zeros_like(t), 1) for name, t in model.received.tensors().items()}
        rest = {name: t + client for name, t in server.state["weights"].items() if name not in zeros}
        updates[client] = {"factors": zeros | {W: cut(change, 0.35)}, "rest": rest}
    bias = server.state["weights"]["net.classifier.bias"].clone()
    logs = server.aggregate(updates, 0)
    mean = sum(joined(updates[client]["factors"][W]) for client in changes) / 2
    u, sigma, v = torch.linalg.svd(mean, full_matrices=False)
    rank = next(r for r in range(1, 7) if sigma[:r].square().sum() > 0.35 * sigma.square().sum())
    torch.testing.assert_close(server.state["weights"][W], x + u[:, :rank] @ torch.diag(sigma[:rank]) @ v[:rank])
    torch.testing.assert_close(server.state["weights"]["net.classifier.bias"], bias + 1)
    numbers = sum(t.numel() for t in model.received.tensors().values())
    sent = sum(factor.numel() for u in updates.values() for factor in u["factors"][W])
    assert logs["sent"] == pytest.approx(sent / 2 / numbers)
    assert float(server.download(0)["energy"]) == pytest.approx(0.4)
    # a change to those who hold the student before it, and the whole student to any other
    assert server.download(2).keys() == {"factors", "rest", "energy"}
    assert server.download(1).keys() == server.welcome(9, None).keys() == {"weights", "energy"}
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_the_student_of_float64_changes_is_float64():
    model = make_client(FedKD, net=big)
    server = set_up(LowRankAverage(0.5, 0.5), model)
    x, changes = {}, {}
    for name, received in model.received.tensors().items():
        x[name] = server.state["weights"][name].double()
        changes[name] = [torch.randn(received.shape, dtype=torch.float64) for _ in range(2)]
    rest = {name: t.double() for name, t in server.state["weights"].items() if name not in x}
    updates = {
        client: {"factors": {name: cut(each[client], 0.5) for name, each in changes.items()}, "rest": rest}
        for client in range(2)
    }
    server.aggregate(updates, 0)
    for name, each in changes.items():
        mean = sum(joined(cut(change, 0.5)) for change in each) / 2
        expected = x[name] + joined(cut(mean, 0.5)).view(x[name].shape)
        torch.testing.assert_close(server.state["weights"][name], expected, rtol=1e-13, atol=1e-13)


def test_a_client_whose_factors_have_no_product_is_left_out():
    model = make_client(FedKD, net=big)
    server = set_up(LowRankAverage(0.5, 0.5), model)
    x = server.state["weights"]
    rest = {name: t for name, t in x.items() if name not in model.received.tensors()}
    zeros = {name: cut(torch.zeros_like(t), 1) for name, t in model.received.tensors().items()}
    whole = zeros | {W: cut(drawn(40, FEATURES), 1)}
    for left, right in (((40, 3), (2, FEATURES)), ((40, 3), (0, FEATURES))):
        wrong = zeros | {W: [torch.ones(left), torch.ones(right)]}
        with pytest.warns(UserWarning, match="client 1 is left out"):
            server.aggregate({1: {"factors": wrong, "rest": rest}}, 0)
    assert server.state["weights"] is x
    server.aggregate({0: {"factors": whole, "rest": rest}}, 0)
    assert server.state["holders"] == [0]


def test_clients_who_hold_the_student_and_others_come_to_the_same():
    run = fit(make_client(FedKD, net=big), clients_per_round=3, max_rounds=2)
    server = run.federation.aggregator
    holders = server.state["holders"]
    assert len(holders) == 3
    for client in range(4):
        state = run.federation.clients.get(client)
        run.model.receive({} if state is None else state.personal, server.download(client), None)
        assert ("weights" in server.download(client)) == (client not in holders)
        for name, tensor in server.global_model().items():
            assert torch.equal(run.model.state_dict()[name], tensor)


def test_fewer_bytes_travel_both_ways_and_the_teacher_stays():
    spy = Spy()
    run = fit(make_client(FedKD, net=big), callbacks=[spy], aggregator=LowRankAverage(0.5, 0.5))
    whole = 4 * 4 * sum(p.numel() for p in make_client(net=big).parameters())
    assert [row["bytes/up"] < 0.5 * whole for row in run.rows] == [True] * 3
    assert [row["bytes/down"] < 0.5 * whole for row in run.rows] == [False, True, True]
    assert 0 < run.rows[-1]["server/sent"] < 0.5
    assert spy.updates[0][0].keys() == {"factors", "rest"}
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    start = make_client(FedKD, net=big).state_dict()
    one, other = (run.federation.clients[client].personal for client in (0, 1))
    for name in ("projection.weight", "personal.classifier.weight"):
        assert not torch.equal(one[name], start[name]) and not torch.equal(one[name], other[name])


def test_clients_are_evaluated_by_their_teachers():
    check_evaluated_by(fit(make_client(FedKD)), "personal")


def test_tied_and_frozen_parameters_travel_as_they_should():
    def tied(input_shape, num_classes):
        body = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Linear(8, 8), nn.Linear(8, 8))
        body[0].requires_grad_(False)
        body[2].weight = body[1].weight
        return Net(body, nn.Linear(8, num_classes))

    model = make_client(FedKD, net=tied)
    assert "net.features.0.weight" not in model.received.tensors()
    run = fit(model, aggregator=LowRankAverage(0.5, 0.5))
    assert torch.equal(run.weights["net.features.1.weight"], run.weights["net.features.2.weight"])


def test_it_learns_from_batches_of_one_and_of_absent_classes():
    # the losses of a client with one class go to 0, and what is divided by them is bounded by clipping
    data = blobs(30, 60, by_class=True, batch_size=1)
    run = fit(make_client(FedKD), data, gradient_clip_val=1.0, max_rounds=3)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"] and run.rows[-1]["clients_diverged"] == 0


def test_settings_out_of_range_are_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.distill=-1"):
        make_client(FedKD, distill=-1)
    for name in ("start", "end"):
        with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}=2"):
            LowRankAverage(**{name: 2})
    with pytest.raises(MisconfigurationException, match=r"aggregator\.end=0.98"):
        set_up(LowRankAverage(), make_client(FedKD))
