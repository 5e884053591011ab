import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from federations import Spy, blobs, equal, fit, make_client, noisy, points
from pfl_lightning.methods import FENDA, PerFCL


def contrast(a, positive, negative, tau):
    up, down = (torch.exp(F.cosine_similarity(a, other) / tau) for other in (positive, negative))
    return -torch.log(up / (up + down)).mean()


def same_end(one, other):
    """Whether shared and personal entries are the same in two runs."""
    personal = (
        {c: {n: s.personal[n] for n in s.personal if "old" not in n} for c, s in sorted(r.items())}
        for r in (one.federation.clients, other.federation.clients)
    )
    return equal(*personal) and equal(*(r.federation.aggregator.global_model() for r in (one, other)))


def test_without_contrasts_it_is_fenda_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    free = fit(make_client(PerFCL, mu=0.0, gamma=0.0, **settings))
    assert same_end(free, fit(make_client(FENDA, **settings)))
    assert not any("old" in name for state in free.federation.clients.values() for name in state.personal)


def test_the_first_training_has_no_contrast_and_later_ones_have():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    for rounds, same in ((1, True), (2, False)):
        runs = [fit(make_client(method, **settings), max_rounds=rounds) for method in (PerFCL, FENDA)]
        assert same_end(*runs) == same
    assert [row["train/contrast"] > 0 for row in fit(make_client(PerFCL)).rows] == [False, True, True]


def test_the_loss_by_hand():
    model = make_client(PerFCL, mu=0.7, gamma=1.3, tau=0.4).double()
    others = {name: make_client(FENDA, seed=seed).double() for name, seed in (("old", 5), ("received", 6))}
    model.old.take_from(others["old"].net.features)
    model.old_local.take_from(others["old"].net.local)
    model.received.take_from(others["received"].net.features)
    x, y = points(9, seed=1)
    x = x.double()
    shared, personal = model.net.features(x), model.net.local(x)
    received, old = others["received"].net.features(x), others["old"].net.features(x)
    entropy = F.cross_entropy(model.net.classifier(torch.cat([personal, shared], 1)), y)
    terms = 0.7 * contrast(shared, received, old, 0.4)
    terms = terms + 1.3 * contrast(personal, others["old"].net.local(x), received, 0.4)
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], entropy)
    model.has_old.fill_(True)
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], entropy + terms)


def test_equal_references_give_the_logarithm_of_two_without_a_gradient():
    model = make_client(PerFCL, gamma=0.0).double()
    # one client alone receives the body that it has just trained
    model.old.take_from(model.net.features)
    model.received.take_from(model.net.features)
    model.has_old.fill_(True)
    x, y = points(9, seed=1)
    value = model.training_step((x.double(), y), 0)["contrast"]
    assert float(value.detach()) == pytest.approx(math.log(2))
    assert all(not g.any() for g in torch.autograd.grad(value, list(model.net.features.parameters())))


def test_old_bodies_are_those_of_the_last_training_and_stay():
    spy = Spy()
    run = fit(make_client(PerFCL, net=noisy), callbacks=[spy], clients_per_round=2)
    last = {client: updates[client]["weights"] for updates in spy.updates for client in updates}
    for client, state in run.federation.clients.items():
        assert torch.equal(state.personal["old.0/weight"], last[client]["net.features.0.weight"])
        assert torch.equal(state.personal["old_local.0/weight"], state.personal["net.local.0.weight"])
        assert state.personal["has_old"]
    assert not any("old" in name for updates in spy.updates for u in updates.values() for name in u["weights"])


def test_it_trains_where_there_is_little():
    run = fit(make_client(PerFCL), blobs(30, 45, by_class=True, batch_size=1))
    assert run.rows[-1]["clients_diverged"] == 0


@pytest.mark.parametrize("setting, value", [("mu", -1), ("gamma", math.nan), ("tau", 0)])
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(PerFCL, **{setting: value})
