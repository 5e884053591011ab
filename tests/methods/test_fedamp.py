import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.nn import functional as F

from command import CONFIGS, QUIET, pfl
from federations import (
    Shuffled,
    Spy,
    blobs,
    equal,
    fit,
    load_client,
    make_client,
    noisy,
    plain,
    points,
    read_csv,
    same_end,
)
from pfl_lightning import Server
from pfl_lightning.messages import num_bytes
from pfl_lightning.methods import MRMTL, FedAvg, Local
from pfl_lightning.methods.fedamp import CloudProx, FedAMP, attention

STRONG = partial(CloudProx, mu=2.0)
NEAR = partial(FedAMP, alpha=1.0, sigma=5.0)


def nets(run, buffers=True):
    """Each client's own net, as it last trained it."""
    names = {name for name, _ in run.model.named_parameters()}
    return {
        client: {n: t for n, t in state.personal.items() if n.startswith("net.") and (buffers or n in names)}
        for client, state in sorted(run.federation.clients.items())
    }


def losses(run):
    return [row["val/loss"] for row in run.rows]


def server(clients=4, **settings):
    aggregator = FedAMP(**settings)
    module = make_client().double()
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    aggregator.setup(Server(clients, weights, module, None, seed=0))
    return aggregator


def uploads(*clients, scale=0.1):
    """Models that are some distance apart."""
    updates = {}
    for client in clients:
        model = make_client().double().state_dict()
        generator = torch.Generator().manual_seed(client)
        noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in model.items()}
        updates[client] = {"weights": {name: tensor + scale * noise[name] for name, tensor in model.items()}}
    return updates


def clouds(aggregator, clients):
    """Each client's cloud model as a vector."""
    return {client: vector(aggregator.download(client)["weights"]) for client in clients}


def vector(weights):
    return torch.cat([tensor.flatten() for tensor in weights.values()])


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.by_default("plain")
def test_without_its_term_it_is_local_bit_for_bit(net):
    settings = {"net": net, "optimizer_lifetime": "run"}
    amp, local = fit(make_client(CloudProx, mu=0.0, **settings)), fit(make_client(Local, **settings))
    assert equal(nets(amp), nets(local))
    assert losses(amp) == losses(local)


def test_a_server_that_sends_each_its_own_makes_fedavg_local():
    alone = fit(make_client(FedAvg), aggregator=FedAMP(alpha=0.0))
    local = fit(make_client(Local))
    for client, net in nets(local).items():
        assert equal(alone.federation.aggregator.download(client)["weights"], net)
    assert losses(alone) == losses(local)


def test_its_term_changes_the_weights_and_draws_them_to_the_cloud():
    def distance(mu):
        run = fit(make_client(partial(CloudProx, mu=mu)), aggregator=NEAR(), max_rounds=4)
        cloud = {client: run.federation.aggregator.download(client)["weights"] for client in nets(run)}
        return sum(float((vector(net) - vector(cloud[client])).norm()) for client, net in nets(run).items())

    far, near, nearer = distance(0.0), distance(1.0), distance(4.0)
    assert far > near > nearer > 0


def test_a_gradient_by_hand_and_the_own_model_stays():
    model, cloud = make_client(STRONG).double(), make_client(seed=8).double().state_dict()
    before = copy.deepcopy(model.net)
    model.receive({}, {"weights": cloud}, None)
    assert equal(dict(model.net.state_dict()), dict(before.state_dict()))
    x, y = points(9, seed=1)
    model.training_step((x.double(), y), 0)["loss"].backward()
    F.cross_entropy(before(x.double()), y).backward()
    for (name, mine), other in zip(model.net.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad + 2.0 * (other - cloud[f"net.{name}"]))


def test_the_clouds_by_hand():
    updates = uploads(0, 1, 3)
    aggregator = server(alpha=0.2, sigma=3.0, min_own=0.0)
    logs = aggregator.aggregate(updates, round=0)
    own = []
    for i in updates:
        w = {m: vector(update["weights"]) for m, update in updates.items()}
        xi = {m: 0.2 / 3.0 * torch.exp(-(w[i] - w[m]).square().sum() / 3.0) for m in updates if m != i}
        own.append(1 - sum(xi.values()))
        assert 0.8 < own[-1] < 0.99
        u = own[-1] * w[i] + sum(weight * w[m] for m, weight in xi.items())
        torch.testing.assert_close(vector(aggregator.download(i)["weights"]), u, rtol=0, atol=1e-12)
    assert logs["own_weight"] == pytest.approx(float(sum(own)) / 3)
    # client 2 has sent nothing: it has the initial model, and is in nobody's
    assert aggregator.download(2)["weights"] is aggregator.state["initial"]


def test_weights_are_a_convex_combination_however_near_models_are():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    for scale in (1e-9, 1e-2, 1.0, 1e3):
        squares = torch.cdist(scale * points, scale * points).square()
        for min_own in (0.0, 1 / 6, 1.0):
            xi = attention(squares, 1000.0, 0.1, min_own)
            assert (xi >= -1e-15).all() and (xi.diagonal() >= min_own - 1e-12).all()
            torch.testing.assert_close(xi.sum(1), torch.ones(6, dtype=torch.float64))
            assert (xi.diagonal() == 1).all() or (scale < 1e3 and min_own < 1)


def test_the_nearer_model_has_the_more_weight_and_scaling_down_keeps_the_ratio():
    squares = torch.tensor([[0.0, 0.1, 0.3], [0.1, 0.0, 0.2], [0.3, 0.2, 0.0]], dtype=torch.float64)
    free, clamped = attention(squares, 0.01, 0.1, 0.5), attention(squares, 1000.0, 0.1, 0.5)
    assert free[0, 1] > free[0, 2] > 0
    assert float(clamped[0, 0]) == pytest.approx(0.5) and free[0, 0] > 0.9
    torch.testing.assert_close(clamped[0, 1] / clamped[0, 2], free[0, 1] / free[0, 2])


def test_a_newcomer_receives_what_a_client_with_its_model_does():
    sent, settings = uploads(0, 1, 2, 3), {"alpha": 1.0, "sigma": 5.0}
    ours, whole = server(**settings), server(**settings)
    assert equal(ours.welcome(9, None)["weights"], ours.state["initial"])
    ours.aggregate({client: sent[client] for client in (0, 1, 2)}, 0)
    whole.aggregate(sent, 0)
    expected = whole.download(3)["weights"]
    for name, tensor in ours.welcome(9, sent[3])["weights"].items():
        torch.testing.assert_close(tensor, expected[name])


def test_equal_models_give_their_mean_and_rounding_makes_no_nan():
    aggregator = server()
    same = uploads(1)[1]
    logs = aggregator.aggregate({client: same for client in range(3)}, round=0)
    assert logs["own_weight"] == pytest.approx(1 / 3)
    torch.testing.assert_close(vector(aggregator.download(0)["weights"]), vector(same["weights"]))
    assert torch.equal(attention(torch.full((2, 2), -1e-9), 1.0, 0.1, 0.5), torch.full((2, 2), 0.5))


def test_one_client_is_sent_its_own_model():
    aggregator, updates = server(clients=1), uploads(0)
    aggregator.aggregate(updates, round=0)
    assert equal(aggregator.download(0)["weights"], updates[0]["weights"])
    run = fit(make_client(STRONG), blobs(30))
    assert equal(nets(run)[0], run.federation.aggregator.download(0)["weights"])


def test_relabelling_clients_relabels_what_they_are_sent():
    updates, order = uploads(0, 1, 2, 3), [2, 0, 3, 1]
    one, other = server(alpha=0.2, sigma=3.0), server(alpha=0.2, sigma=3.0)
    one.aggregate(updates, round=0)
    other.aggregate({new: updates[old] for new, old in enumerate(order)}, round=0)
    for new, old in enumerate(order):
        a, b = (vector(aggregator.download(client)["weights"]) for aggregator, client in ((other, new), (one, old)))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_client_that_stays_away_takes_part_with_its_last_model():
    aggregator, updates = server(alpha=0.2, sigma=3.0), uploads(0, 1, 2)
    aggregator.aggregate({0: updates[0], 1: updates[1]}, round=0)
    aggregator.aggregate({2: updates[2]}, round=1)
    whole = server(alpha=0.2, sigma=3.0)
    whole.aggregate(updates, round=0)
    assert equal(clouds(aggregator, updates), clouds(whole, updates))


def test_nobody_changes_nothing():
    aggregator = server()
    aggregator.aggregate(uploads(0, 1), round=0)
    before = copy.deepcopy(aggregator.state)
    assert aggregator.aggregate({}, round=1) == {} and equal(aggregator.state, before)


def test_parameters_alone_travel():
    spy = Spy()
    run = fit(make_client(STRONG, net=noisy), callbacks=[spy])
    size = num_bytes(dict(run.model.net.named_parameters()))
    assert {row["bytes/down"] for row in run.rows} == {4 * size}
    assert {row["bytes/up"] for row in run.rows} == {4 * (size + 8)}
    assert not any("running" in name for name in spy.updates[0][0]["weights"])
    one, other = (run.federation.clients[client].personal["net.features.1.running_mean"] for client in range(2))
    assert not torch.equal(one, other)


def test_models_are_kept_once():
    aggregator, updates = server(), uploads(0, 1)
    aggregator.aggregate(updates, round=0)
    kept = aggregator.state["models"][1]
    assert all(tensor.data_ptr() == updates[1]["weights"][name].data_ptr() for name, tensor in kept.items())
    sent, again = (aggregator.download(1)["weights"] for _ in range(2))
    assert all(tensor.data_ptr() == again[name].data_ptr() for name, tensor in sent.items())


def test_a_fifth_of_the_cloud_models_is_in_memory_and_their_order_changes_nothing(monkeypatch):
    updates = uploads(*range(9))
    aggregator = server(clients=9, alpha=0.2, sigma=3.0)
    aggregator.aggregate(updates, round=0)
    whole = clouds(aggregator, updates)
    monkeypatch.setattr("pfl_lightning.methods.fedamp.TOGETHER", 0)
    few = server(clients=9, alpha=0.2, sigma=3.0)
    few.aggregate(updates, round=0)
    for client in (8, 0, 3, 1, 7, 2):
        torch.testing.assert_close(vector(few.download(client)["weights"]), whole[client], rtol=0, atol=1e-12)
        assert all(len(stack) <= 2 for stack in few._clouds[2].values())
    # another round's weights
    few.aggregate({2: uploads(12)[12]}, round=1)
    assert not torch.allclose(vector(few.download(2)["weights"]), whole[2], atol=1e-3)


def test_attention_of_models_in_float32_is_that_in_float64_however_long_they_are():
    updates = uploads(0, 1, 2, 3)
    far = {name: 1000 + torch.zeros_like(tensor) for name, tensor in updates[0]["weights"].items()}
    double = [{name: far[name] + tensor for name, tensor in update["weights"].items()} for update in updates.values()]
    single = [{name: tensor.float() for name, tensor in model.items()} for model in double]
    # the rounded models in float64, since 1000.1 itself has only four digits after the point in float32
    again = [{name: tensor.double() for name, tensor in model.items()} for model in single]
    aggregator = server(alpha=0.2, sigma=3.0)
    torch.testing.assert_close(aggregator._attention(single), aggregator._attention(again), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_the_order_of_clients_changes_nothing_and_resuming_goes_on_bit_for_bit(tmp_path):
    make = partial(make_client, STRONG, net=noisy)
    settings = {"clients_per_round": 3, "max_rounds": 4}
    whole = fit(make(), aggregator=NEAR(), **settings)
    assert same_end(whole, fit(make(), aggregator=NEAR(), engine=Shuffled, **settings))
    fit(make(), root=tmp_path, aggregator=NEAR(), **{**settings, "max_rounds": 2})
    assert same_end(whole, fit(make(), root=tmp_path, aggregator=NEAR(), ckpt_path="last", **settings))


def test_a_client_is_loaded_as_its_own_model(tmp_path):
    run = fit(make_client(STRONG), blobs(40, 40, by_class=True), tmp_path)
    client = load_client(CloudProx, run.last, client=1)
    assert equal({f"net.{n}": t for n, t in client.net.state_dict().items()}, nets(run)[1])


@pytest.mark.parametrize(
    "settings", [{"alpha": -1.0}, {"sigma": 0.0}, {"min_own": 1.5}, {"min_own": -0.1}, {"sigma": float("nan")}]
)
def test_settings_out_of_range_are_refused_by_name(settings):
    ((name, value),) = settings.items()
    with pytest.raises(MisconfigurationException, match=rf"aggregator\.{name}={value}"):
        FedAMP(**settings)


@pytest.mark.parametrize("value", [-1, float("nan")])
@pytest.mark.parametrize("method", [CloudProx, MRMTL])
def test_a_weight_out_of_range_is_refused_by_name(method, value):
    with pytest.raises(MisconfigurationException, match=rf"model\.mu={value} .*Local"):
        make_client(method, mu=value)


def own_weights(paper: str = "") -> list[float]:
    """The record of three rounds of the configured method on digits."""
    files = [CONFIGS / "methods" / "fedamp.yaml", CONFIGS / "protocols" / "digits_dir0.1.yaml"]
    files += [CONFIGS / "paper" / paper] if paper else []
    settings = "--data.num_clients 5 --data.batch_size 32 --trainer.max_rounds 4"
    pfl(f"fit {' '.join(f'--config {file}' for file in files)} {settings} {QUIET}")
    (record,) = Path("runs").rglob("rounds.csv")
    return [float(row["server/own_weight"]) for row in read_csv(record)]


@pytest.mark.exhaustive
def test_as_configured_clients_learn_from_each_other(recwarn):
    assert max(own_weights()) < 0.9
    assert not [warning for warning in recwarn if "own models" in str(warning.message)]


def test_values_with_which_nobody_learns_from_anybody_are_said_once():
    with pytest.warns(UserWarning, match=r"round 3: clients' own models have 0\.99\d\d of the weight") as said:
        assert own_weights("fedamp_cwfedavg.yaml")[-1] > 0.999
    assert len([warning for warning in said if "own models" in str(warning.message)]) == 1


@pytest.mark.parametrize(("clients", "alpha"), [((0,), 5.0), ((0, 1), 0.0)])
def test_nothing_is_said_where_there_is_nobody_to_learn_from_or_nobody_shall(clients, alpha, recwarn):
    aggregator = server(alpha=alpha)
    assert aggregator.aggregate(uploads(*clients), round=0) == {"own_weight": 1.0}
    assert not list(recwarn)


def test_the_classes_begin_with_what_is_configured():
    config = yaml.safe_load((CONFIGS / "methods" / "fedamp.yaml").read_text())
    client, aggregator = make_client(CloudProx), FedAMP()
    assert config["model"]["init_args"] == {"mu": client.mu}
    assert config["aggregator"]["init_args"] == {"alpha": aggregator.alpha, "sigma": aggregator.sigma}
