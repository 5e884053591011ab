"""What follows from the methods' files and configurations is as `python docs/catalogue.py` writes it."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

from federations import fit, make_client, read_csv
from pfl_lightning.methods.registry import METHODS

ROOT = Path(__file__).parents[1]
SAID = "run python docs/catalogue.py"


@pytest.fixture(scope="module")
def catalogue():
    """The command's part that reads texts alone, and its tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("catalogue"), importlib.import_module("tables")


def test_exports_and_registry_follow_from_the_files(catalogue):
    for path in catalogue[0].CODE:
        assert path.read_text() == catalogue[0].code(path), SAID


def test_the_table_of_traffic_has_the_methods_with_their_papers_and_classes(catalogue):
    _, tables = catalogue
    rows = tables.stored()
    assert [row["method"] for row in rows] == [method.name for method in METHODS], SAID
    assert rows == [row | tables.facts(method) for row, method in zip(rows, METHODS, strict=True)], SAID


def test_the_pages_have_their_tables(catalogue):
    _, tables = catalogue
    for page in tables.PAGES:
        assert (ROOT / page).read_text() == tables.page(page), f"{page}: {SAID}"


def test_no_public_name_and_no_argument_vanishes_unseen(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    names = importlib.import_module("public_names")
    there, now = (set(text.splitlines()) for text in (names.FILE.read_text(), names.listed()))
    assert there == now, f"gone: {sorted(there - now)}, new: {sorted(now - there)}; run python docs/public_names.py"
    assert {"pfl-lightning fit", "pfl_lightning.Aggregator.aggregate(updates, round)"} <= now


def test_promised_columns_and_entries_are_in_a_run(tmp_path):
    page = (ROOT / "docs" / "promises.md").read_text()
    ended = fit(make_client(), root=tmp_path, max_rounds=1)
    summary = json.loads((ended.folder / "summary.json").read_text())
    for name, there in (
        ("rounds.csv", ended.rows[-1]),
        ("clients.csv", read_csv(ended.folder / "clients.csv")[0]),
        ("summary.json", summary),
    ):
        (told,) = re.findall(rf"of `{name}`: (.*?)\.(?:\s|$)", page, re.DOTALL)
        promised = [word for word in re.findall(r"`([\w/]+)`", told) if not word.startswith("_")]
        promised += [f"val/acc{end}" for end in re.findall(r"`(_\w+)`", told)]
        assert len(promised) > 3 and not set(promised) - there.keys(), name


CACHED = ("configurations", "families", "declared", "classes", "servers", "clients", "own_server")


@pytest.fixture
def checkout(tmp_path, monkeypatch, catalogue):
    """A copy of what exports and registry follow from, and the command's part that reads it."""
    texts, _ = catalogue
    for folder in (
        "docs",
        "configs/methods",
        *(f"src/pfl_lightning/{room}" for room in ("client", "server", "methods")),
    ):
        (tmp_path / folder).mkdir(parents=True)
        for file in (ROOT / folder).glob("*.[py][ya]*"):
            shutil.copy(file, tmp_path / folder)
    monkeypatch.setattr(texts, "HERE", tmp_path / "docs")
    monkeypatch.setattr(texts, "PACKAGE", tmp_path / "src" / "pfl_lightning")
    for name in CACHED:
        getattr(texts, name).cache_clear()
    yield tmp_path, texts
    for name in CACHED:
        getattr(texts, name).cache_clear()


HEAD = "# Mine+: a method.\n# family: Clusters\n# picture: {}\n"


def test_a_method_comes_by_its_file_and_its_configuration(checkout):
    root, texts = checkout
    (root / "src/pfl_lightning/methods/mine.py").write_text(
        "class Mine(FedAvg): ...\nclass Ours(WeightedAverage): ...\n"
    )
    (root / "configs/methods/mine.yaml").write_text(
        f"{HEAD}model: {{class_path: Mine}}\naggregator: {{class_path: Ours}}\n"
    )
    assert "from pfl_lightning.methods.mine import Mine\n" in texts.exports_of_methods()
    assert "from pfl_lightning.methods.mine import Ours\n" in texts.exports_of_aggregators()
    assert '    Method("Mine+", m.Mine, a.Ours, file="mine"),\n' in texts.registry()


def test_a_pair_that_is_there_is_told_apart_by_its_own_settings(checkout):
    root, texts = checkout
    ifca = "model: {class_path: FedAvg}\naggregator: {class_path: CFL, init_args: {eps1: 0.4, eps2: 0.9, name: x}}\n"
    (root / "configs/methods/mine.yaml").write_text(HEAD + ifca)
    assert 'Method("Mine+", m.FedAvg, partial(a.CFL, name="x"), file="mine")' in texts.registry()
    assert 'Method("CFL", m.FedAvg, a.CFL, file="cfl")' in texts.registry()


def test_a_method_goes_with_its_files(checkout):
    root, texts = checkout
    (root / "src/pfl_lightning/methods/ifca.py").unlink()
    (root / "configs/methods/ifca.yaml").unlink()
    for text in (texts.exports_of_methods(), texts.exports_of_aggregators(), texts.registry()):
        assert "cfl" in text and "ifca" not in text


def test_a_family_that_there_is_not_is_refused(checkout):
    root, texts = checkout
    text = HEAD.replace("Clusters", "Cluster") + "model: {class_path: FedAvg}"
    (root / "configs/methods/mine.yaml").write_text(text)
    with pytest.raises(SystemExit, match=r"mine\.yaml: family Cluster is none of .*Clusters"):
        texts.registry()
