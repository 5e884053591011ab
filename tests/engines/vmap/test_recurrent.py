"""nn.LSTM, nn.GRU and nn.RNN for many clients at once."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

from federations import blobs, fit, make_client
from pfl_lightning.engines.vmap.dropout import Streams
from pfl_lightning.engines.vmap.engine import Unvectorisable
from pfl_lightning.engines.vmap.layers import Layers
from pfl_lightning.messages import tensors
from pfl_lightning.methods.fedavg import FedAvg

KINDS = {
    "LSTM": nn.LSTM,
    "LSTM, projected": partial(nn.LSTM, proj_size=3),
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of relu": partial(nn.RNN, nonlinearity="relu"),
}
FORMS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "samples first": {"num_layers": 2, "batch_first": True},
    "no biases": {"bias": False, "bidirectional": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_each_client_alone(kind, form):
    layer = KINDS[kind](4, 5, **FORMS[form]).double()
    stacks = {name: torch.randn(3, *p.shape, dtype=torch.float64) / 3 for name, p in layer.named_parameters()}
    x = torch.randn(3, 7, 2, 4, dtype=torch.float64)

    def loss(weights, x):
        outputs, ends = torch.func.functional_call(layer, weights, (x,))
        return sum((t * torch.arange(t.numel()).view(t.shape)).square().sum() for t in (outputs, *tensors(list(ends))))

    vars(layer)["flatten_parameters"] = lambda: None
    with Layers():
        found = torch.func.vmap(torch.func.grad_and_value(loss))(stacks, x)
    for row in range(3):
        leaves = {name: stack[row].clone().requires_grad_() for name, stack in stacks.items()}
        value = loss(leaves, x[row])
        torch.testing.assert_close(found[1][row], value)
        for name, own in zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True):
            torch.testing.assert_close(found[0][name][row], own, msg=lambda text, name=name: f"{name}: {text}")


class Sequences(nn.Module):
    """Reads a sample of four numbers as a sequence of two."""

    def __init__(self, kind, outputs, **settings):
        super().__init__()
        self.rnn = kind(2, 5, **settings)
        self.head = nn.Linear(5 * (2 if settings.get("bidirectional") else 1), outputs)

    def forward(self, x):
        outputs, _ = self.rnn(x.reshape(len(x), -1, 2))
        return self.head(outputs[:, -1])


class Packed(Sequences):
    """Reads packed sequences."""

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(len(x), -1, 2), [1] * len(x), batch_first=True)
        return self.head(self.rnn(packed)[1][-1])


def run(tmp_path, engine, net, **settings):
    torch.manual_seed(0)
    model = make_client(FedAvg, net=net, optimizer=partial(SGD, lr=0.1, momentum=0.9))
    return fit(model, blobs(), tmp_path / engine, engine=engine, max_rounds=3, precision="64-true", **settings)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_run_is_that_of_one_client_after_another(tmp_path, kind, dropout):
    def net(input_shape, outputs):
        return Sequences(kind, outputs, num_layers=2, batch_first=True, dropout=dropout, bidirectional=True)

    one, other = (run(tmp_path, engine, net) for engine in ("sequential", "vectorised"))
    for a, b in zip(one.weights.values(), other.weights.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    (layer,) = (m for m in other.model.modules() if isinstance(m, kind))
    # the layer has its own weights again, and can be copied
    assert all(own is p for own, p in zip(layer._flat_weights, layer.parameters(), strict=True))
    copy.deepcopy(layer)


def test_packed_sequences_are_left_to_other_engines(tmp_path):
    with pytest.raises(Unvectorisable, match=r"engine='vectorised' can't run.*sequential"):
        run(tmp_path, "vectorised", lambda input_shape, outputs: Packed(nn.GRU, outputs, batch_first=True))


def test_evaluation_has_no_dropout_to_draw():
    with pytest.raises(RuntimeError, match="dropout"):
        Layers().between(torch.ones(2), 0.5)
    assert Streams.between is not Layers.between
