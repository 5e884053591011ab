import torch

from federations import Spy, blobs, equal, fit, make_client, noisy
from pfl_lightning.methods import Local


def test_nothing_travels():
    spy = Spy()
    run = fit(make_client(Local), callbacks=[spy])
    assert all(row["bytes/up"] == row["bytes/down"] == 0 for row in run.rows)
    assert all(update == {} for updates in spy.updates for update in updates.values())


def test_a_client_s_model_depends_on_its_own_data_alone():
    many = fit(make_client(Local, net=noisy))
    data = many.data
    alone = fit(make_client(Local, net=noisy), blobs(24))
    assert torch.equal(data.part(0, "train").y, alone.data.part(0, "train").y)
    assert equal(many.federation.clients[0].personal, alone.federation.clients[0].personal)


def test_a_client_that_never_took_part_has_the_common_initial_model():
    run = fit(make_client(Local), clients_per_round=1, max_rounds=1)
    (trained,) = run.federation.clients
    other = (trained + 1) % 4
    assert equal(run.federation.job(other).state.personal, run.federation.initial[0])
    assert equal(run.federation.initial[0], dict(make_client(Local).state_dict()))
