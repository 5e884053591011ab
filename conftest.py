"""What holds for tests and doctests."""

from collections.abc import Generator
from hashlib import sha256
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
    group.addoption("--draw", type=float, default=1, metavar="SHARE", help="run a share of the exhaustive tests")
    group.addoption("--drawn-by", default="", metavar="TEXT", help="what `--draw` goes by, such as a commit")
    group.addoption("--note-passed", type=Path, metavar="FILE", help="write the names of the tests that pass")
    group.addoption("--leave-out", type=Path, metavar="FILE", help="leave out tests by a file of `--note-passed`")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say how to draw the same tests again."""
    share, by = config.getoption("draw"), config.getoption("drawn_by")
    return f"of exhaustive tests a share: --draw {share} --drawn-by {by!r}" if share < 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another run has shown, and exhaustive tests that aren't drawn."""
    file, share, by = (config.getoption(name) for name in ("leave_out", "draw", "drawn_by"))
    shown = set() if file is None else set(file.read_text().splitlines())

    def is_left_out(item: pytest.Item) -> bool:
        is_exhaustive = item.get_closest_marker("exhaustive") is not None
        return item.nodeid in shown or (is_exhaustive and not is_drawn(item.nodeid, share, by))

    if left_out := {item for item in items if is_left_out(item)}:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def is_drawn(test: str, share: float, by: str) -> bool:
    """Whether a draw takes a test; of each test alone, so that a test more or less changes nothing for the others."""
    return int.from_bytes(sha256(f"{by} {test}".encode()).digest()[:8], "big") < share * 2**64


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
