"""What sites send that isn't as it should be: each time one client is left out, and nothing else happens."""

from functools import partial

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of, rewrite

from federations import blobs, equal, fit, make_client, noisy
from pfl_lightning.engines import Sequential
from pfl_lightning.flower.link import failure
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.methods import FedPer
from sweeps import all_but

CLIENT, NAME = 2, "net.features.0.weight"
make = partial(make_client, FedPer, net=noisy)


def weights(change):
    """Changes the weights that client 2 sends."""

    def changed(records):
        update = records[f"{CLIENT}/update"]
        update["weights"] = change(dict(update["weights"]))

    return changed


def renamed(entries):
    entries["net.other"] = entries.pop(NAME)
    return entries


def filled(value):
    return weights(lambda entries: entries | {NAME: torch.full_like(entries[NAME], value)})


def update_with(**entries):
    return lambda records: records[f"{CLIENT}/update"].update(entries)


def answer_with(**entries):
    return lambda records: records[f"{CLIENT}/answer"].update(entries)


def as_another(records):
    """Speaks in another client's name."""
    records["1/update"], records["1/answer"] = records.pop(f"{CLIENT}/update"), records.pop(f"{CLIENT}/answer")


POISON = {
    "a wrong name": (weights(renamed), "has an entry 'net.other', which isn't wanted"),
    "a missing name": (weights(lambda entries: {NAME: entries[NAME]}), "has no entry"),
    "a wrong shape": (weights(lambda entries: entries | {NAME: entries[NAME][:1]}), r"is float32 \[1, 6\] and should"),
    "a wrong type": (weights(lambda entries: entries | {NAME: entries[NAME].double()}), r"is float64"),
    "NaN": (filled(torch.nan), "has a NaN or an infinity"),
    "infinity": (filled(torch.inf), "has a NaN or an infinity"),
    "1e30": (filled(1e30), "the update's change has the norm .*more than max_norm=1e"),
    "false counts": (update_with(num_samples=torch.tensor(10**9)), "num_samples is 1000000000, and was"),
    "more than was asked for": (update_with(more=torch.zeros(3)), "has an entry 'more', which isn't wanted"),
    "another round's answer": (answer_with(round=7), "it is the answer of round 8"),
    "another client's name": (as_another, "can't be read|has no record"),
    "a long reason": (
        lambda records: records.update({f"{CLIENT}/answer": {"error": "x" * 9999}}),
        r"x{500}\.",
    ),
    "metrics that are texts": (
        answer_with(metrics={"loss": "low"}),
        "answer.metrics.'loss' is str and should be float",
    ),
    "metrics that are a list": (answer_with(after=[1.0]), "after is list and should be dict"),
    "an answer that is a number": (lambda records: records.update({f"{CLIENT}/answer": 3}), "answer is int"),
    "a token that is a number": (answer_with(kept=3), "answer.kept is int and should be str"),
}


def spoiling(change):
    """Spoils what the node of client 2 answers to the first round's message."""
    done = []

    def spoil(node, kind, content):
        if kind != "train" or done or f"{CLIENT}/update" not in names(content):
            return
        done.append(node)
        rewrite(content, change)

    return spoil


class Without(Sequential):
    """Never hears from client 2 in the first round."""

    may_miss_clients = True

    def run(self, jobs):
        return (outcome for outcome in super().run(jobs) if outcome.client != CLIENT or self.module.round)


@pytest.fixture(scope="module")
def without():
    return fit(make(), engine=Without, max_rounds=2)


REFUSED_BY_THE_TEMPLATE = ("a missing name", "a wrong type", "infinity")
"""Told by the code that tells of others here; `test_template` and `test_wire` have all of them."""


@pytest.mark.parametrize("what", all_but(REFUSED_BY_THE_TEMPLATE, POISON))
@pytest.mark.by_default(
    "false counts",
    "another round's answer",
    "metrics that are a list",
    "an answer that is a number",
    "a token that is a number",
)
def test_poison_leaves_its_client_out_and_nobody_else(what, tmp_path, without):
    change, words = POISON[what]
    grid = grid_of(make, tmp_path, max_rounds=2)
    grid.spoil = spoiling(change)
    with pytest.warns(UserWarning, match=f"round 1: client 2 is left out of the aggregation: .*{words}"):
        run = deploy(grid, make, max_rounds=2, serving={"max_norm": 1e3})
    assert [(row["clients"], row["clients_refused"], row["clients_absent"]) for row in run.rows] == [
        (3, 1, 0),
        (4, 0, 0),
    ]
    assert equal(run.weights, without.weights)
    assert [row["train/loss"] for row in run.rows] == [row["train/loss"] for row in without.rows]


def test_what_is_no_message_of_ours_leaves_its_site_out(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)

    def spoil(node, kind, content):
        if kind == "train" and node == 11:
            for name in list(content):
                del content[name]

    grid.spoil = spoil
    with pytest.warns(UserWarning, match="client 0 is left out of the aggregation"):
        run = deploy(grid, make, max_rounds=1)
    assert (run.rows[0]["clients"], run.rows[0]["clients_refused"]) == (2, 2)


def test_a_site_s_own_reason_is_told(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)

    def spoil(node, kind, content):
        if kind == "train" and node == 11:
            for name in list(content):
                del content[name]
            for name, record in failure("the disk is full").items():
                content[name] = record

    grid.spoil = spoil
    with pytest.warns(UserWarning, match=r"client 0 is left out of the aggregation: the disk is full\."):
        deploy(grid, make, max_rounds=1)


def test_poisoned_metrics_of_an_evaluation_leave_their_client_out(tmp_path):
    grid = grid_of(make, tmp_path, max_rounds=1)

    def spoil(node, kind, content):
        if kind != "evaluate" or node != 11:
            return
        records = {name: unpack(content, name) for name in names(content)}
        records["2/answer"] = {"after": {"val": {"acc": "all"}}}
        for name, record in pack(records).items():
            content[name] = record

    grid.spoil = spoil
    with pytest.warns(UserWarning, match="client 2 isn't evaluated: after.'val'.*acc is str and should be float"):
        run = deploy(grid, make, max_rounds=1)
    assert sorted(run.federation.evaluations.results["test"]) == [0, 1, 3]


class Diverged(Sequential):
    """Client 2 ends with a NaN."""

    def run(self, jobs):
        for outcome in super().run(jobs):
            yield outcome._replace(finite=outcome.client != CLIENT)


def test_a_diverged_client_is_counted_and_keeps_nothing(tmp_path):
    grid = grid_of(make, tmp_path, engine=Diverged, max_rounds=1)
    with pytest.warns(UserWarning, match="became NaN or infinite: clients 2"):
        run = deploy(grid, make, data=blobs, max_rounds=1)
    assert run.rows[0]["clients_diverged"] == 1 and sorted(run.federation.clients) == [0, 1, 3]
    assert not list((tmp_path / "11" / "2").glob("*/*.pt"))
