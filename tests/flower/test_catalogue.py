"""Every method of the catalogue: at sites it computes what it computes in a simulation, to the bit."""

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("flwr", reason="needs the extra flower, and Python 3.11 or newer")

from deployments import NODES, deploy, grid_of

from federations import Pause, equal, fit, make_client, near, noisy, untimed
from pfl_lightning.flower.states import StateVersions
from pfl_lightning.methods.registry import METHODS
from sweeps import swept

# the loss of pairs of views takes images alone; FedNova and others refuse optimizers that live on
OWN = {"FedClassAvg": {"contrastive": False}, "FedNova": {"optimizer_lifetime": "round"}}
OWN |= dict.fromkeys(("Dis-PFL", "FlexLoRA", "FLoRA", "LoRA-SVD", "RoLoRA"), OWN["FedNova"])
"""Settings that methods want."""


SOME = ("Local", "FedPer", "cwFedAvg", "FedReMa", "SCAFFOLD", "FedProto", "FedRolex")
"""One of each way to keep state: nowhere, at clients, at the server, at both, in classes' means, in parts of a net."""


# one that pools samples is refused at sites, see tests/methods/test_pooled.py
@pytest.mark.parametrize("method", swept([method for method in METHODS if not method.client.pools], SOME))
# FedRolex has nets of several sizes
@pytest.mark.by_default("SCAFFOLD", "FedRolex")
def test_a_deployment_equals_the_simulation(method, tmp_path):
    own = {"optimizer_lifetime": "run", **OWN.get(method.name, {})}
    make = partial(make_client, method.client, net=noisy, **own)
    settings = {"clients_per_round": 0.5, "max_rounds": 3, "evaluate": "both"}
    alone = fit(make(), aggregator=method.new_aggregator(), **settings)
    grid = grid_of(make, tmp_path / "sites", **settings)
    root = tmp_path / "server"
    deploy(grid, make, root, aggregator=method.new_aggregator(), callbacks=[Pause(2)], **settings)
    run = deploy(grid, make, root, aggregator=method.new_aggregator(), ckpt_path="last", **settings)
    one, other = alone.federation, run.federation
    assert equal(one.state_dict(), other.state_dict())
    assert equal(one.aggregator.state, other.aggregator.state)
    assert all(equal(one.aggregator.download(client), other.aggregator.download(client)) for client in range(4))
    # up to rounding: a simulation evaluates clients with the same model in one pass
    rows = untimed(alone.rows), untimed(run.rows)
    assert near(*rows)
    # "17" and "17.0" are one number, and two lines of a record
    types = [[{name: type(value) for name, value in row.items()} for row in each] for each in rows]
    assert types[0] == types[1]
    assert near(alone.test(), run.test())
    for node, config in NODES.items():
        states = StateVersions(tmp_path / "sites" / str(node))
        for client in map(int, config["clients"].split()):
            kept = other.clients[client].kept if client in other.clients else None
            if kept is not None:
                # a site keeps what travels once, which a simulation hands to clients in each round
                there = replace(states.load(client, kept), once={})
                assert equal(vars(there), vars(one.clients[client]))
            elif client in one.clients:
                assert not one.clients[client].personal
