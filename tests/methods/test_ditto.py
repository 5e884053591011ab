from functools import partial
from itertools import pairwise

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import Altered, Spy, blobs, equal, fit, load_client, make_client, noisy, same_end
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods.ditto import Ditto
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.local import Local

FREE, TIED = partial(Ditto, personal_lambda=0.0), partial(Ditto, personal_lambda=2.0)
STEP = partial(SGD, lr=0.1)


class Same(Altered):
    """Every client trains on copies of one sample: all orders of its batches are one."""

    def alter(self, part, client, split):
        if split != "train":
            return part
        return type(part)(part.x[:1].expand_as(part.x).clone(), part.y[:1].expand_as(part.y).clone())


def models(run, prefix="personal."):
    """Each client's own net, under the net's names."""
    return {
        client: {name.removeprefix(prefix): t for name, t in state.personal.items() if name.startswith(prefix)}
        for client, state in sorted(run.federation.clients.items())
    }


def global_model(run):
    return {name: tensor for name, tensor in run.weights.items() if name.startswith("net.")}


def validation(run):
    return [{name: value for name, value in row.items() if name.startswith("val/")} for row in run.rows]


@pytest.mark.parametrize("lifetime", ["round", "run"])
@pytest.mark.by_default("round")
def test_untied_personal_models_are_those_of_local_bit_for_bit(lifetime):
    settings = {"net": noisy, "optimizer_lifetime": lifetime}
    ditto, local = (fit(make_client(method, **settings), local_epochs=2) for method in (FREE, Local))
    assert equal(models(ditto), models(local, "net."))
    assert validation(ditto) == validation(local)
    assert not equal(models(fit(make_client(TIED, **settings), local_epochs=2)), models(local, "net."))


def test_the_global_model_is_the_same_for_every_weight():
    free, tied = (fit(make_client(method, net=noisy, optimizer_lifetime="run")) for method in (FREE, TIED))
    assert equal(global_model(free), global_model(tied))
    assert not equal(models(free), models(tied))


@pytest.mark.exhaustive
def test_the_global_model_is_fedavg_s_but_for_the_order_of_batches():
    ditto, average = (fit(make_client(method), blobs(data=Same)) for method in (TIED, FedAvg))
    assert equal(global_model(ditto), average.weights)
    ditto, average = (fit(make_client(method)) for method in (TIED, FedAvg))
    assert not equal(global_model(ditto), average.weights)


def test_the_weight_holds_personal_models_near_the_received_one():
    def distance(weight):
        run = fit(make_client(partial(Ditto, personal_lambda=weight)), max_rounds=1, local_epochs=3)
        received = make_client().net.state_dict()
        return sum(float((t - received[name]).square().sum()) for name, t in models(run)[0].items())

    far, near, nearer = map(distance, (0.0, 1.0, 4.0))
    assert far > near > nearer > 0


def test_two_rounds_by_hand():
    data = blobs(30, 24, batch_size=100)
    settings = {"precision": "64-true", "local_epochs": 2, "max_rounds": 2}
    run = fit(make_client(TIED, optimizer=STEP), data, **settings)
    net = make_client().net.double()
    parameters = list(net.parameters())

    def descent(start, part, pull=0.0, anchor=()):
        for p, tensor in zip(parameters, start, strict=True):
            p.data.copy_(tensor)
        for _ in range(2):
            grads = torch.autograd.grad(F.cross_entropy(net(part.x.double()), part.y), parameters)
            for p, g, a in zip(parameters, grads, anchor or start, strict=True):
                p.data -= 0.1 * (g + pull * (p.data - a))
        return [p.detach().clone() for p in parameters]

    w = [p.detach().clone() for p in parameters]
    v = [w, w]
    parts = [data.part(client, "train") for client in range(2)]
    sizes = [len(part) for part in parts]
    for _ in range(2):
        v = [descent(own, part, pull=2.0, anchor=w) for own, part in zip(v, parts, strict=True)]
        ends = [descent(w, part) for part in parts]
        w = [(sizes[0] * a + sizes[1] * b) / sum(sizes) for a, b in zip(*ends, strict=True)]
    for client in range(2):
        for tensor, hand in zip(models(run)[client].values(), v[client], strict=True):
            torch.testing.assert_close(tensor, hand)
    for tensor, hand in zip(global_model(run).values(), w, strict=True):
        torch.testing.assert_close(tensor, hand)


@pytest.mark.exhaustive
def test_personal_epochs_are_the_personal_model_s_alone():
    def run(**settings):
        return fit(make_client(TIED, optimizer=STEP, **settings), blobs(data=Same), local_epochs=2)

    same, more = run(personal_epochs=2), run(personal_epochs=4)
    assert same_end(same, run())
    assert equal(global_model(same), global_model(more))
    assert not equal(models(same), models(more))


def test_each_phase_moves_the_running_statistics_of_its_own_net():
    run = fit(make_client(TIED, net=noisy, personal_epochs=3), blobs(30), max_rounds=1)
    steps = -(-run.data.size(0, "train") // 5)
    assert models(run)[0]["features.1.num_batches_tracked"] == 3 * steps
    assert run.weights["net.features.1.num_batches_tracked"] == steps


def test_clients_are_evaluated_by_their_personal_models_and_those_without_by_the_received_one():
    spy = Spy()
    run = fit(make_client(TIED), callbacks=[spy], clients_per_round=2, max_rounds=2)
    trained = models(run)
    assert set(trained) == set(spy.cohorts[0]) | set(spy.cohorts[1]) and len(trained) < 4
    net = make_client().net
    for client, values in run.federation.evaluations.results["test"].items():
        received = {name.removeprefix("net."): tensor for name, tensor in global_model(run).items()}
        net.load_state_dict(trained.get(client, received))
        part = run.data.part(client, "test")
        assert values["loss"] == pytest.approx(float(F.cross_entropy(net(part.x), part.y).detach()))


def test_the_server_s_model_is_tested_as_the_global_one():
    data = blobs(central_test=0.2)
    run = fit(make_client(TIED), data, test_every_round=True)
    net = make_client().net
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in global_model(run).items()})
    part = data.central_data()
    hits = (net(part.x).argmax(1) == part.y).float().mean()
    assert run.rows[-1]["test/global_acc"] == pytest.approx(float(hits))


def test_the_personal_model_stays_with_its_client_also_over_rounds_without_it():
    spy = Spy()
    ditto = fit(make_client(TIED, net=noisy), callbacks=[spy])
    average = fit(make_client(net=noisy))
    for direction in ("bytes/up", "bytes/down"):
        assert [row[direction] for row in ditto.rows] == [row[direction] for row in average.rows]
    assert all(set(u["weights"]) == set(average.weights) for updates in spy.updates for u in updates.values())
    for state in ditto.federation.clients.values():
        assert num_bytes(state.personal) == num_bytes(average.weights) + 1  # and a flag
    fewer = {"clients_per_round": 1, "callbacks": [Spy()]}
    runs = [fit(make_client(TIED), max_rounds=rounds, **fewer) for rounds in (1, 2, 3, 4)]
    waited = 0
    for before, after in pairwise(runs):
        drawn = set(map(int, after.rows[-1]["cohort"].split()))
        for client in set(models(before)) - drawn:
            waited += 1
            assert equal(models(before)[client], models(after)[client])
    assert waited


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (blobs(30, 45, by_class=True), {}),  # classes that a client, and one that nobody, holds
        (blobs(30), {}),
        (blobs(8, 8, batch_size=1), {}),
        (blobs(30, 24), {"precision": "bf16-mixed"}),
    ],
)
def test_it_trains_where_there_is_little(data, settings):
    run = fit(make_client(TIED), data, **settings)
    assert run.rows[-1]["clients_diverged"] == 0
    for own in models(run).values():
        assert all(tensor.isfinite().all() for tensor in own.values())
        assert not equal(own, models(run, "net."))


def test_a_client_without_a_batch_has_no_personal_model():
    run = fit(make_client(TIED, net=noisy), blobs(40, 3), max_rounds=1)
    assert [bool(state.personal["has_personal"]) for _, state in sorted(run.federation.clients.items())] == [
        True,
        False,
    ]


def test_a_client_is_loaded_from_a_checkpoint_with_its_personal_model(tmp_path):
    run = fit(make_client(TIED), root=tmp_path)
    x = run.data.part(1, "test").x
    nets = make_client().net, make_client().net
    nets[0].load_state_dict(models(run)[1])
    nets[1].load_state_dict({name.removeprefix("net."): tensor for name, tensor in global_model(run).items()})
    for net, client in zip(nets, (1, None), strict=True):
        assert torch.equal(load_client(Ditto, run.last, client=client)(x), net(x))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("personal_lambda", -1), ("personal_lambda", float("nan")), ("personal_epochs", 0)],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(partial(Ditto, **{setting: value}))
