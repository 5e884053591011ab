"""Write the advice: text, Markdown, HTML, CSV and a picture."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np

from pfl_lightning.cli.advise.decide import (
    LEAST,
    MATTERS,
    Answer,
    Pick,
    Verdict,
    answer,
    gain_of,
    is_ahead,
    negative,
    picks,
    scale,
    scores_of,
    smallest_shown,
)
from pfl_lightning.cli.advise.look import Look
from pfl_lightning.cli.compare.by_client import MANY, ByClient, split
from pfl_lightning.cli.compare.page import STYLE, html_table, svg
from pfl_lightning.cli.compare.results import Mean, Result
from pfl_lightning.cli.compare.significance import Difference, Rows, interval, of_clients, without_value
from pfl_lightning.data import Split
from pfl_lightning.runs.report import write_rows
from pfl_lightning.runs.sample_scores import Scores
from pfl_lightning.runs.tables import labelled, markdown_table, text_table
from pfl_lightning.tasks import Monitor

RULE = """\
Validation rows alone choose. A method is better than {reference} if its mean gain over the rows is above 0 with p <
0.05, after Holm's correction for all methods, and its 95 % interval reaches {least}, the smallest gain of interest:
over all sites, where {sites}, and at each site by its own rows. If any is, the first in the table
is taken that isn't clearly worse than the better one with the largest gain, and whose own interval is above 0: simple
methods come first. A site takes
the method that is better by its own rows; else the one that is better over all sites, unless it is clearly worse at
the site; else {reference}, for one of two reasons. Not better: the intervals of all methods end below {least}.
Unknown: the rows can show neither. Of many sites without any gain, one in twenty looks better by chance."""

INTERVALS = """\
Intervals are 95 %, of paired differences of rows, for other rows of these sites and other training runs (two-way
variance of rows and runs, Student's t with Satterthwaite's degrees of freedom). Test rows are the same in all runs. No
interval includes the choice of learning rates."""

DISAGREE = """\
Test rows say otherwise: {tested}. They had no part in the choice, so that they can check it: a method that test rows
had chosen would have no rows left to be checked by. Both figures have errors, as their intervals show."""

LEGEND = """\
Rows: the site's rows that {sizes}. Gains are over {alone}: the mean, and its 95 % interval in brackets. The last column
names the methods that validation rows can't tell from the one to take."""

PARTS: tuple[tuple[Split, str], ...] = (("val", "validation"), ("test", "test"))
"""The rows that are looked at, with the words for them."""

COUNTING = {
    "client": f"each site with {LEAST} rows or more counts alike",
    "sample": f"sites count by their rows, as none has {LEAST}",
}
"""How sites count over all of them."""

FEW = 5
"""Largest number of sites that a sentence names."""

Piece = tuple[str, Any]
"""A piece of the page: its kind (heading, text, code, lines or table), and its content."""


@dataclass(frozen=True)
class Advice:
    """The advice of a tournament.

    Args:
        title: title of the page.
        look: facts about the clients.
        folds: number of seeds that validate on different rows, 1 if all seeds validate on the same ones.
        reasons: why each method took part, by method.
        notes: sentences on settings, on methods left out and on the budget.
        results: finished runs by method, simple methods first.
        reference: the method to compare with.
        monitor: the metric that selects.
        at_once: whether the metric is no mean over rows, and needs all rows at once, as an AUROC does.
        cost: what further seeds of all methods cost, in words such as ``40 s``, as a function of their number.
        again: the command line of this advice with a number of seeds.
    """

    title: str
    look: Look
    folds: int
    reasons: Mapping[str, str]
    notes: Sequence[str]
    results: Mapping[str, Sequence[Result]]
    reference: str
    monitor: Monitor
    at_once: bool
    cost: Callable[[int], str]
    again: Callable[[int], str]

    @cached_property
    def scores(self) -> dict[Split, dict[str, Rows]]:
        """Scores of rows by split and method, of methods with any; of sites with `LEAST` rows, unless none has."""
        return {part: self._scores(part, LEAST) or self._scores(part, 0) for part, _ in PARTS}

    def _scores(self, part: Split, least: int) -> dict[str, Rows]:
        found = {m: scores_of(results, part, self.folds, least, self.at_once) for m, results in self.results.items()}
        return {method: rows for method, rows in found.items() if rows}

    @cached_property
    def by(self) -> dict[Split, Mean]:
        """How sites count over all of them, by split."""
        return {part: "client" if self._scores(part, LEAST) else "sample" for part, _ in PARTS}

    @cached_property
    def out(self) -> dict[Split, dict[str, str]]:
        """Why sites have no gain by rows of a split, by split and site."""
        reasons: dict[Split, dict[str, str]] = {}
        for part, _ in PARTS:
            there = {site for rows in self.scores[part].values() for _, site in rows}
            valued = {site for each in self.results.values() for _, site in of_clients(each, part)}
            missing = {site: w for each in self.results.values() for (_, site), w in without_value(each, part).items()}
            # of a fold, where all rows are needed at once, or of all folds
            of = " of a fold" if part == "val" and self.folds > 1 and self.at_once else ""
            sizes = self.look.test if part == "test" else self.look.val
            if part == "val" and self.folds > 1 and not self.at_once:
                sizes = [sum(both) for both in zip(self.look.train, self.look.val, strict=True)]
            reasons[part] = {
                site: f"no value: {missing.get(site, 'it has no rows')}"
                if site not in valued
                else f"{rows} rows{of}, fewer than {LEAST}"
                if rows < LEAST
                else f"{self.monitor.metric} is undefined without some row"
                for site, rows in zip(self.look.clients, sizes, strict=True)
                if site not in there
            }
        return reasons

    def left_out(self) -> list[str]:
        """Return a sentence for each split in which some sites don't count."""
        sentences = []
        for part, words in PARTS:
            sites = self.out[part]
            if sites and len(sites) < len(self.look.clients):
                listing = listed([f"{site} ({why})" for site, why in [*sites.items()][:FEW]])
                rest = f", and {len(sites) - FEW} more" if len(sites) > FEW else ""
                counting = len(self.look.clients) - len(sites)
                sentences.append(
                    f"By {words} rows {counting} of {len(self.look.clients)} sites count; left out: {listing}{rest}."
                )
        return sentences

    @cached_property
    def overall(self) -> Answer:
        """The answer over all sites."""
        return answer(self.scores["val"], self.reference, self.monitor, self.by["val"])

    @cached_property
    def picks(self) -> list[Pick]:
        """The advice for each site."""
        return picks(self.scores["val"], self.reference, self.monitor, self.look.clients, self.by["val"])

    @cached_property
    def tested(self) -> Answer:
        """What test rows would have answered over all sites, which is reported alone."""
        return answer(self.scores["test"], self.reference, self.monitor, self.by["test"])

    @property
    def validated(self) -> int:
        """Number of rows that validated, which in turn all rows outside test do."""
        if self.folds < 2:
            return sum(self.look.val)
        seeds = {result.run.seed for result in self.results[self.reference]}
        return round((sum(self.look.train) + sum(self.look.val)) * min(1.0, len(seeds) / self.folds))

    @property
    def alone(self) -> str:
        """Words for the reference."""
        return "training alone" if self.reference.startswith("Local") else self.reference

    def amount(self, gain: float, digits: int = 3) -> str:
        """Return a gain in words, such as ``1.2 points``.

        Args:
            gain: the gain.
            digits: number of significant digits.
        """
        if self.monitor.metric != "acc":
            return f"{gain:.{digits}g} of {self.monitor.metric}"
        number = f"{100 * gain:.{digits}g}"
        return f"{number} point{'' if number == '1' else 's'}"

    @property
    def least(self) -> str:
        """The smallest gain of interest, in words."""
        return self.amount(MATTERS * scale(self.scores["val"].get(self.reference, {}), self.monitor))

    def parts(self) -> list[Piece]:
        """Return the page, piece by piece: the answer, the tables, and an appendix with the statistics."""
        more = "more" if self.monitor.mode == "max" else "less"
        unit = "accuracy in per cent, gains in points" if self.monitor.metric == "acc" else self.monitor.metric
        pieces: list[Piece] = [("text", sentence) for sentence in self.answer()]
        pieces.append(("heading", "Site by site"))
        if len(self.rows) > MANY:
            counts = Counter((pick.method, pick.reason) for pick in self.picks).most_common()
            pieces.append(("table", [["take", "why", "sites"], *([*each, str(number)] for each, number in counts)]))
            pieces.append(("text", f"The lines of all {len(self.rows)} sites are in advice.csv."))
        else:
            pieces.append(("table", [list(self.rows[0]), *([*map(str, row.values())] for row in self.rows)]))
        sizes = "train and validate in turn, and rows that test" if self.folds > 1 else "train, validate and test"
        pieces.append(("text", LEGEND.format(sizes=sizes, alone=self.alone)))
        pieces += [("heading", "Over all sites"), ("table", self.table())]
        pieces.append(("text", f"Means of sites, where {COUNTING[self.by['val']]}: {unit}; {more} is better."))
        pieces += [("text", sentence) for sentence in self.left_out()]
        pieces += [("heading", "To know better"), *self.better()]
        pieces.append(("heading", "Appendix: how this was found"))
        pieces.append(("text", RULE.format(reference=self.reference, least=self.least, sites=COUNTING[self.by["val"]])))
        pieces += [("text", INTERVALS), ("lines", self.look.lines)]
        pieces.append(("table", [["method", "takes part as"], *map(list, self.reasons.items())]))
        return [*pieces, *(("text", note) for note in self.notes)]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A line of the table for each site."""
        test = {method: split(rows) for method, rows in self.scores["test"].items()}
        lines = []
        for place, pick in enumerate(self.picks):
            own, base = (test.get(method, {}).get(pick.site, {}) for method in (pick.method, self.reference))
            tested = None if pick.method == self.reference else gain_of(own, base)
            train, val, tests = (sizes[place] for sizes in (self.look.train, self.look.val, self.look.test))
            lines.append(
                {
                    "site": pick.site,
                    "rows": f"{train + val}/{tests}" if self.folds > 1 else f"{train}/{val}/{tests}",
                    "take": pick.method,
                    "answer": pick.verdict.value,
                    "why": pick.reason,
                    "gain, validation": self._gain(pick.gain, pick.site, "val"),
                    "gain, test": self._gain(tested, pick.site, "test"),
                    "can't be told from": ", ".join(pick.level) or ("any" if pick.site in self.out["val"] else "none"),
                }
            )
        return lines

    def _gain(self, gain: Difference | None, site: str, part: Split) -> str:
        return self.out[part].get(site, "") if gain is None else interval(gain, self.monitor)

    def answer(self) -> list[str]:
        """Return the sentences at the head of the page; the first is the advice."""
        overall, rows = self.overall, f"{self.validated:,} validation rows"
        if overall.verdict is Verdict.BETTER:
            gain = self.amount(overall.gains[overall.method].mean)
            sentences = [f"Use {overall.method}: over all sites it gains {gain} over {self.alone}, by {rows}."]
            sentences.append(f"Better than {self.alone}: {self.named(overall.clear, overall.gains)}.")
        else:
            take = "Train alone" if self.alone != self.reference else f"Take {self.reference}"
            shown = smallest_shown(overall)
            if overall.verdict is Verdict.NOT_BETTER:
                sentences = [f"{take}: no method gains {self.least} or more, by {rows}."]
            elif math.isnan(shown):
                sentences = [f"{take} for now: {rows} can't show any gain."]
            else:
                sentences = [f"{take} for now: {rows} cannot show a gain below about {self.amount(shown, 2)}."]
            if overall.gains:
                best = max(overall.gains, key=lambda method: overall.gains[method].mean)
                sentences.append(f"The largest mean gain is that of {self.named([best], overall.gains)}.")
        others = [pick for pick in self.picks if pick.method != overall.method]
        if others:
            listing = listed([f"{pick.site} ({pick.method}: {pick.reason})" for pick in others[:FEW]])
            rest = f", and {len(others) - FEW} more" if len(others) > FEW else ""
            sentences.append(f"Other advice for {len(others)} of {len(self.picks)} sites: {listing}{rest}.")
        worse = [method for method, one in overall.gains.items() if is_ahead(negative(one))]
        if worse:
            sentences.append(f"Worse than {self.alone}: {self.named(worse, overall.gains)}.")
        return [*sentences, *self.on_test()]

    def on_test(self) -> list[str]:
        """Return what test rows say about the advice."""
        tested = self.tested.gains
        if not tested:
            return []
        mixed: Rows = {}
        for pick in self.picks:
            own = self.scores["test"].get(pick.method, {})
            mixed |= {key: scores for key, scores in own.items() if key[1] == pick.site}
        together = gain_of(mixed, self.scores["test"].get(self.reference, {}), self.by["test"])
        sentences = []
        if together is not None and any(pick.method != self.reference for pick in self.picks):
            sentences.append(
                f"Each site with its advised method gains {interval(together, self.monitor)} over {self.alone} on test "
                "rows, which had no part in the choice."
            )
        better = [method for method in self.tested.clear if method not in self.overall.clear]
        lost = [m for m in self.overall.clear[:1] if m in tested and is_ahead(negative(tested[m]))]
        words = [f"better than {self.alone} there: {self.named(better, tested)}"] if better else []
        words += [f"worse there: {self.named(lost, tested)}"] if lost else []
        return [*sentences, DISAGREE.format(tested="; ".join(words))] if words else sentences

    def named(self, methods: Sequence[str], gains: Mapping[str, Difference]) -> str:
        """Return methods with their gains, in words."""
        return listed([f"{method} ({interval(gains[method], self.monitor)})" for method in methods])

    def table(self) -> list[list[str]]:
        """Return the table of methods over all sites; see `by`."""
        factor, form = (100, ".2f") if self.monitor.metric == "acc" else (1, ".4g")
        cells = [["method", *(f"{words}{gain}" for _, words in PARTS for gain in ("", ", gain"))]]
        for method in self.results:
            row = [method]
            for part, _ in PARTS:
                own = self.scores[part].get(method, {})
                sites = [[*site.values()] for site in split(own).values()]
                means = [fmean(each.values.mean() for each in site) for site in sites]
                weights = [site[0].rows for site in sites] if self.by[part] == "sample" else None
                mean = fmean(means, weights) if own else 0
                gain = (self.overall if part == "val" else self.tested).gains.get(method)
                row += [f"{self.monitor.sign * factor * mean:{form}}" if own else "-"]
                row += ["" if gain is None else interval(gain, self.monitor)]
            cells.append(row)
        return cells

    @property
    def repeats(self) -> int:
        """Number of times that all validation rows validated."""
        return len({repeat for repeat, _ in self.scores["val"].get(self.reference, {})})

    def better(self) -> list[Piece]:
        """Return what narrower intervals cost, and the command for further seeds."""
        seeds = len({result.run.seed for results in self.results.values() for result in results})
        count = (self.repeats + 1) * self.folds if self.folds > 1 else seeds + max(2, seeds)
        words = f"{count} seeds in place of {seeds} cost about {self.cost(count - seeds)} more; finished runs count."
        bounded = {method: one for method, one in self.overall.gains.items() if not math.isnan(one.half)}
        if bounded:
            best = max(bounded, key=lambda method: bounded[method].mean)
            # without the variance of training runs, which is what further seeds take away
            base = self.scores["val"][self.reference]
            rows = gain_of(over_repeats(self.scores["val"][best]), over_repeats(base), self.by["val"])
            if self.repeats > 1 and rows is not None and bounded[best].half > 0:
                least = min(1.0, rows.half / bounded[best].half)
                words = (
                    f"About {100 * least:.0f} % of the width of {best}'s interval is of the rows at hand, and stays "
                    f"with any number of seeds: four times as many rows would halve it. {words}"
                )
            else:
                words = f"Further seeds tell how much of the intervals is of training runs. {words}"
        return [("text", words), ("code", self.again(count))]

    def write(self, out: Path) -> str:
        """Write ``advice.md``, ``.html``, ``.csv`` and ``.png``, and return the text for the terminal.

        Args:
            out: the folder.
        """
        parts = self.parts()
        write_rows(out / "advice.csv", self.rows)
        (out / "advice.md").write_text(as_markdown(self.title, parts), encoding="utf-8")
        picture = ""
        if self.tested.gains:
            figure = self.sites().figure()
            figure.savefig(out / "advice.png", dpi=150)
            picture = f"<h2>Test rows</h2>\n{svg(figure, 'Test rows')}"
        (out / "advice.html").write_text(as_html(self.title, parts, picture), encoding="utf-8")
        return as_text(parts)

    def sites(self) -> ByClient:
        """Return the gains of each site on test rows."""
        test = {method: split(rows) for method, rows in self.scores["test"].items()}
        gains = {
            method: {
                site: one for site, rows in own.items() if (one := gain_of(rows, test[self.reference].get(site, {})))
            }
            for method, own in test.items()
            if method != self.reference
        }
        means = {
            method: {
                site: [self.monitor.sign * float(each.values.mean()) for each in rows.values()]
                for site, rows in own.items()
            }
            for method, own in test.items()
        }
        return ByClient(self.monitor, self.reference, means, gains, lacking={self.reference: self.out["test"]})


def over_repeats(rows: Rows) -> Rows:
    """Return the mean of each row over repeats, as scores of one repeat."""
    return {
        (0, site): Scores(np.mean([each.values for each in own.values()], axis=0), next(iter(own.values())).rows)
        for site, own in split(rows).items()
    }


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def as_text(parts: Sequence[Piece]) -> str:
    """Return the page for a terminal."""
    blocks = []
    for kind, content in parts:
        if kind == "table":
            blocks.append(text_table(content))
        elif kind in ("lines", "code"):
            blocks.append(labelled(content) if kind == "lines" else f"    {content}")
        else:
            words = fill(" ".join(content.split()), 120, break_on_hyphens=False, break_long_words=False)
            blocks.append(f"{content}\n{'-' * len(content)}" if kind == "heading" else words)
    return "\n\n".join(blocks)


def as_markdown(title: str, parts: Sequence[Piece]) -> str:
    """Return the page in Markdown."""
    blocks = [f"# {title}"]
    for kind, content in parts:
        if kind == "table":
            blocks.append(markdown_table(content))
        elif kind == "lines":
            blocks.append("\n".join(f"* {name}: {value}" for name, value in content))
        elif kind == "code":
            blocks.append(f"    {content}")
        else:
            blocks.append(f"## {content}" if kind == "heading" else " ".join(content.split()))
    return "\n\n".join([*blocks, "![Gains by site on test rows](advice.png)"]) + "\n"


def as_html(title: str, parts: Sequence[Piece], picture: str) -> str:
    """Return the page as HTML, without links to other files."""
    blocks = []
    for kind, content in parts:
        if kind == "table":
            blocks.append(f"<table>{html_table(content, ())}</table>")
        elif kind == "code":
            blocks.append(f"<pre>{escape(content)}</pre>")
        elif kind == "lines":
            blocks.append(f"<ul>{''.join(f'<li>{escape(name)}: {escape(value)}</li>' for name, value in content)}</ul>")
        else:
            tag = "h2" if kind == "heading" else "p"
            blocks.append(f"<{tag}>{escape(' '.join(content.split()))}</{tag}>")
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n{STYLE}'
    return "\n".join([head, f"<h1>{escape(title)}</h1>", *blocks, picture, "</html>", ""])
