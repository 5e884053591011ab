"""Figures of features, conductance and local epochs show what they are given."""

import io

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from scipy.stats import spearmanr

from pfl_lightning.plots.features import plot_conductance, plot_tsne, spearman
from pfl_lightning.plots.runs import plot_against_local_epochs

# but for files of earlier tests, which are collected at any time
pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def drawn(figure):
    """The figure as PNG, which finds what only drawing finds."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def table(clients, labels, points, seed=0):
    """Points of each of the clients, as a table or, as text, as a file gives it."""
    draw = np.random.RandomState(seed)
    return [
        {"client": client, "label": draw.choice(labels), "x": float(draw.randn()), "y": float(draw.randn())}
        for client in clients
        for _ in range(points)
    ]


def colours_of(axes):
    """The colour of each point, by its position."""
    (points,) = axes.collections
    places = map(tuple, np.asarray(points.get_offsets()))
    return dict(zip(places, map(tuple, points.get_facecolors()[:, :3]), strict=True))


def panels(figure):
    return [axes for axes in figure.axes if axes.collections and axes.get_title()]


def test_points_have_one_colour_a_label_and_one_a_client():
    rows = table([4, 7, 9], [0, 2, 5], 8)
    figure = plot_tsne({"Local": rows})
    by_label, by_client = panels(figure)
    assert (by_label.get_title(), by_client.get_title()) == ("Local: by label", "Local: by client")
    for axes, quantity in ((by_label, "label"), (by_client, "client")):
        colours = colours_of(axes)
        assert len(colours) == 24
        pairs = {(row[quantity], colours[row["x"], row["y"]]) for row in rows}
        assert len(pairs) == len({value for value, _ in pairs}) == len({colour for _, colour in pairs}) == 3
        assert axes.get_xticks().size == 0
    assert drawn(figure)


def test_runs_have_rows_of_their_own_in_the_same_colours():
    runs = {"Local": table([0, 1, 2], [0, 1, 3], 6), "FedClassAvg": table([1, 2], [3, 8], 6, seed=1)}
    figure = plot_tsne(runs)
    grid = panels(figure)
    assert [axes.get_title() for axes in grid] == [
        f"{name}: by {what}" for name in runs for what in ("label", "client")
    ]
    for quantity in ("label", "client"):
        pairs = {
            (row[quantity], colours_of(axes)[row["x"], row["y"]])
            for name, rows in runs.items()
            for axes in grid
            if axes.get_title() == f"{name}: by {quantity}"
            for row in rows
        }
        values = {value for value, _ in pairs}
        assert len(pairs) == len(values) == {"label": 4, "client": 3}[quantity]
        (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == quantity]
        assert [text.get_text() for text in bar.get_yticklabels()] == [str(value) for value in sorted(values)]
    assert drawn(figure)


def test_no_client_covers_the_others():
    rows = table([0, 1], [0], 50)
    (_, by_client) = panels(plot_tsne({"": rows}))
    client_at = {(row["x"], row["y"]): row["client"] for row in rows}
    order = [client_at[tuple(place)] for place in by_client.collections[0].get_offsets().tolist()]
    assert sorted(order) == [0] * 50 + [1] * 50 and 10 < sum(order[50:]) < 40


def test_a_file_of_text_gives_the_same_picture():
    rows = table([0, 3], [1, 2], 5)
    text = [{name: str(value) for name, value in row.items()} for row in rows]
    assert drawn(plot_tsne({"": rows})) == drawn(plot_tsne({"": text}))
    assert panels(plot_tsne({"": rows}))[0].get_title() == "By label"


@pytest.mark.parametrize(("clients", "labels"), [(1, 1), (11, 20), (100, 200)])
def test_any_number_of_clients_and_labels_is_drawn(clients, labels):
    rows = [row | {"label": place % labels} for place, row in enumerate(table(range(clients), [0], 40))]
    figure = plot_tsne({"FedAvg": rows})
    for quantity, count in (("client", clients), ("label", labels)):
        (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == quantity]
        assert 1 <= len(bar.get_yticklabels()) <= 20
        (axes,) = [axes for axes in panels(figure) if axes.get_title().endswith(quantity)]
        assert len(set(colours_of(axes).values())) == count
    assert drawn(figure) and max(figure.get_size_inches()) < 12


def test_units_are_sorted_by_the_first_client_and_shown_by_rank():
    conductance = torch.tensor([[0.3, -0.1, 0.2, 9.0], [4.0, 1.0, 3.0, 2.0]])
    figure = plot_conductance(conductance, [5, 2], "Class 3")
    left, right = figure.axes[:2]
    np.testing.assert_array_equal(left.images[0].get_array(), [[1, 1], [2, 3], [3, 4], [4, 2]])
    assert [text.get_text() for text in left.get_xticklabels()] == ["5", "2"]
    assert "client 5" in left.get_ylabel() and left.get_yticks().size == 0
    rho = spearmanr(*conductance.numpy())[0]
    np.testing.assert_allclose(right.images[0].get_array(), [[1, rho], [rho, 1]])
    assert [text.get_text() for text in right.texts] == ["1.00", f"{rho:.2f}", f"{rho:.2f}", "1.00"]
    assert right.get_title().endswith(f"mean {rho:.2f}") and figure.texts[0].get_text() == "Class 3"
    assert drawn(figure)


def test_equal_values_share_a_rank_and_a_client_without_differences_has_no_correlation():
    conductance = torch.tensor([[0.0, 0.0, 1.0], [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]])
    correlation = spearman(conductance)
    assert np.isnan(correlation[1]).all() and np.isnan(correlation[:, 1]).all()
    assert correlation[0, 2] == pytest.approx(spearmanr([0, 0, 1], [1, 2, 3])[0])
    figure = plot_conductance(conductance, [0, 1, 2])
    left, right = figure.axes[:2]
    np.testing.assert_array_equal(left.images[0].get_array()[:, 0], [1.5, 1.5, 3])
    assert right.get_title().endswith(f"mean {correlation[0, 2]:.2f}") and len(right.texts) == 4
    assert drawn(figure)


@pytest.mark.parametrize(("clients", "units"), [(2, 512), (8, 512), (100, 64)])
@pytest.mark.by_default("2-512")
def test_any_number_of_units_and_clients_is_drawn(clients, units):
    figure = plot_conductance(torch.randn(clients, units), range(clients))
    assert drawn(figure) and max(figure.get_size_inches()) <= 14
    assert len(figure.axes[0].get_xticks()) <= 20 and bool(figure.axes[1].texts) == (clients <= 10)


def rows(*accuracies):
    return [{"round": place, "val/acc": value} for place, value in enumerate(accuracies, start=1)]


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [1, 2, 3]), (5, [5, 10, 15]), ([1, 2, 3], [1, 3, 6]), ([2, 4], [2, 6, 10])]
)
def test_a_round_stands_at_the_epochs_done_until_its_end(epochs, expected):
    figure = plot_against_local_epochs({"KT-pFL": (rows(0.1, 0.2, 0.4), epochs)})
    (axes,) = figure.axes
    (line,) = axes.lines
    assert list(map(tuple, line.get_xydata())) == list(zip(expected, [0.1, 0.2, 0.4], strict=True))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("local epochs", "validation accuracy, %") and drawn(figure)


def test_rounds_that_were_not_evaluated_still_count():
    known = [{"round": "2", "test/acc": "0.5"}, {"round": "3", "test/acc": ""}, {"round": "4", "test/acc": "0.75"}]
    runs = {"FedAvg": (rows(0.1, 0.2), 3), "KT-pFL": (known, [1, 2, 3, 4])}
    figure = plot_against_local_epochs({"KT-pFL": runs["KT-pFL"]}, "test/acc")
    assert list(map(tuple, figure.axes[0].lines[0].get_xydata())) == [(3, 0.5), (10, 0.75)]
    assert runs["FedAvg"][0] == rows(0.1, 0.2) and known[0]["round"] == "2"


@pytest.mark.parametrize("epochs", [0, [], [2, 0]])
def test_epochs_are_at_least_one(epochs):
    with pytest.raises(MisconfigurationException, match=r"runs\['FedAvg'\]: local epochs"):
        plot_against_local_epochs({"FedAvg": (rows(0.1), epochs)})
