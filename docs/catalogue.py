"""Write all that follows from the methods' files and configurations: exports, registry, traffic, tables of pages.

python docs/catalogue.py                # write stale sections, and measure methods without figures
python docs/catalogue.py FedPer FedBN   # measure these again too

A configuration is a method, by the name at the head of its first line, if comments at its end say more, in YAML:

family: one of families.yaml.
picture: its idea, in the words of ideas.py.
mean: what a robust rule in place of the server's mean applies to, or why the server takes none; the usual if left out.
tells: what entries of its updates tell of a client, if no other method says so.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

# nothing of the package: it may name a method whose file is gone, until exports and registry are written
HERE = Path(__file__).parent
PACKAGE = HERE.parent / "src" / "pfl_lightning"
SAID = re.compile(r"^# ((?:family|picture|mean|tells): .*)$", re.MULTILINE)
"""What the comments at a configuration's end say."""


@cache
def configurations() -> list[dict[str, Any]]:
    """Return the configurations of methods, each with its file, its name, and what the comments at its end say."""
    texts = {path.stem: path.read_text() for path in sorted((HERE.parent / "configs" / "methods").glob("*.yaml"))}
    return [
        {"file": file, "name": text.removeprefix("# ").partition(":")[0]}
        | yaml.safe_load(text)
        | (yaml.safe_load("\n".join(SAID.findall(text))) or {})
        for file, text in texts.items()
    ]


@cache
def families() -> list[dict[str, str]]:
    """Return the families of families.yaml."""
    return yaml.safe_load((HERE / "families.yaml").read_text())


@cache
def declared() -> dict[str, dict[str, Any]]:
    """Return the configurations that are methods, by name and in the order of all tables: by family and name."""
    order = [family["family"] for family in families()]
    found = [each for each in configurations() if "family" in each]
    for each in found:
        if each["family"] not in order:
            sys.exit(f"{each['file']}.yaml: family {each['family']} is none of {'; '.join(order)}.")
    found.sort(key=lambda each: (order.index(each["family"]), each["name"].lower()))
    return {each["name"]: each for each in found}


def members(family: str) -> list[str]:
    """Return the methods of a family."""
    return [name for name, each in declared().items() if each["family"] == family]


@cache
def classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Return the classes of clients, aggregators and methods by name, each with the file that defines it."""
    return {
        node.name: (path, node)
        for room in ("client", "server", "methods")
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def bases(name: str) -> list[str]:
    """Return the names of those bases of a class that are in `classes`."""
    names = (ast.unparse(base).partition("[")[0] for base in classes()[name][1].bases)
    return [base for base in names if base in classes()]


def below(base: str) -> dict[str, str]:
    """Return the subclasses of a class in the files of methods, at any depth, each with its file."""
    found, new = set(), {base}
    while new:
        found |= new
        new = {name for name in classes() if found.intersection(bases(name))} - found
    paths = {name: classes()[name][0] for name in sorted(found)}
    return {name: path.stem for name, path in paths.items() if path.parent.name == "methods"}


@cache
def servers() -> dict[str, str]:
    """Return the server sides of methods, each with its file."""
    return below("Aggregator")


@cache
def clients() -> dict[str, str]:
    """Return the client sides of configurations, and what files name in ``__all__`` beside them, each with its file."""
    configured = {each["model"]["class_path"] for each in configurations()}
    found = {name: file for name, file in below("ClientModule").items() if name in configured}
    for path in sorted((PACKAGE / "methods").glob("[!_]*.py")):
        if own := re.search(r"^__all__ = (\[.*?\])$", path.read_text(), re.DOTALL | re.MULTILINE):
            found |= dict.fromkeys(ast.literal_eval(own[1]), path.stem)
    return {name: file for name, file in found.items() if name not in servers()}


def in_order(names: Iterable[str]) -> list[str]:
    """Return names as ruff sorts them, with those in capitals first."""
    return sorted(names, key=lambda name: (not name.isupper(), name))


def imports(of: Mapping[str, str]) -> str:
    """Return the imports of classes from their files, a line a file."""
    names: dict[str, list[str]] = {}
    for name in in_order(of):
        names.setdefault(of[name], []).append(name)
    return "\n".join(f"from pfl_lightning.methods.{file} import {', '.join(names[file])}" for file in sorted(names))


def rows(begin: str, cells: Iterable[str], end: str) -> str:
    """Return values between two brackets, a line each."""
    return "\n".join([begin, *(f"    {cell}," for cell in cells), end])


def exports_of_methods() -> str:
    """Return the imports and ``__all__`` of `pfl_lightning.methods`."""
    alone = sorted({*servers().values()} - {*clients().values()})
    return "\n".join(
        [
            "# files of server sides alone: imported, a class is known to the command line by its name",
            rows("from pfl_lightning.methods import (  # noqa: F401", alone, ")"),
            imports(clients()),
            rows("\n__all__ = [", (f'"{name}"' for name in in_order(clients())), "]"),
        ]
    )


def exports_of_aggregators() -> str:
    """Return the imports and ``__all__`` of `pfl_lightning.aggregators`."""
    return "\n".join(
        [
            imports(servers()),
            "from pfl_lightning.server import *  # noqa: F403",
            "from pfl_lightning.server import __all__ as bases",
            rows("\n__all__ = [", (f'"{name}"' for name in in_order(servers())), "]"),
        ]
    )


@cache
def own_server(client: str) -> str:
    """Return the name of the aggregator that a client module brings along."""
    found = re.search(r"def configure_aggregator.*?return (\w+)\(", ast.unparse(classes()[client][1]), re.DOTALL)
    return found[1] if found else own_server(bases(client)[0])


def pair(each: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of a configuration's client module and aggregator."""
    client = each["model"]["class_path"]
    return client, each.get("aggregator", {}).get("class_path") or own_server(client)


def server(each: Mapping[str, Any]) -> list[str]:
    """Return the aggregator of a configuration as an argument in the registry; none for the client module's own.

    Args:
        each: the configuration.
    """
    client, kind = pair(each)
    settings = each.get("aggregator", {}).get("init_args", {})
    if "aggregators" in settings:
        parts = (f"a.{part['class_path']}({arguments(part['init_args'])})" for part in settings["aggregators"])
        return [f"lambda: a.AggregatorList([{', '.join(parts)}])"]
    # methods of the same two classes are told apart by settings that not all of them have
    same = [
        one.get("aggregator", {}).get("init_args", {}) for one in declared().values() if pair(one) == (client, kind)
    ]
    own = {name: value for name, value in settings.items() if not all(name in one for one in same)}
    if own:
        return [f"partial(a.{kind}, {arguments(own)})"]
    return [] if kind == own_server(client) else [f"a.{kind}"]


def arguments(settings: Mapping[str, Any]) -> str:
    """Return settings as the arguments of a call."""
    return ", ".join(f"{name}={value!r}".replace("'", '"') for name, value in settings.items())


def registry() -> str:
    """Return the registry's tuple, a line a method."""
    entries = []
    for name, each in declared().items():
        parts = [f'"{name}"', f"m.{pair(each)[0]}", *server(each), f'file="{each["file"]}"']
        call = f"Method({', '.join(parts)})"
        # in lines like those of ruff
        entries.append(call if len(call) <= 115 else textwrap.indent(rows("Method(", parts, ")"), "    ").strip())
    return rows("METHODS = (", entries, ")")


def section(text: str, name: str, content: str, comment: str = "# {}") -> str:
    r"""Return a text with new content between the marks of a section.

    >>> print(section("# a: old\n1\n# end of a", "a", "2"))
    # a: generated by `python docs/catalogue.py`
    2
    # end of a

    Args:
        text: the text.
        name: the section's name.
        content: the new content.
        comment: a comment of the text's language, with braces for the words.
    """
    begin, end = comment.format(f"{name}: generated by `python docs/catalogue.py`"), comment.format(f"end of {name}")
    first = re.escape(comment.format(f"{name}: @")).replace("@", ".*")
    before, _, rest = re.split(f"({first})\n", text, maxsplit=1)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


CODE: dict[Path, tuple[str, Callable[[], str]]] = {
    PACKAGE / "methods" / "__init__.py": ("exports", exports_of_methods),
    PACKAGE / "aggregators" / "__init__.py": ("exports", exports_of_aggregators),
    PACKAGE / "methods" / "registry.py": ("methods", registry),
}
"""Each file with its generated section."""


def code(path: Path) -> str:
    """Return a file of `CODE` as it should be."""
    name, content = CODE[path]
    return section(path.read_text(), name, content())


if __name__ == "__main__":
    for path in CODE:
        path.write_text(code(path))
    import tables

    tables.write({*sys.argv[1:]})
