"""How well losses tell training samples from others."""

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sklearn.metrics import roc_auc_score, roc_curve
from torch.nn import functional as F

from federations import Spy, blobs, equal, fit, make_client
from pfl_lightning.callbacks import MembershipAudit
from pfl_lightning.callbacks.membership_audit import told_apart
from pfl_lightning.methods import FedAvg, FedPer, Local

PARTS = ("auc", "advantage", "tpr_at_1")


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_measures_are_those_of_the_curve(ties):
    rng = np.random.default_rng(0)
    members, others = rng.exponential(1.0, 300), rng.exponential(1.5, 250)
    if ties:
        members, others = members.round(1), others.round(1)
    found = told_apart(members, others)
    labels = np.r_[np.ones(300), np.zeros(250)]
    false, true, _ = roc_curve(labels, -np.r_[members, others], drop_intermediate=False)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, -np.r_[members, others]), abs=1e-12)
    assert found["advantage"] == pytest.approx((true - false).max(), abs=1e-12)
    assert found["tpr_at_1"] == pytest.approx(true[false <= 0.01].max(), abs=1e-12)


def test_extremes():
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert told_apart(low, high) == {"auc": 1.0, "advantage": 1.0, "tpr_at_1": 1.0}
    assert told_apart(high, low) == {"auc": 0.0, "advantage": 0.0, "tpr_at_1": 0.0}
    assert told_apart(low, low)["auc"] == 0.5 and told_apart(low, low)["advantage"] == 0.0


def audited(method=FedAvg, every=None, **settings):
    watch = Spy()
    audits = [watch, MembershipAudit(every)]
    return fit(make_client(method), blobs(30, 40, 50, test_fraction=0.3), callbacks=audits, **settings), watch


def plainly(run, nets):
    """By one loss after another of each client's net."""
    found = {"train": [], "test": []}
    for client, net in nets.items():
        net.eval()
        for split, losses in found.items():
            part = run.data.part(client, split)
            losses += [float(F.cross_entropy(net(x[None]), y[None])) for x, y in zip(part.x, part.y, strict=True)]
    return told_apart(*map(np.array, found.values()))


def test_it_is_of_the_models_that_clients_receive_and_of_those_that_they_send():
    run, watch = audited(max_rounds=3)
    row = run.rows[-1]
    net = run.model.net
    net.load_state_dict({name.removeprefix("net."): t for name, t in run.federation.aggregator.global_model().items()})
    expected = plainly(run, dict.fromkeys(range(3), net))
    assert {part: row[f"membership/model/{part}"] for part in PARTS} == pytest.approx(expected, abs=1e-9)
    members, others = [], []
    for client, update in watch.updates[-1].items():
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in update["weights"].items()})
        for split, losses in (("train", members), ("test", others)):
            part = run.data.part(client, split)
            losses += F.cross_entropy(net(part.x), part.y, reduction="none").tolist()
    expected = told_apart(np.array(members), np.array(others))
    assert {part: row[f"membership/upload/{part}"] for part in PARTS} == pytest.approx(expected, abs=0.02)


def test_it_audits_the_last_round_or_every_so_many():
    name = "membership/model/auc"
    assert [name in row for row in audited(max_rounds=4)[0].rows] == [False, False, False, True]
    assert [name in row for row in audited(every=2, max_rounds=5)[0].rows] == [False, True, False, True, False]


@pytest.mark.parametrize("method", [FedPer, Local], ids=lambda m: m.__name__)
def test_what_does_not_send_its_whole_net_has_no_upload_to_audit(method):
    row = audited(method, max_rounds=2)[0].rows[-1]
    assert "membership/model/auc" in row and "membership/upload/auc" not in row


def test_it_changes_nothing():
    data = blobs(30, 40, 50, test_fraction=0.3)
    assert equal(audited(every=1, max_rounds=3)[0].weights, fit(make_client(), data, max_rounds=3).weights)


def test_refusals():
    with pytest.raises(MisconfigurationException, match="every=0 must be 1 or more"):
        MembershipAudit(0)
    with pytest.raises(MisconfigurationException, match=r"no client has both; set data\.test_fraction"):
        fit(make_client(), blobs(30, 40, 50, test_fraction=0.0), callbacks=[MembershipAudit()])
