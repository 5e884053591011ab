from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Pause, Spy, blobs, drawn_update, equal, fit, flat, make_client, noisy, set_up
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import FedCross
from pfl_lightning.methods import Local

STILL = {"shuffle": False}


def after(updates, rounds=1, names=None, **settings):
    """A server after rounds with the same updates, and its models as vectors."""
    model = make_client(net=noisy)
    server = set_up(FedCross(**settings), model, clients=4)
    for number in range(rounds):
        server.aggregate(updates, number)
    names = names or [name for name, _ in model.named_parameters()]
    return server, [flat(weights, names) for weights in server.state["models"]]


def uploads(*clients):
    model = make_client(net=noisy)
    updates = {client: drawn_update(model, client) for client in clients}
    return updates, {k: flat(u["weights"], [name for name, _ in model.named_parameters()]) for k, u in updates.items()}


@pytest.mark.parametrize("rounds, offset", [(1, 1), (2, 2), (4, 1)])
def test_in_order_each_model_has_its_next_but_round_partner(rounds, offset):
    updates, v = uploads(0, 1, 2, 3)
    _, models = after(updates, rounds, partner="in_order", alpha=0.7, **STILL)
    for slot, model in enumerate(models):
        torch.testing.assert_close(model, 0.7 * v[slot] + 0.3 * v[(slot + offset) % 4])


@pytest.mark.parametrize("partner, choose", [("lowest", min), ("highest", max)])
def test_by_similarity_it_is_the_model_of_extreme_cosine(partner, choose):
    updates, v = uploads(0, 1, 2, 3)
    server, models = after(updates, partner=partner, **STILL)
    for slot, model in enumerate(models):
        others = {j: float(torch.cosine_similarity(v[slot], v[j], dim=0)) for j in v if j != slot}
        other = choose(others, key=others.get)
        torch.testing.assert_close(model, 0.99 * v[slot] + 0.01 * v[other])
    deployed = flat(server.global_model(), [name for name, _ in make_client(net=noisy).named_parameters()])
    torch.testing.assert_close(deployed, torch.stack(models).mean(0))


def test_a_model_without_its_client_rests_and_a_single_one_has_no_partner():
    updates, v = uploads(1, 3)
    server, models = after(updates, alpha=0.6, **STILL)
    torch.testing.assert_close(models[1], 0.6 * v[1] + 0.4 * v[3])
    initial = set_up(FedCross(), make_client(net=noisy)).state["mean"]
    assert equal(server.state["models"][0], initial) and equal(server.state["models"][2], initial)
    updates, v = uploads(2)
    torch.testing.assert_close(after(updates, alpha=0.6, **STILL)[1][2], v[2])


def test_counters_are_the_model_s_own():
    updates, _ = uploads(0, 1)
    server, _ = after(updates, alpha=0.5, **STILL)
    counter = "net.features.1.num_batches_tracked"
    assert [int(server.state["models"][slot][counter]) for slot in (0, 1)] == [
        int(updates[client]["weights"][counter]) for client in (0, 1)
    ]


def test_models_change_their_clients_and_none_has_two():
    server, _ = after({}, alpha=1.0)
    slots = []
    for number in range(4):
        slots.append(list(server.state["slots"]))
        server.aggregate(uploads(0, 1, 2, 3)[0], number)
    assert all(sorted(each) == [0, 1, 2, 3] for each in slots) and len(set(map(tuple, slots))) > 1
    for client in range(4):
        assert server.download(client)["weights"] is server.state["models"][server.state["slots"][client]]
    assert server.welcome(9, None)["weights"] is server.global_model()


def test_the_deployed_model_goes_to_all_after_the_planned_rounds_and_not_before():
    aggregator, model = FedCross(), make_client(net=noisy)
    aggregator.setup(Server(4, model.state_dict(), model, None, seed=0, rounds=2))
    for number, same in ((0, False), (1, True)):
        aggregator.aggregate(uploads(0, 1, 2, 3)[0], number)
        mean = aggregator.global_model()
        assert all((aggregator.download(client)["weights"] is mean) == same for client in range(4))


def test_without_mixing_and_moving_models_are_local():
    run = fit(make_client(net=noisy), aggregator=FedCross(alpha=1.0, **STILL), callbacks=[Pause(2)])
    local = fit(make_client(Local, net=noisy), callbacks=[Pause(2)])
    for client, state in local.federation.clients.items():
        own = {name: t for name, t in state.personal.items() if name.startswith("net.")}
        assert equal(run.federation.aggregator.state["models"][client], own)


def test_two_models_mixed_in_halves_are_the_plain_average():
    two = partial(blobs, 30, 24)
    run = fit(make_client(), two(), aggregator=FedCross(alpha=0.5))
    average = fit(make_client(), two(), aggregator=WeightedAverage(weighting="uniform"))
    for name, tensor in average.weights.items():
        torch.testing.assert_close(run.weights[name], tensor)


def test_a_round_without_clients_moves_nothing():
    server, _ = after({})
    before = dict(server.state)
    assert server.aggregate({}, 3) == {} and server.state == before


def test_it_learns_where_clients_stay_away():
    spy = Spy()
    run = fit(make_client(), aggregator=FedCross(), clients_per_round=2, max_rounds=6, callbacks=[spy])
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


@pytest.mark.parametrize("setting, value", [("alpha", 0.4), ("alpha", 1.1), ("partner", "nearest")])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{setting}="):
        FedCross(**{setting: value})
