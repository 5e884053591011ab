"""Pages that each build makes: README, CONTRIBUTING, notebooks, reference, gallery, and one a file of methods."""

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import catalogue
import gallery
import ideas
import usage
from public_names import ROOMS, exported
from sphinx.application import Sphinx

import pfl_lightning
from pfl_lightning.methods.registry import METHODS, Method

HERE = Path(__file__).parent
LEDGER = ("cwfedavg", "fedawa", "fedrema", "fedclassavg")
"""Methods whose papers' claims have a section of their own in claims.md."""


@cache
def by_definition() -> dict[str, str]:
    """Return the public name of each class and function by the name where it is defined."""
    names = {}
    for module in ROOMS:
        for name in exported(module):
            found = getattr(importlib.import_module(module), name)
            if hasattr(found, "__qualname__"):
                names[f"{found.__module__}.{found.__qualname__}"] = f"{module}.{name}"
    return names


def public(target: str) -> str | None:
    """Return the public name of an object or of its member; None without one.

    >>> public("pfl_lightning.server.base.Aggregator.welcome")
    'pfl_lightning.Aggregator.welcome'
    >>> public("pfl_lightning.engines.ragged.Ragged")

    Args:
        target: the dotted name where the object is defined.
    """
    parts = target.split(".")
    for end in range(len(parts), 1, -1):
        if known := by_definition().get(".".join(parts[:end])):
            return ".".join([known, *parts[end:]])
    return None


def first_sentence(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line of reStructuredText."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


@cache
def value_docs(module: str) -> dict[str, str]:
    """Return the docstrings of a module's values, by name, from the files of its folder."""
    file = Path(importlib.import_module(module).__file__)
    found = {}
    for path in sorted(file.parent.rglob("*.py") if module != "pfl_lightning" else [file]):
        body = ast.parse(path.read_text()).body
        for line, text in pairwise(body):
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found |= {target.id: str(text.value.value) for target in targets if isinstance(target, ast.Name)}
    return found


def on_its_method(found: Any) -> bool:
    """Return True if an object is documented on the page of a method."""
    return getattr(found, "__module__", None) in by_module()


def as_code(text: str) -> str:
    """Return a docstring with its names in single backticks as code; roles and code stay.

    >>> as_code("Adds :math:`x` to `Net`, as ``y``")
    'Adds :math:`x` to ``Net``, as ``y``'
    """
    return re.sub(r"(:\w+:`[^`]*`|``[^`]*``)|`([^`]+)`", lambda found: found[1] or f"``{found[2]}``", text)


def entry(module: str, name: str) -> str:
    """Return the directive that documents a name of a public module."""
    found = getattr(importlib.import_module(module), name)
    if inspect.isclass(found):
        return f".. autoclass:: {module}.{name}\n"
    if inspect.isroutine(found):
        return f".. autofunction:: {module}.{name}\n"
    text = as_code(inspect.cleandoc(value_docs(module).get(name, "")))
    return f".. py:data:: {module}.{name}\n\n" + "".join(f"   {line}\n" for line in text.splitlines())


def summary(module: str, names: list[str]) -> str:
    """Return a table of names, each with a link and the first paragraph of its docstring."""
    lines = [".. list-table::\n   :widths: 30 70\n"]
    for name in names:
        found = getattr(importlib.import_module(module), name)
        text = value_docs(module).get(name, "") if not hasattr(found, "__qualname__") else found.__doc__
        lines.append(f"   * - :py:obj:`{name} <{module}.{name}>`\n     - {as_code(first_sentence(text))}")
    return "\n".join(lines) + "\n"


def room(module: str) -> str:
    """Return a public module's page: a table of its names, and their documentation below."""
    names = sorted(exported(module), key=str.lower)
    parts = {
        "Classes": [name for name in names if inspect.isclass(getattr(importlib.import_module(module), name))],
        "Functions": [name for name in names if inspect.isroutine(getattr(importlib.import_module(module), name))],
    }
    parts["Values"] = [name for name in names if name not in {*parts["Classes"], *parts["Functions"]}]
    lines = [module, "=" * len(module), "", f"{ROOMS[module]}.", ""]
    for title, some in parts.items():
        if some:
            lines += [title, "-" * len(title), "", summary(module, some)]
    own = [name for name in names if not on_its_method(getattr(importlib.import_module(module), name))]
    if len(own) < len(names):
        lines.append("Names of one method alone are documented on the :doc:`method's page </method/index>`.\n")
    lines += ["Details", "-------", "", *(entry(module, name) for name in own)]
    return "\n".join(lines)


def by_module() -> dict[str, list[Method]]:
    """Return the methods by the module that has their own part."""
    found: dict[str, list[Method]] = {}
    for method in METHODS:
        found.setdefault(gallery.bearer(method).__module__, []).append(method)
    return found


def to(part: type) -> str:
    """Return a reference to a class by its public name."""
    return f"{{py:obj}}`{part.__qualname__} <{public(f'{part.__module__}.{part.__qualname__}')}>`"


def section(method: Method, row: dict[str, str], level: str) -> str:
    """Return a method's idea, when it is of use, how it runs from the command line and Python, and its traffic."""
    paper, url = method.paper
    client, aggregator = method.client, type(method.new_aggregator())
    rest = ("weighs by samples", "needs", "different nets")
    config = HERE.parent / "configs" / "methods" / f"{method.file}.yaml"
    lines = [
        ideas.picture(method.name, row),
        f"{gallery.idea(method)}\n",
        f"Paper: [{paper}]({url}). " if paper else "",
        f"Client module {to(client)}, aggregator {to(aggregator)}.\n",
        f"{level} When to use it\n",
        usage.when(method, row),
        f"{level} Run it\n",
        f"    {usage.command(method, row)}\n",
        f"The same from Python:\n\n```python\n{usage.snippet(method, row)}\n```\n",
        "The configuration, with the paper's settings:\n",
        f"```yaml\n{catalogue.SAID.sub('', config.read_text()).rstrip()}\n```\n",
        f"{level} Traffic and state\n",
        "| up | down | stays with the client | weighs by samples | needs | different nets |\n" + "| --- " * 6 + "|",
        "| " + " | ".join(row[key] for key in ("up", "down", "stays", *rest)) + " |\n",
        "In multiples of the model's bytes; see [all methods](../methods.md).\n",
    ]
    if method.file in LEDGER:
        lines.append(f"Verdicts on its paper's claims: [the ledger](../claims.md#{method.file}).\n")
    return "\n".join(line for line in lines if line)


def method_page(module: str, methods: list[Method]) -> str:
    """Return the page of a file of methods: how to run each, and all public names that the file defines."""
    rows = gallery.measured()
    title = ", ".join(method.name for method in methods)
    level = "##" if len(methods) == 1 else "###"
    sections = [section(method, rows[method.name], level) for method in methods]
    if len(methods) > 1:
        sections = [f"## {method.name}\n\n{text}" for method, text in zip(methods, sections, strict=True)]
    names = [known for name, known in by_definition().items() if name.rpartition(".")[0] == module]
    directives = "\n".join([f".. automodule:: {module}\n   :no-members:\n"] + [entry(*split(name)) for name in names])
    return "\n".join([f"# {title}\n", *sections, "## Reference\n", f"```{{eval-rst}}\n{directives}\n```\n"])


def split(name: str) -> tuple[str, str]:
    """Return module and last part of a dotted name."""
    module, _, last = name.rpartition(".")
    return module, last


def write(path: Path, text: str) -> None:
    """Write a page, unless it is there as it is: the next build reads only pages that changed."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def from_root(name: str) -> str:
    """Return a page of the checkout's root with links that hold in this folder."""
    text = (HERE.parent / name).read_text()
    text = re.sub(r"(!?\[[^]]*\])\(docs/", r"\1(", text)
    text = re.sub(r"\]\(notebooks/(\w+)\.ipynb", r"](tutorials/\1.ipynb", text)
    text = re.sub(r"\]\(examples/", r"](../examples/", text)
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)")


def origin(page: str) -> str:
    """Return the file of the repository to edit for a page: for a generated page, the file with the page's words.

    >>> origin("data/tables"), origin("tutorials/quickstart"), origin("method/fedper")
    ('docs/data/tables.md', 'notebooks/quickstart.ipynb', 'src/pfl_lightning/methods/fedper.py')
    >>> origin("reference/pfl_lightning.nets"), origin("readme")
    ('src/pfl_lightning/nets/__init__.py', 'README.md')

    Args:
        page: the page's name on the site.
    """
    folder, _, name = page.rpartition("/")
    generated = {
        "readme": "README.md",
        "contributing": "CONTRIBUTING.md",
        "method/index": "docs/families.yaml",
        "reference/index": "docs/public_names.py",
    }
    if page in generated:
        return generated[page]
    if folder in ("method", "reference"):
        module = importlib.import_module(f"pfl_lightning.methods.{name}" if folder == "method" else name)
        return "src/" + Path(module.__file__).relative_to(Path(pfl_lightning.__file__).parents[1]).as_posix()
    return f"notebooks/{name}.ipynb" if folder == "tutorials" else f"docs/{page}.md"


def links_to_origin(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Set the addresses where a page is edited and seen."""
    # pages without a source, such as the index, have no file
    if doctree is not None:
        theme = app.config.html_theme_options
        for way, folder in (("edit", "edit"), ("view", "blob")):
            address = f"{theme['source_repository']}/{folder}/{theme['source_branch']}/{origin(page)}"
            context[f"theme_source_{way}_link"] = address


def generate(app: Sphinx) -> None:
    """Write all pages that no one wrote by hand."""
    write(HERE / "readme.md", from_root("README.md"))
    write(HERE / "contributing.md", from_root("CONTRIBUTING.md"))
    for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
        write(HERE / "tutorials" / notebook.name, notebook.read_text().replace("](../docs/", "](../"))
    files = by_module()
    for module, methods in files.items():
        write(HERE / "method" / f"{split(module)[1]}.md", method_page(module, methods))
    pages = {method.name: f"{split(module)[1]}.md" for module, methods in files.items() for method in methods}
    listed = "\n".join(["```{toctree}", ":hidden:", ":maxdepth: 1\n", *dict.fromkeys(pages.values()), "```\n"])
    rows = gallery.measured()
    write(HERE / "method" / "index.md", f"{gallery.gallery(pages, rows)}\n{listed}")
    for module in ROOMS:
        write(HERE / "reference" / f"{module}.rst", room(module))
    table = "\n".join(f"| [`{module}`]({module}.rst) | {text} |" for module, text in ROOMS.items())
    tree = "\n".join(["```{toctree}", ":hidden:", ":maxdepth: 1\n", *ROOMS, "```\n"])
    intro = "All public names, module by module. Import a name from the module that its page names."
    write(
        HERE / "reference" / "index.md",
        f"# Reference\n\n{intro}\n\n| module | content |\n| --- | --- |\n{table}\n\n{tree}",
    )


def bases(app: Sphinx, name: str, obj: Any, options: Any, found: list[Any]) -> None:
    """Show base classes by their public names, and leave out those without one."""
    kept = []
    for base in found:
        kind = getattr(base, "__origin__", base)
        if not str(getattr(kind, "__module__", "")).startswith("pfl_lightning"):
            kept.append(base)
        elif known := public(f"{kind.__module__}.{kind.__qualname__}"):
            kept.append(f":py:obj:`~{known}`")
    found[:] = kept or [object]


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages before any is read."""
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-bases", bases)
    app.connect("html-page-context", links_to_origin)
    return {"parallel_read_safe": True}
