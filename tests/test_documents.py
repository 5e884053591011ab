"""What documents show as code runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from federations import fit
from pfl_lightning import FederatedTrainer
from pfl_lightning.data import Digits, Natural, OwnedData
from pfl_lightning.nets import MLP

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


SOURCES = blocks("docs/data.md")
PACKAGES = {"TableData": "pandas", "HFData": "datasets"}


@pytest.mark.parametrize("block", SOURCES, ids=range(len(SOURCES)))
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
    assert data.num_clients == len(data.client_names) > 1


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
