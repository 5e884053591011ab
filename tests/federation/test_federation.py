import random
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from federations import MOMENTUM, Altered, Spy, blobs, equal, fit, load, make_client, noisy, plain, same_end
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.federation.messages import TrainingDiverged
from pfl_lightning.messages import detached
from pfl_lightning.methods import FedAvg, FedPer, Local
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import RoundStart, Uniform

# Seeds and cohorts


def draw_cohort(clients, size, seed, round):
    start = RoundStart(round, clients, size, random.Random(derive_seed(seed, "cohort", round)), dict)
    return sorted(Uniform().choose(start))


def test_cohorts_are_a_function_of_seed_and_round():
    first, second, third = Spy(), Spy(), Spy()
    fit(make_client(), callbacks=[first], clients_per_round=2, max_rounds=6)
    fit(make_client(Local, net=noisy), callbacks=[second], clients_per_round=2, max_rounds=6, local_epochs=2)
    fit(make_client(seed=4), callbacks=[third], clients_per_round=2, max_rounds=6)
    assert first.cohorts == second.cohorts != third.cohorts
    assert first.cohorts == [draw_cohort([0, 1, 2, 3], 2, seed=3, round=round) for round in range(6)]


def test_cohorts_are_sorted_without_repetition_and_reach_everybody():
    cohorts = [draw_cohort(list(range(10)), 3, seed=0, round=round) for round in range(60)]
    assert all(len(set(cohort)) == 3 and cohort == sorted(cohort) for cohort in cohorts)
    assert {client for cohort in cohorts for client in cohort} == set(range(10))


def test_seeds_are_fixed_for_all_time():
    assert derive_seed(0, "train", 3, 7) == 4868436905351794716
    assert draw_cohort(list(range(20)), 4, seed=0, round=0) == [2, 3, 4, 19]


@pytest.mark.parametrize("method", [FedAvg, FedPer])
@pytest.mark.by_default("FedPer")
def test_a_run_twice_gives_the_same_bits(method):
    settings = {"clients_per_round": 0.5, "max_rounds": 4}
    runs = [fit(make_client(method, net=noisy, optimizer_lifetime="run"), **settings) for _ in range(2)]
    assert same_end(*runs)
    other = fit(make_client(method, net=noisy, optimizer_lifetime="run", seed=4), **settings)
    assert not equal(runs[0].weights, other.weights)


class Gambler(FederatedCallback):
    """Draws from the global generators wherever it can."""

    def draw(self, *args):
        torch.rand(7), random.random(), np.random.rand()

    on_round_start = on_client_fit_start = on_client_fit_end = on_aggregate_start = on_aggregate_end = draw
    on_train_epoch_start = on_train_batch_end = on_validation_batch_end = on_validation_end = draw


def test_random_numbers_drawn_by_callbacks_change_nothing():
    settings = {"evaluate": "both", "clients_per_round": 3}
    runs = [fit(make_client(net=noisy), callbacks=callbacks, **settings) for callbacks in ([], [Gambler()])]
    assert same_end(*runs)


def test_rounds_leave_the_global_generators_where_they_were():
    states = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer, federation):
            states.append((torch.get_rng_state(), random.getstate()))

    fit(make_client(net=noisy), callbacks=[Watch()], evaluate="both")
    assert all(torch.equal(state[0], states[0][0]) and state[1] == states[0][1] for state in states)


# Hooks


class Diary:
    """Writes down which hook was called with what."""

    def __init__(self):
        self.calls = []

    def on_round_start(self, trainer, federation, cohort):
        self.calls.append(("round_start", federation.round, tuple(cohort)))

    def on_client_fit_start(self, trainer, federation, client):
        self.calls.append(("client_start", client))

    def on_client_fit_end(self, trainer, federation, client, outcome):
        assert outcome.client == client and outcome.finite and outcome.seconds > 0
        self.calls.append(("client_end", client))

    def on_aggregate_start(self, trainer, federation, updates):
        self.before = detached(federation.aggregator.download(0))
        self.calls.append(("aggregate_start", tuple(updates)))

    def on_aggregate_end(self, trainer, federation, logs):
        assert not equal(self.before, federation.aggregator.download(0))
        self.calls.append(("aggregate_end", tuple(logs)))


class FederatedDiary(Diary, FederatedCallback):
    pass


class PlainDiary(Diary, Callback):
    def on_train_epoch_start(self, trainer, federation):
        self.calls.append("epoch_start")

    def on_validation_start(self, trainer, federation):
        self.calls.append("validation_start")

    def on_train_epoch_end(self, trainer, federation):
        self.calls.append("epoch_end")


ROUND = [
    ("client_start", 0),
    ("client_end", 0),
    ("client_start", 1),
    ("client_end", 1),
    ("aggregate_start", (0, 1)),
    ("aggregate_end", ()),
]


def test_hooks_of_a_round_come_in_order_with_their_arguments():
    diary = FederatedDiary()
    fit(make_client(), blobs(20, 20), callbacks=[diary], max_rounds=2)
    assert diary.calls == [("round_start", 0, (0, 1)), *ROUND, ("round_start", 1, (0, 1)), *ROUND]


def test_a_plain_callback_with_hooks_of_these_names_gets_them_between_its_own():
    diary = PlainDiary()
    fit(make_client(), blobs(20, 20), callbacks=[diary], max_rounds=1)
    assert diary.calls == ["epoch_start", ("round_start", 0, (0, 1)), *ROUND, "validation_start", "epoch_end"]


# Divergence


class Poisoned(Altered):
    """Clients in ``bad`` have broken training samples."""

    bad: frozenset[int] = frozenset()

    def alter(self, part, client, split):
        return type(part)(part.x * float("nan"), part.y) if split == "train" and client in self.bad else part


class Poison(FederatedCallback):
    """Breaks clients in given rounds, and keeps the states before."""

    def __init__(self, bad):
        self.bad, self.states = bad, []

    def on_round_start(self, trainer, federation, cohort):
        federation.data.bad = frozenset(self.bad.get(federation.round, ()))
        self.states.append(dict(federation.clients))


def test_a_diverged_client_is_left_out_named_and_counted():
    poison, spy = Poison({1: {1, 3}}), Spy()
    settings = {"callbacks": [poison, spy], "max_rounds": 3}
    with pytest.warns(UserWarning, match="round 2: .* clients 1, 3"):
        run = fit(make_client(FedPer, optimizer_lifetime="run"), blobs(data=Poisoned), **settings)
    assert [row["clients"] for row in run.rows] == [4, 2, 4]
    assert [row["clients_diverged"] for row in run.rows] == [0, 2, 0]
    assert list(spy.updates[1]) == [0, 2]
    before, after = poison.states[1], poison.states[2]
    for client in (1, 3):
        assert equal(vars(before[client]), vars(after[client]))
    assert not equal(vars(before[0]), vars(after[0]))
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())


def test_a_client_whose_weights_alone_diverge_is_left_out():
    class Explodes(FedAvg):
        def upload(self, data):
            update = super().upload(data)
            bad = len(data.train) < 12
            return update | {"weights": {n: t / (1 - bad) for n, t in update["weights"].items()}}

    with pytest.warns(UserWarning, match="clients 1"):
        run = fit(make_client(Explodes), blobs(24, 16), max_rounds=1)
    assert run.rows[0]["clients_diverged"] == 1


def test_where_all_clients_diverge_the_run_ends_and_the_last_checkpoint_stands(tmp_path):
    poison = Poison({2: {0, 1, 2, 3}})
    with pytest.raises(TrainingDiverged, match="round 3"):
        fit(make_client(FedPer), blobs(data=Poisoned), tmp_path, callbacks=[poison], max_rounds=4)
    (path,) = tmp_path.glob("FedPer-Poisoned/version_0/checkpoints/last.ckpt")
    assert load(path)["federation"]["round"] == 2
    whole = fit(make_client(FedPer), blobs(data=Poisoned), max_rounds=4)
    resumed = fit(make_client(FedPer), blobs(data=Poisoned), tmp_path, ckpt_path=path, max_rounds=4)
    assert same_end(whole, resumed)


# What Lightning sees


def test_the_state_dict_has_the_client_module_s_names():
    run = fit(make_client(FedPer, net=noisy))
    assert list(run.weights) == list(make_client(FedPer, net=noisy).state_dict())
    initial = make_client(FedPer, net=noisy).state_dict()
    assert torch.equal(run.weights["net.classifier.weight"], initial["net.classifier.weight"])
    assert not torch.equal(run.weights["net.features.0.weight"], initial["net.features.0.weight"])


def test_a_schedule_may_replace_the_configured_rate():
    schedule = partial(OneCycleLR, max_lr=1.0, div_factor=4, total_steps=5, cycle_momentum=False)
    by_schedule = fit(make_client(lr_scheduler=schedule), max_rounds=1)
    by_optimizer = fit(make_client(optimizer=partial(MOMENTUM, lr=0.25)), max_rounds=1)
    assert by_schedule.rows[0]["lr"] == pytest.approx(0.25)
    for name, tensor in by_optimizer.weights.items():
        torch.testing.assert_close(by_schedule.weights[name], tensor)


def test_a_schedule_that_waits_for_a_metric_is_refused():
    with pytest.raises(MisconfigurationException, match="ReduceLROnPlateau"):
        fit(make_client(lr_scheduler=partial(ReduceLROnPlateau)))


def test_a_client_keeps_no_more_than_its_state():
    run = fit(make_client(Local, net=plain))
    state = run.federation.federation_state()
    assert set(state["clients"][0]) == {"personal"}


def test_states_of_clients_share_no_memory_with_the_module():
    run = fit(make_client(Local))
    kept = detached(run.federation.clients[0].personal)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(7)
    assert equal(kept, run.federation.clients[0].personal)


def test_at_a_fits_start_a_rank_lets_go_of_other_ranks_states(monkeypatch):
    run = fit(make_client(Local), max_rounds=1, client_states="rank")
    # as of the first of two ranks
    monkeypatch.setattr(
        run.federation.engines[0], "own_states", lambda states: {k: s for k, s in states.items() if not k % 2}
    )
    run.federation.on_train_start()
    assert sorted(run.federation.clients) == [0, 2]
