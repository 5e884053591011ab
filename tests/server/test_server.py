"""The server's knowledge of its federation, and the checks of what a server side returns."""

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import make_client, noisy
from pfl_lightning import AggregatorList, Server, WeightedAverage
from pfl_lightning.methods import FedPer
from pfl_lightning.nets import Net
from pfl_lightning.server.base import check_buffers, checked_logs

VARIANCE, COUNTER = "net.features.1.running_var", "net.features.1.num_batches_tracked"


def server_of(module):
    shared = {name: tensor.clone() for name, tensor in module.state_dict().items() if module.is_shared(name)}
    return Server(4, shared, module, None, seed=0)


def tied(input_shape, num_classes):
    layer = nn.Linear(input_shape[0], input_shape[0])
    return Net(nn.Sequential(layer, nn.Tanh(), layer), nn.Linear(input_shape[0], num_classes))


def test_a_tied_parameter_is_known_by_its_first_name():
    names = server_of(make_client(net=tied)).first_names()
    assert names["net.features.2.weight"] == names["net.features.0.weight"] == "net.features.0.weight"
    assert names["net.classifier.bias"] == "net.classifier.bias" and len(names) == 6


def test_what_clients_keep_is_copied_to_run_a_net_by():
    module = make_client(FedPer, net=noisy)
    kept = server_of(module).kept_entries()
    assert kept.keys() == {"net.classifier.weight", "net.classifier.bias"}
    before = kept["net.classifier.bias"].clone()
    with torch.no_grad():
        module.net.classifier.bias.add_(1)
    assert torch.equal(kept["net.classifier.bias"], before)


def test_a_server_computes_in_its_clients_type_or_in_float32():
    types = {kind: server_of(make_client().to(kind)).dtype for kind in (torch.bfloat16, torch.float32, torch.float64)}
    assert types == {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def test_a_record_of_a_round_is_a_dict():
    assert checked_logs({"loss": 0.5}, "Mine") == {"loss": 0.5}
    with pytest.raises(MisconfigurationException, match=r"^Mine\.aggregate returned a NoneType; return a dict"):
        checked_logs(None, "Mine")


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [(COUNTER, torch.tensor(1.5), "as torch.float32 in place of torch.int64"), (VARIANCE, -1.0, "as -1, less than 0")],
)
def test_a_counter_that_became_a_fraction_and_a_negative_variance_are_refused(entry, value, words):
    initial = server_of(make_client(net=noisy)).weights
    check_buffers(initial, initial, {}, "Mine")
    check_buffers({}, initial, {}, "Mine")
    bad = value if isinstance(value, torch.Tensor) else torch.full_like(initial[entry], value)
    with pytest.raises(MisconfigurationException, match=rf"^Mine\.aggregate left '{entry}', .* {words}"):
        check_buffers({entry: bad}, initial, {0: {"weights": initial}}, "Mine")
    # what a client has sent is the client's fault
    if entry == VARIANCE:
        check_buffers({entry: bad}, initial, {0: {"weights": {entry: bad}}}, "Mine")


@pytest.mark.parametrize("aggregators", [[], [WeightedAverage(), WeightedAverage()]])
def test_a_list_of_aggregators_has_some_that_send_different_entries(aggregators):
    with pytest.raises(MisconfigurationException, match=r"^aggregator\.aggregators=\[.*\] must be at least one"):
        AggregatorList(aggregators)
