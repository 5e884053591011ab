"""What a federation does where clients, or what stays with them, are somewhere else: gone, refused, kept there."""

import math
from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import (
    NETS,
    Blobs,
    Run,
    Spy,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    make_trainer,
    noisy,
    same_end,
)
from pfl_lightning.data.samples import Parts
from pfl_lightning.engines import ClientState, Evaluated, Sequential
from pfl_lightning.federation.messages import TrainingDiverged
from pfl_lightning.methods import FedAvg, FedPer, LGFedAvg


class Elsewhere(Sequential):
    """Keeps what stays with clients, and gives a name for it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = {}

    def become(self, job, training=False):
        kept = self.states[job.state.kept] if job.state.kept else job.state
        return super().become(job._replace(state=kept), training)

    def run(self, jobs):
        for outcome in super().run(jobs):
            name = f"{outcome.client} after round {self.module.round}"
            self.states[name] = outcome.state
            yield outcome._replace(state=ClientState(kept=name))


def test_what_stays_with_clients_may_be_elsewhere(tmp_path):
    here = fit(make_client(FedPer), clients_per_round=2)
    there = fit(make_client(FedPer), root=tmp_path, clients_per_round=2, engine=Elsewhere)
    assert equal(here.weights, there.weights) and here.test() == there.test()
    (engine,) = there.federation.engines
    for client, state in here.federation.clients.items():
        kept = there.federation.clients[client]
        assert not kept.personal and equal(engine.states[kept.kept].personal, state.personal)
    client = min(there.federation.clients)
    assert f"'kept': '{client} after round" in str(torch.load(there.last)["federation"]["clients"][client])
    with pytest.raises(MisconfigurationException, match=f"client={client}: .* at its site"):
        load_client(FedPer, there.last, client)


class ForAll(Sequential):
    """Runs the clients of all client modules, each in its own."""

    def __init__(self, modules, work, precision):
        super().__init__(modules[0], work, precision)
        self.own = [Sequential(module, work, precision) for module in modules]
        self.asked = []

    def run(self, jobs):
        self.asked.append([])
        for job in jobs:
            self.asked[-1].append(job.client)
            yield from self.own[job.client % 2].run([job])

    def evaluate(self, job):
        return self.own[job.client % 2].evaluate(job)


def test_one_engine_may_run_the_clients_of_all_architectures():
    def engines(modules, work, precision):
        return [ForAll(modules, work, precision)] * len(modules)

    def made(**settings):
        trainer = make_trainer()
        trainer.rounds = replace(trainer.rounds, **settings)
        model, data = make_client(LGFedAvg, net=NETS), blobs()
        trainer.fit(model, datamodule=data)
        return Run(trainer, model, data)

    together = made(engine=engines)
    assert same_end(made(), together)
    one, other = together.federation.engines
    assert one is other and one.asked == [[0, 1, 2, 3]] * 3


class Refusing(Sequential):
    """Refuses client 2."""

    def run(self, jobs):
        for outcome in super().run(jobs):
            yield outcome._replace(refused="its update is poison") if outcome.client == 2 else outcome


class Without(Refusing):
    """Never hears from client 2."""

    may_miss_clients = True

    def run(self, jobs):
        return (outcome for outcome in super().run(jobs) if not outcome.refused)


def test_a_refused_client_is_counted_and_else_as_if_it_had_been_absent():
    spy = Spy()
    with pytest.warns(UserWarning, match=r"round 1: client 2 is left out of the aggregation: its update is poison\."):
        refused = fit(make_client(FedPer, net=noisy), engine=Refusing, callbacks=[spy])
    assert [list(updates) for updates in spy.updates] == [[0, 1, 3]] * 3
    with pytest.warns(UserWarning, match="1 of the round's clients gave nothing"):
        absent = fit(make_client(FedPer, net=noisy), engine=Without)
    assert equal(refused.federation.federation_state(), absent.federation.federation_state())
    counts = ("clients", "clients_refused", "clients_absent")
    assert [[run.rows[0][name] for name in counts] for run in (refused, absent)] == [[3, 1, 0], [3, 0, 1]]


def test_a_round_with_too_few_updates_changes_nothing():
    begun = make_client(FedPer).state_dict()
    begun = {name: tensor.clone() for name, tensor in begun.items()}
    with pytest.warns(UserWarning, match=r"round 1 leaves the federation as it is: 3 updates are fewer than .*=4"):
        run = fit(make_client(FedPer), engine=Refusing, min_clients=4)
    assert equal(run.weights, begun) and not run.federation.clients
    assert [(row["clients"], row["clients_refused"], row["bytes/up"]) for row in run.rows] == [(0, 1, 0)] * 3
    assert same_end(fit(make_client(FedPer)), fit(make_client(FedPer), min_clients=4))


@pytest.mark.parametrize(("value", "reason"), [(0, "must be at least 1"), (3, "more than the 2 clients")])
def test_least_numbers_that_cannot_be_met_are_refused(value, reason):
    with pytest.raises(MisconfigurationException, match=f"trainer.min_clients={value} .*{reason}"):
        fit(make_client(), clients_per_round=2, min_clients=value)


class Spoiled(Sequential):
    """Hears from two clients at most, of whom one diverged."""

    may_miss_clients = True
    silent = True

    def run(self, jobs):
        for outcome in super().run(jobs):
            if outcome.client < 2:
                yield outcome._replace(finite=outcome.client == 1)
            elif not self.silent:
                yield outcome._replace(finite=False)


class Diverged(Spoiled):
    """All but client 1 diverged."""

    silent = False


def test_a_run_ends_when_all_of_a_round_diverged_and_not_when_all_did_that_answered():
    with pytest.warns(UserWarning, match="became NaN or infinite: clients 0"):
        run = fit(make_client(), engine=Spoiled, max_rounds=1)
    assert (run.rows[0]["clients_diverged"], run.rows[0]["clients_absent"]) == (1, 2)
    two = blobs(24, 16)
    run = fit(make_client(), two, engine=Diverged, max_rounds=1)
    assert run.rows[0]["clients_diverged"] == 1
    with pytest.raises(TrainingDiverged):
        fit(make_client(), blobs(24), engine=Diverged, max_rounds=1)


class Silent(Sequential):
    """Nobody can be evaluated in the second round, and client 0 never."""

    may_miss_clients = True

    def evaluate_all(self, jobs):
        together = list(super().evaluate_all(jobs))
        rows = [Evaluated.of(k, each.metrics(k)) for each in together for k in each.clients if k]
        return [] if self.module.round == 1 else rows


@pytest.mark.parametrize("evaluate", ["before", "both", "after"])
@pytest.mark.by_default("before")
def test_clients_that_cannot_be_evaluated_are_left_out(tmp_path, evaluate):
    # client 0 has trained, and so has metrics of its own model
    run = fit(make_client(), root=tmp_path, engine=Silent, evaluate=evaluate, test_every_round=True)
    assert len(run.rows) == 3 and (run.folder / "checkpoints" / "best.ckpt").exists()
    gone = [math.isnan(row["val/acc"]) for row in run.rows]
    # rounds are numbered from 0, and evaluated when they are counted
    assert gone == ([True, False, False] if evaluate != "after" else [False] * 3)
    assert run.logger.summary["selected"]["round"] in (1, 2, 3)


class Sized(Blobs):
    """Tells how many samples clients have, and nothing else."""

    at_sites = True

    def size(self, client, split):
        return self._rows(client, split).numel()

    def parts(self, clients, split, device="cpu"):
        # as the clients themselves have it
        rows = [self._rows(client, split) for client in clients]
        return Parts(self._gather(torch.cat(rows), device), [each.numel() for each in rows])

    def _rows(self, client, split):
        return self._ready().division.clients[client][split]

    @property
    def division(self):
        raise AssertionError("who holds which samples isn't known")

    def counts_of(self, client, split):
        raise AssertionError("who holds which classes isn't known")


def test_a_record_does_without_the_classes_that_clients_hold(tmp_path):
    known, unknown = (fit(make_client(FedAvg), blobs(data=data), root=tmp_path) for data in (Blobs, Sized))
    assert equal(known.weights, unknown.weights)
    assert [row["samples"] for row in unknown.logger.clients] == [row["samples"] for row in known.logger.clients]
    assert "classes" in known.logger.clients[0] and "classes" not in unknown.logger.clients[0]
    assert unknown.logger.fingerprints["partition"] != known.logger.fingerprints["partition"]
