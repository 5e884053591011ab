import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import AdamW

from federations import Spy, blobs, drawn_update, equal, fit, make_client, near, noisy, set_up
from peft_nets import peft_net
from pfl_lightning.aggregators import AdapterAverage, NormAverage
from pfl_lightning.methods import FedIT, HetLoRA
from pfl_lightning.server.adapters import pairs


def test_with_equal_ranks_and_weights_by_samples_it_is_fedit_bit_for_bit():
    fedit = fit(make_client(FedIT, net=noisy))
    for ranks in (None, [2]):
        run = fit(make_client(partial(HetLoRA, ranks=ranks), net=noisy), aggregator=NormAverage(by_norm=False))
        assert all(torch.equal(run.weights[name], tensor) for name, tensor in fedit.weights.items())


@pytest.mark.parametrize("optimizer", [partial(AdamW, lr=0.05, weight_decay=0.1), None])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_train_and_send_their_own_rank(engine, optimizer):
    spy = Spy()
    own = {} if optimizer is None else {"optimizer": optimizer}
    run = fit(make_client(partial(HetLoRA, ranks=[1, 2]), **own), engine=engine, callbacks=[spy], max_rounds=2)
    for updates in spy.updates:
        for client, update in updates.items():
            for pair in pairs(update["weights"]):
                a, b = update["weights"][pair.a], update["weights"][pair.b]
                rank = 1 + client % 2
                assert int(torch.linalg.matrix_rank(b @ a)) == rank
                assert not a[rank:].any() and not b[:, rank:].any()
    assert [int(run.federation.clients[k].personal["rank"]) for k in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_ranks_by_the_number_of_samples(engine):
    spy, make = Spy(), partial(HetLoRA, samples_per_rank=10)
    run = fit(make_client(make), blobs(9, 25, 40), engine=engine, max_rounds=1, callbacks=[spy])
    sizes = [int(spy.updates[0][k]["num_samples"]) for k in range(3)]
    expected = [min(max(n // 10, 1), 2) for n in sizes]
    assert [int(run.federation.clients[k].personal["rank"]) for k in range(3)] == expected
    assert set(expected) == {1, 2}


def test_ranks_by_memory_are_the_largest_that_fit():
    client = make_client(HetLoRA)
    numbers = sum(client.get_parameter(name).numel() for pair in client.pairs for name in (pair.a, pair.b))
    whole = 16 * numbers / 2**20
    given = make_client(partial(HetLoRA, adapter_mib=[whole, 0.99 * whole, 1e-9, 100.0]))
    assert given.ranks == [2, 1, 1, 2]
    fit(given, max_rounds=1)


@pytest.mark.parametrize(
    "rule",
    [{"samples_per_rank": 0}, {"adapter_mib": []}, {"adapter_mib": [0.0]}, {"ranks": [1], "samples_per_rank": 5}],
)
def test_rules_of_ranks_out_of_range_are_refused_by_name(rule):
    with pytest.raises(MisconfigurationException, match=rf"model\.{max(rule)}="):
        make_client(partial(HetLoRA, **rule))


def test_the_engines_agree():
    make = partial(make_client, partial(HetLoRA, ranks=[1, 2]), net=noisy)
    alone, together = (fit(make(), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())


def test_a_received_adapter_is_cut_and_padding_leaves_products_as_they_are():
    run = fit(make_client(partial(HetLoRA, ranks=[1, 2])), max_rounds=1)
    payload = run.federation.aggregator.download(0)
    run.model.receive(run.federation.clients[0].personal, payload, None)
    for pair in pairs(payload["weights"]):
        a, b = run.model.get_parameter(pair.a), run.model.get_parameter(pair.b)
        whole_a, whole_b = (payload["weights"][name] for name in (pair.a, pair.b))
        torch.testing.assert_close(b @ a, whole_b[:, :1] @ whole_a[:1])


def test_clients_count_by_their_products():
    model = make_client(HetLoRA)
    server = set_up(NormAverage(), model)
    updates = {client: drawn_update(model, client, size=10) for client in (0, 2, 3)}
    updates[3]["weights"] = {name: 0 * t if "lora_B" in name else t for name, t in updates[3]["weights"].items()}
    norms = {
        k: math.sqrt(sum(float((1.5 * u["weights"][p.b] @ u["weights"][p.a]).square().sum()) for p in server.scales))
        for k, u in updates.items()
    }
    server.aggregate(updates, 0)
    shares = server.state["shares"]
    assert shares[3] == 0 and shares == pytest.approx({k: n / sum(norms.values()) for k, n in norms.items()})
    zeros = {k: {**u, "weights": {n: 0 * t for n, t in u["weights"].items()}} for k, u in updates.items()}
    assert server.client_weights(zeros) == pytest.approx(dict.fromkeys(updates, 1 / 3))
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


@pytest.mark.parametrize("ranks", [[], [0], [3]])
def test_ranks_out_of_range_are_refused_by_name(ranks):
    with pytest.raises(MisconfigurationException, match=r"model\.ranks="):
        make_client(partial(HetLoRA, ranks=ranks))


def test_it_cuts_adapters_of_peft():
    torch.manual_seed(0)
    spy = Spy()
    fit(HetLoRA(peft_net, (6,), 3, ranks=[1, 2]), blobs(24, 16), max_rounds=1, callbacks=[spy])
    update = spy.updates[0][0]["weights"]
    assert [int(torch.linalg.matrix_rank(update[p.b] @ update[p.a])) for p in pairs(update)] == [1, 1]


def test_other_servers_take_its_clients():
    run = fit(make_client(partial(HetLoRA, ranks=[1, 2])), aggregator=AdapterAverage(), max_rounds=2)
    assert not equal(run.weights, fit(make_client(FedIT), max_rounds=2).weights)
