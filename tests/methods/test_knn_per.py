import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import CLASSES, blobs, equal, fit, make_client, near, noisy
from pfl_lightning.methods import FedAvg, KNNPer
from pfl_lightning.methods.knn_per import nearest, shares
from pfl_lightning.tasks import Poisson, Quantile
from tasks_and_data import OfKind, client_of, kinds


def neighbour_shares(h, known, labels, classes, count, scale):
    rows, weights = nearest(h, known, count, scale)
    return shares(weights, labels[rows], classes)


@pytest.mark.parametrize(("count", "scale"), [(3, 1.0), (50, 0.5)])
def test_shares_by_hand(count, scale):
    generator = torch.Generator().manual_seed(0)
    h, known = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (5, 12))
    labels = torch.randint(3, (12,), generator=generator)
    ours = neighbour_shares(h, known, labels, 3, count, scale)
    for i in range(5):
        squares = [float((h[i] - k).square().sum()) for k in known]
        near = sorted(range(12), key=squares.__getitem__)[:count]
        weights = [math.exp(-squares[j] / (4 * scale)) for j in near]
        expected = [
            sum(w for w, j in zip(weights, near, strict=True) if labels[j] == c) / sum(weights) for c in range(3)
        ]
        assert ours[i].tolist() == pytest.approx(expected)


def test_an_infinite_scale_and_all_neighbours_give_the_shares_of_classes():
    known, labels = torch.randn(6, 2), torch.tensor([0, 0, 0, 1, 2, 2])
    ours = neighbour_shares(torch.randn(3, 2), known, labels, 3, 6, math.inf)
    torch.testing.assert_close(ours, torch.tensor([[3 / 6, 1 / 6, 2 / 6]]).expand(3, 3))


def test_far_neighbours_do_not_vanish():
    ours = neighbour_shares(torch.zeros(1, 2), torch.full((1, 2), 1e6), torch.tensor([1]), 2, 1, 1.0)
    assert ours.tolist() == [[0.0, 1.0]]


def test_without_a_share_it_is_fedavg_bit_for_bit_and_with_one_only_predictions_differ():
    off, on, average = (fit(make_client(m, net=noisy)) for m in (partial(KNNPer, share=0.0), KNNPer, FedAvg))
    assert equal(off.weights, average.weights) and equal(on.weights, average.weights)
    assert [row["val/loss"] for row in off.rows] == [row["val/loss"] for row in average.rows]
    assert not near([row["val/loss"] for row in on.rows], [row["val/loss"] for row in average.rows])


def test_predictions_are_mixtures_with_the_client_s_own_samples():
    run = fit(make_client(KNNPer, share=0.3, neighbours=4))
    model, data = run.model.eval(), run.data.client(2)
    model.receive({}, run.federation.aggregator.download(2), data)
    x = data.test.x
    h, known = model.net.features(x), model.net.features(data.train.x)
    near = neighbour_shares(h, known, data.train.y, CLASSES, 4, 1.0)
    expected = 0.3 * near + 0.7 * model.net(x).softmax(1)
    torch.testing.assert_close(model(x).exp(), expected)
    model.receive({}, run.federation.aggregator.download(2), None)
    torch.testing.assert_close(model(x), model.net(x))


def test_with_the_whole_share_losses_are_finite():
    run = fit(make_client(KNNPer, share=1.0, neighbours=1), blobs(30, 60, by_class=True), max_rounds=1)
    assert all(math.isfinite(row["val/loss"]) for row in run.rows)


@pytest.mark.parametrize("evaluate", ["before", "after"])
def test_many_clients_at_once_train_as_one_does_and_are_evaluated_by_their_own_samples(evaluate):
    alone, many = (fit(make_client(KNNPer), engine=e, evaluate=evaluate) for e in ("sequential", "vectorised"))
    assert many.rows[-1]["val/loss"] == pytest.approx(alone.rows[-1]["val/loss"], rel=1e-5)
    assert many.rows[-1]["val/loss"] != fit(make_client(FedAvg), evaluate=evaluate).rows[-1]["val/loss"]


@pytest.mark.parametrize(("name", "value"), [("share", 1.5), ("neighbours", 0), ("scale", 0.0)])
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value} must be"):
        make_client(KNNPer, **{name: value})


def model_with_data(task, **settings):
    """A client of a task with its data, as it is before an evaluation."""
    data = OfKind(kinds()[task])
    data.setup()
    model = client_of(kinds()[task], partial(KNNPer, **settings)).double().eval()
    own = data.client(1).to("cpu", torch.float64)
    with torch.no_grad():
        model.receive({}, {"weights": model.state_dict()}, own)
    return model, own


def test_a_quantity_is_mixed_with_the_mean_of_the_nearest_targets():
    model, own = model_with_data("Regression", share=0.4, neighbours=3, scale=0.5)
    x, y = own.test.x, own.train.y.view(len(own.train), -1)
    h, known = model.net.features(x), model.net.features(own.train.x)
    for i in range(len(x)):
        squares = (h[i] - known).square().sum(1)
        near = squares.argsort()[:3]
        weights = torch.exp(-squares[near] / (0.5 * h.shape[1]))
        mean = (weights[:, None] * y[near]).sum(0) / weights.sum()
        torch.testing.assert_close(model(x)[i], 0.4 * mean + 0.6 * model.net(x)[i])


def test_each_position_of_a_text_has_neighbours_and_those_that_do_not_count_are_none(monkeypatch):
    # all neighbours: equal letters may have equal features, and of ties any may be among the nearest
    model, own = model_with_data("NextToken", share=0.4, neighbours=1000, scale=0.5)
    own.train.y[0, :2] = model.task.ignore_index
    with torch.no_grad():
        model.receive({}, {"weights": model.state_dict()}, own)
    counted = own.train.y != model.task.ignore_index
    assert len(model.known[0]) == counted.sum() < own.train.y.numel()
    known, labels = model.net.features(own.train.x)[counted], own.train.y[counted]
    h, whole = model.net.features(own.test.x), model(own.test.x)
    for i, t in ((0, 0), (1, 2)):
        near = neighbour_shares(h[i, t][None], known, labels, model.task.outputs, 1000, 0.5)[0]
        torch.testing.assert_close(whole[i, t].exp(), 0.4 * near + 0.6 * model.net(own.test.x)[i, t].softmax(0))
    # a memory for one query at a time
    monkeypatch.setattr("pfl_lightning.methods.knn_per.DISTANCES", 1)
    torch.testing.assert_close(model(own.test.x), whole)


def test_features_of_whole_texts_have_no_positions():
    model, own = model_with_data("NextToken")
    model.net.features = torch.nn.Sequential(model.net.features, torch.nn.Flatten())
    with torch.no_grad(), pytest.raises(MisconfigurationException, match=r"\[samples, positions, size\].*CharGRU"):
        model.receive({}, {"weights": {}}, own)


@pytest.mark.parametrize("task", [Poisson(), Quantile(levels=(0.1, 0.9))])
def test_tasks_whose_outputs_are_no_plain_means_are_refused(task):
    with pytest.raises(MisconfigurationException, match="KNNPer needs the class of each sample"):
        make_client(KNNPer, task=task)
