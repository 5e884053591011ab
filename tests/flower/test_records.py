"""What a deployment leaves and what it holds where: records, sites with data of their own, a server without any."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import NODES, deploy, grid_of
from local_grid import LocalGrid

from federations import (
    CLASSES,
    FEATURES,
    Blobs,
    Pause,
    blobs,
    equal,
    fit,
    load,
    make_client,
    make_trainer,
    noisy,
    untimed,
)
from pfl_lightning.flower.client_app import Worker, app_of
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.methods import FedMD, FedPer
from pfl_lightning.runs.checkpoint_io import save
from tasks_and_data import OfKind, client_of, kinds

make = partial(make_client, FedPer, net=noisy)


@pytest.mark.parametrize("evaluate", ["before", "after"])
@pytest.mark.by_default("after")
def test_summaries_are_those_of_a_simulation(tmp_path, evaluate):
    settings = {"evaluate": evaluate, "max_rounds": 4, "client_states": "disk"}
    here = fit(make(), root=tmp_path / "here", **settings)
    there = deploy(grid_of(make, tmp_path / "sites", **settings), make, tmp_path / "there", **settings)
    # a server has no rows to take digests of
    left_out = {"seconds", "partition", "rows"}
    one, other = ({k: v for k, v in run.logger.summary.items() if k not in left_out} for run in (here, there))
    # the test of the selected round asks sites for states of an earlier one
    assert one == other and one["selected"]["test/acc"] is not None
    columns = [{name: row[name] for name in row if name != "classes"} for row in here.logger.clients]
    assert columns == there.logger.clients
    assert there.folder.parent.name == "FedPer-RemoteBlobs"


@pytest.mark.parametrize(("evaluate", "column"), [("both", "val_after/acc"), ("after", "val/acc")])
@pytest.mark.by_default("after-val/acc")
def test_a_run_goes_on_though_nobody_has_answered_yet(tmp_path, evaluate, column):
    settings = {"evaluate": evaluate, "max_rounds": 2}
    grid = grid_of(make, tmp_path / "sites", **settings)
    # greetings stay as they are
    grid.spoil = lambda node, kind, content: None if kind == "query" else content.clear()
    first = deploy(grid, make, tmp_path / "there", callbacks=[Pause(1)], **settings)
    assert first.rows[0]["clients_refused"] == 4
    grid.spoil = lambda node, kind, content: None
    run = deploy(grid, make, tmp_path / "there", ckpt_path="last", **settings)
    assert run.rows[1][column] > 0 and set(run.federation.evaluations.after) == {0, 1, 2, 3}


def test_a_model_is_kept_where_nobody_asks_for_an_evaluation(tmp_path):
    settings = {"evaluate": "after", "max_rounds": 1}
    grid = grid_of(make, tmp_path / "sites", **settings)
    deploy(grid, make, **settings)
    assert "evaluate" not in {kind for kind, _ in grid.asked}
    received = load(tmp_path / "sites" / "12" / "3" / "model.ckpt")
    assert received["federation"]["round"] == 0 and equal(received["state_dict"], dict(make().state_dict()))


class Unloaded(Blobs):
    """A server's, which loads nothing."""

    def load(self):
        raise AssertionError("the server has no samples to load")


class Own(Blobs):
    """A site's, with its own two clients and nobody else."""

    def __init__(self, first, **settings):
        super().__init__(num_clients=2, **settings)
        self.whole, self.first = blobs(), first

    def setup(self, stage=None):
        self.whole.setup()

    def prepare_data(self):
        """Nothing to fetch."""

    def parts(self, clients, split, device="cpu"):
        return self.whole.parts([self.first + 2 * client for client in clients], split, device)

    def size(self, client, split):
        return self.whole.size(self.first + 2 * client, split)


@pytest.mark.exhaustive
def test_sites_hold_their_own_clients_and_the_server_nothing(tmp_path):
    def worker(context):
        client, data = make(), Own(context.node_id - 11, batch_size=5)
        data.setup()
        states = StateVersions(tmp_path / str(context.node_id))
        return Worker(make_trainer(max_rounds=2), client, Site.of(context.node_config, data), states)

    grid = LocalGrid(app_of(worker), NODES)
    there = deploy(grid, make, data=partial(blobs, data=Unloaded), max_rounds=2)
    here = fit(make(), max_rounds=2)
    assert equal(here.weights, there.weights) and untimed(here.rows) == untimed(there.rows)


@pytest.mark.parametrize("task", list(kinds()))
@pytest.mark.by_default("Segmentation")
def test_every_task_can_be_deployed(tmp_path, task):
    kind = kinds()[task]
    own, data = partial(client_of, kind, FedPer), partial(OfKind, kind)
    here = fit(own(), data(), max_rounds=1)
    there = deploy(grid_of(own, tmp_path, data, max_rounds=1), own, data=data, max_rounds=1)
    assert equal(here.weights, there.weights)
    # with metrics of all clients' samples, of which each site tells its part; of areas it tells counts
    (own_row,), (row,) = untimed(here.rows), untimed(there.rows)
    for name in [name for name in row if name.endswith("_pooled_error")]:
        area = name.removesuffix("_error")
        assert abs(own_row.pop(area) - row.pop(area)) <= row.pop(name)
    assert own_row == row


def test_what_is_sent_once_stays_at_the_site(tmp_path):
    own = partial(make_client, FedMD, initial_epochs=1, distill_batch_size=4)
    there = deploy(grid_of(own, tmp_path, max_rounds=2), own, max_rounds=2)
    inputs, answers = 4 * 4 * 9 * FEATURES, 4 * 4 * 9 * CLASSES
    assert [row["bytes/down"] for row in there.rows] == [inputs, answers]
    # evaluations are told the answers of the round
    assert [row["bytes/evaluate"] for row in there.rows] == [answers, answers]
    for state in (tmp_path / "12" / "3").rglob("*.pt"):
        assert load(state)["once"]["public"].shape == (9, FEATURES)


def test_a_site_that_has_lost_what_is_sent_once_says_so(tmp_path):
    own = partial(make_client, FedMD, initial_epochs=1, distill_batch_size=4)
    grid = grid_of(own, tmp_path / "sites", max_rounds=2)
    deploy(grid, own, tmp_path, callbacks=[Pause(1)], max_rounds=2)
    for path in (tmp_path / "sites" / "12").rglob("*.pt"):
        save(load(path) | {"once": {}}, path)
    with pytest.warns(UserWarning, match="its site has no public, which the server sends once"):
        run = deploy(grid, own, tmp_path, ckpt_path="last", max_rounds=2)
    assert run.rows[1]["clients_refused"] == 2


@pytest.mark.exhaustive
def test_a_round_tells_what_sites_took(tmp_path):
    settings = {"max_rounds": 4, "check_val_every_n_epoch": 2, "clients_per_round": 0.5}
    rows = deploy(grid_of(make, tmp_path, **settings), make, **settings).rows
    # all are evaluated, and half of them train
    assert [row["bytes/evaluate"] for row in rows] == [0, 2 * rows[1]["bytes/down"]] * 2
    assert all(0 < row["time/site"] < row["time/train"] for row in rows)


@pytest.mark.exhaustive
def test_half_precision_travels_as_it_is(tmp_path):
    settings = {"max_rounds": 2, "precision": "bf16-true"}
    here = fit(make(), **settings)
    there = deploy(grid_of(make, tmp_path, **settings), make, **settings)
    assert equal(here.weights, there.weights)
    assert here.rows[0]["bytes/up"] == there.rows[0]["bytes/up"]


def test_a_run_goes_on_with_states_of_the_first_version(tmp_path):
    make = partial(make_client, FedPer, optimizer_lifetime="run", optimizer=partial(SGD, lr=0.1, momentum=0.9))
    grid = grid_of(make, tmp_path / "sites")
    deploy(grid, make, tmp_path / "runs", callbacks=[Pause(1)])
    files = list((tmp_path / "sites").rglob("*.pt"))
    # later versions have added entries
    for path in files:
        saved = torch.load(path, weights_only=True)
        torch.save({name: saved[name] for name in ("personal", "optimizers", "scaler")}, path)
    run = deploy(grid, make, tmp_path / "runs", ckpt_path="last")
    here = fit(make())
    assert len(files) == 4 and equal(run.weights, here.weights)
    assert [row["val/acc"] for row in run.rows] == [row["val/acc"] for row in here.rows]
