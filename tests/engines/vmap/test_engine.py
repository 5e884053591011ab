import copy
import gc
import importlib
import pkgutil
import weakref
from functools import partial

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from federations import (
    CLASSES,
    FEATURES,
    HIDDEN,
    Blobs,
    blobs,
    equal,
    fit,
    make_client,
    noisy,
    plain,
    points,
    same_end,
    untimed,
)
from pfl_lightning import methods
from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.phases import Phase
from pfl_lightning.data import ClientData, Samples
from pfl_lightning.engines import ClientState, Job, LocalWork, Sequential
from pfl_lightning.engines.vmap import engine as vectorised
from pfl_lightning.engines.vmap import evaluator
from pfl_lightning.engines.vmap.block_io import BlockIO
from pfl_lightning.engines.vmap.dropout import Streams
from pfl_lightning.engines.vmap.engine import Unvectorisable, Vectorised
from pfl_lightning.engines.vmap.training import BlockTrainer
from pfl_lightning.messages import detached, keep_own, tensors
from pfl_lightning.methods import WDR, Ditto, FedFomo, FedPer, FedProx, FedRoD, KNNPer, Local, PerFedAvg
from pfl_lightning.methods.fedavg import FedAvg
from pfl_lightning.nets import Net
from sweeps import swept

RAGGED = (24, 7, 30, 20, 16)
DOUBLE = {"precision": "64-true"}


def blocks(size):
    """The engine with blocks of a size."""

    class Blocks(Vectorised):
        def __init__(self, *args):
            super().__init__(*args, block_size=size)

    return Blocks


def assert_near(one, other, tolerance):
    """Two runs end with the same model, federation and record, up to rounding."""
    ends = [list(tensors([dict(run.weights), run.federation.federation_state()])) for run in (one, other)]
    assert len(ends[0]) == len(ends[1]) > 0
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert [row["cohort"] for row in one.rows] == [row["cohort"] for row in other.rows]
    for a, b in zip(untimed(one.rows), untimed(other.rows), strict=True):
        del a["cohort"], b["cohort"]
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance, nan_ok=True)


def compare(method=FedAvg, tolerance=1e-9, engine=Vectorised, data=None, settings=None, **trainer):
    """Runs a federation by both engines."""
    trainer = {**DOUBLE, "local_epochs": 2, **trainer} if tolerance < 1e-6 else {"local_epochs": 2, **trainer}
    make_data = data or partial(blobs, *RAGGED)
    settings = settings or {"net": noisy}
    runs = [fit(make_client(method, **settings), make_data(), engine=e, **trainer) for e in (Sequential, engine)]
    assert_near(*runs, tolerance)
    return runs


# Equality


@pytest.mark.parametrize("method", [FedAvg, partial(FedProx, mu=0.1), FedPer, Local, WDR])
@pytest.mark.parametrize(("net", "tolerance", "precision"), [(noisy, 1e-9, "64-true"), (plain, 1e-4, "32-true")])
@pytest.mark.by_default("plain-0.0001-32-true-Local", "noisy-1e-09-64-true-FedAvg", "plain-0.0001-32-true-WDR")
def test_three_rounds_are_the_sequential_engine_s(method, net, tolerance, precision):
    compare(method, tolerance, settings={"net": net}, precision=precision)


REFUSED = {
    "KnowledgeTransfer": "a phase with samples of its own",
    "FedMD": "a phase with samples of its own",
}
# a bias before BatchNorm has gradients of nothing but rounding, by which FedCAC's masks and FedFed's Adam would differ
SETTINGS = {
    "FedClassAvg": {"contrastive": False},
    "FedCAC": {"net": plain},
    "FedFed": {"net": plain, "distill_rounds": 1},
}


def client_modules():
    """Every client module among the methods, by name."""
    found = {}
    for file in pkgutil.iter_modules(methods.__path__):
        module = importlib.import_module(f"{methods.__name__}.{file.name}")
        found |= {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, ClientModule)
            and value.__module__ == module.__name__
            # else it is a part of others
            and value.configure_aggregator is not ClientModule.configure_aggregator
        }
    return found


SOME = {"WDR", "Ditto", "MOON", "PACClient", "FedBABU", "FedDyn", "APPLE", *REFUSED}


@pytest.mark.parametrize(
    ("tolerance", "precision"),
    [pytest.param(1e-9, "64-true"), pytest.param(1e-4, "32-true", marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("name", swept(sorted(client_modules()), SOME, str))
@pytest.mark.by_default("KnowledgeTransfer-1e-09-64-true", "PACClient-1e-09-64-true", "Ditto-1e-09-64-true")
def test_methods_give_what_they_give_one_client_at_a_time_or_are_refused(name, tolerance, precision):
    settings = {"net": noisy, **SETTINGS.get(name, {})}
    method = client_modules()[name]
    run = partial(compare, method, tolerance, settings=settings, clients_per_round=4, precision=precision)
    if name not in REFUSED:
        run()
        return
    with pytest.raises(MisconfigurationException, match=rf"'vectorised' can't run {name}: .*{REFUSED[name]}"):
        run()


def test_both_sides_of_a_difference_drop_the_same_units():
    compare(partial(PerFedAvg, variant="HF", alpha=0.1), data=partial(blobs, *RAGGED, batch_size=8))


@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": 5, "local_epochs": None},
        {"clients_per_round": 2, "max_rounds": 4},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"evaluate": "both", "max_rounds": 2},
    ],
)
def test_the_trainer_s_settings_hold(settings):
    compare(**settings)


@pytest.mark.parametrize("last_batch", ["drop", "wrap"])
@pytest.mark.by_default("drop")
def test_last_batches_are_the_sequential_engine_s(last_batch):
    compare(data=partial(blobs, *RAGGED, last_batch=last_batch))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.by_default("1")
def test_blocks_may_be_smaller_than_the_cohort(size):
    compare(engine=blocks(size))


@pytest.mark.parametrize("sizes", [(16, 3, 21), (3, 3), (12, 12, 12)])
@pytest.mark.by_default("sizes1")
def test_clients_without_a_batch_and_clients_of_one_size(sizes):
    compare(data=partial(blobs, *sizes))


OPTIMIZERS = [
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    partial(Adam, lr=0.01, amsgrad=True),
    partial(AdamW, lr=0.01, weight_decay=0.1),
    partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
    partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
    partial(Adadelta, lr=0.5),
    partial(NAdam, lr=0.01),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.by_default("optimizer4", "optimizer7", "optimizer0")
def test_an_optimizer_of_all_does_what_one_a_client_does(optimizer):
    halving = partial(ExponentialLR, gamma=0.5)
    settings = {"optimizer": optimizer, "optimizer_lifetime": "run", "lr_scheduler": halving}
    # without BatchNorm, before which biases have gradients of nothing but rounding, that some optimizers scale up;
    # clients come back after different numbers of steps
    compare(FedPer, settings=settings, clients_per_round=3)


@pytest.mark.parametrize(("first", "second"), [(Sequential, Vectorised), (Vectorised, Sequential)])
@pytest.mark.by_default("Sequential-Vectorised")
def test_a_run_goes_on_under_the_other_engine(tmp_path, first, second):
    settings = {"net": noisy, "optimizer_lifetime": "run", "optimizer": partial(Adam, lr=0.01)}
    whole = fit(make_client(FedPer, **settings), blobs(*RAGGED), tmp_path / "whole", **DOUBLE)
    begun = fit(make_client(FedPer, **settings), blobs(*RAGGED), tmp_path, engine=first, max_rounds=2, **DOUBLE)
    model = make_client(FedPer, **settings)
    resumed = fit(model, blobs(*RAGGED), tmp_path, engine=second, ckpt_path=str(begun.last), **DOUBLE)
    assert_near(whole, resumed, 1e-9)


def test_the_same_seed_gives_the_same_bits():
    first, second = (fit(make_client(net=noisy), blobs(*RAGGED), engine=Vectorised) for _ in range(2))
    assert same_end(first, second)


def test_outcomes_come_in_the_order_of_tasks_whatever_it_is():
    ends = []
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        outcomes = list(engine(Vectorised, net=noisy).run(make_tasks(order)))
        assert [outcome.client for outcome in outcomes] == order
        ends.append({outcome.client: outcome.state.personal for outcome in outcomes})
    for client, personal in ends[0].items():
        for name, tensor in personal.items():
            torch.testing.assert_close(ends[1][client][name], tensor, atol=1e-5, rtol=1e-4)


def make_tasks(order=range(5)):
    data = blobs(*RAGGED)
    data.setup()
    start = ClientState(detached(make_client(Local, net=noisy).state_dict()))
    return [Job(k, 0, start, {}, data.client(k), seed=k) for k in order]


def engine(cls=Vectorised, method=Local, precision=None, **settings):
    return cls(make_client(method, **settings), LocalWork(batch_size=5), precision or Precision())


def test_an_engine_does_not_change_what_it_is_given():
    jobs = make_tasks()
    before = detached([job.state.personal for job in jobs])
    outcomes = list(engine(net=noisy).run(jobs))
    for one, other in zip(tensors(before), tensors([job.state.personal for job in jobs]), strict=True):
        assert torch.equal(one, other)
    assert all(outcome.seconds > 0 for outcome in outcomes)


def test_a_client_that_diverges_takes_nobody_with_it():
    class Far(Blobs):
        def load(self):
            x, y = points(120, seed=0)
            x[1] = 1e9
            return x, y

    class Diverges(FedAvg):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            return {"loss": torch.where(batch[0].amax() > 1e8, torch.nan, loss)}

    with pytest.warns(UserWarning, match="left out of the aggregation"):
        runs = compare(Diverges, data=partial(blobs, *RAGGED, 20, data=Far))
    assert [row["clients_diverged"] for row in runs[1].rows] == [1, 1, 1]


def test_mixed_precision_is_the_forward_pass_s():
    compare(tolerance=0.05, precision="bf16-mixed", settings={"net": plain})


# What methods may do


class Unused(FedAvg):
    """Has a parameter that no loss reaches: it must not decay."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net.idle = nn.Parameter(torch.ones(3))


class Tied(Net):
    def __init__(self, input_shape, num_classes):
        first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        second.weight = first.weight
        super().__init__(nn.Sequential(first, nn.Tanh(), second), nn.Linear(FEATURES, num_classes))


class Scalar(Net):
    """With a parameter without dimensions."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, num_classes))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.classifier.register_forward_hook(lambda module, args, output: output * self.scale)


class Replacing(FedAvg):
    """Puts what it receives into a buffer as it is."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("received", None, persistent=False)

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.received = payload["weights"]["net.classifier.bias"].to(self.device)

    def loss(self, features, logits, target):
        self.received.add_(0.5)
        return super().loss(features, logits + self.received, target)


@pytest.mark.parametrize("settings", [{"net": Tied}, {"net": Scalar}, {"net": Scalar, "optimizer_lifetime": "run"}])
@pytest.mark.by_default("settings0")
def test_nets_may_share_tensors_and_have_scalars(settings):
    compare(settings={"optimizer": partial(Adam, lr=0.01), **settings}, gradient_clip_val=0.5)


def test_a_parameter_that_the_loss_does_not_reach_stands_still():
    decaying = {"optimizer": partial(SGD, lr=0.1, weight_decay=0.1)}
    _, run = compare(Unused, settings=decaying)
    assert torch.equal(run.weights["net.idle"], torch.ones(3, dtype=torch.float64))


def test_clients_may_have_different_nets():
    class Wide(Net):
        def __init__(self, input_shape, num_classes):
            super().__init__(nn.Linear(FEATURES, 9), nn.Linear(9, num_classes))

    compare(Local, settings={"net": [plain, Wide]})


# Dropout


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.Dropout1d(0.4), nn.Dropout(0.4, inplace=True), nn.Dropout(0.0)])
def test_dropout_is_drawn_from_each_client_s_own_stream(layer):
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2, 1)]
    streams = Streams(torch.default_generator, states)
    x = torch.randn(3, 2, 4, 6)
    with torch.random.fork_rng():
        with streams:
            # the same again after winding back, and then on
            with torch.random.fork_rng():
                wound = torch.func.vmap(layer)(x.clone())
            once = torch.func.vmap(layer)(x.clone())
            twice = torch.func.vmap(layer)(x.clone())
        for row, seed in enumerate((1, 2, 1)):
            torch.manual_seed(seed)
            assert torch.equal(once[row], layer(x[row].clone()))
            assert torch.equal(twice[row], layer(x[row].clone()))
            assert torch.equal(streams.states[row], torch.default_generator.get_state())
        assert torch.equal(wound, once)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(2, 3) * x.sum(),
        lambda x: torch.randn(3) * x.sum(),
        lambda x: torch.randint(7, (5,)) + 0 * x.sum(),
        lambda x: F.gumbel_softmax(x, tau=0.5, dim=-2),
        lambda x: F.gumbel_softmax(x, hard=True),
    ],
)
def test_random_numbers_are_drawn_from_each_client_s_own_stream(draw):
    seeds = (1, 2, 1)
    streams = Streams(torch.default_generator, [torch.Generator().manual_seed(seed).get_state() for seed in seeds])
    x = torch.randn(3, 4, 6)

    def step(row):
        streams.trained = [row]
        return draw(row), draw(row)

    with torch.random.fork_rng():
        with streams:
            drawn = torch.func.vmap(step)(x)
        for row, seed in enumerate(seeds):
            torch.manual_seed(seed)
            for values in drawn:
                torch.testing.assert_close(values[row], draw(x[row]))
            assert torch.equal(streams.states[row], torch.default_generator.get_state())


def test_gumbel_softmax_has_the_gradient_of_each_client():
    x = torch.randn(2, 4)
    streams = Streams(torch.default_generator, [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)])

    def of_one(row):
        return (F.gumbel_softmax(row, hard=True) * torch.arange(4)).sum()

    with torch.random.fork_rng():
        rows = x.clone().requires_grad_()
        with streams:
            torch.func.vmap(of_one)(rows).sum().backward()
        for row, seed in enumerate((1, 2)):
            torch.manual_seed(seed)
            alone = x[row].clone().requires_grad_()
            of_one(alone).backward()
            torch.testing.assert_close(rows.grad[row], alone.grad)


def test_dropout_does_not_draw_in_evaluation():
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    x = torch.randn(2, 5)
    with torch.random.fork_rng(), Streams(torch.default_generator, states):
        assert torch.equal(torch.func.vmap(lambda row: F.dropout(row, 0.5, training=False))(x), x)


# Refusals


class Values(FedAvg):
    def loss(self, features, logits, target):
        loss = super().loss(features, logits, target)
        return loss * 2 if loss > 1 else loss


class Draws(FedAvg):
    def loss(self, features, logits, target):
        return super().loss(features, logits + torch.randn_like(logits), target)


class OwnNumber(FedAvg):
    def loss(self, features, logits, target):
        return super().loss(features, logits, target) * (1 + self.client_id)


class Counting(FedAvg):
    caches = frozenset({"sizes"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sizes = []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[1]))
        return super().training_step(batch, batch_idx)


class InPlace(FedAvg):
    """Keeps something in a container that stays the same object."""

    caches = frozenset({"seen"})

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = {}

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.seen["samples"] = len(data.train)


class Assigning(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("mean", torch.zeros(CLASSES))

    def loss(self, features, logits, target):
        self.mean = 0.9 * self.mean + logits.detach().mean(0)
        return super().loss(features, logits, target)


class Cached(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.list = list(self.net.parameters())


class PhasesByData(FedAvg):
    def local_phases(self):
        return [Phase(steps=1 + self.client_id)]


class ShapesByClient(FedAvg):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("samples", None, persistent=False)

    def on_download(self, payload, data):
        super().on_download(payload, data)
        self.samples = data.train.x


class Newton(FedAvg):
    def local_optimizer(self, phase, parameters):
        return LBFGS(parameters)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (Values, r"data-dependent control flow \(test_engine\.py, line \d+\)"),
        (Draws, "random operation"),
        (OwnNumber, "no attribute 'client_id'"),
        (Counting, r"its steps change Counting\.sizes"),
        (InPlace, r"client data in InPlace\.seen"),
        (Assigning, "replaces a buffer"),
        (Cached, r"Cached\.list holds parameters"),
        (PhasesByData, r"different local_phases\(\)"),
        (ShapesByClient, "different shapes"),
        (Newton, "a LBFGS of many clients"),
    ],
)
def test_what_would_go_wrong_is_refused_in_one_sentence(method, reason):
    with pytest.raises(
        MisconfigurationException, match=rf"can't run {method.__name__}: .*{reason}.*; take engine='sequential'\.$"
    ):
        fit(make_client(method), engine=Vectorised)


@pytest.mark.parametrize("evaluate", ["before", "both"])
def test_a_cache_that_steps_do_not_read_is_each_client_s_own(evaluate):
    """kNN-Per evaluates by the features of the client's own samples, FedFomo sends what it made of models."""
    for method in (KNNPer, FedFomo):
        alone, many = (
            fit(make_client(method), blobs(*RAGGED, val_fraction=0.2), engine=engine, evaluate=evaluate, **DOUBLE)
            for engine in (Sequential, Vectorised)
        )
        assert_near(alone, many, 1e-9)


@pytest.mark.parametrize("default", [{}, {"factor": 1.0}])
def test_a_cache_that_steps_read_is_refused(default):
    class Reads(type("Defaults", (FedAvg,), default)):
        caches = frozenset({"factor"})

        def on_download(self, payload, data):
            super().on_download(payload, data)
            self.factor = float(len(data.train))

        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx)["loss"] / self.factor}

    with pytest.raises(Unvectorisable, match=r"can't run Reads: .* Reads\.factor, which"):
        fit(make_client(Reads), engine=Vectorised)


def test_a_refusal_leaves_the_module_as_the_sequential_engine_needs_it():
    model = make_client(OwnNumber)
    data = blobs()
    data.setup()
    payload = {"weights": detached(model.state_dict())}
    jobs = [Job(k, 0, ClientState(), payload, data.client(k), seed=k) for k in range(3)]
    first = list(Sequential(model, LocalWork(), Precision()).run(jobs))
    with pytest.raises(Unvectorisable):
        list(Vectorised(model, LocalWork(), Precision()).run(jobs))
    again = list(Sequential(model, LocalWork(), Precision()).run(jobs))
    for one, other in zip(first, again, strict=True):
        assert all(map(torch.equal, tensors(one.update), tensors(other.update)))


def test_a_buffer_that_a_hook_replaces_is_not_written_back_into_the_payload():
    model = make_client(Replacing)
    data = blobs()
    data.setup()
    payload = {"weights": detached(model.state_dict())}
    before = detached(payload)
    outcomes = list(
        Vectorised(model, LocalWork(batch_size=5), Precision()).run(
            [Job(k, 0, ClientState(), payload, data.client(k), seed=k) for k in range(4)]
        )
    )
    assert len(outcomes) == 4
    assert all(map(torch.equal, tensors(before), tensors(payload)))


# Evaluation


class ByValue(FedAvg):
    def forward(self, x):
        logits = super().forward(x)
        return logits * 2 if logits.sum() > 0 else logits


class ByClient(FedAvg):
    def forward(self, x):
        return super().forward(x) + self.client_id * torch.arange(CLASSES)


class Confusing(FedAvg):
    """With a metric that isn't a number of right ones over all."""

    def configure_metrics(self):
        f1 = MulticlassF1Score(CLASSES, average="macro")
        return MetricCollection({"acc": MulticlassAccuracy(CLASSES, average="micro"), "f1": f1})


def unnormalised(input_shape, num_classes):
    norm = nn.BatchNorm1d(HIDDEN, track_running_stats=False)
    return Net(nn.Sequential(nn.Linear(FEATURES, HIDDEN), norm, nn.Tanh()), nn.Linear(HIDDEN, num_classes))


class TestOnly:
    """A source of samples whose only client has three to be tested on."""

    __test__ = False
    num_classes = CLASSES

    def parts(self, clients, split, device="cpu"):
        return [Samples(*(t[: self.size(client, split)] for t in points(9, seed=1))) for client in clients]

    def size(self, client, split):
        return 3 * (split == "test")


def evaluated(model, cls, clients=range(5), **settings):
    """What an engine says of clients with models of their own and parts of different sizes, one without one of them."""
    # engines leave a client behind in theirs
    model = copy.deepcopy(model)
    data = blobs(*RAGGED, test_fraction=0.4, val_fraction=0.5)
    data.setup()
    parts = [data.client(k) for k in range(len(RAGGED))]
    parts[1] = ClientData(TestOnly(), 0)
    torch.manual_seed(7)
    jobs = []
    for k in range(len(RAGGED)):
        # near 1, as variances must be positive
        own = {name: t * (1 + 0.5 * torch.rand(t.shape)) for name, t in detached(model.state_dict()).items()}
        personal = {name: t for name, t in own.items() if model.is_personal(name)}
        payload = {"weights": {name: t for name, t in own.items() if model.is_shared(name)}}
        jobs.append(Job(k, 0, ClientState(personal), payload, parts[k], seed=k, evaluate=("val", "test")))
    engine = cls(model, LocalWork(batch_size=5), Precision(), **settings)
    with torch.no_grad():
        together = list(engine.evaluate_all(jobs[k] for k in clients))
    return [(k, each.metrics(k)) for each in together for k in each.clients]


def same_values(one, other):
    """Equal accuracies, and the rest up to rounding."""
    assert [client for client, _ in one] == [client for client, _ in other]
    for (_, first), (_, second) in zip(one, other, strict=True):
        assert first.keys() == second.keys()
        for part, values in first.items():
            assert list(values) == list(second[part])
            assert values["acc"] == second[part]["acc"]
            assert values == pytest.approx(second[part], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "net"),
    [(FedAvg, plain), (FedAvg, noisy), (FedPer, noisy), (partial(FedProx, mu=1.0), noisy), (Confusing, plain)],
)
@pytest.mark.parametrize("size", [None, 2])
def test_clients_are_scored_at_once_as_one_by_one(monkeypatch, method, net, size):
    # none is left for a block of its own
    model, clients = make_client(method, net=net), [4, 1, 0, 2]
    expected = evaluated(model, Sequential, clients)
    assert len({values["test"]["loss"] for _, values in expected}) == 4
    assert [list(values) for _, values in expected] == [["val", "test"], ["test"], ["val", "test"], ["val", "test"]]
    alone = []
    monkeypatch.setattr(Sequential, "evaluate", lambda self, job: alone.append(job.client))
    same_values(evaluated(model, Vectorised, clients, block_size=size), expected)
    assert not alone


@pytest.mark.parametrize("method", [Ditto, FedRoD])
def test_clients_with_and_without_a_personal_net_are_scored_in_groups(monkeypatch, method):
    run = partial(fit, data=blobs(*RAGGED, val_fraction=0.2), clients_per_round=2, max_rounds=2)
    expected = run(make_client(method))
    alone, evaluate = [], Sequential.evaluate
    monkeypatch.setattr(Sequential, "evaluate", lambda self, job: alone.append(job.client) or evaluate(self, job))
    found = run(make_client(method), engine="vectorised")
    has = [bool(found.federation.job(client).state.personal.get("has_personal")) for client in range(len(RAGGED))]
    assert len(set(has)) == 2 and not alone
    for one, other in zip(found.rows, expected.rows, strict=True):
        assert one["val/loss"] == pytest.approx(other["val/loss"], rel=1e-5) and one["val/acc"] == other["val/acc"]


@pytest.mark.parametrize(
    ("method", "net"), [(ByValue, plain), (ByClient, plain), (Cached, plain), (FedAvg, unnormalised)]
)
def test_what_cannot_be_scored_at_once_is_scored_one_by_one(method, net):
    model = make_client(method, net=net)
    assert evaluated(model, Vectorised) == evaluated(model, Sequential)


def test_an_adapted_model_is_scored_after_its_phases():
    model = make_client(partial(PerFedAvg, alpha=0.1))
    expected = evaluated(model, Sequential)
    assert evaluated(model, Vectorised) == expected
    assert all("test_received" in values for _, values in expected)


def test_large_parts_go_through_the_net_in_pieces(monkeypatch):
    model = make_client()
    expected = evaluated(model, Sequential)
    monkeypatch.setattr(evaluator, "rows_at_once", lambda task, target: 4)
    monkeypatch.setattr(evaluator, "CLIENTS", 4)
    seen = []
    forward = FedAvg.forward
    monkeypatch.setattr(FedAvg, "forward", lambda self, x: seen.append(len(x)) or forward(self, x))
    same_values(evaluated(model, Vectorised), expected)
    assert max(seen) == 4


@pytest.mark.parametrize("most", [1, 20, 1000])
def test_each_row_is_scored_once_and_with_rows_like_it(most):
    sizes = [7, 0, 1, 30, 29, 2, 7, 15, 0, 14]
    groups = list(evaluator.rows_alike(sizes, most))
    assert sorted(row for group in groups for row in group) == [0, 2, 3, 4, 5, 6, 7, 9]
    for group in groups:
        longest = max(sizes[row] for row in group)
        assert longest <= 2 * min(sizes[row] for row in group)
        assert len(group) == 1 or len(group) * longest <= most


# Hand-over


@pytest.mark.parametrize("method", [FedAvg, FedPer])
def test_who_keeps_a_tensor_of_a_client_keeps_no_others(method):
    model = make_client(method, net=noisy)
    state = detached(model.state_dict())
    data = blobs(*RAGGED)
    data.setup()
    jobs = [Job(k, 0, ClientState(state), {"weights": state}, data.client(k), seed=k) for k in range(5)]
    outcomes = list(Vectorised(model, LocalWork(batch_size=5), Precision()).run(jobs))
    updates = {outcome.client: outcome.update for outcome in outcomes}
    # a server that keeps what it is sent in all ways that there are
    kept = {
        "whole": {k: update["weights"] for k, update in updates.items()},
        "listed": [next(iter(update["weights"].values())) for update in updates.values()],
        "pairs": tuple(dict(update["weights"]) for update in updates.values()),
    }
    before = detached(kept)
    keep_own(kept, updates)
    assert equal(kept, before) and all(type(value) is dict for value in kept["whole"].values())
    given = list(tensors([kept, [outcome.state.personal for outcome in outcomes]]))
    assert all(t.untyped_storage().nbytes() == t.nbytes and not t.requires_grad for t in given)
    assert len({t.data_ptr() for t in given}) == len(given)


# Memory


def test_where_memory_is_short_clients_run_one_by_one(monkeypatch):
    monkeypatch.setattr(vectorised, "free_memory", lambda device: 0)
    runs = [fit(make_client(net=noisy), engine=e) for e in (Sequential, Vectorised)]
    assert same_end(*runs)


def short_of_memory(monkeypatch, cls, method, most, size_of):
    """A method that runs out of memory for more than ``most[0]`` clients; returns how many it was tried with."""
    tried, whole = [], getattr(cls, method)

    def short(self, first, *args, **settings):
        tried.append(size_of(first))
        if tried[-1] > most[0]:
            raise torch.cuda.OutOfMemoryError
        return whole(self, first, *args, **settings)

    monkeypatch.setattr(cls, method, short)
    return tried


def test_a_block_that_does_not_fit_is_halved_and_comes_back(monkeypatch):
    monkeypatch.setattr(vectorised, "CALM", 2)
    tried = short_of_memory(monkeypatch, BlockTrainer, "train", [3], lambda block: len(block.members))
    _, run = compare(max_rounds=4)
    # a block of three and one of two, for two rounds; then five again
    assert tried == [5, 3, 2, 3, 2, 3, 2, 5, 3, 2]
    assert [engine.fitting for engine in run.federation.engines] == [3]


def test_so_is_one_whose_updates_do_not_fit(monkeypatch):
    tried, whole = [], BlockIO._upload_at_once

    def short(self, names, block):
        tried.append(len(block.members))
        if tried[-1] > 3:
            raise torch.cuda.OutOfMemoryError
        return whole(self, names, block)

    monkeypatch.setattr(BlockIO, "_upload_at_once", short)
    compare(max_rounds=1)
    assert tried == [5, 3, 2]


def test_halves_of_halves_train_each_client_once(monkeypatch):
    tried = short_of_memory(monkeypatch, BlockTrainer, "train", [2], lambda block: len(block.members))
    clients = []
    train = Sequential.train
    monkeypatch.setattr(Sequential, "train", lambda self, job, *args: clients.append(job) or train(self, job, *args))
    fit(make_client(), blobs(*RAGGED), engine=Vectorised, max_rounds=1)
    assert tried == [5, 3, 2, 2] and len(clients) == 1


def test_of_a_block_that_does_not_fit_nothing_stays_in_memory(monkeypatch):
    blocks, kept, train = [], [], BlockTrainer.train

    def short(self, block, *args):
        kept.append([size for size, reference in blocks if reference() is not None])
        blocks.append((len(block.members), weakref.ref(block)))
        if len(block.members) > 2:
            raise torch.cuda.OutOfMemoryError
        return train(self, block, *args)

    monkeypatch.setattr(BlockTrainer, "train", short)
    # where a GPU is full, cycles of references aren't looked for in time
    gc.disable()
    try:
        fit(make_client(), blobs(*RAGGED), engine=Vectorised, max_rounds=1)
    finally:
        gc.enable()
    # outcomes of the last two keep what was sent, and no block
    assert [size for size, _ in blocks] == [5, 3, 2, 2] and kept == [[]] * 4


def rows_of(entries):
    return len(next(iter(entries.values())))


def test_memory_that_is_short_in_evaluation_halves_what_is_scored_at_once(monkeypatch):
    model, most = make_client(net=noisy), [2]
    expected = evaluated(model, Sequential)
    tried = short_of_memory(monkeypatch, evaluator.BlockEvaluator, "_forward", most, rows_of)
    alone = []
    evaluate = Sequential.evaluate
    monkeypatch.setattr(Sequential, "evaluate", lambda self, job: alone.append(job.client) or evaluate(self, job))
    same_values(evaluated(model, Vectorised), expected)
    assert max(tried) > 2 and not alone
    # for one at a time too: client by client
    most[0] = 0
    same_values(evaluated(model, Vectorised), expected)
    assert len(alone) == len(expected)


def test_memory_that_was_short_in_evaluation_does_not_end_scoring_at_once(monkeypatch):
    most = [0]
    tried = short_of_memory(monkeypatch, evaluator.BlockEvaluator, "_forward", most, rows_of)
    _, run = compare(FedPer, max_rounds=2)
    assert run.federation.engines[0].evaluator.usable
    most[0] = 5
    tried.clear()
    compare(FedPer, max_rounds=2)
    assert set(tried) > {1}


def test_clients_to_be_scored_that_do_not_fit_are_halved(monkeypatch):
    model = make_client(net=noisy)
    expected = evaluated(model, Sequential)
    tried = short_of_memory(monkeypatch, BlockIO, "receive", [2], len)
    same_values(evaluated(model, Vectorised), expected)
    assert tried[0] > 2 >= tried[-1]


def test_one_client_that_does_not_fit_is_told_as_that(monkeypatch):
    def forward(self, x):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    model = make_client()
    monkeypatch.setattr(FedAvg, "forward", forward)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        evaluated(model, Vectorised)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="CUDA out of memory"):
        fit(make_client(), engine=Vectorised)
