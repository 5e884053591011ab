"""The plan of the package: which way its imports go."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pfl_lightning

PACKAGE = Path(pfl_lightning.__file__).parent
ORDER = (
    ("seeds", "settings", "stopping", "transfers"),
    ("messages", "nets", "tasks"),
    ("data",),
    ("client", "selection"),
    ("aggregators",),
    ("methods", "privacy"),
    ("contract",),
    ("engines",),
    ("compression",),
    ("runs",),
    ("plots",),
    ("federation",),
    ("callbacks",),
    ("trainer",),
    ("cli",),
    ("flower",),
    ("__main__",),
)
"""Rooms from the ground up: each imports from those below it, and from its own."""

LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """The modules of the package that one imports, at its top or anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pfl_lightning"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)


GRAPH = {name: set(imports(path)) - {name} for name, path in MODULES.items()}


def room(name: str) -> str:
    return name.split(".")[1]


def test_every_room_has_its_place():
    assert {room(name) for name in MODULES} == LEVEL.keys() - ({"settings"} - {room(name) for name in MODULES})


def test_no_circle():
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    upwards = {other for other in GRAPH[name] if room(other) != room(name) and LEVEL[room(other)] >= LEVEL[room(name)]}
    assert not upwards


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_hidden_from_the_graph(name):
    hidden = [
        ast.unparse(line)
        for node in ast.walk(ast.parse(MODULES[name].read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for line in node.body
        if "pfl_lightning" in ast.unparse(line)
    ]
    assert not hidden


def test_the_root_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= 10
