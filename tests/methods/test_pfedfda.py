import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from federations import CLASSES, HIDDEN, Spy, blobs, drawn_update, equal, fit, make_client, near, noisy, points, set_up
from pfl_lightning.aggregators import FeatureStatistics
from pfl_lightning.methods import PFedFDA, pfedfda
from pfl_lightning.methods.pfedfda import best_betas, discriminant, statistics
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed

PAYLOAD = {"class_means": torch.rand(CLASSES, HIDDEN, generator=torch.Generator().manual_seed(5))}
PAYLOAD["covariance"] = torch.eye(HIDDEN) + 0.3


def drawn(n=60, d=4, seed=0, shift=2.0):
    y = torch.arange(n) % CLASSES
    h = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return h + shift * torch.eye(CLASSES, d, dtype=torch.float64)[y], y


def test_the_discriminant_is_bayes_rule_of_normal_classes():
    h, y = drawn()
    means, covariance = statistics(h, y, torch.zeros(CLASSES, 4, dtype=torch.float64), 2)
    priors = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    smooth = (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / 4 * torch.eye(4)
    of_class = [torch.distributions.MultivariateNormal(mean, smooth) for mean in means]
    posterior = (torch.stack([normal.log_prob(h) for normal in of_class], 1) + priors.log()).softmax(1)
    torch.testing.assert_close(F.linear(h, *discriminant(means, covariance, priors)).softmax(1), posterior)


def test_the_statistics_by_the_official_rule_with_the_servers_means_of_rare_classes():
    h, y = drawn(8)
    y[y == 2] = 0
    y[-2:] = 2
    others = torch.full((CLASSES, 4), 7.0, dtype=torch.float64)
    means, covariance = statistics(h, y, others, 2)
    scatter = torch.zeros(4, 4, dtype=torch.float64)
    for c in range(CLASSES):
        own = h[y == c].mean(0)
        torch.testing.assert_close(means[c], own if (y == c).sum() > 2 else others[c])
        scatter += (h[y == c] - own).T @ (h[y == c] - own)
    torch.testing.assert_close(covariance, scatter / 7 + 1e-4 + torch.eye(4))
    # more units than samples: the identity keeps it invertible
    assert torch.linalg.eigvalsh(statistics(*drawn(3, d=9), torch.zeros(CLASSES, 9).double(), 0)[1]).min() > 0.9


def test_betas_are_large_where_the_servers_statistics_are_wrong_and_small_where_the_clients_own_are():
    priors = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    identity = torch.eye(4, dtype=torch.float64)
    true = 2 * torch.eye(CLASSES, 4, dtype=torch.float64)
    h, y = drawn(90)
    assert best_betas(h, y, true.flip(0), identity, priors, seed=0)[0] > 0.9
    few = drawn(6)
    assert best_betas(*few, true, identity, priors, seed=0)[0] < 0.3
    single = h[:3], y[:3]
    assert best_betas(*single, true, identity, priors, seed=0) == (0.0, 0.0)


def test_betas_have_the_least_cross_entropy_on_held_out_halves():
    h, y = drawn(40, shift=0.7)
    priors = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    means, covariance = torch.rand(CLASSES, 4, dtype=torch.float64), 4 * torch.eye(4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    parts = [[], []]
    for c in range(CLASSES):
        rows = (y == c).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        first = sum(map(len, parts[0])) > sum(map(len, parts[1]))
        parts[first].append(rows[::2])
        parts[not first].append(rows[1::2])
    parts = [torch.cat(part) for part in parts]

    def entropy(b1, b2):
        total = 0.0
        for fitted, held in (parts, parts[::-1]):
            own, cov = statistics(h[fitted], y[fitted], means, 0)
            head = discriminant(b1 * own + (1 - b1) * means, b2 * cov + (1 - b2) * covariance, priors)
            total += float(F.cross_entropy(F.linear(h[held], *head), y[held]))
        return total

    found = best_betas(h, y, means, covariance, priors, seed=3)
    grid = [(i / 10, j / 10) for i in range(11) for j in range(11)]
    assert entropy(*found) <= min(entropy(*pair) for pair in grid) + 1e-3


def test_the_body_is_trained_under_the_servers_discriminant_which_stands_still():
    spy = Spy()
    run = fit(make_client(PFedFDA, net=noisy), callbacks=[spy])
    start = make_client(PFedFDA, net=noisy).net
    sent = spy.updates[0]
    assert all(name.startswith("net.features.") for update in sent.values() for name in update["weights"])
    assert not torch.equal(sent[0]["weights"]["net.features.0.weight"], start.features[0].weight)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_a_step_by_hand():
    model = make_client(PFedFDA).double()
    part = points(30, seed=0)
    x, y = part[0].double(), part[1]
    payload = {"weights": {n: t for n, t in model.state_dict().items() if model.is_shared(n)}, **PAYLOAD}
    model.on_download(payload, None)
    priors = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    w, b = discriminant(PAYLOAD["class_means"].double(), PAYLOAD["covariance"].double(), priors)
    expected = F.cross_entropy(model.net.features(x) @ w.T + b, y)
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], expected)
    # without samples, a client that has never trained predicts by the server's statistics
    torch.testing.assert_close(model(x), model.net.features(x) @ w.T + b)


def seeds_of_halves(seed, monkeypatch, **settings):
    """The seeds of all halves that are drawn in two rounds, and in the evaluation of the last model."""
    seeds, model = [], make_client(PFedFDA)
    monkeypatch.setattr(pfedfda, "best_betas", lambda *args: (seeds.append(args[-1]), (0.5, 0.5))[1])
    torch.manual_seed(seed)
    fit(model, max_rounds=2, limit_val_batches=0, **settings)
    return seeds


def test_halves_differ_by_seed_round_and_client_and_not_by_engine(monkeypatch):
    one, other = (seeds_of_halves(seed, monkeypatch) for seed in (3, 4))
    assert len({*one, *other}) == len(one) + len(other) == 2 * 3 * 4
    assert {*one} == {*seeds_of_halves(3, monkeypatch, engine="vectorised")}


@pytest.mark.exhaustive
def test_statistics_are_the_same_under_each_engine():
    runs = [fit(make_client(PFedFDA), max_rounds=2, engine=name) for name in ("sequential", "vectorised", "processes")]
    ends = [run.federation.aggregator.download(0) for run in runs]
    assert equal(ends[0], ends[2]) and near(ends[0], ends[1])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_clients_mix_their_statistics_with_the_servers(beta):
    spy = Spy()
    run = fit(make_client(PFedFDA, beta=beta), blobs(30, 24), callbacks=[spy], max_rounds=1)
    generator = torch.Generator().manual_seed(derive_seed(run.federation.seed, "pfedfda"))
    start = {"class_means": torch.rand(CLASSES, HIDDEN, generator=generator), "covariance": torch.eye(HIDDEN)}
    update, part = spy.updates[0][1], run.data.part(1, "train")
    model = make_client(PFedFDA)
    model.assign(update["weights"])
    h = model.eval().net.features(part.x).detach().double()
    own, covariance = statistics(h, part.y, start["class_means"].double(), 2)
    expected = beta * own + (1 - beta) * start["class_means"]
    torch.testing.assert_close(update["class_means"].double(), expected, atol=1e-5, rtol=1e-5)
    expected = beta * covariance + (1 - beta) * start["covariance"]
    torch.testing.assert_close(update["covariance"].double(), expected, atol=1e-5, rtol=1e-5)
    if beta == 0:
        assert near(run.federation.aggregator.state["class_means"], start["class_means"])
    # the own classifier follows from both
    counts = torch.bincount(part.y, minlength=CLASSES).double()
    priors = counts / counts.sum() + 1e-4
    w, b = discriminant(update["class_means"].double(), update["covariance"].double(), priors / priors.sum())
    personal = run.federation.clients[1].personal
    torch.testing.assert_close(personal["net.classifier.weight"].double(), w, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(personal["net.classifier.bias"].double(), b, atol=1e-4, rtol=1e-4)


def test_the_server_weights_statistics_by_samples():
    model = make_client(PFedFDA)
    server = set_up(FeatureStatistics(), model)
    entries = {
        k: {"class_means": torch.full((CLASSES, HIDDEN), float(k)), "covariance": k * torch.eye(HIDDEN)} for k in (1, 4)
    }
    updates = {k: drawn_update(model, k, size=10 * k, **entry) for k, entry in entries.items()}
    logs = server.aggregate(updates, 0)
    torch.testing.assert_close(server.download(0)["class_means"], torch.full((CLASSES, HIDDEN), 0.2 * 1 + 0.8 * 4))
    torch.testing.assert_close(server.download(0)["covariance"], (0.2 + 0.8 * 4) * torch.eye(HIDDEN))
    assert logs["variance"] == pytest.approx(3.4)
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert fit(make_client(PFedFDA), data).rows[-1]["clients_diverged"] == 0


def test_what_it_cant_do_is_refused_by_name():
    with pytest.raises(MisconfigurationException, match=r"model\.beta=2"):
        make_client(PFedFDA, beta=2)

    def deep(input_shape, num_classes):
        return Net(nn.Linear(input_shape[0], 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, num_classes)))

    with pytest.raises(MisconfigurationException, match=r"model\.net=Net has a classifier of Linear, Linear"):
        make_client(PFedFDA, net=deep)


def test_a_net_without_a_body_is_refused_by_name_before_the_first_round():
    def linear(input_shape, num_classes):
        return Net(nn.Identity(), nn.Linear(input_shape[0], num_classes))

    with pytest.raises(MisconfigurationException, match=r"model\.net=Net has no parameter .* model PFedFDA "):
        fit(make_client(PFedFDA, net=linear), max_rounds=1)
