"""Deployments of small federations in one process, and the same federations in a simulation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from flwr.app import RecordDict
from local_grid import LocalGrid

from federations import Run, blobs, make_trainer
from pfl_lightning.flower.client_app import Worker, app_of
from pfl_lightning.flower.server_app import serve
from pfl_lightning.flower.site import ALWAYS, Site
from pfl_lightning.flower.site_keys import SiteKeys
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.flower.wire import names, pack, unpack
from pfl_lightning.methods.registry import METHODS

REVEALED = frozenset().union(*(method.client.sends | method.client.offers for method in METHODS)) - ALWAYS
"""All that methods send, or may be asked for, beside what every site sends."""
ALL = " ".join(sorted(REVEALED))
NODES = {node: {"clients": clients, "allow": ALL} for node, clients in {11: "0 2", 12: "1 3"}.items()}

TABLE = """
model:
  class_path: FedPer
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1}}}}
data:
  class_path: TableData
  init_args:
    path: {folder}/columns.csv
    target: ill
    features: [age, pressure]
    classes: [cold, flu]
    task: {{class_path: Classification, init_args: {{num_classes: 2}}}}
    num_clients: 2
    partitioner: {{class_path: IID}}
trainer: {{accelerator: cpu}}
"""
"""Configuration of an app with a table."""


def write_app(folder: Path, name: str) -> None:
    """Writes what a site gets of an app: its configuration ``app.yaml``, the columns and its project."""
    folder.mkdir(exist_ok=True)
    (folder / "app.yaml").write_text(TABLE.format(folder=folder))
    (folder / "columns.csv").write_text("age,pressure,ill\n")
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')


def grid_of(
    make: Callable[[], Any],
    folder: Path,
    data: Callable[[], Any] = blobs,
    aggregator: Callable[[], Any] = lambda: None,
    nodes: Mapping[int, dict[str, Any]] = NODES,
    resident: bool = False,
    as_simulated: bool = False,
    keys: Callable[[int], SiteKeys | None] = lambda node: None,
    **settings: Any,
) -> LocalGrid:
    """Two sites with two clients each.

    Args:
        make: makes the client module; it seeds first.
        folder: where sites keep what stays with their clients.
        data: makes the clients' data.
        aggregator: makes the server side of the sites' configuration.
        nodes: other sites.
        resident: whether a site is made once, and not anew for each message.
        keys: gives each site's keys of secure sums, by node.
        as_simulated: whether sites train by the simulation's seeds under secure sums too, in place of their own.
        **settings: the Trainer's.
    """

    made: dict[int, Worker] = {}

    def worker(context: Any) -> Worker:
        if context.node_id in made:
            return made[context.node_id]
        held, client = data(), make()
        held.setup()
        states = StateVersions(folder / str(context.node_id))
        site = Site.of(context.node_config, held)
        rounds = {} if grid.max_rounds is None else {"max_rounds": grid.max_rounds}
        trainer = make_trainer(**{**rounds, **settings})
        own: dict[str, Any] = {"keys": keys(context.node_id)}
        if as_simulated:
            own["new_seed"] = lambda job: job.seed
        worker = Worker(trainer, client, site, states, aggregator(), context.state, **own)
        if resident:
            made[context.node_id] = worker
        return worker

    grid = LocalGrid(app_of(worker), nodes)
    return grid


def deploy(
    grid: LocalGrid,
    make: Callable[[], Any],
    root: Any = "unused",
    data: Callable[[], Any] = blobs,
    aggregator: Any = None,
    ckpt_path: str | None = None,
    serving: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Fits a federation over a grid, by a server of its own."""
    trainer, model = make_trainer(root, **settings), make()
    grid.max_rounds = trainer.max_epochs
    limits = {"timeout": 5.0, "patience": 1.0, "poll": 0.0} | (serving or {})
    federation = serve(grid, trainer, model, data(), aggregator, ckpt_path, **limits)
    return Run(trainer, model, federation.data)


def rewrite(content: RecordDict, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the records of a message in place, as a bad site could."""
    records = {name: unpack(content, name) for name in names(content)}
    change(records)
    for name in list(content):
        del content[name]
    for name, record in pack(records).items():
        content[name] = record
