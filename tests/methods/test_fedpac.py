import re
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD

from federations import CLASSES, HIDDEN, Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning import AggregatorList, Server, WeightedAverage
from pfl_lightning.aggregators import ClassMeans
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import FedAvg, fedpac
from pfl_lightning.methods.alternate_training import AlternateAlignment
from pfl_lightning.methods.class_vectors import class_means
from pfl_lightning.methods.fedpac import ClassifierCombination, PACClient, combination_weights, least_on_simplex


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def bias_matrices(means):
    """D_i by its definition."""
    gaps = means[:, None] - means[None]
    return torch.einsum("iad,ibd->iab", gaps, gaps)


def close(one, other, tolerance=1e-9):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance, check_dtype=False)


# The weights of classifiers


@pytest.mark.parametrize("clients", [2, 6, 50])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_problems_solved_at_once_are_those_of_the_paper(monkeypatch, clients, spread):
    monkeypatch.setattr(fedpac, "NEGLIGIBLE", 0.0)
    # several groups, the last of which is smaller
    monkeypatch.setattr(fedpac, "CLIENTS", 4)
    means, variances = 30 + spread * draw(clients, 8), 0.1 + draw(clients).square()
    matrices = bias_matrices(means) + torch.diag(variances)
    expected, alone = torch.stack([least_on_simplex(matrix) for matrix in matrices]), []
    monkeypatch.setattr(fedpac, "least_on_simplex", lambda matrix: alone.append(matrix) or least_on_simplex(matrix))
    close(combination_weights(variances, means), expected)
    # guesses at one of 50 go round in a circle
    assert len(alone) <= clients // 50
    assert clients < 50 or 1 < int((expected[0] > 0).sum()) < clients


@pytest.mark.parametrize("guesses", [1, 2])
def test_problems_without_a_right_guess_are_solved_one_by_one(monkeypatch, guesses):
    means, variances = 3 + draw(50, 8), 0.1 + draw(50).square()
    expected, alone = combination_weights(variances, means), []
    monkeypatch.setattr(fedpac, "GUESSES", guesses)
    monkeypatch.setattr(fedpac, "least_on_simplex", lambda matrix: alone.append(matrix) or least_on_simplex(matrix))
    close(combination_weights(variances, means), expected)
    assert alone
    bias = alone[0] - torch.diag(variances)
    assert float((bias - bias_matrices(means)).abs().amax((1, 2)).min()) < 1e-12


def test_equal_means_weight_by_inverse_variance():
    weights = combination_weights(torch.tensor([1.0, 2.0, 4.0]), draw(1, 12).expand(3, -1))
    close(weights, torch.tensor([[4, 2, 1]] * 3).double() / 7)
    assert weights[0].tolist() == pytest.approx([0.571, 0.286, 0.143], abs=5e-4)


@pytest.mark.parametrize("variance", [0.0, 1e-12])
def test_without_variance_everybody_keeps_its_own_classifier(variance):
    assert torch.equal(combination_weights(torch.full((5,), variance), draw(5, 12)), torch.eye(5).double())


def test_two_clients_by_hand():
    distance, v = 0.5, (0.3, 0.7)
    weights = combination_weights(torch.tensor(v), torch.tensor([[0.0, 0.0], [0.3, 0.4]]))
    # the least of V_1 a^2 + (V_2 + |H_1 - H_2|^2) (1 - a)^2
    own = (v[1] + distance**2) / (v[0] + v[1] + distance**2), (v[0] + distance**2) / (v[0] + v[1] + distance**2)
    close(weights.diagonal(), torch.tensor(own), 1e-7)


@pytest.mark.parametrize("clients", [2, 20, 100])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_no_other_weights_do_better(clients, scale):
    """The conditions of Karush, Kuhn and Tucker."""
    spread = 0.3 * draw(clients, 40) + draw(1, 40, seed=1)
    variances = 0.2 + draw(clients, seed=2).square()
    matrix = scale**2 * (torch.diag(variances) + bias_matrices(spread)[0])
    weights = least_on_simplex(matrix)
    assert (weights >= 0).all() and float(weights.sum()) == pytest.approx(1, abs=1e-12)
    gradient, least = matrix @ weights, weights @ matrix @ weights
    assert (gradient >= least * (1 - 1e-8)).all()
    close(gradient[weights > 0] / least, torch.ones(int((weights > 0).sum())), 1e-8)
    assert clients < 100 or 1 < int((weights > 0).sum()) < clients


def test_relabelled_clients_weight_each_other_as_before():
    means, variances, order = draw(6, 9), draw(6, seed=1).square(), [3, 0, 5, 1, 4, 2]
    weights = combination_weights(variances, means)
    assert 1 < int((weights[0] > 0).sum())
    close(combination_weights(variances[order], means[order]), weights[order][:, order])


def test_alike_clients_without_variance_get_the_same_weight():
    close(combination_weights(torch.zeros(4), torch.ones(4, 3)), torch.full((4, 4), 0.25), 1e-6)
    close(combination_weights(torch.zeros(4), torch.zeros(4, 3)), torch.full((4, 4), 0.25), 1e-6)


def test_small_weights_are_left_out_and_the_others_sum_to_one():
    weights = combination_weights(torch.tensor([1.0, 2000.0, 500.0]), torch.zeros(3, 2))
    close(weights, torch.tensor([[500, 0, 1]] * 3).double() / 501)
    assert (weights[:, 1] == 0).all()


def test_where_all_weights_are_small_everybody_keeps_its_own(monkeypatch):
    monkeypatch.setattr(fedpac, "NEGLIGIBLE", 0.5)
    assert torch.equal(combination_weights(torch.ones(3), torch.zeros(3, 2)), torch.eye(3).double())


def test_a_client_whose_problem_isn_t_solved_keeps_its_own(monkeypatch):
    def nnls(matrix, aim):
        raise RuntimeError("too many iterations")

    monkeypatch.setattr("scipy.optimize.nnls", nnls)
    # without variance, alike clients have problems without curvature
    assert torch.equal(combination_weights(torch.zeros(3), torch.ones(3, 2)), torch.eye(3).double())


def test_one_client_has_its_own():
    assert combination_weights(torch.tensor([0.3]), draw(1, 4)).tolist() == [[1.0]]
    assert combination_weights(torch.zeros(1), torch.zeros(1, 4)).tolist() == [[1.0]]


# The server


def uploads(clients=(0, 2, 5), dtype=torch.float32):
    return {
        k: {
            "weights": {
                "net.features.0.weight": draw(2, 2, seed=k).to(dtype),
                "net.classifier.weight": draw(3, 2, seed=k + 50).to(dtype),
            },
            "num_samples": torch.tensor(10 + k),
            "statistics": {
                "variance": torch.tensor(0.5 + k),
                "means": {c: draw(HIDDEN, seed=10 * k + c).to(dtype) for c in range(CLASSES) if c != k},
            },
        }
        for k in clients
    }


def server():
    aggregator = ClassifierCombination()
    weights = {name: torch.zeros_like(t) for name, t in uploads()[0]["weights"].items()}
    aggregator.setup(Server(7, weights, make_client(), None, seed=0))
    return aggregator


def test_bodies_are_averaged_and_classifiers_combined():
    aggregator, updates = server(), uploads()
    logs = aggregator.aggregate(updates, 0)
    models = [update["weights"] for update in updates.values()]
    average = weighted_mean(models, [n / 37 for n in (10, 12, 15)])
    means = torch.zeros(3, CLASSES, HIDDEN)
    for place, update in enumerate(updates.values()):
        for c, mean in update["statistics"]["means"].items():
            means[place, c] = mean
    weights = combination_weights(torch.tensor([0.5, 2.5, 5.5]), means.flatten(1))
    assert (weights > 0).sum() > 3
    for row, client in zip(weights.tolist(), updates, strict=True):
        received = aggregator.download(client)["weights"]
        close(received["net.features.0.weight"], average["net.features.0.weight"], 1e-6)
        close(received["net.classifier.weight"], weighted_mean(models, row)["net.classifier.weight"], 1e-6)
    assert logs["own_classifier"] == pytest.approx(float(weights.diagonal().mean()))
    assert logs["classifiers_mixed"] == pytest.approx(float((weights > 0).sum()) / 3)
    assert equal(aggregator.global_model(), average)


def test_who_stays_away_receives_the_new_body_under_its_last_classifier():
    aggregator = server()
    assert not any(t.any() for t in aggregator.download(1)["weights"].values())
    aggregator.aggregate(uploads(), 0)
    kept = aggregator.download(5)["weights"]["net.classifier.weight"].clone()
    before = aggregator.global_model()
    assert aggregator.aggregate({}, 1) == {} and equal(aggregator.global_model(), before)
    aggregator.aggregate(uploads((0, 2)), 2)
    assert torch.equal(aggregator.download(5)["weights"]["net.classifier.weight"], kept)
    assert not aggregator.download(1)["weights"]["net.classifier.weight"].any()
    bodies = [aggregator.download(client)["weights"]["net.features.0.weight"] for client in (0, 1, 5)]
    assert equal(bodies[0], bodies[1]) and equal(bodies[0], bodies[2])
    assert set(aggregator.state["combinations"][0]) <= {0, 2}


# The client


def test_a_client_of_its_own_trains_alternately_with_two_rates():
    """One client, no prototypes yet: alternate training, with the classifier at its own rate."""
    run = fit(make_client(PACClient, head_lr=0.3), blobs(40), max_rounds=1, local_epochs=2)

    class TwoRates(AlternateAlignment):
        def local_optimizer(self, phase, parameters):
            return SGD(parameters, lr=0.3 if phase.name == "head" else 0.1, momentum=0.9)

    other = fit(make_client(TwoRates, head_epochs=1), blobs(40), max_rounds=1, local_epochs=2)
    assert equal(run.federation.aggregator.download(0)["weights"], dict(other.weights))


def test_alignment_changes_the_model_from_the_second_round_on():
    for rounds, same in ((1, True), (2, False)):
        runs = [fit(make_client(PACClient, align_lambda=weight), max_rounds=rounds) for weight in (0.0, 1.0)]
        assert equal(*(run.federation.aggregator.download(0) for run in runs)) is same


def test_statistics_are_those_of_the_received_body_on_the_training_samples():
    spy = Spy()
    data = blobs(40, 60, 20, by_class=True)
    run = fit(make_client(PACClient, net=noisy), data, callbacks=[spy], max_rounds=1)
    net = make_client(net=noisy).eval().net
    for client, update in spy.updates[0].items():
        part = run.data.part(client, "train")
        n, h = len(part), net.features(part.x).detach().double()
        variance, rows = 0.0, {}
        for c in part.y.unique().tolist():
            own = h[part.y == c]
            pi, mu = len(own) / n, own.mean(0)
            variance += pi * float(torch.trace(own.T @ own)) / len(own) - pi**2 * float(mu @ mu)
            rows[c] = pi * mu
        statistics = update["statistics"]
        assert list(statistics["means"]) == list(rows) and statistics["variance"].shape == ()
        assert float(statistics["variance"]) == pytest.approx(variance / n, rel=1e-5)
        for c, row in rows.items():
            close(statistics["means"][c], row, 1e-6)
        model = make_client(net=noisy).eval()
        model.load_state_dict(update["weights"])
        expected = class_means(model.net.features, run.data.client(client), CLASSES)
        assert update["prototypes"].keys() == expected.keys()
        for c, row in expected.items():
            close(update["prototypes"][c], row, 1e-6)


def test_a_class_without_a_global_prototype_is_drawn_to_the_client_s_own():
    run = fit(make_client(PACClient), blobs(60, 60), max_rounds=1)
    client, data = run.model, run.data.client(0)
    weights = run.federation.aggregator.download(0)["weights"]
    globally = {1: torch.ones(HIDDEN)}
    client.receive({}, {"weights": weights, "prototypes": globally}, data)
    own = class_means(client.net.features, data, CLASSES)
    assert client.prototypes.known.all() and torch.equal(client.prototypes.vectors[1], globally[1])
    close(client.prototypes.vectors[[0, 2]], torch.stack([own[0], own[2]]), 1e-6)
    for payload, its_data in (({}, data), (globally, None)):
        client.receive({}, {"weights": weights, "prototypes": payload}, its_data)
        assert client.prototypes.known.tolist() == [False, bool(payload), False]


def test_bytes_are_counted_exactly():
    run = fit(make_client(PACClient), blobs(40, 60, by_class=True))
    model = sum(tensor.numel() * tensor.element_size() for tensor in run.weights.values())
    vectors, counts = 3 * 4 * HIDDEN, 2 * 8 * CLASSES
    assert {row["bytes/up"] for row in run.rows} == {2 * (model + 8) + 2 * vectors + counts + 2 * 4}
    assert [row["bytes/down"] for row in run.rows] == [2 * model] + [2 * (model + vectors)] * 2


def test_statistics_and_counts_travel_only_where_they_are_asked_for():
    spy, server = Spy(), AggregatorList([WeightedAverage(), ClassMeans(weighted=False)])
    fit(make_client(PACClient), aggregator=server, callbacks=[spy], max_rounds=1)
    assert all(set(update) == {"weights", "num_samples", "prototypes"} for update in spy.updates[0].values())


def test_clients_are_evaluated_with_classifiers_of_their_own():
    run = fit(make_client(PACClient), blobs(40, 60, by_class=True))
    received = [run.federation.aggregator.download(client)["weights"] for client in range(2)]
    assert equal(received[0]["net.features.0.weight"], received[1]["net.features.0.weight"])
    assert not equal(received[0]["net.classifier.weight"], received[1]["net.classifier.weight"])
    losses = [run.federation.evaluations.results["test"][client]["loss"] for client in range(2)]
    for client, loss in enumerate(losses):
        run.model.load_state_dict(received[client])
        part = run.data.part(client, "test")
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(run.model(part.x), part.y).detach()))


def test_its_server_side_is_known_as_the_method():
    federation = fit(make_client(PACClient), max_rounds=1).federation
    assert federation.method == "FedPAC" and federation.aggregator.name == "ClassifierCombination+ClassMeans"


@pytest.mark.exhaustive
def test_partial_participation_with_a_schedule_resumes_bit_for_bit(tmp_path):
    def run(root, rounds, ckpt_path=None):
        schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
        settings = {"max_rounds": rounds, "clients_per_round": 0.5, "ckpt_path": ckpt_path}
        return fit(make_client(PACClient, lr_scheduler=schedule), root=root, **settings)

    whole, half = run(tmp_path / "whole", 6), run(tmp_path / "half", 3)
    assert same_end(whole, run(tmp_path / "half", 6, half.last))
    assert all(np.isfinite(row["val/loss"]) for row in whole.rows)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"head_lr": 0}, "model.head_lr=0 must be above 0"),
        ({"head_epochs": 0}, "model.head_epochs=0 must be 1 or more"),
        ({"align_lambda": -1}, "model.align_lambda=-1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        make_client(PACClient, **settings)


@pytest.mark.parametrize("method", [FedAvg, AlternateAlignment])
def test_clients_without_statistics_are_refused(method):
    server = make_client(PACClient).configure_aggregator()
    with pytest.raises(MisconfigurationException, match=f"needs .*statistics, which {method.__name__} does not"):
        fit(make_client(method), aggregator=server)
