import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import Pause, Shuffled, Spy, blobs, equal, fit, make_client, near, noisy, same_end, untimed
from pfl_lightning import FederatedTrainer, WeightedAverage
from pfl_lightning.aggregators import CyclicTransfer, FedAsync, FedBuff
from pfl_lightning.callbacks import SignFlip
from pfl_lightning.compression import TopK
from pfl_lightning.data import InputDrift
from pfl_lightning.methods import FedPer, Pooled
from pfl_lightning.privacy import DPSGD, DPAverage, SecureSum
from pfl_lightning.schedules import Asynchronous, Synchronous, Turn
from pfl_lightning.selection import Availability, Oort, Poisson
from pfl_lightning.selection.base import enough

EVEN = {"distribution": "constant", "seconds": 1.0}
LATE = {"distribution": "lognormal", "spread": 1.5}


def table(folder, *speeds, delays=()):
    rows = [",".join(map(str, (client, *row))) for client, row in enumerate(zip(speeds, *delays, strict=True))]
    path = folder / "speeds.csv"
    path.write_text("\n".join(["client,seconds" + ",delay" * bool(delays), *rows]))
    return str(path)


def played(schedule, rounds, clients=3, size=3, samples=1):
    """The rounds' courses, as a federation asks for them; the first clients are drawn."""
    schedule.setup(0, clients)
    plans = []
    for round in range(rounds):
        sent = []
        turn = Turn(round, range(clients), size, lambda ids, free, _: list(ids)[:free], lambda _: samples, sent.append)
        course = schedule.course(turn._replace(send=lambda client: {"payload": client}))
        schedule.state = course.state
        plans.append(SimpleNamespace(**course.plan._asdict(), seconds=course.seconds, state=course.state))
    return plans


def times(run):
    return [row["time/simulated"] for row in run.rows]


def test_three_clients_of_speeds_1_2_and_5_arrive_as_in_a_simulation_by_hand(tmp_path):
    plans = played(Asynchronous(buffer=1, table=table(tmp_path, 1, 2, 5)), rounds=8)
    arrived = [(plan.state["now"], plan.arrived[0], plan.sent[plan.arrived[0]]["round"]) for plan in plans]
    # time, client, version from which it started; at equal times the lower id comes first
    assert arrived == [(1, 0, 0), (2, 0, 1), (2, 1, 0), (3, 0, 2), (4, 0, 4), (4, 1, 3), (5, 0, 5), (5, 2, 0)]
    assert [plan.seconds for plan in plans] == [1, 1, 0, 1, 1, 0, 1, 0]


def test_a_buffer_of_two_has_each_client_once_and_free_places_are_filled_at_once(tmp_path):
    plans = played(Asynchronous(buffer=2, table=table(tmp_path, 1, 2, 5, 1)), rounds=3, clients=4, size=2)
    # clients 0 and 1 start; 2 takes the place of 0 at 1 s, and 1 ends at 2 s
    assert [plan.arrived for plan in plans] == [[0, 1], [0, 1], [0, 2]]
    assert [plan.state["now"] for plan in plans] == [2, 5, 6]
    assert {client: flight["round"] for client, flight in plans[0].sent.items()} == {0: 0, 1: 0}
    assert plans[2].sent[2]["round"] == 0 and plans[2].sent[2]["arrives"] == 6


def test_weights_and_versions_are_those_of_the_simulation_by_hand(tmp_path):
    spy = Spy()
    run = fit(
        make_client(),
        blobs(30, 30, 30),
        aggregator=FedAsync(alpha=0.5, rule="polynomial", a=1),
        schedule=Asynchronous(buffer=1, table=table(tmp_path, 1, 2, 5)),
        max_rounds=8,
        callbacks=[spy],
    )
    assert spy.cohorts == [[0], [0], [1], [0], [0], [1], [0], [2]]
    assert [row["staleness"] for row in run.rows] == [0, 0, 2, 1, 0, 2, 1, 7]
    x = next(iter(spy.updates[0].values()))["arrival"]["weights"]
    versions = [x]
    for updates, stale in zip(spy.updates, (0, 0, 2, 1, 0, 2, 1, 7), strict=True):
        (update,) = updates.values()
        assert near(update["arrival"]["weights"], versions[-1 - stale])
        share = 0.5 / (1 + stale)
        x = {name: (1 - share) * x[name] + share * update["weights"][name] for name in x}
        versions.append(x)
    assert near(run.federation.aggregator.state["weights"], x)


def test_clients_train_from_the_version_that_they_received(tmp_path):
    spy = Spy()
    still = make_client(optimizer=partial(SGD, lr=0.0))
    fit(still, aggregator=FedBuff(), schedule=Asynchronous(buffer=2, **LATE), max_rounds=3, callbacks=[spy])
    for updates in spy.updates:
        assert all(equal(update["weights"], update["arrival"]["weights"]) for update in updates.values())


def test_with_equal_devices_and_one_size_it_is_federated_averaging_bit_for_bit():
    data = partial(blobs, 30, 30, 30, 30)
    settings = {"clients_per_round": 2, "max_rounds": 4}
    plain = fit(make_client(net=noisy), data(), aggregator=WeightedAverage(weighting="uniform"), **settings)
    for aggregator in (WeightedAverage(weighting="uniform"), FedBuff()):
        run = fit(
            make_client(net=noisy), data(), aggregator=aggregator, schedule=Asynchronous(buffer=2, **EVEN), **settings
        )
        assert equal(plain.weights, run.weights) and equal(
            plain.federation.clients.keys(), run.federation.clients.keys()
        )
        assert [row["cohort"] for row in run.rows] == [row["cohort"] for row in plain.rows]
        assert [row["bytes/down"] for row in run.rows] == [row["bytes/down"] for row in plain.rows]
        assert [row["staleness"] for row in run.rows] == [0] * 4


def test_a_clock_alone_changes_no_bit_of_synchronous_rounds():
    settings = {"clients_per_round": 3, "max_rounds": 3}
    plain, run = (fit(make_client(), schedule=schedule, **settings) for schedule in (None, Synchronous(delay=2.0)))
    assert equal(plain.weights, run.weights)
    added = {"absent", "time/simulated"}
    assert [{k: v for k, v in row.items() if k not in added} for row in untimed(run.rows)] == [
        {k: v for k, v in row.items() if k not in added} for row in untimed(plain.rows)
    ]
    slowest = [max(run.federation.options.schedule.took(int(k), 1) for k in row["cohort"].split()) for row in run.rows]
    assert all(time > least for time, least in zip(times(run), slowest, strict=True))


@pytest.mark.parametrize("method", [make_client().__class__, FedPer], ids=["FedAvg", "FedPer"])
def test_order_of_clients_and_a_pause_with_clients_at_work_change_no_bit(method, tmp_path):
    make = partial(make_client, method, net=noisy, optimizer_lifetime="run")
    settings = {"clients_per_round": 3, "max_rounds": 5}

    def run(rest="unused", **more):
        schedule = Asynchronous(buffer=2, dropout=0.5, **LATE)
        return fit(make(), root=rest, aggregator=FedBuff(beta=0.5), schedule=schedule, **{**settings, **more})

    whole = run()
    assert any(row["staleness"] > 0 for row in whole.rows) and any(row["absent"] for row in whole.rows)
    shuffled = run(engine=Shuffled)
    assert same_end(whole, shuffled) and times(whole) == times(shuffled)
    run(tmp_path, callbacks=[Pause(2)])
    resumed = run(tmp_path, ckpt_path="last", client_states="disk")
    assert same_end(whole, resumed) and times(resumed)[2:] == times(whole)[2:]


def test_a_resumed_synchronous_run_knows_who_is_still_at_work(tmp_path):
    def run(root="unused", **more):
        schedule = Synchronous(min_results=2, **LATE)
        return fit(make_client(), root=root, schedule=schedule, **{"max_rounds": 4, **more})

    whole = run()
    assert whole.federation.options.schedule.state["busy"]
    run(tmp_path, max_rounds=2)
    resumed = run(tmp_path, ckpt_path="last")
    assert same_end(whole, resumed) and times(whole)[2:] == times(resumed)[2:]
    with pytest.raises(MisconfigurationException, match=r"trainer\.schedule"):
        fit(make_client(), root=tmp_path, max_rounds=5, ckpt_path="last")


def test_all_engines_agree():
    def run(engine):
        schedule = Asynchronous(buffer=2, **LATE)
        return fit(make_client(), aggregator=FedBuff(), schedule=schedule, engine=engine, max_rounds=4)

    alone, several, together = map(run, ("sequential", "processes", "vectorised"))
    assert same_end(alone, several) and times(alone) == times(several) == times(together)
    assert near(alone.weights, together.weights) and any(row["staleness"] for row in alone.rows)


class InPlace(WeightedAverage):
    """Changes its tensors in place."""

    def aggregate(self, updates, round):
        for tensor in self.state["weights"].values():
            tensor.add_(1.0)
        return {}


def test_a_server_that_changes_tensors_in_place_leaves_those_that_were_sent_and_versions_are_kept_once():
    run = fit(make_client(), aggregator=InPlace(), schedule=Asynchronous(buffer=1, **LATE), max_rounds=3)
    flying = run.federation.options.schedule.state["flying"].values()
    sent = {}
    for flight in flying:
        for name, tensor in flight["payload"]["weights"].items():
            sent.setdefault((flight["round"], name), set()).add(tensor.data_ptr())
    assert len({flight["round"] for flight in flying}) > 1 and all(len(places) == 1 for places in sent.values())
    old = next(flight for flight in flying if flight["round"] == 0)["payload"]["weights"]
    assert all(torch.allclose(run.weights[name], old[name] + 3) for name in old)


def test_compressed_updates_are_relative_to_the_version_that_the_client_has():
    spy = Spy()
    run = fit(
        make_client(),
        aggregator=FedBuff(),
        compression=TopK(1.0),
        schedule=Asynchronous(buffer=2, **LATE),
        callbacks=[spy],
    )
    plain = fit(make_client(), aggregator=FedBuff(), schedule=Asynchronous(buffer=2, **LATE))
    assert near(plain.weights, run.weights) and any(row["staleness"] for row in run.rows)


def test_over_selection_takes_the_first_and_leaves_the_others_as_they_were(tmp_path):
    speeds = table(tmp_path, 4, 1, 3, 2)
    run = fit(
        make_client(FedPer), blobs(30, 30, 30, 30), schedule=Synchronous(min_results=2, table=speeds), max_rounds=1
    )
    (row,) = run.rows
    assert (row["cohort"], row["absent"], row["clients"], row["clients_absent"]) == ("0 1 2 3", "0 2", 2, 2)
    assert sorted(run.federation.clients) == [1, 3]
    # four payloads down, and two updates with a number of samples of 8 bytes up
    assert row["bytes/down"] == 2 * (row["bytes/up"] - 2 * 8)
    samples = run.data.size(0, "train")
    assert row["time/simulated"] == 2 * samples
    assert run.federation.options.schedule.state["busy"] == {0: 4 * samples, 2: 3 * samples}


@pytest.mark.parametrize(
    "settings, arrived, seconds",
    [
        ({}, [1, 3, 2, 0], 4),
        ({"min_results": 0.5}, [1, 3], 2),
        ({"min_results": 2, "grace": 1.0}, [1, 3, 2], 3),
        ({"min_results": 2, "grace": 5.0}, [1, 3, 2, 0], 4),
        ({"timeout": 2.5}, [1, 3], 2.5),
        ({"timeout": 0.5}, [], 0.5),
    ],
)
def test_a_round_ends_as_a_deployments_phase(tmp_path, settings, arrived, seconds):
    (plan,) = played(Synchronous(table=table(tmp_path, 4, 1, 3, 2), **settings), 1, clients=4, size=4)
    assert plan.cohort == [0, 1, 2, 3] and plan.arrived == arrived and plan.seconds == seconds


def test_equal_times_are_taken_by_id():
    (plan,) = played(Synchronous(min_results=2, **EVEN), 1)
    assert plan.arrived == [0, 1] and plan.state["busy"] == {}


def test_a_client_at_work_begins_its_next_training_when_it_has_ended(tmp_path):
    one, two = played(Synchronous(min_results=1, table=table(tmp_path, 1, 1.5)), 2, clients=2, size=2)
    assert one.arrived == [0] and one.state["busy"] == {1: 1.5}
    assert two.arrived == [0] and two.seconds == 1 and two.state["busy"] == {1: 3}


def test_dropouts_are_drawn_and_end_the_round_when_they_would_have_come(tmp_path):
    schedule = Synchronous(dropout=0.3, table=table(tmp_path, *range(1, 101)))
    plans = played(schedule, 30, clients=100, size=100)
    shares = [len(plan.arrived) / 100 for plan in plans]
    assert abs(sum(shares) / 30 - 0.7) < 0.03 and len(set(shares)) > 5
    assert all(plan.seconds == 100 and plan.state["busy"] == {} for plan in plans)


def test_a_timeout_before_every_clients_end_is_refused(tmp_path):
    schedule = Synchronous(timeout=2.0, dropout=0.1, table=table(tmp_path, 1.5, 3))
    assert schedule.without_updates() == ["trainer.schedule.timeout=2.0", "trainer.schedule.dropout=0.1"]
    schedule.setup(0, 2)
    schedule.check_timeout([(0, 1), (1, 1)], str)
    with pytest.raises(MisconfigurationException, match=r"trainer\.schedule\.timeout=2\.0 .* B, takes 3 seconds"):
        schedule.check_timeout([(0, 4), (1, 1)], "AB".__getitem__)
    assert Synchronous().without_updates() == [] and repr(Synchronous(timeout=2.0)) == "Synchronous(timeout=2.0)"


def test_an_asynchronous_client_over_time_or_lost_makes_room_and_is_absent():
    late = Asynchronous(buffer=2, timeout=3.0, dropout=0.2, distribution="exponential", seconds=2.0)
    plans = played(late, 40, clients=10, size=4)
    for plan in plans:
        assert set(plan.arrived) <= set(plan.cohort)
        assert all(plan.took[client] < 3.0 for client in plan.arrived) and max(plan.took.values()) <= 3.0
        assert len(plan.arrived) == 2 or not plan.state["flying"]
    assert any(len(plan.cohort) > 2 for plan in plans)
    assert max(len(plan.state["flying"]) for plan in plans) <= 4


def test_a_round_without_any_update_leaves_the_federation_as_it_is():
    run = fit(make_client(), schedule=Synchronous(dropout=1 - 1e-9), max_rounds=2)
    assert [row["clients"] for row in run.rows] == [0, 0] and [row["clients_absent"] for row in run.rows] == [4, 4]
    assert not run.federation.clients and run.rows[0]["bytes/down"] > 0 == run.rows[0]["bytes/up"]


def test_rounds_may_have_fewer_updates_where_few_clients_are_there(tmp_path):
    rates = tmp_path / "rates.csv"
    rates.write_text("client,one,two\n0,1,0\n1,1,0\n2,0,0\n3,0,0\n")
    run = fit(
        make_client(),
        aggregator=FedBuff(),
        schedule=Asynchronous(buffer=3),
        cohort=Availability(str(rates)),
        max_rounds=3,
    )
    assert [row["clients"] for row in run.rows] == [2, 0, 2]
    assert run.rows[1]["time/simulated"] == 0 < run.rows[2]["time/simulated"]


@pytest.mark.parametrize(
    "distribution, low, high, mean",
    [
        ("constant", 2, 2, 2),
        ("uniform", 1, 3, 2),
        ("lognormal", 0, math.inf, 2 * math.exp(0.125)),
        ("exponential", 0, math.inf, 2),
        ("halfnormal", 0, math.inf, 2 * math.sqrt(2 / math.pi)),
    ],
)
def test_speeds_follow_their_distribution_and_the_seed(distribution, low, high, mean):
    schedule = Synchronous(seconds=2.0, distribution=distribution, spread=0.5)
    schedule.setup(7, 4000)
    speeds = [schedule.took(client, 1) for client in range(4000)]
    assert all(low <= speed <= high for speed in speeds)
    assert math.isclose(sum(speeds) / 4000, mean, rel_tol=0.06)
    schedule.setup(7, 10)
    assert [schedule.took(client, 1) for client in range(10)] == speeds[:10]
    schedule.setup(8, 10)
    assert distribution == "constant" or [schedule.took(client, 1) for client in range(10)] != speeds[:10]


def test_time_counts_passes_steps_and_delays(tmp_path):
    schedule = partial(Synchronous, table=table(tmp_path, 1, 1, 2, 1, delays=[(0, 0, 3, 0)]))
    data = partial(blobs, 20, 20, 20, 20)
    whole = data()
    one = fit(make_client(), whole, schedule=schedule(), max_rounds=1)
    n = whole.size(2, "train")
    assert times(one) == [3 + 2 * n]
    assert times(fit(make_client(), data(), schedule=schedule(), max_rounds=1, local_epochs=3)) == [3 + 6 * n]
    assert times(fit(make_client(), data(), schedule=schedule(), max_rounds=1, local_steps=4)) == [3 + 2 * 4 * 5]
    assert times(fit(make_client(), data(), schedule=schedule(), max_rounds=1, limit_train_batches=1)) == [3 + 2 * 5]


def test_oort_hears_the_seconds_of_the_clock():
    settings = {"clients_per_round": 2, "max_rounds": 4}
    cohorts = [
        [row["cohort"] for row in fit(make_client(), cohort=Oort(percentile=50.0), schedule=clock, **settings).rows]
        for clock in (Synchronous(**LATE), Synchronous(**LATE))
    ]
    assert cohorts[0] == cohorts[1]


def test_enough_is_a_share_or_a_number():
    assert [enough(share, 13, 13) for share in (1.0, 0.5, 10)] == [13, 7, 10]


def test_sites_have_clocks_of_their_own():
    with pytest.raises(MisconfigurationException, match=r"trainer\.schedule=Synchronous .* min-results"):
        FederatedTrainer(engine=lambda *_: [], schedule=Synchronous())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Synchronous(seconds=0.0),
        lambda: Synchronous(seconds=math.nan),
        lambda: Synchronous(spread=-1.0),
        lambda: Synchronous(spread=math.inf),
        lambda: Synchronous(distribution="uniform", spread=1.5),
        lambda: Synchronous(distribution="normal"),
        lambda: Synchronous(delay=-1.0),
        lambda: Synchronous(delay=math.inf),
        lambda: Synchronous(dropout=1.0),
        lambda: Synchronous(timeout=0.0),
        lambda: Synchronous(min_results=0),
        lambda: Synchronous(min_results=1.5),
        lambda: Synchronous(grace=-1.0),
        lambda: Asynchronous(buffer=0),
        lambda: Asynchronous(buffer=2.5),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(MisconfigurationException, match=r"^trainer\.schedule\.\w+="):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "client,seconds\n0,1\n1,0\n",
        "client,seconds\n0,1\n0,1\n",
        "client,seconds\n0\n",
        "client,seconds,delay\n0,1\n",
        "client,seconds,delay\n0,1,-1\n",
        "client,seconds\nx,1\n",
        "client,seconds\n0,nan\n",
        "client,seconds\n0,1\n1,1\n2,1\n",
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text):
    path = tmp_path / "speeds.csv"
    path.write_text(text)
    with pytest.raises(MisconfigurationException, match=r"trainer\.schedule\.table=.*speeds\.csv"):
        Synchronous(table=str(path)).setup(0, 4)
    with pytest.raises(MisconfigurationException, match="can't be read"):
        Synchronous(table=str(tmp_path / "none.csv")).setup(0, 4)


@pytest.mark.parametrize(
    "model, settings, named",
    [
        (make_client, {"schedule": "fast"}, "'fast'"),
        (make_client, {"schedule": Asynchronous(buffer=5)}, "trainer.schedule.buffer=5"),
        (make_client, {"schedule": Asynchronous(buffer=2), "min_clients": 3}, "trainer.min_clients=3"),
        (make_client, {"schedule": Synchronous(min_results=2), "min_clients": 3}, "trainer.min_clients=3"),
        (make_client, {"schedule": Asynchronous(buffer=2), "cohort": Poisson(0.5)}, "trainer.cohort=Poisson"),
        (make_client, {"schedule": Synchronous(), "secure_sum": SecureSum()}, "trainer.secure_sum"),
        (
            make_client,
            {"schedule": Synchronous(), "example_privacy": DPSGD(noise_multiplier=1.0)},
            "trainer.example_privacy",
        ),
        (make_client, {"schedule": Synchronous(), "aggregator": DPAverage(1.0, clip=0.1)}, "aggregator=DPAverage"),
        (partial(make_client, Pooled), {"schedule": Synchronous()}, "model=Pooled"),
        (
            make_client,
            {"schedule": Asynchronous(buffer=2), "data": blobs(input_drift=[InputDrift(start=2, shift=0.5)])},
            "data.input_drift",
        ),
        (make_client, {"schedule": Asynchronous(buffer=2), "callbacks": [SignFlip(fraction=0.5)]}, "SignFlip"),
        (
            make_client,
            {"schedule": Asynchronous(buffer=2), "aggregator": CyclicTransfer()},
            "aggregator=CyclicTransfer",
        ),
    ],
)
def test_settings_that_a_clock_does_not_fit_are_refused(model, settings, named):
    with pytest.raises(MisconfigurationException) as refused:
        fit(model(), **settings)
    assert named in str(refused.value) and "\n" not in str(refused.value)
