"""Clients in worker processes: the bits of the sequential engine, and what happens when a worker fails."""

import multiprocessing
import os
import select
import signal
import time
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Adam

from command import forked
from federations import MOMENTUM, NETS, Spy, blobs, fit, make_client, noisy, same_end
from pfl_lightning import stopping
from pfl_lightning.aggregators import FedReMa
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines import LocalWork, Processes, processes
from pfl_lightning.engines.errors import ClientsLost
from pfl_lightning.engines.processes import taken_from
from pfl_lightning.methods import WDR, FedAvg, FedBABU, FedPer, Local
from sweeps import swept


class Clock:
    """A clock on which everything takes a second."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clients of these tests take milliseconds, which no worker is forked for."""
    monkeypatch.setattr(processes, "time", clock := Clock())
    return clock


@pytest.mark.parametrize("workers", swept([1, 2, 4], ("2",), str))
@pytest.mark.parametrize("method", [FedAvg, FedPer, FedBABU, WDR])
@pytest.mark.by_default("FedPer-2")
def test_any_number_of_workers_gives_the_bits_of_the_sequential_engine(method, workers):
    settings = {"clients_per_round": 0.75, "evaluate": "both", "test_every_round": True}
    make = partial(make_client, method, net=noisy, optimizer_lifetime="run")
    one = fit(make(), **settings)
    other = fit(make(), engine="processes", workers=workers, **settings)
    assert same_end(one, other)


@pytest.mark.exhaustive
def test_so_it_does_with_adam_a_server_of_its_own_and_several_networks():
    make = partial(make_client, Local, net=NETS, optimizer=partial(Adam, lr=0.01), optimizer_lifetime="run")
    assert same_end(fit(make()), fit(make(), engine="processes", workers=2))
    one, other = (fit(make_client(), aggregator=FedReMa(), engine=e, workers=3) for e in ("sequential", "processes"))
    assert same_end(one, other)


def test_a_run_may_change_its_engine_when_it_resumes(tmp_path):
    make = partial(make_client, FedPer, net=noisy, optimizer_lifetime="run")
    whole = fit(make(), root=tmp_path / "whole")
    fit(make(), root=tmp_path / "half", max_rounds=1, engine="processes", workers=2)
    assert same_end(whole, fit(make(), root=tmp_path / "half", ckpt_path="last"))


class Waiting(FedAvg):
    """After the first client, which tells how long one takes, the main process waits until another one is at work."""

    main = os.getpid()

    def training_step(self, batch, batch_idx):
        if os.getpid() == self.main:
            assert not self.client_id or self.met.wait(60)
        else:
            self.met.set()
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def meeting(monkeypatch):
    monkeypatch.setattr(Waiting, "met", multiprocessing.get_context("fork").Event(), raising=False)
    monkeypatch.setattr(Waiting, "main", os.getpid())


class Where(Waiting):
    sends = FedAvg.sends | {"pid"}

    def upload(self, data):
        return super().upload(data) | {"pid": torch.tensor(os.getpid())}


def places(method=Where, **settings):
    """The processes of each round's clients."""
    spy = Spy()
    fit(make_client(method), engine="processes", workers=2, callbacks=[spy], **settings)
    return [[int(update["pid"]) for update in updates.values()] for updates in spy.updates]


def test_clients_really_are_elsewhere_and_here():
    ((first, *others),) = places(max_rounds=1)
    assert first == os.getpid()
    assert len(set(others)) == 2 and first in others


def test_what_takes_less_time_than_forking_stays_here(monkeypatch):
    monkeypatch.setattr(processes, "WORTH", 1e9)
    monkeypatch.setattr(Waiting, "main", 0)
    assert {pid for pids in places(max_rounds=2) for pid in pids} == {os.getpid()}


@pytest.fixture
def forks(monkeypatch, clock):
    """What was forked for; each time takes a thousand seconds."""
    made = []

    def slow(self, function, jobs, *args, fork=Processes._fork):
        made.append(f"{'evaluation' if jobs[0].evaluate else 'training'} {jobs[0].round}")
        clock.now += 1000
        yield from fork(self, function, jobs, *args)

    monkeypatch.setattr(Processes, "_fork", slow)
    return made


def test_so_does_what_takes_longer_elsewhere_until_that_is_forgotten(monkeypatch, forks):
    monkeypatch.setattr(processes, "FORGETTING", 0.01)
    fit(make_client(), engine="processes", workers=2, max_rounds=4, limit_val_batches=0)
    # a third of a thousand seconds a client, after one round 3.3, after two 0.03
    assert [fork for fork in forks if "training" in fork] == ["training 0", "training 2"]


def test_evaluation_learns_from_the_clock_too(forks):
    # clients with models of their own, as those with the same model are evaluated together
    fit(make_client(FedPer), engine="processes", workers=2, max_rounds=3)
    assert forks == ["training 0", "evaluation 1"]


class Refusing(FedAvg):
    def training_step(self, batch, batch_idx):
        raise MisconfigurationException("model.x=1 must be 2.")


class Buggy(Waiting):
    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        if os.getpid() != self.main:
            raise KeyError("lost")
        return values


class Leaving(Waiting):
    """Its worker ends as if it were done, with a client that it has trained."""

    def upload(self, data):
        if os.getpid() != self.main:
            os._exit(0)
        return super().upload(data)


class LeavingLater(FedPer):
    """The same in the evaluation, which begins with the next round's first client."""

    main = None

    def forward(self, x):
        LeavingLater.main = self.main or os.getpid()
        if os.getpid() != self.main:
            os._exit(0)
        # leaves the other worker its share, also on a busy machine
        time.sleep(0.1)
        return super().forward(x)


class Signalled(Waiting):
    """A worker that gets a signal."""

    signal = signal.SIGKILL

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        if os.getpid() != self.main:
            os.kill(os.getpid(), self.signal)
        return values


@pytest.mark.parametrize(
    ("method", "error", "says"),
    [
        (Refusing, MisconfigurationException, r"^model\.x=1 must be 2\.$"),
        (Buggy, KeyError, "lost"),
        (Leaving, ClientsLost, r"no result of clients? \d.* in the training in round 1; .*os\._exit"),
        (LeavingLater, ClientsLost, r"no result of clients? \d.* in the evaluation after round \d; .*os\._exit"),
        (Signalled, ClientsLost, r"died with exit code -9 .* resume with --ckpt_path last"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_told(method, error, says):
    with pytest.raises(error, match=says):
        fit(make_client(method), engine="processes", workers=2)


@pytest.mark.parametrize("jobs", [1, 7, 500, 501, 1203, 20_000])
def test_each_job_is_taken_once_and_nobody_waits_for_who_has_taken_some(jobs):
    numbers = processes.numbered(jobs)
    killed = taken_from(numbers)
    first = next(killed)
    own = list(taken_from(numbers))
    rest = list(killed)
    assert sorted([first, *rest, *own]) == list(range(jobs))
    # what goes with a process that is killed is what it has taken, few of many
    assert 1 + len(rest) <= max(jobs // 250, 1)
    os.close(numbers)


def test_workers_are_gone_afterwards():
    fit(make_client(), engine="processes", workers=2)
    with pytest.raises(RuntimeError):
        fit(make_client(Signalled), engine="processes", workers=2)
    assert not multiprocessing.active_children()


def test_workers_of_two_lists_of_jobs_at_once_keep_their_results_apart():
    engine = Processes(make_client(), LocalWork(), Precision())

    def filled(number):
        # this process leaves most of them to its worker
        time.sleep(0.05 if os.getpid() == main else 0)
        return torch.full((1000,), float(number))

    main = os.getpid()
    runs = [engine._fork(filled, [*range(first, first + 20)], 2) for first in (0, 100)]
    values = [[float(result.unique()) for result, _ in both] for both in zip(*runs, strict=True)]
    assert [sorted(column) for column in zip(*values, strict=True)] == [[*range(20)], [*range(100, 120)]]


class Sending(Waiting):
    """Tells who it is, and stays at work elsewhere."""

    line = -1

    def upload(self, data):
        os.write(Sending.line, b"%8d" % os.getpid())
        if os.getpid() != self.main:
            time.sleep(60)
        return super().upload(data)


class Pausing(FederatedCallback):
    """Takes nothing from the workers after the first thing."""

    def on_client_fit_end(self, trainer, federation, client, outcome):
        if client:
            time.sleep(60)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_workers_end_with_a_main_process_that_is_killed(platform, monkeypatch):
    monkeypatch.setattr(stopping.sys, "platform", platform)
    reader, writer = os.pipe()
    monkeypatch.setattr(Sending, "line", writer)

    def run():
        Waiting.main = os.getpid()
        fit(make_client(Sending), engine="processes", workers=2, callbacks=[Pausing()])

    main = forked(run)
    os.close(writer)
    pids = {int(os.read(reader, 8)) for _ in range(3)}
    assert main.pid in pids and len(pids) == 2
    main.kill()
    main.join()
    # at its end when all who could write to it are gone
    ended, _, _ = select.select([reader], [], [], 20)
    for pid in pids - {main.pid} if not ended else ():
        os.kill(pid, signal.SIGKILL)
    assert ended and os.read(reader, 8) == b""
    os.close(reader)


class ToldToEnd(Signalled):
    signal = signal.SIGTERM


def test_a_worker_that_is_told_to_end_passes_it_on():
    with pytest.raises(SystemExit) as ended:
        fit(make_client(ToldToEnd), engine="processes", workers=2)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_device_without_forks_is_refused(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(MisconfigurationException, match=r"trainer\.engine=processes forks .* take engine=vectorised"):
        fit(make_client(), engine="processes")


def test_the_class_is_an_engine_too():
    assert same_end(
        fit(make_client(optimizer=MOMENTUM)), fit(make_client(optimizer=MOMENTUM), engine=Processes, workers=2)
    )


def test_no_workers_are_refused():
    with pytest.raises(MisconfigurationException, match=r"trainer\.workers=0 must be at least 1"):
        fit(make_client(), blobs(), engine="processes", workers=0)
