"""Tables of methods in pages, and the table of traffic, written by catalogue.py from the classes and measurements."""

import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

import catalogue
import gallery
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from pfl_lightning.aggregators import CFL, Aggregator, ClassMeans, ClusterModels, WeightedAverage
from pfl_lightning.cli.measuring import describe, facts, quiet
from pfl_lightning.cli.methods_table import STORED, comma_separated, markdown, stored
from pfl_lightning.cli.suggestions import suggestion
from pfl_lightning.client import ClientModule
from pfl_lightning.contract.guarantee import unfit
from pfl_lightning.methods.registry import METHODS, Method
from pfl_lightning.privacy.dp_average import checked_server
from pfl_lightning.privacy.dp_sgd import check_example_level
from pfl_lightning.privacy.local_noise import check_local
from pfl_lightning.runs.tables import markdown_table
from tasks_and_data import after_a_round, kinds

HERE = Path(__file__).parent


@cache
def sides() -> dict[str, tuple[ClientModule, Aggregator]]:
    """Return a client module and an aggregator of each method."""
    with isolate_rng():
        return {method.name: (method.client(), method.new_aggregator()) for method in METHODS}


def traffic(again: Collection[str] = ()) -> list[dict[str, str]]:
    """Return the rows of methods/table.csv, measured where it lacks them.

    Args:
        again: methods that are measured although it has them.
    """
    known = {row["method"]: row for row in stored() if row["method"] not in again}
    with quiet():
        return [known[each.name] | facts(each) if each.name in known else describe(each) for each in METHODS]


def grouped(head: tuple[str, ...], said: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown with the methods of equal rows in one.

    Args:
        head: the header.
        said: a method and what is said of it.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in said:
        names.setdefault(tuple(cells), []).append(name)
    return markdown_table([head, *([", ".join(of), *cells] for cells, of in names.items())])


def families() -> str:
    """Return README's table: a row a family."""
    rows = [
        (f"**{each['family']}**. {each['idea']}", ", ".join(catalogue.members(each["family"])))
        for each in catalogue.families()
    ]
    return markdown_table([("family", "methods"), *rows])


def sentence(names: Iterable[str]) -> str:
    """Return names in lines, with a full stop."""
    return textwrap.fill(f"{', '.join(names)}.", 120, break_on_hyphens=False)


def fit_for(check: Callable[[ClientModule, Aggregator], None]) -> str:
    """Return the methods that a check lets pass.

    Args:
        check: refuses a client module and an aggregator that don't fit.
    """
    fit = []
    for name, pair in sides().items():
        with suppress(MisconfigurationException):
            check(*pair)
            fit.append(name)
    return sentence(fit)


def sent(client: ClientModule, aggregator: Aggregator) -> frozenset[str]:
    """Return the entries of a pair's updates."""
    return client.sends | client.offers & aggregator.needs


def guarantees() -> str:
    """Return docs/privacy.md's table: what methods send beside weights, and whether `DPAverage` takes them."""
    rows = gallery.measured()
    said = []
    for name, (client, aggregator) in sides().items():
        beside = shown(sent(client, aggregator) - {"weights", "num_samples"}, rows[name])
        beside = beside if client.sends else "nothing at all, not even weights"
        said.append((name, beside, guarantee(client, aggregator, rows[name])))
    return grouped(("methods", "send beside weights", "with `DPAverage`"), said)


def shown(entries: frozenset[str], row: dict[str, str]) -> str:
    """Return what entries beside weights show of a client.

    Args:
        entries: the entries.
        row: the method's row of methods/table.csv.
    """
    if not entries:
        return "nothing"
    if entries == {"class_counts"}:
        return "`class_counts`"
    if "shared_features" in entries:
        return "data: a noisy version of each training sample, with its class"
    if "class" in row["needs"]:
        return "means by class, and so which classes there are"
    if "weights" not in row["up"] and row["needs"] == "data at the server":
        return "answers to public samples, and no weights"
    return "numbers or vectors of each client"


def guarantee(client: ClientModule, aggregator: Aggregator, row: dict[str, str]) -> str:
    """Return whether a guarantee at client level covers a pair.

    Args:
        client: the client module.
        aggregator: the aggregator.
        row: the method's row of methods/table.csv.
    """
    if not unfit(client):
        if type(aggregator) is WeightedAverage:
            return "guaranteed"
        replaced = "guaranteed, but `DPAverage` replaces the server that they are about"
        if "class_counts" in client.offers & aggregator.needs:
            return f"{replaced}, and doesn't ask for `class_counts`"
        if isinstance(aggregator, WeightedAverage) and aggregator.takes_mean:
            with suppress(MisconfigurationException):
                checked_server(aggregator, 1.0)
                return f"{replaced}, or makes its step by `aggregator.server`"
        return replaced
    if not client.sends:
        return "refused: nothing to protect, epsilon is 0"
    if client.pools:
        return "refused: all samples lie in one place"
    entries = sent(client, aggregator) - {"weights", "num_samples"}
    if "shared_features" in entries:
        return "refused: their noise is calibrated to no bound"
    if entries - {"class_counts"}:
        return "refused: no noise is added to these"
    if "models" in client.needs:
        return "refused: clients receive the models of single others"
    if row["down"].endswith("of its own"):
        return "refused: what is made for single clients from single updates gets no noise"
    if client.needs > {"weights"}:
        return "refused: their clients need more than a model, and there is no noise in that"
    if "adapters" in client.requires:
        return "refused: adapters travel in part, or aren't only averaged"
    return "refused: their classes don't set `client_level`"


def robustness() -> str:
    """Return docs/robustness.md's table: what a rule in place of the mean applies to, or why a server takes none."""
    said = []
    for name, (_, server) in sides().items():
        usual = "of what they share", "the server does more with what single clients send than a mean"
        own = catalogue.declared()[name].get("mean", usual[not takes_mean(server)])
        said.append((name, own if takes_mean(server) else f"refused: {own}"))
    return grouped(("methods", "with a `mean`"), said)


def takes_mean(server: Aggregator) -> bool:
    """Return True if a server takes a rule in place of its mean."""
    if type(server) is ClassMeans:
        return not server.exclude_self
    return type(server) in (CFL, ClusterModels) or (isinstance(server, WeightedAverage) and server.takes_mean)


def revealed() -> str:
    """Return docs/deployment.md's table of entries beside weights: who sends each, what it tells, if sums do."""
    told = {entries: text for each in catalogue.declared().values() for entries, text in each.get("tells", {}).items()}
    known = {"weights", "num_samples", *", ".join(told).split(", ")}
    for name, pair in sides().items():
        if new := sorted(sent(*pair) - known):
            sys.exit(f"{name} sends {new[0]}: say what it tells in the configuration, by # tells: {{{new[0]}: ...}}.")
    rows = []
    for entries in sorted(told):
        of = [name for name, pair in sides().items() if sent(*pair) & {*entries.split(", ")}]
        enough = [name for name in of if sides()[name][1].sums_only]
        sums = "yes" if enough == of else f"for {' and '.join(enough)}" if enough else "no"
        rows.append((f"`{entries.replace(', ', '`, `')}`", ", ".join(of), told[entries], sums))
    return markdown_table([("entry", "of", "what it tells", "sums do"), *rows])


def summed() -> str:
    """Return the methods whose servers need sums of weights alone."""
    return sentence(
        name
        for name, (client, server) in sides().items()
        if server.sums_only and "weights" in sent(client, server) and not client.pools
    )


def tasks(again: Collection[str] = ()) -> str:
    """Return docs/tasks.md's table: methods by task, as the page has them, and measured where it lacks them.

    Args:
        again: methods that are measured although the page has them.
    """
    page = (HERE / "tasks.md").read_text().partition("## Which method")[2]
    head, _, *known = (
        [*map(str.strip, line.strip("|").split("|"))] for line in re.findall(r"^\|.*$", page, re.MULTILINE)
    )
    cells = {name: row for name, *row in known if name not in again}
    with quiet():
        rows = ([each.name, *(cells.get(each.name) or (on_task(each, task) for task in head[1:]))] for each in METHODS)
        return markdown_table([head, *rows])


def on_task(method: Method, task: str) -> str:
    """Return what a method does on a task, in a word of docs/tasks.md."""
    for engine, without in (("sequential", ""), ("vectorised", "one by one")):
        try:
            after_a_round(method, kinds()[task], engine)
        except MisconfigurationException as refusal:
            # these are points in a plane: the row of a method of images alone is written by hand
            if not without and task == "Classification":
                raise
            said = {
                "features": "needs vectors",
                "each single sample": "needs samples",
                "linear layers with": "needs a linear output",
            }
            return without or next((word for part, word in said.items() if part in str(refusal)), "needs classes")
    return "yes"


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"families": families},
    "docs/deployment.md": {"entries": revealed, "sums alone": summed},
    "docs/methods.md": {"methods": lambda: markdown(stored())},
    "docs/privacy.md": {
        "fit for single samples": lambda: fit_for(check_example_level),
        "fit for noise at sites": lambda: fit_for(check_local),
        "methods": guarantees,
    },
    "docs/robustness.md": {"methods": robustness},
    "docs/tasks.md": {"methods": tasks},
}
"""Each page with its generated sections."""


def page(path: str) -> str:
    """Return a page of `PAGES` as it should be."""
    text = (HERE.parent / path).read_text()
    for name, content in PAGES[path].items():
        text = catalogue.section(text, name, f"\n{content()}\n", "<!-- {} -->")
    return text


def write(again: Collection[str]) -> None:
    """Write the table of traffic and all pages.

    Args:
        again: methods that are measured although the tables have them.
    """
    for name in again:
        if name not in sides():
            sys.exit(f"{name} is no method{suggestion(name, sides())}")
    STORED.write_text(comma_separated(traffic(again)) + "\n")
    PAGES["docs/tasks.md"]["methods"] = partial(tasks, again)
    for path in PAGES:
        (HERE.parent / path).write_text(page(path))
