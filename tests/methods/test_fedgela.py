import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import CLASSES, OneClient, Spy, blobs, fit, make_client, noisy, points
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.methods import FedGELA
from pfl_lightning.methods.fedetf import simplex
from pfl_lightning.nets import Net


def with_counts(part, **settings):
    model = make_client(FedGELA, **settings)
    model.receive({}, {"weights": {n: t for n, t in model.state_dict().items() if model.is_shared(n)}}, part)
    return model


def lacking():
    x, y = points(12, seed=1)
    keep = (y != 1) & (torch.arange(12) != 0)
    return Samples(x[keep], y[keep])  # 3, 0 and 4 of the classes


def test_the_loss_by_hand_with_an_absent_class():
    part = lacking()
    model = with_counts(ClientData(OneClient(part), 0))
    shares = 3 * torch.tensor([3.0, 0.0, 4.0]) / 7
    torch.testing.assert_close(model.shares, shares)
    h = model.net.features(part.x)
    normed = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    logits = shares * (normed @ simplex(5, CLASSES)) / 0.2
    expected = F.cross_entropy(logits, part.y)
    torch.testing.assert_close(model.training_step((part.x, part.y), 0)["loss"], expected, rtol=1e-4, atol=1e-4)


def test_an_absent_class_is_predicted_where_all_others_are_negative_unless_it_is_out():
    for absent, value in (("zero", 0.0), ("out", -torch.inf)):
        model = with_counts(ClientData(OneClient(lacking()), 0), absent=absent, batch_norm=False).eval()
        outputs = model(points(9, seed=2)[0])
        assert (outputs[:, 1] == value).all()
        assert (outputs[:, [0, 2]] != 0).all() and outputs[:, [0, 2]].isfinite().all()


def test_of_equal_counts_it_is_the_plain_simplex():
    x, y = points(9, seed=1)
    model = with_counts(ClientData(OneClient(Samples(x, y)), 0), batch_norm=False, temperature=1.0)
    logits = model.net.features(x) @ simplex(5, CLASSES)
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(logits, y))
    torch.testing.assert_close(model(x), logits)


def test_the_server_s_model_is_tested_without_shares():
    run = fit(make_client(FedGELA), blobs(20, 30, 45, by_class=True, central_test=0.2), test_every_round=True)
    part = run.data.central_data()
    model = make_client(FedGELA)
    model.load_state_dict(run.weights, strict=False)
    hits = (model.eval().net(part.x).argmax(1) == part.y).float().mean()
    assert run.rows[-1]["test/global_acc"] == pytest.approx(float(hits))


def test_the_norm_travels_the_shares_stay_and_the_simplex_does_neither():
    spy = Spy()
    run = fit(make_client(FedGELA, net=noisy), callbacks=[spy])
    sent = set(spy.updates[0][0]["weights"])
    assert "net.classifier.norm.running_mean" in sent and not any("simplex" in name for name in sent)
    assert all(set(state.personal) == {"shares"} for state in run.federation.clients.values())
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]
    fit(make_client(FedGELA, net=noisy, buffers="local"), callbacks=[spy])
    assert not any("running" in name for name in spy.updates[-1][0]["weights"])


def test_clients_of_one_class_and_batches_of_one_end_finite():
    run = fit(make_client(FedGELA, batch_norm=False), blobs(20, 20, 30, by_class=True, batch_size=1))
    assert all(row["clients_diverged"] == 0 for row in run.rows)


def test_settings_out_of_range_are_refused_by_name():
    for setting, value in (("temperature", 0), ("absent", "none")):
        with pytest.raises(MisconfigurationException, match=rf"model\.{setting}="):
            make_client(FedGELA, **{setting: value})
    with pytest.raises(MisconfigurationException, match=r"model\.net=Net"):
        make_client(FedGELA, net=lambda shape, classes: Net(nn.Linear(shape[0], 2), nn.Linear(2, classes)))
