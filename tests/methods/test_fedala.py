from collections import Counter
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, HIDDEN, Spy, blobs, equal, fit, load_client, make_client, near, noisy, plain
from pfl_lightning.data import client_data
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods.fedala import FedALA
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.seeds import derive_seed

ALL = ["features.0.weight", "features.0.bias", "classifier.weight", "classifier.bias"]
TOP = ALL[2:]
STEP = partial(SGD, lr=0.1)


class Starts(FedALA):
    """Keeps the nets that clients start from, in training and in evaluation, by client and round."""

    seen: list = []

    def on_download(self, payload, data):
        super().on_download(payload, data)
        net = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.seen.append(((self.client_id, self.round), net, payload["weights"]))


def kept(run, client, part):
    """A client's own layers, or the weights that it mixes them by."""
    personal = run.federation.clients[client].personal
    return {
        name.removeprefix(f"{part}.").replace("/", "."): tensor
        for name, tensor in personal.items()
        if name.startswith(f"{part}.")
    }


@pytest.mark.parametrize("eta", [0.0, 1e-30])  # weights that are not learnt, and such as stay 1
@pytest.mark.by_default("0.0")
def test_with_weights_of_1_it_is_fedavg_bit_for_bit(eta):
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    ala, average = fit(make_client(partial(FedALA, eta=eta), **settings)), fit(make_client(FedAvg, **settings))
    assert equal({name: ala.weights[name] for name in average.weights}, average.weights)
    assert near([row["val/loss"] for row in ala.rows], [row["val/loss"] for row in average.rows])
    for client in range(4):
        assert all((weights == 1).all() for weights in kept(ala, client, "weights").values())
        assert len(kept(ala, client, "weights")) == (2 if eta else 0)


def test_its_mix_changes_the_weights_from_the_second_round_on():
    def net(method, rounds):
        weights = fit(make_client(method), max_rounds=rounds).weights
        return {name: tensor for name, tensor in weights.items() if name.startswith("net.")}

    assert equal(net(FedALA, 1), net(FedAvg, 1))
    assert not equal(net(FedALA, 2), net(FedAvg, 2))


def test_weights_stay_between_0_and_1_and_differ_from_client_to_client():
    run = fit(make_client(partial(FedALA, eta=50.0)), max_rounds=4)
    weights = [torch.cat([tensor.flatten() for tensor in kept(run, client, "weights").values()]) for client in range(4)]
    together = torch.stack(weights)
    assert together.min() == 0 and together.max() == 1
    assert ((together > 0) & (together < 1)).any()
    assert len({tuple(row.tolist()) for row in together}) == 4


def test_weights_of_1_and_0_give_the_received_and_the_own_layers_bit_for_bit():
    model, other = make_client(FedALA), make_client(FedALA, seed=4)
    model.upload(fit(make_client(), max_rounds=1).data.client(0))
    own = {name: model.net.get_parameter(name).detach().clone() for name in TOP}
    model.net.load_state_dict(other.net.state_dict())
    received = {name: model.net.get_parameter(name).detach().clone() for name in TOP}
    for value, layers in ((1.0, received), (0.0, own)):
        assert equal(model.mix({name: torch.full_like(tensor, value) for name, tensor in own.items()}), layers)
    middle = model.mix({name: torch.full_like(tensor, 0.5) for name, tensor in own.items()})
    for name in TOP:
        torch.testing.assert_close(middle[name], (own[name] + received[name]) / 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_three_rounds_by_hand(layers):
    data = blobs(30, 24, batch_size=100)
    client = partial(FedALA, layers=layers, rand_percent=100, eta=2.0, max_passes=3, ala_batch_size=100)
    run = fit(make_client(client, optimizer=STEP), data, precision="64-true", local_epochs=2, max_rounds=3)
    net = make_client().net.double()
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    parts = [data.part(client, "train") for client in range(2)]
    shares = [len(part) / sum(map(len, parts)) for part in parts]
    mixed = TOP if layers == 1 else ALL
    weights = [{name: torch.ones_like(start[name]) for name in mixed} for _ in range(2)]
    own = [start, start]

    def slope(theta, part):
        net.load_state_dict(theta)
        loss = F.cross_entropy(net(part.x.double()), part.y)
        return dict(zip(ALL, torch.autograd.grad(loss, list(net.parameters())), strict=True))

    def mix(k):
        return start | {n: own[k][n] + (start[n] - own[k][n]) * w for n, w in weights[k].items()}

    for passes in (0, 3, 1):
        ends = []
        for k, part in enumerate(parts):
            for _ in range(passes):
                g = slope(mix(k), part)
                weights[k] = {n: (w - 2.0 * g[n] * (start[n] - own[k][n])).clamp(0, 1) for n, w in weights[k].items()}
            theta = mix(k)
            for _ in range(2):
                g = slope(theta, part)
                theta = {n: t - 0.1 * g[n] for n, t in theta.items()}
            ends.append(theta)
        start, own = weighted_mean(ends, shares), ends
    assert all((weights[k][name] < 1).any() for k in range(2) for name in mixed)
    for name in ALL:
        torch.testing.assert_close(run.weights[f"net.{name}"], start[name])
    for k in range(2):
        for name in mixed:
            torch.testing.assert_close(kept(run, k, "weights")[name], weights[k][name])
            torch.testing.assert_close(kept(run, k, "own")[name], own[k][name])


@pytest.mark.exhaustive
def test_weights_are_learnt_until_losses_settle_or_the_passes_are_over():
    def weights(**settings):
        run = fit(make_client(partial(FedALA, **settings)), max_rounds=2)
        return [kept(run, client, "weights") for client in range(4)]

    # the first pass after as many losses as are looked at
    assert equal(weights(threshold=1e9, num_pre_loss=3), weights(threshold=1e-9, max_passes=4))
    assert not equal(weights(threshold=1e-9, max_passes=5), weights(threshold=1e-9, max_passes=4))


def test_another_share_of_the_samples_gives_other_weights():
    clients = [partial(FedALA, rand_percent=share, max_passes=5) for share in (80, 20, 1)]
    biases = [fit(make_client(client), max_rounds=2).weights["net.classifier.bias"] for client in clients]
    assert len({tuple(bias.tolist()) for bias in biases}) == 3


def test_samples_are_drawn_anew_for_each_client_and_round(monkeypatch):
    seeds = []
    monkeypatch.setattr(client_data, "derive_seed", lambda *key: seeds.append(key) or derive_seed(*key))
    fit(make_client(partial(FedALA, max_passes=2)))
    counts = Counter(seeds)
    # evaluated with the samples that the next round trains with, and after the last round and at the end
    assert sorted(counts.values()) == [2] * 12


def test_other_layers_are_taken_over_and_clients_are_evaluated_as_they_start_the_next_round():
    Starts.seen.clear()
    fit(make_client(Starts))
    starts = {}
    for key, net, received in Starts.seen:
        assert all(torch.equal(net[name], received[f"net.{name}"]) for name in ALL[:2])
        starts.setdefault(key, []).append(net)
    for client in range(4):
        for round in (1, 2):  # evaluated after the round before, and trained
            evaluated, trained = starts[client, round]
            assert equal(evaluated, trained)
        assert not equal(starts[client, 2][0], starts[(client + 1) % 4, 2][0])


def test_a_client_that_never_took_part_has_what_it_receives():
    run = fit(make_client(FedALA), clients_per_round=2, max_rounds=2)
    absent = set(range(4)) - set(run.federation.clients)
    assert absent
    net = make_client().net
    net.load_state_dict({name: run.weights[f"net.{name}"] for name in ALL})
    for client in range(4):
        part = run.data.part(client, "test")
        loss = float(F.cross_entropy(net(part.x), part.y).detach())
        assert (run.federation.evaluations.results["test"][client]["loss"] == pytest.approx(loss)) == (client in absent)


def test_a_client_mixes_into_the_model_of_its_own_last_round():
    spy = Spy()
    run = fit(make_client(FedALA), callbacks=[spy], clients_per_round=2, max_rounds=5)
    last, times = {}, {}
    for updates in spy.updates:
        for client, update in updates.items():
            last[client], times[client] = update["weights"], times.get(client, 0) + 1
    assert set(run.federation.clients) == set(last)
    for client, weights in last.items():
        assert equal(kept(run, client, "own"), {name: weights[f"net.{name}"] for name in TOP})
        assert run.federation.clients[client].personal["rounds_trained"] == times[client]
        if times[client] == 1:
            assert all((tensor == 1).all() for tensor in kept(run, client, "weights").values())
    assert len(set(times.values())) > 1


@pytest.mark.exhaustive
def test_evaluation_leaves_clients_alone():
    before, both = (fit(make_client(FedALA), evaluate=when) for when in ("before", "both"))
    assert equal(before.weights, both.weights)
    for client, state in before.federation.clients.items():
        assert equal(state.personal, both.federation.clients[client].personal)


def test_only_the_model_travels_and_only_the_mixed_layers_and_their_weights_stay():
    ala, average = fit(make_client(FedALA, net=noisy)), fit(make_client(net=noisy))
    for direction in ("bytes/up", "bytes/down"):
        assert [row[direction] for row in ala.rows] == [row[direction] for row in average.rows]
    for state in ala.federation.clients.values():
        assert num_bytes(state.personal) == 2 * 4 * (HIDDEN + 1) * CLASSES + 8


def test_one_client_receives_what_it_has_and_is_fedavg_bit_for_bit():
    ala, average = fit(make_client(FedALA), blobs(30)), fit(make_client(), blobs(30))
    assert equal({name: ala.weights[name] for name in average.weights}, average.weights)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (blobs(30, 45, by_class=True), {}),  # classes that a client, and one that nobody, holds
        (blobs(8, 8, batch_size=1), {}),
        (blobs(30, 3), {}),
        (blobs(30, 24), {"precision": "bf16-mixed"}),
    ],
)
@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.by_default(but=["1-data0-settings0", "1-data3-settings3"])
def test_it_trains_where_there_is_little(data, settings, batch):
    run = fit(make_client(partial(FedALA, ala_batch_size=batch, max_passes=3)), data, **settings)
    assert run.rows[-1]["clients_diverged"] == 0
    assert run.rows[-1]["train/loss"] < run.rows[0]["train/loss"]
    assert all(tensor.isfinite().all() for tensor in run.weights.values())


def test_a_client_from_a_checkpoint_mixes_by_its_last_weights(tmp_path):
    run = fit(make_client(FedALA), root=tmp_path)
    client, server = (load_client(FedALA, run.last, client=client) for client in (1, None))
    own, weights = kept(run, 1, "own"), kept(run, 1, "weights")
    for name in ALL:
        received = run.weights[f"net.{name}"]
        mixed = torch.lerp(own[name], received, weights[name]) if name in TOP else received
        assert torch.equal(client.net.get_parameter(name), mixed)
        assert torch.equal(server.net.get_parameter(name), received)
    assert not torch.equal(client.net.classifier.weight, server.net.classifier.weight)


@pytest.mark.parametrize(
    ("net", "layers", "names"),
    [(plain, 1, TOP), (plain, 2, ALL), (noisy, 2, ["features.1.weight", "features.1.bias", *TOP])],
)
def test_layers_are_counted_from_the_output(net, layers, names):
    assert make_client(partial(FedALA, layers=layers), net=net).names == names


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("layers", 0),
        ("layers", 3),
        ("rand_percent", 0),
        ("rand_percent", 101),
        ("eta", -1),
        ("eta", float("nan")),
        ("threshold", 0),
        ("num_pre_loss", 0),
        ("max_passes", 0),
        ("ala_batch_size", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value} must be"):
        make_client(partial(FedALA, **{setting: value}))
