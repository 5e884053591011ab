"""KT-pFL and its "+weight": the coefficients in float64, distillation by hand, and what travels."""

import math
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from federations import FEATURES, Blobs, Shuffled, Sizes, Spy, blobs, equal, fit, load, make_client, noisy, same_end
from pfl_lightning import Aggregator, Phase, Server
from pfl_lightning.data import FederatedDataModule, Samples
from pfl_lightning.messages import num_bytes, weighted_mean
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.methods.growing_epochs import GrowingEpochs
from pfl_lightning.methods.knowledge_coefficients import KnowledgeCoefficients, official_rates, project
from pfl_lightning.methods.kt_pfl import KnowledgeTransfer, KTpFL
from pfl_lightning.methods.kt_pfl_weight import KTpFLWeight
from pfl_lightning.methods.local import Local
from pfl_lightning.nets import Net

K, N, C = 4, 9, 3
SMALL = partial(KnowledgeTransfer, max_epochs=2, distill_batch_size=4)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def answers(k=K, seed=0):
    """Predictions [N, C] of each client."""
    return {i: torch.randn(N, C, dtype=torch.float64, generator=generator(seed + i)).softmax(1) for i in range(k)}


def coefficients(k=K, c=None, **settings):
    aggregator = KnowledgeCoefficients(**settings)
    aggregator.setup(Server(k, {}, None, None, seed=0))
    if c is not None:
        aggregator.state["c"] = c
    return aggregator


def products(p):
    flat = torch.stack(list(p.values())).flatten(1)
    return flat @ flat.T / flat.shape[1]


def learned(p, **settings):
    aggregator = coefficients(len(p), **settings)
    aggregator.learn(list(p), products(p))
    return aggregator.state["c"]


def teaching(k=K, **settings):
    """The server side over nine public points."""
    aggregator = KTpFL(**settings)
    data = blobs()
    data.setup()
    aggregator.setup(Server(k, {}, None, data, seed=0))
    return aggregator


def uploads(p):
    return {client: {"predictions": prediction} for client, prediction in p.items()}


def random_c(k=K, seed=5):
    return torch.rand(k, k, dtype=torch.float64, generator=generator(seed)).softmax(1)


# Coefficients


@pytest.mark.parametrize("rho", [0.0, 0.7, 3.0])
def test_a_step_goes_along_the_gradient_of_the_objective(rho):
    p, c = answers(), random_c().requires_grad_()
    stacked = torch.stack(list(p.values()))
    objective = sum(
        F.mse_loss(torch.tensordot(c[k], stacked, 1), p[k]) + rho * F.mse_loss(c[k], torch.full_like(c[k], 1 / K))
        for k in range(K)
    )
    (slope,) = torch.autograd.grad(objective, c)
    stepped = learned(p, c=c.detach(), rho=rho, coefficient_lr=1.0, c_update="raw")
    torch.testing.assert_close(stepped, c.detach() - slope, rtol=0, atol=1e-14)


def test_it_lowers_the_objective_and_learns_from_who_answers_alike():
    p = answers()
    p[1] = p[0]
    aggregator = coefficients(rho=0.1, coefficient_lr=0.5)
    for _ in range(300):
        aggregator.learn(list(p), products(p))
    c = aggregator.state["c"]
    assert c[0, 0] == pytest.approx(float(c[0, 1])) and c[0, 1] > 1.5 * c[0, 2:].max()
    assert (c.diagonal()[2:] > 0.4).all()


@pytest.mark.parametrize("c_update", ["project", "softmax5", "raw"])
def test_equal_answers_leave_equal_coefficients(c_update):
    same = {i: answers()[0] for i in range(K)}
    c = learned(same, c_update=c_update, coefficient_lr=1.0)
    torch.testing.assert_close(c, torch.full((K, K), 1 / K, dtype=torch.float64), rtol=0, atol=1e-15)


def test_a_large_penalty_makes_coefficients_equal():
    rho = 1e9
    c = learned(answers(), c=random_c(), rho=rho, coefficient_lr=K / (2 * rho))
    torch.testing.assert_close(c, torch.full((K, K), 1 / K, dtype=torch.float64), rtol=0, atol=1e-8)


def test_no_step_keeps_them_as_they_are():
    c = random_c()
    torch.testing.assert_close(learned(answers(), c=c, coefficient_lr=0.0), c, rtol=0, atol=1e-15)
    assert torch.equal(learned(answers(), c=c, coefficient_lr=0.0, c_update="raw"), c)


@pytest.mark.parametrize("c_update", ["project", "softmax5"])
@pytest.mark.parametrize("coefficient_lr", [0.02, 50.0, None])
def test_rows_stay_mixes(c_update, coefficient_lr):
    aggregator = coefficients(c_update=c_update, coefficient_lr=coefficient_lr)
    for round in range(5):
        logs = aggregator.learn(list(range(K)), products(answers(seed=10 * round)))
    c = aggregator.state["c"]
    assert (c >= 0).all()
    torch.testing.assert_close(c.sum(1), torch.ones(K, dtype=torch.float64))
    assert logs == {"own_share": float(c.diagonal().mean()), "largest_share": float(c.max())}


def test_raw_rows_need_not_stay_mixes():
    c = learned(answers(), c=random_c(), coefficient_lr=50.0, c_update="raw")
    assert (c < 0).any() and not torch.allclose(c.sum(1), torch.ones(K, dtype=torch.float64))


@pytest.mark.parametrize(("k", "slope"), [(20, 0.25), (5, 1.0), (4, 1.25)])
def test_softmax5_draws_to_uniform_by_5_over_the_number_of_clients(k, slope):
    d = torch.zeros(k, dtype=torch.float64)
    d[0], d[1] = 1e-6, -1e-6
    c = learned(answers(k), c=(1 / k + d).expand(k, k), coefficient_lr=0.0, c_update="softmax5")
    torch.testing.assert_close(c[0] - 1 / k, slope * d, rtol=1e-4, atol=1e-11)


def test_projection_is_the_nearest_point_of_the_simplex():
    rows = 2 * torch.randn(50, 6, dtype=torch.float64, generator=generator())
    near = project(rows)
    assert (near >= 0).all()
    torch.testing.assert_close(near.sum(1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(project(near), near)
    # of the nearest point, no other one lies further in the direction of the row
    vertices = torch.eye(6, dtype=torch.float64)
    inner = ((rows - near)[:, None] * (vertices - near[:, None])).sum(2)
    assert (inner <= 1e-12).all()


def test_official_rates_bring_steps_to_a_few_hundredths():
    slopes = torch.randn(200, K, dtype=torch.float64, generator=generator()) * torch.logspace(-5, 1, 200)[:, None]
    sizes = (official_rates(slopes) * slopes).abs().mean(1)
    assert (sizes >= 0.01 - 1e-9).all() and (sizes <= 0.05 + 1e-9).all()
    assert official_rates(1e-12 * slopes[:1]).item() == 3125 and official_rates(1e12 * slopes[:1]).item() == 1 / 3125
    assert official_rates(torch.zeros(1, K)).isfinite().all()


# Some of the clients


def test_only_who_takes_part_learns_and_only_from_each_other():
    before, p = random_c(), answers()
    aggregator = coefficients(c=before, coefficient_lr=5.0)
    aggregator.learn([1, 3], products({k: p[k] for k in (1, 3)}))
    after = aggregator.state["c"]
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert torch.equal(after[[1, 3]][:, [0, 2]], before[[1, 3]][:, [0, 2]])
    assert not torch.allclose(after[[1, 3]][:, [1, 3]], before[[1, 3]][:, [1, 3]])
    torch.testing.assert_close(after.sum(1), torch.ones(K, dtype=torch.float64))
    rows = before[[1, 3]][:, [1, 3]]
    small = coefficients(2, c=rows / rows.sum(1, keepdim=True), coefficient_lr=5.0)
    small.learn([0, 1], products({0: p[1], 1: p[3]}))
    restricted = torch.stack([aggregator.shares(k, [1, 3]) for k in (1, 3)])
    torch.testing.assert_close(restricted, small.state["c"])


def test_one_client_of_a_round_and_one_client_at_all_keep_theirs():
    before = random_c()
    aggregator = coefficients(c=before)
    aggregator.learn([2], products({2: answers()[2]}))
    torch.testing.assert_close(aggregator.state["c"], before, rtol=0, atol=1e-16)
    assert learned(answers(1)).tolist() == [[1.0]]


def test_clients_of_whom_nothing_is_learnt_count_equally_among_themselves():
    aggregator = coefficients(c=torch.eye(K, dtype=torch.float64))
    assert aggregator.shares(0, [1, 2]).tolist() == [0.5, 0.5]
    aggregator.learn([1, 2], products({k: answers()[k] for k in (1, 2)}))
    assert aggregator.state["c"].isfinite().all()


def test_relabelling_clients_relabels_coefficients():
    p, c, order = answers(), random_c(), [2, 0, 3, 1]
    plain = learned(p, c=c, coefficient_lr=1.0)
    relabelled = learned({new: p[old] for new, old in enumerate(order)}, c=c[order][:, order], coefficient_lr=1.0)
    torch.testing.assert_close(relabelled, plain[order][:, order], rtol=0, atol=1e-15)


# Teaching


def test_each_is_taught_its_own_mix():
    aggregator, p = teaching(), answers()
    aggregator.aggregate(uploads(p), 0)
    aggregator.state["c"] = c = random_c()
    for k in range(K):
        expected = sum(c[k, i] * p[i] for i in range(K))
        torch.testing.assert_close(aggregator.download(k)["targets"], expected)


def test_who_learns_from_itself_alone_is_taught_its_own_answers():
    aggregator, p = teaching(), answers()
    aggregator.aggregate(uploads(p), 0)
    aggregator.state["c"] = torch.eye(K, dtype=torch.float64)
    assert all(torch.equal(aggregator.download(k)["targets"], p[k]) for k in range(K))


def test_the_last_answers_of_all_that_have_answered_teach():
    aggregator, p, later = teaching(), answers(), answers(seed=50)
    assert set(aggregator.download(0)) == {"public"}
    aggregator.aggregate(uploads({0: p[0], 2: p[2]}), 0)
    aggregator.aggregate(uploads({1: later[1], 2: later[2]}), 1)
    shares = aggregator.shares(2, [0, 1, 2])
    assert float(shares.sum()) == pytest.approx(1)
    expected = shares[0] * p[0] + shares[1] * later[1] + shares[2] * later[2]
    torch.testing.assert_close(aggregator.download(2)["targets"], expected)
    torch.testing.assert_close(aggregator.download(2)["targets"].sum(1), torch.ones(N, dtype=torch.float64))
    assert set(aggregator.download(3)) == {"public"}


def test_the_order_of_first_answers_changes_no_bit():
    one, other, p = teaching(), teaching(), answers()
    one.state |= {"c": random_c(), "predictions": p}
    other.state |= {"c": random_c(), "predictions": {k: p[k] for k in (2, 0, 3, 1)}}
    assert all(torch.equal(one.download(k)["targets"], other.download(k)["targets"]) for k in range(K))


def test_a_round_without_uploads_leaves_the_state_alone():
    for aggregator in (teaching(), server_of_models(models())):
        before = dict(aggregator.state)
        assert aggregator.aggregate({}, 0) == {} and all(aggregator.state[name] is before[name] for name in before)


def test_the_step_of_a_round_is_of_its_answers():
    aggregator, p = teaching(coefficient_lr=2.0), answers()
    aggregator.aggregate(uploads(p), 0)
    assert torch.equal(aggregator.state["c"], learned(p, coefficient_lr=2.0))


# Clients


def test_answers_are_those_of_the_trained_model_to_the_public_samples():
    spy = Spy()
    run = fit(make_client(SMALL, net=noisy, temperature=5.0), callbacks=[spy], max_rounds=2)
    federation = run.federation
    for client, update in spy.updates[-1].items():
        assert list(update) == ["predictions"] and update["predictions"].dtype == torch.float32
        run.model.load_state_dict(federation.clients[client].personal)
        run.model.eval()
        expected = (run.model(run.data.server_data().x) / 5.0).softmax(1)
        torch.testing.assert_close(update["predictions"], expected)


@pytest.mark.parametrize("distill", ["kl", "mse"])
def test_a_round_by_hand(distill):
    make = partial(KnowledgeTransfer, max_epochs=1, distill=distill, temperature=2.0, distill_epochs=2)
    settings = {"optimizer": partial(SGD, lr=0.1)}
    data, spy = blobs(30, 24, batch_size=100), Spy()
    run = fit(make_client(make, **settings), data, callbacks=[spy], max_rounds=2)
    aggregator = teaching(2)
    aggregator.aggregate(spy.updates[0], 0)
    public, q = data.server_data().x, aggregator.download(1)["targets"]
    net = fit(make_client(make, **settings), data, max_rounds=1)
    model = make_client(make, **settings)
    model.load_state_dict(net.federation.clients[1].personal)

    def step(loss):
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad

    for _ in range(2):
        z = model.net(public) / 2.0
        p = z.softmax(1)
        step({"kl": (q * (q.log() - p.log())).sum(1).mean(), "mse": (p - q).square().mean()}[distill])
    part = data.part(1, "train")
    step(F.cross_entropy(model.net(part.x), part.y))
    for name, tensor in run.federation.clients[1].personal.items():
        torch.testing.assert_close(tensor, model.state_dict()[name])


def test_taking_nothing_from_others_is_local_bit_for_bit():
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    alone = fit(make_client(partial(KnowledgeTransfer, max_epochs=None, distill_epochs=0), **settings), local_epochs=2)
    local = fit(make_client(Local, **settings), local_epochs=2)
    assert equal(alone.weights, local.weights)
    assert all(equal(vars(alone.federation.clients[i]), vars(local.federation.clients[i])) for i in range(4))


def test_what_is_taught_and_how_changes_the_weights():
    models = [
        fit(make_client(partial(SMALL, **settings)), aggregator=KTpFL(**server)).federation.clients[0].personal
        for settings, server in (
            ({}, {}),
            ({"distill_epochs": 0}, {}),
            ({"distill": "mse"}, {}),
            ({"temperature": 1.0}, {}),
            ({}, {"coefficient_lr": 5.0}),
            ({}, {"coefficient_lr": 5.0, "rho": 5.0}),
            ({}, {"coefficient_lr": None, "c_update": "softmax5"}),
        )
    ]
    assert not any(equal(models[i], models[j]) for i in range(len(models)) for j in range(i))


def test_epochs_grow_from_round_to_round():
    counts = []

    class Counted(GrowingEpochs):
        def upload(self, data):
            counts.append(self.steps_done)
            return super().upload(data)

    fit(make_client(partial(Counted, max_epochs=3)), blobs(30, batch_size=100), max_rounds=6)
    assert counts == [1, 1, 2, 3, 3, 3]
    counts.clear()
    fit(make_client(partial(Counted, max_epochs=None)), blobs(30, batch_size=100), max_rounds=3, local_epochs=2)
    assert counts == [2, 2, 2]


def test_any_networks_teach_each_other():
    def wide(input_shape, num_classes):
        return Net(nn.Sequential(nn.Linear(input_shape[0], 9), nn.BatchNorm1d(9), nn.ReLU()), nn.Linear(9, num_classes))

    run = fit(make_client(SMALL, net=[noisy, wide], optimizer=partial(SGD, lr=0.05)))
    assert run.rows[-1]["clients_diverged"] == 0
    widths = [len(run.federation.clients[client].personal["net.features.0.bias"]) for client in range(4)]
    assert widths == [5, 9, 5, 9]
    assert all(predictions.shape == (N, C) for predictions in run.federation.aggregator.state["predictions"].values())


@pytest.mark.parametrize("public", [1, 2])
def test_one_or_two_public_samples_are_enough(public):
    class Few(Blobs):
        def server_data(self):
            part = super().server_data()
            return Samples(part.x[:public], part.y[:public])

    run, alone = (
        fit(make_client(partial(SMALL, distill_epochs=epochs), net=noisy), blobs(data=Few)) for epochs in (1, 0)
    )
    assert run.rows[-1]["clients_diverged"] == 0
    same = equal(run.federation.clients[0].personal, alone.federation.clients[0].personal)
    # BatchNorm has no statistics of one
    assert same == (public == 1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true"])
def test_precisions(precision):
    spy = Spy()
    run = fit(make_client(SMALL), precision=precision, callbacks=[spy], max_rounds=2)
    assert run.rows[-1]["clients_diverged"] == 0
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert spy.updates[-1][0]["predictions"].dtype == dtype


# Public samples


class Images(FederatedDataModule):
    """Noise in bytes, of the size of CIFAR's images."""

    num_classes = 10
    input_shape = (3, 32, 32)
    n = 60

    def load(self):
        x = torch.randint(0, 256, (self.n, *self.input_shape), generator=generator(self.n))
        return x.to(torch.uint8), torch.arange(self.n) % 10


class ManyImages(Images):
    n = 3000


class Brighter(ManyImages):
    def transform(self, x):
        return super().transform(x) + 1


def linear(input_shape, num_classes):
    return Net(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def image_run(public, **settings):
    torch.manual_seed(0)
    model = KnowledgeTransfer(net=linear, input_shape=(3, 32, 32), optimizer=partial(SGD, lr=0.001), max_epochs=1)
    data = Images(num_clients=2, partitioner=Sizes(30, 30), batch_size=30, public=public)
    return fit(model, data, max_rounds=2, **settings)


def test_a_round_takes_the_bytes_that_the_paper_tells():
    run = image_run(ManyImages())
    assert run.rows[1]["bytes/down"] == 2 * (3000 * 3 * 32 * 32 + 3000 * 10 * 4) == 2 * 9_336_000
    assert run.rows[0]["bytes/down"] == 2 * 3000 * 3 * 32 * 32
    assert run.rows[1]["bytes/up"] == 2 * 3000 * 10 * 4


@pytest.mark.exhaustive
def test_clients_transform_what_comes_as_stored_and_take_the_rest_as_it_comes():
    for public in (ManyImages(), Brighter()):
        run = image_run(public)
        module, payload = run.federation.architectures[0], run.federation.aggregator.download(0)
        assert payload["public"].dtype == (torch.float32 if isinstance(public, Brighter) else torch.uint8)
        module.on_download(payload, None)
        assert torch.equal(module.public_inputs(), run.data.server_data().x)


def test_words_are_taken_as_they_are():
    model = make_client(KnowledgeTransfer)
    tokens = torch.tensor([[1, 2], [3, 4]])
    model.on_download({"public": tokens}, None)
    assert torch.equal(model.public_inputs(), tokens)


def test_public_samples_are_no_part_of_the_state(tmp_path):
    run = fit(make_client(SMALL), root=tmp_path)
    state = load(run.last)["federation"]["aggregator"]
    assert set(state) == {"c", "predictions"}
    assert num_bytes(state) == 4 * 4 * 8 + 4 * N * C * 4


@pytest.mark.parametrize("c_update", ["project", "raw"])
@pytest.mark.exhaustive
def test_resuming_and_the_order_change_nothing(c_update, tmp_path):
    def run(root, engine="sequential", seed=3, **settings):
        model = make_client(SMALL, seed=seed, net=noisy, optimizer_lifetime="run")
        server = KTpFL(coefficient_lr=1.0, c_update=c_update)
        return fit(model, root=root, aggregator=server, clients_per_round=0.75, engine=engine, **settings)

    whole = run(tmp_path / "whole", max_rounds=4)
    assert same_end(whole, run(tmp_path / "other", engine=Shuffled, max_rounds=4))
    run(tmp_path / "half", max_rounds=2)
    assert same_end(whole, run(tmp_path / "half", seed=9, max_rounds=4, ckpt_path="last", resume_changed=True))


def test_a_client_comes_out_of_a_checkpoint(tmp_path):
    run = fit(make_client(SMALL), root=tmp_path)
    net = {"net": make_client().nets[0], "optimizer": partial(SGD, lr=0.1)}
    model = KnowledgeTransfer.load_from_checkpoint(run.last, client=2, weights_only=True, **net)
    assert equal(dict(model.state_dict()), run.federation.clients[2].personal)


def test_resuming_with_other_public_samples_is_refused(tmp_path):
    class Fewer(Blobs):
        def server_data(self):
            part = super().server_data()
            return Samples(part.x[:5], part.y[:5])

    last = fit(make_client(SMALL), root=tmp_path, max_rounds=1).last
    with pytest.raises(MisconfigurationException, match=r"ckpt_path: .* answers to 9 public samples, and there are 5"):
        fit(make_client(SMALL), blobs(data=Fewer), tmp_path, max_rounds=2, ckpt_path=last, resume_changed=True)


# Refusals


class Bare(Blobs):
    def server_data(self):
        return None


def test_a_server_without_samples_is_refused_with_what_gives_it_some():
    with pytest.raises(MisconfigurationException, match=r"Bare gives it none; set data\.public .*server_fraction"):
        fit(make_client(SMALL), blobs(data=Bare))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(KnowledgeTransfer, net=linear, temperature=0), r"model\.temperature=0"),
        (partial(KnowledgeTransfer, net=linear, distill_epochs=-1), r"model\.distill_epochs=-1"),
        (partial(KnowledgeTransfer, net=linear, distill_batch_size=1), r"model\.distill_batch_size=1"),
        (partial(GrowingEpochs, net=linear, max_epochs=0), r"model\.max_epochs=0"),
        (partial(KTpFL, rho=-1), r"aggregator\.rho=-1"),
        (partial(KTpFL, coefficient_lr=-1), r"aggregator\.coefficient_lr=-1"),
        (partial(KTpFLWeight, coefficient_lr=float("nan")), r"aggregator\.coefficient_lr=nan"),
    ],
)
def test_what_cannot_be_is_refused(make, sentence):
    with pytest.raises(MisconfigurationException, match=sentence):
        make()


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(MisconfigurationException, match="KTpFL needs predictions, which FedAvg does not send"):
        fit(make_client(FedAvg), aggregator=KTpFL())
    with pytest.raises(MisconfigurationException, match="KnowledgeTransfer needs public and targets"):
        fit(make_client(SMALL), aggregator=Aggregator())


# "+weight"


def models(k=K, seed=0):
    torch.manual_seed(seed)
    nets = [FedAvg(noisy, (FEATURES,), C).double() for _ in range(k)]
    return [{name: tensor.detach().clone() for name, tensor in net.state_dict().items()} for net in nets]


def server_of_models(states, **settings):
    aggregator = KTpFLWeight(**settings)
    aggregator.setup(Server(len(states), states[0], FedAvg(noisy, (FEATURES,), C), None, seed=0))
    return aggregator


def test_models_teach_by_the_same_rule():
    states = models()
    names = [name for name, _ in FedAvg(noisy, (FEATURES,), C).named_parameters()]
    flat = {k: torch.cat([state[name].flatten() for name in names]) for k, state in enumerate(states)}
    aggregator = server_of_models(states, coefficient_lr=2.0)
    logs = aggregator.aggregate({k: {"weights": state} for k, state in enumerate(states)}, 0)
    c = aggregator.state["c"]
    torch.testing.assert_close(c, learned(flat, coefficient_lr=2.0), rtol=0, atol=1e-12)
    assert (c.diagonal() > 0.3).all() and logs["own_share"] == pytest.approx(float(c.diagonal().mean()))
    for k in range(K):
        mix = weighted_mean(states, c[k].tolist())
        torch.testing.assert_close(aggregator.download(k)["weights"], mix)


@pytest.mark.parametrize("net", [noisy])
def test_equal_coefficients_average_models_without_their_sizes(net):
    spy = Spy()
    run = fit(make_client(FedAvg, net=net), aggregator=KTpFLWeight(coefficient_lr=0.0), callbacks=[spy], max_rounds=1)
    mean = weighted_mean([update["weights"] for update in spy.updates[0].values()], [1 / 4] * 4)
    assert equal(run.weights, mean)
    for client in range(4):
        received = run.federation.aggregator.download(client)["weights"]
        assert all(torch.allclose(received[name], mean[name], atol=1e-6) for name in mean)


def test_who_stays_away_keeps_its_mix_and_who_never_came_has_the_mean():
    states, later = models(), models(seed=9)
    aggregator = server_of_models(states)
    assert equal(aggregator.download(3)["weights"], states[0])
    aggregator.aggregate({k: {"weights": states[k]} for k in (0, 1)}, 0)
    first = aggregator.download(0)["weights"]
    aggregator.aggregate({k: {"weights": later[k]} for k in (1, 2)}, 1)
    assert equal(aggregator.download(0)["weights"], first)
    assert equal(aggregator.download(3)["weights"], weighted_mean([later[1], later[2]], [0.5, 0.5]))
    assert equal(aggregator.download(3)["weights"], aggregator.global_model())


@pytest.mark.exhaustive
def test_models_resume_and_their_order_changes_nothing(tmp_path):
    def run(root, engine="sequential", seed=3, **settings):
        model = make_client(partial(GrowingEpochs, max_epochs=2), seed=seed, net=noisy)
        server = KTpFLWeight(coefficient_lr=1.0)
        return fit(model, root=root, aggregator=server, clients_per_round=0.75, engine=engine, **settings)

    whole = run(tmp_path / "whole", max_rounds=4)
    assert same_end(whole, run(tmp_path / "other", engine=Shuffled, max_rounds=4))
    run(tmp_path / "half", max_rounds=2)
    assert same_end(whole, run(tmp_path / "half", seed=9, max_rounds=4, ckpt_path="last", resume_changed=True))


def test_models_of_which_nothing_is_shared_are_refused():
    class Nothing(FedAvg):
        def is_shared(self, name):
            return False

    with pytest.raises(MisconfigurationException, match="Nothing shares none; take model FedAvg"):
        fit(make_client(Nothing), aggregator=KTpFLWeight())


# Phases on other samples


class Schooled(Local):
    """Counts the batches of a phase on five samples that aren't its own."""

    sizes: list
    caches = frozenset({"sizes"})

    def local_phases(self):
        part = Samples(torch.full((5, FEATURES), 7.0, device=self.device), torch.ones(5, 3, device=self.device))
        return [Phase("school", data=part, batch_size=2, epochs=2), Phase()]

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.phase.name == "school":
            assert (x == 7).all() and y.shape == (len(x), 3)
        else:
            assert y.dtype == torch.int64
        self.sizes.append((self.phase.name, len(x)))
        return {"loss": self.net(x).square().mean()}


@pytest.mark.parametrize(("last_batch", "own"), [("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_a_phase_trains_on_samples_of_its_own_and_leaves_none_out(last_batch, own):
    model = make_client(Schooled)
    model.sizes = []
    data = blobs(10, batch_size=4, last_batch=last_batch, test_fraction=0.0, val_fraction=0.0)
    fit(model, data, max_rounds=1)
    assert model.sizes == [("school", size) for size in [2, 2, 1] * 2] + [("train", size) for size in own]


def test_a_phase_without_samples_makes_no_step():
    class Empty(Schooled):
        def local_phases(self):
            return [Phase("school", data=Samples(torch.zeros(0, FEATURES), torch.zeros(0, 3))), Phase()]

    model = make_client(Empty)
    model.sizes = []
    fit(model, blobs(10, batch_size=100), max_rounds=1)
    assert [name for name, _ in model.sizes] == ["train"]
