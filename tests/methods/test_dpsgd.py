import pytest
import torch

from federations import (
    MOMENTUM,
    Spy,
    blobs,
    check_order_and_resume,
    drawn_update,
    equal,
    fit,
    flat,
    make_client,
    near,
    noisy,
    plain,
    set_up,
    untimed,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import GossipAverage
from pfl_lightning.client import in_body
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedPer, FedRep, Local

NAMES = [name for name, _ in make_client(net=plain).named_parameters()]


def uploads(*clients):
    model = make_client(net=plain).double()
    return {client: drawn_update(model, client) for client in clients}


def sent(run, clients=4):
    return {client: run.federation.aggregator.download(client)["weights"] for client in range(clients)}


def test_a_mix_by_hand():
    server = set_up(GossipAverage(graph={0: [1, 2], 2: [3]}), make_client(net=plain).double())
    updates = uploads(0, 1, 2, 3)
    w = {client: flat(update["weights"], NAMES) for client, update in updates.items()}
    server.aggregate(updates, 0)
    # clients 0 and 2 have two neighbours, clients 1 and 3 have one
    mixed = {
        0: (w[0] + w[1] + w[2]) / 3,
        1: (w[0] + 2 * w[1]) / 3,
        2: (w[0] + w[2] + w[3]) / 3,
        3: (w[2] + 2 * w[3]) / 3,
    }
    for client, expected in mixed.items():
        torch.testing.assert_close(flat(server.download(client)["weights"], NAMES), expected)
    # what stays away stays, and what has no neighbour in the round keeps its own
    again = uploads(1, 3)
    server.aggregate(again, 1)
    for client, expected in (mixed | {k: flat(again[k]["weights"], NAMES) for k in again}).items():
        torch.testing.assert_close(flat(server.download(client)["weights"], NAMES), expected)
    assert server.aggregate({}, 2) == {}


@pytest.mark.parametrize("settings", [{}, {"graph": "random", "degree": 3}, {"graph": {0: [1, 3], 3: [2, 4]}}])
def test_the_mean_of_all_models_stays_as_it_is(settings):
    server = set_up(GossipAverage(**settings), make_client(net=plain).double(), clients=5)
    updates = uploads(*range(5))
    before = {client: flat(update["weights"], NAMES) for client, update in updates.items()}
    server.aggregate(updates, 0)
    after = [flat(server.download(client)["weights"], NAMES) for client in range(5)]
    torch.testing.assert_close(sum(after), sum(before.values()))
    assert not any(torch.allclose(model, before[client]) for client, model in enumerate(after))
    # a newcomer receives this mean
    torch.testing.assert_close(flat(server.welcome(5, None)["weights"], NAMES), sum(after) / 5)


def test_a_newcomer_before_the_first_round_has_the_common_initial_model():
    server = set_up(GossipAverage(), make_client(net=plain))
    assert equal(server.welcome(4, None), server.download(0))


def test_on_the_full_graph_it_is_the_plain_mean_of_fedavg():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    gossip = fit(make_client(FedAvg, **settings), aggregator=GossipAverage(graph="full"))
    average = fit(make_client(FedAvg, **settings), aggregator=WeightedAverage(weighting="uniform"))
    for model in sent(gossip).values():
        assert near(model, dict(average.weights), atol=1e-6)
    assert [row["val/acc"] for row in gossip.rows] == [row["val/acc"] for row in average.rows]


def test_without_an_edge_clients_train_alone():
    gossip = fit(make_client(FedAvg), aggregator=GossipAverage(graph={}))
    alone = fit(make_client(Local))
    for client, model in sent(gossip).items():
        assert equal(model, {name: alone.federation.clients[client].personal[name] for name in model})
    assert gossip.rows[-1]["server/edges"] == gossip.rows[-1]["server/edge_bytes"] == 0


@pytest.mark.parametrize("method", [FedPer, FedRep])
def test_bodies_are_mixed_and_heads_stay(method):
    spy = Spy()
    run = fit(make_client(method), aggregator=GossipAverage(), callbacks=[spy], max_rounds=2)
    for client, model in sent(run).items():
        updates = spy.updates[-1]
        around = [client, (client + 1) % 4, (client - 1) % 4]
        assert model and all(in_body(name) for name in model)
        expected = {name: sum(updates[k]["weights"][name] for k in around) / 3 for name in model}
        assert near(model, expected)
    heads = [state.personal["net.classifier.weight"] for state in run.federation.clients.values()]
    assert not any(torch.equal(heads[0], head) for head in heads[1:])


def test_the_record_has_the_bytes_of_edges_beside_those_of_the_coordinator():
    spy = Spy()
    run = fit(make_client(FedAvg), aggregator=GossipAverage(), callbacks=[spy], clients_per_round=3, max_rounds=2)
    for row, cohort, updates in zip(run.rows, spy.cohorts, spy.updates, strict=True):
        size = num_bytes(updates[cohort[0]])
        # three of four clients on a ring are a chain
        assert row["server/edges"] == 4 and row["server/edge_bytes"] == 4 * size == 4 / 3 * row["bytes/up"]
        assert row["server/edge_bytes_max"] == 2 * size
        ends = {tuple(row) for row in run.federation.aggregator.state["edges"][:, :2].tolist()}
    (away,) = set(range(4)) - set(cohort)
    assert ends == {(k, j) for k in cohort for j in cohort if (k - j) % 4 in (1, 3)} and away not in sum(ends, ())


@pytest.mark.parametrize("graph", ["ring", "random"])
def test_order_and_resume_change_no_bit(tmp_path, graph):
    check_order_and_resume(FedAvg, tmp_path, aggregator=GossipAverage(graph=graph))


def test_a_resumed_run_goes_on_with_the_graph_of_its_first_round(tmp_path):
    path = tmp_path / "edges.csv"
    path.write_text("client,neighbour\n0,1\n")
    fit(make_client(FedAvg), root=tmp_path, aggregator=GossipAverage(graph=str(path)), max_rounds=2)
    path.write_text("client,neighbour\n2,3\n")
    again = GossipAverage(graph=str(path))
    fit(make_client(FedAvg), root=tmp_path, aggregator=again, max_rounds=3, ckpt_path="last")
    assert again.state["edges"][:, :2].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.by_default("vectorised")
def test_engines_agree(engine):
    settings = {"clients_per_round": 3, "max_rounds": 2}
    one, other = (
        fit(make_client(FedAvg), engine=each, aggregator=GossipAverage(graph="random", degree=1), **settings)
        for each in ("sequential", engine)
    )
    assert near(sent(one), sent(other)) and near(untimed(one.rows), untimed(other.rows))


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    run = fit(make_client(FedAvg, optimizer=MOMENTUM), data, aggregator=GossipAverage())
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["clients"] == data.num_clients
