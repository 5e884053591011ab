import copy
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import (
    CLASSES,
    FEATURES,
    Spy,
    blobs,
    check_batches_of_one,
    check_order_and_resume,
    drawn_update,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    set_up,
)
from pfl_lightning.aggregators import HyperStep
from pfl_lightning.methods import PeFLL
from pfl_lightning.nets import Net

MAKE = partial(PeFLL, embedding_size=3, embedding_hidden=4, hidden=5, layers=1)
QUICK = partial(HyperStep, optimizer=partial(Adam, lr=0.02))


def clients_of(data):
    """A set-up data module and its clients' training samples in float64."""
    run = fit(make_client(MAKE), data, max_rounds=1)
    return [run.data.part(k, "train").to("cpu", torch.float64) for k in range(run.data.num_clients)]


def made_by_hand(p, part, moments):
    """A client's model as a vector, of embedding net and hypernetwork written down once more."""
    h = torch.cat([part.x, torch.eye(CLASSES, dtype=torch.float64)[part.y]], 1)
    for layer in (0, 2, 4):
        h = h @ p[f"embedder.{layer}.weight"].T + p[f"embedder.{layer}.bias"]
        h = h.relu() if layer < 4 else h
    v = (h.mean(0) - moments[0]) / moments[1]
    h = p["maker.body.0.weight"] @ v + p["maker.body.0.bias"]
    h = p["maker.body.2.weight"] @ h.relu() + p["maker.body.2.bias"]
    return torch.cat([p[f"maker.heads.{i}.weight"] @ h + p[f"maker.heads.{i}.bias"] for i in range(4)])


def net_of(w):
    """The net of a vector of weights, as a function."""
    a, b, c, d = w.split([5 * FEATURES, 5, 5 * CLASSES, CLASSES])
    return lambda x: torch.tanh(x @ a.view(5, FEATURES).T + b) @ c.view(CLASSES, 5).T + d


@pytest.mark.parametrize("clip", [50.0, 0.01])
def test_rounds_of_one_local_step_by_a_second_implementation(clip):
    """The gradient of both nets, by the chain rule through one graph, by torch's optimizer and clipping."""
    data = blobs(30, 24, 36, batch_size=100)
    optimizer = partial(Adam, lr=0.03)
    model = make_client(MAKE, optimizer=partial(SGD, lr=0.2))
    start = {name: t.double() for name, t in model.shared_state().items()}
    run = fit(model, data, aggregator=HyperStep(optimizer=optimizer, clip=clip), max_rounds=4, precision="64-true")
    parts = clients_of(blobs(30, 24, 36, batch_size=100))
    p = {n: t.clone().requires_grad_() for n, t in start.items() if n.startswith(("embedder.", "maker."))}
    whole, moments = optimizer(list(p.values())), None
    for _ in range(4):
        if moments is None:
            raw = []
            for part in parts:
                h = torch.cat([part.x, F.one_hot(part.y, CLASSES).double()], 1)
                embedder = {n.removeprefix("embedder."): t for n, t in p.items() if n.startswith("embedder.")}
                v = functional_call(copy.deepcopy(model.embedder).double(), embedder, (h,)).mean(0)
                raw.append(torch.stack([v.mean(), v.std()]).detach())
        own = raw if moments is None else [moments] * len(parts)
        whole.zero_grad()
        for part, each in zip(parts, own, strict=True):
            w = made_by_hand(p, part, each)
            # one local step of 0.2 moves the model by -0.2 times its gradient
            loss = 0.2 * F.cross_entropy(net_of(w)(part.x), part.y) / len(parts)
            loss.backward()
        nn.utils.clip_grad_norm_(p.values(), clip)
        whole.step()
        moments = torch.stack(raw).mean(0) if moments is None else moments
    sent = run.federation.aggregator.download(0)["weights"]
    for name, tensor in p.items():
        torch.testing.assert_close(sent[name], tensor.detach(), rtol=0, atol=1e-8)
    torch.testing.assert_close(sent["moments"], moments, rtol=0, atol=1e-12)
    # a client's next model, and its outputs
    run.model.on_download(run.federation.aggregator.download(0), OneOf(parts[1]))
    expected = net_of(made_by_hand(p, parts[1], moments))(parts[1].x)
    torch.testing.assert_close(run.model(parts[1].x), expected.detach(), rtol=0, atol=1e-8)


class OneOf:
    def __init__(self, part):
        self.train = part


def test_what_returns_unchanged_leaves_both_nets_still():
    server = set_up(HyperStep(), make_client(MAKE))
    before = copy.deepcopy(server.state["weights"])
    assert server.aggregate({}, 0) == {}
    log = server.aggregate({k: {"weights": before} for k in range(3)}, 0)
    assert log["gradient_norm"] < 1e-5
    for name, tensor in before.items():
        torch.testing.assert_close(server.state["weights"][name], tensor, rtol=0, atol=3e-4)


def test_the_order_of_updates_changes_nothing_and_the_optimizer_lives_on():
    updates = {k: drawn_update(make_client(MAKE).double(), k) for k in range(3)}
    one, other, anew = (set_up(QUICK(), make_client(MAKE).double()) for _ in range(3))
    for number in range(2):
        one.aggregate(updates, number)
        other.aggregate(dict(sorted(updates.items(), reverse=True)), number)
        anew.state["optimizer"] = {}
        anew.aggregate(updates, number)
    gaps = [
        max(float((each.state["weights"][n] - t).abs().max()) for n, t in one.state["weights"].items())
        for each in (other, anew)
    ]
    assert gaps[0] < 1e-9 < 1e-6 < gaps[1]


def test_both_nets_travel_and_neither_embedding_nor_model():
    spy = Spy()
    run = fit(make_client(MAKE, net=noisy), aggregator=QUICK(), callbacks=[spy])
    sent = set(spy.updates[0][0]["weights"])
    assert all(name.startswith(("embedder.", "maker.")) for name in sent - {"moments", "fitted"})
    assert {name.split(".")[0] for name in run.federation.clients[0].personal} == {"net", "embedding"}
    first, second = (run.federation.clients[client].personal["embedding"] for client in (0, 1))
    assert not torch.equal(first, second)


def test_moments_are_those_of_the_first_round():
    runs = [fit(make_client(MAKE), aggregator=QUICK(), max_rounds=rounds, clients_per_round=2) for rounds in (1, 4)]
    one, other = (run.federation.aggregator.download(0)["weights"] for run in runs)
    torch.testing.assert_close(one["moments"], other["moments"])
    assert float(other["fitted"]) == 1 and not torch.equal(one["maker.body.0.bias"], other["maker.body.0.bias"])


@pytest.mark.exhaustive
def test_it_learns_and_newcomers_have_a_model_without_training():
    optimizer = partial(Adam, lr=0.005)
    run = fit(make_client(MAKE), aggregator=HyperStep(optimizer=optimizer), max_rounds=25, local_epochs=3)
    assert run.rows[-1]["val/loss"] < 0.8 * run.rows[0]["val/loss"]
    part = clients_of(blobs(24, 60))[1].to("cpu", torch.float32)
    run.model.on_download(run.federation.aggregator.welcome(9, None), OneOf(part))
    assert float((run.model(part.x).argmax(1) == part.y).float().mean()) > 0.6


def test_a_checkpoint_s_client_has_its_model_without_samples():
    model = make_client(MAKE)
    part = clients_of(blobs(30))[0].to("cpu", torch.float32)
    payload = {"weights": {name: t.clone() for name, t in model.shared_state().items()}}
    model.on_download(payload, OneOf(part))
    outputs = model(part.x).detach()
    other = make_client(MAKE, seed=8)
    entries = {"embedding": model.embedding.clone()}
    other.load_state_dict(entries, strict=False)
    other.on_download({"weights": {name: t.clone() for name, t in model.shared_state().items()}}, None)
    assert torch.equal(other(part.x), outputs)


def test_a_tied_parameter_is_made_once():
    def tied(input_shape, num_classes):
        layers = [nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        layers[2].weight = layers[1].weight
        return Net(nn.Sequential(*layers), nn.Linear(4, num_classes))

    run = fit(make_client(MAKE, net=tied), aggregator=QUICK())
    assert len(run.model.maker.heads) == 7
    assert run.model.net.features[1].weight is run.model.net.features[2].weight


@pytest.mark.exhaustive
def test_order_and_resume(tmp_path):
    check_order_and_resume(MAKE, tmp_path)


def test_engines_agree():
    runs = [
        fit(make_client(MAKE, net=plain), aggregator=HyperStep(optimizer=partial(SGD, lr=0.1)), engine=engine)
        for engine in ("sequential", "vectorised")
    ]
    one, other = (run.federation.aggregator.download(0)["weights"] for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


def test_one_client_alone_and_batches_of_one():
    run = fit(make_client(MAKE), blobs(30), aggregator=QUICK())
    assert run.rows[-1]["clients_diverged"] == 0
    client = make_client(MAKE, optimizer=partial(SGD, lr=0.05))
    check_batches_of_one(client, max_rounds=4)
    assert equal(run.federation.aggregator.download(0), run.federation.aggregator.welcome(5, None))


@pytest.mark.parametrize(
    ("name", "value"), [("embedding_size", 1), ("embedding_hidden", 0), ("hidden", 0), ("layers", -1)]
)
def test_what_is_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{name}={value} must be"):
        make_client(PeFLL, **{name: value})
    with pytest.raises(MisconfigurationException, match=r"aggregator\.clip=0\.0 must be"):
        HyperStep(clip=0.0)
