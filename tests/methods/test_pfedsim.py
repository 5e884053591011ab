import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, drawn_update, equal, fit, make_client, noisy
from pfl_lightning import Server
from pfl_lightning.aggregators import PFedSim
from pfl_lightning.methods import FedAvg, Local

HEAD, BODY = "net.classifier.weight", "net.features.0.weight"


def server(warmup=0.0, rounds=4, clients=4):
    aggregator, model = PFedSim(warmup), make_client(net=noisy)
    aggregator.setup(Server(clients, model.state_dict(), model, None, seed=0, rounds=rounds))
    return aggregator, model


def with_head(model, seed, rows):
    update = drawn_update(model, seed)
    update["weights"][HEAD] = torch.tensor(rows, dtype=torch.float32) @ torch.eye(3, 5)
    return update


def test_weights_by_hand_of_similar_and_opposite_heads():
    aggregator, model = server()
    turned = [[1.0, 0, 0], [0, 0, 2.0], [0, 0, 1.0]]  # row 1 is orthogonal to the others' row 1
    updates = {
        0: with_head(model, 0, [[2.0, 0, 0], [0, 1.0, 0], [0, 0, 3.0]]),
        1: with_head(model, 1, turned),
        3: with_head(model, 3, [[-1.0, 0, 0], [0, -1.0, 0], [0, 0, -1.0]]),
    }
    logs = aggregator.aggregate(updates, 0)
    own, near = -math.log(1 - 0.9999), -math.log(1 - 2 / 3)
    assert (own, near) == (pytest.approx(9.2103, rel=1e-3), pytest.approx(1.0986, rel=1e-3))
    y = {client: update["weights"] for client, update in updates.items()}
    for client, other in ((0, 1), (1, 0)):
        received = aggregator.download(client)["weights"]
        torch.testing.assert_close(received[BODY], (own * y[client][BODY] + near * y[other][BODY]) / (own + near))
        assert torch.equal(received[HEAD], y[client][HEAD])
    assert equal(aggregator.download(3)["weights"], y[3])
    assert logs["similarity"] == pytest.approx(2 / 9)
    # client 2 has sent nothing
    assert equal(aggregator.download(2)["weights"], aggregator.state["weights"])


def test_a_similarity_is_kept_until_both_meet_again_and_is_none_before():
    aggregator, model = server()
    same = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]]
    aggregator.aggregate({0: with_head(model, 0, same), 1: with_head(model, 1, same)}, 0)
    later = {2: with_head(model, 2, same)}
    aggregator.aggregate(later, 1)
    # equal heads, but no round in common
    assert equal(aggregator.download(2)["weights"], later[2]["weights"])
    moved = with_head(model, 5, [[-1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    aggregator.aggregate({1: moved}, 2)
    zero = aggregator.state["models"][0][BODY]
    # the head of 1 has changed, and the similarity of round 1 holds on: both count alike
    received = aggregator.download(1)["weights"][BODY]
    torch.testing.assert_close(received, (zero + moved["weights"][BODY]) / 2, rtol=1e-3, atol=1e-3)


def test_all_in_the_warm_up_it_is_fedavg_and_orthogonal_heads_are_local():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    warm, average = (fit(make_client(FedAvg, **settings), aggregator=each) for each in (PFedSim(warmup=1.0), None))
    assert equal(warm.weights, average.weights)
    alone = fit(make_client(FedAvg, **settings), blobs(30), aggregator=PFedSim(warmup=0.0))
    local = fit(make_client(Local, **settings), blobs(30))
    own = {name: t for name, t in local.federation.clients[0].personal.items() if name.startswith("net.")}
    assert equal(alone.federation.aggregator.download(0)["weights"], own)


def test_the_warm_up_ends_after_its_share_of_rounds():
    aggregator, model = server(warmup=0.5, rounds=5)
    updates = {client: drawn_update(model, client) for client in range(3)}
    for number in range(4):
        assert bool(aggregator.state["models"]) == (number > 2)
        aggregator.aggregate(updates, number)
    # two rounds of warm-up, of whose model a client without any later round begins
    assert equal(aggregator.download(3)["weights"], aggregator.global_model())


def test_a_round_without_clients_moves_nothing():
    aggregator, _ = server()
    before = dict(aggregator.state)
    assert aggregator.aggregate({}, 3) == {} and aggregator.state == before


def test_it_trains_where_classes_lack():
    run = fit(make_client(), blobs(30, 45, 20, by_class=True, batch_size=1), aggregator=PFedSim(), max_rounds=4)
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused_by_name(value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.warmup={value}"):
        PFedSim(value)
