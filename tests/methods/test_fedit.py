from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import Shuffled, blobs, drawn_update, equal, fit, make_client, noisy, plain, same_end, set_up
from peft_nets import peft_net
from pfl_lightning import WeightedAverage
from pfl_lightning.aggregators import AdapterAverage
from pfl_lightning.methods import FedAvg, FedIT
from pfl_lightning.nets import Adapted
from pfl_lightning.server.adapters import pairs

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
