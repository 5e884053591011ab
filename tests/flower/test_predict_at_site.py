"""Predictions at a site of a deployment, for raw rows of a table with gaps and texts."""

import csv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")
pytest.importorskip("pandas", reason="needs the extra tables")

import tomllib

import pandas as pd
from flwr.app import Context, RecordDict
from local_grid import LocalGrid

from command import pfl, refusal
from federations import equal, read_csv
from pfl_lightning import FederatedTrainer
from pfl_lightning.flower import apps
from pfl_lightning.methods import FedPer
from pfl_lightning.runs.checkpoint_io import federation_in, models_in

NAMES = ["Bremen", "Jena", "Ulm"]
SITES = {1: ["Ulm", "Bremen"], 2: ["Jena"]}
CONFIG = """
seed_everything: 0
model:
  class_path: {method}
  init_args:
    net: {{class_path: MLP, init_args: {{hidden: [8]}}}}
    optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.05}}}}
data:
  class_path: TableData
  init_args:
    path: {path}
    target: ill
    client: site
    split_column: part
    classes: [well, ill]
    num_clients: {clients}
    task: {{class_path: Classification, init_args: {{num_classes: 2}}}}
    preprocessing: {{by: client, indicator: true, fill_category: mode, vocabulary: {{sex: [f, m]}}}}
# no validation, which would be two more messages a round
trainer: {{max_rounds: 1, default_root_dir: {root}, accelerator: cpu, limit_val_batches: 0}}
"""


COSTS = (
    CONFIG.replace("target: ill", "target: cost\n    features: [age, sex]")
    .replace("    classes: [well, ill]\n", "")
    .replace("{{class_path: Classification, init_args: {{num_classes: 2}}}}", "Regression")
)
"""The same with a quantity in dollars, which each client standardises by its own training rows."""


def table() -> pd.DataFrame:
    """Three clients with gaps, and splits of their own."""
    drawn = np.random.default_rng(0)
    site, age = np.repeat(NAMES, 40), drawn.normal(50, 10, 120).round(1)
    ill = np.where(age + drawn.normal(0, 6, 120) > 50 + 4 * (site == "Ulm"), "ill", "well")
    part = np.tile(["train", "train", "val", "test"], 30)
    made = pd.DataFrame({"site": site, "age": age, "sex": drawn.choice(["f", "m"], 120), "part": part, "ill": ill})
    made.loc[::7, "age"], made.loc[::11, "sex"] = None, None
    return made


def costly(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with a cost around 50,000 dollars, of another level at each client."""
    level = rows["site"].map({"Bremen": 10_000, "Jena": 20_000, "Ulm": 30_000})
    return rows.assign(cost=level + 800.0 * rows["age"].fillna(50))


class Deployment:
    """A server and two sites in one process, each with files of its own.

    Args:
        folder: of all files.
        method: the client module's class.
        config: the configuration, with places for method and data.
    """

    def __init__(self, folder: Path, method: str, config: str = CONFIG) -> None:
        self.folder, self.root, self.app = folder, folder / "there", folder / "clinics"
        rows = table()
        rows = costly(rows) if config is COSTS else rows
        rows.to_csv(folder / "all.csv", index=False)
        # the server has the names of columns alone
        rows[:0].to_csv(folder / "names.csv", index=False)

        def write(name: str, path: Path, clients: object = "null") -> str:
            text = config.format(method=method, path=path, root=self.root, clients=clients)
            (folder / name).write_text(text)
            return text

        write("mine.yaml", folder / "names.csv", clients=3)
        write("simulation.yaml", folder / "all.csv")
        self.nodes = {}
        for node, names in SITES.items():
            rows[rows["site"].isin(names)].to_csv(folder / f"rows-{node}.csv", index=False)
            text = write(f"site-{node}.yaml", folder / f"rows-{node}.csv")
            # its data alone, as a site writes it
            (folder / f"site-{node}.yaml").write_text(text[text.index("data:") : text.index("trainer:")])
            self.nodes[node] = {
                "clients": ", ".join(names),
                "data": str(folder / f"site-{node}.yaml"),
                "state-dir": str(self.states(node)),
            }
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            with pytest.raises(SystemExit):
                pfl("flower new clinics --config mine.yaml")

    def states(self, node: int) -> Path:
        return self.folder / f"states-{node}"

    def grid(self, **settings: object) -> LocalGrid:
        run = tomllib.loads((self.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        run |= {"timeout": 60, "patience": 1, "names": ", ".join(NAMES), **settings}
        return LocalGrid(apps.client_app(self.app), self.nodes, run_config=run)

    def run(self, **settings: object) -> dict[str, dict[str, str]]:
        """The server's own figures of each client after its run, by name."""
        grid = self.grid(**settings)
        apps.server_app(self.app)(grid, Context(1, 0, {}, RecordDict(), grid.run_config))
        (file,) = self.root.glob("*Remote*/*/clients.csv")
        return {row["name"]: row for row in read_csv(file)}


def predict(line: str) -> list[dict[str, str]]:
    with pytest.raises(SystemExit) as ended:
        pfl(f"predict {line} --out out.csv")
    assert ended.value.code == 0
    with Path("out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def accuracies(lines: list[dict[str, str]], rows: pd.DataFrame) -> dict[str, float]:
    """The share of right classes of each client, in single precision as metrics are."""
    right: dict[str, list[bool]] = {}
    for line in lines:
        right.setdefault(line["client"], []).append(line["prediction"] == rows["ill"].iloc[int(line["row"])])
    return {name: float(np.float32(sum(each)) / np.float32(len(each))) for name, each in right.items()}


def raw(names: list[str]) -> pd.DataFrame:
    """Test rows of some clients, of which the file ``raw.csv`` has all but the target."""
    rows = table()
    rows = rows[rows["site"].isin(names) & (rows["part"] == "test")].reset_index(drop=True)
    rows.drop(columns=["ill", "part"]).to_csv("raw.csv", index=False)
    return rows


def test_raw_rows_at_each_site_give_the_federation_s_test_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    deployment = Deployment(tmp_path, "FedPer")
    for more in ({}, {"ckpt-path": "last", "flags": "--trainer.max_rounds 2"}):
        figures = deployment.run(**more)
        # both sites at the end, one of them in between
        for node in list(SITES)[: 1 + bool(more)]:
            rows = raw(SITES[node])
            lines = predict(f"--state-dir {deployment.states(node)} --data raw.csv --ckpt_path last")
            assert accuracies(lines, rows) == {name: float(figures[name]["test/acc"]) for name in SITES[node]}
    # the rows that the site holds
    assert predict(f"--state-dir {deployment.states(2)} --ckpt_path last") == lines
    # a simulation with all rows in one place predicts the same
    quiet = "--trainer.enable_progress_bar false --trainer.enable_model_summary false --trainer.max_rounds 2"
    pfl(f"fit --config simulation.yaml --trainer.engine sequential --trainer.default_root_dir here {quiet}")
    assert predict("--runs here --ckpt_path last --data raw.csv") == lines
    models = models_in(federation_in(deployment.states(1)), best=False)
    assert list(models) == ["Bremen", "0", "Ulm", "2"]
    model = FedPer.load_from_checkpoint(models["Ulm"])
    (own,) = FederatedTrainer(logger=False).predict(model, rows, ckpt_path=models["Ulm"]).values()
    named = FedPer.load_from_checkpoint(models["Ulm"], client="Ulm")
    by_id = FedPer.load_from_checkpoint(models["Ulm"], client=2)
    assert len(own) == len(rows) and equal(named.state_dict(), by_id.state_dict())
    for line, words in (
        ("--client Jena", "Jena is not at this site"),
        ("--ckpt_path some.ckpt", "give best or last"),
        ("--config gone.yaml", "gone.yaml is no file"),
    ):
        assert words in refusal(f"predict --state-dir {deployment.states(1)} --data raw.csv {line}", capsys)


@pytest.mark.exhaustive
def test_costs_at_sites_are_measured_and_predicted_in_dollars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deployment = Deployment(tmp_path, "FedPer", COSTS)
    figures = deployment.run()
    pfl(
        "fit --config simulation.yaml --trainer.engine sequential --trainer.default_root_dir here "
        "--trainer.enable_progress_bar false --trainer.enable_model_summary false"
    )
    (file,) = Path("here").rglob("clients.csv")
    here = {row["name"]: row for row in read_csv(file)}
    for node, names in SITES.items():
        rows = costly(raw(names))
        lines = predict(f"--state-dir {deployment.states(node)} --data raw.csv --ckpt_path last")
        errors: dict[str, list[float]] = {}
        for line in lines:
            own = errors.setdefault(line["client"], [])
            own.append(abs(float(line["prediction"]) - rows["cost"].iloc[int(line["row"])]))
        for name in names:
            told = float(figures[name]["test/mae"])
            assert told > 1000 and np.mean(errors[name]) == pytest.approx(told, rel=1e-4)
            assert told == pytest.approx(float(here[name]["test/mae"]), rel=1e-4)
    # a model that leaves its site knows its unit, by the client's name and by none
    path = models_in(federation_in(deployment.states(1)), best=False)["Ulm"]
    alone, named = FedPer.load_from_checkpoint(path), FedPer.load_from_checkpoint(path, client="Ulm")
    mean = table().pipe(costly).query("site == 'Ulm' and part == 'train'")["cost"].mean()
    assert alone.target_scale == named.target_scale and named.target_scale.mean[0] == pytest.approx(mean, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["PerFedAvg", "KNNPer", "FedALA"])
def test_a_model_that_needs_samples_takes_those_of_the_site(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deployment = Deployment(tmp_path, method)
    figures = deployment.run()
    rows = raw(SITES[1])
    lines = predict(f"--state-dir {deployment.states(1)} --data raw.csv")
    assert accuracies(lines, rows) == {name: float(figures[name]["test/acc"]) for name in SITES[1]}
