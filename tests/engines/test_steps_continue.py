"""Steps that go on through an epoch across rounds: the same batches as one endless run, under all engines."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import SIZES, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.data.batches import batches_of, continued_orders, epoch_order
from pfl_lightning.engines import Sequential
from pfl_lightning.methods import FedAvg, FedRep, Local
from pfl_lightning.privacy import DPSGD
from pfl_lightning.seeds import derive_seed

SETTINGS = {"local_steps": 2, "steps_continue": True, "max_rounds": 4}


@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
@pytest.mark.parametrize("smallest", [1, 2])
def test_pieces_of_any_length_are_the_epochs_in_a_row(last, smallest):
    n, size, seed = 13, 4, 7

    def batches(begun, count):
        orders, done = continued_orders(n, size, last, smallest, seed, begun)
        found = []
        while len(found) < done + count:
            found += [rows for rows in next(orders).split(size) if len(rows) >= smallest]
        return [rows.tolist() for rows in found[done : done + count]]

    whole = batches(0, 12)
    assert [batch for begun, count in ((0, 2), (2, 5), (7, 1), (8, 4)) for batch in batches(begun, count)] == whole
    # each epoch is an order of its own, drawn from its own seed
    epoch = epoch_order(n, size, last, torch.Generator().manual_seed(derive_seed(seed, 1)))
    each = batches_of(len(epoch), size, smallest)
    second = [row for batch in whole[each : 2 * each] for row in batch]
    assert second == epoch[: len(second)].tolist()


def test_rounds_of_some_steps_are_one_training_of_all():
    run = fit(make_client(Local, optimizer=partial(SGD, lr=0.1)), engine="sequential", **SETTINGS)
    for client in range(len(SIZES)):
        part, model, rows = run.data.part(client, "train"), make_client(Local), []
        seed = derive_seed(run.federation.seed, "epochs", client)
        epoch = 0
        while len(rows) < 8:
            order = epoch_order(len(part), 5, "keep", torch.Generator().manual_seed(derive_seed(seed, epoch)))
            rows, epoch = [*rows, *order.split(5)], epoch + 1
        optimizer = SGD(model.parameters(), lr=0.1)
        for own in rows[:8]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(part.x[own]), part.y[own]).backward()
            optimizer.step()
        state = run.federation.clients[client]
        assert state.batches == {"train": 8}
        assert all(torch.allclose(state.personal[name], t, atol=1e-6) for name, t in model.state_dict().items())


@pytest.mark.parametrize("method", [FedAvg, FedRep])
@pytest.mark.by_default("FedRep")
def test_engines_train_on_the_same_batches(method):
    settings = {**SETTINGS, "clients_per_round": 0.75}
    made = partial(make_client, method, optimizer=partial(SGD, lr=0.1))
    # FedRep's phases are of epochs unless the trainer counts steps
    alone, at_once, apart = (fit(made(), engine=each, **settings) for each in ("sequential", "vectorised", "processes"))
    assert equal(dict(alone.weights), dict(apart.weights))
    assert all(torch.allclose(alone.weights[name], t, atol=1e-5) for name, t in at_once.weights.items())
    for client, state in alone.federation.clients.items():
        assert state.batches == at_once.federation.clients[client].batches == apart.federation.clients[client].batches
    plain = fit(made(), engine="sequential", **{**settings, "steps_continue": False})
    assert not equal(dict(alone.weights), dict(plain.weights))
    assert all(not state.batches for state in plain.federation.clients.values())


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_batchnorm_leaves_out_batches_of_one_in_every_epoch(engine):
    data = blobs(16, 21, 26, val_fraction=0.0, test_fraction=0.0)
    run = fit(make_client(FedAvg, net=noisy), data, engine=engine, **SETTINGS)
    assert all(state.batches == {"train": 8} for state in run.federation.clients.values())


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    settings = {**SETTINGS, "clients_per_round": 2}
    whole = fit(make_client(), root=tmp_path / "whole", **settings)
    half = fit(make_client(), root=tmp_path / "half", **{**settings, "max_rounds": 2})
    again = fit(make_client(), root=tmp_path / "half", ckpt_path=half.last, **settings)
    assert same_end(whole, again) and whole.federation.clients[0].batches == again.federation.clients[0].batches
    with pytest.raises(MisconfigurationException, match=r"trainer\.steps_continue"):
        fit(make_client(), root=tmp_path / "half", ckpt_path=half.last, **{**settings, "steps_continue": False})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"local_steps": None}, "local_steps"),
        ({"example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)}, "example_privacy"),
        ({"engine": lambda modules, work, precision: [Sequential(modules[0], work, precision)]}, "sites"),
    ],
    ids=["epochs", "private", "sites"],
)
def test_without_orders_to_go_on_it_is_refused(settings, named):
    with pytest.raises(MisconfigurationException, match=named) as refused:
        fit(make_client(), **{**SETTINGS, **settings})
    assert "trainer.steps_continue=true" in str(refused.value)
