import random
from collections import Counter
from statistics import fmean

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.federation.messages import TrainingDiverged
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedPer, PerFedAvg
from pfl_lightning.selection import PowerOfChoice, RoundStart, Selection
from pfl_lightning.selection.base import drawn_by_weight


def cohorts(cohort=None, seed=3, sizes=(24, 16, 30, 20, 12), model=None, **settings):
    spy = Spy()
    settings = {"clients_per_round": 2, "max_rounds": 5, **settings}
    run = fit(make_client(seed=seed, **model or {}), blobs(*sizes), cohort=cohort, callbacks=[spy], **settings)
    return spy.cohorts, run


@pytest.mark.parametrize("losses", ["asked", "remembered"])
def test_with_as_many_candidates_as_take_part_it_is_uniform(losses):
    plain, one = cohorts()
    chosen, other = cohorts(PowerOfChoice(2, losses, weights="uniform"))
    assert plain == chosen and equal(one.weights, other.weights)
    if losses == "asked":
        assert [row["bytes/up"] for row in one.rows] == [row["bytes/up"] for row in other.rows]


def test_clients_of_one_size_need_no_other_weights():
    sizes = (20,) * 5
    assert cohorts(sizes=sizes)[0] == cohorts(PowerOfChoice(2), sizes=sizes)[0]
    assert cohorts()[0] != cohorts(PowerOfChoice(2))[0]


def losses_of(federation, clients):
    """Mean losses of the received model on all training samples, by hand."""
    federation.client.eval()
    found = {}
    for client in clients:
        federation.client.receive(federation.initial[0], federation.aggregator.download(client), None)
        part = federation.data.client(client).train
        with torch.no_grad():
            found[client] = float(torch.nn.functional.cross_entropy(federation.client(part.x), part.y))
    return found


class Checked(PowerOfChoice):
    """Says after each choice whom it asked, and what they said."""

    federation = None

    def choose(self, start):
        self.asked = []

        def losses(clients):
            told = start.losses(clients)
            self.asked.append((list(clients), told))
            return told

        chosen = super().choose(start._replace(losses=losses))
        ((clients, told),) = self.asked
        by_hand = losses_of(self.federation(), clients)
        assert told == pytest.approx(by_hand, rel=1e-5) and len(clients) == self.candidates
        assert set(chosen) == set(sorted(clients, key=by_hand.get, reverse=True)[: start.size])
        self.checked = getattr(self, "checked", 0) + 1
        return chosen


@pytest.mark.parametrize("candidates", [3, 5])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "processes"])
def test_those_who_fare_worst_take_part(candidates, engine, monkeypatch):
    kept = []

    class Watch(Spy):
        def on_fit_start(self, trainer, federation):
            kept.append(federation)

    cohort = Checked(candidates)
    monkeypatch.setattr(Checked, "federation", lambda self: kept[0])
    fit(
        make_client(), blobs(24, 16, 30, 20, 12), cohort=cohort, callbacks=[Watch()], clients_per_round=2, engine=engine
    )
    assert cohort.checked == 3


def test_what_is_asked_is_counted():
    _, plain = cohorts(sizes=(20,) * 5)
    _, run = cohorts(PowerOfChoice(4), sizes=(20,) * 5)
    size = num_bytes(run.federation.aggregator.download(0))
    assert [row["bytes/down"] for row in run.rows] == [6 * size] * 5
    assert [row["bytes/down"] for row in plain.rows] == [2 * size] * 5
    assert [row["bytes/up"] for row in run.rows] == [row["bytes/up"] + 4 * 8 for row in plain.rows]
    _, remembered = cohorts(PowerOfChoice(4, "remembered"), sizes=(20,) * 5)
    assert [row["bytes/down"] for row in remembered.rows] == [2 * size] * 5
    assert [row["bytes/up"] for row in remembered.rows] == [row["bytes/up"] + 2 * 8 for row in plain.rows]


def test_remembered_losses_are_those_of_the_last_training_and_newcomers_come_first():
    drawn, run = cohorts(PowerOfChoice(5, "remembered"), max_rounds=6)
    assert {client for cohort in drawn[:3] for client in cohort} == set(range(5))
    known = run.trainer.rounds.cohort.state["losses"]
    assert set(known) == set(range(5))
    start = RoundStart(9, range(5), 2, random.Random(0), dict)
    chosen = run.trainer.rounds.cohort.choose(start)
    assert chosen == sorted(known, key=known.get, reverse=True)[:2]


def test_equal_losses_go_by_id_and_those_without_one_come_last():
    choice = PowerOfChoice(5)
    choice.setup(dict.fromkeys(range(5), 7))

    def chosen(losses, seed):
        return choice.choose(RoundStart(0, range(5), 2, random.Random(seed), lambda clients: losses))

    assert all(chosen(dict.fromkeys(range(5), 1.0), seed) == [0, 1] for seed in range(5))
    assert all(chosen({3: -1.0, 4: 0.0}, seed) == [4, 3] for seed in range(5))


def test_a_loss_that_is_no_number_comes_last():
    class Broken(Spy):
        def on_aggregate_end(self, trainer, federation, logs):
            federation.aggregator.state["weights"]["net.classifier.bias"].fill_(float("nan"))

    drawn, told = [], []

    class Heard(PowerOfChoice):
        def choose(self, start):
            def losses(clients):
                told.append(start.losses(clients))
                return told[-1]

            drawn.append(super().choose(start._replace(losses=losses)))
            return drawn[-1]

    with pytest.raises(TrainingDiverged):
        fit(make_client(), cohort=Heard(4), callbacks=[Broken()], clients_per_round=2)
    assert len(told[0]) == 4 and told[1] == {} and drawn[1] == [0, 1]


@pytest.mark.parametrize("wrong", [[0, 0], [4], [-1]])
def test_a_choice_of_nobody_who_is_there_is_refused(wrong):
    class Wrong(Selection):
        def choose(self, start):
            return wrong

    with pytest.raises(MisconfigurationException, match=r"trainer\.cohort=Wrong chose clients .* in round 1; "):
        fit(make_client(), cohort=Wrong())


def test_candidates_come_by_their_samples():
    sizes = {0: 10, 1: 20, 2: 30, 3: 40}
    stream = random.Random(1)
    first = Counter(drawn_by_weight(stream, range(4), 1, sizes)[0] for _ in range(8000))
    assert all(abs(first[client] / 8000 - size / 100) < 0.02 for client, size in sizes.items())
    # without replacement, the second one by the weights of those who are left
    pairs = [drawn_by_weight(stream, range(4), 2, sizes) for _ in range(16000)]
    after = [second for one, second in pairs if one == 3]
    assert abs(fmean(second == 2 for second in after) - 30 / 60) < 0.03


@pytest.mark.parametrize("losses", ["asked", "remembered"])
@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_it_resumes_bit_for_bit(losses, method, tmp_path):
    def run(root, rounds, **kwargs):
        client = make_client(method, net=noisy, optimizer_lifetime="run")
        cohort = PowerOfChoice(3, losses)
        return fit(client, blobs(), root, cohort=cohort, clients_per_round=2, max_rounds=rounds, **kwargs)

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "halves", 3)
    resumed = run(tmp_path / "halves", 6, ckpt_path="last")
    assert same_end(whole, resumed)
    states = [each.trainer.rounds.cohort.state for each in (whole, resumed)]
    assert states[0] == states[1]


def test_the_received_model_counts_where_a_method_trains_before_it_is_evaluated():
    chosen, run = cohorts(PowerOfChoice(4), max_rounds=2)
    personal = fit(make_client(PerFedAvg), blobs(24, 16, 30, 20, 12), cohort=PowerOfChoice(4), clients_per_round=2)
    assert personal.rows[0]["cohort"] == run.rows[0]["cohort"] == " ".join(map(str, chosen[0]))


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"candidates": 1}, "candidates=1 must be from 2 .*clients_per_round=2\\) to 4"),
        ({"candidates": 5}, "candidates=5 must be from 2"),
        ({"candidates": 0}, "candidates=0 must be 1 or more"),
        ({"candidates": 3, "losses": "guessed"}, "losses='guessed' must be one of asked, remembered"),
        ({"candidates": 3, "weights": "bytes"}, "weights='bytes' must be one of samples, uniform"),
    ],
)
def test_bad_settings_are_refused(settings, reason):
    with pytest.raises(MisconfigurationException, match=f"trainer.cohort.{reason}"):
        fit(make_client(), cohort=PowerOfChoice(**settings), clients_per_round=2)


def test_clients_who_tell_nothing_are_not_asked():
    class Silent(FedAvg):
        tells = frozenset()

    with pytest.raises(MisconfigurationException, match="PowerOfChoice asks clients for received_loss, which Silent"):
        fit(make_client(Silent), cohort=PowerOfChoice(3), clients_per_round=2)
    fit(make_client(Silent), clients_per_round=2, max_rounds=1)
