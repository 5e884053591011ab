"""What documents show as code runs."""

import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from command import QUIET, pfl
from federations import fit
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits, Natural, OwnedData
from pfl_lightning.nets import MLP
from tiny_datasets import WRITERS, write

ROOT = Path(__file__).parents[1]


def blocks(document: str) -> list[str]:
    """The document's pieces of Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def shown(document: str) -> dict[str, Any]:
    """What the document's Python defines."""
    names: dict[str, Any] = {}
    for block in blocks(document):
        exec(block, names)
    return names


def test_a_method_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = shown("CONTRIBUTING.md")
    torch.save({"x": torch.randn(60, 12), "y": torch.arange(60) % 3}, "shops.pt")
    data = names["Shops"](num_clients=4, partitioner=names["InOrder"](), batch_size=5)
    client = names["Confident"](weight=0.5, input_shape=(12,), num_classes=3, net=MLP)
    ended = fit(client, data, aggregator=names["Median"](), max_rounds=2)
    assert ended.federation.method == "Confident+Median"
    assert ended.rows[-1]["train/loss"] > 0


def test_the_snippet_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rounds: list[int] = []

    class Short(FederatedTrainer):
        def __init__(self, max_rounds: int, **kwargs: Any) -> None:
            rounds.append(max_rounds)
            super().__init__(max_rounds=1, enable_progress_bar=False, enable_model_summary=False, **kwargs)

    monkeypatch.setattr("pfl_lightning.FederatedTrainer", Short)
    names = shown("README.md")
    assert rounds == [20] and isinstance(names["data"], Digits)


def commands(document: str) -> list[str]:
    """The lines of ``pfl-lightning`` that the document's pieces of shell call, with all their loops gone through."""
    pieces = re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", (ROOT / document).read_text(), re.MULTILINE)
    told = 'pfl-lightning() { printf "%q " "$@"; echo; }; python() { :; }\n'
    script = told + textwrap.dedent("".join(piece for piece in pieces if "pfl-lightning" in piece))
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True)
    # of a loop over methods one line: each method's file is tested beside these protocols' own
    return list({re.sub(r"methods/\w+", "", line): line for line in done.stdout.splitlines()}.values())


LEDGER = [
    pytest.param(line, id=f"{name}-{k}", marks=pytest.mark.exhaustive if k > 2 else ())
    for name in ("claims", "privacy", "results", "robustness")
    for k, line in enumerate(commands(f"docs/{name}.md"))
]


def run_of(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The run that a command is, or the last one that it starts."""
    if not line.startswith("compare"):
        return line
    with pytest.raises(SystemExit) as ended:
        pfl([*shlex.split(line), "--commands", "--out", "runs"])
    assert not ended.value.code
    *_, last = capsys.readouterr().out.splitlines()
    return last[last.index("fit ") :]


@pytest.mark.parametrize("line", LEDGER)
@pytest.mark.by_default("claims-0", "privacy-1", "privacy-2", "robustness-2")
def test_each_command_of_the_ledger_makes_runs_that_there_can_be(line, capsys, monkeypatch):
    """It runs for two rounds with a few clients of random samples."""
    line = run_of(line, capsys)
    with pytest.raises(SystemExit) as ended:
        pfl([*shlex.split(line), "--print_config"])
    assert not ended.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_rounds"] > 0
    # torchvision knows the checksums of the real files
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: Path(path).is_file())
    data = config["data"]["class_path"].rpartition(".")[2]
    length = "local_epochs" if config["trainer"]["local_epochs"] else "local_steps"
    small = f"--trainer.max_rounds 2 --trainer.{length} 1"
    if data in WRITERS:
        root = write(data, Path("files"), 1000)
        small += f" --data.root {root}"
        if data not in ("FedHeartDisease", "FedTcgaBrca"):  # their files are their clients
            small += " --data.max_samples 900 --data.num_clients 5 --data.new_clients 0"
    if "samples_per_client" in config["data"]["init_args"].get("partitioner", {}).get("init_args", {}):
        small += " --data.partitioner.samples_per_client 40"
    pfl([*shlex.split(line), *shlex.split(f"{small} {QUIET} --trainer.default_root_dir small")])
    (end,) = Path("small").rglob("summary.json")
    assert len((end.parent / "rounds.csv").read_text().splitlines()) == 3


SOURCES = blocks("docs/data.md")
PACKAGES = {"TableData": "pandas", "HFData": "datasets", "FlowerDatasets": "datasets", "ChatData": "transformers"}


@pytest.mark.parametrize("block", SOURCES, ids=range(len(SOURCES)))
@pytest.mark.by_default(but=["11"])
def test_each_source_of_data(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, package in PACKAGES.items():
        if name in block:
            pytest.importorskip(package, reason="needs an extra, as the page says")
    assert len(block.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(block, names)
    data = names["data"] if "data" in names else names["Rivers"](num_clients=None, partitioner=Natural())
    data.setup()
    names_known = data.num_clients if isinstance(data.partitioner, Natural) else 0
    assert data.num_clients > 1 and len(data.client_names) == names_known


def test_the_sources_are_all_shown():
    text = " ".join(SOURCES)
    assert all(kind.__name__ in text for kind in OwnedData.__subclasses__() if kind.__module__.count(".") == 3)


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert all((path.parent / link).exists() for link in links)


def test_the_page_about_predictions(tmp_path, monkeypatch):
    pytest.importorskip("pandas", reason="needs the extra tables")
    monkeypatch.chdir(tmp_path)
    names = shown("docs/predict.md")
    assert list(names["predicted"]) == ["Bremen", "Ulm"] and names["predicted"]["Ulm"].class_names == ["no", "yes"]
    x = names["data"].inputs(names["rows"], "Bremen")
    outputs = torch.export.load("bremen.pt2").module()(x)
    assert torch.allclose(outputs, names["predicted"]["Bremen"].outputs, atol=1e-6)
