"""Steps of dense nets by hand: the bits of the general way, and nets and methods that are left to it."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from federations import CLASSES, FEATURES, Altered, Blobs, blobs, fit, make_client, untimed
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import Samples
from pfl_lightning.engines.vmap import gradients
from pfl_lightning.engines.vmap.dense import Dense, DenseNet
from pfl_lightning.messages import tensors
from pfl_lightning.methods import FedAvg, FedBABU, FedPer, FedProx, FedRep, Local
from pfl_lightning.nets import MLP, Net
from pfl_lightning.tasks import Classification

UNEQUAL = partial(blobs, 24, 1, 31, 7, 18, val_fraction=0.0, test_fraction=0.0)
ALIKE = partial(blobs, 20, 20, 20, val_fraction=0.0, test_fraction=0.0)
DEEP = partial(MLP, hidden=(7, 5))


@pytest.fixture
def made(monkeypatch):
    """What `DenseNet.of` has given in each phase."""
    found = []

    def of(*args, find=DenseNet.of):
        found.append(find(*args))
        return found[-1]

    monkeypatch.setattr(DenseNet, "of", of)
    return found


def sequence(*layers):
    """A net of copies of these layers, as each run trains its own."""
    return lambda input_shape, num_classes: deepcopy(Net(nn.Sequential(*layers[:-1]), layers[-1]))


def ends(monkeypatch, method, data, both=True, **settings):
    """The results of a run by hand and of one by `vmap`."""
    made = {name: settings.pop(name) for name in ("net", "optimizer") if name in settings}
    results = []
    for by_hand in (True, False)[: 1 + both]:
        with monkeypatch.context() as patched:
            if not by_hand:
                patched.setattr(gradients.DenseNet, "of", lambda *_: None)
            run = fit(
                make_client(method, **{"net": DEEP, **made}),
                data(),
                **{"engine": "vectorised", "max_rounds": 2, "local_epochs": 2, **settings},
            )
        results.append((list(tensors([dict(run.weights), run.federation.federation_state()])), untimed(run.rows)))
    return results


@pytest.mark.parametrize(
    ("method", "data", "settings"),
    [
        (FedAvg, UNEQUAL, {}),
        (FedAvg, ALIKE, {}),
        (FedAvg, UNEQUAL, {"precision": "64-true"}),
        (FedAvg, UNEQUAL, {"accumulate_grad_batches": 2}),
        (FedAvg, UNEQUAL, {"gradient_clip_val": 0.1, "optimizer": partial(Adam, lr=0.01)}),
        (FedAvg, UNEQUAL, {"net": partial(MLP, hidden=(7, 5), head="all_fc")}),
        (FedAvg, UNEQUAL, {"net": partial(MLP, hidden=())}),
        (FedAvg, UNEQUAL, {"net": sequence(nn.Linear(FEATURES, 4, bias=False), nn.Linear(4, CLASSES, bias=False))}),
        (FedAvg, UNEQUAL, {"net": sequence(nn.Linear(FEATURES, CLASSES), nn.ReLU())}),
        # frozen layers, below and above the trained ones
        (FedRep, UNEQUAL, {}),
        (FedBABU, ALIKE, {}),
        (FedPer, UNEQUAL, {"local_steps": 3, "local_epochs": None}),
        (Local, ALIKE, {"optimizer": partial(SGD, lr=0.1, weight_decay=0.1, nesterov=True, momentum=0.9)}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bits_are_those_of_vmap(monkeypatch, made, method, data, settings):
    (by_hand, rows), (general, others) = ends(monkeypatch, method, data, **settings)
    assert made and all(made)
    assert len(by_hand) == len(general) and all(map(torch.equal, by_hand, general))
    assert rows == others


class Broken(Altered):
    """Client 1 has an infinite input."""

    def alter(self, part, client, split):
        """Return the samples."""
        return Samples(part.x / float(client != 1), part.y)


def test_a_diverged_client_is_left_out_alike(monkeypatch, made):
    (by_hand, rows), (general, others) = ends(monkeypatch, FedAvg, partial(ALIKE, data=Broken))
    assert all(made) and rows[0]["clients_diverged"] == others[0]["clients_diverged"] == 1
    assert all(map(torch.equal, by_hand, general))


class Asking(FederatedCallback):
    """Asks for the loss's square, as a cohort by loss does."""

    def on_fit_start(self, trainer, pl_module):
        pl_module.architectures[0].requested |= {"loss_squared"}


def test_the_square_of_the_loss(monkeypatch, made):
    (_, rows), (_, others) = ends(monkeypatch, FedAvg, UNEQUAL, callbacks=[Asking()])
    assert all(net.squares for net in made) and rows == others and rows[0]["train/loss_squared"] > 0


class Hooked(FederatedCallback):
    """Registers a hook on a layer that changes its outputs."""

    def on_fit_start(self, trainer, pl_module):
        self.handle = pl_module.architectures[0].net.classifier.register_forward_hook(lambda layer, x, out: 2 * out)


def layer_of(pl_module):
    """The last linear layer."""
    return [layer for layer in pl_module.architectures[0].net.modules() if type(layer) is nn.Linear][-1]


class HookedLayer(FederatedCallback):
    """Registers a hook on a linear layer itself."""

    def on_fit_start(self, trainer, pl_module):
        layer_of(pl_module).register_forward_hook(lambda layer, x, out: 2 * out)


class OtherForward(FederatedCallback):
    """Puts another function in the place of a linear layer's own."""

    def on_fit_start(self, trainer, pl_module):
        layer = layer_of(pl_module)
        layer.forward = lambda x, of=layer.forward: 2 * of(x)


class Doubling(nn.Linear):
    """A layer of another kind."""

    def forward(self, x):
        """Return twice the outputs."""
        return 2 * super().forward(x)


class OwnLoss(FedAvg):
    """Has a loss of its own."""

    def loss(self, features, logits, target):
        """Return twice the loss."""
        return 2 * super().loss(features, logits, target)


class Weighted(Blobs):
    """Classes of weights."""

    task = Classification(CLASSES, class_weights="balanced")


SHARED = nn.Linear(FEATURES, FEATURES)
FROZEN = nn.Linear(FEATURES, FEATURES).requires_grad_(False)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (partial(FedProx, mu=0.1), {}),
        (OwnLoss, {}),
        (FedAvg, {"net": sequence(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))}),
        (FedAvg, {"net": sequence(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES))}),
        (FedAvg, {"net": sequence(nn.Linear(FEATURES, 4), Doubling(4, CLASSES))}),
        (FedAvg, {"net": sequence(SHARED, nn.ReLU(), SHARED, nn.Linear(FEATURES, CLASSES))}),
        (FedAvg, {"net": sequence(FROZEN, nn.Linear(FEATURES, CLASSES))}),
        (FedAvg, {"precision": "bf16-mixed"}),
        (FedAvg, {"callbacks": [Hooked()]}),
        (FedAvg, {"callbacks": [HookedLayer()]}),
        (FedAvg, {"callbacks": [OtherForward()]}),
    ],
)
def test_other_nets_and_steps_are_left_to_vmap(monkeypatch, made, method, settings):
    ends(monkeypatch, method, ALIKE, both=False, **settings)
    assert made and not any(made)


def test_classes_of_weights_are_left_to_vmap(monkeypatch, made):
    ends(monkeypatch, partial(FedAvg, task=Weighted.task), partial(ALIKE, data=Weighted), both=False)
    assert made and not any(made)


def test_gradients_are_autograd_s():
    net = DEEP((FEATURES,), CLASSES)
    names = dict(net.named_parameters())
    block_entries = {name: torch.stack([p.detach(), p.detach() * 1.5]) for name, p in names.items()}
    x, y = torch.randn(2, 4, FEATURES), torch.tensor([[0, 1, 2, 0], [2, 2, 1, 1]])
    layers = [f"{part}.{place}" for part, place in (("features", 1), ("features", 3), ("classifier", 0))]
    dense = DenseNet([Dense(f"{n}.weight", f"{n}.bias", n != layers[-1]) for n in layers], list(names), False)
    counts = torch.tensor([4, 3])
    values, gradients = dense.differentiate(block_entries, x, y, counts, 0.5)
    for row, count in enumerate(counts.tolist()):
        own = {name: stack[row].clone().requires_grad_() for name, stack in block_entries.items()}
        logits = torch.func.functional_call(net, own, x[row, :count])
        loss = nn.functional.cross_entropy(logits, y[row, :count])
        torch.testing.assert_close(values["loss"][row], loss.detach())
        for name, expected in zip(own, torch.autograd.grad(loss / 2, list(own.values())), strict=True):
            torch.testing.assert_close(gradients[name][row], expected)
