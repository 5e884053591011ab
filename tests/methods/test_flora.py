from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, drawn_update, fit, make_client, near, noisy, set_up
from peft_nets import peft_net
from pfl_lightning.aggregators import StackedAverage
from pfl_lightning.methods import FLoRA
from pfl_lightning.methods.fedex_lora import residual_of
from pfl_lightning.server.adapters import pairs


@pytest.mark.parametrize("make", [partial(make_client, partial(FLoRA, ranks=[1, 2])), lambda: FLoRA(peft_net, (6,), 3)])
def test_the_frozen_weights_move_by_the_mean_product_of_each_round(make):
    torch.manual_seed(0)
    spy = Spy()
    run = fit(make(), blobs(24, 16, 20), callbacks=[spy], max_rounds=2)
    for pair in pairs(run.weights):
        moved = 0
        for updates in spy.updates:
            total = sum(int(u["num_samples"]) for u in updates.values())
            for update in updates.values():
                a, b = (update["weights"][name] for name in (pair.a, pair.b))
                moved = moved + int(update["num_samples"]) / total * 1.5 * b @ a
        moved = moved.T if pair.is_transposed(run.model) else moved
        torch.testing.assert_close(run.weights[residual_of(pair)], moved, rtol=1e-5, atol=1e-6)


def test_adapters_begin_anew_and_alike_with_each_round():
    model = make_client(FLoRA)
    updates = {client: drawn_update(model, client) for client in (0, 3)}
    server, other = (set_up(StackedAverage(), model) for _ in range(2))
    assert server.aggregate(updates, 0) == other.aggregate(updates, 0) == {}
    for pair in server.scales:
        first = server.state["weights"][pair.a]
        assert torch.equal(first, other.state["weights"][pair.a]) and not server.state["weights"][pair.b].any()
        assert 0.8 / 6**0.5 < first.abs().max() <= 1 / 6**0.5
        server.aggregate(updates, 1)
        assert not torch.equal(first, server.state["weights"][pair.a])
    before = dict(server.state)
    assert server.aggregate({}, 2) == {} and server.state == before


def test_equal_clients_merge_the_adapter_of_one():
    model = make_client(FLoRA)
    update = drawn_update(model, 0)
    server = set_up(StackedAverage(), model)
    server.aggregate({0: update, 2: update}, 0)
    for pair in server.scales:
        merged = 1.5 * update["weights"][pair.b] @ update["weights"][pair.a]
        torch.testing.assert_close(server.state["weights"][residual_of(pair)], merged)


def test_residuals_of_float64_uploads_are_float64():
    model = make_client(FLoRA)
    server = set_up(StackedAverage("uniform"), model)
    updates = {client: drawn_update(model.double(), client) for client in (0, 3)}
    server.aggregate(updates, 0)
    for pair in server.scales:
        merged = 0.75 * sum(update["weights"][pair.b] @ update["weights"][pair.a] for update in updates.values())
        torch.testing.assert_close(server.state["weights"][residual_of(pair)], merged, rtol=1e-14, atol=1e-14)


def test_the_engines_agree_and_it_learns():
    make = partial(make_client, partial(FLoRA, ranks=[1, 2]), net=noisy)
    alone, together = (fit(make(), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights))
    run = fit(make_client(FLoRA))
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_optimizers_that_live_on_are_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer_lifetime=run: aggregator StackedAverage"):
        fit(make_client(FLoRA, optimizer_lifetime="run"))
