"""Local steps and samples read of a round, counted by hand, under all engines."""

from functools import partial

import pytest
from torch.optim import SGD

from federations import blobs, fit, make_client, noisy, read_csv, same_end
from pfl_lightning.client import Phase
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.methods import FML, Ditto, FedAvg, FedBABU, FedRep, FedSelect, PFedMe
from pfl_lightning.privacy import DPSGD

EVEN = {"val_fraction": 0.0, "test_fraction": 0.0}
SIZES = (24, 11, 3)
"""With batches of five: 5, 3 and 1 batches an epoch, with 4, 1 and 3 samples in the last."""

COUNTS = [
    # an epoch of all
    (FedAvg, {}, {}, [5 + 3 + 1] * 2, [38] * 2),
    (FedAvg, {}, {"local_epochs": 2}, [18] * 2, [76] * 2),
    # two batches a step, fewer in the last of an epoch
    (FedAvg, {}, {"local_epochs": 2, "accumulate_grad_batches": 2}, [2 * (3 + 2 + 1)] * 2, [76] * 2),
    # three steps: 15; 11; 3 epochs of 3
    (FedAvg, {}, {"local_steps": 3}, [9] * 2, [15 + 11 + 9] * 2),
    # three steps go on in the second round with the last 9 samples of 24 and 5 of the next epoch
    (FedAvg, {}, {"local_steps": 3, "steps_continue": True}, [9] * 2, [15 + 11 + 9, 14 + 11 + 9]),
    # two steps of two batches: all but the last batch of the first client, then this batch by itself and two more
    (
        FedAvg,
        {},
        {"local_steps": 2, "steps_continue": True, "accumulate_grad_batches": 2},
        [6] * 2,
        [20 + 11 + 6, 4 + 10 + 11 + 6],
    ),
    # two batches of an epoch
    (FedAvg, {}, {"limit_train_batches": 2}, [2 + 2 + 1] * 2, [10 + 10 + 3] * 2),
    # BatchNorm takes no batch of one sample
    (FedAvg, {"net": noisy}, {"local_epochs": 2}, [2 * (5 + 2 + 1)] * 2, [2 * (24 + 10 + 3)] * 2),
    # a phase each for head and body, personal and shared model, personal and shared entries
    (FedRep, {"head_epochs": 2}, {}, [3 * 9] * 2, [3 * 38] * 2),
    (Ditto, {}, {}, [18] * 2, [76] * 2),
    (FedSelect, {}, {}, [18] * 2, [76] * 2),
    (FedSelect, {"alternations": 3}, {}, [54] * 2, [228] * 2),
    # both models in one step; inner steps, which are none of the optimizer's
    (FML, {}, {}, [9] * 2, [38] * 2),
    (PFedMe, {"optimizer": partial(SGD, lr=0.01)}, {}, [9] * 2, [38] * 2),
    # training before an evaluation isn't part of the round's
    (FedBABU, {}, {"evaluate": "after"}, [9] * 2, [38] * 2),
    # one batch is drawn for each of an epoch, with five samples or all on average
    (
        FedAvg,
        {"optimizer": partial(SGD, lr=0.01)},
        {"example_privacy": DPSGD(clip=1.0, noise_multiplier=1.0)},
        [9] * 2,
        [25 + 15 + 3] * 2,
    ),
]


def counted(run):
    return [row["local/steps"] for row in run.rows], [row["local/samples"] for row in run.rows]


@pytest.mark.parametrize(("method", "made", "settings", "steps", "samples"), COUNTS)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_steps_and_samples_are_those_by_hand(engine, method, made, settings, steps, samples):
    run = fit(make_client(method, **made), blobs(*SIZES, **EVEN), engine=engine, max_rounds=2, **settings)
    assert counted(run) == (steps, samples)


@pytest.mark.parametrize("how", [{"engine": "processes"}, {"devices": 2}])
def test_so_they_are_in_several_processes(how, tmp_path):
    if "devices" in how:
        how = how | {"strategy": ClientParallel(start_method="fork")}
    settings = {"local_steps": 3, "steps_continue": True, "max_rounds": 2}
    fit(make_client(), blobs(*SIZES, **EVEN), tmp_path, **settings, **how)
    # ranks are forks, whose record is in the file alone
    (path,) = tmp_path.glob("*/*/rounds.csv")
    rows = read_csv(path)
    assert [row["local/steps"] for row in rows] == ["9", "9"]
    assert [row["local/samples"] for row in rows] == ["35", "34"]


@pytest.mark.parametrize("last_batch", ["drop", "wrap"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_dropped_samples_are_not_read_and_repeated_ones_twice(engine, last_batch):
    run = fit(make_client(), blobs(*SIZES, last_batch=last_batch, **EVEN), engine=engine, max_rounds=1)
    assert counted(run) == {"drop": ([4 + 2 + 1], [20 + 10 + 3]), "wrap": ([5 + 3 + 1], [25 + 15 + 5])}[last_batch]


class PublicFirst(FedAvg):
    """Trains on public samples first."""

    def local_phases(self):
        return [Phase("public", data=self.public, epochs=1), Phase("train")]


def test_public_samples_are_read_too():
    data = blobs(*SIZES, **EVEN)
    model = make_client(PublicFirst)
    model.public = data.server_data()
    run = fit(model, data, max_rounds=1)
    # nine public samples are two batches
    assert counted(run) == ([9 + 3 * 2], [38 + 3 * 9])


def test_only_clients_that_count_are_counted():
    run = fit(make_client(), blobs(*SIZES, **EVEN), max_rounds=2, clients_per_round=2)
    by_client = {0: (5, 24), 1: (3, 11), 2: (1, 3)}
    for row in run.rows:
        cohort = [by_client[int(client)] for client in row["cohort"].split()]
        assert [row["local/steps"], row["local/samples"]] == [*map(sum, zip(*cohort, strict=True))]


def test_a_resumed_run_has_all_counts(tmp_path):
    settings = {"local_steps": 2, "steps_continue": True, "root": tmp_path}
    make = partial(blobs, *SIZES, **EVEN)
    whole = fit(make_client(), make(), local_steps=2, steps_continue=True, max_rounds=3)
    fit(make_client(), make(), max_rounds=1, **settings)
    assert same_end(whole, fit(make_client(), make(), max_rounds=3, ckpt_path="last", **settings))
