"""Steps with a loss scaler: hooks, clipping and the optimizer see gradients in their true size."""

from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import SGD

from federations import make_client
from pfl_lightning.engines import Sequential
from pfl_lightning.engines.base import LocalWork
from pfl_lightning.methods import FedAvg

SCALE = 1024.0


class Adjusting(FedAvg):
    def adjust_gradients(self, gradients):
        return {name: gradient + 0.25 for name, gradient in gradients.items()}


class Hooked(FedAvg):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)


def stepped(kind, work, scaler):
    """The weights after one step by gradients of the sum of squares."""
    client = make_client(kind, optimizer=partial(SGD, lr=0.125))
    parameters = dict(client.named_parameters())
    optimizer = client.local_optimizer(client.local_phases()[0], list(parameters.values()))
    loss = sum(parameter.square().sum() for parameter in parameters.values())
    (loss if scaler is None else scaler.scale(loss)).backward()
    Sequential(client, work, Precision())._step(optimizer, scaler, parameters)
    return parameters


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        (FedAvg, LocalWork()),
        (Adjusting, LocalWork()),
        (Hooked, LocalWork()),
        (FedAvg, LocalWork(clip=0.5)),
        (FedAvg, LocalWork(clip=0.01, clip_algorithm="value")),
    ],
    ids=["plain", "adjust_gradients", "on_before_optimizer_step", "norm", "value"],
)
def test_a_scaled_step_is_the_plain_step(kind, work):
    scaled = stepped(kind, work, torch.amp.GradScaler("cpu", init_scale=SCALE))
    plain = stepped(kind, work, None)
    assert all(torch.allclose(scaled[name], plain[name], rtol=1e-6) for name in plain)
