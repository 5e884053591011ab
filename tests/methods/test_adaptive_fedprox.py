import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import Spy, blobs, drawn_update, equal, fit, make_client, noisy, set_up
from pfl_lightning.aggregators import AdaptiveProximal
from pfl_lightning.methods import AdaptiveFedProx, FedAvg, FedProx


def after(losses, **settings):
    """The server's weight after each of some rounds with these losses."""
    model = make_client(AdaptiveFedProx)
    server = set_up(AdaptiveProximal(**settings), model)
    weights = []
    for number, loss in enumerate(losses):
        server.aggregate({2: drawn_update(model, 0, received_loss=torch.tensor(loss))}, number)
        weights.append(float(server.download(0)["mu"]))
    return weights


def test_the_weight_falls_after_five_falls_in_a_row_and_rises_with_each_rise():
    assert after([5.0, 4.0, 3.0, 2.0, 1.0], mu=0.1) == pytest.approx([0.1] * 4 + [0])
    # 2.5 is a rise, and the count begins anew; equal losses are falls
    assert after([3.0, 2.0, 2.5, 2.0, 2.0, 2.0], mu=0.5, patience=3) == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.6, 0.5])
    assert after([1.0, 2.0, 3.0], mu=0.0, delta=0.3) == pytest.approx([0, 0.3, 0.6])
    assert after([3.0, 2.0, 1.0, 0.5], mu=0.05, patience=2) == pytest.approx([0.05, 0, 0, 0])


def test_a_loss_that_is_not_finite_changes_nothing():
    assert after([1.0, math.nan, 2.0, math.inf, 2.0], mu=1.0) == pytest.approx([1, 1, 1.1, 1.1, 1.1])


def test_the_loss_is_weighted_as_the_models_are():
    model = make_client(AdaptiveFedProx)
    updates = {
        1: drawn_update(model, 1, size=30, received_loss=torch.tensor(2.0)),
        3: drawn_update(model, 3, size=10, received_loss=torch.tensor(4.0)),
    }
    for weighting, loss in (("samples", 2.5), ("uniform", 3.0)):
        server = set_up(AdaptiveProximal(weighting=weighting), model)
        assert server.aggregate(updates, 0) == pytest.approx({"mu": 1.0, "loss": loss})


def test_a_round_without_clients_moves_nothing():
    server = set_up(AdaptiveProximal(), make_client(AdaptiveFedProx))
    before = dict(server.state)
    assert server.aggregate({}, 0) == {} and server.state == before


def test_with_a_constant_weight_it_is_fedprox_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    adaptive = fit(make_client(AdaptiveFedProx, **settings), aggregator=AdaptiveProximal(mu=0.5, delta=0.0))
    constant = fit(make_client(FedProx, mu=0.5, **settings))
    assert equal(adaptive.weights, constant.weights)
    assert not equal(adaptive.weights, fit(make_client(FedAvg, **settings)).weights)


def test_clients_report_the_loss_of_the_received_model_without_the_term():
    spy = Spy()
    run = fit(make_client(AdaptiveFedProx), callbacks=[spy], max_rounds=1)
    net = make_client().net
    for client, update in spy.updates[0].items():
        part = run.data.part(client, "train")
        assert float(update["received_loss"]) == pytest.approx(float(F.cross_entropy(net(part.x), part.y).detach()))
    assert run.rows[0]["server/mu"] == 1


def test_a_risen_weight_reaches_the_next_round():
    server = partial(AdaptiveProximal, delta=5.0, patience=1)
    falling, constant = (
        fit(make_client(AdaptiveFedProx), aggregator=each, max_rounds=2)
        for each in (server(mu=5.0), AdaptiveProximal(mu=5.0, delta=0.0))
    )
    # the first round counts as a fall, so that the second has no term
    assert [row["server/mu"] for row in falling.rows] == [5, 0]
    assert not equal(falling.weights, constant.weights)


def test_one_client_of_few_classes_trains():
    run = fit(make_client(AdaptiveFedProx), blobs(30, by_class=True, batch_size=1))
    assert run.rows[-1]["clients_diverged"] == 0 and run.rows[-1]["server/loss"] < run.rows[0]["server/loss"]


@pytest.mark.parametrize("setting, value", [("mu", -1), ("mu", math.nan), ("delta", -0.1), ("patience", 0)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{setting}={value}"):
        AdaptiveProximal(**{setting: value})
