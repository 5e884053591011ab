"""Modules that know nothing of features and classifiers."""

from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torchvision.models import DenseNet, VisionTransformer, alexnet, resnet18

from federations import CLASSES, FEATURES, HIDDEN, fit, make_client, plain
from pfl_lightning.aggregators import ClusterModels
from pfl_lightning.methods import IFCA, FedAvg, FedPer
from pfl_lightning.nets import cut_net
from pfl_lightning.nets.any_module import as_net


class Named(nn.Module):
    """Two layers by names of their own."""

    def __init__(self, input_shape=(FEATURES,), num_classes=CLASSES):
        super().__init__()
        self.body = nn.Linear(input_shape[0], HIDDEN)
        self.out = nn.Linear(HIDDEN, num_classes)

    def forward(self, x):
        return self.out(self.body(x).tanh())


class LogProbabilities(Named):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Pooled(Named):
    """Has the names of a `Net`, and an operation between the two."""

    def __init__(self, input_shape=(FEATURES,), num_classes=CLASSES):
        super().__init__(input_shape, num_classes)
        self.features, self.classifier = self.body, self.out

    def forward(self, x):
        return self.classifier(self.features(x).relu())


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (resnet18, (3, 32, 32)),
        (alexnet, (3, 64, 64)),
        (partial(DenseNet, block_config=(2, 2)), (3, 32, 32)),
        (partial(VisionTransformer, 16, 4, 2, 4, 32, 48), (3, 16, 16)),
    ],
)
def test_torchvision_s_nets_are_cut_at_their_last_layer(build, shape):
    module = build(num_classes=7).eval()
    x = torch.rand(2, *shape)
    expected, size = module(x), sum(p.numel() for p in module.parameters())
    net = cut_net(module, shape)
    assert isinstance(net.classifier, nn.Linear) and net.classifier.out_features == 7
    assert torch.equal(net(x), expected)
    assert sum(p.numel() for p in net.parameters()) == size


def test_a_cut_changes_neither_modes_nor_random_numbers():
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    state = torch.random.get_rng_state()
    net = cut_net(module, (3,))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [layer.training for layer in net.features] == [True, True, False, True]
    assert not net.features[2].num_batches_tracked


def test_one_layer_and_indices_and_a_given_name():
    assert isinstance(cut_net(nn.Linear(4, 3), (4,)).features, nn.Identity)
    words = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3))
    assert cut_net(words, (5,)).classifier.in_features == 20
    dense = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    assert cut_net(nn.ModuleDict({"a": nn.Linear(4, 4), "b": dense})["b"], (4,), "1").classifier.in_features == 5


@pytest.mark.parametrize(
    ("module", "classifier", "words"),
    [
        (LogProbabilities(), None, "computes its outputs by no layer"),
        (LogProbabilities(), "out", "goes on computing after its layer 'out'"),
        (Named(), "fc", "classifier='fc' is no layer of Named; choose from body, out"),
        (Named((FEATURES + 1,)), None, "can't be called with inputs of shape"),
    ],
)
def test_modules_that_cannot_be_cut_are_refused_and_stay_whole(module, classifier, words):
    names = list(dict(module.named_parameters()))
    with pytest.raises(MisconfigurationException, match=words):
        cut_net(module, (FEATURES,), classifier)
    assert list(dict(module.named_parameters())) == names


def test_names_alone_are_not_believed():
    module = Pooled()
    x = torch.rand(3, FEATURES)
    expected = module(x)
    net = as_net(module, (FEATURES,), CLASSES)
    assert torch.equal(net(x), expected) and torch.equal(net.classifier(net.features(x)), expected)


def test_outputs_for_other_classes_are_refused():
    with pytest.raises(MisconfigurationException, match=rf"model\.net=Named has 1000 outputs.*need {CLASSES}"):
        make_client(net=lambda shape, classes: Named(shape, 1000))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_any_module_trains_as_its_net_does(method, engine):
    def twin(input_shape, num_classes):
        net = plain(input_shape, num_classes)
        return nn.Sequential(*net.features, net.classifier)

    one = fit(make_client(method), engine=engine)
    other = fit(make_client(method, net=twin), engine=engine)
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert other.model.net.classifier.out_features == CLASSES


def test_a_built_module_gives_each_client_module_a_copy_of_its_weights():
    module = Named()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    first, second = make_client(net=module), make_client(net=module)
    assert torch.equal(first.net.classifier.weight, module.out.weight)
    assert first.net.classifier.weight is not second.net.classifier.weight
    fit(first)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_clusters_need_models_that_differ():
    with pytest.raises(MisconfigurationException, match=r"model\.net.*same weights"):
        fit(make_client(IFCA, net=Named()), aggregator=ClusterModels(2))


class Lit(LightningModule):
    """A LightningModule without hooks of training."""

    def __init__(self, input_shape=(FEATURES,), num_classes=CLASSES):
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x):
        return self.net(x)


def test_a_module_of_lightning_s_without_its_own_training_is_a_net_as_any():
    class Fivefold(FedAvg):
        def training_step(self, batch, batch_idx):
            return 5 * nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    assert len(fit(make_client(net=Lit)).rows) == 3
    net = Lit().net
    one, five = (fit(kind(net, (FEATURES,), CLASSES)).rows[0]["train/loss"] for kind in (FedAvg, Fivefold))
    assert five > 2 * one
