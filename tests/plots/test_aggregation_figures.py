"""Figures of aggregation weights show what they are given."""

import io

import numpy as np
import pytest
import torch

from pfl_lightning.plots import (
    plot_distances,
    plot_server_terms,
    plot_weight_heatmaps,
    plot_weights,
    plot_weights_against,
)

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


def history(rounds, clients, share=1.0, seed=0):
    """Numbers of rounds, weights and shares of samples, both with NaN where a client took no part."""
    g = torch.Generator().manual_seed(seed)
    out = torch.rand(rounds, clients, generator=g) > share
    out[:, 0] = False
    weights, samples = (torch.rand(rounds, clients, generator=g).double().masked_fill(out, torch.nan) for _ in "ab")
    scaled = (values / values.nansum(1, keepdim=True) for values in (weights, samples))
    return (list(range(1, rounds + 1)), *scaled)


def lines_of(axes, style):
    return [line for line in axes.lines if line.get_linestyle() == style]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_each_of_few_clients_has_a_line_and_its_share_dashed():
    rounds, weights, samples = history(5, 3)
    figure = plot_weights(rounds, weights, samples)
    (axes,) = figure.axes
    for style, values in (("-", weights), ("--", samples)):
        lines = lines_of(axes, style)
        np.testing.assert_array_equal([line.get_ydata() for line in lines], values.T)
        assert [list(line.get_xdata()) for line in lines] == [rounds] * 3
        assert [line.get_color() for line in lines] == ["C0", "C1", "C2"]
    assert legend(figure) == ["client 0", "client 1", "client 2", "$n_k/n$"]
    assert axes.get_xlabel() == "round" and "lambda" in axes.get_ylabel() and drawn(figure)


@pytest.mark.parametrize(("count", "style"), [(1, "None"), (2, "-")])
def test_one_round_alone_is_a_point_and_two_are_joined(count, style):
    (axes,) = plot_weights(*history(count, 2)).axes
    weights = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_linestyle() for line in weights] == [style] * 2


def test_of_many_clients_those_farthest_from_their_shares_are_named():
    rounds, weights, _ = history(4, 100)
    samples = weights.clone()
    for client in (93, 7, 50):
        samples[:, client] += 0.01
    figure = plot_weights(rounds, weights, samples)
    assert legend(figure)[:6] == [f"client {k}" for k in (0, 1, 2, 7, 50, 93)]
    assert legend(figure)[-1].startswith("94 others")
    grey = [line for line in lines_of(figure.axes[0], "-") if line.get_color() == "grey"]
    assert len(grey) == 94 and drawn(figure)


def test_clients_that_take_turns_have_points_and_no_lines_through_rounds_of_others():
    rounds, weights, samples = history(6, 4, share=0.5)
    weights[:, 3] = samples[:, 3] = torch.nan
    figure = plot_weights(rounds, weights, samples)
    (axes,) = figure.axes
    assert weights.isnan()[:, 1].any() and {line.get_linestyle() for line in axes.lines} == {"None"}
    assert legend(figure) == ["client 0", "client 1", "client 2", "$n_k/n$"]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    np.testing.assert_array_equal([line.get_ydata() for line in points], weights.T[:3])
    assert drawn(figure)


@pytest.mark.parametrize(("rounds", "clients", "share"), [(1, 1, 1.0), (1, 4, 1.0), (1000, 100, 1.0), (1000, 100, 0.1)])
@pytest.mark.by_default("1-4-1.0")
def test_any_size_is_drawn(rounds, clients, share):
    shown = history(rounds, clients, share)
    for draw in (plot_weights, plot_weight_heatmaps):
        figure = draw(*shown)
        assert drawn(figure)
        assert max(figure.get_size_inches()) <= 12
        for axes in figure.axes:
            assert all(tick == int(tick) for tick in axes.get_xticks()) or not axes.get_xlabel()
    legends = plot_weights(*shown).legends[0].get_texts()
    assert len(legends) <= 8


def test_heatmaps_show_the_weights_and_their_distance_to_the_shares():
    rounds, weights, samples = history(5, 3, share=0.6)
    rounds = [number + 20 for number in rounds]
    figure = plot_weight_heatmaps(rounds, weights, samples)
    top, bottom = (axes.images[0] for axes in figure.axes[:2])
    np.testing.assert_array_equal(np.ma.filled(top.get_array(), np.nan), weights.T)
    np.testing.assert_array_equal(np.ma.filled(bottom.get_array(), np.nan), (weights - samples).T)
    assert top.get_clim() == (0, float(weights.nan_to_num().max()))
    low, high = bottom.get_clim()
    assert -low == high == float((weights - samples).nan_to_num().abs().max())
    assert top.get_extent() == [20.5, 25.5, 2.5, -0.5] and top.get_interpolation() == "nearest"
    assert [axes.get_ylabel() for axes in figure.axes[:2]] == ["client", "client"] and drawn(figure)


def test_differences_of_rounding_have_no_colour():
    rounds, weights, _ = history(3, 4)
    figure = plot_weight_heatmaps(rounds, weights, weights + 1e-17)
    image = figure.axes[1].images[0]
    assert image.get_clim()[1] > 1e-8
    colours = image.to_rgba(image.get_array())[..., :3]
    assert colours.min() > 0.9 and drawn(figure)


def test_weights_are_points_against_shares_and_norms():
    weights, samples, norms = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.4, 0.5], [3.0, 2.0, 1.0]]).double()
    figure = plot_weights_against(weights, samples, norms, [4, 7, 9], "Round 3")
    left, right = figure.axes
    np.testing.assert_array_equal(left.collections[0].get_offsets(), torch.stack([samples, weights], 1))
    np.testing.assert_array_equal(right.collections[0].get_offsets(), torch.stack([norms, weights], 1))
    assert (left.get_title(), right.get_title()) == ("rank correlation 1.00", "rank correlation -1.00")
    assert [text.get_text() for text in left.texts] == ["4", "7", "9"]
    assert len(left.lines) == 1 and not right.lines
    assert figure.texts[0].get_text() == "Round 3" and drawn(figure)


def test_points_of_many_clients_have_no_names():
    figure = plot_weights_against(*torch.rand(3, 50).double(), list(range(50)))
    assert not any(axes.texts for axes in figure.axes) and drawn(figure)


@pytest.mark.parametrize("known", [0.25, torch.nan])
def test_equal_or_unknown_values_have_no_rank_correlation(known):
    same = torch.full((4,), known).double()
    figure = plot_weights_against(torch.full((4,), 0.25), torch.full((4,), 0.25), same, [0, 1, 2, 3])
    assert all("no rank correlation" in axes.get_title() for axes in figure.axes) and drawn(figure)


ROWS = [
    {"round": 1, "cohort": "0 1", "lr": 0.1, "server/sim": 2.0, "server/kind": "x", "time/aggregate": 0.5},
    {"round": 2, "cohort": "0 1", "lr": 0.1, "server/sim": 1.5, "server/reg": 0.25, "time/aggregate": 0.75},
]


def test_each_number_of_the_server_has_a_panel():
    figure = plot_server_terms(ROWS)
    shown = {axes.get_title(): axes for axes in figure.axes}
    assert list(shown) == ["sim", "reg", "aggregation time"]
    points = {title: list(map(tuple, axes.lines[0].get_xydata())) for title, axes in shown.items()}
    assert points == {"sim": [(1, 2.0), (2, 1.5)], "reg": [(2, 0.25)], "aggregation time": [(1, 0.5), (2, 0.75)]}
    assert shown["aggregation time"].get_ylabel() == "seconds" and drawn(figure)


@pytest.mark.exhaustive
def test_many_terms_go_on_in_further_rows_and_none_is_no_error():
    rows = [{"round": 1, **{f"server/{i}": float(i) for i in range(10)}}]
    figure = plot_server_terms(rows)
    assert len(figure.axes) == 10 and drawn(figure)
    assert not plot_server_terms([]).axes


def test_a_pair_of_clients_is_a_point_with_the_rank_correlation_above():
    labels = torch.tensor([0.0, 0.5, 1.0, 0.2]).double()
    cosine = torch.tensor([0.1, 0.3, torch.nan, 0.2]).double()
    figure = plot_distances(labels, {"cosine": cosine, "L2": 1 - labels}, "Round 9")
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("rank correlation 1.00", "rank correlation -1.00")
    assert (left.get_ylabel(), right.get_ylabel()) == ("cosine", "L2")
    np.testing.assert_allclose(right.collections[0].get_offsets(), torch.stack([labels, 1 - labels], 1))
    assert "label distributions" in left.get_xlabel() and figure.texts[0].get_text() == "Round 9" and drawn(figure)


def test_a_cloud_of_pairs_is_drawn():
    labels = torch.rand(4950).double()
    assert drawn(plot_distances(labels, {"L2": torch.rand(4950).double()}))
