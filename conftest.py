"""What holds for tests and doctests."""

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent / "src" / "pfl_lightning"
FLOWER = {PACKAGE / "flower", PACKAGE / "resident.py"}
"""The modules that import Flower."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a second run leave out what a first one has shown, as `.ci/run` does."""
    group = parser.getgroup("several runs")
    group.addoption("--note-passed", type=Path, metavar="FILE", help="write the names of the tests that pass")
    group.addoption("--leave-out", type=Path, metavar="FILE", help="leave out tests by a file of `--note-passed`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another run has shown."""
    if (file := config.getoption("leave_out")) is None:
        return
    shown = set(file.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in shown])
    items[:] = [item for item in items if item.nodeid not in shown]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Note the tests that have passed, of all workers."""
    if (file := config.getoption("note_passed")) is not None:
        file.write_text("".join(f"{report.nodeid}\n" for report in terminalreporter.stats.get("passed", ())))


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
