"""Cohorts under secure noise, against who has the seed, the settings and a checkpoint, as every site does."""

import random
from functools import partial

import pytest
from scipy.stats import binomtest

from federations import Pause, Spy, blobs, fit, load, make_client, read_csv
from pfl_lightning import Server
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.engines.client_parallel import ClientParallel
from pfl_lightning.privacy import DPAverage, Release, epsilon
from pfl_lightning.seeds import derive_seed
from pfl_lightning.selection import Poisson, RoundStart, Sampling, Uniform

CLIENTS = 20
many = partial(blobs, *[6] * CLIENTS)
"""So many clients that no cohort is guessed by chance."""
RATE = 0.5


def run_of(noise, cohort=None, root="unused", rounds=5, ckpt_path=None, **settings):
    spy = Spy()
    aggregator = DPAverage(noise_multiplier=1.0, noise=noise)
    settings = {"cohort": cohort or Poisson(RATE), "callbacks": [spy, *settings.pop("callbacks", [])], **settings}
    run = fit(make_client(seed=0), many(), root, aggregator, ckpt_path, max_rounds=rounds, **settings)
    return run, spy.cohorts


def recomputed(seed, cohort, rounds=5):
    """The cohorts as they follow from the seed and the settings."""
    everybody = range(CLIENTS)
    streams = (random.Random(derive_seed(seed, "cohort", round)) for round in range(rounds))
    starts = (RoundStart(round, everybody, CLIENTS // 4, stream, dict) for round, stream in enumerate(streams))
    return [sorted(cohort.choose(start)) for start in starts]


def test_no_cohort_follows_from_seed_and_settings():
    run, cohorts = run_of("secure")
    guessed = recomputed(run.federation.seed, Poisson(RATE))
    assert sum(one == other for one, other in zip(cohorts, guessed, strict=True)) == 0
    # nor from the same run, made once more
    _, again = run_of("secure")
    assert sum(one == other for one, other in zip(cohorts, again, strict=True)) == 0


@pytest.mark.parametrize(
    ("noise", "cohort", "share"), [("seeded", Poisson(RATE), 1.0), ("secure", Uniform(), 0.25)], ids=["seeded", "fixed"]
)
def test_where_nothing_secret_amplifies_cohorts_are_the_seeds(noise, cohort, share):
    run, cohorts = run_of(noise, cohort, clients_per_round=share)
    assert cohorts == recomputed(run.federation.seed, cohort)


def test_no_cohort_follows_from_the_checkpoint_before_it(tmp_path):
    run_of("secure", root=tmp_path, callbacks=[Pause(2)])
    (path,) = tmp_path.rglob("last.ckpt")
    saved = load(path)
    ends = [run_of("secure", ckpt_path=path)[1] for _ in range(2)]
    assert all(one != other for one, other in zip(*ends, strict=True))
    assert len(ends[0]) == 3 and not saved["federation"]["cohort"]


@pytest.mark.exhaustive
def test_each_client_comes_at_the_rate_and_by_itself():
    run, _ = run_of("secure", Poisson(0.3), rounds=1)
    drawn = [run.federation.cohort(range(CLIENTS), CLIENTS) for _ in range(2000)]
    for client in range(CLIENTS):
        assert binomtest(sum(client in cohort for cohort in drawn), 2000, 0.3).pvalue > 1e-5
    together = sum(3 in cohort and 7 in cohort for cohort in drawn)
    assert binomtest(together, 2000, 0.09).pvalue > 1e-5


def test_the_statement_says_where_cohorts_come_from():
    told = {noise: run_of(noise, rounds=1)[0].federation.privacy() for noise in ("secure", "seeded")}
    assert "operating system" in told["secure"]["sampling"] and "seed" not in told["secure"]["not_covered"]
    assert "simulation" in told["seeded"]["sampling"] and "the cohorts are drawn" in told["seeded"]["not_covered"]
    # the server knows who was asked, and so does who reads the record
    assert all("who knows the cohorts" in each["not_covered"] for each in told.values())
    assert told["secure"]["epsilon"] == told["seeded"]["epsilon"] == epsilon([Release(1.0, RATE, 1)], 0.1 / CLIENTS)


def test_rounds_of_seeded_cohorts_before_count_without_amplification():
    """A checkpoint of an earlier version, or of a simulation, goes on with secure noise."""
    model = make_client()
    shared = {name: tensor.clone() for name, tensor in model.state_dict().items() if model.is_shared(name)}

    def started(noise):
        aggregator = DPAverage(noise_multiplier=1.0, noise=noise)
        aggregator.setup(Server(4, shared, model, None, 0, 10, Sampling(2.0, RATE)))
        return aggregator

    def made(aggregator, rounds):
        for round in range(rounds):
            aggregator.aggregate({}, round)
        return aggregator.privacy()["epsilon"]

    before, after = started("seeded"), started("secure")
    assert made(before, 3) == epsilon([Release(1.0, RATE, 3)], 0.025)
    after.state = dict(before.state)
    assert made(after, 0) == epsilon([Release(1.0, 1.0, 3)], 0.025)
    assert "3 rounds before" in after.privacy()["sampling"]
    assert made(after, 2) == epsilon([Release(1.0, 1.0, 3), Release(1.0, RATE, 2)], 0.025)
    # lost rounds, made again with cohorts of their own
    after.count_lost(2)
    assert made(after, 0) == epsilon([Release(1.0, 1.0, 3), Release(1.0, RATE, 4)], 0.025)
    # back in a simulation its rounds are no secret either, and stay so
    before.state = dict(after.state)
    made(before, 1)
    after.state = dict(before.state)
    assert made(after, 0) == epsilon([Release(1.0, 1.0, 8)], 0.025)


def test_what_is_published_has_no_cohort_and_no_number_of_its_clients(tmp_path):
    run, cohorts = run_of("secure", root=tmp_path, rounds=2)
    record = read_csv(run.folder / "rounds.csv")
    assert [row["cohort"] for row in record] == [" ".join(map(str, cohort)) for cohort in cohorts]
    published = read_csv(run.folder / "publishable.csv")
    assert len(published) == 2 and {name.partition("/")[0] for name in published[0]} == {"round", "server", "privacy"}


class Notes(FederatedCallback):
    """Notes each rank's cohorts and models."""

    def __init__(self, folder):
        self.folder = folder

    def on_aggregate_end(self, trainer, federation, logs):
        weights = {name: tensor.tolist() for name, tensor in federation.aggregator.global_model().items()}
        with (self.folder / f"rank {trainer.global_rank}").open("a") as file:
            file.write(f"{federation.metrics['cohort']} {logs} {weights}\n")


@pytest.mark.parametrize("learnt", [{}, {"quantile": 0.5, "count_noise": 1.0}], ids=str)
@pytest.mark.by_default("{}")
def test_ranks_have_one_cohort_and_one_model(learnt, tmp_path):
    aggregator = DPAverage(noise_multiplier=1.0, noise="secure", **learnt)
    settings = {"cohort": Poisson(RATE), "devices": 2, "strategy": ClientParallel(start_method="fork")}
    run = partial(fit, make_client(), many(), tmp_path / "run", aggregator, **settings)
    run(callbacks=[Notes(tmp_path)], max_rounds=2)
    one, other = ((tmp_path / f"rank {rank}").read_text() for rank in (0, 1))
    assert one == other and len(one.splitlines()) == 2
