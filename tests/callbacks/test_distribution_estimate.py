import pytest
import torch

from federations import CLASSES, Spy, blobs, fit, make_client
from pfl_lightning.aggregators import CwFedAvg
from pfl_lightning.callbacks import DistributionEstimate
from pfl_lightning.callbacks.distribution_estimate import estimation_error
from pfl_lightning.methods import WDR, FedAvg, FedPer, Local
from pfl_lightning.methods.cwfedavg import row_distribution


def test_by_hand():
    distance, absent = estimation_error(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([2, 2, 0]))
    assert distance == pytest.approx((0.01 + 0.04 + 0.01) ** 0.5)
    assert absent == pytest.approx(0.1)
    assert estimation_error(torch.full((4,), 0.25), torch.full((4,), 7)) == (0, 0)


@pytest.mark.parametrize("method", [FedAvg, WDR])
def test_the_record_holds_means_over_the_uploads_of_the_round(method):
    spy = Spy()
    run = fit(make_client(method), blobs(40, 40, by_class=True), callbacks=[DistributionEstimate(), spy])
    for row, updates in zip(run.rows, spy.updates, strict=True):
        errors = [
            estimation_error(row_distribution(u["weights"]["net.classifier.weight"]), run.data.counts[client])
            for client, u in updates.items()
        ]
        assert row["estimate/distance"] == pytest.approx(sum(e[0] for e in errors) / 2)
        assert row["estimate/absent_mass"] == pytest.approx(sum(e[1] for e in errors) / 2)


def test_the_regulariser_shows_more_of_what_a_client_holds():
    rows = {
        weight: fit(
            make_client(WDR, wdr_lambda=weight), blobs(40, 40, by_class=True), callbacks=[DistributionEstimate()]
        ).rows[-1]
        for weight in (0.0, 5.0)
    }
    assert rows[5.0]["estimate/distance"] < 0.5 * rows[0.0]["estimate/distance"]
    assert rows[5.0]["estimate/absent_mass"] < 0.5 * rows[0.0]["estimate/absent_mass"] < CLASSES


@pytest.mark.parametrize("method", [FedPer, Local])
def test_clients_that_keep_their_output_layer_show_nothing(method):
    assert not any(
        "estimate/distance" in row for row in fit(make_client(method), callbacks=[DistributionEstimate()]).rows
    )


def test_it_changes_nothing():
    plain, watched = (
        fit(make_client(WDR), aggregator=CwFedAvg(), callbacks=calls) for calls in ([], [DistributionEstimate()])
    )
    assert all(torch.equal(plain.weights[name], watched.weights[name]) for name in plain.weights)
