"""Evaluations at sites that come with the next round's training message."""

from functools import partial

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import deploy, grid_of

from federations import Pause, equal, fit, make_client, near, noisy, untimed
from pfl_lightning.federation import federation
from pfl_lightning.flower.link import Quorum
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.privacy import DPAverage, SecureSum
from pfl_lightning.selection import PowerOfChoice

make = partial(make_client, FedPer, net=noisy)
TOGETHER = {"together": True}


def kinds(grid):
    return [kind for kind, node in grid.asked if node == 11 and kind != "query"]


def rows(run):
    """The record but for times, and for the bytes of evaluations, which travel with the training."""
    return [{name: value for name, value in row.items() if name != "bytes/evaluate"} for row in untimed(run.rows)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evaluate": "both", "test_every_round": True, "clients_per_round": 0.5},
        {"evaluate_clients": 2},
        {"cohort": PowerOfChoice(candidates=4), "clients_per_round": 2},
        {"check_val_every_n_epoch": 2},
    ],
    ids=lambda settings: " ".join(settings) or "by default",
)
def test_metrics_are_those_of_messages_of_their_own(tmp_path, settings):
    settings = {"max_rounds": 3, **settings}
    apart = deploy(grid_of(make, tmp_path / "0", resident=True, **settings), make, **settings)
    grid = grid_of(make, tmp_path / "1", resident=True, **settings)
    together = deploy(grid, make, serving=TOGETHER, **settings)
    assert equal(apart.weights, together.weights)
    assert near(rows(apart), rows(together))
    assert near(apart.logger.clients, together.logger.clients)


def test_no_advice_about_evaluations_that_train(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(federation, "rank_zero_info", said.append)
    monkeypatch.setattr(federation, "WORTH_ADVICE", -1.0)
    # the clock of evaluations is the server's own, and what is asked of sites in an evaluation takes all the time
    deploy(grid_of(make, tmp_path, max_rounds=3), make, serving=TOGETHER, max_rounds=3)
    assert not [line for line in said if "evaluation has taken" in line]


def test_a_round_is_one_message_to_a_site(tmp_path):
    settings = {"max_rounds": 3}
    grid = grid_of(make, tmp_path, **settings)
    deploy(grid, make, serving=TOGETHER, **settings)
    # at last the evaluation of the last round, and the test of it and of the best one
    assert kinds(grid)[:4] == ["train", "train", "train", "evaluate"]
    assert "train" not in kinds(grid)[3:]


def test_a_run_goes_on_where_it_has_stopped_after_a_training_ahead(tmp_path):
    settings = {"max_rounds": 4}
    alone = fit(make(), **settings)
    for path in (None, "last"):
        grid = grid_of(make, tmp_path / "sites", **settings)
        callbacks = [] if path else [Pause(2)]
        run = deploy(grid, make, tmp_path / "server", ckpt_path=path, serving=TOGETHER, callbacks=callbacks, **settings)
    assert equal(alone.weights, run.weights)


def test_a_site_that_fails_is_left_out_once(tmp_path):
    settings = {"max_rounds": 3}
    grid = grid_of(make, tmp_path, **settings)

    def spoil(node, kind, content):
        if node == 12 and kind == "train" and len(grid.asked) > 4:
            for name in list(content):
                del content[name]

    grid.spoil = spoil
    with pytest.warns(UserWarning, match="isn't evaluated"):
        run = deploy(grid, make, serving=TOGETHER, **settings)
    assert [row["clients_refused"] for row in run.rows] == [0, 2, 2]
    assert [row["clients"] for row in run.rows] == [4, 2, 2]


@pytest.mark.parametrize(
    ("quorum", "settings", "words"),
    [
        (Quorum(late_rounds=1), {}, "late-rounds=1"),
        (Quorum(), {"secure_sum": SecureSum()}, "trainer.secure_sum"),
        (Quorum(), {"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)}, "guarantee of aggregator DPAverage"),
    ],
)
def test_a_training_ahead_is_refused_where_it_would_count(tmp_path, quorum, settings, words):
    own = partial(make_client, FedAvg)
    grid = grid_of(own, tmp_path)
    with pytest.raises(MisconfigurationException, match=f"evaluate-with-training=true .*{words}"):
        deploy(grid, own, serving={**TOGETHER, "quorum": quorum}, **settings)
    assert grid.asked == []
