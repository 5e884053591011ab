"""Each client's model on every client's test rows."""

import csv
import math
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import NETS, Blobs, blobs, equal, fit, make_client, make_trainer, noisy, points
from pfl_lightning.data import ClientDatasets, TensorData
from pfl_lightning.methods import FedPer, Local
from pfl_lightning.methods.registry import METHODS
from sweeps import swept

NAMES = ("Bremen", "Erfurt", "Ulm")


def named():
    x, y = points(90, seed=2)
    return TensorData(x, y, Blobs().task, client=[NAMES[row % 3] for row in range(90)])


def figures_of(run, metric="test/acc"):
    return [row[metric] for row in run.trainer.results.client_rows]


def diagonal(matrix):
    return [row[place] for place, row in enumerate(matrix.values)]


@pytest.mark.parametrize("method", swept(METHODS))
def test_the_diagonal_has_the_test_figures_of_the_run(method, tmp_path):
    """Also of methods that adapt, look up neighbours or mix before an evaluation, and of a checkpoint's models."""
    settings = {"contrastive": False} if method.name == "FedClassAvg" else {}
    make = partial(make_client, method.client, net=noisy, **settings)
    run = fit(make(), root=tmp_path, aggregator=method.new_aggregator(), max_rounds=2)
    figures = figures_of(run)
    weights = {name: value.clone() for name, value in run.weights.items()}
    matrix = run.trainer.matrix()
    assert diagonal(matrix) == figures and matrix.metric == "test/acc"
    assert equal(weights, run.weights)
    again = make_trainer().matrix(make(), blobs(), ckpt_path=run.last, aggregator=method.new_aggregator())
    assert again.values == matrix.values


def test_off_the_diagonal_are_plain_tests_of_the_model_on_the_others_rows():
    run = fit(make_client(FedPer))
    matrix = run.trainer.matrix()
    for model in range(4):
        net = run.trainer.client(model).eval()
        for client in range(4):
            rows = run.data.part(client, "test")
            right = (net(rows.x.to(net.device)).argmax(1).cpu() == rows.y).float().mean().item()
            assert matrix.values[model][client] == pytest.approx(right)
    own, others = matrix.means
    off = [value for row, values in enumerate(matrix.values) for column, value in enumerate(values) if row != column]
    assert own == pytest.approx(np.mean(diagonal(matrix))) and others == pytest.approx(np.mean(off))


def test_one_model_for_all_has_equal_rows_and_other_nets_their_own():
    same = fit(make_client()).trainer.matrix()
    assert all(row == same.values[0] for row in same.values)
    run = fit(make_client(Local, net=NETS))
    assert diagonal(run.trainer.matrix()) == figures_of(run)


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
def test_every_engine_has_the_same_kind_of_matrix(engine):
    run = fit(make_client(FedPer), engine=engine, max_rounds=2)
    assert diagonal(run.trainer.matrix()) == pytest.approx(figures_of(run))


def test_clients_and_another_metric_may_be_chosen_by_name():
    run = fit(make_client(FedPer), named())
    matrix = run.trainer.matrix(metric="test/loss", clients=["Ulm", 0])
    assert (matrix.models, matrix.clients, matrix.metric) == (["Ulm", "Bremen"], list(NAMES), "test/loss")
    assert matrix.values[0][NAMES.index("Ulm")] == pytest.approx(figures_of(run, "test/loss")[NAMES.index("Ulm")])
    with pytest.raises(MisconfigurationException, match=r"Celle.*Bremen"):
        run.trainer.matrix(clients=["Celle"])
    with pytest.raises(MisconfigurationException, match=r"metric='auroc'.*acc, loss"):
        run.trainer.matrix(metric="auroc")


def test_a_data_frame_has_the_names():
    pytest.importorskip("pandas", reason="needs the extra tables")
    matrix = fit(make_client(FedPer), named()).trainer.matrix(clients=["Ulm", 0])
    assert list(matrix.frame.columns) == list(NAMES)
    assert list(matrix.frame.loc["Ulm"]) == matrix.values[0] and list(matrix.frame.loc["Bremen"]) == matrix.values[1]


def test_table_picture_and_files_have_names_and_mark_the_diagonal(tmp_path):
    run = fit(make_client(FedPer), named())
    matrix = run.trainer.matrix()
    *_, last = matrix.markdown().splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "Ulm" and [cell.startswith("**") for cell in cells] == [False, False, False, True]
    axes, scale = matrix.plot().axes
    np.testing.assert_allclose(axes.images[0].get_array(), 100 * np.array(matrix.values))
    assert [text.get_text() for text in axes.get_xticklabels()] == list(NAMES)
    assert [text.get_text() for text in axes.get_yticklabels()] == list(NAMES)
    assert [patch.get_xy() for patch in axes.patches] == [(place - 0.5, place - 0.5) for place in range(3)]
    assert "accuracy, %" in scale.get_ylabel() and axes.get_xlabel() and axes.get_ylabel() and axes.get_title()
    table, markdown, picture = matrix.write(tmp_path / "new")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == list(NAMES)
    assert [[float(row[name]) for name in NAMES] for row in rows] == matrix.values
    assert markdown.read_text().strip() == matrix.markdown() and picture.read_bytes()[:4] == b"\x89PNG"
    assert "Ulm" in repr(matrix) and "own rows" in repr(matrix)


def test_a_client_without_test_rows_has_no_figures_and_no_rows_at_all_are_refused():
    (x, y), rows = points(60, seed=2), slice(0, 20)
    given = {"x": x[rows], "y": y[rows]}
    clients = {"Bremen": (given, given), "Celle": (given, None), "Ulm": (given, given)}
    data = ClientDatasets(clients, Blobs().task)
    run = fit(make_client(FedPer), data)
    matrix = run.trainer.matrix()
    assert all(math.isnan(row[1]) and not math.isnan(row[0]) for row in matrix.values)
    assert matrix.clients[1] == "Celle" and "none" in matrix.markdown() and matrix.plot()
    with pytest.raises(MisconfigurationException, match=r"data\.test_fraction"):
        fit(make_client(), blobs(test_fraction=0.0)).trainer.matrix()


def test_a_trainer_goes_on_after_a_matrix():
    """Neither later rounds nor a later test are changed by it."""
    run = fit(make_client(FedPer), max_rounds=1)
    before = run.trainer.test(run.model)
    run.trainer.matrix()
    assert equal(run.trainer.test(run.model), before) and torch.is_grad_enabled()
    with pytest.raises(MisconfigurationException, match="model"):
        make_trainer().matrix()
