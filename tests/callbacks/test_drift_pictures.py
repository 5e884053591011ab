"""The picture of a metric through changes of clients' samples."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Pause, blobs, equal, fit, make_client
from pfl_lightning.callbacks import DriftPictures
from pfl_lightning.data import InputDrift
from pfl_lightning.plots import plot_drift

pytestmark = pytest.mark.filterwarnings("error:DriftPictures.*")
DRIFT = [InputDrift(3, shift=4.0, clients=[1, 3])]


def drifting(**settings):
    return blobs(input_drift=DRIFT, **{"val_fraction": 0.2, **settings})


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_the_groups_means_and_the_round_of_change_are_drawn():
    table = torch.tensor([[0.5, 0.6, 0.7], [0.6, 0.8, torch.nan], [0.1, 0.9, 0.5]])
    figure = plot_drift(dict(zip((2, 4, 6), table, strict=True)), {6: [0]})
    shown = lines(figure)
    assert shown["with a change: mean of 1"].get_ydata() == pytest.approx([0.5, 0.6, 0.1])
    assert shown["without: mean of 2"].get_ydata() == pytest.approx([0.65, 0.8, 0.7])
    assert [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_linestyle() == ":"] == [[6, 6]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["round 6: 1 client"]
    # a round without a value has no mean, and a group without a client no line
    empty = plot_drift({1: torch.full((2,), torch.nan), 2: torch.ones(2)}, {2: [0, 1]}, "val/loss")
    assert list(lines(empty)["with a change: mean of 2"].get_xdata()) == [2] and "without: mean of 0" not in lines(
        empty
    )


def test_a_resumed_run_keeps_what_was_measured(tmp_path):
    kept = [DriftPictures() for _ in range(3)]
    whole = fit(make_client(), drifting(), callbacks=[kept[0]], max_rounds=4)
    assert equal(dict(whole.weights), dict(fit(make_client(), drifting(), max_rounds=4).weights))
    for (round, values), row in zip(kept[0].values.items(), whole.rows, strict=True):
        assert round == row["round"] and float(values.min()) == pytest.approx(row["val/acc_worst"])
    fit(make_client(), drifting(), tmp_path, callbacks=[kept[1], Pause(3)], max_rounds=4)
    run = fit(make_client(), drifting(), tmp_path, callbacks=[kept[2]], ckpt_path="last", max_rounds=4)
    assert equal(kept[0].values, kept[2].values) and len(kept[2].values) == 4
    assert (run.folder / "pictures" / "drift.png").exists()


def test_another_metric_is_kept_for_each_client():
    kept = DriftPictures(metric="test/loss")
    run = fit(make_client(), drifting(), callbacks=[kept], test_every_round=True, evaluate="both")
    last = run.federation.evaluations.results["test"]
    assert kept.values[3].tolist() == pytest.approx([last[client]["loss"] for client in range(4)])


@pytest.mark.filterwarnings("default:DriftPictures.*")
def test_what_it_cannot_draw(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"data\.input_drift"):
        fit(make_client(), blobs(val_fraction=0.2), callbacks=[DriftPictures()])
    with pytest.warns(UserWarning, match="no round has val/f1"):
        run = fit(make_client(), drifting(), tmp_path, callbacks=[DriftPictures(metric="val/f1")])
    assert not (run.folder / "pictures").exists()
