"""Reliability diagrams: the counts behind them, and a run that stays the same."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, equal, fit, make_client
from pfl_lightning.callbacks import CalibrationPictures
from pfl_lightning.callbacks.calibration_pictures import predictions
from pfl_lightning.plots import plot_calibration
from pfl_lightning.tasks import Classification
from tasks_and_data import OfKind, client_of, kinds

pytestmark = pytest.mark.filterwarnings("error:CalibrationPictures.*")


def test_a_client_s_predictions_are_counted_and_the_run_stays_the_same(tmp_path):
    plain = fit(make_client())
    run = fit(make_client(), root=tmp_path, callbacks=[CalibrationPictures(every=2, most=2)])
    assert equal(dict(run.weights), dict(plain.weights))
    assert (run.folder / "pictures" / "calibration.png").exists()
    assert (run.folder / "pictures" / "round_0002" / "calibration.png").exists()
    part, model = run.data.part(1, "test"), make_client()
    model.load_state_dict(dict(run.weights))
    with torch.no_grad():
        outputs = model.eval()(part.x)
    samples, right, probability = predictions(run.federation, 1)
    assert samples.sum() == len(part) and right.sum() == (outputs.argmax(1) == part.y).sum()
    assert float(probability.sum()) == pytest.approx(float(outputs.softmax(1).amax(1).sum()), rel=1e-5)
    error = Classification(3, ("ece",)).configure_metrics()
    error.update(outputs, part.y)
    figure = plot_calibration({"one": torch.stack([samples, right, probability])})
    assert f"{float(error.compute()['ece']):.3f}" in figure.axes[0].get_title()


def test_clients_without_test_samples_are_left_out(tmp_path):
    run = fit(make_client(), blobs(test_fraction=0.0, central_test=0.2))
    assert predictions(run.federation, 0) is None


def test_what_it_cannot_count_is_refused():
    kind = kinds()["Survival"]
    with pytest.raises(MisconfigurationException, match="CalibrationPictures"):
        fit(client_of(kind, type(make_client())), OfKind(kind), callbacks=[CalibrationPictures()])
    with pytest.raises(MisconfigurationException, match=r"CalibrationPictures\.most=0"):
        CalibrationPictures(most=0)
