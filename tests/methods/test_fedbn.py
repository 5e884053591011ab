import pytest
import torch
from torch import nn

from federations import HIDDEN, Spy, blobs, equal, fit, make_client, noisy
from pfl_lightning.methods import FedAvg, FedBN, Local
from pfl_lightning.nets import Net


def named_otherwise(input_shape, num_classes):
    """A net whose BatchNorm layers don't say so by their names, and with layers that are none."""
    shortcut = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.BatchNorm1d(HIDDEN), nn.LayerNorm(HIDDEN))
    return Net(nn.ModuleDict({"downsample": shortcut})["downsample"], nn.Linear(HIDDEN, num_classes))


@pytest.mark.parametrize("net", [noisy, named_otherwise])
def test_batch_norm_stays_and_all_else_travels(net):
    spy = Spy()
    run = fit(make_client(FedBN, net=net), callbacks=[spy])
    stays = {f"net.features.1.{own}" for own in nn.BatchNorm1d(1).state_dict()}
    assert all(set(state.personal) == stays for state in run.federation.clients.values())
    assert all(not stays & set(update["weights"]) for updates in spy.updates for update in updates.values())
    assert set(spy.updates[0][0]["weights"]) | stays == set(make_client(net=net).state_dict())
    own = [run.federation.clients[k].personal for k in range(2)]
    for name in ("weight", "running_mean"):
        assert not torch.equal(*(entries[f"net.features.1.{name}"] for entries in own))


def test_without_batch_norm_it_is_fedavg_bit_for_bit_and_says_so():
    with pytest.warns(UserWarning, match=r"has no BatchNorm layer, so that FedBN is FedAvg"):
        client = make_client(FedBN)
    assert equal(fit(client).weights, fit(make_client(FedAvg)).weights)


def test_of_one_client_it_is_local_training_bit_for_bit():
    bn, local = (fit(make_client(method, net=noisy), blobs(40)) for method in (FedBN, Local))
    own = {**bn.federation.aggregator.download(0)["weights"], **bn.federation.clients[0].personal}
    assert equal(dict(sorted(own.items())), dict(sorted(local.federation.clients[0].personal.items())))


def test_it_differs_from_fedavg():
    bn, average = (fit(make_client(method, net=noisy)) for method in (FedBN, FedAvg))
    assert bn.rows[-1]["val/loss"] != average.rows[-1]["val/loss"]
