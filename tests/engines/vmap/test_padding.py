"""Clients of unequal sizes in one computation: padded where a step is a mean over samples, by size elsewhere."""

from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from federations import CLASSES, FEATURES, HIDDEN, Blobs, blobs, equal, fit, make_client, noisy, plain, points, untimed
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap import gradients
from pfl_lightning.engines.vmap.engine import Vectorised
from pfl_lightning.messages import detached, tensors
from pfl_lightning.methods import APFL, ControlVariates, Ditto, FedAvg, FedProx, FedRep, FedSAM, Local, PerFedAvg
from pfl_lightning.nets import Net
from pfl_lightning.tasks import Classification, NextToken, Regression

WHOLE = {"val_fraction": 0.0, "test_fraction": 0.0}
SIZES = (24, 1, 31, 7, 18)
"""Last batches of four, one, one, two and three samples, as batches have five; one client has a single sample."""


def counted(seen, run, step, entries, given, count):
    _, weights = given
    seen["mapped" if weights is None else "padded"] += 1
    return run(step, entries, given, count)


@pytest.fixture
def used(monkeypatch):
    """Counts steps of one size and of several at once, and keeps what is known of padding."""
    seen = {"mapped": 0, "padded": 0, "padding": None}
    monkeypatch.setattr(gradients, "mapped", partial(counted, seen, gradients.mapped))

    def made(self, *args, run=gradients.Padding.__init__):
        run(self, *args)
        seen["padding"] = self

    monkeypatch.setattr(gradients.Padding, "__init__", made)
    return seen


def dropping(input_shape, num_classes):
    """Of dropout alone."""
    body = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.2))
    return Net(body, nn.Linear(HIDDEN, num_classes))


def compare(method=FedAvg, data=None, made=None, tolerance=1e-9, **settings):
    """Runs a federation by both engines, and asserts that both end alike."""
    settings = {"precision": "64-true", "local_epochs": 2, "max_rounds": 2, **settings}
    data = data or partial(blobs, *SIZES, **WHOLE)
    runs = [
        fit(make_client(method, **made or {}), data(), engine=engine, **settings) for engine in (Sequential, Vectorised)
    ]
    ends = [list(tensors([dict(run.weights), run.federation.federation_state()])) for run in runs]
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, equal_nan=True)
    for one, other in zip(*(untimed(run.rows) for run in runs), strict=True):
        assert {k: v for k, v in one.items() if k != "cohort"} == pytest.approx(
            {k: v for k, v in other.items() if k != "cohort"}, rel=max(tolerance, 1e-7), abs=tolerance, nan_ok=True
        )
    return runs


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        (FedAvg, set()),
        (partial(FedProx, mu=0.5), set()),
        (ControlVariates, set()),
        (Ditto, set()),
        (FedRep, set()),
        # a mix of two nets, the coefficient's own gradient included; weights that the batch's gradient has moved
        (APFL, set()),
        (FedSAM, set()),
        # two steps on halves of a batch
        (PerFedAvg, {"train"}),
    ],
)
def test_results_are_the_sequential_engine_s(used, method, refused):
    made = {"optimizer": partial(SGD, lr=0.1)} if method is ControlVariates else {}
    compare(method, made=made, data=partial(blobs, 24, 6, 31, 7, 18, **WHOLE) if method is PerFedAvg else None)
    assert used["padding"].refused == refused


@pytest.mark.parametrize(("net", "refused"), [(plain, set()), (dropping, set()), (noisy, {"train"})])
def test_a_layer_of_several_samples_is_computed_by_size(used, net, refused):
    compare(made={"net": net})
    assert used["padding"].refused == refused


@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": 7, "local_epochs": None},
        {"local_steps": 4, "local_epochs": None, "steps_continue": True},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"limit_train_batches": 0.6},
        {"clients_per_round": 3, "max_rounds": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_local_training(used, settings):
    compare(made={"optimizer": partial(Adam, lr=0.01), "optimizer_lifetime": "run"}, **settings)
    assert used["padded"] and not used["padding"].refused


@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
def test_last_batches(used, last):
    compare(data=partial(blobs, *SIZES, last_batch=last, **WHOLE))
    # a client with less than a batch keeps its samples where others drop theirs
    assert bool(used["padded"]) is (last != "wrap")


class Numbers(Blobs):
    """Quantities of samples."""

    task = Regression(2)

    def load(self):
        x, _ = points(120, seed=0)
        return x, x[:, :2] * 3 + 1


class Weighted(Blobs):
    """Classes of weights, which differ between clients."""

    task = Classification(CLASSES, class_weights="balanced")


@pytest.mark.parametrize("data", [Numbers, Weighted])
def test_other_losses(used, data):
    compare(data=partial(blobs, *SIZES, data=data, **WHOLE), made={"task": data.task})
    assert used["padded"] and not used["padding"].refused


class Spread(FedAvg):
    """Its loss has a term across samples, from the second round on."""

    def loss(self, features, logits, target):
        loss = super().loss(features, logits, target)
        return loss + (features.sum(0).square().sum() / len(features) if self.round else 0)


class Centred(FedAvg):
    """Its loss has means over samples, of several shapes, that aren't the loss's last step."""

    def loss(self, features, logits, target):
        centre = features.mean(0, keepdim=True)
        parts = features.mean((0, 1)).square(), features.mean().square(), torch.mean(features, 0).square().sum()
        return super().loss(features, logits, target) + sum(parts) + F.mse_loss(features, centre.expand_as(features))


class Named(FedAvg):
    """Its loss is one of torch's, of samples or of other things."""

    losses = {
        "batchmean": lambda z, y: F.kl_div(z.log_softmax(1), z.detach().flip(1).softmax(1), reduction="batchmean"),
        "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        "soft": lambda z, y: F.cross_entropy(z, z.detach().flip(1).softmax(1)),
        "likelihood": lambda z, y: F.nll_loss(z.log_softmax(1), y),
        "huber": lambda z, y: F.smooth_l1_loss(z, F.one_hot(y, z.shape[1]).to(z)),
        "labels": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, z.shape[1]).to(z)),
        "summed": lambda z, y: F.mse_loss(z, z.detach().flip(1), reduction="sum") / z.shape[1],
        "weighted": lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, z.shape[1] + 1).to(z)),
    }

    def __init__(self, name, **settings):
        super().__init__(**settings)
        self.name = name

    def loss(self, features, logits, target):
        return self.losses[self.name](logits, target)


class Apart(FedAvg):
    """Its loss has a term across samples that vanishes at the received weights."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("start", torch.zeros(HIDDEN, FEATURES), persistent=False)

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.start.copy_(self.net.features[0].weight)

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        moved = F.linear(batch[0], self.net.features[0].weight - self.start)
        return {"loss": values["loss"] + moved.sum(0).square().sum()}


class Tiny(FedAvg):
    """Its loss has a small term across samples."""

    def loss(self, features, logits, target):
        return super().loss(features, logits, target) + 1e-4 * features.std(0, correction=0).sum()


class Logged(FedAvg):
    """Its loss is a mean; what it logs isn't."""

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        return values | {"all": batch[0].sum().to(values["loss"])}


class Later(FedAvg):
    """Its loss has a term across samples in later batches of a round."""

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        return values if batch_idx < 5 else {"loss": values["loss"] + self.net(batch[0]).sum(0).square().sum()}


class Counting(FedAvg):
    """Counts its steps in a buffer, and has another mean over samples in later batches of a round."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        values = super().training_step(batch, batch_idx)
        self.steps.add_(1)
        return values if batch_idx < 5 else {"loss": values["loss"] + self.net(batch[0]).square().mean()}


def test_other_means_in_later_batches_stay_at_once(used):
    compare(Counting)
    assert used["padded"] and not used["padding"].refused


def test_means_over_samples_need_not_end_the_loss(used):
    compare(Centred)
    assert used["padded"] and not used["padding"].refused


@pytest.mark.parametrize("name", Named.losses)
def test_torch_s_losses(used, name):
    compare(partial(Named, name), max_rounds=1)
    # a sum has no mean to weigh, and a mean by weights of classes other weights than the samples'
    assert used["padding"].refused == ({"train"} if name in ("summed", "weighted") else set())


@pytest.mark.parametrize("method", [Spread, Apart, Tiny, Logged, Later])
def test_what_isn_t_a_mean_over_samples_is_found(used, method):
    compare(method, max_rounds=3)
    assert used["padding"].refused == {"train"}


def test_a_squared_loss_is_that_of_the_batch(used):
    model = make_client()
    model.requested = frozenset({"loss_squared"})
    work, found = LocalWork(2, batch_size=5), []
    data = blobs(*SIZES, **WHOLE)
    data.setup()
    jobs = [
        Job(k, 0, ClientState(), {"weights": detached(model.state_dict())}, data.client(k), seed=k)
        for k in range(len(SIZES))
    ]
    for engine in (Sequential, Vectorised):
        found.append([outcome.metrics for outcome in engine(model, work, Precision()).run(jobs)])
    assert used["padded"]
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_task_that_counts_otherwise_than_by_samples_is_not_padded():
    model = make_client()
    assert gradients.Padding(model, Precision()).possible
    model.task = NextToken(CLASSES)
    assert not gradients.Padding(model, Precision()).possible


def test_rounds_need_a_computation_a_step(used):
    runs = {}
    for sizes in ((20, 20, 20, 20, 20), (16, 17, 18, 19, 20)):
        used["mapped"] = used["padded"] = 0
        runs[sizes] = fit(make_client(), blobs(*sizes, **WHOLE), engine=Vectorised, max_rounds=4, local_epochs=1)
        # four steps of a round; the ragged ones are checked once a round, and by each size in the first three rounds
        checks = 0 if sizes[0] == 20 else 3 * 5 + 2
        assert used["mapped"] + used["padded"] == 4 * 4 + 2 * checks


def test_a_run_resumes_bit_for_bit(tmp_path):
    settings = {"clients_per_round": 4, "local_epochs": 2, "engine": "vectorised"}
    made = partial(make_client, net=dropping)
    whole = fit(made(), blobs(*SIZES, **WHOLE), root=tmp_path / "whole", max_rounds=5, **settings)
    half = fit(made(), blobs(*SIZES, **WHOLE), root=tmp_path / "half", max_rounds=3, **settings)
    rest = fit(made(), blobs(*SIZES, **WHOLE), root=tmp_path / "half", max_rounds=5, ckpt_path=half.last, **settings)
    assert equal(dict(whole.weights), dict(rest.weights))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lower_precisions(used, precision):
    compare(tolerance=1e-4 if precision == "32-true" else 0.05, precision=precision)
    assert used["padded"] and not used["padding"].refused


def test_frozen_layers_are_checked_in_their_own_type(used):
    def frozen(input_shape, num_classes):
        net = plain(input_shape, num_classes)
        net.features.requires_grad_(False)
        return net

    compare(made={"net": frozen}, precision="32-true", tolerance=1e-5)
    assert used["padded"] and not used["padding"].refused


def test_a_single_sample_s_net(used):
    """A client of one sample in a federation of such."""
    compare(Local, data=partial(blobs, 1, 2, 1, 3, **WHOLE))
    assert not used["padding"].refused
