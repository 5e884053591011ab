import copy
import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import Spy, blobs, check_batches_of_one, drawn_update, equal, fit, make_client, noisy, set_up
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import GeneralizationAdjustment
from pfl_lightning.methods import FedAvg, FedDGGA
from pfl_lightning.tasks import Regression


def server(rounds=None, **settings):
    """An aggregator of four clients that knows a number of rounds."""
    made = set_up(GeneralizationAdjustment(**settings), make_client().double())
    made.rounds = rounds
    return made


def update(model, k, received, trained):
    errors = {"received_error": received, "trained_error": trained}
    return drawn_update(model, k, 10, **{name: torch.tensor(value) for name, value in errors.items()})


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        # two of two clients, and the step 0.2
        ({0: 1.0, 1: 0.0}, {0: 0.7, 1: 0.3}),
        ({0: -3.0, 1: 5.0}, {0: 0.3, 1: 0.7}),
        # equal gaps, one gap and none leave the weights
        ({0: 0.3, 1: 0.3}, {0: 0.5, 1: 0.5}),
        ({0: 0.1 + 0.2, 1: 0.3}, {0: 0.5, 1: 0.5}),
        ({0: 2.0}, {0: 0.5, 1: 0.5}),
        ({}, {0: 0.5, 1: 0.5}),
        # a loss that diverged is no gap
        ({0: math.inf, 1: 0.0}, {0: 0.5, 1: 0.5}),
    ],
)
def test_an_adjustment_by_hand(gaps, expected):
    assert server(step=0.2).adjusted({0: 0.5, 1: 0.5}, gaps, 1) == pytest.approx(expected)


def test_the_middle_of_three_gaps_stays_and_the_step_falls_over_rounds():
    a = dict.fromkeys(range(3), 1 / 3)
    ours = server(rounds=10, step=0.2)
    for r, d in ((1, 0.2), (6, 0.1), (10, 0.02), (14, 0.0)):
        found = ours.adjusted(a, {0: 1.0, 1: 0.5, 2: 0.0}, r)
        assert found == pytest.approx({0: 1 / 3 + d, 1: 1 / 3, 2: 1 / 3 - d})


def test_weights_are_clipped_divided_by_their_sum_and_come_back():
    ours = server(step=0.6)
    first = ours.adjusted({0: 0.5, 1: 0.5}, {0: 0.0, 1: 1.0}, 1)
    assert first == {0: 0.0, 1: 1.0}
    assert ours.adjusted(first, {0: 1.0, 1: 0.0}, 2) == pytest.approx({0: 0.6, 1: 0.4})
    # without the mean taken out, all may fall to 0
    assert server(step=9.0, preset="official").adjusted({0: 0.5, 1: 0.5}, {0: -1.0, 1: -1.0}, 1) == {0: 0.5, 1: 0.5}


def test_the_official_rule_keeps_the_mean_and_divides_by_three():
    ours = server(rounds=10, step=0.2, preset="official")
    found = ours.adjusted({0: 0.5, 1: 0.5}, {0: 2.0, 1: 1.0}, 1)
    moved = {0: 0.5 + 0.2 * 1.1 / 3, 1: 0.5 + 0.1 * 1.1 / 3}
    assert found == pytest.approx({k: w / sum(moved.values()) for k, w in moved.items()})
    assert ours.adjusted({0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.0}, 1) == {0: 0.5, 1: 0.5}


def test_the_gap_is_of_the_average_of_the_round_before_and_comes_first():
    model, ours = make_client().double(), server(step=0.2)
    ours.aggregate({k: update(model, k, received=9.0, trained=1.0) for k in (0, 1)}, 0)
    assert set(ours.state["shares"].values()) == {0.5}
    # gaps 1 and 0; client 2 has none, and the others' old losses are forgotten after it
    sent = {0: update(model, 3, 2.0, 5.0), 1: update(model, 4, 1.0, 5.0), 2: update(model, 5, 7.0, 5.0)}
    logs = ours.aggregate(sent, 1)
    assert ours.state["a"] == pytest.approx({0: 0.45, 1: 0.05, 2: 0.25, 3: 0.25})
    shares = {0: 0.6, 1: 0.05 / 0.75, 2: 1 / 3}
    assert ours.state["shares"] == pytest.approx(shares) and ours.state["trained"] == {0: 5.0, 1: 5.0, 2: 5.0}
    assert logs == pytest.approx({"largest": 0.6, "smallest": 0.05 / 0.75})
    mean = sum(share * sent[k]["weights"]["net.classifier.weight"] for k, share in shares.items())
    torch.testing.assert_close(ours.global_model()["net.classifier.weight"], mean)


def test_clients_whose_weights_are_all_zero_count_alike():
    model, ours = make_client().double(), server()
    ours.state["a"] = {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    ours.aggregate({k: update(model, k, 1.0, 1.0) for k in (0, 1)}, 0)
    assert ours.state["shares"] == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize("clients_per_round", [3, 4])
def test_without_a_step_it_is_the_plain_mean_bit_for_bit_and_else_is_not(clients_per_round):
    runs = [
        fit(make_client(method, net=noisy), aggregator=aggregator, clients_per_round=clients_per_round).weights
        for method, aggregator in (
            (FedAvg, WeightedAverage(weighting="uniform")),
            (FedDGGA, GeneralizationAdjustment(step=0.0)),
            (FedDGGA, GeneralizationAdjustment(step=0.9)),
        )
    ]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


@pytest.mark.parametrize("error", ["loss", "acc"])
def test_errors_are_of_the_received_and_the_trained_model_on_validation_samples(error):
    spy = Spy()
    run = fit(make_client(partial(FedDGGA, error=error), net=noisy), callbacks=[spy], max_rounds=1)
    for client, sent in spy.updates[0].items():
        part = run.data.part(client, "val")
        for name, weights in (("received_error", None), ("trained_error", sent["weights"])):
            net = make_client(net=noisy).net.eval()
            if weights is not None:
                net.load_state_dict({n.removeprefix("net."): t for n, t in weights.items()})
            z = net(part.x)
            expected = F.cross_entropy(z, part.y) if error == "loss" else (z.argmax(1) != part.y).float().mean()
            assert float(sent[name]) == pytest.approx(expected.item(), rel=1e-5)
    assert all("received_error" not in state.personal for state in run.federation.clients.values())


def test_nobody_taking_part_changes_nothing():
    ours = server()
    before = copy.deepcopy(ours.state)
    assert ours.aggregate({}, 0) == {} and equal(ours.state, before)


@pytest.mark.exhaustive
def test_many_clients_at_once_have_the_same_weights():
    alone, many = (fit(make_client(FedDGGA), engine=engine) for engine in ("sequential", "vectorised"))
    assert many.federation.aggregator.state["a"] == pytest.approx(alone.federation.aggregator.state["a"], rel=1e-4)


def test_batches_of_one_sample():
    check_batches_of_one(make_client(FedDGGA), max_rounds=3)


def test_mistakes_are_refused():
    with pytest.raises(MisconfigurationException, match=r"client \d has no validation samples.*data\.val_fraction"):
        fit(make_client(FedDGGA), blobs(val_fraction=0.0))
    with pytest.raises(MisconfigurationException, match=r"model\.error=acc needs the class.*error=loss"):
        make_client(FedDGGA, error="acc", task=Regression())
    for settings, words in (({"step": -1.0}, r"aggregator\.step=-1\.0"), ({"preset": "flower"}, "paper, official")):
        with pytest.raises(MisconfigurationException, match=words):
            GeneralizationAdjustment(**settings)
