import json

import pytest

from federations import CLASSES, FEATURES, HIDDEN, NETS, Pause, blobs, equal, fit, make_client, noisy
from pfl_lightning.callbacks import FlopCounter
from pfl_lightning.engines import Processes, Sequential, Vectorised
from pfl_lightning.methods import MOON, Ditto, FedAvg, LGFedAvg
from pfl_lightning.privacy import DPSGD

FORWARD = 2 * (FEATURES * HIDDEN + HIDDEN * CLASSES)
STEP = 3 * FORWARD - 2 * FEATURES * HIDDEN
"""Of a sample: backwards costs twice as much, but for the gradient of inputs, which nobody wants."""


def counted(client=None, **settings):
    run = fit(client or make_client(), callbacks=[FlopCounter()], **{"max_rounds": 2, **settings})
    return [row["flops"] for row in run.rows]


@pytest.mark.parametrize("engine", [Sequential, Vectorised, Processes])
@pytest.mark.by_default("Vectorised")
def test_they_are_those_of_samples_and_epochs_whatever_the_engine(engine):
    data = blobs()
    data.setup("fit")
    samples = sum(data.size(client, "train") for client in range(4))
    assert counted(engine=engine) == [STEP * samples] * 2
    assert counted(engine=engine, local_epochs=3, max_rounds=1) == [3 * STEP * samples]


def test_they_are_of_those_who_take_part():
    run = fit(make_client(), callbacks=[FlopCounter()], clients_per_round=2, max_rounds=3)
    for row in run.rows:
        cohort = [int(client) for client in row["cohort"].split()]
        assert row["flops"] == STEP * sum(run.federation.sizes(cohort, "train").values())


def test_what_a_method_adds_counts():
    plain, twice, contrasted = (counted(make_client(method), max_rounds=1)[0] for method in (FedAvg, Ditto, MOON))
    # the personal model, and two more passes forwards through the features
    assert twice == 2 * plain and contrasted == pytest.approx(plain * (1 + 2 * 2 * FEATURES * HIDDEN / STEP))


def test_noise_counts_for_nothing():
    assert counted(example_privacy=DPSGD(1.0)) == counted()


def test_each_architecture_has_its_own():
    small, wide, both = (
        fit(make_client(LGFedAvg, net=net), blobs(20, 20), callbacks=[FlopCounter()], max_rounds=1).rows[0]["flops"]
        for net in (NETS[0], NETS[1], NETS)
    )
    assert small < both < wide and both == pytest.approx((small + wide) / 2)


@pytest.mark.parametrize("method", [FedAvg, Ditto])
@pytest.mark.by_default("FedAvg")
def test_a_run_is_what_it_is_without(method, tmp_path):
    plain = fit(make_client(method, net=noisy), root=tmp_path / "plain", clients_per_round=3)
    watched = fit(
        make_client(method, net=noisy), root=tmp_path / "watched", callbacks=[FlopCounter()], clients_per_round=3
    )
    assert equal(plain.weights, watched.weights)
    assert equal(plain.federation.federation_state(), watched.federation.federation_state())
    assert "flops" not in plain.rows[0]
    json.dumps(watched.rows[0]["flops"])


def test_a_resumed_run_goes_on_with_what_was_counted(tmp_path):
    whole = fit(make_client(), root=tmp_path / "whole", callbacks=[FlopCounter()], max_rounds=3)
    fit(make_client(), root=tmp_path / "halves", callbacks=[FlopCounter(), Pause(1)], max_rounds=3)
    counter = FlopCounter()
    resumed = fit(make_client(), root=tmp_path / "halves", callbacks=[counter], ckpt_path="last", max_rounds=3)
    assert [row["flops"] for row in resumed.rows] == [row["flops"] for row in whole.rows]
    assert counter.per_sample == {0: STEP}
