"""Figures show what they are given."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, fit, make_client
from pfl_lightning.plots import (
    plot_calibration,
    plot_class_heatmaps,
    plot_cross_matrix,
    plot_curves,
    plot_distribution_scatter,
    plot_distribution_trace,
    plot_lambda_sweep,
    plot_mixing_matrix,
    plot_partition,
)
from pfl_lightning.plots.runs import plot_by_client

P = torch.tensor([0.6, 0.3, 0.1, 0.0])


def matrix(rows=20, columns=100, seed=0):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))


def images(figure):
    return {axes.get_title(): axes.images[0] for axes in figure.axes if axes.images}


def drawn(figure):
    """The figure as PNG, which finds what only drawing finds."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_heatmaps_show_their_matrices_on_one_colour_scale():
    panels = {"a": matrix(), "b": 3 * matrix(seed=1)}
    figure = plot_class_heatmaps(panels, "norm")
    shown = images(figure)
    for title, values in panels.items():
        np.testing.assert_array_equal(shown[title].get_array(), values.double())
        assert shown[title].get_clim() == (0, float(panels["b"].max()))
        assert (shown[title].axes.get_xlabel(), shown[title].axes.get_ylabel()) == ("class", "client")
    assert len(figure.axes) == 3 and figure.axes[-1].get_ylabel() == "norm"
    assert len(drawn(figure)) > 5000


def test_a_difference_has_a_scale_around_zero():
    shown = images(plot_class_heatmaps({"norms": matrix(), "change": matrix() - 0.75}))
    low, high = shown["change"].get_clim()
    assert -low == high == float((matrix() - 0.75).abs().max())
    assert shown["norms"].get_clim()[0] == 0


def test_unknown_rows_are_left_out_of_the_scale_and_the_picture():
    values = matrix(4, 3)
    values[1] = torch.nan
    figure = plot_class_heatmaps({"a": values, "nothing": torch.full((4, 3), torch.nan)})
    shown = images(figure)["a"]
    assert np.ma.getmaskarray(shown.get_array())[1].all() or np.isnan(shown.get_array()[1]).all()
    assert np.isfinite(shown.get_clim()).all() and drawn(figure)


@pytest.mark.exhaustive
def test_many_panels_go_on_in_a_second_row():
    figure = plot_class_heatmaps({str(i): matrix(3, 3) for i in range(6)})
    assert len(images(figure)) == 6 and len(figure.axes) == 7 and drawn(figure)


def test_the_mixing_matrix_is_shown_as_it_is():
    mixing = torch.eye(5)
    (image,) = images(plot_mixing_matrix(mixing)).values()
    np.testing.assert_array_equal(image.get_array(), mixing)
    assert image.axes.get_xlabel() == "source"


@pytest.mark.exhaustive
def test_a_trace_has_a_line_a_class_and_the_aims_of_classes_that_are_there():
    traces = {"without": matrix(7, 4), "with": matrix(7, 4, seed=1)}
    figure = plot_distribution_trace(traces, P)
    for axes, trace in zip(figure.axes, traces.values(), strict=True):
        lines = [line for line in axes.lines if line.get_linestyle() == "-"]
        aims = [line for line in axes.lines if line.get_linestyle() == ":"]
        np.testing.assert_allclose([line.get_ydata() for line in lines], trace.T)
        assert [line.get_ydata()[0] for line in aims] == pytest.approx([0.6, 0.3, 0.1])
        assert axes.get_xlabel() == "iteration"
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert drawn(figure)


def test_the_scatter_has_a_point_a_class_and_the_diagonal():
    figure = plot_distribution_scatter({"without": (P, torch.full((4,), 0.25)), "with": (P, P)})
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.collections[1].get_offsets(), torch.stack([P, P], 1))
    assert axes.get_xlim() == axes.get_ylim() and len(axes.lines) == 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["without", "with"]
    assert drawn(figure)


def test_the_sweep_shows_zero_and_two_axes():
    figure = plot_lambda_sweep([0, 1, 10, 100], [0.6, 0.7, 0.8, 0.5], [0.4, 0.3, 0.1, 0.0])
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [0.6, 0.7, 0.8, 0.5]
    assert list(right.lines[0].get_ydata()) == [0.4, 0.3, 0.1, 0.0]
    assert left.get_xscale() == "symlog"
    assert [text.get_text() for text in left.get_xticklabels()] == ["0", "1", "10", "100"]
    assert left.get_ylabel() == "accuracy" and "distance" in right.get_ylabel()
    assert drawn(figure)


def test_the_sweep_may_have_no_regulariser_at_all():
    assert drawn(plot_lambda_sweep([0], [0.6], [0.4]))


def test_reliability_diagrams_go_on_in_further_rows_and_the_figure_grows_with_them(monkeypatch):
    monkeypatch.setattr("pfl_lightning.plots.calibration.ACROSS", 2)
    counts = torch.tensor([[4.0, 0.0, 6.0], [1.0, 0.0, 6.0], [2.0, 0.0, 4.5]])
    row, three_rows = (plot_calibration({str(k): counts for k in range(number)}) for number in (2, 5))
    places = [axes.get_subplotspec() for axes in three_rows.axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    (width, height), (same, more) = row.get_size_inches(), three_rows.get_size_inches()
    assert width == same and more > 2 * height
    # without the bin that has no samples
    np.testing.assert_allclose(three_rows.axes[4].collections[0].get_offsets(), [[0.5, 0.25], [0.75, 1.0]])


def test_each_client_has_a_dot_a_method_at_its_value():
    points = {"Local": {"Ulm": (0.5, 0.4, 0.6), "Kiel": (0.2, 0.1, 0.3)}, "FedAvg": {"Kiel": (0.7, 0.6, 0.8)}}
    figure = plot_by_client(points, "accuracy")
    (axes,) = figure.axes
    dots = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert dots["Local"] == ([0.5, 0.2], pytest.approx([-0.2, 0.8])) and dots["FedAvg"] == ([0.7], pytest.approx([1.2]))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Local", "FedAvg"]


def test_a_matrix_of_more_models_is_a_higher_figure_up_to_a_bound():
    few, many = (
        plot_cross_matrix(matrix(models, 2).tolist(), [str(k) for k in range(models)], ["0", "1"]).get_figheight()
        for models in (5, 80)
    )
    assert 2 * few < many < 12


def test_partition_and_curves_are_shown():
    counts = (100 * matrix(3, 4)).long()
    np.testing.assert_array_equal(plot_partition(counts).axes[0].images[0].get_array(), counts)
    (axes,) = plot_curves({"run": [{"round": 1, "val/acc": 0.5}, {"round": 2, "val/acc": "0.75"}]}).axes
    assert list(axes.lines[0].get_ydata()) == [0.5, 0.75]


def test_a_run_s_folder_and_a_data_module_are_shown_too(tmp_path):
    run = fit(make_client(), root=tmp_path, max_rounds=2)
    folder = Path(run.trainer.log_dir)
    for given in (folder, str(folder), {"mine": folder}):
        (axes,) = plot_curves(given).axes
        assert list(axes.lines[0].get_ydata()) == [row["val/acc"] for row in run.rows]
    data = run.federation.data
    np.testing.assert_array_equal(plot_partition(data).axes[0].images[0].get_array(), data.counts)
    with pytest.raises(MisconfigurationException, match=rf"rounds\.csv.*{folder.name}"):
        plot_curves(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"metric='val/mae'.*val/acc"):
        plot_curves(folder, "val/mae")
    with pytest.raises(MisconfigurationException, match="setup"):
        plot_partition(blobs())
