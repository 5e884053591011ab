import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import CLASSES, HIDDEN, Spy, blobs, equal, fit, make_client, noisy, points, set_up
from pfl_lightning.aggregators import PrototypeTables
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedPCL
from pfl_lightning.nets import Net


def table(seed, *classes):
    rows = torch.randn(CLASSES, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return {c: rows[c] for c in classes}


def received(prototypes, tables, **settings):
    model = make_client(FedPCL, **settings).double()
    model.on_download({"prototypes": prototypes, "tables": tables}, None)
    return model


def step(model, x, y):
    return model.training_step((x.double(), y), 0)["loss"]


def test_the_loss_by_hand_with_rows_of_the_mean_where_a_table_has_none():
    mean, tables = table(0, 0, 1, 2), {0: table(1, 0, 2), 3: table(2, 1)}
    model = received(mean, tables, tau=0.3)
    x, y = points(9, seed=1)
    z = F.normalize(model.net.features(x.double()), dim=1)

    def entropy(rows):
        return F.cross_entropy(z @ torch.stack([rows[c] for c in range(CLASSES)]).double().T / 0.3, y)

    expected = entropy(mean) + (entropy(mean | tables[0]) + entropy(mean | tables[3])) / 2
    torch.testing.assert_close(step(model, x, y), expected)


def test_classes_without_a_prototype_have_no_share_and_add_nothing():
    x, y = points(9, seed=1)
    model = received(table(0, 0, 2), {1: table(1, 2)})
    z = F.normalize(model.net.features(x.double()), dim=1)
    kept = y != 1
    parts = [
        F.cross_entropy(
            z[kept] @ torch.stack([rows[c].double() for c in (0, 2)]).T / 0.07, y[kept] // 2, reduction="sum"
        )
        for rows in (table(0, 0, 2), table(0, 0, 2) | table(1, 2))
    ]
    torch.testing.assert_close(step(model, x, y), sum(parts) / len(y))
    only = received(table(0, 0), {1: table(0, 0)})
    loss = step(only, x[y == 1], y[y == 1])
    loss.backward()
    assert loss == 0 and not any(p.grad.isnan().any() for p in only.net.features.parameters())


def test_tables_of_zeros_or_any_at_a_high_temperature_give_twice_the_logarithm_of_classes():
    x, y = points(9, seed=1)
    zeros = {c: torch.zeros(HIDDEN) for c in range(CLASSES)}
    assert float(step(received(zeros, {0: zeros}), x, y).detach()) == pytest.approx(2 * math.log(CLASSES))
    flat = received(table(0, 0, 1, 2), {0: table(1, 0, 1, 2)}, tau=1e9)
    assert float(step(flat, x, y).detach()) == pytest.approx(2 * math.log(CLASSES))


def test_the_server_keeps_every_table_and_the_plain_mean_of_the_round():
    server = set_up(PrototypeTables(), make_client(FedPCL))
    first, second = {2: table(0, 0, 1), 0: table(1, 1)}, {0: table(2, 0), 1: table(3, 0)}
    for number, round in enumerate((first, second)):
        server.aggregate({client: {"prototypes": t} for client, t in round.items()}, number)
    sent = server.download(3)
    assert equal(sent["tables"], {0: second[0], 1: second[1], 2: first[2]})
    torch.testing.assert_close(sent["prototypes"][0], (second[0][0] + second[1][0]) / 2)
    torch.testing.assert_close(sent["prototypes"][1], (first[0][1] + first[2][1]) / 2)
    before = dict(server.state)
    assert server.aggregate({}, 2) == {} and server.state == before


def test_the_first_round_trains_nothing_and_sends_class_means_of_unit_features():
    spy = Spy()
    run = fit(make_client(FedPCL), callbacks=[spy], max_rounds=1)
    net = make_client(FedPCL).net
    for client, state in run.federation.clients.items():
        part = run.data.part(client, "train")
        z = F.normalize(net.features(part.x), dim=1)
        own = spy.updates[0][client]["prototypes"]
        assert sorted(own) == sorted(set(part.y.tolist()))
        for c, mean in own.items():
            torch.testing.assert_close(mean, z[part.y == c].mean(0))
            assert torch.equal(state.personal["own"][c], mean)
        assert all(torch.equal(state.personal[f"net.{name}"], t) for name, t in net.state_dict().items())


def test_prototypes_alone_travel_and_the_head_stands_still():
    spy = Spy()
    run = fit(make_client(FedPCL, net=noisy), callbacks=[spy])
    tables = sum(num_bytes(update["prototypes"]) for update in spy.updates[0].values())
    means = 4 * CLASSES * HIDDEN
    assert run.rows[1]["bytes/up"] == tables and run.rows[1]["bytes/down"] == 4 * (tables + means)
    one, other = (run.federation.clients[client].personal for client in (0, 1))
    assert torch.equal(one["net.classifier.weight"], make_client(FedPCL, net=noisy).net.classifier.weight)
    assert not torch.equal(one["net.features.0.weight"], other["net.features.0.weight"])


def test_it_learns_and_predicts_by_the_nearest_of_the_clients_own_prototypes():
    run = fit(make_client(FedPCL, tau=0.5), max_rounds=6)
    assert (
        run.rows[-1]["val/acc"] > run.rows[0]["val/acc"] - 0.05 and run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    )
    state = run.federation.clients[2].personal
    run.model.receive(state, run.federation.aggregator.download(2), None)
    x = points(9, seed=1)[0]
    z = F.normalize(run.model.eval().net.features(x), dim=1)
    torch.testing.assert_close(run.model(x), z @ state["own"].T / 0.5)


def test_a_class_that_the_client_lacks_is_never_predicted():
    run = fit(make_client(FedPCL), blobs(30, 60, by_class=True), max_rounds=2)
    model = run.model
    model.receive(run.federation.clients[0].personal, run.federation.aggregator.download(0), None)
    logits = model.eval()(points(9, seed=1)[0])
    lacks = ~run.federation.clients[0].personal["has"]
    assert lacks.any() and (logits[:, lacks] == -torch.inf).all() and logits[:, ~lacks].isfinite().all()
    fresh = make_client(FedPCL).eval()
    assert torch.equal(fresh(points(9, seed=1)[0]), fresh.net(points(9, seed=1)[0]))


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(FedPCL), data).rows[-1]["clients_diverged"] == 0


def test_features_of_zeros_have_no_direction_and_no_nan():
    model = received(table(0, 0, 1, 2), {0: table(1, 0, 1, 2)})
    nn.init.zeros_(model.net.features[0].weight)
    nn.init.zeros_(model.net.features[0].bias)
    x, y = points(9, seed=1)
    step(model, x, y).backward()
    assert all(p.grad.isfinite().all() for p in model.net.features.parameters())


def test_a_temperature_out_of_range_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.tau=0"):
        make_client(FedPCL, tau=0)


def test_a_net_without_a_body_is_refused_by_name_before_the_first_round():
    def linear(input_shape, num_classes):
        return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))

    with pytest.raises(MisconfigurationException, match=r"model\.net=Net has no parameter .* model FedPCL "):
        fit(make_client(FedPCL, net=linear), max_rounds=1)
