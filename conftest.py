"""What holds for tests and doctests."""

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "src" / "pfl_lightning"
FLOWER = {PACKAGE / "flower", PACKAGE / "resident.py"}
"""The modules that import Flower."""


class Unavailable(pytest.File):
    """A module whose doctests are skipped, since it imports a package that only an extra installs."""

    def collect(self) -> list[pytest.Item]:
        """Skip."""
        pytest.skip("needs the extra flower, and Python 3.11 or newer", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Skip doctests of modules that import Flower where it isn't installed."""
    collectors = yield
    if not FLOWER.isdisjoint({file_path, *file_path.parents}) and find_spec("flwr") is None:
        return [Unavailable.from_parent(parent, path=file_path) for _ in collectors]
    return collectors
