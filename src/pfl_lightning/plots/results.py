"""The results of a run: tables as data frames, and curves."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.plots.runs import plot_curves, rows_of
from pfl_lightning.runs.run_status import RunStatus, read_rows
from pfl_lightning.runs.tables import labelled
from pfl_lightning.tasks import Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXTS = ("cohort", "name")
"""Columns of texts, which may look like numbers, such as a client named 07."""


class Results:
    """The results of a run, as ``trainer.results`` or ``Results.of(folder)`` gives them.

    Tables are pandas data frames, with the columns of the run's files. Nothing is computed anew.

    Args:
        rows: a row per round, as in ``rounds.csv``.
        client_rows: a row per client, as in ``clients.csv``; empty before the end of ``fit``.
        summary: as in ``summary.json``; empty before the end of ``fit``.
        predictions: columns of predictions by client, as `Predictions.columns` gives them.
        name: name of the run in pictures, such as ``FedPer-Digits``.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        client_rows: Sequence[Mapping[str, Any]] = (),
        summary: Mapping[str, Any] | None = None,
        predictions: Mapping[int | str, Any] | None = None,
        name: str = "run",
    ) -> None:
        self.rows, self.client_rows = list(rows), list(client_rows)
        self.summary = dict(summary or {})
        self.name = name
        self._predictions = dict(predictions or {})

    @classmethod
    def of(cls, run: "str | PathLike[str]") -> "Results":
        """Return the results in a run's folder; those of a run still at work end with its last round.

        Args:
            run: the folder, such as ``runs/FedPer-Digits/version_0``.

        Raises:
            MisconfigurationException: if the folder is of no run.
        """
        if not isinstance(run, (str, PathLike)):
            raise MisconfigurationException(f"run is a {type(run).__name__}; give the folder of a run.")
        folder = Path(run).resolve()
        rows = [typed(row) for row in rows_of(folder)]
        file = folder / "clients.csv"
        client_rows = [typed(row) for row in read_rows(file)] if file.is_file() else []
        return cls(rows, client_rows, RunStatus(folder).summary, name=folder.parent.name)

    @property
    def rounds(self) -> Any:
        """A data frame with a row per round, and the columns of ``rounds.csv``."""
        return frame(self.rows)

    @property
    def clients(self) -> Any:
        """A data frame with a row per client after the final test, and the columns of ``clients.csv``."""
        return frame(self.client_rows)

    @property
    def selected(self) -> Any:
        """A data frame of one row: the figures of the round chosen by validation, by their names in W&B's summary.

        ``selected/round`` is the round, ``selected/val/acc`` and ``selected/test/acc`` its accuracies.
        """
        return frame([{f"selected/{name}": value for name, value in self._part("selected").items()}])

    @property
    def predictions(self) -> Any:
        """A data frame with a row per predicted row, after ``trainer.predict``: row, client and `Predictions.columns`.

        A run's folder keeps no predictions.
        """
        # columns may differ by client, such as under classes of its own
        rows: list[dict[str, Any]] = []
        for client, made in self._predictions.items():
            columns = made.columns()
            for row, cells in enumerate(zip(*columns.values(), strict=True)):
                rows.append({"row": row, "client": client, **dict(zip(columns, cells, strict=True))})
        return frame(rows)

    @property
    def metric(self) -> str:
        """The column of the validation metric behind the best round, such as ``val/acc``."""
        if monitor := self.summary.get("monitor"):
            return f"val/{Monitor(**monitor).metric}"
        # before the end the record alone tells, by the column of the worst client
        found = [name for name in (self.rows[-1] if self.rows else {}) if name.startswith("val/")]
        return next((name.removesuffix("_worst") for name in found if name.endswith("_worst")), "val/acc")

    def plot(self, metric: str | None = None) -> "Figure":
        """Plot a metric against rounds, with a line at the chosen round.

        Args:
            metric: a column of `rounds`; None takes the metric that selects the best round.

        Raises:
            MisconfigurationException: if no round has a value of the metric.
        """
        figure = plot_curves({self.name: self.rows}, metric or self.metric)
        (axes,) = figure.axes
        axes.set_title(f"{self.name}: {axes.get_ylabel()} by round")
        if round := self._part("selected").get("round"):
            axes.axvline(round, color="0.4", linewidth=0.8, linestyle=":", label=f"round {round}, best on validation")
        axes.legend(frameon=False)
        return figure

    def _part(self, name: str) -> dict[str, Any]:
        return dict(self.summary.get(name) or {})

    def __repr__(self) -> str:
        clients = len(self.client_rows) or "no test yet"
        lines = [("results", self.name), ("rounds, clients", f"{len(self.rows)}, {clients}")]
        for part in ("selected", "final"):
            figures = {name: value for name, value in self._part(part).items() if isinstance(value, (int, float))}
            if figures:
                lines.append((part, ", ".join(f"{name} {value:.4g}" for name, value in figures.items())))
        if self._predictions:
            count = sum(map(len, self._predictions.values()))
            lines.append(("predictions", f"{count} rows of {len(self._predictions)} clients"))
        return labelled(lines)

    def _repr_html_(self) -> str:
        """Return the text with the curve, for notebooks."""
        text = f"<pre>{escape(repr(self))}</pre>"
        if not any(row.get(self.metric) not in (None, "") for row in self.rows):
            return text
        # within the page, as a notebook may be sent on without its folder
        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=80)
        drawn = base64.b64encode(buffer.getvalue()).decode()
        return f'{text}<img alt="{escape(self.metric)} by round" src="data:image/png;base64,{drawn}">'


def frame(rows: Any, instead: str = "results.rows, results.client_rows and results.summary", **labels: Any) -> Any:
    """Return a pandas data frame.

    Args:
        rows: values by column, which may differ from row to row; or lists of values.
        instead: attributes with the same values, for the message.
        **labels: further arguments of ``pandas.DataFrame``: ``index`` and ``columns``.

    Raises:
        MisconfigurationException: if pandas isn't installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise MisconfigurationException(
            "a data frame needs the package pandas; install it by pip install 'pfl-lightning[tables]', or take "
            f"{instead}."
        ) from None
    return pandas.DataFrame([*rows], **labels)


def typed(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of a run's file with numbers in place of their texts, without empty cells.

    >>> typed({"round": "2", "cohort": "3", "val/acc": "0.5", "test/acc": ""})
    {'round': 2, 'cohort': '3', 'val/acc': 0.5}

    Args:
        row: texts by column.
    """
    return {name: text if name in TEXTS else number(text) for name, text in row.items() if text or name in TEXTS}


def number(text: str) -> Any:
    """Return a cell's number, truth value, or the text itself."""
    if text in ("True", "False"):
        return text == "True"
    # whole numbers first, as a round or a count stays one
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
