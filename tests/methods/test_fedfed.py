from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import (
    CLASSES,
    FEATURES,
    Blobs,
    OneClient,
    Pause,
    Shuffled,
    Spy,
    blobs,
    check_batches_of_one,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    points,
    same_end,
    set_up,
)
from pfl_lightning.aggregators import FeatureBank, WeightedAverage
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.methods import FedAvg, FedFed, FedProx
from pfl_lightning.nets import Net
from pfl_lightning.privacy import DPSGD, DPAverage, Laplace, SecureSum

MAKE = partial(FedFed, distill_rounds=2, width=4, latent=3)
SHAPE = (1, 8, 8)


class Pictures(Blobs):
    """The clouds as small images."""

    input_shape = SHAPE

    def load(self):
        x, y = points(120, seed=0)
        return torch.tanh(F.pad(x, (0, 64 - FEATURES)).view(-1, *SHAPE)), y

    def server_data(self):
        return None


def of_images(input_shape, num_classes):
    body = nn.Sequential(nn.Conv2d(input_shape[0], 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    return Net(body, nn.Linear(3 * input_shape[1] * input_shape[2] // 4, num_classes))


def image_client(shape=SHAPE, **settings):
    torch.manual_seed(0)
    settings = {"distill_rounds": 2, "width": 4, "optimizer": partial(SGD, lr=0.1, momentum=0.9), **settings}
    return FedFed(net=of_images, input_shape=shape, num_classes=CLASSES, **settings)


def known(client, part):
    """A client's data from some samples."""
    return ClientData(OneClient(part), 0)


def with_bank(client, x, counts):
    """A client in its second phase, which has received shared features."""
    client.round = client.distill_rounds + 1
    weights = {name: t.clone() for name, t in client.state_dict().items() if client.is_shared(name)}
    shared = {"x": x, "counts": torch.tensor(counts)}
    client.on_download({"weights": weights, "generator": {}, "shared_features": shared}, None)
    (client.phase,) = client.local_phases()
    return client.train()


# The generator


def by_hand(p, x, eps):
    """The perceptron's features, mean and log-variance, of latent numbers with given noise."""
    h = (x @ p["encoder.1.weight"].T + p["encoder.1.bias"]).relu()
    mean, log_variance = (h @ p[f"{n}.weight"].T + p[f"{n}.bias"] for n in ("mean", "log_variance"))
    z = mean + (log_variance / 2).exp() * eps
    z = (z @ p["back.weight"].T + p["back.bias"]).relu()
    return z @ p["decoder.1.weight"].T + p["decoder.1.bias"], mean, log_variance


@pytest.mark.parametrize("noise", [(0.3, 0.7), (0.5,), ()])
def test_the_loss_of_a_distilling_step_by_a_second_implementation(noise):
    weights = {"reconstruction": 3.0, "divergence": 0.7, "sensitive": 1.3, "whole": 0.6}
    client = make_client(MAKE, noise=noise, **weights).double()
    (client.phase,) = client.local_phases()
    x, y = points(7, seed=4)
    x = x.double()
    torch.manual_seed(1)
    values = client.training_step((x, y), 0)
    torch.manual_seed(1)
    p, f = dict(client.generator.named_parameters()), client.judge
    robust, mean, log_variance = by_hand(p, x, torch.randn(7, 3, dtype=torch.float64))
    drawn = [sigma * torch.randn(7, FEATURES, dtype=torch.float64) for sigma in noise]
    variance = log_variance.exp()
    # the divergence from a standard normal, per latent number and colour
    kl = ((variance + mean**2 - 1 - log_variance) / 2).sum() / (7 * 3 * 3)
    expected = 3.0 * ((robust - x) ** 2).mean() + 0.7 * kl + 0.6 * F.cross_entropy(f(x), y)
    for each in drawn:
        expected = expected + 1.3 * F.cross_entropy(f(x - robust + each), y) / len(noise)
    torch.testing.assert_close(values["loss"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(values["divergence"], kl, rtol=0, atol=1e-12)
    values["loss"].backward()
    assert all(parameter.grad is None for parameter in client.net.parameters())
    assert all(parameter.grad.abs().max() > 0 for parameter in p.values())


def test_the_generator_of_images_by_a_second_implementation():
    client = image_client().double().eval()
    p = {name: t for name, t in client.generator.state_dict().items() if "num_batches" not in name}
    # other running statistics than at the start
    generator = torch.Generator().manual_seed(3)
    for name, t in p.items():
        if "running" in name:
            t.copy_(0.5 + torch.rand(t.shape, generator=generator))

    def norm(h, name):
        mean, var, weight, bias = (
            p[f"{name}.{part}"].view(-1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (h - mean) / (var + 1e-5).sqrt() * weight + bias

    def residual(h, name):
        change = F.conv2d(F.leaky_relu(h), p[f"{name}.change.1.weight"], p[f"{name}.change.1.bias"], padding=1)
        change = F.leaky_relu(norm(change, f"{name}.change.2"))
        return h + F.conv2d(change, p[f"{name}.change.4.weight"], p[f"{name}.change.4.bias"])

    x = torch.rand(5, *SHAPE, generator=generator, dtype=torch.float64) * 2 - 1
    h = norm(F.conv2d(x, p["encoder.0.weight"], stride=2, padding=1), "encoder.1").relu()
    h = norm(F.conv2d(h, p["encoder.3.weight"], stride=2, padding=1), "encoder.4").relu()
    h = residual(norm(residual(h, "encoder.6"), "encoder.7"), "encoder.8").flatten(1)
    assert p["mean.weight"].shape == p["back.weight"].shape == (16, 16)
    z = h @ p["mean.weight"].T + p["mean.bias"]
    h = (z @ p["back.weight"].T + p["back.bias"]).view(5, 4, 2, 2)
    h = norm(residual(norm(residual(h, "decoder.1"), "decoder.2"), "decoder.3"), "decoder.4")
    h = norm(F.conv_transpose2d(h, p["decoder.5.weight"], stride=2, padding=1), "decoder.6")
    h = F.conv_transpose2d(F.leaky_relu(h).tanh(), p["decoder.9.weight"], stride=2, padding=1)
    expected = norm(h, "decoder.10").tanh()
    torch.testing.assert_close(client.generator(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 8, 12), (1, 6, 8), (2, 4, 4, 4), (9,)])
def test_features_have_the_shape_of_inputs(shape):
    client = make_client(MAKE, net=lambda shape, classes: Net(nn.Flatten(), nn.LazyLinear(classes)))
    generator = type(client.generator)(shape, 4, None)
    is_image = len(shape) == 3 and shape[1] % 4 == 0
    assert any(isinstance(part, nn.Conv2d) for part in generator.encoder) == is_image
    x = 5 * torch.randn(3, *shape)
    features, mean, log_variance = generator.sampled(x)
    assert features.shape == x.shape == generator(x).shape and mean.shape == log_variance.shape
    assert float(features.abs().max()) <= 1 or not is_image


# The shared features


def test_clients_share_inputs_less_the_averaged_generator_s_features():
    """With noise of 0, and in the other place noise whose parts are all drawn apart."""
    spy, data = Spy(), blobs()
    run = fit(make_client(MAKE, noise=(0.0, 0.5)), data, max_rounds=4, callbacks=[spy], precision="64-true")
    generators = [update["generator"] for update in spy.updates[1].values()]
    sizes = [float(update["num_samples"]) for update in spy.updates[1].values()]
    q = {
        name.removeprefix("generator."): sum(n * g[name] for n, g in zip(sizes, generators, strict=True)) / sum(sizes)
        for name in generators[0]
        if name.startswith("generator.")
    }
    shared, labels = [], []
    for client, update in spy.updates[2].items():
        part = run.data.part(client, "train").to("cpu", torch.float64)
        sensitive = part.x - by_hand(q, part.x, 0.0)[0]
        sent = update["shared_features"]
        torch.testing.assert_close(sent["x"][:, 0], sensitive, rtol=0, atol=1e-12)
        assert equal(sent["y"], part.y)
        noise = (sent["x"][:, 1] - sensitive) / 0.5
        assert 0.8 < float(noise.std()) < 1.2 and float(torch.pdist(noise).min()) > 0.5
        shared.append(sent["x"])
        labels.append(sent["y"])
    assert len({float(x[0, 1, 0] - x[0, 0, 0]) for x in shared}) == len(shared)
    bank, y = run.federation.aggregator.download(0)["shared_features"], torch.cat(labels)
    expected = torch.cat([torch.cat(shared)[y == c] for c in range(CLASSES)])
    assert equal(bank, {"x": expected, "counts": torch.bincount(y, minlength=CLASSES)})
    assert run.rows[2]["server/shared"] == len(y)


def test_noise_differs_by_seed_and_round_and_is_the_same_again():
    part = Samples(*points(6, seed=2))
    client = make_client(MAKE).eval()

    def shared(seed):
        torch.manual_seed(seed)
        return client.shared(known(client, part))["x"]

    assert equal(shared(1), shared(1)) and not equal(shared(1), shared(2))


def test_who_sends_what_in_which_round():
    spy = Spy()
    run = fit(make_client(MAKE, net=noisy), max_rounds=5, callbacks=[spy])
    told = [{name for name, entry in updates[0].items() if name == "num_samples" or entry} for updates in spy.updates]
    first, shares, later = ({name, "num_samples"} for name in ("generator", "shared_features", "weights"))
    assert told == [first, first, shares, later, later]
    model = run.rows[-1]["bytes/up"]
    # the model is in each download, the generator in the first three
    down = [row["bytes/down"] for row in run.rows]
    assert down[0] == down[1] == down[2] and down[3] == down[4] > model
    assert run.federation.aggregator.download(0)["generator"] == {}
    assert all(state.personal == {} for state in run.federation.clients.values())
    held = run.federation.state_dict()
    assert {name.partition(".")[0] for name in held} == {"net", "generator", "judge"}


def update_of(size=2, **entries):
    return {"weights": {}, "generator": {}, "shared_features": {}, "num_samples": torch.tensor(size), **entries}


def test_the_server_averages_by_samples_and_the_order_of_updates_changes_nothing():
    updates = {k: update_of(n, generator={"generator.a": torch.tensor(float(k))}) for k, n in ((1, 10), (4, 30))}
    for given in (updates, dict(reversed(updates.items()))):
        server = set_up(FeatureBank(), make_client(MAKE))
        before = server.state["weights"]
        assert server.aggregate({}, 0) == {} and server.state["next"] == 0
        assert server.aggregate(given, 0) == {} and server.state["next"] == 1
        assert float(server.state["generator"]["generator.a"]) == 0.25 * 1 + 0.75 * 4
        assert equal(server.state["weights"], before)


def test_features_that_come_later_join_those_of_their_class():
    server = set_up(FeatureBank(), make_client(MAKE))

    def shared(values, y):
        x = torch.tensor(values)[:, None, None].expand(-1, 2, FEATURES)
        return update_of(shared_features={"x": x, "y": torch.tensor(y)})

    assert server.aggregate({0: shared([1.0, 2.0], [2, 0]), 3: shared([3.0], [2])}, 2) == {"shared": 3.0}
    assert server.aggregate({1: shared([4.0, 5.0], [0, 2])}, 3) == {"shared": 5.0}
    bank = server.download(0)["shared_features"]
    assert bank["x"][:, 1, 0].tolist() == [2, 4, 1, 3, 5] and bank["counts"].tolist() == [2, 0, 3]


def test_a_server_without_generators_is_refused():
    with pytest.raises(MisconfigurationException, match="FeatureBank averages a generator that model FedAvg"):
        set_up(FeatureBank(), make_client(FedAvg))


# The second part


def test_classes_that_were_shared_are_drawn_alike_and_their_features_too():
    x = torch.arange(10.0).view(10, 1, 1).expand(10, 2, FEATURES) + torch.tensor([0.0, 100.0]).view(1, 2, 1)
    client = with_bank(make_client(MAKE), x, [8, 0, 2])
    torch.manual_seed(0)
    drawn, classes = client.drawn(6000, torch.device("cpu"))
    assert drawn.shape == (2, 6000, FEATURES) and classes.shape == (2, 6000)
    # of each noise its own, by draws of their own
    assert float(drawn[0].max()) < 100 <= float(drawn[1].min())
    assert not torch.equal(classes[0], classes[1])
    for own, of in zip(drawn[:, :, 0] - torch.tensor([[0.0], [100.0]]), classes, strict=True):
        assert torch.equal(of, torch.where(own < 8, 0, 2))
        counts = torch.bincount(own.long(), minlength=10)
        assert counts[:8].sum().item() == pytest.approx(3000, abs=150)
        assert all(count == pytest.approx(375, abs=80) for count in counts[:8].tolist())
        assert all(count == pytest.approx(1500, abs=150) for count in counts[8:].tolist())


def test_a_step_takes_own_and_drawn_samples_alike():
    bank = torch.randn(9, 2, FEATURES, generator=torch.Generator().manual_seed(1))
    client = with_bank(make_client(MAKE), bank, [4, 3, 2])
    x, y = points(5, seed=3)
    torch.manual_seed(2)
    drawn, classes = client.drawn(5, torch.device("cpu"))
    torch.manual_seed(2)
    loss = client.training_step((x, y), 0)["loss"]
    parts = [(x, y), *zip(drawn, classes, strict=True)]
    losses = [F.cross_entropy(client.net(part), of, reduction="none") for part, of in parts]
    torch.testing.assert_close(loss, torch.cat(losses).mean())
    # the first rounds' parameters are neither trained nor decayed
    assert not any(client.phase.trains(name) for name, _ in client.named_parameters() if not name.startswith("net."))


class Late(FedAvg):
    """FedAvg whose clients begin after two rounds."""

    def local_phases(self):
        return super().local_phases() if self.round >= 2 else []

    def shared_state(self):
        return super().shared_state() if self.round >= 2 else {}

    def configure_aggregator(self):
        return LateAverage()


class LateAverage(WeightedAverage):
    """Its server."""

    def aggregate(self, updates, round):
        return super().aggregate({k: update for k, update in updates.items() if update["weights"]}, round)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_without_shared_features_it_is_the_parent_bit_for_bit(engine):
    run = partial(fit, max_rounds=5, engine=engine)
    model = partial(make_client, net=noisy, optimizer_lifetime="run")
    off, late = run(model(MAKE, noise=())), run(model(Late))
    parts = [{n: t for n, t in each.weights.items() if n.startswith("net.")} for each in (off, late)]
    assert equal(*parts)
    assert [row["val/loss"] for row in off.rows] == [row["val/loss"] for row in late.rows]
    # and what they change
    shared = run(model(MAKE))
    assert not equal(parts[0]["net.classifier.weight"], shared.weights["net.classifier.weight"])
    first, parent = run(model(MAKE, distill_rounds=0)), run(model(FedAvg))
    assert equal({name: first.weights[name] for name in parent.weights}, parent.weights)


def test_it_goes_with_other_parents():
    class Both(FedFed, FedProx):
        """FedProx with shared features."""

    make = partial(Both, distill_rounds=1, width=4)
    none, some = (fit(make_client(make, mu=mu), max_rounds=4).weights for mu in (0.0, 5.0))
    alone = fit(make_client(MAKE, distill_rounds=1, latent=None), max_rounds=4).weights
    assert equal(none, alone) and not equal(none["net.classifier.weight"], some["net.classifier.weight"])
    assert equal(none["generator.mean.weight"], some["generator.mean.weight"])


def test_shared_features_help_clients_who_lack_classes():
    data = partial(blobs, 30, 30, 30, by_class=True)
    make = partial(FedFed, distill_rounds=4, width=8, distill_lr=0.02, noise=(0.1,))
    one, other = (fit(make_client(cls), data(), max_rounds=n) for cls, n in ((make, 9), (FedAvg, 4)))
    shared, alone = one.rows[-1], other.rows[-1]
    assert shared["val/loss"] < alone["val/loss"]


# Runs


@pytest.mark.parametrize("pause", [1, 2, 3, 4])
@pytest.mark.by_default("2")
def test_a_pause_at_any_border_of_the_parts_changes_no_bit(pause, tmp_path):
    make = partial(image_client, optimizer_lifetime="run")
    settings = {"max_rounds": 5, "clients_per_round": 3}
    data = partial(blobs, data=Pictures)
    whole = fit(make(), data(), **settings)
    fit(make(), data(), root=tmp_path, callbacks=[Pause(pause)], **settings)
    assert same_end(whole, fit(make(), data(), root=tmp_path, ckpt_path="last", **settings))


def test_the_order_of_clients_changes_no_bit():
    data, settings = partial(blobs, data=Pictures), {"max_rounds": 5}
    assert same_end(fit(image_client(), data(), **settings), fit(image_client(), data(), engine=Shuffled, **settings))


@pytest.mark.parametrize("kind", [Pictures, Blobs])
def test_engines_agree(kind):
    make = image_client if kind is Pictures else partial(make_client, MAKE, net=plain)
    # in float32 Adam makes steps of the rounding of gradients that are 0, such as those of biases before BatchNorm
    settings = {"max_rounds": 5, "precision": "64-true"}
    runs = [fit(make(), blobs(data=kind), engine=engine, **settings) for engine in ("sequential", "vectorised")]
    one, other = (run.weights for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)
    assert runs[0].rows[3]["train/loss"] == pytest.approx(runs[1].rows[3]["train/loss"], rel=1e-9)


class Colours(Pictures):
    """Images of three colours."""

    input_shape = (3, 8, 8)

    def load(self):
        x, y = super().load()
        return x.expand(-1, 3, -1, -1), y


def test_images_of_three_colours_and_clients_of_one_sample():
    spy = Spy()
    run = fit(image_client((3, 8, 8)), blobs(3, 60, data=Colours), max_rounds=5, callbacks=[spy])
    assert run.data.size(0, "train") == 1
    # too few to normalise over, and shared all the same
    assert spy.updates[2][0]["shared_features"]["x"].shape == (1, 2, 3, 8, 8)
    assert run.rows[-1]["clients_diverged"] == 0 and all(torch.isfinite(t).all() for t in run.weights.values())
    with pytest.raises(MisconfigurationException, match=r"batch_size=1 gives BatchNorm nothing"):
        fit(image_client((3, 8, 8)), blobs(data=Colours, batch_size=1))
    # without a generator there is nothing to normalise
    check_batches_of_one(make_client(MAKE, distill_rounds=0), max_rounds=3)


def test_batches_of_one_row_of_a_table():
    check_batches_of_one(make_client(MAKE, optimizer=partial(SGD, lr=0.05)), max_rounds=6)


def test_rounds_of_the_generator_alone_are_no_rounds_without_learning(recwarn):
    fit(make_client(MAKE, distill_rounds=3), max_rounds=4)
    assert not [each for each in recwarn if "nothing was learned" in str(each.message)]


def test_newcomers_train_the_model_on_shared_features():
    run = fit(make_client(MAKE), max_rounds=4)
    assert equal(run.federation.aggregator.welcome(9, None), run.federation.aggregator.download(0))
    (phase,) = run.model.joining_phases()
    assert phase.trains("net.classifier.bias") and not phase.trains("judge.classifier.bias")


def test_each_part_has_its_optimizer():
    client = make_client(MAKE, optimizer=partial(SGD, lr=0.3), distill_lr=0.02)
    (phase,) = client.local_phases()
    made = client.local_optimizer(phase, list(client.generator.parameters()))
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["lr"] == 0.02 and not phase.scheduled
    assert isinstance(client.local_optimizer(replace(phase, name="train"), list(client.net.parameters())), SGD)


# Refusals


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("distill_rounds", -1, "0 or more"),
        ("reconstruction", -1.0, "0 or more"),
        ("divergence", -1.0, "0 or more"),
        ("sensitive", -1.0, "0 or more"),
        ("whole", -1.0, "0 or more"),
        ("latent", 0, "1 or more"),
        ("width", 5, "an even number"),
        ("width", 0, "an even number"),
        ("distill_lr", 0.0, "above 0"),
        ("noise", [0.3, -0.1], "numbers of 0 or more"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name, value, words):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}=.* {words}"):
        make_client(FedFed, **{name: value})


def test_inputs_without_features_are_refused():
    whole = torch.ones(3, FEATURES, dtype=torch.int64)
    client = make_client(MAKE)
    (client.phase,) = client.local_phases()
    with pytest.raises(MisconfigurationException, match="whole numbers"):
        client.training_step((whole, torch.zeros(3).long()), 0)
    with pytest.raises(MisconfigurationException, match="whole numbers"):
        client.shared(known(client, Samples(whole, torch.zeros(3).long())))
    one = {"shape": [5], "dtype": "float32"}
    several = {"shape": [5], "inputs": {"one": one, "other": one}}
    with pytest.raises(MisconfigurationException, match=r"inputs of one tensor"):
        FedFed(net=lambda shape, classes: plain((5,), classes), input_shape=several, num_classes=CLASSES)


def test_no_guarantee_and_no_sum_covers_shared_samples():
    with pytest.raises(MisconfigurationException, match="FedFed"):
        fit(make_client(MAKE), aggregator=DPAverage(noise_multiplier=1.0))
    with pytest.raises(MisconfigurationException, match="FedFed"):
        fit(make_client(MAKE), example_privacy=DPSGD(noise_multiplier=1.0))
    with pytest.raises(MisconfigurationException, match="FeatureBank"):
        fit(make_client(MAKE), secure_sum=SecureSum())
    with pytest.raises(MisconfigurationException, match="FedFed"):
        fit(make_client(MAKE), local_privacy=Laplace(1.0))
