from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR

from federations import (
    Shuffled,
    Spy,
    blobs,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    same_end,
)
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.messages import detached
from pfl_lightning.methods import FedPer, FedProx, Local
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.seeds import derive_seed


def reference(model, data, rounds, epochs=1, clip=None, decay=1.0, batch=5, lr=0.1):
    """FedAvg as a plain loop over one net: SGD with momentum, new each round."""
    seed = torch.initial_seed()
    net = model.net
    weights = {name: t.clone() for name, t in net.state_dict().items()}
    for round in range(rounds):
        ends, sizes = [], []
        for client in range(data.num_clients):
            net.load_state_dict(weights)
            part = data.part(client, "train")
            generator = torch.Generator().manual_seed(derive_seed(seed, "train", round, client))
            torch.manual_seed(derive_seed(seed, "train", round, client))
            optimizer = SGD(net.parameters(), lr=lr * decay**round, momentum=0.9)
            for _ in range(epochs):
                order = torch.randperm(len(part), generator=generator)
                # views, as the engine's: the last bit of a product depends on how its operands lie in memory
                for x, y in zip(part.x[order].split(batch), part.y[order].split(batch), strict=True):
                    if len(y) == 1 and any(isinstance(m, nn.BatchNorm1d) for m in net.modules()):
                        continue
                    optimizer.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    if clip is not None:
                        clip(net.parameters())
                    optimizer.step()
            ends.append({name: t.clone() for name, t in net.state_dict().items()})
            sizes.append(float(len(part)))
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                weights[name] = max(end[name] for end in ends)
                continue
            total = ends[0][name] * (sizes[0] / sum(sizes))
            for end, size in zip(ends[1:], sizes[1:], strict=True):
                total = total.add(end[name], alpha=size / sum(sizes))
            weights[name] = total
    return {f"net.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("net", [plain, noisy])
@pytest.mark.parametrize("epochs", [1, 2])
def test_three_rounds_equal_a_plain_loop_bit_for_bit(net, epochs):
    data = blobs(32, 17, 30)
    run = fit(make_client(net=net), data, local_epochs=epochs)
    assert equal(dict(run.weights), reference(make_client(net=net), data, 3, epochs))


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        ("norm", partial(nn.utils.clip_grad_norm_, max_norm=0.05)),
        ("value", partial(nn.utils.clip_grad_value_, clip_value=0.05)),
    ],
)
def test_gradients_are_clipped_as_by_torch(algorithm, clip):
    run = fit(make_client(), gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    assert equal(dict(run.weights), reference(make_client(), run.data, 3, clip=clip))
    assert not equal(run.weights, fit(make_client()).weights)


def test_a_schedule_steps_once_a_round():
    scheduler = partial(ExponentialLR, gamma=0.5)
    run = fit(make_client(lr_scheduler=scheduler))
    assert [row["lr"] for row in run.rows] == pytest.approx([0.1, 0.05, 0.025])
    expected = reference(make_client(), run.data, 3, decay=0.5)
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("method", [FedAvg, FedPer, partial(FedProx, mu=0.1), Local])
@pytest.mark.by_default("Local")
def test_the_order_of_clients_changes_nothing(method):
    settings = {"net": noisy, "optimizer_lifetime": "run"}
    run = fit(make_client(method, **settings))
    assert same_end(run, fit(make_client(method, **settings), engine=Shuffled))


def test_momentum_lives_for_the_run_or_for_a_round():
    def updates(lifetime):
        run = fit(make_client(Local, optimizer_lifetime=lifetime))
        return run.federation.clients[0]

    assert not updates("round").optimizers
    assert updates("run").optimizers["train"]["state"][0]["momentum_buffer"].abs().sum() > 0
    assert not equal(updates("round").personal, updates("run").personal)


def test_a_kept_optimizer_follows_the_schedule():
    settings = {"optimizer_lifetime": "run", "lr_scheduler": partial(ExponentialLR, gamma=0.0)}
    run = fit(make_client(Local, **settings))
    assert equal(
        run.federation.clients[0].personal, fit(make_client(Local), max_rounds=1).federation.clients[0].personal
    )


# The amount of local work


class Counting(FedAvg):
    """Counts batches and samples."""

    sends = frozenset({"weights", "num_samples", "sizes"})
    caches = frozenset({"sizes"})

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.sizes = []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[1]))
        return super().training_step(batch, batch_idx)

    def upload(self, data):
        return super().upload(data) | {"sizes": torch.tensor(getattr(self, "sizes", []))}


def batch_sizes(data, net=plain, **settings):
    spy = Spy()
    fit(make_client(Counting, net=net), data, callbacks=[spy], max_rounds=1, **settings)
    return {client: update["sizes"].tolist() for client, update in spy.updates[0].items()}


def part_settings(**settings):
    return {"test_fraction": 0.25, "val_fraction": 0, **settings}


@pytest.mark.parametrize(
    ("last_batch", "expected"),
    [("keep", [5, 5, 2]), ("drop", [5, 5]), ("wrap", [5, 5, 5])],
)
def test_last_batches(last_batch, expected):
    data = blobs(16, 4, last_batch=last_batch, **part_settings())
    sizes = batch_sizes(data, limit_val_batches=0)
    assert sizes[0] == expected
    assert sizes[1] == ([5] if last_batch == "wrap" else [3])  # smaller than a batch, and trained all the same


def test_local_steps_count_batches_over_as_many_epochs_as_they_take():
    sizes = batch_sizes(blobs(16, 4, **part_settings()), local_steps=4, limit_val_batches=0)
    assert sizes == {0: [5, 5, 2, 5], 1: [3, 3, 3, 3]}


def test_batches_of_one_are_trained_without_batchnorm_and_left_out_with_it():
    data = blobs(15, 8, **part_settings())
    assert batch_sizes(data, limit_val_batches=0) == {0: [5, 5, 1], 1: [5, 1]}
    assert batch_sizes(data, net=noisy, limit_val_batches=0) == {0: [5, 5], 1: [5]}
    assert set(batch_sizes(blobs(15, 8, batch_size=1, **part_settings()), limit_val_batches=0)[1]) == {1}


@pytest.mark.parametrize("steps", [{}, {"local_steps": 2}])
def test_a_client_with_one_sample_under_batchnorm_sends_what_it_received(steps):
    data = blobs(20, 3)
    assert data.num_clients == 2
    model = make_client(net=noisy)
    initial = detached(model.state_dict())
    spy = Spy()
    run = fit(model, data, callbacks=[spy], max_rounds=2, **steps)
    assert equal(dict(spy.updates[0][1]["weights"]), initial)
    assert [row["clients"] for row in run.rows] == [2, 2]


def test_one_client_is_a_federation():
    data = blobs(30)
    spy_run = fit(make_client(), data)
    assert equal(dict(spy_run.weights), reference(make_client(), data, 3))


# Loss scaling


class Scaling(Precision):
    """As 16-mixed looks to an engine."""

    scaler = object()


def scaled_engine(monkeypatch, enabled: bool, model: FedAvg) -> Sequential:
    if enabled:
        monkeypatch.setattr(
            torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**10, growth_interval=4)
        )
    return Sequential(model, LocalWork(batch_size=5), Scaling() if enabled else Precision())


def test_a_client_s_scaler_is_its_own_and_does_not_change_its_steps(monkeypatch):
    data = blobs()
    data.setup()
    ends = {}
    for enabled in (True, False):
        model = make_client(Local)
        engine = scaled_engine(monkeypatch, enabled, model)
        start = detached(model.state_dict())
        jobs = [Job(client, 0, ClientState(start), {}, data.client(client), seed=client) for client in range(2)]
        ends[enabled] = [outcome.state for outcome in engine.run(jobs)]
        if enabled:
            steps = [-(-data.size(client, "train") // 5) for client in range(2)]
            scales = [state.scaler["scale"] for state in ends[enabled]]
            assert scales == [2.0**10 * 2 ** (count // 4) for count in steps]
            later = Job(0, 1, ends[enabled][0], {}, data.client(0), seed=7)
            (again,) = engine.run([later])
            assert again.state.scaler["scale"] > scales[0] or again.state.scaler["_growth_tracker"] != 0
    for one, other in zip(ends[True], ends[False], strict=True):
        for name, tensor in one.personal.items():
            torch.testing.assert_close(tensor, other.personal[name], atol=1e-5, rtol=1e-4)
        assert not other.scaler


def test_a_step_whose_scaled_gradients_overflow_is_left_out(monkeypatch):
    class Overflow(Local):
        def loss(self, features, logits, target):
            return super().loss(features, logits, target) * 1e36

    data = blobs(20, 20)
    data.setup()
    model = make_client(Overflow)
    engine = scaled_engine(monkeypatch, True, model)
    start = detached(model.state_dict())
    (outcome,) = engine.run([Job(0, 0, ClientState(start), {}, data.client(0), seed=0)])
    assert outcome.finite and outcome.state.scaler["scale"] < 2.0**10


def test_an_engine_evaluates_without_training():
    data = blobs()
    data.setup()
    model = make_client(net=noisy)
    engine = Sequential(model, LocalWork(), Precision())
    before = detached(model.state_dict())
    job = Job(0, 0, ClientState(), {"weights": before}, data.client(0), seed=0, evaluate=("val", "test"))
    values = engine.evaluate(job)
    assert set(values) == {"val", "test"} and set(values["val"]) == {"acc", "loss"}
    assert equal(before, detached(model.state_dict()))


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.01)])
def test_an_engine_does_not_change_the_state_that_it_is_given(optimizer):
    data = blobs()
    data.setup()
    model = make_client(FedPer, net=noisy, optimizer_lifetime="run", optimizer=optimizer)
    engine = Sequential(model, LocalWork(), Precision())
    payload = {"weights": detached({name: t for name, t in model.state_dict().items() if model.is_shared(name)})}
    start = ClientState(detached({name: t for name, t in model.state_dict().items() if model.is_personal(name)}))
    (first,) = engine.run([Job(0, 0, start, payload, data.client(0), seed=0)])
    before = detached([vars(first.state), payload])
    (second,) = engine.run([Job(0, 1, first.state, payload, data.client(0), seed=1)])
    assert equal(before, [vars(first.state), payload])
    assert not equal(vars(first.state), vars(second.state))


def test_client_modules_are_told_the_round_their_steps_and_their_learning_rate():
    class Told(Counting):
        def upload(self, data):
            told = [self.round, self.steps_done, self.learning_rate]
            return super().upload(data) | {"sizes": torch.tensor(told, dtype=torch.float64)}

    spy = Spy()
    scheduler = partial(ExponentialLR, gamma=0.5)
    run = fit(make_client(Told, lr_scheduler=scheduler), callbacks=[spy], local_epochs=2)
    for round, updates in enumerate(spy.updates):
        for client, update in updates.items():
            steps = 2 * -(-run.data.size(client, "train") // 5)
            assert update["sizes"].tolist() == pytest.approx([round, steps, 0.1 * 0.5**round])
