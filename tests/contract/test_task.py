"""Whether a client module fits the data of a run, looked at before the first round."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import Wide, blobs, equal, make_client
from pfl_lightning.contract.pairing import check_task
from pfl_lightning.data import TensorData
from pfl_lightning.methods import FedAvg
from pfl_lightning.nets import CNN, MLP, FastText, Net
from pfl_lightning.tasks import Classification


def test_a_module_is_looked_at_where_it_is_and_not_where_it_will_be():
    # Lightning's Trainer sets `_device` before the hook `setup`, and moves the module after it
    data, client = blobs(), make_client()
    data.setup()
    client._device = torch.device("meta")
    check_task(client, data)


@pytest.mark.parametrize("training", [True, False])
def test_a_trial_leaves_statistics_and_modes_of_a_net_as_they_were(training):
    data = blobs()
    data.setup()
    client = make_client(FedAvg, net=Wide).train(training)
    before = {name: tensor.clone() for name, tensor in client.state_dict().items()}
    check_task(client, data)
    assert "net.features.1.running_mean" in before and equal(client.state_dict(), before)
    assert all(module.training is training for module in client.modules())


def ready(x):
    data = TensorData(x, torch.arange(40) % 2, Classification(2), torch.arange(40) // 20)
    data.setup()
    return data


@pytest.mark.parametrize(
    ("net", "x", "says"),
    [
        (MLP, torch.zeros(40), "float32 of shape"),
        (CNN, torch.zeros(40, 1, 16, 16, dtype=torch.int64), "int64 of shape"),
        (CNN, torch.zeros(40, 1, 16, 16, dtype=torch.bool), "bool of shape"),
        (MLP, {"a": torch.zeros(40, 3)}, "a dict"),
        (FastText, torch.zeros(40, 3), "float32 of shape"),
    ],
)
def test_a_net_of_the_package_refuses_inputs_of_another_kind(net, x, says):
    data = ready(x)
    client = FedAvg(net, data.input_shape, task=data.task)
    with pytest.raises(MisconfigurationException, match=rf"model\.net={net.__name__} can't take .*{says}"):
        check_task(client, data)


class Own(Net):
    """A net with an error of its own."""

    def __init__(self, input_shape, outputs):
        super().__init__(nn.Linear(3, 3), nn.Linear(3, outputs))

    def forward(self, x):
        return x.missing


def test_an_error_of_a_user_s_net_stays():
    data = ready(torch.zeros(40, 3))
    with pytest.raises(AttributeError, match="missing"):
        check_task(FedAvg(Own, data.input_shape, task=data.task), data)
