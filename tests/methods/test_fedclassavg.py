"""FedClassAvg: its terms by hand, what travels, and clients with different networks."""

import math
import re
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from command import CONFIGS, QUIET, pfl, summary
from federations import HIDDEN, Shuffled, Sizes, Spy, blobs, equal, fit, make_client, noisy, same_end
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.methods import fedclassavg
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.fedclassavg import FedClassAvg
from pfl_lightning.methods.local import Local
from pfl_lightning.methods.losses import supervised_contrastive
from pfl_lightning.nets import AlexNetFeatures, GoogLeNetFeatures, Net, ResNet18Features, ShuffleNetV2Features

CLASSES = 3
HEAD = ["net.classifier.1.weight", "net.classifier.1.bias"]
PLAIN = {"contrastive": False, "rho": 0.0}
GENTLE = partial(SGD, lr=1e-3, momentum=0.9)


class HeadOnly(FedAvg):
    """Shares the classifier alone."""

    def is_shared(self, name):
        return super().is_shared(name) and name.startswith("net.classifier.")


class Pictures(FederatedDataModule):
    """Images of one bright row; which one is the class."""

    num_classes = CLASSES
    shape = (3, 8, 8)

    @property
    def input_shape(self):
        return self.shape

    def load(self):
        y = torch.arange(120) % CLASSES
        x = torch.randint(0, 120, (120, *self.shape), generator=torch.Generator().manual_seed(0))
        for row in range(CLASSES):
            x[y == row, :, 2 * row : 2 * row + 2] += 120
        return x.to(torch.uint8), y


class GreyPictures(Pictures):
    shape = (1, 8, 8)


class LargePictures(Pictures):
    shape = (3, 32, 32)


def small(input_shape, num_classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), HIDDEN))
    return Net(body, nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, num_classes)))


def wide(input_shape, num_classes):
    body = [nn.Conv2d(input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return Net(nn.Sequential(*body, nn.Linear(16, HIDDEN)), nn.Sequential(nn.ReLU(), nn.Linear(HIDDEN, num_classes)))


def pictures(*sizes, cls=Pictures, **settings):
    sizes = sizes or (24, 16, 30, 20)
    partitioner = Sizes(*sizes, by_class=settings.pop("by_class", False))
    return cls(num_clients=len(sizes), partitioner=partitioner, **{"batch_size": 5, **settings})


def client(seed=3, shape=(3, 8, 8), **settings):
    torch.manual_seed(seed)
    settings = {"net": small, "optimizer": GENTLE, **settings}
    return FedClassAvg(input_shape=shape, num_classes=CLASSES, **settings)


def run(settings=None, data=None, **trainer):
    return fit(client(**(settings or {})), pictures() if data is None else data, **trainer)


def moved(model):
    """The client with a classifier that has gone away from the received one."""
    with torch.no_grad():
        for parameter in model.net.classifier.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def distance_squares(model):
    pairs = zip(model.net.classifier.parameters(), model.received.buffers(), strict=True)
    return [(own - anchor).detach().square() for own, anchor in pairs]


# Off


def test_without_its_terms_it_averages_classifiers_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    ours, plain = (fit(make_client(cls, **settings)) for cls in (partial(FedClassAvg, **PLAIN), HeadOnly))
    assert equal(ours.weights, plain.weights)
    assert all(equal(vars(ours.federation.clients[i]), vars(plain.federation.clients[i])) for i in range(4))
    assert [row["val/loss"] for row in ours.rows] == [row["val/loss"] for row in plain.rows]


def test_without_its_terms_and_sharing_all_it_is_fedavg_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    ours = fit(make_client(partial(FedClassAvg, share="all", **PLAIN), **settings))
    average = fit(make_client(FedAvg, **settings))
    assert equal(ours.weights, average.weights)
    assert [row["val/loss"] for row in ours.rows] == [row["val/loss"] for row in average.rows]


@pytest.mark.parametrize("share", ["classifier", "all"])
@pytest.mark.by_default("all")
def test_each_term_changes_the_weights(share):
    none, prox, contrast, both = (
        run({"share": share, "rho": rho, "contrastive": contrastive}, max_rounds=1).weights
        for rho, contrastive in ((0.0, False), (0.5, False), (0.0, True), (0.5, True))
    )
    models = [none, prox, contrast, both]
    assert not any(equal(models[i], models[j]) for i in range(4) for j in range(i))


def test_the_proximal_term_holds_the_classifier_near_the_received_one():
    def distance(rho):
        spy = Spy()
        settings = {"contrastive": False, "rho": rho, "optimizer": partial(SGD, lr=0.05)}
        run(settings, callbacks=[spy], max_rounds=1, local_epochs=3)
        start = client().state_dict()
        return sum(float((spy.updates[0][0]["weights"][name] - start[name]).square().sum()) for name in HEAD)

    assert distance(0.0) > distance(0.5) > 0


# The terms


@pytest.mark.parametrize("prox", ["l2", "l2sq", "mse_half"])
def test_the_proximal_term_is_zero_without_a_nan_at_the_received_classifier(prox):
    model = client(prox=prox)
    distance = model.proximity()
    distance.backward()
    assert distance.item() == 0
    assert all(not parameter.grad.any() for parameter in model.net.classifier.parameters())


def test_the_proximal_term_s_values_and_gradients():
    squares = distance_squares(moved(client()))
    total = sum(float(square.sum()) for square in squares)
    expected = {"l2": total**0.5, "l2sq": total, "mse_half": sum(float(square.mean()) for square in squares) / 2}
    for prox, value in expected.items():
        model = moved(client(prox=prox))
        distance = model.proximity()
        assert distance.item() == pytest.approx(value, rel=1e-5)
        distance.backward()
        norm = sum(float(p.grad.square().sum()) for p in model.net.classifier.parameters()) ** 0.5
        assert norm == pytest.approx({"l2": 1, "l2sq": 2 * total**0.5}.get(prox, norm), rel=1e-5)
        assert all(parameter.grad is None for parameter in model.net.features.parameters())


def batch(n=6):
    x = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return x, torch.arange(n) % CLASSES


def fixed_views(monkeypatch):
    """Views that are no random ones: darker from image to image."""
    monkeypatch.setattr(fedclassavg, "random_views", lambda x: x * torch.linspace(1, 0.2, len(x))[:, None, None, None])


def test_the_objective_by_hand(monkeypatch):
    fixed_views(monkeypatch)
    model = moved(client(rho=0.3, tau=2.0, base_tau=0.5))
    x, y = batch()
    factors = torch.linspace(1, 0.2, 12)[:, None, None, None]
    first, second = (model.net.features(x * factor) for factor in factors.split(6))
    assert (first < 0).any()
    contrast = supervised_contrastive(torch.cat([first, second]), y.repeat(2), 2.0, 0.5)
    distance = sum(float(square.sum()) for square in distance_squares(model)) ** 0.5
    values = model.training_step((x, y), 0)
    expected = contrast + F.cross_entropy(model.net.classifier(first), y) + 0.3 * distance
    torch.testing.assert_close(values["loss"], expected)
    torch.testing.assert_close(values["contrast"], contrast)


def test_normalised_features_are_contrasted_where_asked(monkeypatch):
    fixed_views(monkeypatch)
    x, y = batch()
    model = client(normalize=True, tau=0.07)
    unit = F.normalize(model.net.features(fedclassavg.random_views(torch.cat([x, x]))), dim=1)
    expected = supervised_contrastive(unit, y.repeat(2), 0.07, 0.07)
    torch.testing.assert_close(model.training_step((x, y), 0)["contrast"], expected)


def test_the_contrastive_term_teaches_the_features_alone():
    model = client()
    model.training_step(batch(), 0)["contrast"].backward()
    assert all(parameter.grad is None for parameter in model.net.classifier.parameters())
    assert all(parameter.grad.any() for parameter in model.net.features.parameters())


def test_without_the_contrastive_term_samples_are_learnt_as_they_are(monkeypatch):
    monkeypatch.setattr(fedclassavg, "random_views", None)
    model = client(contrastive=False, rho=0.0)
    x, y = batch()
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(model.net(x), y))


def test_views_without_the_contrastive_term_are_learnt_alone(monkeypatch):
    monkeypatch.setattr(fedclassavg, "random_views", lambda x: -x)
    model = client(views=True, **PLAIN)
    x, y = batch()
    torch.testing.assert_close(model.training_step((x, y), 0)["loss"], F.cross_entropy(model.net(-x), y))


def test_sharing_nothing_is_local_bit_for_bit():
    ended = run({"share": "nothing", **PLAIN}).federation.clients
    torch.manual_seed(3)
    local = Local(net=small, input_shape=(3, 8, 8), num_classes=CLASSES, optimizer=GENTLE)
    expected = fit(local, pictures()).federation.clients
    assert all(equal(ended[i].personal, expected[i].personal) for i in range(4))


def test_both_views_share_one_batch_of_statistics():
    model = client(net=wide)
    model.training_step(batch(), 0)
    assert int(model.net.features[1].num_batches_tracked) == 1


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 8, 8)])
def test_a_batch_of_one_has_no_contrast_and_is_learnt(shape):
    model = client(shape=shape)
    x = torch.rand(1, *shape) * 2 - 1
    values = model.training_step((x, torch.tensor([2])), 0)
    values["loss"].backward()
    assert values["contrast"].item() == 0 and values["loss"] > 0
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# The federation


def test_the_classifier_travels_and_nothing_else():
    spy = Spy()
    ended = run(callbacks=[spy])
    assert all(list(update["weights"]) == HEAD for updates in spy.updates for update in updates.values())
    states = ended.federation.clients
    assert all(set(state.personal) == {"net.features.1.weight", "net.features.1.bias"} for state in states.values())
    bodies = [state.personal["net.features.1.weight"] for state in states.values()]
    assert not any(torch.equal(bodies[i], bodies[j]) for i in range(4) for j in range(i))
    payloads = [ended.federation.aggregator.download(i)["weights"] for i in range(4)]
    assert all(equal(payloads[0], payload) for payload in payloads)


def test_the_received_classifier_is_stored_nowhere():
    assert set(run().weights) == set(FedAvg(small, (3, 8, 8), CLASSES).state_dict())


def test_one_client_receives_its_own_classifier():
    spy = Spy()
    ended = run(data=pictures(40), callbacks=[spy])
    assert equal(ended.federation.aggregator.download(0)["weights"], spy.updates[-1][0]["weights"])


def test_resuming_and_the_order_change_nothing(tmp_path):
    settings = {"net": [small, wide], "optimizer_lifetime": "run"}
    trainer = {"clients_per_round": 0.75}
    whole = run(settings, root=tmp_path / "whole", **trainer)
    assert whole.rows[-1]["clients_diverged"] == 0
    assert same_end(whole, run(settings, root=tmp_path / "other", engine=Shuffled, **trainer))
    run(settings, root=tmp_path / "half", max_rounds=1, **trainer)
    trainer |= {"ckpt_path": "last", "resume_changed": True}
    assert same_end(whole, run(settings | {"seed": 9}, root=tmp_path / "half", **trainer))


def test_rounds_and_clients_draw_views_of_their_own(monkeypatch):
    drawn = []

    def remembered(x):
        drawn.append(torch.rand(()).item())
        return x

    monkeypatch.setattr(fedclassavg, "random_views", remembered)
    run(data=pictures(batch_size=100), max_rounds=2)
    first = list(drawn)
    drawn.clear()
    run(data=pictures(batch_size=100), max_rounds=2)
    assert first == drawn and len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(("cls", "shape"), [(Pictures, (3, 8, 8)), (GreyPictures, (1, 8, 8))])
@pytest.mark.by_default("GreyPictures-shape1")
def test_it_learns(cls, shape):
    settings = {"shape": shape, "optimizer": partial(Adam, lr=0.01), "tau": 10.0, "base_tau": 10.0}
    ended = run(settings, pictures(60, 60, cls=cls))
    assert ended.rows[-1]["train/loss"] < ended.rows[0]["train/loss"]


@pytest.mark.parametrize("name", ["fedclassavg", "fedclassavg_weight"])
@pytest.mark.by_default("fedclassavg")
def test_as_configured_it_learns_by_plain_sgd(name):
    files = CONFIGS / "methods" / f"{name}.yaml", CONFIGS / "protocols" / "digits_dir0.1.yaml"
    settings = "--data.num_clients 3 --trainer.max_rounds 2"
    pfl(f"fit --config {files[0]} --config {files[1]} {settings} {QUIET}")
    assert summary("FedClassAvg-Digits/version_0")["final"]["test/acc"] > 0.3


def test_clients_of_one_class_run():
    data = pictures(41, 40, by_class=True, batch_size=5)
    ended = run({"net": [small, wide]}, data, max_rounds=2)
    assert ended.rows[-1]["clients_diverged"] == 0


@pytest.mark.exhaustive
def test_the_four_networks_of_the_paper_share_5130_numbers():
    nets = [ResNet18Features, ShuffleNetV2Features, GoogLeNetFeatures, AlexNetFeatures]
    torch.manual_seed(0)
    adam = partial(Adam, lr=1e-4, betas=(0.5, 0.999))
    model = FedClassAvg(net=nets, input_shape=(3, 32, 32), num_classes=10, optimizer=adam)
    spy = Spy()
    data = pictures(8, 8, 8, 8, cls=LargePictures, batch_size=8)
    data.num_classes = 10
    ended = fit(model, data, callbacks=[spy], max_rounds=1)
    assert [type(kind.net) for kind in ended.federation.architectures] == nets
    uploads = [update["weights"] for update in spy.updates[0].values()]
    assert [sum(tensor.numel() for tensor in upload.values()) for upload in uploads] == [5130] * 4
    assert ended.rows[0]["bytes/up"] == 4 * (4 * 5130 + 8) and ended.rows[0]["bytes/down"] == 4 * 4 * 5130
    assert ended.rows[0]["clients_diverged"] == 0
    mean = sum(upload["net.classifier.1.bias"] for upload in uploads) / 4
    torch.testing.assert_close(ended.weights["net.classifier.1.bias"], mean)


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rho": -1}, r"model\.rho=-1 must be 0"),
        ({"rho": float("nan")}, r"model\.rho=nan"),
        ({"tau": 0}, r"model\.tau=0 and"),
        ({"base_tau": -1}, r"model\.base_tau=-1"),
        ({"shape": (6,)}, re.escape("not of input_shape=(6,); give contrastive=false")),
        ({"shape": (6,), "views": True, **PLAIN}, r"model\.views=true .* give views=false"),
        ({"shape": (2, 8, 8)}, r"images with 1 or 3 channels, not of input_shape=\(2, 8, 8\)"),
    ],
)
def test_what_cannot_be_is_refused(settings, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        client(**settings)


def test_features_need_no_images_without_the_contrastive_term():
    assert fit(make_client(partial(FedClassAvg, contrastive=False)), blobs()).rows[-1]["clients_diverged"] == 0
