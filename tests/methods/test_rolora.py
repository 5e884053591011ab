import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Spy, blobs, fit, make_client, near, noisy
from peft_nets import peft_net
from pfl_lightning.aggregators import AdapterAverage
from pfl_lightning.methods import FedIT, FFALoRA, RoLoRA
from pfl_lightning.server.adapters import is_first, is_second, pairs


def test_b_travels_in_even_rounds_and_a_in_odd_ones():
    spy = Spy()
    fit(make_client(RoLoRA), callbacks=[spy])
    for number, updates in enumerate(spy.updates):
        sent, left_out = (is_first, is_second) if number % 2 else (is_second, is_first)
        for update in updates.values():
            assert any(map(sent, update["weights"])) and not any(map(left_out, update["weights"]))
            assert "net.classifier.weight" in update["weights"]


def test_it_sends_half_the_adapters_of_fedit():
    def sent(kind):
        spy = Spy()
        fit(make_client(kind), callbacks=[spy], max_rounds=1)
        return {name for name in spy.updates[0][0]["weights"] if "lora_" in name}

    assert 2 * len(sent(RoLoRA)) == len(sent(FedIT))


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_mean_is_that_of_the_products_exactly(rounds):
    spy = Spy()
    run = fit(make_client(RoLoRA), callbacks=[spy], max_rounds=rounds, precision="64-true")
    updates = spy.updates[-1]
    sizes = {k: int(u["num_samples"]) for k, u in updates.items()}
    before = fit(make_client(RoLoRA), max_rounds=1, precision="64-true").weights if rounds > 1 else run.weights
    for pair in pairs(run.weights):
        own = {k: {n: t.double() for n, t in (before | u["weights"]).items()} for k, u in updates.items()}
        mean = sum(n / sum(sizes.values()) * own[k][pair.b] @ own[k][pair.a] for k, n in sizes.items())
        torch.testing.assert_close(
            run.weights[pair.b].double() @ run.weights[pair.a].double(), mean, rtol=1e-12, atol=1e-13
        )


def test_the_first_round_is_ffa_lora_and_a_learns_in_the_second():
    one, other = (fit(make_client(kind, net=noisy), max_rounds=1).weights for kind in (RoLoRA, FFALoRA))
    assert all(torch.equal(one[name], other[name]) for name in one)
    later = fit(make_client(RoLoRA, net=noisy), max_rounds=2).weights
    for name in filter(lambda name: "lora_" in name, one):
        assert torch.equal(one[name], later[name]) == is_second(name)


def test_the_engines_agree_and_it_learns():
    alone, together = (fit(make_client(RoLoRA), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights))
    assert alone.rows[-1]["val/loss"] < alone.rows[0]["val/loss"]


def test_other_servers_keep_what_was_not_sent():
    run = fit(make_client(RoLoRA), aggregator=AdapterAverage(server_lr=0.5), max_rounds=2)
    assert [row["server/product_error"] for row in run.rows] == [0, 0]
    first = make_client(RoLoRA).state_dict()
    assert run.weights.keys() == first.keys()


def test_optimizers_that_live_on_are_refused():
    with pytest.raises(MisconfigurationException, match=r"model\.optimizer_lifetime=run"):
        make_client(RoLoRA, optimizer_lifetime="run")


def test_it_alternates_adapters_of_peft():
    torch.manual_seed(0)
    spy = Spy()
    fit(RoLoRA(peft_net, (6,), 3), blobs(24, 16), max_rounds=2, callbacks=[spy])
    assert [sum("lora_" in name for name in updates[0]["weights"]) for updates in spy.updates] == [2, 2]
