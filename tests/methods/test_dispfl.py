import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from federations import (
    FEATURES,
    HIDDEN,
    Spy,
    blobs,
    check_order_and_resume,
    equal,
    fit,
    make_client,
    near,
    noisy,
    plain,
    points,
    set_up,
    untimed,
)
from pfl_lightning.aggregators import GossipAverage, IntersectionAverage
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import DisPFL, FedAvg
from pfl_lightning.methods.dispfl import active_counts, replaced
from pfl_lightning.methods.fedcac import packed, unpacked
from pfl_lightning.nets import Net

SHAPES = {
    "features.0.weight": (5, FEATURES),
    "features.0.bias": (5,),
    "classifier.weight": (3, 5),
    "classifier.bias": (3,),
}


def run_of(**settings):
    own = {name: settings.pop(name) for name in ("density", "anneal", "regrow", "net", "optimizer") if name in settings}
    settings = {"aggregator": IntersectionAverage(graph="ring"), **settings}
    return fit(make_client(DisPFL, **{"density": 0.6, **own}), **settings)


def masks_of(run):
    return {
        client: {n.removeprefix("mask."): t for n, t in state.personal.items() if n.startswith("mask.")}
        for client, state in sorted(run.federation.clients.items())
    }


def sent(run, clients=4):
    return {client: run.federation.aggregator.download(client)["weights"] for client in range(clients)}


def drawn(*clients, share=0.5):
    """Updates with random masks, and each client's dense model and masks."""
    updates, models, masks = {}, {}, {}
    for client in clients:
        generator = torch.Generator().manual_seed(client)
        model = {f"net.{n}": torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
        mask = {name: torch.rand(t.shape, generator=generator) < share for name, t in model.items()}
        updates[client] = {
            "values": {name: t[mask[name]] for name, t in model.items()},
            "masks": {name: packed(own) for name, own in mask.items()},
        }
        models[client], masks[client] = model, mask
    return updates, models, masks


def test_an_entry_is_averaged_over_the_neighbours_that_have_it():
    server = set_up(IntersectionAverage(graph={0: [1, 2], 2: [3]}), make_client(DisPFL, net=plain))
    updates, models, masks = drawn(0, 1, 2, 3)
    logs = server.aggregate(updates, 0)
    for client, around in {0: (0, 1, 2), 1: (0, 1), 2: (0, 2, 3), 3: (2, 3)}.items():
        for name, tensor in server.download(client)["weights"].items():
            for at in range(tensor.numel()):
                having = [k for k in around if masks[k][name].flatten()[at]]
                values = [float(models[k][name].flatten()[at]) for k in having]
                assert float(tensor.flatten()[at]) == pytest.approx(sum(values) / max(len(values), 1), abs=1e-14)
    shares = torch.cat([mask.flatten() for own in masks.values() for mask in own.values()])
    assert logs["active"] == pytest.approx(float(shares.float().mean()))
    assert logs["edges"] == 6 and logs["edge_bytes"] == sum(
        num_bytes(updates[k]) * times for k, times in {0: 2, 1: 1, 2: 2, 3: 1}.items()
    )
    before = dict(server.state)
    assert server.aggregate({}, 1) == {} and equal(server.state, before)


def test_a_mask_of_other_entries_than_its_values_ends_no_run():
    server = set_up(IntersectionAverage(graph="full"), make_client(DisPFL, net=plain))
    updates, *_ = drawn(0, 1)
    name = "net.classifier.weight"
    updates[0]["masks"][name] = packed(torch.ones(3, 5, dtype=torch.bool))
    updates[1]["masks"][name] = packed(torch.zeros(3, 5, dtype=torch.bool))
    server.aggregate(updates, 0)
    assert all(t.isfinite().all() for t in server.download(1)["weights"].values())


def test_dense_it_is_the_average_of_neighbours():
    sparse = run_of(density=1.0)
    dense = fit(make_client(FedAvg), aggregator=GossipAverage(graph="ring"))
    assert near(sent(sparse), sent(dense), atol=1e-6)
    assert [row["val/acc"] for row in sparse.rows] == [row["val/acc"] for row in dense.rows]
    assert all(mask.all() for own in masks_of(sparse).values() for mask in own.values())


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_clients_send_active_entries_alone_and_as_many_in_each_round(regrow):
    spy = Spy()
    run = run_of(regrow=regrow, callbacks=[spy], max_rounds=3)
    counts = active_counts(SHAPES, 0.6)
    assert 0 < counts["features.0.weight"] < 30 and counts["classifier.bias"] == 3
    size = sum(4 * counts[name] + math.ceil(math.prod(shape) / 8) for name, shape in SHAPES.items())
    for row, updates in zip(run.rows, spy.updates, strict=True):
        for update in updates.values():
            assert {name: len(v) for name, v in update["values"].items()} == {f"net.{n}": c for n, c in counts.items()}
        assert row["bytes/up"] == 4 * size and row["server/edge_bytes"] == 8 * size
    # clients draw masks of their own, and replace entries from round to round
    masks = [{k: update["masks"]["net.features.0.weight"] for k, update in of.items()} for of in spy.updates]
    assert not equal(masks[0][0], masks[0][1]) and not equal(masks[0][0], masks[1][0])


def test_entries_that_are_inactive_are_zero_in_training_and_after_each_download():
    steps = []

    class Looking(DisPFL):
        def training_step(self, batch, batch_idx):
            steps.extend(bool((w[~self.mask.tensors()[n]] == 0).all()) for n, w in self.net.named_parameters())
            return super().training_step(batch, batch_idx)

    run = fit(make_client(Looking, density=0.5), aggregator=IntersectionAverage(graph="ring"), max_rounds=2)
    assert steps and all(steps)
    state, payload = run.federation.clients[1], run.federation.aggregator.download(1)
    run.model.receive(state.personal, payload, None)
    for name, own in masks_of(run)[1].items():
        expected = payload["weights"][f"net.{name.replace('/', '.')}"] * own
        assert equal(run.model.net.get_parameter(name.replace("/", ".")).detach(), expected)


def test_a_gradient_by_hand():
    model = make_client(DisPFL, net=plain).double()
    for index, mask in enumerate(model.mask.buffers()):
        mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(index)) < 0.5)
    x, y = points(9, seed=1)
    torch.nn.functional.cross_entropy(model.net(x.double()), y).backward()
    gradients = {f"net.{name}": w.grad for name, w in model.net.named_parameters()}
    for name, gradient in model.adjust_gradients(gradients).items():
        mask = model.mask.tensors()[name.removeprefix("net.")]
        assert torch.equal(gradient[mask], gradients[name][mask]) and not gradient[~mask].any() and mask.any()


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_the_smallest_are_dropped_and_those_of_the_largest_score_become_active(count):
    generator = torch.Generator().manual_seed(count)
    mask = torch.arange(20).view(4, 5) % 2 == 0
    size, score = (torch.rand(4, 5, generator=generator) for _ in range(2))
    new = replaced(mask, size, score, count)
    left = sorted(mask.flatten().nonzero().flatten().tolist(), key=lambda at: float(size.flatten()[at]))[count:]
    others = [at for at in range(20) if at not in left]
    grown = sorted(others, key=lambda at: -float(score.flatten()[at]))[:count]
    assert sorted(left + grown) == new.flatten().nonzero().flatten().tolist()


def test_the_number_of_replaced_entries_falls_over_the_rounds():
    changes = []

    class Counting(DisPFL):
        def upload(self, data):
            before = {name: mask.clone() for name, mask in self.mask.tensors().items()}
            update = super().upload(data)
            changes.append(sum(int((before[n] & ~mask).sum()) for n, mask in self.mask.tensors().items()))
            return update

    fit(make_client(Counting, density=0.5, anneal=0.0), aggregator=IntersectionAverage(), max_rounds=1)
    assert changes == [0] * 4
    changes.clear()
    fit(make_client(Counting, density=0.5, anneal=1.0, regrow="random"), aggregator=IntersectionAverage(), max_rounds=4)
    by_round = [sum(changes[4 * t : 4 * t + 4]) for t in range(4)]
    # in the first round all are dropped, and some of them drawn again
    assert by_round[0] > by_round[2] > by_round[3] > 0


def test_densities_by_hand():
    # 0.5 * 52 entries; the bias would have more than it has, and the matrix gets the rest
    assert active_counts({"w": (4, 12), "b": (4,)}, 0.5) == {"w": 22, "b": 4}
    # of two matrices the smaller one is denser, in proportion to the sum of sides over their product
    assert active_counts({"a": (10, 10), "b": (20, 20)}, 0.3) == {"a": 50, "b": 100}
    for density in (0.1, 0.5, 0.9, 1.0):
        counts = active_counts(SHAPES, density)
        total = density * sum(math.prod(shape) for shape in SHAPES.values())
        assert total - len(SHAPES) < sum(counts.values()) <= total + 1e-6
        assert all(counts[name] <= math.prod(shape) for name, shape in SHAPES.items())


def test_a_client_that_never_trained_has_the_whole_common_initial_model():
    run = run_of(clients_per_round=2, max_rounds=1)
    (away, *_) = set(range(4)) - run.federation.clients.keys()
    engine, job = run.federation.engines[0], run.federation.job(away)
    engine.become(job, training=False)
    initial = run.federation.aggregator.state["initial"]
    assert equal({name: run.model.state_dict()[name] for name in initial}, initial) and not run.model.is_sparse()
    engine.become(job, training=True)
    assert run.model.is_sparse()


def test_running_statistics_stay():
    spy = Spy()
    run_of(net=noisy, callbacks=[spy], max_rounds=1)
    assert not any("running" in name for name in spy.updates[0][0]["values"])


def test_a_tied_parameter_travels_once():
    def tied(shape, classes):
        body = nn.Sequential(
            nn.Linear(shape[0], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        )
        body[3].weight = body[2].weight
        return Net(body, nn.Linear(HIDDEN, classes))

    spy = Spy()
    run = run_of(net=tied, callbacks=[spy], max_rounds=2)
    assert "net.features.3.weight" not in spy.updates[0][0]["values"]
    for model in sent(run).values():
        assert equal(model["net.features.3.weight"], model["net.features.2.weight"])
    assert run.rows[-1]["clients"] == 4


@pytest.mark.parametrize("regrow", ["gradient", "random"])
def test_order_and_resume_change_no_bit(tmp_path, regrow):
    def made(**settings):
        return DisPFL(density=0.5, regrow=regrow, batch=7, **settings)

    check_order_and_resume(made, tmp_path, optimizer_lifetime="round", aggregator=IntersectionAverage(degree=1))


@pytest.mark.parametrize("engine", ["vectorised", "processes"])
@pytest.mark.by_default("vectorised")
def test_engines_agree(engine):
    one, other = (run_of(engine=each, clients_per_round=3) for each in ("sequential", engine))
    assert near(sent(one), sent(other)) and near(untimed(one.rows), untimed(other.rows))
    assert equal(masks_of(one), masks_of(other))


@pytest.mark.parametrize("data", [blobs(30, 45, by_class=True, batch_size=1), blobs(30)])
def test_it_trains_where_there_is_little(data):
    assert run_of(data=data).rows[-1]["clients_diverged"] == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("density", 0),
        ("density", 1.1),
        ("anneal", -0.1),
        ("batch", 0),
        ("regrow", "'all'"),
        ("optimizer_lifetime", "'run'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.{setting}={value}"):
        make_client(DisPFL, **{setting: value.strip("'") if isinstance(value, str) else value})


def test_masks_travel_as_bits():
    updates, _, masks = drawn(0)
    name = "net.features.0.weight"
    assert torch.equal(unpacked(updates[0]["masks"][name], 30).view(5, 6), masks[0][name])
