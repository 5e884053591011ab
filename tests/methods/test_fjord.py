import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.functional import cross_entropy, linear

from federations import CLASSES, FEATURES, Spy, equal, fit, make_client, near, set_up
from pfl_lightning.methods import FedAvg
from pfl_lightning.methods.fjord import FjORD
from pfl_lightning.methods.heterofl import HeteroFL, PartAverage
from pfl_lightning.nets import Net, SmallCNN

WIDTHS = (1.0, 0.5, 0.25)


def wide(input_shape, num_classes):
    body = nn.Sequential(nn.Linear(input_shape[0], 8), nn.Sigmoid(), nn.Linear(8, 6), nn.ReLU())
    return Net(body, nn.Linear(6, num_classes))


def normed(input_shape, num_classes):
    body = nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU())
    return Net(body, nn.Linear(8, num_classes))


def cut_by_hand(net, width, x):
    """The logits of the first units of `wide`, by slices of its weights."""
    (a, c), head = net.features[::2], net.classifier
    first, second = math.ceil(8 * width), math.ceil(6 * width)
    h = linear(x, a.weight[:first], a.bias[:first]).sigmoid()
    h = linear(h, c.weight[:second, :first], c.bias[:second]).relu()
    return linear(h, head.weight[:, :second], head.bias)


def choice(client, width):
    """The row that a draw of this width has."""
    widths = sorted((w for w in WIDTHS if w <= client.nets[client._architecture].width), reverse=True)
    return torch.tensor([float(w == width) for w in widths], dtype=torch.float64)


def gradients(loss, net):
    return torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)


@pytest.mark.parametrize(("place", "width"), [(0, 1.0), (0, 0.5), (0, 0.25), (1, 0.5), (1, 0.25), (2, 0.25)])
def test_a_part_has_the_logits_and_gradients_of_sliced_weights(place, width):
    whole = make_client(FjORD, net=wide, widths=WIDTHS)
    client = whole.architectures()[place].double()
    x, y = torch.randn(7, FEATURES, dtype=torch.float64), torch.arange(7) % CLASSES
    with client.part(choice(client, width)):
        logits = client.net(x)
    # the slices of the client's own net, whose units are those of the whole one
    own = WIDTHS[place]
    sizes = [math.ceil(8 * own), math.ceil(6 * own)]
    assert [layer.out_features for layer in client.net.features[::2]] == sizes
    expected = cut_by_hand(client.net, width, x)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-15)
    pairs = zip(
        gradients(cross_entropy(logits, y), client.net), gradients(cross_entropy(expected, y), client.net), strict=True
    )
    assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in pairs)
    assert torch.equal(client.net(x), client.net(x)) and (width == own) == torch.allclose(logits, client.net(x))


def test_channels_stay_together_behind_a_flattening():
    torch.manual_seed(0)
    client = FjORD(partial(SmallCNN, maps=4), input_shape=(1, 22, 22), num_classes=3, widths=(1.0, 0.5)).double()
    half = (
        HeteroFL(partial(SmallCNN, maps=4), input_shape=(1, 22, 22), num_classes=3, widths=(1.0, 0.5), scale=False)
        .architectures()[1]
        .double()
    )
    entries = client.net.state_dict()
    half.net.load_state_dict(
        {name: entries[name][tuple(slice(n) for n in own.shape)] for name, own in half.net.state_dict().items()}
    )
    x = torch.randn(3, 1, 22, 22, dtype=torch.float64)
    with client.part(torch.tensor([0.0, 1.0], dtype=torch.float64)):
        assert torch.allclose(client.net(x), half.net(x), rtol=0, atol=1e-14)


def test_a_step_draws_each_width_up_to_the_capacity_equally_often():
    client = make_client(FjORD, net=wide, widths=WIDTHS).double()
    x, y = torch.randn(4, FEATURES, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    losses = {w: cross_entropy(cut_by_hand(client.net, w, x), y).item() for w in WIDTHS}
    found = [client.training_step((x, y), 0)["loss"].item() for _ in range(600)]
    counts = {w: sum(math.isclose(loss, value, rel_tol=1e-12) for value in found) for w, loss in losses.items()}
    assert sum(counts.values()) == 600 and all(150 < count < 250 for count in counts.values())
    small = client.architectures()[2].double()
    only = cross_entropy(small.net(x), y).item()
    assert all(math.isclose(only, small.training_step((x, y), 0)["loss"].item(), rel_tol=1e-12) for _ in range(20))


def test_self_distillation_teaches_the_part_by_the_whole():
    client = make_client(FjORD, net=wide, widths=WIDTHS, distil=True).double()
    x, y = torch.randn(4, FEATURES, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    whole = cut_by_hand(client.net, 1.0, x)
    losses = [
        cross_entropy(whole, y) + cross_entropy(cut_by_hand(client.net, w, x), whole.detach().softmax(1))
        for w in WIDTHS
    ]
    seen = set()
    for _ in range(30):
        loss = client.training_step((x, y), 0)["loss"]
        (at,) = [i for i, expected in enumerate(losses) if math.isclose(loss.item(), expected.item(), rel_tol=1e-12)]
        seen.add(at)
        pairs = zip(gradients(loss, client.net), gradients(losses[at], client.net), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in pairs)
    assert seen == {0, 1, 2}


def test_with_one_width_it_is_fedavg():
    one = fit(make_client(FjORD, net=normed, widths=(1.0,)), aggregator=PartAverage(by_class=False))
    other = fit(make_client(FedAvg, net=normed), aggregator=PartAverage(by_class=False))
    assert equal(one.weights, other.weights)


@pytest.mark.parametrize("net", [wide, normed])
@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.by_default("True-normed", "False-wide")
def test_vectorised_and_sequential_agree(net, distil):
    spies = [Spy(), Spy()]
    runs = [
        fit(make_client(FjORD, net=net, widths=WIDTHS, distil=distil), engine=engine, callbacks=[spy])
        for engine, spy in zip(("sequential", "vectorised"), spies, strict=True)
    ]
    assert near(runs[0].weights, runs[1].weights)
    shapes = [spies[0].updates[0][k]["weights"]["net.features.0.weight"].shape for k in range(3)]
    assert shapes == [(8, FEATURES), (4, FEATURES), (2, FEATURES)]


@pytest.mark.parametrize("net", [wide, normed])
@pytest.mark.by_default("normed")
def test_a_resumed_run_ends_with_the_same_bits(net, tmp_path):
    client = partial(make_client, FjORD, net=net, widths=WIDTHS, distil=True)
    whole = fit(client(), max_rounds=4, clients_per_round=3)
    half = fit(client(), root=tmp_path, max_rounds=2, clients_per_round=3)
    again = fit(client(), root=tmp_path, max_rounds=4, ckpt_path=half.last, clients_per_round=3)
    assert equal(whole.weights, again.weights)


def test_running_statistics_move_by_batches_of_the_whole_width():
    client = make_client(FjORD, net=normed, widths=WIDTHS).train()
    x = torch.randn(6, FEATURES)
    norm = client.net.features[1]
    for width, moves in ((0.5, False), (0.25, False), (1.0, True)):
        before = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        with client.part(choice(client, width).float()):
            client.net(x)
        assert (not torch.equal(norm.running_mean, before[0])) == moves
        assert norm.num_batches_tracked - before[1] == moves


def test_entries_are_averaged_by_samples_over_those_who_have_them():
    client = make_client(FjORD, net=wide, widths=WIDTHS)
    server = set_up(client.configure_aggregator(), client, clients=3)
    before = {name: entry.clone() for name, entry in server.state["weights"].items()}
    updates = {
        k: {"weights": {n: t + 2**k for n, t in server.download(k)["weights"].items()}, "num_samples": k + 1}
        for k in range(3)
    }
    server.aggregate(updates, 0)
    moved = server.state["weights"]["net.features.0.bias"] - before["net.features.0.bias"]
    # means of 1, 2 and 4 with the weights 1, 2 and 3
    assert moved.tolist() == pytest.approx([17 / 6] * 2 + [5 / 3] * 2 + [1.0] * 4, abs=1e-6)


def test_a_layer_norm_is_refused():
    def layered(input_shape, num_classes):
        return Net(nn.Sequential(nn.Linear(input_shape[0], 8), nn.LayerNorm(8)), nn.Linear(8, num_classes))

    with pytest.raises(MisconfigurationException, match="LayerNorm"):
        make_client(FjORD, net=layered, widths=WIDTHS)
