"""The results of a run, of a trainer and of a folder."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import blobs, fit, make_client, make_trainer
from pfl_lightning import Results
from pfl_lightning.data import Natural, TensorData
from pfl_lightning.methods import FedPer
from pfl_lightning.plots import plot_against_local_epochs, plot_curves, plot_mean_curves, plot_partition
from pfl_lightning.tasks import Classification


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(make_client(FedPer), root=tmp_path_factory.mktemp("runs"), max_rounds=3)


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas", reason="needs the extra tables")


def heights(figure):
    return list(figure.axes[0].lines[0].get_ydata())


def test_a_trainer_has_its_results_as_data_frames(run, pandas):
    results = run.trainer.results
    assert list(results.rounds["round"]) == [1, 2, 3]
    assert list(results.rounds["val/acc"]) == [row["val/acc"] for row in run.rows]
    assert list(results.clients["client"]) == [0, 1, 2, 3] and results.clients["test/acc"].between(0, 1).all()
    (chosen,) = results.selected.to_dict("records")
    best = results.rounds.loc[results.rounds["val/acc"].idxmax()]
    assert (chosen["selected/round"], chosen["selected/val/acc"]) == (best["round"], best["val/acc"])
    assert "selected/test/acc" in chosen and results.predictions.empty


def test_the_chosen_round_is_in_lightnings_metrics_by_the_same_names(tmp_path, pandas):
    trainer = fit(make_client(), root=tmp_path, max_rounds=2).trainer
    (chosen,) = trainer.results.selected.to_dict("records")
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("selected/")}
    assert metrics == pytest.approx(chosen, rel=1e-6) and "selected/val/acc" in metrics


def test_predictions_are_kept_beside_the_rounds(tmp_path, pandas):
    trainer = fit(make_client(), root=tmp_path, max_rounds=1).trainer
    predicted = trainer.predict(clients=[0, 2])
    table = trainer.results.predictions
    assert len(table) == sum(map(len, predicted.values())) and set(table["client"]) == {0, 2}
    own = table[table["client"] == 2]
    assert list(own["row"]) == list(range(len(predicted[2])))
    assert list(own["p_1"]) == predicted[2].columns()["p_1"]
    assert list(trainer.results.rounds["round"]) == [1] and len(trainer.results.clients) == 4


def test_a_folder_has_the_same_results(run, pandas):
    results, of_folder = run.trainer.results, Results.of(run.folder)
    for table in ("rounds", "clients", "selected"):
        pandas.testing.assert_frame_equal(getattr(of_folder, table), getattr(results, table))
    assert of_folder.name == results.name == "FedPer-Blobs" and of_folder.predictions.empty
    assert repr(of_folder) == repr(results)


def test_names_like_numbers_stay_names(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(60, 6)).astype("float32"), np.arange(60) % 3
    data = TensorData(x, y, Classification(3), client=["07", "1e3"] * 30, partitioner=Natural())
    run = fit(make_client(), data, root=tmp_path, max_rounds=1, clients_per_round=1)
    results = Results.of(run.folder)
    assert [row["name"] for row in results.client_rows] == ["07", "1e3"]
    assert [row["val/acc"] for row in results.rows] == [row["val/acc"] for row in run.rows]


def test_a_picture_has_words_on_its_axes_and_the_chosen_round(run):
    (axes,) = run.trainer.results.plot().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "validation accuracy, %")
    assert axes.get_title().startswith("FedPer-Blobs") and len(axes.lines) == 2
    chosen = run.trainer.results.summary["selected"]["round"]
    assert f"round {chosen}" in axes.get_legend().get_texts()[1].get_text()
    (axes,) = run.trainer.results.plot("train/loss").axes
    assert "loss" in axes.get_ylabel()
    with pytest.raises(MisconfigurationException, match="val/mae"):
        run.trainer.results.plot("val/mae")


def test_pictures_take_a_folder_a_trainer_and_results(run):
    held = [row["val/acc"] for row in run.rows]
    for given in (run.folder, str(run.folder), run.trainer, run.trainer.results, Results.of(run.folder)):
        assert heights(plot_curves(given)) == held
        assert heights(plot_curves({"mine": given})) == held
        assert heights(plot_mean_curves({"mine": [given, given]})) == held
        assert heights(plot_against_local_epochs({"mine": (given, 2)})) == held


def test_pictures_take_a_data_frame(run, pandas):
    assert heights(plot_curves({"mine": run.trainer.results.rounds})) == [row["val/acc"] for row in run.rows]


def test_partitions_take_a_trainer_data_and_a_finished_run(run):
    for given in (run.trainer, run.data):
        np.testing.assert_array_equal(plot_partition(given).axes[0].images[0].get_array(), run.data.counts)
    sizes = [run.data.size(client, "train") for client in range(4)]
    for given in (run.folder, run.trainer.results):
        (axes,) = plot_partition(given).axes
        assert [bar.get_height() for bar in axes.patches] == sizes
        assert axes.get_ylabel() == "training samples" and "classes" in axes.get_title()


@pytest.mark.parametrize("given", [3, None, FedPer, [{"round": 1}]], ids=str)
def test_what_is_no_run_is_refused(given):
    with pytest.raises(MisconfigurationException, match=r"give .*folder"):
        plot_curves(given)
    with pytest.raises(MisconfigurationException, match=r"give .*folder"):
        plot_curves({"mine": given} if not isinstance(given, list) else {"mine": [1]})
    with pytest.raises(MisconfigurationException, match=r"give .*folder"):
        plot_partition(given)
    with pytest.raises(MisconfigurationException, match=r"give .*folder"):
        Results.of(given)


def test_a_folder_or_data_without_rounds_is_refused(tmp_path, run):
    with pytest.raises(MisconfigurationException, match=r"rounds\.csv"):
        Results.of(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"clients\.csv"):
        plot_partition(tmp_path)
    with pytest.raises(MisconfigurationException, match="Blobs"):
        plot_curves(run.data)


def test_before_the_first_round_there_is_nothing_and_a_picture_is_refused():
    trainer = make_trainer()
    assert not trainer.results.rows and not trainer.results.client_rows and not trainer.results.summary
    assert "no run yet" in repr(trainer.results) and "<img" not in trainer.results._repr_html_()
    with pytest.raises(MisconfigurationException, match="val/acc"):
        trainer.results.plot()
    with pytest.raises(MisconfigurationException, match="run"):
        plot_partition(trainer)


def test_a_notebook_shows_the_text_and_the_curve(run):
    shown = run.trainer.results._repr_html_()
    assert "FedPer-Blobs" in shown and "data:image/png;base64," in shown


def test_a_trainer_shows_its_settings_and_its_run(run):
    assert "FedPer on Blobs" in repr(run.trainer) and "round 3" in repr(run.trainer)
    trainer = make_trainer(local_epochs=2, precision="32-true")
    assert repr(trainer).startswith("FederatedTrainer(max_rounds=3")
    assert "local_epochs=2" in repr(trainer) and "precision='32-true'" in repr(trainer)
    assert "clients_per_round" not in repr(trainer)


def test_without_pandas_one_sentence_tells_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MisconfigurationException, match=r"pandas.*pfl-lightning\[tables\].*results\.rows"):
        _ = run.trainer.results.rounds
    assert len(run.trainer.results.rows) == 3 and run.trainer.results.plot() and run.trainer.results._repr_html_()


def test_a_run_stopped_before_its_end_has_rounds_alone():
    results = Results([{"round": 1, "val/mae": 0.5, "val/mae_worst": 0.7}], name="mine")
    assert results.metric == "val/mae" and not results.client_rows and "no test yet" in repr(results)
    assert heights(plot_curves(SimpleNamespace(results=results), "val/mae")) == [0.5]
    data = blobs()
    data.setup()
    assert plot_partition(data)
