"""The plan of the package: which way its imports go, and where other packages' private names are."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import pfl_lightning

PACKAGE = Path(pfl_lightning.__file__).parent
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
ORDER = (
    ("internals", "seeds", "settings", "stopping", "transfers"),
    ("messages",),
    ("nets", "tasks"),
    ("data",),
    ("client", "selection"),
    ("server",),
    ("methods",),
    ("aggregators",),
    ("methods.registry",),
    ("contract",),
    ("engines",),
    ("runs",),
    ("plots",),
    ("federation",),
    ("compression", "privacy", "schedules"),
    ("callbacks",),
    ("trainer",),
    ("cli",),
    ("flower",),
    ("resident",),
    ("cli.main",),
    ("__main__",),
)
"""Rooms from the ground up: each imports from those below it, and from its own. A file above its room stands alone."""

LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def parsed(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


@cache
def nodes_of(name: str) -> list[ast.AST]:
    """All nodes of a module's tree; a walk takes as long as parsing."""
    return parsed(MODULES[name].read_text())


def imports(nodes: list[ast.AST]) -> Iterator[str]:
    """The modules of the package that a file imports, at its top or anywhere in it, or has the name of in a text."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pfl_lightning"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                # a constant of the root, which imports no room before one of its names is asked for
                if whole == "pfl_lightning.__version__":
                    continue
                yield whole if whole in MODULES else str(node.module)
        # for import_module, here or in a file that reads it from this one
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            yield str(node.value)


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imports(nodes_of(name))) - {name} for name in MODULES}


def room(name: str) -> str:
    inside = name.removeprefix("pfl_lightning.")
    return inside if inside in LEVEL else inside.split(".")[0]


def test_imports_by_name_count():
    assert set(imports(parsed('import_module("pfl_lightning.cli.errors")'))) == {"pfl_lightning.cli.errors"}
    assert {"pfl_lightning.flower.command", "pfl_lightning.cli.trainer_commands"} <= graph()["pfl_lightning.cli.main"]


def test_the_guide_lists_the_order():
    (listed,) = re.findall(r"From the top: (.+?)\.\s+`tests/test_house", GUIDE.read_text(), re.DOTALL)
    levels = [set(re.findall(r"`([\w.]+)`", level)) for level in listed.split(";")]
    assert levels == [set(rooms) for rooms in reversed(ORDER)]


def test_every_room_has_its_place():
    assert {room(name) for name in MODULES} == LEVEL.keys() - ({"settings"} - {room(name) for name in MODULES})


def test_no_circle():
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_go_one_way():
    level = {name: LEVEL[room(name)] for name in MODULES}
    upwards = [(name, other) for name in MODULES for other in graph()[name] if level[other] >= level[name]]
    assert not [(name, other) for name, other in upwards if room(other) != room(name)]


def test_nothing_is_hidden_from_the_graph():
    hidden = [
        (name, ast.unparse(line))
        for name in MODULES
        for node in nodes_of(name)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for line in node.body
        if "pfl_lightning" in ast.unparse(line)
    ]
    assert not hidden


def test_files_of_tests_have_names_of_their_own():
    # pytest imports them by their names alone, and collects no second one of a name
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_the_root_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= 10


# Private names of other packages


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that a file gives to functions, classes and variables, and to attributes of its own objects."""
    found = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            found.add(node.attr)
    return found


def of_itself(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


@cache
def own() -> set[str]:
    return set().union(*(defined(nodes_of(name)) for name in MODULES))


PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Documented names, of named tuples and of ``os``."""


def foreign(nodes: list[ast.AST]) -> Iterator[str]:
    """Private names in a file that can't be its own, or for ``self`` the package's own."""
    here = defined(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PUBLIC:
            if node.attr not in (own() if of_itself(node) else here):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in here:
                yield ast.unparse(node)


@cache
def privates_of(base: type) -> frozenset[str]:
    """Private attributes and methods of a class of another package, by its source."""
    try:
        read = re.findall(r"\bself\.(\w+)", inspect.getsource(base))
    except (OSError, TypeError):
        read = []
    return frozenset(filter(is_private, {*vars(base), *read}))


def taken_from_bases(name: str) -> Iterator[str]:
    """Private names that classes of a module share with their bases of other packages."""
    module = importlib.import_module(name)
    for node in nodes_of(name):
        made = getattr(module, node.name, None) if isinstance(node, ast.ClassDef) else None
        if not isinstance(made, type):
            continue
        bases = [base for base in made.__mro__ if not base.__module__.startswith(("pfl_lightning", "builtins"))]
        known = frozenset().union(*map(privates_of, bases))
        inside = list(ast.walk(ast.Module(node.body, [])))
        used = defined(inside) | {each.attr for each in inside if isinstance(each, ast.Attribute) and of_itself(each)}
        yield from sorted(used & known)


ALLOWED = {
    "pfl_lightning.trainer": {"_run_stage"},
    "pfl_lightning.engines.client_parallel": {"_configure_launcher"},
    "pfl_lightning.cli.trainer_commands": {"_parse_ckpt_path"},
}
"""Private methods that only a subclass can override; ``internals/of_lightning.py`` says why."""
OUTSIDE = [name for name in MODULES if room(name) != "internals"]


@pytest.mark.parametrize(
    "line",
    [
        "from torch._dynamo import lookup_backend",
        "import torch._C",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "tensor._version",
        "logger._id = 3",
        "getattr(action, '_typehint')",
        "self._no_such_name()",
    ],
)
def test_private_names_are_found(line):
    assert list(foreign(parsed(line)))


def test_private_names_of_others_are_in_one_room():
    found = [(name, private) for name in OUTSIDE for private in foreign(nodes_of(name))]
    assert not found


def test_texts_name_no_private_name_of_the_room():
    nodes = [node for name in MODULES if name not in OUTSIDE for node in nodes_of(name)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {text for text in texts if text.isidentifier() and is_private(text)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)}
    assert {"_last_lr", "_growth_tracker", "_parameters"} <= names
    for name in OUTSIDE:
        assert not names & {node.value for node in nodes_of(name) if isinstance(node, ast.Constant)}, name


def test_classes_share_no_private_name_with_a_base_of_others():
    for name in OUTSIDE:
        # Flower isn't there for each version of Python
        if room(name) not in ("flower", "resident") or find_spec("flwr"):
            assert set(taken_from_bases(name)) <= ALLOWED.get(name, set()), name
    # names that are allowed and not used would hide a new use
    assert {name: set(taken_from_bases(name)) for name in ALLOWED} == ALLOWED
