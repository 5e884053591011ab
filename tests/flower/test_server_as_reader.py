"""All that a server receives under sample-level privacy, from sites that differ in one training sample."""

import dataclasses

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import Altered, blobs, equal, fit, make_client
from pfl_lightning import WeightedAverage
from pfl_lightning.data import Samples
from pfl_lightning.flower.wire import names, unpack
from pfl_lightning.methods import Ditto, FedAvg, FedBABU
from pfl_lightning.privacy import DPSGD, dp_sgd
from pfl_lightning.selection import Selection

PRIVATE = {"example_privacy": DPSGD(1.0, 0.5)}
CHANGED = 1
"""The client with another sample."""


class OneOther(Altered):
    """Blobs in which one training sample of a client is far from all others."""

    def alter(self, part, client, split):
        if (client, split) != (CHANGED, "train"):
            return part
        x = part.x.clone()
        x[0] = 50.0
        return Samples(x, part.y)


class Still(WeightedAverage):
    """A server whose model stays, so that all evaluations are of the same one."""

    example_level = True

    def aggregate(self, updates, round):
        return {}


def received(method, folder, data, monkeypatch, **settings):
    """All records of all answers, in their order, with what differs by chance or is noised left out.

    Noise and batches are the same in each call.
    """
    draws = torch.Generator().manual_seed(0)
    drawn = {
        "secure_normal": lambda size: torch.randn(size, generator=draws, dtype=torch.float64),
        "secure_members": lambda samples, rate: (torch.rand(samples, generator=draws) < rate).nonzero().flatten(),
    }
    for name, function in drawn.items():
        monkeypatch.setattr(dp_sgd, name, function)
    monkeypatch.setattr(dp_sgd, "secure_seed", lambda: 0)

    def make():
        return make_client(method)

    answers = []

    def reads(node, kind, content):
        records = {name: unpack(content, name) for name in names(content)}
        for name, record in records.items():
            if name.endswith("/update"):
                record["weights"] = list(record["weights"])
            # folders' secrets, tokens and clocks
            for chance in ("secret", "kept", "seconds"):
                if chance in record:
                    record[chance] = ""
        answers.append((node, kind, records))

    grid = grid_of(make, folder, lambda: blobs(data=data), **PRIVATE, **settings)
    grid.spoil = reads
    run = deploy(grid, make, aggregator=Still(), **PRIVATE, **settings)
    return answers, run


@pytest.mark.parametrize(
    ("method", "evaluate"), [(FedAvg, "before"), (Ditto, "before"), (Ditto, "both"), (FedBABU, "both")]
)
@pytest.mark.by_default("FedAvg-before", "FedBABU-both")
def test_one_sample_changes_nothing_beside_noised_weights(method, evaluate, tmp_path, monkeypatch):
    settings = {"evaluate": evaluate, "max_rounds": 2}
    with_it, _ = received(method, tmp_path / "one", OneOther, monkeypatch, **settings)
    without, run = received(method, tmp_path / "other", type(blobs()), monkeypatch, **settings)
    assert {kind for _, kind, _ in without} >= {"train", "evaluate"}
    assert [(node, kind) for node, kind, _ in with_it] == [(node, kind) for node, kind, _ in without]
    for one, other in zip(with_it, without, strict=True):
        assert equal(one, other), one
    # columns of training are absent, and not NaN
    assert not [name for row in run.rows for name in row if name.startswith("train")]
    assert all(row["clients"] == 4 and row["local/steps"] > 0 for row in run.rows)
    assert ("val/acc" in run.rows[0] and run.rows[0]["val/acc"] >= 0) == (method is FedAvg)


def test_a_server_that_asks_for_metrics_of_training_rows_gets_none(tmp_path):
    run = deploy(grid_of(make_client, tmp_path, **PRIVATE), make_client, max_rounds=1, **PRIVATE)
    engine, job = run.federation.engines[0], run.federation.job(0, ("train",))
    with pytest.warns(UserWarning, match=r"asks for metrics of training rows, which trainer\.example_privacy"):
        assert engine.evaluate(job) == {}
    (outcome,) = engine.run([job])
    assert "training rows" in outcome.refused and not outcome.update


def test_a_server_that_asks_for_entries_without_noise_gets_none(tmp_path):
    """Even where the site's operator allows them, for runs without a guarantee."""
    run = deploy(grid_of(make_client, tmp_path, **PRIVATE), make_client, max_rounds=1, **PRIVATE)
    engine = run.federation.engines[0]
    engine.module.requested = frozenset({"class_counts"})
    (outcome,) = engine.run([run.federation.job(0)])
    assert "class_counts" in outcome.refused and not outcome.update


class ByLoss(Selection):
    """Takes the clients with the largest losses, which it doesn't name in what it asks for."""

    def choose(self, start):
        losses = start.losses(start.clients)
        return sorted(losses, key=losses.__getitem__)[-start.size :]


@pytest.mark.parametrize("at_sites", [True, False])
def test_a_choice_by_losses_is_refused(at_sites, tmp_path):
    settings = {"cohort": ByLoss(), "clients_per_round": 2, **PRIVATE}
    with pytest.raises(Exception, match=r"trainer\.cohort=ByLoss asks .* trainer\.example_privacy"):
        if at_sites:
            deploy(grid_of(make_client, tmp_path, **PRIVATE), make_client, **settings)
        else:
            fit(make_client(), **settings)


def test_a_simulation_shows_its_reader_losses_and_says_so():
    run = fit(make_client(), max_rounds=1, example_privacy=dataclasses.replace(PRIVATE["example_privacy"]))
    assert "train/loss" in run.rows[0] and "train metrics" in run.rows[0]["privacy/not_covered"]
