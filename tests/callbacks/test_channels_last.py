"""Weights of convolutions with their channels last."""

import pytest
import torch
from torch import nn

from federations import CLASSES, blobs, fit, make_client, same_end
from pfl_lightning.callbacks import ChannelsLast
from pfl_lightning.methods import FedAvg, Local
from pfl_lightning.nets import Net


def convolving(input_shape, num_classes):
    body = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, (3, 1), padding=(1, 0)), nn.ReLU(), nn.Flatten())
    return Net(body, nn.Linear(12, CLASSES))


NAME = "net.features.1.weight"


def is_channels_last(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.mark.parametrize("method", [FedAvg, Local])
@pytest.mark.by_default("FedAvg")
def test_weights_have_and_keep_the_format_and_the_result_is_the_same_but_for_rounding(method):
    class Looking(method):
        def training_step(self, batch, batch_idx):
            assert is_channels_last(self.state_dict()[NAME])
            return super().training_step(batch, batch_idx)

    plain = fit(make_client(method, net=convolving))
    run = fit(make_client(Looking, net=convolving), callbacks=[ChannelsLast()])
    assert not is_channels_last(plain.model.state_dict()[NAME])
    for client, state in plain.federation.clients.items():
        for name, tensor in state.personal.items():
            torch.testing.assert_close(run.federation.clients[client].personal[name], tensor)
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(run.weights[name], tensor)


@pytest.mark.exhaustive
def test_resuming_goes_on_bit_for_bit(tmp_path):
    def run(root="unused", **settings):
        return fit(make_client(net=convolving), blobs(), root, callbacks=[ChannelsLast()], **settings)

    whole = run(max_rounds=4)
    run(tmp_path, max_rounds=2)
    assert same_end(whole, run(tmp_path, max_rounds=4, ckpt_path="last"))
