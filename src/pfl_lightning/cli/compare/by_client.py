"""Tables and pictures of a comparison by client: each client's metric under each method, and its gain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TypeVar

from pfl_lightning.cli.compare.results import Result
from pfl_lightning.cli.compare.significance import (
    Difference,
    Population,
    clients_stay,
    counted,
    difference,
    interval,
    of_clients,
    paired,
    row_scores,
    sample_interval,
    without_value,
)
from pfl_lightning.plots.runs import in_words, plot_by_client, plot_clients
from pfl_lightning.runs.report import Row, write_rows
from pfl_lightning.runs.tables import latex_table, markdown_table
from pfl_lightning.tasks import Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Value = TypeVar("Value")

MANY = 50
"""Largest number of clients in tables for readers; more go to the CSV file, and a picture shows their distribution."""

ALONE = """\
{gain}: the mean over seeds, with the 95 % interval {over}.
Each interval stands alone: of twenty clients without a gain, one interval leaves out 0 by chance."""

OTHERS = "Clients have no names and differ from seed to seed (--vary_data), so there is no table by client."


@dataclass(frozen=True)
class ByClient:
    """Values and gains of each client under each method.

    Args:
        monitor: the metric that selects.
        reference: the method whose values gains are measured from; None for no gains.
        values: the metric in its own sign, one number per seed, by method and client.
        gains: differences to the reference, by method and client.
        population: for what intervals hold.
        lacking: why clients have no value at any seed, by method and client.
        seeds: the number of runs by method; empty if each client has a value in each run.
        count: a sentence on how many clients have a value; empty if all have one.
    """

    monitor: Monitor
    reference: str | None
    values: Mapping[str, Mapping[str, Sequence[float]]]
    gains: Mapping[str, Mapping[str, Difference]]
    population: Population = "seeds"
    lacking: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    count: str = ""

    @property
    def clients(self) -> list[str]:
        """Names of the clients, or their ids as text, in their order; those without any value are the last."""
        return list(
            dict.fromkeys(client for of in (self.values, self.lacking) for own in of.values() for client in own)
        )

    @property
    def gain(self) -> str:
        """The words for a gain."""
        return f"gain over {self.reference}"

    @property
    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Return a title and the cells, the header first, of metrics and of gains; without gains the first alone.

        The shorter of clients and methods is across.
        """
        metric = in_words(f"test/{self.monitor.metric}")
        unit = ", points" if self.monitor.metric == "acc" else ""
        tables = [(f"{metric}, by client", self._cells({m: self._metrics(m) for m in self.values}))]
        if self.gains:
            shown = {
                method: {client: interval(one, self.monitor) for client, one in own.items()}
                for method, own in self.gains.items()
            }
            tables.append((f"{self.gain}{unit}, by client", self._cells(shown)))
        return tables

    def _metrics(self, method: str) -> dict[str, str]:
        factor, form = (100, ".2f") if self.monitor.metric == "acc" else (1, ".4g")
        cells = {}
        for client, values in self.values[method].items():
            spread = f" ± {factor * stdev(values):{form}}" if len(values) > 1 else ""
            runs = self.seeds.get(method, len(values))
            part = f" ({len(values)} of {runs} seeds)" if len(values) < runs else ""
            cells[client] = f"{factor * fmean(values):{form}}{spread}{part}"
        return cells

    def _cells(self, shown: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
        across, down = list(shown), self.clients
        cells = [["client", *across], *([client, *(self._cell(shown, m, client) for m in across)] for client in down)]
        if len(across) <= len(down):
            return cells
        turned = [list(column) for column in zip(*cells, strict=True)]
        turned[0][0] = "method"
        return turned

    def _cell(self, shown: Mapping[str, Mapping[str, str]], method: str, client: str) -> str:
        return shown[method].get(client, self.lacking.get(method, {}).get(client, "-"))

    @property
    def rows(self) -> list[Row]:
        """Return a row for each client and method, with all digits; without a value, with the reason as ``why``."""
        rows: list[Row] = []
        for method, own in self.values.items():
            for client, values in own.items():
                row: Row = {"client": client, "method": method, "seeds": len(values), "mean": fmean(values)}
                row["std"] = stdev(values) if len(values) > 1 else None
                if (one := self.gains.get(method, {}).get(client)) is not None:
                    numbers = (None if math.isnan(end) else end for end in ends(one, self.monitor))
                    row |= dict(zip((self.gain, "low", "high"), numbers, strict=True))
                rows.append(row)
        rows += [
            {"client": client, "method": method, "seeds": 0, "mean": None, "why": why}
            for method, own in self.lacking.items()
            for client, why in own.items()
        ]
        return rows

    def figure(self) -> "Figure":
        """Return a picture of gains, or of metrics without gains: by client, or their distribution for many clients."""
        percent = 100 if self.monitor.metric == "acc" else 1
        points: dict[str, dict[str, list[float]]] = {}
        if self.gains:
            label = f"{self.gain}, points" if percent == 100 else self.gain
            for method, own in self.gains.items():
                points[method] = {c: [percent * end for end in ends(one, self.monitor)] for c, one in own.items()}
        else:
            label = in_words(f"test/{self.monitor.metric}")
            for method, means in self.values.items():
                points[method] = {c: [percent * fmean(values), math.nan, math.nan] for c, values in means.items()}
        if len(self.clients) > MANY:
            means = {method: [mean for mean, *_ in own.values()] for method, own in points.items()}
            return plot_clients(means, label=f"{label}, a dot a client", note=self.count)
        # a client that any method has a value of has a dot
        valued = {client for own in self.values.values() for client in own}
        empty = {c: why for own in self.lacking.values() for c, why in own.items() if c not in valued}
        return plot_by_client(points, label, zero=bool(self.gains), empty=empty)

    def write(self, out: Path) -> None:
        """Write ``by_client.csv`` and ``by_client.png``; for up to `MANY` clients the tables in Markdown and LaTeX.

        Args:
            out: the comparison's folder.
        """
        write_rows(out / "by_client.csv", self.rows)
        self.figure().savefig(out / "by_client.png", dpi=150)
        texts = [out / "by_client.md", out / "by_client.tex"]
        if len(self.clients) > MANY:
            # tables of an earlier run of the same command with fewer clients would contradict the CSV file
            for path in texts:
                path.unlink(missing_ok=True)
            return
        words = [part for title, cells in self.tables for part in (f"**{title}**", markdown_table(cells))]
        texts[0].write_text("\n\n".join([*words, *self.notes]) + "\n", encoding="utf-8")
        labels = [f"tab:{out.name}-{kind}" for kind in ("clients", "gains")]
        captions = [" ".join([f"{title[0].upper()}{title[1:]}.", *self.notes]) for title, _ in self.tables]
        texts[1].write_text(
            "\n\n".join(
                latex_table(cells, " ".join(caption.split()), label)
                for (_, cells), caption, label in zip(self.tables, captions, labels, strict=False)
            )
            + "\n",
            encoding="utf-8",
        )

    @property
    def notes(self) -> list[str]:
        """Return how many clients have a value, if some have none, and what the intervals mean, if there are any."""
        there = any(not math.isnan(one.half) for own in self.gains.values() for one in own.values())
        is_over_rows = self.population == "samples"
        over = "for other test rows of the client and other seeds" if is_over_rows else "by Student's t over seeds"
        meaning = [ALONE.format(gain=f"{self.gain[0].upper()}{self.gain[1:]}", over=over)] if there else []
        return [*filter(None, [self.count]), *meaning]


def ends(one: Difference, monitor: Monitor) -> tuple[float, float, float]:
    """Return a gain and the ends of its interval, in the metric's own sign; NaN for ends without an interval.

    Args:
        one: the difference to the reference.
        monitor: the metric that selects.
    """
    mean = monitor.sign * one.mean
    return mean, mean - one.half, mean + one.half


def by_client(
    methods: Mapping[str, Sequence[Result]],
    reference: str | None,
    monitor: Monitor,
    population: Population = "seeds",
) -> ByClient | None:
    """Return the comparison by client; None if no client has a value, or clients differ from seed to seed.

    Args:
        methods: finished runs by method.
        reference: the method whose values gains are measured from.
        monitor: the metric that selects.
        population: ``samples`` for intervals over test rows, of clients with scores of them; else they are over seeds.
    """
    if not clients_stay(methods):
        return None
    signed = {method: split(of_clients(results)) for method, results in methods.items()}
    signed = {method: own for method, own in signed.items() if own}
    if not signed:
        return None
    values = {
        method: {client: [monitor.sign * value for value in each.values()] for client, each in own.items()}
        for method, own in signed.items()
    }
    base = signed.get(reference, {}) if reference is not None else {}
    gains = {
        method: {
            client: one
            for client, each in own.items()
            if client in base and (one := difference(each, base[client])) is not None
        }
        for method, own in signed.items()
        if base and method != reference
    }
    if base and population == "samples":
        scores = row_scores(methods[str(reference)])
        for method, own in gains.items():
            rows, _ = paired(row_scores(methods[method]), scores)
            # a client without scores has a gain without an interval
            gains[method] = {
                client: Difference(*sample_interval({client: rows[client]}), one.better)
                if client in rows
                else replace(one, half=math.nan, probability=math.nan)
                for client, one in own.items()
            }
    lacking = {method: split(without_value(results)) for method, results in methods.items()}
    return ByClient(
        monitor,
        reference if base else None,
        values,
        {m: own for m, own in gains.items() if own},
        population,
        {
            method: {c: f"no value: {next(iter(whys.values()))}" for c, whys in own.items() if c not in values[method]}
            for method, own in lacking.items()
            if method in values
        },
        {method: len(results) for method, results in methods.items()},
        counted(methods),
    )


def split(clients: Mapping[tuple[int, str], Value]) -> dict[str, dict[tuple[int, str], Value]]:
    """Return the values of each client, by client.

    >>> split({(0, "a"): 1.0, (1, "a"): 2.0, (0, "b"): 3.0})
    {'a': {(0, 'a'): 1.0, (1, 'a'): 2.0}, 'b': {(0, 'b'): 3.0}}

    Args:
        clients: a method's values, or the scores of its rows.
    """
    found: dict[str, dict[tuple[int, str], Value]] = {}
    for key, value in clients.items():
        found.setdefault(key[1], {})[key] = value
    return found
