"""Cyclic: one client after another by hand, the order, a client that diverges, and engines."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import Spy, equal, fit, make_client, noisy, same_end
from pfl_lightning.aggregators import CyclicTransfer
from pfl_lightning.callbacks.attacks import SignFlip
from pfl_lightning.data import epoch_order
from pfl_lightning.methods import FedAvg
from pfl_lightning.privacy import SecureSum
from pfl_lightning.seeds import derive_seed


def run_of(order="drawn", **settings):
    settings = {"aggregator": CyclicTransfer(order), "engine": "sequential", "max_rounds": 2, **settings}
    client = settings.pop("client", None) or make_client(FedAvg, optimizer=partial(SGD, lr=0.1))
    return fit(client, **settings)


def orders_of(run, rounds=2):
    return [run.federation.aggregator.turns(range(4), round) for round in range(rounds)]


@pytest.mark.parametrize("order", ["drawn", "fixed"])
def test_each_client_goes_on_where_the_one_before_it_stopped(order):
    run = run_of(order)
    model = make_client(FedAvg)
    for round, clients in enumerate(orders_of(run)):
        for client in clients:
            part = run.data.part(client, "train")
            optimizer = SGD(model.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(derive_seed(run.federation.seed, "train", round, client))
            for rows in epoch_order(len(part), 5, "keep", generator).split(5):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(part.x[rows]), part.y[rows]).backward()
                optimizer.step()
    assert all(torch.allclose(run.weights[name], t, atol=1e-6) for name, t in model.state_dict().items())
    size = sum(t.numel() * t.element_size() for t in run.weights.values())
    assert all(row["bytes/down"] == 4 * size and row["clients"] == 4 for row in run.rows)


def test_orders_are_drawn_by_round_and_seed_and_keep_when_a_client_is_missing():
    aggregator = run_of().federation.aggregator
    orders = [aggregator.turns(range(9), round) for round in range(5)]
    assert len(set(map(tuple, orders))) == 5 and all(sorted(order) == list(range(9)) for order in orders)
    assert aggregator.turns([8, 2, 5, 0], 3) == [client for client in orders[3] if client in (0, 2, 5, 8)]
    assert CyclicTransfer("fixed").turns([3, 1, 2], 0) == [1, 2, 3]
    with pytest.raises(MisconfigurationException, match=r"aggregator\.order='random'"):
        CyclicTransfer("random")


def test_a_client_that_diverges_is_left_out():
    class Once(FedAvg):
        def upload(self, data):
            update = super().upload(data)
            if self.client_id == 2:
                update["weights"] = {name: t * torch.nan for name, t in update["weights"].items()}
            return update

    spy = Spy()
    run = run_of("fixed", client=make_client(Once), max_rounds=1, callbacks=[spy])
    assert run.rows[0]["clients_diverged"] == 1
    assert equal(dict(run.weights), spy.updates[0][3]["weights"])
    # without a model that others could have gone on from, the end is that of the last sound one
    whole = run_of("fixed", client=make_client(FedAvg), max_rounds=1, callbacks=[other := Spy()])
    assert equal(spy.updates[0][1], other.updates[0][1]) and not equal(run.weights, whole.weights)
    assert all(t.isfinite().all() for t in run.weights.values())


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.by_default("vectorised")
def test_engines_have_the_same_bits(engine):
    settings = {"evaluate": "both", "clients_per_round": 3}
    alone, other = (
        run_of(client=make_client(FedAvg, net=noisy), engine=each, **settings) for each in ("sequential", engine)
    )
    assert equal(dict(alone.weights), dict(other.weights))


@pytest.mark.exhaustive
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    settings = {"optimizer_lifetime": "run", "net": noisy}
    whole = run_of(client=make_client(FedAvg, **settings), root=tmp_path / "whole", max_rounds=3)
    half = run_of(client=make_client(FedAvg, **settings), root=tmp_path / "half", max_rounds=2)
    again = run_of(client=make_client(FedAvg, **settings), root=tmp_path / "half", max_rounds=3, ckpt_path=half.last)
    assert same_end(whole, again)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"secure_sum": SecureSum()}, "trainer.secure_sum"), ({"callbacks": [SignFlip(0.25)]}, "SignFlip")],
    ids=["sums", "attack"],
)
def test_what_has_no_place_between_turns_is_refused(settings, named):
    with pytest.raises(MisconfigurationException, match="CyclicTransfer") as refused:
        run_of(**settings)
    assert named in str(refused.value)
