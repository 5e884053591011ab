"""Clients that join by name beyond those of the settings while a federation runs, and that leave."""

import inspect
import math
from functools import partial

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")
pytest.importorskip("pandas", reason="needs the extra tables")

import pandas
from deployments import ALL, deploy, rewrite
from local_grid import LocalGrid

from federations import Pause, blobs, load, make_client, make_trainer, noisy
from pfl_lightning.aggregators import SCAFFOLD, FedAMP
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.flower.client_app import Worker, app_of
from pfl_lightning.flower.site import Site
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.methods import CloudProx, ControlVariates, FedAvg, FedPer
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.privacy import DPAverage, SecureSum
from sweeps import swept

make = partial(make_client, FedPer, net=noisy)
SOME = ("FedPer", "FedProto", "FedFomo")
SITES = {11: "Bremen", 12: "Ulm", 13: "Kiel", 14: "Jena"}


class Sites(LocalGrid):
    """Sites of one client each, some of which come and go at the end of a round."""

    def __init__(self, folder, method=make, joins=True, **settings):
        made = {}

        def worker(context):
            if context.node_id in made:
                return made[context.node_id]
            data = blobs(12 + 2 * (context.node_id - 11))
            data.setup()
            told = context.run_config
            site = Site.of(context.node_config, data, told["names"], told["joins"])
            states = StateVersions(folder / str(context.node_id))
            made[context.node_id] = Worker(make_trainer(**settings), method(), site, states)
            return made[context.node_id]

        nodes = {node: {"clients": name, "allow": ALL} for node, name in SITES.items()}
        super().__init__(app_of(worker), nodes, run_config={"names": ["Bremen", "Ulm"], "joins": joins})
        self.away = {13, 14}


class Moves(FederatedCallback):
    """Lets sites come and go after rounds.

    Args:
        grid: the sites.
        come: the round by the site that comes after it.
        go: the round by the site that goes after it.
    """

    def __init__(self, grid, come=None, go=None):
        self.grid, self.come, self.go = grid, come or {}, go or {}

    def on_aggregate_end(self, trainer, federation, logs):
        now = federation.round + 1
        self.grid.away -= {node for node, round in self.come.items() if round == now}
        self.grid.away |= {node for node, round in self.go.items() if round == now}


def run(
    tmp_path,
    method=make,
    come=None,
    go=None,
    most=4,
    joins=True,
    ckpt_path=None,
    rounds=4,
    callbacks=(),
    aggregator=None,
    **more,
):
    settings = {"max_rounds": rounds, **more}
    grid = Sites(tmp_path / "sites", method, joins, **settings)
    if ckpt_path:
        grid.away = set()
    serving = {"names": ["Bremen", "Ulm"], "max_clients": most}
    callbacks = [Moves(grid, come, go), *callbacks]
    data = partial(blobs, 12, 14)
    told = deploy(
        grid, method, tmp_path / "server", data, aggregator, ckpt_path, serving, callbacks=callbacks, **settings
    )
    return told, grid


def test_a_client_joins_by_name_and_leaves_again(tmp_path):
    told, _ = run(tmp_path, come={13: 1, 14: 2}, go={13: 3})
    assert [row["joined"] for row in told.rows] == ["", "2", "3", ""]
    assert [row["cohort"] for row in told.rows] == ["0 1", "0 1 2", "0 1 2 3", "0 1 3"]
    assert [row["absent"] for row in told.rows] == ["", "", "", "2"]
    clients = pandas.read_csv(told.trainer.log_dir + "/clients.csv")
    assert [*clients["name"]] == ["Bremen", "Ulm", "Kiel", "Jena"] and [*clients["samples"]] == [8, 9, 11, 12]
    # what stays with it is at its site, also after it has left
    kept = told.federation.clients[2].kept
    assert kept in {path.stem for path in (tmp_path / "sites" / "13" / "2").rglob("*.pt")}


def test_a_client_that_joins_receives_what_a_newcomer_receives(tmp_path):
    received = {}

    class Welcomed(FederatedCallback):
        def on_client_fit_start(self, trainer, federation, client):
            received[federation.round + 1, client] = federation.received(client)[1]

    run(tmp_path, partial(make_client, CloudProx), come={13: 1}, callbacks=[Welcomed()], aggregator=FedAMP())
    first = received[2, 2]["weights"]
    initial = received[1, 0]["weights"]
    assert all(bool((first[name] == initial[name]).all()) for name in initial)
    later = received[3, 2]["weights"]
    assert any(bool((later[name] != initial[name]).any()) for name in initial)


def test_a_run_goes_on_with_the_clients_that_have_joined(tmp_path):
    told, _ = run(tmp_path, come={13: 1}, callbacks=[Pause(3)])
    last = told.trainer.log_dir + "/checkpoints/last.ckpt"
    assert load(last)["federation"]["names"] == ["Bremen", "Ulm", "Kiel"]
    again, _ = run(tmp_path, ckpt_path=last)
    assert [row["cohort"] for row in again.rows] == ["0 1", "0 1 2", "0 1 2", "0 1 2 3"]
    assert [row["joined"] for row in again.rows] == ["", "2", "", "3"]
    with pytest.raises(MisconfigurationException, match="4 and 2"):
        run(tmp_path, ckpt_path=last, most=0, joins=False)


@pytest.mark.parametrize(
    ("most", "joins", "words"),
    [(0, False, "clients='Kiel' is no client"), (0, True, "max-clients=2"), (3, True, "max-clients=3")],
)
def test_a_site_without_a_place_is_refused_in_a_sentence(tmp_path, most, joins, words):
    with pytest.warns(UserWarning, match=f"node 1[34]( is refused)?: .*{words}") as warned:
        told, _ = run(tmp_path, come={13: 1, 14: 1}, most=most, joins=joins, rounds=3)
    assert all("\n" not in str(warning.message) for warning in warned)
    assert told.federation.data.num_clients == (3 if most == 3 else 2)


@pytest.mark.parametrize("name", ["", "7", "Kiel, Ulm", "K" * 101, "Kiel\x1b[31m", "ulm"])
def test_a_name_that_can_not_be_one_is_refused(tmp_path, name):
    settings = {"max_rounds": 2}
    grid = Sites(tmp_path / "sites", **settings)
    sizes = {"train": 8, "val": 0, "test": 4}

    def spoil(node, kind, content):
        if node == 13 and kind == "query":
            rewrite(content, lambda records: records["hello"].update(new={name: sizes}))

    grid.spoil = spoil
    serving = {"names": ["Bremen", "Ulm"], "max_clients": 4}
    with pytest.warns(UserWarning, match="node 13 is refused"):
        told = deploy(
            grid, make, data=partial(blobs, 12, 14), serving=serving, callbacks=[Moves(grid, {13: 1})], **settings
        )
    assert told.federation.data.num_clients == 2


@pytest.mark.parametrize(
    ("method", "serving", "settings", "words"),
    [
        (FedAvg, {"max_clients": 1}, {}, "max-clients=1 must be at least data.num_clients=2"),
        (FedAvg, {"names": ()}, {}, "max-clients=4 .* names"),
        (FedAvg, {}, {"secure_sum": SecureSum()}, "trainer.secure_sum"),
        (FedAvg, {}, {"aggregator": DPAverage(noise_multiplier=1.0, clip=1.0)}, "guarantee of aggregator DPAverage"),
        (ControlVariates, {}, {"aggregator": SCAFFOLD()}, "aggregator SCAFFOLD"),
    ],
)
def test_clients_do_not_join_where_their_number_counts(tmp_path, method, serving, settings, words):
    own = partial(make_client, method)
    grid = Sites(tmp_path, own)
    serving = {"names": ["Bremen", "Ulm"], "max_clients": 4, **serving}
    with pytest.raises(MisconfigurationException, match=words):
        deploy(grid, own, data=partial(blobs, 12, 14), serving=serving, **settings)
    assert grid.asked == []


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_aggregator_that_reads_the_number_of_clients_says_so(method):
    server = method.new_aggregator() or make_client(method.client).configure_aggregator()
    parts = getattr(server, "aggregators", [server])
    reads = any("server.num_clients" in inspect.getsource(cls) for part in parts for cls in type(part).__mro__[:-2])
    assert (server.fixed_clients or server.fixed_sizes or bool(server.guarantee)) == reads


OWN = {"FedClassAvg": {"contrastive": False}}


@pytest.mark.parametrize("method", swept([method for method in METHODS if not method.client.pools], SOME))
def test_a_client_joins_under_each_method_that_lets_it(method, tmp_path):
    own = partial(make_client, method.client, net=noisy, **OWN.get(method.name, {}))
    server = method.new_aggregator()
    fixed = server or own().configure_aggregator()
    if fixed.fixed_clients or fixed.fixed_sizes:
        return
    told, _ = run(tmp_path, own, come={13: 1}, aggregator=server, rounds=3)
    assert [row["clients"] for row in told.rows] == [2, 3, 3]
    assert all(math.isfinite(row["train/loss"]) for row in told.rows if "train/loss" in row)
