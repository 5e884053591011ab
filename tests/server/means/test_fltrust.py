"""Trust in uploads that go the way of the server's own model."""

import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from federations import Blobs, Wide, blobs, check_order_and_resume, fit, make_client
from pfl_lightning import Server, WeightedAverage
from pfl_lightning.aggregators import SCAFFOLD, ClassMeans
from pfl_lightning.callbacks import SignFlip
from pfl_lightning.engines import Sequential, Vectorised
from pfl_lightning.methods import Ditto, FedAvg, FedBN, FedDBE, FedPer, FedProto
from pfl_lightning.methods.feddbe import DomainConsensus
from pfl_lightning.methods.scaffold import ControlVariates
from pfl_lightning.server.means import Bucketing, FLTrust, NearestNeighbourMixing


class Alone(Blobs):
    def server_data(self):
        return None


def begun(data=None, model=None, **settings):
    """A server with the rule before its first round, in float64, and the net that it began with."""
    model = (make_client() if model is None else model).double()
    shared = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    aggregator = WeightedAverage(mean=FLTrust(**{"batch_size": 100, **settings}))
    aggregator.setup(Server(5, shared, model, data or blobs(), seed=0))
    return aggregator, copy.deepcopy(model.net)


def vector(net):
    return parameters_to_vector(net.parameters()).detach()


def entries(model):
    return torch.cat([tensor.flatten() for tensor in model.values()])


def own_change(net, steps, lr=0.1):
    """Of plain full-batch descent on the server's samples."""
    part, start, net = blobs().server_data(), vector(net), copy.deepcopy(net)
    for _ in range(steps):
        net.zero_grad()
        F.cross_entropy(net(part.x.double()), part.y).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= lr * parameter.grad
    return vector(net) - start


def sent(net, changes):
    """Updates of clients who changed the net by some vectors."""
    updates = {}
    for client, change in enumerate(changes):
        moved = copy.deepcopy(net)
        torch.nn.utils.vector_to_parameters(vector(net) + change, moved.parameters())
        updates[client] = {"weights": {f"net.{name}": tensor for name, tensor in moved.state_dict().items()}}
    return updates


def changes_of(own, count=4):
    """Of which some go the server's way more or less, and one the other way."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(count, len(own), generator=generator, dtype=torch.float64) * own.norm() / len(own) ** 0.5
    return [*(own + each * (index + 1) for index, each in enumerate(noise)), -3 * own]


@pytest.mark.parametrize("steps", [1, 3])
def test_it_is_what_its_definition_says(steps):
    server, net = begun(epochs=steps)
    own = own_change(net, steps)
    changes = changes_of(own)
    trust = [max(0.0, float(change @ own / change.norm() / own.norm())) for change in changes]
    plainly = sum(t * own.norm() / c.norm() * c for t, c in zip(trust, changes, strict=True)) / sum(trust)
    server.aggregate(sent(net, changes), 0)
    assert torch.allclose(entries(server.global_model()), vector(net) + plainly, rtol=0, atol=1e-12)
    assert server.state["shares"][4] == 0 < min(server.state["shares"][k] for k in range(3))


def test_short_uploads_are_made_as_long_as_the_servers_own():
    server, net = begun()
    own = own_change(net, 1)
    server.aggregate(sent(net, [1e-3 * own, 1e6 * own]), 0)
    assert torch.allclose(entries(server.global_model()), vector(net) + own, rtol=0, atol=1e-9)


def test_who_sent_what_changes_nothing():
    ends = []
    for turned in (False, True):
        server, net = begun()
        changes = changes_of(own_change(net, 1))
        server.aggregate(sent(net, changes[::-1] if turned else changes), 0)
        ends.append(entries(server.global_model()))
    assert torch.allclose(*ends, rtol=0, atol=1e-12)


def test_where_nobody_is_trusted_the_model_stays():
    server, net = begun()
    own = own_change(net, 1)
    with pytest.warns(UserWarning, match="trusts no upload of this round"):
        log = server.aggregate(sent(net, [-own, -2 * own, 0 * own]), 0)
    assert torch.equal(entries(server.global_model()), vector(net)) and log == {"left_out": 3.0}


def test_it_trains_on_orders_of_its_own_in_each_round():
    server, net = begun(batch_size=4)
    rule, origin = server.mean, server.global_model()
    names = server.averaging.names
    one, again, other = (entries(rule.trained(origin, names, seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(vector(net), entries(origin))


def trusting(**settings):
    return WeightedAverage(mean=FLTrust(batch_size=4, **settings))


def test_engines_agree():
    ends = [fit(make_client(), aggregator=trusting(), engine=engine).weights for engine in (Sequential, Vectorised)]
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-5) for name in ends[0])


def test_a_run_resumes_whatever_the_order(tmp_path):
    class Trusting(FedAvg):
        def configure_aggregator(self):
            return trusting()

    check_order_and_resume(Trusting, tmp_path)


@pytest.mark.filterwarnings("ignore:.*trusts no upload")
def test_flipped_signs_leave_it_learning():
    robust = fit(make_client(), aggregator=trusting(), max_rounds=12, callbacks=[SignFlip(0.5, scale=5.0)])
    plain = fit(make_client(), max_rounds=12, callbacks=[SignFlip(0.5, scale=5.0)])
    robust_loss, plain_loss = (run.rows[-1]["val/loss"] for run in (robust, plain))
    assert robust_loss < robust.rows[0]["val/loss"] and robust_loss < plain_loss


# Refusals


def test_a_server_without_samples_is_refused():
    with pytest.raises(MisconfigurationException, match=r"gives it none; set data\.central_test and data\.server_fr"):
        begun(Alone(num_clients=4))


@pytest.mark.parametrize("method", [FedPer, FedBN], ids=lambda m: m.__name__)
def test_clients_that_keep_parts_of_their_net_are_refused(method):
    model = make_client(method, net=Wide) if method is FedBN else make_client(method)
    with pytest.raises(MisconfigurationException, match=f"{method.__name__} doesn't share exactly its net"):
        fit(model, aggregator=trusting())


def test_personal_nets_beside_the_shared_one_are_none_of_its_business():
    assert fit(make_client(Ditto), aggregator=trusting(), max_rounds=2).rows[-1]["clients"] == 4


@pytest.mark.parametrize(
    ("method", "server", "entry"),
    [
        (ControlVariates, SCAFFOLD, "control variates"),
        (FedDBE, DomainConsensus, "features"),
        (FedProto, ClassMeans, "prototypes"),
    ],
    ids=["scaffold", "feddbe", "fedproto"],
)
def test_servers_that_average_other_entries_refuse_it(method, server, entry):
    with pytest.raises(MisconfigurationException, match=f"averages {entry} too"):
        fit(make_client(method), aggregator=server(mean=FLTrust()))


@pytest.mark.parametrize("outer", [Bucketing, NearestNeighbourMixing], ids=lambda m: m.__name__)
def test_it_takes_no_means_of_several(outer):
    with pytest.raises(MisconfigurationException, match="FLTrust judges each client's own upload"):
        outer(FLTrust())


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"batch_size": 0}, {"optimizer": partial(SGD, lr=-1.0)}], ids=str)
def test_settings_out_of_their_range_are_refused(settings):
    with pytest.raises(MisconfigurationException, match=r"aggregator\.mean\."):
        FLTrust(**settings)
