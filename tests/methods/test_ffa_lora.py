import torch

from federations import Spy, blobs, equal, fit, make_client, near, noisy
from peft_nets import peft_net
from pfl_lightning.aggregators import AdapterAverage
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import FedAvg, FedIT, FFALoRA
from pfl_lightning.server.adapters import is_first, is_second, pairs


class Free(FFALoRA):
    """Trains A as well."""

    def new_net(self):
        return FedAvg.new_net(self)


def test_with_a_free_it_is_fedit_bit_for_bit():
    assert equal(fit(make_client(Free, net=noisy)).weights, fit(make_client(FedIT, net=noisy)).weights)


def test_a_stands_still_for_all_and_never_travels():
    spy = Spy()
    run = fit(make_client(FFALoRA), callbacks=[spy])
    first = make_client(FFALoRA).state_dict()
    for name, tensor in run.weights.items():
        if is_first(name):
            assert torch.equal(tensor, first[name])
        elif is_second(name):
            assert tensor.any()
    sent = spy.updates[-1][0]["weights"]
    assert any(map(is_second, sent)) and not any(map(is_first, sent))
    assert run.rows[0]["bytes/down"] == 4 * num_bytes(sent)
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_the_mean_is_that_of_the_products_exactly():
    spy = Spy()
    run = fit(make_client(FFALoRA), callbacks=[spy], max_rounds=1, precision="64-true")
    updates = spy.updates[0]
    sizes = {k: int(u["num_samples"]) for k, u in updates.items()}
    for pair in pairs(run.weights):
        a = run.weights[pair.a]
        mean = sum(n / sum(sizes.values()) * updates[k]["weights"][pair.b] @ a for k, n in sizes.items())
        torch.testing.assert_close(run.weights[pair.b] @ a, mean, rtol=1e-12, atol=1e-13)
    # nothing to measure: the pairs aren't whole
    assert fit(make_client(FFALoRA), aggregator=AdapterAverage()).rows[0]["server/product_error"] == 0


def test_the_engines_agree():
    alone, together = (fit(make_client(FFALoRA, net=noisy), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights))


def test_it_freezes_adapters_of_peft():
    torch.manual_seed(0)
    run = fit(FFALoRA(peft_net, (6,), 3), blobs(24, 16), max_rounds=1)
    shared = [name for name in run.model.state_dict() if run.model.is_shared(name)]
    assert sum(map(is_second, shared)) == 2 and not any(map(is_first, shared))
