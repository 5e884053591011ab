"""Rounds in which each client noises its own update: what the server sees, and what it costs."""

import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import (
    Altered,
    Spy,
    blobs,
    check_order_and_resume,
    equal,
    fit,
    load,
    make_client,
    noisy,
    read_csv,
)
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import FedAdam, FedDisco, FedLAW
from pfl_lightning.callbacks import CanaryAudit, FederatedCallback
from pfl_lightning.compression import TopK
from pfl_lightning.data import Samples
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.messages import digest
from pfl_lightning.methods import ControlVariates, Ditto, FedAvg, FedPer, FedSALoRA, FFALoRA, Local
from pfl_lightning.privacy import DPSGD, DPAverage, Laplace, PrivUnit, SecureSum
from pfl_lightning.privacy.local import Cap
from pfl_lightning.schedules import Synchronous
from pfl_lightning.selection import Oort, PowerOfChoice

PRIVATE = {"local_privacy": PrivUnit(4.0, clip=0.5)}


class Server(Spy):
    """What an honest and curious server sees of each client, beside what it has sent."""

    def __init__(self):
        super().__init__()
        self.sent, self.outcomes = [], []

    def on_round_start(self, trainer, federation, cohort):
        super().on_round_start(trainer, federation, cohort)
        self.sent.append({k: federation.aggregator.download(k)["weights"] for k in cohort})
        self.outcomes.append({})

    def on_client_fit_end(self, trainer, federation, client, outcome):
        self.outcomes[-1][client] = outcome

    def changes(self):
        for sent, updates in zip(self.sent, self.updates, strict=True):
            for client, update in updates.items():
                own = [(update["weights"][n].double() - sent[client][n].double()).flatten() for n in update["weights"]]
                yield client, torch.cat(own)


@pytest.mark.parametrize(
    "make",
    [
        make_client,
        partial(make_client, FedPer),
        partial(make_client, Ditto),
        partial(make_client, FFALoRA),
        partial(make_client, FedSALoRA),
        partial(make_client, net=noisy, buffers="local"),
    ],
    ids=["FedAvg", "FedPer", "Ditto", "FFA-LoRA", "FedSA-LoRA", "BatchNorm at home"],
)
def test_the_server_sees_nothing_but_noised_directions(make):
    seen = Server()
    run = fit(make(), callbacks=[seen], **PRIVATE)
    changes = list(seen.changes())
    assert len(changes) == 3 * 4
    length = {len(change) for _, change in changes}
    (d,) = length
    norm = 0.5 / Cap.of(4.0, d).mean
    assert all(float(change.norm()) == pytest.approx(norm, rel=1e-4) for _, change in changes)
    for updates, outcomes in zip(seen.updates, seen.outcomes, strict=True):
        assert all(set(update) <= {"weights", "num_samples"} for update in updates.values())
        assert all(outcome.metrics == {} and outcome.finite for outcome in outcomes.values())
    assert not [name for row in run.rows for name in row if name.startswith("train/")]


def test_the_mean_of_a_weak_noise_is_the_plain_mean():
    generous = fit(make_client(), max_rounds=1, local_privacy=Laplace(500.0, clip=20.0, noise="secure"))
    plain = fit(make_client(), max_rounds=1)
    # scale 0.08 an entry and client
    for name, tensor in plain.weights.items():
        assert float((tensor - generous.weights[name]).abs().max()) < 0.5
        assert not torch.equal(tensor, generous.weights[name])


class Poisoned(Altered):
    """Client 1 has samples of NaN."""

    def alter(self, part, client, split):
        return Samples(part.x * math.nan, part.y) if client == 1 and split == "train" else part


@pytest.mark.parametrize("method", [FedAvg, FedPer])
@pytest.mark.parametrize("local", [PrivUnit(4.0), Laplace(4.0), PrivUnit(4.0, norm_epsilon=1.0)])
def test_who_diverges_cannot_be_told(method, local):
    """By number of updates, finite ones, or anything beside the noised numbers."""
    seen = Server()
    run = fit(make_client(method), blobs(data=Poisoned), callbacks=[seen], local_privacy=local, max_rounds=2)
    for row in run.rows:
        assert row["clients"] == 4 and row["clients_diverged"] == 0
    norms = {client: float(change.norm()) for client, change in seen.changes()}
    assert all(math.isfinite(norm) and norm > 0 for norm in norms.values())
    # and its personal part is what it was
    assert all(t.isfinite().all() for t in run.federation.clients[1].personal.values())


def test_another_client_s_samples_change_nothing_of_ones_own_noise():
    class Shifted(Altered):
        def alter(self, part, client, split):
            return Samples(part.x + 3.0, part.y) if client == 1 else part

    one, other = Server(), Server()
    fit(make_client(), callbacks=[one], max_rounds=1, **PRIVATE)
    fit(make_client(), blobs(data=Shifted), callbacks=[other], max_rounds=1, **PRIVATE)
    same = {
        client: equal(one.updates[0][client]["weights"], other.updates[0][client]["weights"]) for client in range(4)
    }
    assert same == {0: True, 1: False, 2: True, 3: True}


def test_no_two_clients_and_no_two_rounds_share_noise():
    seen = Server()
    # without training all that differs is noise
    fit(make_client(optimizer=partial(SGD, lr=0.0)), callbacks=[seen], local_privacy=Laplace(1.0))
    noise = torch.stack([change for _, change in seen.changes()])
    assert float(torch.corrcoef(noise).tril(-1).abs().max()) < 0.6


# Engines, order, resuming


@pytest.mark.parametrize("engine", ["processes", "vectorised", "auto"])
@pytest.mark.by_default("vectorised")
def test_every_engine_noises_alike(engine):
    reference, run = fit(make_client(), **PRIVATE), fit(make_client(), engine=engine, **PRIVATE)
    assert all(torch.allclose(reference.weights[n], run.weights[n], atol=1e-4) for n in run.weights)
    if engine == "processes":
        assert equal(reference.weights, run.weights)


@pytest.mark.parametrize("local", [PrivUnit(4.0), Laplace(4.0)], ids=["directions", "numbers"])
@pytest.mark.by_default("directions")
def test_order_and_resuming_change_nothing(local, tmp_path):
    check_order_and_resume(partial(FedPer, buffers="local"), tmp_path, local_privacy=local)


# The account


def test_each_client_spends_by_the_rounds_that_it_was_in(tmp_path):
    seen = Spy()
    run = fit(make_client(), root=tmp_path, callbacks=[seen], clients_per_round=2, max_rounds=5, **PRIVATE)
    rounds = {client: sum(client in cohort for cohort in seen.cohorts) for client in range(4)}
    assert len(set(rounds.values())) > 1
    assert [float(row["epsilon"]) for row in read_csv(run.folder / "clients.csv")] == [
        4.0 * rounds[k] for k in range(4)
    ]
    told = run.federation.privacy()
    assert told["epsilon"] == 4.0 * max(rounds.values()) and told["delta"] == 0.0 and told["unit"] == "client"
    assert [row["privacy/epsilon"] for row in run.rows][-1] == told["epsilon"]
    assert load(run.last)["federation"]["stages"]["local_privacy"]["spent"] == {
        k: 4.0 * n for k, n in rounds.items() if n
    }


# what Apple's pfl 0.6.0 composes: ApproximatePrivacyLossBound(0.7, 0.0).apply_multiple_times(25) of
# pfl.internal.privacy_loss_bound has epsilon 17.5 and delta 0
def test_rounds_add_up_as_pfl_adds_them_up():
    told = fit(make_client(), max_rounds=25, local_privacy=PrivUnit(0.7), limit_val_batches=0).federation.privacy()
    assert told["epsilon"] == pytest.approx(17.5) and told["delta"] == 0.0


def test_a_resumed_run_counts_on_and_lost_secure_rounds_too(tmp_path):
    from pfl_lightning.callbacks import FederatedCallback

    class Ends(FederatedCallback):
        def on_round_start(self, trainer, federation, cohort):
            if federation.round == 2:
                raise ZeroDivisionError

    secure = {"local_privacy": PrivUnit(4.0, noise="secure")}
    with pytest.raises(ZeroDivisionError):
        fit(make_client(), root=tmp_path, callbacks=[Ends()], **secure)
    (last,) = tmp_path.rglob("last.ckpt")
    run = fit(make_client(), root=tmp_path, ckpt_path=str(last), **secure)
    # three rounds, and the one that had begun
    assert run.federation.privacy()["epsilon"] == 16.0


# What doesn't go with it


REFUSED = [
    (lambda: make_client(), {"aggregator": DPAverage(1.0)}, r"aggregator=DPAverage .* trainer\.local_privacy"),
    (lambda: make_client(), {"example_privacy": DPSGD(1.0)}, r"trainer\.example_privacy.* trainer\.local_privacy"),
    (lambda: make_client(), {"secure_sum": SecureSum()}, r"trainer\.secure_sum.* trainer\.local_privacy"),
    (lambda: make_client(), {"compression": TopK(0.5)}, r"trainer\.compression.* trainer\.local_privacy"),
    (lambda: make_client(), {"schedule": Synchronous()}, r"trainer\.schedule=Synchronous .* trainer\.local_privacy"),
    (lambda: make_client(), {"cohort": PowerOfChoice(candidates=3)}, r"trainer\.cohort=PowerOfChoice .* take Uniform"),
    (lambda: make_client(), {"cohort": Oort()}, r"trainer\.cohort=Oort .* take Uniform"),
    (lambda: make_client(), {"aggregator": FedDisco()}, "asks for class_counts"),
    (lambda: make_client(), {"aggregator": FedLAW()}, r"FedLAW doesn't set example_level"),
    (lambda: make_client(ControlVariates), {}, "sends control beside weights"),
    (lambda: make_client(Local), {}, "sends nothing"),
    (lambda: make_client(net=noisy), {}, r"model\.buffers='average'.* take model\.buffers=local"),
    (lambda: make_client(), {"callbacks": [CanaryAudit(canaries=20)]}, "CanaryAudit sends updates of its own"),
    (lambda: make_client(), {"local_privacy": 3}, r"local_privacy=3 .* PrivUnit"),
]


@pytest.mark.parametrize(("make", "settings", "words"), REFUSED, ids=[words[:30] for *_, words in REFUSED])
def test_what_would_break_it_is_refused(make, settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        fit(make(), **{**PRIVATE, **settings})


def test_a_client_of_ones_own_that_sends_more_is_stopped_before_it_does():
    class Chatty(FedAvg):
        client_level = True

        def upload(self, data):
            return super().upload(data) | {"extra": torch.zeros(1)}

    with pytest.raises(MisconfigurationException, match="Chatty sends extra, to which no noise is added"):
        fit(make_client(Chatty), **PRIVATE)


def test_a_server_s_steps_behind_the_noise_are_free():
    run = fit(make_client(), aggregator=FedAdam(), **PRIVATE)
    assert run.federation.privacy()["epsilon"] == 12.0
    assert fit(make_client(), aggregator=WeightedAverage(), **PRIVATE).federation.privacy()["epsilon"] == 12.0


class Ranks(FederatedCallback):
    """Notes each rank's updates."""

    def __init__(self, folder):
        self.folder = folder

    def on_aggregate_start(self, trainer, federation, updates):
        with (self.folder / f"rank {trainer.global_rank}").open("a") as file:
            file.write(f"{digest(updates)}\n")


def test_secure_noise_is_drawn_once_a_client_on_several_devices(tmp_path):
    local = PrivUnit(4.0, clip=0.5, noise="secure")
    settings = {"devices": 2, "strategy": ClientParallel(start_method="fork"), "local_privacy": local}
    fit(make_client(), root=tmp_path / "run", max_rounds=2, callbacks=[Ranks(tmp_path)], **settings)
    one, other = ((tmp_path / f"rank {rank}").read_text().split() for rank in (0, 1))
    # the same updates on both ranks, and other ones in each round
    assert one == other and len({*one}) == 2
