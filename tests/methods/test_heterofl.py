import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.functional import cross_entropy

from federations import CLASSES, FEATURES, MOMENTUM, SIZES, Spy, blobs, equal, fit, make_client, near, set_up
from pfl_lightning.methods import FedAvg, FedPer
from pfl_lightning.methods.heterofl import HeteroFL, PartAverage
from pfl_lightning.nets import Narrow, Net, SmallCNN
from pfl_lightning.server import WeightedAverage

WIDTHS = (1.0, 0.5, 0.25)


def wide(input_shape, num_classes):
    """Two hidden layers, which are linear so that units can be told from one another."""
    return Net(nn.Sequential(nn.Linear(input_shape[0], 8), nn.Linear(8, 6)), nn.Linear(6, num_classes))


def normed(input_shape, num_classes):
    body = nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU())
    return Net(body, nn.Linear(8, num_classes))


def units(width, size, turn):
    """The units of a layer that a client has, by the papers' words."""
    return [(unit - turn) % size for unit in range(math.ceil(width * size))] if width < 1 else list(range(size))


def by_the_papers(weights, updates, widths, turn, present):
    """The mean of each entry over those who have it, entry by entry, for `wide`."""
    sizes = {"0": (8, None), "1": (6, 8), "classifier": (None, 6)}
    after = {}
    for name, entry in weights.items():
        outs, ins = sizes[next(part for part in ("classifier", "0", "1") if part in name.split("."))]
        after[name] = entry.clone()
        cells = {}
        for client, update in updates.items():
            rows = list(range(CLASSES)) if outs is None else units(widths[client], outs, turn)
            columns = list(range(FEATURES)) if ins is None else units(widths[client], ins, turn)
            for i, row in enumerate(rows):
                if outs is None and not present[client][row]:
                    continue
                if entry.dim() == 1:
                    cells.setdefault((row,), []).append(update[name][i])
                else:
                    for j, column in enumerate(columns):
                        cells.setdefault((row, column), []).append(update[name][i, j])
        for cell, values in cells.items():
            after[name][cell] = sum(values) / len(values)
    return after


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_server_follows_the_papers_rule_in_float64(rolling, seed):
    generator = torch.Generator().manual_seed(seed)
    client = make_client(HeteroFL, net=wide, widths=WIDTHS)
    server = set_up(PartAverage(rolling=rolling, weighting="uniform"), client, clients=5)
    widths = {k: WIDTHS[k % 3] for k in range(5)}
    for turn in range(4):
        who = [(0, 1, 2, 3, 4), (1, 2), (2,), (1, 3, 4)][turn]
        sent = {k: {n: t.double() for n, t in server.download(k)["weights"].items()} for k in who}
        for k in who:
            for entry in sent[k].values():
                entry += torch.randn(entry.shape, generator=generator, dtype=torch.float64)
        present = {k: torch.randint(0, 3, (CLASSES,), generator=generator) for k in who}
        before = {n: t.double() for n, t in server.state["weights"].items()}
        expected = by_the_papers(before, sent, widths, turn if rolling else 0, present)
        server.aggregate({k: {"weights": sent[k], "class_counts": present[k]} for k in who}, turn)
        assert near(server.state["weights"], expected, 1e-14)
        assert server.state["weights"].keys() == expected.keys()


def two_clients():
    """A rolling server of a whole and a narrow client."""
    client = make_client(HeteroFL, net=wide, widths=(1.0, 0.25))
    return set_up(PartAverage(rolling=True, weighting="uniform"), client, clients=2)


def test_after_as_many_rounds_as_units_each_one_was_in_the_smallest_part():
    server = set_up(
        PartAverage(rolling=True, weighting="uniform"), make_client(HeteroFL, net=wide, widths=(1.0, 0.25)), clients=2
    )
    seen = set()
    for turn in range(8):
        seen |= set(server.places(1, turn)["net.features.0.weight"][0].tolist())
    assert seen == set(range(8)) and server.places(1, 8)["net.features.0.weight"][0].tolist() == [0, 1]


def test_channels_stay_together_behind_a_flattening():
    client = make_partial_cnn()
    server = set_up(PartAverage(rolling=True, by_class=False), client, clients=2)
    places = server.places(1, 1)["net.features.9.weight"][1]
    before = server.places(1, 1)["net.features.6.weight"][0]
    size = len(places) // len(before)
    assert size > 1 and places.view(-1, size)[:, 0].tolist() == (before * size).tolist()


def make_partial_cnn():
    torch.manual_seed(0)
    net = partial(SmallCNN, maps=4)
    return HeteroFL(net, input_shape=(1, 22, 22), num_classes=3, widths=(1.0, 0.5))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_the_whole_net_for_all_it_is_fedavg(weighting):
    parts = PartAverage(by_class=False, weighting=weighting)
    one = fit(make_client(HeteroFL, net=wide, widths=(1.0,), mask=False), aggregator=parts)
    other = fit(make_client(FedAvg, net=wide), aggregator=WeightedAverage(weighting=weighting))
    assert near({name: one.weights[name] for name in other.weights}, other.weights, 1e-6)


def test_entries_that_nobody_has_stay_and_a_round_without_updates_changes_nothing():
    client = make_client(HeteroFL, net=wide, widths=WIDTHS)
    server = set_up(PartAverage(weighting="uniform"), client, clients=3)
    before = {name: entry.clone() for name, entry in server.state["weights"].items()}
    server.aggregate({}, 0)
    assert equal(server.state["weights"], before) and server.state["turn"] == 0
    small = {name: entry + 1 for name, entry in server.download(2)["weights"].items()}
    server.aggregate({2: {"weights": small, "class_counts": torch.tensor([3, 0, 1])}}, 0)
    first, head = server.state["weights"]["net.features.0.weight"], server.state["weights"]["net.classifier.bias"]
    assert equal(first[:2], before["net.features.0.weight"][:2] + 1)
    assert equal(first[2:], before["net.features.0.weight"][2:])
    assert (head - before["net.classifier.bias"]).tolist() == pytest.approx([1, 0, 1])


@pytest.mark.parametrize(("rolling", "engine"), [(False, "vectorised"), (True, "vectorised"), (True, "processes")])
def test_engines_agree_and_parts_travel(rolling, engine):
    spies = [Spy(), Spy()]
    runs = [
        fit(
            make_client(HeteroFL, net=wide, widths=WIDTHS),
            blobs(*SIZES, 12, by_class=True),
            aggregator=PartAverage(rolling=rolling, weighting="uniform"),
            engine=name,
            callbacks=[spy],
        )
        for name, spy in zip(("sequential", engine), spies, strict=True)
    ]
    assert near(runs[0].weights, runs[1].weights)
    shapes = [spies[0].updates[0][k]["weights"]["net.features.1.weight"].shape for k in range(3)]
    assert shapes == [(6, 8), (3, 4), (2, 2)]
    sent = [sum(t.numel() for t in spies[0].updates[0][k]["weights"].values()) for k in range(5)]
    assert runs[0].rows[1]["bytes/down"] == 4 * sum(sent)


@pytest.mark.parametrize("net", [wide, normed])
def test_a_resumed_run_ends_with_the_same_bits(net, tmp_path):
    client = partial(make_client, HeteroFL, net=net, widths=WIDTHS)
    whole = fit(client(), max_rounds=4, aggregator=PartAverage(rolling=True), clients_per_round=3)
    half = fit(client(), root=tmp_path, max_rounds=2, aggregator=PartAverage(rolling=True), clients_per_round=3)
    again = fit(
        client(),
        root=tmp_path,
        max_rounds=4,
        aggregator=PartAverage(rolling=True),
        ckpt_path=half.last,
        clients_per_round=3,
    )
    assert equal(whole.weights, again.weights)


def test_logits_of_missing_classes_are_zero_in_the_client_and_not_in_the_global_model():
    client = make_client(HeteroFL, net=wide, widths=(1.0,))
    client.on_download({"weights": {}}, type("Data", (), {"class_counts": torch.tensor([4, 0, 2])})())
    x, y = torch.randn(5, FEATURES), torch.tensor([0, 2, 0, 2, 2])
    logits = client.net(x)
    by_hand = cross_entropy(torch.stack([logits[:, 0], torch.zeros(5), logits[:, 2]], 1), y)
    assert torch.allclose(client.loss(torch.zeros(5, 6), logits, y), by_hand)
    assert not client(x)[:, 1].any() and client(x)[:, 0].all()
    assert make_client(HeteroFL, net=wide, widths=(1.0,))(x)[:, 1].all()


def test_a_client_s_own_model_is_loaded_with_its_width(tmp_path):
    run = fit(make_client(HeteroFL, net=wide, widths=WIDTHS), root=tmp_path)
    clients = [HeteroFL.load_from_checkpoint(run.last, client=k, net=wide, optimizer=MOMENTUM) for k in range(3)]
    assert [client.net.features[0].out_features for client in clients] == [8, 4, 2]


def test_a_late_update_is_averaged_where_its_part_was():
    server = set_up(
        PartAverage(rolling=True, weighting="uniform"), make_client(HeteroFL, net=wide, widths=(1.0, 0.25)), clients=2
    )
    early = server.download(1)["weights"]
    counts = torch.tensor([1, 1, 1])
    whole = {"weights": server.download(0)["weights"], "class_counts": counts}
    server.aggregate({0: whole}, 0)
    before = server.state["weights"]["net.features.0.bias"].clone()
    late = {"weights": {n: t + 1 for n, t in early.items()}, "class_counts": counts, "arrival": {"staleness": 1}}
    server.aggregate({1: late}, 1)
    assert (server.state["weights"]["net.features.0.bias"] - before).round().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_clients_with_one_net_receive_the_same_tensors_until_the_model_changes():
    server = set_up(PartAverage(weighting="uniform"), make_client(HeteroFL, net=wide, widths=WIDTHS), clients=6)
    first = [server.download(k)["weights"] for k in range(6)]
    assert all(first[k][name] is first[k + 3][name] for k in range(3) for name in first[0])
    assert all(first[0][name] is entry for name, entry in server.state["weights"].items())
    moved = {name: entry + 1 for name, entry in first[1].items()}
    server.aggregate({1: {"weights": moved, "class_counts": torch.tensor([1, 1, 1])}}, 0)
    assert equal(server.download(4)["weights"], moved)


def test_a_personal_head_on_parts():
    nets = [Narrow(wide, width) for width in WIDTHS]
    run = fit(make_client(FedPer, net=nets), aggregator=PartAverage(by_class=False))
    heads = [run.federation.clients[k].personal["net.classifier.weight"].shape for k in range(3)]
    assert heads == [(3, 6), (3, 3), (3, 2)]


def test_other_servers_refuse_parts():
    with pytest.raises(MisconfigurationException, match="differ in net"):
        fit(make_client(HeteroFL, net=wide, widths=WIDTHS), aggregator=WeightedAverage())


@pytest.mark.parametrize("widths", [(), (0.5, 1.0), (1.0, 0.0), (1.0, 1.5), 1.0])
def test_widths_out_of_range_are_refused(widths):
    with pytest.raises(MisconfigurationException, match=r"model\.widths"):
        make_client(HeteroFL, net=wide, widths=widths)


def test_a_list_of_nets_is_refused():
    with pytest.raises(MisconfigurationException, match="widths"):
        make_client(HeteroFL, net=[wide, normed])
