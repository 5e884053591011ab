"""What follows from the methods' files and configurations is as `python docs/catalogue.py` writes it."""

import importlib
from pathlib import Path

import pytest

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
