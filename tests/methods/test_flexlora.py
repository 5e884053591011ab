from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, drawn_update, fit, make_client, noisy, set_up
from peft_nets import peft_net
from pfl_lightning.aggregators import ProductAverage
from pfl_lightning.methods import FedIT, HetLoRA
from pfl_lightning.server.adapters import pairs


def products(weights):
    """The products of all layers, with their scale in the tests' nets."""
    return {pair: 1.5 * weights[pair.b] @ weights[pair.a] for pair in pairs(weights)}


def mean_product(updates):
    total = sum(int(u["num_samples"]) for u in updates.values())
    each = [(int(u["num_samples"]) / total, products(u["weights"])) for u in updates.values()]
    return {pair: sum(p * own[pair] for p, own in each) for pair in each[0][1]}


def after(updates, model):
    server = set_up(ProductAverage(), model)
    return server, server.aggregate(updates, 0)


def test_it_is_the_best_approximation_of_the_mean_product():
    model = make_client(HetLoRA)
    updates = {client: drawn_update(model, client, size=10 * (client + 1)) for client in (0, 2, 3)}
    server, logs = after(updates, model)
    missed = whole = 0.0
    for pair, mean in mean_product(updates).items():
        u, s, v = torch.linalg.svd(mean)
        torch.testing.assert_close(
            products(server.state["weights"])[pair], u[:, :2] * s[:2] @ v[:2], atol=1e-3, rtol=1e-3
        )
        a = server.state["weights"][pair.a]
        torch.testing.assert_close(a @ a.T, torch.eye(2), atol=1e-5, rtol=0)
        missed, whole = missed + float(s[2:].square().sum()), whole + float(s.square().sum())
    assert logs["product_error"] == pytest.approx((missed / whole) ** 0.5, rel=1e-4)
    # all else is the mean
    name = "net.classifier.weight"
    mean = sum(int(u["num_samples"]) / 80 * u["weights"][name] for u in updates.values())
    torch.testing.assert_close(server.state["weights"][name], mean)
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_balanced_factors_have_the_same_product_and_one_size():
    model = make_client(HetLoRA)
    updates = {client: drawn_update(model, client, size=10) for client in (0, 2, 3)}
    server = set_up(ProductAverage(weighting="uniform", balanced=True), model)
    server.aggregate(updates, 0)
    for pair in pairs(updates[0]["weights"]):
        # the transpose's decomposition, as APPFL takes it
        mean = sum(u["weights"][pair.b] @ u["weights"][pair.a] for u in updates.values()) / 3
        u, s, v = torch.linalg.svd(mean.T, full_matrices=False)
        expected = ((u[:, :2] * s[:2].sqrt()) @ (s[:2].sqrt()[:, None] * v[:2])).T
        a, b = server.state["weights"][pair.a], server.state["weights"][pair.b]
        torch.testing.assert_close(b @ a, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(a @ a.T, torch.diag(s[:2]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(b.T @ b, torch.diag(s[:2]), atol=1e-4, rtol=1e-4)


def test_products_that_fit_into_the_rank_are_exact():
    model = make_client(HetLoRA)
    one = drawn_update(model, 0)
    alike = {client: one for client in (1, 2)}
    for updates in ({3: one}, alike):
        server, logs = after(updates, model)
        for pair, mean in mean_product(updates).items():
            torch.testing.assert_close(products(server.state["weights"])[pair], mean, atol=1e-4, rtol=1e-4)
        assert logs["product_error"] < 1e-5


def test_rows_without_a_singular_value_stay_and_learn_on():
    model = make_client(HetLoRA)
    update = drawn_update(model, 0)
    (pair,) = pairs(update["weights"])
    update["weights"][pair.a][1:] = update["weights"][pair.b][:, 1:] = 0
    server, _ = after({0: update}, model)
    assert torch.equal(server.state["weights"][pair.a][1], model.state_dict()[pair.a][1])
    assert not server.state["weights"][pair.b][:, 1].any()
    update["weights"][pair.b][:] = 0
    server, logs = after({0: update}, model)
    assert torch.equal(server.state["weights"][pair.a], model.state_dict()[pair.a]) and logs["product_error"] == 0


def test_a_client_has_the_best_product_of_its_own_rank():
    run = fit(make_client(partial(HetLoRA, ranks=[1, 2])), aggregator=ProductAverage(), max_rounds=1)
    payload = run.federation.aggregator.download(0)
    run.model.receive(run.federation.clients[0].personal, payload, None)
    for pair, whole in products(payload["weights"]).items():
        u, s, v = torch.linalg.svd(whole)
        own = 1.5 * run.model.get_parameter(pair.b) @ run.model.get_parameter(pair.a)
        torch.testing.assert_close(own.detach(), s[0] * u[:, :1] @ v[:1])


def test_one_round_has_the_products_of_fedits_uploads_and_the_next_learns():
    spies = [Spy(), Spy()]
    pairs_of = zip((HetLoRA, FedIT), (ProductAverage(), None), spies, strict=True)
    runs = [fit(make_client(kind), aggregator=server, callbacks=[spy]) for kind, server, spy in pairs_of]
    one, other = (spy.updates[0][0]["weights"] for spy in spies)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert runs[0].rows[0]["server/product_error"] < runs[1].rows[0]["server/product_error"]
    assert runs[0].rows[-1]["val/loss"] < runs[0].rows[0]["val/loss"]


def test_the_engines_agree():
    make = partial(make_client, partial(HetLoRA, ranks=[1, 2]), net=noisy)
    alone, together = (
        fit(make(), aggregator=ProductAverage(), engine=engine) for engine in ("sequential", "vectorised")
    )
    for pair, product in products(alone.weights).items():
        torch.testing.assert_close(products(together.weights)[pair], product, atol=1e-4, rtol=1e-4)


def test_optimizers_that_live_on_are_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer_lifetime=run: aggregator ProductAverage"):
        fit(make_client(HetLoRA, optimizer_lifetime="run"), aggregator=ProductAverage())


def test_it_factors_adapters_of_peft():
    torch.manual_seed(0)
    spy = Spy()
    run = fit(HetLoRA(peft_net, (6,), 3), blobs(24, 16), aggregator=ProductAverage(), max_rounds=1, callbacks=[spy])
    for pair, mean in mean_product(spy.updates[0]).items():
        u, s, v = torch.linalg.svd(mean)
        torch.testing.assert_close(products(run.weights)[pair], u[:, :2] * s[:2] @ v[:2], atol=1e-4, rtol=1e-4)
