"""Engines tell a client module what a download is for, and methods leave out the passes that it doesn't need."""

from functools import partial

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from federations import blobs, fit, make_client
from pfl_lightning.methods import FedAS, FedAvg, FedBABU, PACClient, QFedAvg
from pfl_lightning.methods.scaffold import ControlVariates

ROUNDS, COHORT, CLIENTS = 2, 2, 4


def told(method, **settings):
    """Each download's purpose: whether training follows, and whether evaluation does."""
    purposes = []

    class Told(method):
        def on_download(self, payload, data):
            super().on_download(payload, data)
            purposes.append((self.training_follows, self.evaluation_follows))

    fit(make_client(Told), max_rounds=ROUNDS, clients_per_round=COHORT, **settings)
    return purposes


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    "method, evaluate, trained, evaluated",
    [
        (FedAvg, "before", (True, False), (False, True)),
        (FedAvg, "both", (True, True), (False, True)),
        # it trains on a copy before each evaluation
        (FedBABU, "before", (True, False), (True, True)),
    ],
)
@pytest.mark.by_default(but=["FedBABU-before-trained2-evalua", "FedBABU-before-trained2-evalua"])
def test_a_download_is_told_its_purpose(engine, method, evaluate, trained, evaluated):
    purposes = told(method, engine=engine, evaluate=evaluate)
    extra = ROUNDS * COHORT if trained == evaluated else 0
    assert set(purposes) == {trained, evaluated}
    # of clients that receive the same, a block has one download
    downloads = {"sequential": ROUNDS * COHORT + extra, "vectorised": ROUNDS}[engine]
    assert purposes.count(trained) >= downloads
    assert engine == "vectorised" or purposes.count(trained) == downloads
    # one download serves the evaluation of all clients with the same model
    assert purposes.count(evaluated) >= ROUNDS


def test_outside_a_federation_both_may_follow():
    client = make_client()
    assert client.training_follows and client.evaluation_follows


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    "method, rounds",
    [
        (QFedAvg, ROUNDS),
        # in the first round there is nothing to align with
        (FedAS, ROUNDS - 1),
        (PACClient, ROUNDS),
        (partial(ControlVariates, option="I"), ROUNDS),
    ],
    ids=["q-FedAvg", "FedAS", "FedPAC", "SCAFFOLD"],
)
def test_what_serves_training_is_not_computed_for_evaluation(method, rounds, engine):
    client = make_client(method)
    hook, passes = client.on_download, []

    def on_download(payload, data):
        seen = []
        handle = register_module_forward_hook(lambda module, *_: seen.append(type(module) is nn.Linear))
        try:
            hook(payload, data)
        finally:
            handle.remove()
        passes.append((client.training_follows, any(seen)))

    vars(client)["on_download"] = on_download
    fit(client, blobs(), max_rounds=ROUNDS, engine=engine)
    assert (False, True) not in passes and (False, False) in passes
    assert passes.count((True, True)) == CLIENTS * rounds
