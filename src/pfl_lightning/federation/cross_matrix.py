"""Test each client's model on every client's test rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.engines import Sequential
from pfl_lightning.engines.evaluation import own_values
from pfl_lightning.federation.federation import Federation
from pfl_lightning.plots.results import frame
from pfl_lightning.plots.runs import plot_cross_matrix
from pfl_lightning.runs.report import write_rows
from pfl_lightning.runs.tables import markdown_table, text_table
from pfl_lightning.tasks import Monitor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CORNER = "model"
"""Head of the column of models."""


# no dataclass: Lightning, which hands it over, would copy one with all its fields
class CrossMatrix:
    """A metric of each client's model on every client's test rows.

    Args:
        metric: the metric's column in the record, such as ``test/acc``.
        models: names of the clients whose models are tested, the rows.
        clients: names of the clients whose test rows are taken, the columns.
        values: the metric by model and client; NaN for a client without test rows, or without a value.
    """

    def __init__(self, metric: str, models: list[str], clients: list[str], values: list[list[float]]) -> None:
        self.metric, self.models, self.clients, self.values = metric, models, clients, values

    @property
    def frame(self) -> Any:
        """A pandas data frame, models by clients."""
        made = frame(self.values, "matrix.values", index=self.models, columns=self.clients)
        return made.rename_axis(index=CORNER, columns="client")

    @property
    def means(self) -> tuple[float, float]:
        """Plain means of the models on their own client's rows, and on all others' rows; NaN without a value."""
        own: list[float] = []
        others: list[float] = []
        for model, row in zip(self.models, self.values, strict=True):
            for client, value in zip(self.clients, row, strict=True):
                if not math.isnan(value):
                    (own if client == model else others).append(value)
        return fmean(own) if own else math.nan, fmean(others) if others else math.nan

    def markdown(self) -> str:
        """Return a table in Markdown, each model's own client in bold."""
        # the first column has the names
        places = {client: place for place, client in enumerate(self.clients, 1)}
        bold = {(at, places[model]) for at, model in enumerate(self.models, 1) if model in places}
        return markdown_table(self._cells(), bold)

    def plot(self) -> "Figure":
        """Plot a heat map with clients' names; a frame marks each model's own client."""
        return plot_cross_matrix(self.values, self.models, self.clients, self.metric)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``matrix.csv``, ``matrix.md`` and ``matrix.png``, and return their paths.

        Args:
            folder: the folder, made if missing.
        """
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        files = [place / f"matrix.{ending}" for ending in ("csv", "md", "png")]
        rows = zip(self.models, self.values, strict=True)
        write_rows(files[0], [{CORNER: model, **dict(zip(self.clients, own, strict=True))} for model, own in rows])
        files[1].write_text(f"{self.markdown()}\n", encoding="utf-8")
        self.plot().savefig(files[2], dpi=150)
        return files

    def __repr__(self) -> str:
        own, others = map(self._written, self.means)
        return f"{text_table(self._cells())}\n{self.metric}: own rows {own}, others' rows {others}"

    def _cells(self) -> list[list[str]]:
        rows = [[model, *map(self._written, row)] for model, row in zip(self.models, self.values, strict=True)]
        return [[CORNER, *self.clients], *rows]

    def _written(self, value: float) -> str:
        return "none" if math.isnan(value) else Monitor(self.metric.removeprefix("test/")).written(value)


def cross_matrix(
    federation: Federation, metric: str | None = None, clients: Sequence[int | str] | None = None
) -> CrossMatrix:
    """Return a metric of clients' models, the models of all evaluations, on every client's test rows.

    Rows become inputs as those of their own client, such as by the client's own scaling. A model that its method
    adapts to samples is adapted to its own client's, and not to those that it is tested on.

    Args:
        federation: a trained federation.
        metric: the metric, such as ``acc`` or ``test/acc``; None takes the one that selects the best round.
        clients: names or ids of the clients whose models are tested; None takes all.

    Raises:
        MisconfigurationException: if there is no such client or metric, or if models or rows are elsewhere.
    """
    data, trainer = federation.data, federation.trainer
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"trainer.matrix tests all clients in one process, and trainer.devices asks for {trainer.world_size}; take "
            "devices=1, with ckpt_path= of the run."
        )
    known = range(data.num_clients)
    models = list(known) if clients is None else [data.client_id(client) for client in clients]
    if strangers := [client for client in models if client not in known]:
        raise MisconfigurationException(
            f"client {data.client_label(strangers[0])} is new and took no part in the run; leave it out of clients."
        )
    # the record names it with its split, and users may do so as well
    name = federation.monitor.metric if metric is None else metric.removeprefix("test/")
    held: list[Any] = []
    values = []
    for client in models:
        model = federation.model_of(client).eval()
        engine = Sequential(model, federation.options.work(data), trainer.precision_plugin)
        # gathered once for all models
        held = held or [data.client(other).to(engine.device, model.dtype) for other in known]  # type: ignore[arg-type]
        with torch.no_grad():
            found = [own_values(engine.metrics_on(each, ("test",)).get("test", {})) for each in held]
        check_metric(name, found)
        values.append([own.get(name, math.nan) for own in found])
    names = [str(data.client_name(client)) for client in known]
    return CrossMatrix(f"test/{name}", [names[client] for client in models], names, values)


def check_metric(name: str, found: Sequence[dict[str, float]]) -> None:
    """Refuse a metric that no client has.

    Args:
        name: the metric.
        found: the test metrics of one model, by client.

    Raises:
        MisconfigurationException: if no client has test rows, or none the metric.
    """
    there = sorted({metric for own in found for metric in own})
    if not there:
        raise MisconfigurationException(
            "no client has test rows for a matrix; give the data a data.test_fraction above 0, or test sets."
        )
    if name not in there:
        raise MisconfigurationException(
            f"metric={name!r} is not of each client's test; take one of {', '.join(there)}."
        )
