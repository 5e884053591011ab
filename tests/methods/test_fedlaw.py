import copy
import re

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    MOMENTUM,
    Blobs,
    Shuffled,
    Spy,
    blobs,
    equal,
    fit,
    load,
    make_client,
    noisy,
    plain,
    points,
    same_end,
)
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import client_weights
from pfl_lightning.data import Samples, epoch_order
from pfl_lightning.messages import weighted_mean
from pfl_lightning.methods import WDR, FedPer, FedProx, Local
from pfl_lightning.methods.fedlaw import FedLAW
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed

MEAN, COUNTER = "net.features.1.running_mean", "net.features.1.num_batches_tracked"


class Closed(Blobs):
    """The server has no samples."""

    def server_data(self):
        return None


class Served(Blobs):
    """The server has as many points as the class says."""

    served = 40

    def server_data(self):
        return Samples(*points(self.served, seed=1))


class Empty(Served):
    served = 0


class Lonely(Served):
    served = 1


class Odd(Served):
    """One more than three batches of four."""

    served = 13


def module_of(net=plain, dtype=torch.float64):
    return make_client(net=net).to(dtype)


def server(module=None, data=Served, seed=0, **settings):
    module = module_of() if module is None else module
    weights = {name: t.detach().clone() for name, t in module.state_dict().items() if module.is_shared(name)}
    data = blobs(data=data)
    data.setup()
    aggregator = FedLAW(**settings)
    aggregator.setup(Server(9, weights, module, data, seed))
    return aggregator


def uploads(aggregator, clients=3, scale=0.7):
    """Models that differ from the global one and from each other, at clients 2, 4, ..."""
    generator = torch.Generator().manual_seed(1)
    updates = {}
    for client in range(clients):
        weights = {
            name: (tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)).abs()
            if "running_var" in name
            else tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor + client
            for name, tensor in aggregator.state["weights"].items()
        }
        updates[2 + 2 * client] = {"weights": weights, "num_samples": torch.tensor(10 + 7 * client)}
    return updates


def learned(updates, module, seed, epochs=20, batch_size=128, halving=20, round=0):
    """z of Adam on the cross-entropy of the shrunk mix on the 40 points, step by step, of nets without buffers."""
    part = Samples(*points(40, seed=1))
    p = list(client_weights(updates, "samples").values())
    z = torch.tensor([*p, 1.0], dtype=torch.float64).log().requires_grad_()
    generator = torch.Generator().manual_seed(derive_seed(seed, "fedlaw", round))
    m, v, step = 0, 0, 0
    for epoch in range(epochs):
        order = epoch_order(len(part), batch_size, "keep", generator)
        for rows in order.split(batch_size):
            factors = z[-1].exp() * z[:-1].exp() / z[:-1].exp().sum()
            models = [update["weights"] for update in updates.values()]
            w = {name: sum(f * model[name] for f, model in zip(factors, models, strict=True)) for name in models[0]}
            loss = F.cross_entropy(functional_call(module, w, (part.x[rows].double(),)), part.y[rows])
            (g,) = torch.autograd.grad(loss, z)
            step += 1
            m, v = 0.5 * m + 0.5 * g, 0.999 * v + 0.001 * g**2
            rate = 0.01 * 0.5 ** (epoch // halving)
            with torch.no_grad():
                z -= rate * m / (1 - 0.5**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return z.detach()


# The optimisation


def test_it_follows_a_straight_line_reference():
    aggregator = server(server_epochs=5, batch_size=16, halving=2, seed=7)
    updates = uploads(aggregator)
    logs = aggregator.aggregate(updates, round=3)
    z = learned(updates, module_of(), seed=7, epochs=5, batch_size=16, halving=2, round=3)
    shares, gamma = z[:-1].softmax(0).tolist(), float(z[-1].exp())
    assert list(aggregator.state["shares"].values()) == pytest.approx(shares, abs=1e-12)
    assert logs["gamma"] == pytest.approx(gamma, abs=1e-12) and abs(gamma - 1) > 0.01
    assert logs["max_share"] == pytest.approx(max(shares), abs=1e-12)
    expected = weighted_mean([u["weights"] for u in updates.values()], [gamma * share for share in shares])
    for name, tensor in aggregator.global_model().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


@pytest.mark.exhaustive
def test_a_good_client_outweighs_a_noise_client_and_the_proxy_loss_falls():
    good = fit(make_client(), blobs(40, 40, data=Served)).weights
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in good.items()}
    updates = {
        0: {"weights": noise, "num_samples": torch.tensor(30)},
        5: {"weights": good, "num_samples": torch.tensor(10)},
    }
    losses = []
    for epochs in (1, 20, 200):
        aggregator = server(server_epochs=epochs, halving=200)
        losses.append(aggregator.aggregate(updates, round=0)["proxy_loss"])
    assert losses[0] > losses[1] > losses[2]
    assert aggregator.state["shares"][5] > 0.6
    assert sum(aggregator.state["shares"].values()) == pytest.approx(1, abs=1e-12)


def test_shares_lie_on_the_simplex_and_gamma_is_positive_in_a_run():
    run = fit(make_client(), aggregator=FedLAW())
    shares = run.federation.aggregator.state["shares"]
    assert min(shares.values()) > 0 and sum(shares.values()) == pytest.approx(1, abs=1e-12)
    for row in run.rows:
        assert row["server/gamma"] > 0 and row["server/proxy_loss"] > 0 and 0.25 < row["server/max_share"] < 1
    assert row["server/max_share"] == max(shares.values())
    assert not equal(run.weights, fit(make_client(), aggregator=WeightedAverage()).weights)


def test_gamma_scales_parameters_and_leaves_buffers_a_mean():
    aggregator = server(module_of(noisy))
    updates = uploads(aggregator)
    logs = aggregator.aggregate(updates, round=0)
    mean = weighted_mean([u["weights"] for u in updates.values()], list(aggregator.state["shares"].values()))
    parameters = dict(make_client(net=noisy).named_parameters())
    assert len(parameters) == 6 and abs(logs["gamma"] - 1) > 0.001
    for name, tensor in aggregator.global_model().items():
        factor = logs["gamma"] if name in parameters else 1
        torch.testing.assert_close(tensor, factor * mean[name], rtol=0, atol=1e-15)
    assert aggregator.global_model()[COUNTER] == 2


def test_batch_norm_layers_normalise_by_the_proxy_batch():
    far = {}
    for shift in (0.0, 100.0):
        aggregator = server(module_of(noisy))
        updates = uploads(aggregator)
        for update in updates.values():
            update["weights"][MEAN] = update["weights"][MEAN] + shift
        far[shift] = aggregator.aggregate(updates, round=0)
    assert far[0.0] == far[100.0]


def test_dropout_is_off():
    def net(rate):
        return lambda shape, classes: Net(
            nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Dropout(rate)), nn.Linear(HIDDEN, classes)
        )

    logs = []
    for rate in (0.0, 0.9):
        aggregator = server(module_of(net(rate)))
        logs.append(aggregator.aggregate(uploads(aggregator), round=0))
    assert logs[0] == logs[1]


def test_the_client_module_and_the_random_state_are_left_alone():
    module = module_of(noisy)
    module.net.classifier.eval()
    aggregator = server(module)
    updates = uploads(aggregator)
    before = copy.deepcopy((module.state_dict(), [m.training for m in module.modules()], updates))
    random_state = torch.get_rng_state()
    aggregator.aggregate(updates, round=0)
    assert equal(before, (module.state_dict(), [m.training for m in module.modules()], updates))
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert not any(t.requires_grad for t in aggregator.global_model().values())


def test_an_optimizer_and_its_learning_rate_can_be_chosen():
    shares = []
    for settings in ({}, {"optimizer": lambda params: Adam(params, lr=0.01, betas=(0.5, 0.999))}, {"halving": 1}):
        aggregator = server(**settings)
        aggregator.aggregate(uploads(aggregator), round=0)
        shares.append(aggregator.state["shares"])
    assert shares[0] == shares[1] != shares[2]
    still = server(optimizer=lambda params: SGD(params, lr=0.0))
    still.aggregate(uploads(still), round=0)
    assert still.state["shares"] == pytest.approx(client_weights(uploads(still), "samples"), abs=1e-15)


def test_rounds_see_the_proxy_samples_in_other_orders():
    shares = []
    for round in (0, 0, 1):
        aggregator = server(batch_size=8)
        aggregator.aggregate(uploads(aggregator), round)
        shares.append(aggregator.state["shares"])
    assert shares[0] == shares[1] != shares[2]


def test_a_loss_that_is_lost_leaves_fedavg_and_a_warning():
    aggregator = server(module_of(noisy))
    updates = uploads(aggregator)
    for update in updates.values():
        update["weights"]["net.classifier.weight"].fill_(1e308)
    with pytest.warns(UserWarning, match=r"round 2: .* became NaN or infinite"):
        aggregator.aggregate(updates, round=1)
    assert equal(aggregator.global_model(), average_of(updates))
    assert aggregator.state["shares"] == client_weights(updates, "samples")


# Where it is FedAvg


def average_of(updates):
    aggregator = WeightedAverage()
    aggregator.aggregate(updates, round=0)
    return aggregator.global_model()


@pytest.mark.parametrize(
    ("settings", "data"),
    [({"server_epochs": 0}, Served), ({"proxy_fraction": 0}, Closed), ({}, Empty), ({}, Lonely)],
)
@pytest.mark.by_default("settings0-Served")
def test_without_epochs_or_samples_it_is_fedavg_bit_for_bit(settings, data):
    runs = [
        fit(make_client(net=noisy), blobs(data=data), aggregator=aggregator)
        for aggregator in (FedLAW(**settings), WeightedAverage())
    ]
    assert equal(*(run.weights for run in runs)) and equal(*(run.federation.aggregator.state["shares"] for run in runs))


def test_one_sample_will_do_without_batch_norm():
    assert fit(make_client(), blobs(data=Lonely), aggregator=FedLAW(), max_rounds=1).rows[0]["server/gamma"] != 1


def test_a_last_batch_of_one_is_left_out_where_batch_norm_would_refuse_it():
    aggregator = server(module_of(noisy), data=Odd, batch_size=4)
    aggregator.aggregate(uploads(aggregator), round=0)
    assert all(t.isfinite().all() for t in aggregator.global_model().values())


def test_nobody_takes_part():
    aggregator = server()
    aggregator.aggregate(uploads(aggregator), round=0)
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(before, aggregator.state)


# The proxy samples


def rows_of(part):
    return {tuple(row) for row in part.x.tolist()}


def test_a_class_that_nobody_has_is_not_lent():
    run = fit(make_client(), blobs(40, 12, by_class=True, data=Closed), aggregator=FedLAW())
    assert run.rows[-1]["server/proxy_loss"] > 0


def test_clients_are_gathered_one_at_a_time_and_keep_what_they_lend(monkeypatch):
    gathered, part = [], Blobs.part
    data = blobs(data=Closed)
    data.setup()
    sizes = [data.size(client, "train") for client in range(4)]
    monkeypatch.setattr(Blobs, "part", lambda self, *key: gathered.append(key) or part(self, *key))
    aggregator = FedLAW(proxy_fraction=0.4)
    aggregator.setup(Server(4, {}, make_client(), data, 0))
    assert gathered == [(client, "train") for client in range(4)]
    assert [data.size(client, "train") for client in range(4)] == sizes
    assert aggregator.proxy.x.untyped_storage().nbytes() == 24 * FEATURES * 4


def test_the_server_s_own_samples_come_before_lent_ones():
    assert rows_of(server(data=Served).proxy) == rows_of(Samples(*points(40, seed=1)))
    assert len(server(data=Closed, proxy_fraction=0.4).proxy) == 24


# In a federation


@pytest.mark.exhaustive
def test_the_order_of_uploads_and_of_training_changes_nothing():
    for method in (WDR, FedPer):
        runs = [fit(make_client(method), aggregator=FedLAW(), engine=engine) for engine in ("sequential", Shuffled)]
        first, *others = (run.federation.federation_state() for run in runs)
        assert all(equal(first, other) for other in others)


@pytest.mark.parametrize("method", [WDR, FedPer])
@pytest.mark.exhaustive
def test_partial_participation_resumes_bit_for_bit_without_samples_in_the_checkpoint(tmp_path, method):
    def run(root, rounds, ckpt_path=None, seed=3):
        client = make_client(method, seed=seed, net=noisy)
        settings = {"max_rounds": rounds, "clients_per_round": 0.5, "ckpt_path": ckpt_path, "resume_changed": seed != 3}
        return fit(client, blobs(data=Closed), root, FedLAW(proxy_fraction=0.2), **settings)

    whole = run(tmp_path / "whole", 4)
    half = run(tmp_path / "half", 2)
    # as another process that happens to start from another seed
    assert same_end(whole, run(tmp_path / "half", 4, half.last, seed=99))
    state = load(whole.last)["federation"]["aggregator"]
    assert set(state) == {"weights", "shares", "personal"} and len(state["shares"]) == 2
    assert all(name.startswith("net.classifier.") for name in state["personal"]) and (
        bool(state["personal"]) == (method is FedPer)
    )


def test_what_clients_keep_is_the_initial_model_s_in_the_proxy_passes():
    spy = Spy()
    run = fit(make_client(FedPer), blobs(data=Served), aggregator=FedLAW(), max_rounds=1, callbacks=[spy])
    updates = {
        client: {**update, "weights": {name: t.double() for name, t in update["weights"].items()}}
        for client, update in spy.updates[0].items()
    }
    assert all("net.classifier.weight" not in update["weights"] for update in updates.values())
    z = learned(updates, module_of(), run.federation.seed)
    shares = list(run.federation.aggregator.state["shares"].values())
    assert shares == pytest.approx(z[:-1].softmax(0).tolist(), abs=1e-4)
    assert shares != pytest.approx(list(client_weights(updates, "samples").values()), abs=1e-2)


@pytest.mark.parametrize(
    ("method", "settings"),
    [(FedProx, {"mu": 0.1}), (WDR, {}), (FedPer, {}), (FedPer, {"buffers": "local"}), (FedProx, {"buffers": "local"})],
)
def test_other_clients_under_it(method, settings):
    ours, average = (
        fit(make_client(method, net=noisy, **settings), aggregator=aggregator)
        for aggregator in (FedLAW(), WeightedAverage())
    )
    assert not equal(ours.weights, average.weights) and len(ours.rows) == 3
    assert ours.rows[0]["train/loss"] == average.rows[0]["train/loss"]


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_precisions(precision):
    run = fit(make_client(net=noisy, optimizer=MOMENTUM), aggregator=FedLAW(), precision=precision)
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64, "bf16-mixed": torch.float32}[precision]
    assert run.weights["net.classifier.weight"].dtype == dtype
    assert all(row["server/gamma"] > 0 and row["clients_diverged"] == 0 for row in run.rows)


def test_half_precision_uploads_are_mixed_in_float32():
    half, single = server(module_of(dtype=torch.bfloat16)), server(module_of(dtype=torch.float32))
    single.state["weights"] = {name: t.float() for name, t in half.state["weights"].items()}
    updates = uploads(half)
    wide = {k: {**u, "weights": {n: t.float() for n, t in u["weights"].items()}} for k, u in updates.items()}
    assert half.aggregate(updates, round=0) == single.aggregate(wide, round=0)


def test_one_client_is_only_shrunk():
    spy = Spy()
    run = fit(make_client(), blobs(40), aggregator=FedLAW(), max_rounds=1, callbacks=[spy])
    assert run.federation.aggregator.state["shares"] == {0: 1.0}
    gamma = run.rows[0]["server/gamma"]
    for name, tensor in spy.updates[0][0]["weights"].items():
        assert torch.equal(run.weights[name], gamma * tensor)


def test_tied_weights_are_mixed_as_one():
    def tied(shape, classes):
        first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        second.weight = first.weight
        return Net(nn.Sequential(first, nn.Tanh(), second), nn.Linear(FEATURES, classes))

    weights = fit(make_client(net=tied), aggregator=FedLAW()).federation.aggregator.global_model()
    assert torch.equal(weights["net.features.0.weight"], weights["net.features.2.weight"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"server_epochs": -1}, "aggregator.server_epochs=-1 must be 0 or more"),
        ({"batch_size": 0}, "aggregator.batch_size=0 must be 1 or more"),
        ({"halving": 0}, "aggregator.halving=0 must be 1 or more"),
        ({"proxy_fraction": 1.5}, "aggregator.proxy_fraction=1.5 must be"),
        ({"proxy_fraction": -0.1}, "aggregator.proxy_fraction=-0.1 must be"),
        ({"optimizer": lambda params: Adam(params, lr=-1.0)}, "aggregator.optimizer: Invalid learning rate"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        FedLAW(**settings)


def test_what_does_not_fit_is_refused():
    with pytest.raises(MisconfigurationException, match=r"aggregator\.batch_size=1 gives BatchNorm no statistics"):
        fit(make_client(net=noisy), aggregator=FedLAW(batch_size=1))
    assert fit(make_client(), aggregator=FedLAW(batch_size=1), max_rounds=1).rows
    with pytest.raises(MisconfigurationException, match="FedLAW needs num_samples and weights, which Local"):
        fit(make_client(Local), aggregator=FedLAW())


def test_samples_of_other_classes_are_refused():
    class Foreign(Blobs):
        def server_data(self):
            part = super().server_data()
            return Samples(part.x, part.y + CLASSES)

    with pytest.raises(MisconfigurationException, match=r"data\.public has labels up to 5, .* with 3 classes"):
        fit(make_client(), blobs(data=Foreign), aggregator=FedLAW())
