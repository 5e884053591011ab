"""Choose a method for each site on validation, and write the advice: text, Markdown, HTML, CSV and a picture."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, TypeAlias

from pfl_lightning.cli.advise.look import Look
from pfl_lightning.cli.compare.by_client import MANY, by_client, split
from pfl_lightning.cli.compare.page import STYLE, html_table, svg
from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.significance import (
    LEVEL,
    Clients,
    Difference,
    difference,
    differences_to,
    interval,
    of_clients,
)
from pfl_lightning.runs.report import write_rows
from pfl_lightning.runs.tables import labelled, markdown_table, text_table
from pfl_lightning.tasks import Monitor

HERE, EVERYWHERE, NOTHING = "clear at this site", "clear over all sites", "the data can't tell"
"""Reasons for an advice: a clear gain at the site; one over all sites, with no loss at the site; or neither."""

RULE = """\
The choice looks at validation rows alone. A gain is clear if p < 0.05 by Student's t over seeds{wider}, after Holm's
correction for all methods. A site takes the method with the largest clear gain of its own; else the best method over
all sites, if that is clear and has no loss at the site; else {reference}. Of many sites without any gain, one in
twenty looks clear by chance. Methods can't be told apart if the 95 % interval of their difference holds 0."""

WIDER = ", with the variance of seeds that share rows (Nadeau and Bengio)"
"""Addition to `RULE` where seeds draw the rows that validate."""

LIMITS = """\
Test rows had no part in the choice. Intervals are 95 %, by Student's t over seeds. {rows}"""

OF_ROWS = {
    "val": "Those on validation rows hold for other rows of these sites as well.",
    "test": "Those on test rows hold for other rows of these sites as well.",
}
"""Words on intervals of rows that each seed draws anew, by split."""

OF_TRAINING = {
    "val": "Those on validation rows are of other initial weights and batches, and of no other rows than these.",
    "test": "Those on test rows are of other training rows and batches, and of no other test rows than these.",
}
"""Words on intervals of rows that are the same at all seeds, by split."""

Part: TypeAlias = Literal["val", "test"]
PARTS: tuple[Part, ...] = ("val", "test")
"""The rows that are looked at."""

Piece = tuple[str, Any]
"""A piece of the page: its kind (heading, text, code, lines or table), and its content."""


@dataclass(frozen=True)
class Pick:
    """The method advised for a site.

    Args:
        site: name of the site.
        method: the method.
        reason: `HERE`, `EVERYWHERE` or `NOTHING`.
        gain: the gain over the reference on validation; None for the reference itself.
        level: methods that validation can't tell from this one at the site.
    """

    site: str
    method: str
    reason: str
    gain: Difference | None
    level: tuple[str, ...]


def leader(values: Mapping[str, Clients], reference: str, overlap: float = 0.0) -> str | None:
    """Return the method with the largest clear gain over the reference; None without a clear gain.

    Args:
        values: values by method, larger is better.
        reference: the method to compare with.
        overlap: as for `difference`.
    """
    if reference not in values:
        return None
    gains = differences_to(values, reference, overlap=overlap)
    clear = {method: one.mean for method, (one, is_clear) in gains.items() if is_clear and one.mean > 0}
    return max(clear, key=lambda method: clear[method], default=None)


def picks(values: Mapping[str, Clients], reference: str, overlap: float = 0.0) -> list[Pick]:
    """Return the advice for each site that has values of the reference.

    Args:
        values: validation values by method, larger is better; of equally good methods the first is taken.
        reference: the method to compare with.
        overlap: as for `difference`.
    """
    best = leader(values, reference, overlap)
    by_site: dict[str, dict[str, Clients]] = {}
    for method, clients in values.items():
        for site, at_site in split(clients).items():
            by_site.setdefault(site, {})[method] = at_site
    found = []
    for site, own in by_site.items():
        if reference not in own:
            continue
        gains = {method: one for method, (one, _) in differences_to(own, reference, overlap=overlap).items()}
        here = leader(own, reference, overlap)
        # a method without a loss here may borrow strength from the other sites
        shared = best if best is not None and best in gains and gains[best].mean >= 0 else None
        method = here or shared or reference
        reason = HERE if here else EVERYWHERE if shared else NOTHING
        level = tuple(other for other in own if other != method and not is_ahead(own[method], own[other], overlap))
        found.append(Pick(site, method, reason, gains.get(method), level))
    return found


def is_ahead(one: Clients, other: Clients, overlap: float = 0.0) -> bool:
    """Return True if the 95 % interval of a method's lead over another leaves out 0.

    Args:
        one: values of the method.
        other: values of the other method.
        overlap: as for `difference`.
    """
    lead = difference(one, other, overlap=overlap)
    # without a spread over seeds, as from a single seed, there is no interval
    return lead is not None and not math.isnan(lead.half) and lead.mean > lead.half


def seeds_for_half(seeds: int, overlap: float = 0.0) -> int | None:
    """Return the number of seeds with intervals about half as wide; None if no number of seeds has them.

    >>> seeds_for_half(5), seeds_for_half(10), seeds_for_half(3, 0.25), seeds_for_half(10, 0.25)
    (13, 33, 7, None)

    Args:
        seeds: number of seeds, at least 2.
        overlap: as for `difference`.
    """
    from scipy.special import ndtri, stdtrit

    def width(count: int) -> float:
        return float(stdtrit(count - 1, 1 - LEVEL / 2)) * math.sqrt(1 / count + overlap)

    # the width of infinitely many seeds, which all draw from the same rows
    if float(ndtri(1 - LEVEL / 2)) * math.sqrt(overlap) >= width(seeds) / 2:
        return None
    more = seeds + 1
    while width(more) > width(seeds) / 2:
        more += 1
    return more


@dataclass(frozen=True)
class Advice:
    """The advice of a tournament.

    Args:
        title: title of the page.
        look: facts about the clients.
        overlap: evaluated rows for each row of the others from which each seed draws them, by split: `Look.overlap`.
        reasons: why each method took part, by method.
        notes: sentences on settings, on methods left out and on the budget.
        results: finished runs by method.
        reference: the method to compare with.
        monitor: the metric that selects.
        cost: what a further seed of all methods costs, in words such as ``40 s``, as a function of the number of seeds.
        again: the command line of this advice with a number of seeds.
    """

    title: str
    look: Look
    overlap: Mapping[Part, float]
    reasons: Mapping[str, str]
    notes: Sequence[str]
    results: Mapping[str, Sequence[Result]]
    reference: str
    monitor: Monitor
    cost: Callable[[int], str]
    again: Callable[[int], str]

    @cached_property
    def val(self) -> dict[str, Clients]:
        """The values by method on validation rows, of methods with any."""
        return self._values("val")

    @cached_property
    def test(self) -> dict[str, Clients]:
        """The values by method on test rows, of methods with any."""
        return self._values("test")

    def _values(self, part: Part) -> dict[str, Clients]:
        found = {method: of_clients(results, part) for method, results in self.results.items()}
        return {method: values for method, values in found.items() if values}

    @cached_property
    def picks(self) -> list[Pick]:
        """The advice for each site."""
        return picks(self.val, self.reference, self.overlap["val"])

    @property
    def seeds(self) -> int:
        """Number of seeds of the table."""
        return len({result.run.seed for results in self.results.values() for result in results})

    def parts(self) -> list[Piece]:
        """Return the page, piece by piece."""
        rows = self.rows
        found: list[Piece] = [("text", sentence) for sentence in self.answer()]
        more = "more" if self.monitor.mode == "max" else "less"
        unit = "acc in per cent, gains in points" if self.monitor.metric == "acc" else self.monitor.metric
        found.append(("text", f"Metric: {unit}; {more} is better."))
        found.append(("heading", "Site by site"))
        if len(rows) > MANY:
            reasons = [(pick.method, pick.reason) for pick in self.picks]
            counts = [
                [method, reason, str(reasons.count((method, reason)))] for method, reason in dict.fromkeys(reasons)
            ]
            found.append(("table", [["take", "why", "sites"], *sorted(counts, key=lambda row: -int(row[2]))]))
            found.append(("text", f"The rows of all {len(rows)} sites are in advice.csv."))
        else:
            found.append(("table", [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]))
        wider = WIDER if self.overlap["val"] else ""
        found.append(("text", RULE.format(reference=self.reference, wider=wider)))
        found.append(("heading", "Over all sites"))
        found.append(("table", self.overall()))
        held = " ".join((OF_ROWS if self.overlap[part] else OF_TRAINING)[part] for part in PARTS)
        found.append(("text", LIMITS.format(rows=held)))
        found.append(("heading", "To know better"))
        found += self.better()
        found.append(("heading", "The look"))
        found.append(("lines", self.look.lines))
        found.append(("table", [["method", "takes part as"], *map(list, self.reasons.items())]))
        return [*found, *(("text", note) for note in self.notes)]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row of the table for each site."""
        look, over = self.look, f"over {self.reference}"
        place = {name: at for at, name in enumerate(look.clients)}
        rows = []
        for pick in self.picks:
            tested = self.gain("test", pick.method, pick.site)
            at = place.get(pick.site)
            sizes = "" if at is None else f"{look.train[at]}/{look.val[at]}/{look.test[at]}"
            rows.append(
                {
                    "site": pick.site,
                    "rows": sizes,
                    "take": pick.method,
                    "why": pick.reason,
                    f"{over}, validation": "" if pick.gain is None else interval(pick.gain, self.monitor),
                    f"{over}, test": "" if tested is None else interval(tested, self.monitor),
                    "can't be told from": ", ".join(pick.level) or "none",
                }
            )
        return rows

    def gain(self, part: Part, method: str, site: str | None = None) -> Difference | None:
        """Return a method's gain over the reference, at a site or over all; None for the reference itself.

        Args:
            part: the rows that are looked at.
            method: the method.
            site: the site; None for all.
        """
        values = self.val if part == "val" else self.test
        if method == self.reference or not {method, self.reference} <= values.keys():
            return None
        own = values[method]
        # pairs with the reference alone count, so that it needs no restriction
        own = {key: value for key, value in own.items() if site in (None, key[1])}
        return difference(own, values[self.reference], overlap=self.overlap[part])

    def answer(self) -> list[str]:
        """Return the sentences at the head of the page."""
        val, test = self.val, self.test
        overlap = self.overlap["val"]
        best, found = leader(val, self.reference, overlap), []
        if best is None:
            means = {m: one.mean for m in val if (one := self.gain("val", m)) is not None}
            first = max(means, key=lambda method: means[method], default=None)
            nearest = f" The best by its mean is {first}, with {self.both(first)}." if first else ""
            found.append(
                f"Over all sites the data can't tell whether any method is better than {self.reference}.{nearest}"
            )
        else:
            found.append(f"Over all sites {best} is the best: {self.both(best)} over {self.reference}.")
            others = [m for m in val if m not in (best, self.reference) and not is_ahead(val[best], val[m], overlap)]
            if others:
                found.append(f"Validation can't tell {best} from {listed(others)}.")
        if losses := self.clear("val", -1):
            found.append(f"Worse than {self.reference} on validation rows: {listed(losses)}.")
        tested = [
            f"{words} than {self.reference}: {listed(methods)}"
            for words, sign in (("better", 1), ("worse", -1))
            if (methods := self.clear("test", sign))
        ]
        if tested:
            stay = "" if self.overlap["test"] else " and are the same at all seeds"
            found.append(f"On test rows, which had no part in the choice{stay}, {'; '.join(tested)}.")
        mixed: Clients = {}
        for pick in self.picks:
            mixed |= {key: value for key, value in test.get(pick.method, {}).items() if key[1] == pick.site}
        together = difference(mixed, test.get(self.reference, {}), overlap=self.overlap["test"]) if mixed else None
        if together is not None and any(pick.method != self.reference for pick in self.picks):
            found.append(
                "Each site with its advised method: "
                f"{interval(together, self.monitor)} over {self.reference} on test rows, in the mean of sites."
            )
        return found

    def clear(self, part: Part, sign: int) -> list[str]:
        """Return the methods with clear gains over the reference, or with clear losses, each with its interval.

        Args:
            part: the rows that are looked at.
            sign: 1 for gains, -1 for losses.
        """
        values = self.val if part == "val" else self.test
        if self.reference not in values:
            return []
        compared = differences_to(values, self.reference, overlap=self.overlap[part])
        return [
            f"{method} ({interval(one, self.monitor)})"
            for method, (one, is_clear) in compared.items()
            if is_clear and sign * one.mean > 0
        ]

    def both(self, method: str) -> str:
        """Return a method's gains on validation and on test rows, in words."""
        found = [
            f"{interval(one, self.monitor)} on {name} rows"
            for part, name in zip(PARTS, ("validation", "test"), strict=True)
            if (one := self.gain(part, method)) is not None
        ]
        return ", ".join(found)

    def overall(self) -> list[list[str]]:
        """Return the table of methods over all sites, each site alike."""
        factor, form = (100, ".2f") if self.monitor.metric == "acc" else (1, ".4g")
        cells = [["method", *(f"{p}{w}" for p in ("validation", "test") for w in ("", f", over {self.reference}"))]]
        for method in self.results:
            row = [method]
            for part in PARTS:
                own = (self.val if part == "val" else self.test).get(method, {})
                mean = self.monitor.sign * factor * sum(own.values()) / len(own) if own else math.nan
                one = self.gain(part, method)
                row += [f"{mean:{form}}" if own else "-", "" if one is None else interval(one, self.monitor)]
            cells.append(row)
        return cells

    def better(self) -> list[Piece]:
        """Return the cost of narrower intervals, and the command for them."""
        seeds = self.seeds
        more = 3 if seeds < 2 else seeds_for_half(seeds, self.overlap["val"])
        if more is None:
            said = f"More rows at the sites would halve the intervals; no number of seeds does, after {seeds} of them."
            return [("text", said)]
        if seeds < 2:
            said = f"One seed has no interval. {more} seeds cost about {self.cost(more - seeds)} more"
        else:
            said = f"{more} seeds, not {seeds}, would halve the intervals, for about {self.cost(more - seeds)} more"
        steps = ""
        least = min((rows for rows in self.look.val if rows), default=0)
        if self.monitor.metric == "acc" and least:
            steps = f" The smallest site validates on {least} rows: one is {100 / least:.1f} points there at any seed."
        return [("text", f"{said}; finished runs count.{steps}"), ("code", self.again(more))]

    def write(self, out: Path) -> str:
        """Write ``advice.md``, ``.html``, ``.csv`` and ``.png``, and return the text for the terminal.

        Args:
            out: the folder.
        """
        parts = self.parts()
        write_rows(out / "advice.csv", self.rows)
        (out / "advice.md").write_text(as_markdown(self.title, parts))
        sites = by_client(self.results, self.reference, self.monitor, self.overlap["test"])
        picture = ""
        if sites is not None:
            figure = sites.figure()
            figure.savefig(out / "advice.png", dpi=150)
            picture = f"<h2>Test rows</h2>\n{svg(figure, 'Test rows')}"
        (out / "advice.html").write_text(as_html(self.title, parts, picture))
        return as_text(parts)


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def as_text(parts: Sequence[Piece]) -> str:
    """Return the page for a terminal."""
    found = []
    for kind, content in parts:
        if kind == "table":
            found.append(text_table(content))
        elif kind in ("lines", "code"):
            found.append(labelled(content) if kind == "lines" else f"    {content}")
        else:
            words = fill(" ".join(content.split()), 120, break_on_hyphens=False, break_long_words=False)
            found.append(f"{content}\n{'-' * len(content)}" if kind == "heading" else words)
    return "\n\n".join(found)


def as_markdown(title: str, parts: Sequence[Piece]) -> str:
    """Return the page in Markdown."""
    found = [f"# {title}"]
    for kind, content in parts:
        if kind == "table":
            found.append(markdown_table(content))
        elif kind == "lines":
            found.append("\n".join(f"* {name}: {value}" for name, value in content))
        elif kind == "code":
            found.append(f"    {content}")
        else:
            found.append(f"## {content}" if kind == "heading" else " ".join(content.split()))
    return "\n\n".join([*found, "![Gains by site on test rows](advice.png)"]) + "\n"


def as_html(title: str, parts: Sequence[Piece], picture: str) -> str:
    """Return the page as HTML, without links to other files."""
    found = []
    for kind, content in parts:
        if kind == "table":
            found.append(f"<table>{html_table(content, ())}</table>")
        elif kind == "code":
            found.append(f"<pre>{escape(content)}</pre>")
        elif kind == "lines":
            found.append(f"<ul>{''.join(f'<li>{escape(name)}: {escape(value)}</li>' for name, value in content)}</ul>")
        else:
            tag = "h2" if kind == "heading" else "p"
            found.append(f"<{tag}>{escape(' '.join(content.split()))}</{tag}>")
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n{STYLE}'
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *found, picture, "</html>", ""])
