from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from federations import (
    Shuffled,
    Spy,
    blobs,
    drawn_update,
    equal,
    fit,
    make_client,
    near,
    noisy,
    plain,
    same_end,
    set_up,
)
from peft_nets import peft_net
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import AdapterAverage
from pfl_lightning.methods import FedAvg, FedDPA, FedIT
from pfl_lightning.nets import Adapted
from pfl_lightning.server.adapters import is_second, pairs

ADAPTED = partial(Adapted, net=noisy, rank=2, alpha=3.0)


def test_it_is_fedavg_on_adapters_bit_for_bit():
    one, other = fit(make_client(FedIT, net=noisy)), fit(make_client(FedAvg, net=ADAPTED))
    assert equal(one.weights, other.weights)
    assert [row["val/loss"] for row in one.rows] == [row["val/loss"] for row in other.rows]
    run = fit(make_client(FedIT))
    assert run.rows[-1]["val/loss"] < run.rows[0]["val/loss"]


def test_it_logs_how_far_the_mean_is_from_the_mean_product():
    model = make_client(FedIT)
    server = set_up(AdapterAverage(), model)
    updates = {client: drawn_update(model, client, size=10 * (client + 1)) for client in (0, 2, 3)}
    logs = server.aggregate(updates, 0)
    missed = whole = 0.0
    for pair in pairs(server.state["weights"]):
        products = {k: u["weights"][pair.b] @ u["weights"][pair.a] for k, u in updates.items()}
        mean = sum((k + 1) / 8 * product for k, product in products.items())
        missed += float((mean - server.state["weights"][pair.b] @ server.state["weights"][pair.a]).square().sum())
        whole += float(mean.square().sum())
    assert logs["product_error"] == pytest.approx((missed / whole) ** 0.5, rel=1e-4)
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and server.state == before


def test_the_record_has_the_error_and_it_grows_with_drift():
    short, long = (fit(make_client(FedIT), local_epochs=n).rows[0]["server/product_error"] for n in (1, 6))
    assert 0 < short < long < 2


def test_the_order_of_clients_changes_nothing():
    settings = {"clients_per_round": 3, "max_rounds": 2}
    make = partial(make_client, FedIT, net=noisy)
    assert same_end(fit(make(), **settings), fit(make(), engine=Shuffled, **settings))


def test_one_rate_for_both_factors_is_plain_lora_bit_for_bit():
    assert same_end(fit(make_client(FedIT, net=noisy)), fit(make_client(partial(FedIT, rate_ratio=1.0), net=noisy)))


@pytest.mark.parametrize("method", [FedIT, FedDPA])
def test_with_two_rates_sgd_moves_b_by_as_much_more_and_a_not_in_the_first_step(method):
    # at B = 0 the gradient of A is 0
    make = partial(make_client, optimizer=partial(SGD, lr=0.1))
    spies = [Spy(), Spy()]
    for ratio, spy in zip((1.0, 16.0), spies, strict=True):
        fit(make(partial(method, rate_ratio=ratio)), local_epochs=None, local_steps=1, max_rounds=1, callbacks=[spy])
    for client, update in spies[0].updates[0].items():
        other = spies[1].updates[0][client]["weights"]
        for name, tensor in update["weights"].items():
            torch.testing.assert_close(other[name], tensor * (16 if is_second(name) else 1))


def test_two_rates_are_those_of_pefts_loraplus():
    optimizers = pytest.importorskip("peft.optimizers", reason="needs the extra lm")
    client = FedIT(peft_net, (6,), 3, optimizer=partial(AdamW, lr=0.01, weight_decay=0.0), rate_ratio=16.0)
    trained = [p for p in client.parameters() if p.requires_grad]
    ours = client.local_optimizer(client.local_phases()[0], trained)
    theirs = optimizers.create_loraplus_optimizer(client.net, AdamW, lr=0.01, loraplus_lr_ratio=16.0)
    # peft counts vectors of the whole net as B, such as the head's bias
    matrices = {id(p) for p in trained if p.dim() > 1}
    rates = [
        {id(p): group["lr"] for group in made.param_groups for p in group["params"] if id(p) in matrices}
        for made in (ours, theirs)
    ]
    assert rates[0] == rates[1] and set(rates[0].values()) == {0.01, 0.16}


def test_the_engines_agree_on_two_rates_with_a_schedule_and_living_moments():
    settings = {
        "optimizer": partial(AdamW, lr=0.01),
        "lr_scheduler": partial(ExponentialLR, gamma=0.5),
        "optimizer_lifetime": "run",
    }
    make = partial(make_client, partial(FedIT, rate_ratio=8.0), net=noisy, **settings)
    alone, together = (fit(make(), engine=engine) for engine in ("sequential", "vectorised"))
    assert near(dict(alone.weights), dict(together.weights)) and near(alone.test(), together.test())


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_out_of_range_is_refused_by_name(ratio):
    with pytest.raises(MisconfigurationException, match=r"model\.rate_ratio="):
        make_client(partial(FedIT, rate_ratio=ratio))


def test_a_net_without_adapters_is_refused_by_its_name():
    with pytest.raises(MisconfigurationException, match=r"model FedIT .*model\.net=Net has none"):
        fit(FedIT(net=plain, input_shape=(6,), num_classes=3))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_it_takes_adapters_of_peft(engine):
    torch.manual_seed(0)
    run = fit(FedIT(peft_net, (6,), 3), blobs(24, 16), engine=engine, max_rounds=2)
    assert run.rows[-1]["server/product_error"] > 0
    assert [pair.scale(run.model) for pair in pairs(run.model.state_dict())] == [1.5, 1.5]


def test_the_server_takes_the_mean_of_other_servers():
    run = fit(make_client(FedIT), aggregator=AdapterAverage(weighting="uniform", server_lr=0.5))
    other = fit(make_client(FedIT), aggregator=WeightedAverage(weighting="uniform", server_lr=0.5))
    assert equal(run.weights, other.weights)
