"""Pages that each build makes: README and CONTRIBUTING, one a room of the package, and one a file of methods."""

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

import pfl_lightning
from pfl_lightning.methods.registry import METHODS, Method

HERE = Path(__file__).parent
PACKAGE = Path(pfl_lightning.__file__).parent
ROOMS = (
    *("client", "aggregators", "methods", "federation", "selection", "privacy", "engines", "data", "tasks", "nets"),
    *("callbacks", "plots", "runs", "contract", "flower", "cli"),
)
"""Folders of the package, those first that a reader begins with."""
LEDGER = ("cwfedavg", "fedawa", "fedrema", "fedclassavg")
"""Methods whose papers' claims have a section of their own in claims.md."""


def modules(folder: Path) -> Iterator[str]:
    """The modules of a folder with all folders inside, by their dotted names."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(module: str) -> Path:
    """The file of a module or package."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def first_line(module: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(file_of(module).read_text())) or "").partition("\n")[0]


def documented(module: str) -> str:
    """The directive that documents a module; a package's names are documented where they are defined."""
    members = "\n   :no-members:" if file_of(module).name == "__init__.py" else ""
    return f"```{{eval-rst}}\n.. automodule:: {module}{members}\n```\n"


def room(name: str) -> str:
    """The page of a room: its modules one below the other, without files of methods, which have pages of their own."""
    own, *others = modules(PACKAGE / name)
    own_pages = set(by_module()) if name == "methods" else set()
    sections = [f"## {each}\n\n{documented(each)}" for each in others if each not in own_pages]
    return "\n".join([f"# {own}\n", documented(own), *sections])


def by_module() -> dict[str, list[Method]]:
    """The methods by the module that has what tells them from others."""
    found: dict[str, list[Method]] = {}
    for method in METHODS:
        own = method.client if method.aggregator is None else type(method.new_aggregator())
        bearer = own if own.__module__.startswith("pfl_lightning.methods.") else method.client
        found.setdefault(bearer.__module__, []).append(method)
    return found


def measured() -> dict[str, dict[str, str]]:
    """What each method sends, keeps and needs, by its name."""
    with (PACKAGE / "methods" / "table.csv").open() as table:
        return {row["method"]: row for row in csv.DictReader(table)}


def to(part: type) -> str:
    """A reference to a class by its own name."""
    return f"{{py:obj}}`{part.__qualname__} <{part.__module__}.{part.__qualname__}>`"


def section(method: Method, row: dict[str, str]) -> str:
    """How a method is run, what it sends and keeps, and where its results are."""
    paper, url = method.paper
    client, aggregator = method.client, type(method.new_aggregator())
    config = PACKAGE / "configs" / "methods" / f"{method.file}.yaml"
    lines = [
        f"Paper: [{paper}]({url})\n" if paper else "",
        f"Client module {to(client)}, aggregator {to(aggregator)}.\n",
        f"    pfl-lightning fit --config methods/{method.file} --config protocols/digits_dir0.1\n",
        f"```yaml\n{config.read_text()}```\n",
        "| up | down | stays with the client | needs | different nets |\n| --- | --- | --- | --- | --- |",
        "| " + " | ".join(row[key] for key in ("up", "down", "stays", "needs", "different nets")) + " |\n",
        "In multiples of the model's bytes; see [all methods](../methods.md).\n",
    ]
    if method.file in LEDGER:
        lines.append(f"What became of its paper's claims: [the ledger](../claims.md#{method.file}).\n")
    return "\n".join(line for line in lines if line)


def method_page(module: str, methods: list[Method]) -> str:
    """The page of a file of methods."""
    rows = measured()
    title = ", ".join(method.name for method in methods)
    sections = [section(method, rows[method.name]) for method in methods]
    if len(methods) > 1:
        sections = [f"## {method.name}\n\n{text}" for method, text in zip(methods, sections, strict=True)]
    return "\n".join([f"# {title}\n", *sections, "## Source\n", documented(module)])


def tree(title: str, intro: str, names: list[str]) -> str:
    """A page that lists others."""
    return "\n".join([f"# {title}\n", f"{intro}\n", "```{toctree}\n:maxdepth: 1\n", *names, "```\n"])


def write(path: Path, text: str) -> None:
    """Writes a page, unless it is there as it is: the next build reads what changed alone."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def from_root(name: str) -> str:
    """A page that lies beside this folder, its links as they are from here."""
    text = (HERE.parent / name).read_text()
    text = re.sub(r"(!?\[[^]]*\])\(docs/", r"\1(", text)
    text = re.sub(r"\]\((notebooks|examples)/", r"](../\1/", text)
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)")


def generate(app: Sphinx) -> None:
    """Writes all pages that no one wrote by hand."""
    write(HERE / "readme.md", from_root("README.md"))
    write(HERE / "contributing.md", from_root("CONTRIBUTING.md"))
    files = by_module()
    for module, methods in files.items():
        write(HERE / "method" / f"{module.rpartition('.')[2]}.md", method_page(module, methods))
    names = [module.rpartition(".")[2] for module in files]
    intro = "A page a file of methods: how to run them, what they send, their settings, and the source's own words."
    write(HERE / "method" / "index.md", tree("A page a method", intro, names))
    for name in ROOMS:
        write(HERE / "reference" / f"{name}.md", room(name))
    flat = [each for each in modules(PACKAGE) if file_of(each).parent == PACKAGE and each != "pfl_lightning"]
    write(
        HERE / "reference" / "root.md",
        "\n".join(["# pfl_lightning\n", documented("pfl_lightning"), *map(documented, flat)]),
    )
    intro = "Every public name of the package, room by room."
    write(HERE / "reference" / "index.md", tree("Reference", intro, ["root", *ROOMS]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Writes the pages before any is read."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True}
