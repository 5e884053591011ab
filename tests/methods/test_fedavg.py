import pytest

from federations import Spy, equal, fit, make_client, noisy
from pfl_lightning.methods import FedAvg, FedPer


def test_all_clients_are_evaluated_with_the_one_model():
    run = fit(make_client())
    payloads = [run.federation.aggregator.download(client)["weights"] for client in range(4)]
    assert all(equal(payloads[0], payload) for payload in payloads)
    assert set(run.federation.evaluations.results["test"]) == {0, 1, 2, 3}


def test_everything_of_the_net_travels():
    run = fit(make_client(net=noisy))
    size = sum(t.numel() * t.element_size() for t in run.weights.values())
    assert run.rows[0]["bytes/down"] == 4 * size
    assert run.rows[0]["bytes/up"] == 4 * (size + 8)  # and the number of samples
    assert not any(state.personal for state in run.federation.clients.values())


def test_one_client_s_round_ends_with_its_model():
    spy = Spy()
    run = fit(make_client(), callbacks=[spy], clients_per_round=1)
    for updates in spy.updates:
        assert len(updates) == 1
    (update,) = spy.updates[-1].values()
    assert equal(dict(run.weights), update["weights"])


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_after_fit_the_module_holds_the_global_model(method):
    run = fit(make_client(method, net=noisy))
    assert equal(dict(run.model.state_dict()), dict(run.weights))
