"""Runs of the methods beside their published algorithms, written by hand and replayed on the batches of the run.

A replay is a function below a `@replays`, which names the method and its settings. It is plain arithmetic on weights in
float64, and shares no code with the method. Five clients of unequal size, each without one of the three classes, make
four rounds of three clients; one of them never takes part, and one comes back after a round without it. Models are flat
vectors w of one net's weights. In a round the server sends x, and the model of client k after its training is y[k].

Docstrings name the differences from the official code: the replay then does as the method's own docstring says.
"""

import copy
import itertools
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from federations import CLASSES, FEATURES, HIDDEN, Blobs, fit, make_client, plain, points
from pfl_lightning import WeightedAverage
from pfl_lightning import aggregators as servers
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import Partitioner
from pfl_lightning.nets import Net
from pfl_lightning.seeds import derive_seed

LR = 0.1
CLIENTS = (24, 14, 38, 29, 19)
"""Samples of each client, a quarter of which it is tested on."""


class Lacking(Partitioner):
    """Give client k no sample of class k modulo their number, and more of the later one of the two others."""

    def split(self, classes, num_clients, rng):
        pools = [list(rng.permutation(rows)) for rows in classes]
        parts = []
        for client, size in enumerate(CLIENTS):
            few, many = (pool for c, pool in enumerate(pools) if c != client % len(pools))
            parts.append([(few if row < size // 3 else many).pop() for row in range(size)])
        return parts


class Unequal(Blobs):
    def load(self):
        return points(240, seed=0)


# The net, as a function of its weights

BODY, HEAD = slice(0, HIDDEN * (FEATURES + 1)), slice(HIDDEN * (FEATURES + 1), None)


def split(w):
    """Return matrix and bias of the body, and of the classifier."""
    sizes = [HIDDEN * FEATURES, HIDDEN, CLASSES * HIDDEN, CLASSES]
    a, b, c, d = w.split(sizes)
    return a.view(HIDDEN, FEATURES), b, c.view(CLASSES, HIDDEN), d


def features(w, x):
    a, b, _, _ = split(w)
    return torch.tanh(x @ a.T + b)


def classify(w, h):
    _, _, c, d = split(w)
    return h @ c.T + d


def logits(w, x):
    return classify(w, features(w, x))


def cross_entropy(w, x, y):
    return F.cross_entropy(logits(w, x), y)


# Local training


def slope(loss, w, *given):
    """Return the gradient of a loss(w, *given) in w."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(loss(w, *given), w)[0]


def sgd(w, batches, loss=cross_entropy, *given, lr=LR, part=slice(None)):
    """Descend by the gradients of a loss(w, x, y, *given) in all weights or, if a part is named, in these alone."""
    for x, y in batches:
        step = torch.zeros_like(w)
        step[part] = lr * slope(loss, w, x, y, *given)[part]
        w = w - step
    return w


def step(p, lr, loss, *given):
    """Make one step of gradient descent by a loss(p, *given) of weights by name."""
    p = {name: t.detach().requires_grad_() for name, t in p.items()}
    slopes = torch.autograd.grad(loss(p, *given), list(p.values()))
    return {name: t.detach() - lr * g for (name, t), g in zip(p.items(), slopes, strict=True)}


def linear(p, layer, h):
    return h @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]


def layer_norm(p, layer, h):
    return F.layer_norm(h, h.shape[-1:], p[f"{layer}.weight"], p[f"{layer}.bias"])


def mean(models, n=None):
    """Return the mean of models by client id, weighted by their samples n or, without these, plain."""
    first = next(iter(models.values()))
    if isinstance(first, dict):
        return {name: mean({k: model[name] for k, model in models.items()}, n) for name in first}
    weights = torch.tensor([1.0 if n is None else n[k] for k in models], dtype=torch.float64)
    return torch.tensordot(weights / weights.sum(), torch.stack(list(models.values())), 1)


def kl(teacher, student):
    """Return the mean over rows of KL(softmax(teacher) || softmax(student)); the teacher is a constant."""
    p = teacher.detach().softmax(1)
    return (p * (p.log() - student.log_softmax(1))).sum(1).mean()


def drawn(random, draw, *given):
    """Call draw(*given) under a state of torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        return draw(*given)


# The run and its record


class Recorder(FederatedCallback):
    """Keep the cohorts, and the aggregator's state before the first round."""

    def __init__(self):
        self.cohorts, self.server = [], {}

    def on_round_start(self, trainer, federation, cohort):
        if not self.cohorts:
            self.server = copy.deepcopy(federation.aggregator.state)
        self.cohorts.append(cohort)


class Log:
    """The record of a run, from which a replay starts.

    Attributes:
        cohorts: ids of the clients of each round.
        start: the initial weights.
        entries: the client module's initial ``state_dict``.
        server: the aggregator's state before the first round.
        n: training samples of each client.
        counts: the same by class.
        seen: ids of the clients that ever took part.
        seed: seed of the run.
        steps: inputs, labels and the random state of each training step, by round, client and phase.
    """

    def __init__(self, run, recorder, entries, steps):
        self.run, self.steps = run, steps
        self.cohorts, self.server, self.entries = recorder.cohorts, recorder.server, entries
        self.start = found(entries, "net")
        clients = range(run.data.num_clients)
        self.n = [run.data.size(k, "train") for k in clients]
        self.outputs = {k: self.output(k) for k in clients}
        self.seen, self.seed = sorted(set().union(*self.cohorts)), run.federation.seed
        self.counts = [torch.bincount(self.train(k)[1], minlength=CLASSES).double() for k in clients]

    def output(self, client):
        """Return a client's outputs for its test samples; batches of its evaluation phases are among the steps."""
        federation, model = self.run.federation, self.run.model
        engine, job = federation.engines[0], federation.job(client)
        data, phases = engine.become(job), model.evaluation_phases()
        for phase in phases:
            self.steps.pop((job.round, client, phase.name), None)
        if phases:
            engine.adapt(phases, job, data)
        return model(self.split(client, "test")[0]).detach()

    def rounds(self):
        return enumerate(self.cohorts)

    def batches(self, round, client, phase="train"):
        """Return the batches of a phase of a client's local work."""
        return [(x, y) for x, y, _ in self.steps[round, client, phase]]

    def everybody(self, value):
        return dict.fromkeys(range(len(self.n)), value)

    def class_means(self, models):
        """Return the mean features of each client's classes by its model, side by side, and their classes."""
        pairs = []
        for k, w in models.items():
            x, y = self.train(k)
            pairs += [(features(w, x[y == c]).mean(0), c) for c in y.unique()]
        return torch.stack([h for h, _ in pairs]), torch.stack([c for _, c in pairs])

    def split(self, client, name):
        part = self.run.data.part(client, name)
        return part.x.double(), part.y

    def train(self, client):
        return self.split(client, "train")


@dataclass
class End:
    """The end of a replay, for comparison with the run's.

    Args:
        model: the global model.
        sent: the model in each client's next payload, by client id.
        kept: personal entries, by their name or its beginning and then by client id.
        server: parts of the aggregator's state, by their paths.
        outputs: clients' outputs for their test samples, by client id.
    """

    model: torch.Tensor | None = None
    sent: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    server: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)


def within(entries, name):
    """Return the entries of a module, by their names in it."""
    return {own.removeprefix(f"{name}."): t for own, t in entries.items() if own.startswith(f"{name}.")}


def found(record, path):
    """Return an entry of nested records by a path like ``weights/net.features``, or all within it, as a vector."""
    for name in path.split("/"):
        within = {own: value for own, value in record.items() if str(own).startswith(f"{name}.")}
        record = next((value for own, value in record.items() if str(own) == name), within)
    return vector(record)


def vector(record):
    if isinstance(record, (dict, list)):
        return torch.cat([vector(value) for value in (record.values() if isinstance(record, dict) else record)])
    return torch.as_tensor(record, dtype=torch.float64).flatten()


REPLAYS = []


def replays(client, aggregator=None, id=None, local_epochs=1, own=None, server=None, net=plain, near=1e-8):
    """Register a replay of a method.

    Args:
        client: the client module's class.
        aggregator: the aggregator's class; None takes the client's own.
        id: the test's name; None takes the replay's.
        local_epochs: passes over the samples in a round.
        own: settings of the client module, which the replay takes by the same names.
        server: settings of the aggregator, likewise.
        net: the network's factory.
        near: the tolerance, absolute and relative.
    """

    def register(replay):
        run = partial(recorded, client, aggregator, local_epochs, {"net": net, **(own or {})}, server or {})
        known = partial(replay, **(own or {}), **(server or {}))
        REPLAYS.append(pytest.param(run, known, near, id=id or replay.__name__))
        return replay

    return register


def recorded(client, aggregator, local_epochs, own, server):
    """Run four rounds, and return their record."""
    steps = defaultdict(list)

    class Logged(client):
        def training_step(self, batch, batch_idx):
            steps[self.round, self.client_id, self.phase.name].append((*batch, torch.get_rng_state()))
            return super().training_step(batch, batch_idx)

    model = make_client(Logged, **{"optimizer": partial(SGD, lr=LR), **own})
    entries = {name: t.double() if t.is_floating_point() else t.clone() for name, t in model.state_dict().items()}
    recorder = Recorder()
    run = fit(
        model,
        Unequal(num_clients=len(CLIENTS), partitioner=Lacking(), batch_size=4),
        aggregator=aggregator and aggregator(**server),
        callbacks=[recorder],
        clients_per_round=3,
        local_epochs=local_epochs,
        max_rounds=4,
        precision="64-true",
        check_val_every_n_epoch=4,
        accelerator="cpu",
    )
    return Log(run, recorder, entries, steps)


# The replays


@replays(m.FedAvg, servers.FedAvgM, server={"server_lr": 0.7, "beta": 0.6, "nesterov": False})
@replays(m.FedAvg, servers.FedAvgM, id="fedavgm-nesterov", server={"server_lr": 0.7, "beta": 0.6, "nesterov": True})
def fedavgm(log, server_lr, beta, nesterov):
    """Hsu et al., 2019: momentum on the mean change, undamped."""
    x, momentum = log.start, 0
    for t, cohort in log.rounds():
        change = mean({k: sgd(x, log.batches(t, k)) - x for k in cohort}, log.n)
        momentum = beta * momentum + change
        x = x + server_lr * (change + beta * momentum if nesterov else momentum)
    return End(x)


def adaptive(log, second, server_lr, beta1, tau):
    """Reddi et al., 2021, Algorithm 2, with v = tau^2 at first; clients count by samples, as in its experiments."""
    x, first, v = log.start, 0, tau**2
    for t, cohort in log.rounds():
        change = mean({k: sgd(x, log.batches(t, k)) - x for k in cohort}, log.n)
        first = beta1 * first + (1 - beta1) * change
        v = second(v, change**2)
        x = x + server_lr * first / (v.sqrt() + tau)
    return End(x)


@replays(m.FedAvg, servers.FedAdagrad, server={"server_lr": 0.05, "beta1": 0.3, "tau": 0.01})
def fedadagrad(log, **settings):
    return adaptive(log, lambda v, square: v + square, **settings)


@replays(m.FedAvg, servers.FedAdam, server={"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01})
def fedadam(log, beta2, **settings):
    return adaptive(log, lambda v, square: beta2 * v + (1 - beta2) * square, **settings)


@replays(m.FedAvg, servers.FedYogi, server={"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01})
def fedyogi(log, beta2, **settings):
    return adaptive(log, lambda v, square: v - (1 - beta2) * square * torch.sign(v - square), **settings)


@replays(m.FedProx, servers.FedACG, own={"mu": 0.4}, server={"momentum": 0.6, "weighting": "uniform"})
@replays(
    m.FedProx, servers.FedACG, id="fedacg-samples", own={"mu": 0.4}, server={"momentum": 0.6, "weighting": "samples"}
)
def fedacg(log, mu, momentum, weighting):
    """Kim et al., 2024, Algorithm 1; the official code counts clients equally, and its weight is mu / 2."""

    def near(w, a, b, x):
        return cross_entropy(w, a, b) + mu / 2 * (w - x).square().sum()

    theta, moved = log.start, torch.zeros_like(log.start)
    for t, cohort in log.rounds():
        ahead = theta + momentum * moved
        changes = {k: sgd(ahead, log.batches(t, k), near, ahead) - ahead for k in cohort}
        moved = momentum * moved + mean(changes, log.n if weighting == "samples" else None)
        theta = theta + moved
    return End(theta, sent=log.everybody(theta + momentum * moved), server={"mean": theta})


@replays(m.MIFA, servers.LatestAverage)
@replays(
    m.MIFA,
    servers.LatestAverage,
    id="mifa-decay",
    own={"lr_scheduler": lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (t + 1))},
)
def mifa(log, lr_scheduler=None):
    """Gu et al., 2021, Algorithm 1, from a table of zeros, as the official trainer that doesn't wait has it."""
    x, table = log.start, log.everybody(torch.zeros_like(log.start))
    for t, cohort in log.rounds():
        lr = LR / (t + 1) if lr_scheduler else LR
        table |= {k: (x - sgd(x, log.batches(t, k), lr=lr)) / lr for k in cohort}
        x = x - lr * mean(table)
    lrs = {k: max(t for t, cohort in log.rounds() if k in cohort) for k in log.seen}
    lrs = {k: LR / (t + 1) if lr_scheduler else LR for k, t in lrs.items()}
    return End(x, server={f"changes/{k}": -lrs[k] * table[k] for k in log.seen})


@replays(m.FedAvg, servers.FedExP, server={"epsilon": 1e-4, "average_last": True})
def fedexp(log, epsilon, average_last):
    """Jhunjhunwala et al., 2023, with an epsilon that stays; the last model is the mean of the last two iterates."""
    iterates, rates = [log.start], []
    for t, cohort in log.rounds():
        x = iterates[-1]
        changes = {k: sgd(x, log.batches(t, k)) - x for k in cohort}
        spread = sum(log.n[k] * changes[k] @ changes[k] for k in cohort) / sum(log.n[k] for k in cohort)
        change = mean(changes, log.n)
        rates.append(max(1.0, float(spread / (2 * (change @ change + epsilon)))))
        iterates.append(x + rates[-1] * change)
    assert max(rates) > 1.1
    return End((iterates[-2] + iterates[-1]) / 2)


MOMENTUM = {"optimizer": partial(SGD, lr=LR, momentum=0.6)}


@replays(m.FedNova, id="fednova-momentum", local_epochs=2, own={"mu": 0.0, **MOMENTUM})
@replays(
    m.FedNova,
    servers.NormalizedAverage,
    id="fednova-proximal",
    own={"mu": 0.3},
    server={"effective": "steps", "beta": 0.5, "server_lr": 0.8},
)
def fednova(log, mu, optimizer=None, effective="norm", beta=0.0, server_lr=1.0):
    """Wang et al., 2020: the change of each client over the 1-norm of how its gradients count in it."""
    rho = optimizer.keywords["momentum"] if optimizer else 0.0
    x, moved = log.start, 0
    for t, cohort in log.rounds():
        total = sum(log.n[k] for k in cohort)
        direction, far = 0, 0
        for k in cohort:
            y, u = x, 0
            for a, b in log.batches(t, k):
                u = rho * u + slope(cross_entropy, y, a, b) + mu * (y - x)
                y = y - LR * u
            tau, p = len(log.batches(t, k)), log.n[k] / total
            if mu:
                norm = (1 - (1 - LR * mu) ** tau) / (LR * mu)
            else:
                norm = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
            direction = direction + p * (y - x) / norm
            far += p * (norm if effective == "norm" else tau)
        moved = beta * moved + far * direction
        x = x + server_lr * moved
    return End(x)


@replays(m.FedDyn, id="feddyn-samples", local_epochs=2, own={"alpha": 0.2, "weighting": "samples"})
@replays(m.FedDyn, id="feddyn-uniform", own={"alpha": 0.25, "weighting": "uniform"})
def feddyn(log, alpha, weighting):
    """Acar et al., 2021, in the form of its official code: h[k] sums what client k has moved; g_k is -alpha_k h[k]."""

    def regularised(w, a, b, x, k):
        return cross_entropy(w, a, b) + alpha / share[k] * (h[k] @ w + (w - x).square().sum() / 2)

    share = [n * len(log.n) / sum(log.n) if weighting == "samples" else 1 for n in log.n]
    x, h = log.start, log.everybody(torch.zeros_like(log.start))
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            y[k] = sgd(x, log.batches(t, k), regularised, x, k)
            h[k] = h[k] + y[k] - x
        model = mean(y)
        x = model + mean(h)
    kept = {k: -alpha / share[k] * h[k] for k in log.seen}
    return End(model, sent=log.everybody(x), kept={"gradient": kept})


@replays(m.FedADMM, servers.PrimalDualAverage, local_epochs=2, own={"rho": 0.3, "previous": "own", **MOMENTUM})
@replays(
    m.FedADMM,
    servers.PrimalDualAverage,
    id="fedadmm-released",
    own={"rho": 0.3, "previous": "received"},
    server={"step": 0.8},
)
def fedadmm(log, rho, previous, optimizer=None, step=None):
    """Gong et al., 2022, with all local training from theta; the paper's and the released code's step is 1.

    The released code measures the change of the model from theta, not from the client's own model of its last round.
    """
    factor = optimizer.keywords["momentum"] if optimizer else 0.0
    theta, w, y = log.start, log.everybody(log.start), log.everybody(torch.zeros_like(log.start))
    for t, cohort in log.rounds():
        changes = {}
        for k in cohort:
            own, u = theta, 0
            for a, b in log.batches(t, k):
                u = factor * u + slope(cross_entropy, own, a, b) + y[k] + rho * (own - theta)
                own = own - LR * u
            dual = y[k] + rho * (own - theta)
            changes[k] = own - (w[k] if previous == "own" else theta) + (dual - y[k]) / rho
            w[k], y[k] = own, dual
        theta = theta + (step or len(cohort) / len(CLIENTS)) * mean(changes)
    kept = {"dual": {k: y[k] for k in log.seen}}
    return End(theta, kept=kept | ({"last": {k: w[k] for k in log.seen}} if previous == "own" else {}))


BASES = {"momentum": {"beta1": 0.6}, "adam": {"beta1": 0.6, "beta2": 0.8, "epsilon": 0.01}}


@replays(m.MimeLite, servers.MimicAverage, id="mimelite", local_epochs=2, server=BASES["momentum"])
@replays(m.MimeLite, servers.MimicAverage, id="mimelite-adam", server=BASES["adam"] | {"weighting": "samples"})
@replays(m.Mime, servers.ControlledAverage, id="mime", server=BASES["momentum"] | {"weighting": "samples"})
@replays(m.Mime, servers.ControlledAverage, id="mime-adam", local_epochs=2, server=BASES["adam"])
def mime(log, beta1, beta2=None, epsilon=None, weighting="uniform"):
    """Karimireddy et al., 2020, Algorithm 1 and its table of optimizers, as FedJAX takes its steps in turn.

    Mime's mean gradient is of the round before, in which nobody trains; Adam's first round finds v alone.
    """
    x, first, v = log.start, torch.zeros_like(log.start), None
    n, c = log.n if weighting == "samples" else None, None
    controlled = isinstance(log.run.model, m.Mime)
    for t, cohort in log.rounds():
        if not controlled or t % 2 == 0:
            c = mean({k: slope(cross_entropy, x, *log.train(k)) for k in cohort}, n)
        if controlled and t % 2 == 0:
            continue
        ends = {}
        for k in cohort:
            y = x
            for a, b in log.batches(t, k):
                g = slope(cross_entropy, y, a, b)
                g = g - slope(cross_entropy, x, a, b) + c if controlled else g
                u = (1 - beta1) * g + beta1 * first
                if beta2 is not None:
                    u = 0 * u if v is None else u / (epsilon + v.sqrt())
                y = y - LR * u
            ends[k] = y
        x, first = mean(ends, n), beta1 * first + (1 - beta1) * c
        v = (1 - beta2) * c**2 + beta2 * (0 if v is None else v) if beta2 is not None else None
    return End(x, server={"m": first} | ({} if v is None else {"v": v}))


@replays(m.QFedAvg, servers.FairAverage, server={"q": 0.7})
def q_fedavg(log, q):
    """Li et al., 2020, Algorithm 2, with L = 1 / LR; clients count equally."""
    x, L = log.start, 1 / LR
    for t, cohort in log.rounds():
        above, below = 0, 0
        for k in cohort:
            F_k = cross_entropy(x, *log.train(k)) + 1e-10
            change = L * (x - sgd(x, log.batches(t, k)))
            above = above + F_k**q * change
            below = below + q * F_k ** (q - 1) * change @ change + L * F_k**q
        x = x - above / below
    return End(x)


@replays(m.AFL, servers.AgnosticAverage, id="afl", server={"step": 0.8, "ascent": "exponential"}, near=1e-6)
@replays(m.AFL, servers.AgnosticAverage, id="afl-2019", server={"step": 0.3, "ascent": "projected"}, near=1e-6)
def afl(log, step, ascent):
    """Ro et al., 2021, or with sums Mohri et al., 2019, with each client as a domain; losses are sent in float32.

    FedJAX's and easyFL's rules where all come; here the weights of clients that are away stay.
    """
    x, own = log.start, torch.full((len(log.n),), 1 / len(log.n), dtype=torch.float64)
    for t, cohort in log.rounds():
        losses = torch.stack([cross_entropy(x, *log.train(k)) for k in cohort])
        shares = own[cohort]
        x = mean({k: sgd(x, log.batches(t, k)) for k in cohort}, {k: float(own[k]) for k in cohort})
        if ascent == "exponential":
            up = shares * (step * losses).exp()
            own[cohort] = up / up.sum() * shares.sum()
        else:
            ranked = sorted((shares + step * losses).tolist(), reverse=True)
            cuts = [(sum(ranked[: i + 1]) - float(shares.sum())) / (i + 1) for i in range(len(ranked))]
            cut = [cut for each, cut in zip(ranked, cuts, strict=True) if each > cut][-1]
            own[cohort] = (shares + step * losses - cut).clamp_min(0)
    return End(x, server={"lambda": own})


@replays(
    m.FedAvg,
    servers.FedMGDA,
    server={"server_lr": 0.4, "epsilon": 0.1, "decay": 0.8, "weighting": "samples"},
    near=1e-10,
)
@replays(
    m.FedAvg,
    servers.FedMGDA,
    id="fedmgda-free",
    server={"server_lr": 0.4, "epsilon": 1.0, "decay": 1.0, "weighting": "uniform"},
    near=1e-10,
)
def fedmgda(log, server_lr, epsilon, decay, weighting):
    """Hu et al., 2022, as easyFL has it; the least weights by trying which of them are at which bound."""
    x = log.start
    for t, cohort in log.rounds():
        ways = torch.stack([x - sgd(x, log.batches(t, k)) for k in cohort])
        ways = ways / ways.norm(dim=1, keepdim=True)
        n = torch.tensor([float(log.n[k]) if weighting == "samples" else 1.0 for k in cohort], dtype=torch.float64)
        low, high = (n / n.sum() - epsilon).clamp_min(0), (n / n.sum() + epsilon).clamp_max(1)
        best = None
        for places in itertools.product("<>-", repeat=len(cohort)):
            free = torch.tensor([place == "-" for place in places])
            w = torch.where(torch.tensor([place == "<" for place in places]), low, high)
            if free.any():
                own, rest = ways[free], (w * ~free) @ ways
                # Lagrange: own @ (own.T @ u + rest) = price for all of them, of the sum that is left
                system = torch.cat([own @ own.T, torch.ones(len(own), 1).double()], 1)
                system = torch.cat([system, torch.cat([torch.ones(1, len(own)), torch.zeros(1, 1)], 1).double()])
                right = torch.cat([-own @ rest, 1 - (w * ~free).sum().view(1)])
                w = w.masked_scatter(free, torch.linalg.solve(system, right)[:-1])
            fits = (w >= low - 1e-12).all() and (w <= high + 1e-12).all() and (w.sum() - 1).abs() < 1e-12
            if fits and (best is None or (w @ ways).norm() < (best @ ways).norm()):
                best = w
        x = x - server_lr * decay**t * best @ ways
    return End(x)


@replays(m.FedDGGA, servers.GeneralizationAdjustment, id="feddg-ga", server={"step": 0.5, "preset": "paper"})
@replays(m.FedDGGA, servers.GeneralizationAdjustment, id="feddg-ga-off", server={"step": 0.5, "preset": "official"})
def feddg_ga(log, step, preset):
    """Zhang et al., 2023: a client counts for more if averaging has raised the loss on its validation samples.

    Officially all clients take part; here those of two successive rounds have gaps. The official code keeps the mean
    gap, divides the step by its three domains, and counts rounds from 0.
    """
    x, a, trained = log.start, log.everybody(1 / len(CLIENTS)), {}
    for t, cohort in log.rounds():
        loss = {k: float(cross_entropy(x, *log.split(k, "val"))) for k in cohort}
        gaps = {k: loss[k] - trained[k] for k in cohort if k in trained}
        if gaps:
            middle = statistics.fmean(gaps.values()) if preset == "paper" else 0
            rate = step * (1 - (t - 1) / 4) if preset == "paper" else step / 3 * (1 - (t - 2) / 4)
            largest = max(abs(gap - middle) for gap in gaps.values())
            if largest > 1e-9:
                moved = {k: min(max(w + rate * (gaps.get(k, middle) - middle) / largest, 0), 1) for k, w in a.items()}
                a = {k: w / sum(moved.values()) for k, w in moved.items()}
        y = {k: sgd(x, log.batches(t, k)) for k in cohort}
        trained = {k: float(cross_entropy(y[k], *log.split(k, "val"))) for k in cohort}
        x = sum(a[k] * y[k] for k in cohort) / sum(a[k] for k in cohort)
    assert len(set(a.values())) > 2
    return End(x, server={"a": torch.tensor(list(a.values()), dtype=torch.float64)})


@replays(m.FedNTD, local_epochs=2, own={"beta": 0.7, "temperature": 2.0})
def fedntd(log, beta, temperature):
    """Lee et al., 2022: the received model teaches its probabilities of the classes that a sample is not of."""

    def loss(w, a, b, x):
        others = ~F.one_hot(b, CLASSES).bool()
        teacher, student = (logits(v, a)[others].view(len(b), -1) / temperature for v in (x, w))
        return cross_entropy(w, a, b) + beta * temperature**2 * kl(teacher, student)

    x = log.start
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k), loss, x) for k in cohort}, log.n)
    return End(x)


@replays(m.FedSAM, own={"rho": 0.3, "adaptive": False, "eta": 0.0})
@replays(m.FedSAM, id="fedasam", own={"rho": 0.7, "adaptive": True, "eta": 0.2})
def fedsam(log, rho, adaptive, eta):
    """Caldarola et al., 2022: each step is by the gradient at the worst point near by."""
    is_weight = torch.cat([torch.full((part.numel(),), part.dim() == 2) for part in split(log.start)])
    x = log.start
    for t, cohort in log.rounds():
        y = dict.fromkeys(cohort, x)
        for k in cohort:
            for a, b in log.batches(t, k):
                T = torch.where(is_weight, y[k].abs() + eta, 1.0) if adaptive else 1.0
                g = slope(cross_entropy, y[k], a, b)
                e = rho * T**2 * g / (T * g).norm()
                y[k] = y[k] - LR * slope(cross_entropy, y[k] + e, a, b)
        x = mean(y, log.n)
    return End(x)


@replays(m.FedLESAM, own={"rho": 0.3})
def fedlesam(log, rho):
    """Fan et al., 2024: the worst point near by is on the way back to the model that the client received before."""
    x, old = log.start, defaultdict(lambda: log.start)
    for t, cohort in log.rounds():
        y = dict.fromkeys(cohort, x)
        for k in cohort:
            back = old[k] - x
            e = rho * back / back.norm() if back.any() else back
            for a, b in log.batches(t, k):
                y[k] = y[k] - LR * slope(cross_entropy, y[k] + e, a, b)
            old[k] = x
        x = mean(y, log.n)
    return End(x)


@replays(m.FedGloSS, servers.GlobalSharpness, local_epochs=2, own={"alpha": 0.25}, server={"rho": 0.3})
def fedgloss(log, alpha, rho):
    """Caldarola et al., 2025, Algorithm 1, from a model that goes up along the last round's change of all.

    The official code divides the step of the server's dual variable by the round's clients too, and takes local epochs
    from a model of their own each. Clients count equally.
    """
    w, up, sigma, own = log.start, 0, 0, log.everybody(torch.zeros_like(log.start))
    for t, cohort in log.rounds():
        x = w + up
        y = dict.fromkeys(cohort, x)
        for k in cohort:
            for a, b in log.batches(t, k):
                g = slope(cross_entropy, y[k], a, b)
                g = slope(cross_entropy, y[k] + 0.15 * g / g.norm(), a, b)
                y[k] = y[k] - LR * (g - own[k] + alpha * (y[k] - x))
            own[k] = own[k] - alpha * (y[k] - x)
        sigma = sigma - alpha * sum(y[k] - x for k in cohort) / len(log.n)
        change = x - mean(y)
        w = w - change - sigma / alpha
        up = rho * change / change.norm()
    return End(w, sent=log.everybody(w + up), kept={"gradient": {k: own[k] for k in log.seen}})


@replays(m.FedDecorr, own={"beta": 0.4})
def feddecorr(log, beta):
    """Shi et al., 2023, by the official code: squared products of standardised features, off the diagonal."""

    def loss(w, a, b):
        h = features(w, a)
        n, d = h.shape
        if n == 1:
            return cross_entropy(w, a, b)
        z = (h - h.mean(0)) / (h.var(0) + 1e-8).sqrt()
        products = [(z[:, i] @ z[:, j]) ** 2 for i in range(d) for j in range(d) if i != j]
        return cross_entropy(w, a, b) + beta * sum(products) / len(products) / n

    x = log.start
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k), loss) for k in cohort}, log.n)
    return End(x)


@replays(m.FML, own={"alpha": 0.6, "beta": 0.3})
def fml(log, alpha, beta):
    """Shen et al., 2020: own model v and meme w learn from each other; the memes' plain mean travels."""

    def mutual(own, other, share, a, b):
        return share * cross_entropy(own, a, b) + (1 - share) * kl(logits(other, a), logits(own, a))

    x, v = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        w = dict.fromkeys(cohort, x)
        for k in cohort:
            for a, b in log.batches(t, k):
                steps = slope(mutual, w[k], v[k], beta, a, b), slope(mutual, v[k], w[k], alpha, a, b)
                w[k], v[k] = w[k] - LR * steps[0], v[k] - LR * steps[1]
        x = mean(w)
    return End(x, kept={"personal": {k: v[k] for k in log.seen}})


@replays(m.FedPHP, own={"weight": 0.3, "temperature": 4.0, "momentum": 0.9, "participation": 0.6})
def fedphp(log, weight, temperature, momentum, participation):
    """Li et al., 2021: the history s teaches the received model, and takes the trained one in.

    Officially the first history is a net with weights of its own; here the received model stands for it.
    """

    def loss(w, a, b, teacher):
        p = (logits(teacher, a) / temperature).softmax(1)
        taught = -(p * logits(w, a).log_softmax(1)).sum(1).mean()
        return (1 - weight) * cross_entropy(w, a, b) + weight * taught

    x, s, times = log.start, {}, log.everybody(0)
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            y[k] = sgd(x, log.batches(t, k), loss, s.get(k, x))
            mu = momentum * min(times[k] / (participation * len(log.cohorts)), 1)
            s[k] = mu * s[k] + (1 - mu) * y[k] if times[k] else y[k]
            times[k] += 1
        x = mean(y, log.n)
    return End(x, kept={"history": s})


def normalised(input_shape, num_classes):
    """A net with BatchNorm."""
    body = nn.Sequential(nn.Linear(input_shape[0], HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return Net(body, nn.Linear(HIDDEN, num_classes))


@replays(m.FedBN, net=normalised)
def fedbn(log):
    """Li et al., 2021: BatchNorm's parameters and statistics never leave their client; others count by samples."""
    net = normalised((FEATURES,), CLASSES).double()
    start = within(log.entries, "net")
    own = log.everybody({name: t for name, t in start.items() if name.startswith("features.1.")})
    x = {name: t for name, t in start.items() if name not in own[0]}
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            net.load_state_dict(x | own[k])
            optimizer = SGD(net.parameters(), lr=LR)
            for a, b in log.batches(t, k):
                optimizer.zero_grad()
                F.cross_entropy(net(a), b).backward()
                optimizer.step()
            trained = copy.deepcopy(net.state_dict())
            own[k], y[k] = ({name: trained[name] for name in part} for part in (own[k], x))
        x = mean(y, log.n)
    return End(vector(x), kept={"net.features.1": {k: vector(own[k]) for k in log.seen}})


@replays(m.FedMRL, own={"omega": 0.7})
def fedmrl(log, omega):
    """Yi et al., 2024: the shared net's classifier reads the first numbers of a projection of all features.

    Here, as officially, the shared net is as wide as a client's own, so that the first numbers are all of them.
    """

    def projected(p, a):
        h = [linear(p, f"net.{part}features.0", a).tanh() for part in ("small.", "")]
        return linear(p, "net.projection", torch.cat(h, 1))

    def loss(p, a, b):
        z = projected(p, a)
        own, small = (F.cross_entropy(linear(p, f"net.{part}classifier", z), b) for part in ("", "small."))
        return own + omega * small

    kept = log.everybody({name: t for name, t in log.entries.items() if "small" not in name})
    x = {name: t for name, t in log.entries.items() if name not in kept[0]}
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            p = x | kept[k]
            for batch in log.batches(t, k):
                p = step(p, LR, loss, *batch)
            kept[k], y[k] = {name: p[name] for name in kept[k]}, {name: p[name] for name in x}
        x = mean(y, log.n)
    tested = {k: (x | kept[k], log.split(k, "test")[0]) for k in log.seen}
    return End(
        vector(x),
        kept={name: {k: kept[k][name] for k in log.seen} for name in kept[0]},
        outputs={k: linear(p, "net.classifier", projected(p, a)) for k, (p, a) in tested.items()},
    )


@replays(m.LGMix, servers.MixedChanges, server={"weighting": "samples"})
@replays(m.LGMix, servers.MixedChanges, id="lg-mix-uniform", local_epochs=2, server={"weighting": "uniform"})
def lg_mix(log, weighting):
    """Jiang et al., 2024: a client's model moves by its own change and the mean, mixed by traces of covariances.

    The official code leaves the smallest eigenvalue out of each trace, and all clients take part.
    """

    def trace(h):
        h = torch.cat(h)
        return (h - h.mean(0)).square().sum() / len(h)

    common, own, shares = log.start, {}, defaultdict(list)
    for t, cohort in log.rounds():
        changes = {}
        for k in cohort:
            w = own.setdefault(k, common)
            spread, known = [], []
            for a, b in log.batches(t, k):
                spread.append(features(w, a))
                known.append(features(common, a))
                w = sgd(w, [(a, b)])
            changes[k] = w - own[k]
            shares[k].append(trace(spread) / (trace(spread) + trace(known)))
        both = mean(changes, log.n if weighting == "samples" else None)
        for k in cohort:
            share = sum(shares[k]) / len(shares[k])
            own[k] = own[k] + share * changes[k] + (1 - share) * both
        common = common + both
    return End(common, sent={k: own.get(k, common) for k in log.everybody(0)})


@replays(m.GPFL, own={"magnitude": 0.2, "decay": 0.05})
def gpfl(log, magnitude, decay):
    """Zhang et al., 2023: personal features for the own classifier, global ones that point to their class's vector.

    Conditions are made of the received vectors; officially of the client's own ones before it receives others.
    """

    def conditional(p, h, u):
        gamma, beta = (
            layer_norm(p, f"conditional.{part}.2", linear(p, f"conditional.{part}.0", u).relu())
            for part in ("gamma", "beta")
        )
        return (h * (gamma + 1) + beta).relu()

    def loss(p, a, b, known, share):
        h = linear(p, "net.features.0", a).tanh()
        own, common = conditional(p, h, share @ known), conditional(p, h, known.mean(0))
        cosines = F.cosine_similarity(common[:, None], p["vectors"], dim=2)
        squares = sum(t.square().sum() for name, t in p.items() if not name.startswith("net."))
        return (
            F.cross_entropy(linear(p, "net.classifier", own), b)
            + F.cross_entropy(cosines, b)
            + magnitude * (common - known[b]).norm()
            + decay / 2 * squares
        )

    start = {name: t for name, t in log.entries.items() if name != "shares"}
    heads = log.everybody({name: t for name, t in start.items() if "classifier" in name})
    x = {name: t for name, t in start.items() if name not in heads[0]}
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            p, share = x | heads[k], log.counts[k] / log.n[k]
            for a, b in log.batches(t, k):
                p = step(p, LR, loss, a, b, x["vectors"], share)
            heads[k], y[k] = ({name: p[name] for name in part} for part in (heads[k], x))
        x = mean(y, log.n)
    parts = ("net.features", "conditional", "vectors")
    return End(
        server={f"weights/{part}": vector(within(x, part) or x[part]) for part in parts},
        kept={"net.classifier": {k: vector(heads[k]) for k in log.seen}},
    )


@replays(m.FedCP, own={"mmd": 0.5})
def fedcp(log, mmd):
    """Zhang et al., 2023: a policy deals each feature out to the own classifier and the received one."""

    def kernel(a, b):
        squares = (a[:, None] - b).square().sum(2)
        return sum(torch.exp(-squares / (2 * width)) for width in (10, 15, 20, 50))

    def loss(p, a, b, received, context, noise):
        h, known = (linear(part, "net.features.0", a).tanh() for part in (p, received))
        scores = layer_norm(p, "policy.1", linear(p, "policy.0", h * context)).relu().view(len(h), 2, -1)
        r, s = (scores + noise).softmax(1).unbind(1)
        z = linear(p, "net.classifier", r * h) + linear(received, "net.classifier", s * h)
        apart = (kernel(h, h) + kernel(known, known) - 2 * kernel(h, known)).mean()
        return F.cross_entropy(z, b) + mmd * apart

    def gumbel(n):
        return -torch.empty(n, 2, HIDDEN, dtype=torch.float64).exponential_().log()

    x = {name: t for name, t in log.entries.items() if name.startswith(("net.", "policy."))}
    heads = log.everybody({name: t for name, t in x.items() if "classifier" in name})
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            p, context = x | heads[k], F.normalize(heads[k]["net.classifier.weight"].sum(0), dim=0)
            for a, b, random in log.steps[t, k, "train"]:
                p = step(p, LR, loss, a, b, x, context, drawn(random, gumbel, len(b)))
            heads[k] = {name: p[name] for name in heads[k]}
            y[k] = p | {name: (own + x[name]) / 2 for name, own in heads[k].items()}
        x = mean(y, log.n)
    return End(
        vector(within(x, "net")),
        server={"weights/policy": vector(within(x, "policy"))},
        kept={"net.classifier": {k: vector(heads[k]) for k in log.seen}},
    )


@replays(m.FedCAC, servers.CriticalAverage, id="fedcac-mixed", own={"tau": 0.5}, server={"beta": 8.0})
@replays(m.FedCAC, servers.CriticalAverage, id="fedcac-alone", own={"tau": 0.3}, server={"beta": 2.0})
def fedcac(log, tau, beta):
    """Wu et al., 2023: entries that a client's data depend on are averaged over those who depend on the same ones.

    Rounds count from 1, as in the official code; a client that stays away keeps its mask and its last mean.
    """

    def critical(change, y):
        marks = []
        for part in split((change * y).abs()):
            c, count = part.flatten(), int(tau * part.numel())
            marks.append(c >= c.topk(count).values[-1] if count else torch.zeros_like(c).bool())
        return torch.cat(marks)

    sent, kept = log.everybody(log.start), {}
    for t, cohort in log.rounds():
        y = {k: sgd(sent[k], log.batches(t, k)) for k in cohort}
        M = {k: critical(y[k] - sent[k], y[k]) for k in cohort}
        overlap = {(k, j): 1 - float((M[k] ^ M[j]).sum() / (2 * M[k].sum())) for k in cohort for j in cohort if j != k}
        middle, most = sum(overlap.values()) / len(overlap), max(overlap.values())
        threshold = middle + (t + 1) / beta * (most - middle) - 1e-12
        x = mean(y, log.n)
        for k in cohort:
            kept[k] = M[k], mean({j: y[j] for j in cohort if j == k or overlap[k, j] >= threshold})
        sent = {k: torch.where(*kept[k], x) if k in kept else x for k in sent}
    return End(x, sent=sent)


@replays(
    m.FedProto,
    servers.TrainablePrototypes,
    own={"align_lambda": 2.0},
    server={"server_epochs": 5, "lr": 0.1, "cap": 0.5, "batch_size": 100},
)
@replays(
    m.FedProto,
    servers.TrainablePrototypes,
    id="fedtgp-wide",
    own={"align_lambda": 2.0},
    server={"server_epochs": 5, "lr": 0.1, "cap": 100.0, "batch_size": 100},
)
def fedtgp(log, align_lambda, server_epochs, lr, cap, batch_size):
    """Zhang et al., 2024: prototypes that the server trains to be far apart; clients keep their models."""

    def made(p):
        return linear(p, "3", linear(p, "1", p["0.weight"]).relu())

    def apart(p, sent, c, margin):
        distances = (sent[:, None] - made(p)).norm(dim=2)
        return F.cross_entropy(-(distances + margin * F.one_hot(c, CLASSES)), c)

    def aligned(w, a, b, known):
        return cross_entropy(w, a, b) + align_lambda * F.mse_loss(features(w, a), known[b])

    p, w, known = {name: t.double() for name, t in log.server["net"].items()}, log.everybody(log.start), None
    for t, cohort in log.rounds():
        for k in cohort:
            w[k] = sgd(w[k], log.batches(t, k), *((cross_entropy,) if known is None else (aligned, known)))
        sent, c = log.class_means({k: w[k] for k in cohort})
        Q = torch.stack([sent[c == each].mean(0) for each in c.unique()])
        gaps = (Q[:, None] - Q).norm(dim=2).fill_diagonal_(torch.inf).min(1).values
        for _ in range(server_epochs):
            p = step(p, lr, apart, sent, c, min(float(gaps.max()), cap))
        known = made(p)
    kept = {"net": {k: w[k] for k in log.seen}}
    return End(server={"net": vector(p), "prototypes": known}, kept=kept)


@replays(
    m.FedGH,
    servers.GlobalHeader,
    server={"server_epochs": 3, "batch_size": 100, "optimizer": partial(SGD, lr=0.5)},
    near=1e-6,  # the server computes in float32
)
def fedgh(log, server_epochs, batch_size, optimizer):
    """Yi et al., 2023: the server trains the classifier on mean features; bodies stay with their clients.

    Officially the server's steps are taken by an optimizer of another net, so that its classifier never moves; the
    rule is that of HtFLlib, which trains it.
    """

    def of_features(w, h, c):
        return F.cross_entropy(classify(w, h), c)

    x, w = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        for k in cohort:
            w[k] = sgd(torch.cat([w[k][BODY], x[HEAD]]), log.batches(t, k))
        pairs = log.class_means({k: w[k] for k in cohort})
        x = sgd(x, [pairs] * server_epochs, of_features, lr=optimizer.keywords["lr"], part=HEAD)
    return End(x[HEAD], kept={"net.features": {k: w[k][BODY] for k in log.seen}})


@replays(
    m.PFedHN,
    servers.HyperNetwork,
    server={
        "lr": 0.05,
        "embedding_lr": 0.2,
        "momentum": 0.7,
        "weight_decay": 0.01,
        "clip": 0.5,
        "hidden": 7,
        "layers": 2,
        "embedding_size": 4,
    },
)
def pfedhn(log, lr, embedding_lr, momentum, weight_decay, clip, hidden, layers, embedding_size):
    """Shamsian et al., 2021: a hypernetwork learns from the changes that training makes to its models.

    Officially one client is in a round; of more, all gradients are at the round's start, and each makes a step.
    """

    def made(phi, k):
        h = linear(phi, "body.0", phi["embeddings"][k])
        for layer in range(layers):
            h = linear(phi, f"body.{2 * (layer + 1)}", h.relu())
        return torch.cat([linear(phi, f"heads.{index}", h) for index in range(4)])

    def distance(phi, k, trained):
        return (made(phi, k) - trained).square().sum() / 2

    phi = {name: t.double() for name, t in log.server["phi"].items()}
    u = {name: torch.zeros_like(t) for name, t in phi.items()}
    for t, cohort in log.rounds():
        start = phi
        for k in cohort:
            # the first models are made before the server has heard of float64
            sent = made(start, k) if t else made({name: p.float() for name, p in start.items()}, k).double()
            trained = sgd(sent, log.batches(t, k))
            moved = step(start, 1.0, distance, k, trained)
            g = {name: start[name] - moved[name] for name in start}
            short = min(1.0, clip / (float(vector(g).norm()) + 1e-6))
            u = {name: momentum * u[name] + short * g[name] + weight_decay * phi[name] for name in phi}
            phi = {name: phi[name] - (embedding_lr if name == "embeddings" else lr) * u[name] for name in phi}
    return End(server={"phi": vector(phi)}, sent={k: made(phi, k) for k in range(len(log.n))})


@replays(m.KNNPer, own={"share": 0.4, "neighbours": 5, "scale": 0.1})
def knn_per(log, share, neighbours, scale):
    """Marfoq et al., 2022: the global model's probabilities, mixed with labels of the nearest own samples."""
    x = log.start
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k)) for k in cohort}, log.n)
    outputs = {}
    for k in range(len(log.n)):
        (a, b), h = log.train(k), features(x, log.split(k, "test")[0])
        squares = (h[:, None] - features(x, a)).square().sum(2)
        nearest = squares.argsort(1)[:, :neighbours]
        weight = torch.exp(-squares.gather(1, nearest) / (HIDDEN * scale))
        votes = (weight[:, :, None] * F.one_hot(b, CLASSES)[nearest]).sum(1)
        near = votes / votes.sum(1, keepdim=True)
        outputs[k] = (share * near + (1 - share) * classify(x, h).softmax(1)).log()
    return End(x, outputs=outputs)


@replays(m.APFL, own={"alpha": 0.5, "alpha_lr": 0.4, "alpha_per": "round", "mix": "outputs"}, local_epochs=2)
@replays(m.APFL, id="apfl-paper", own={"alpha": 0.5, "alpha_lr": 0.2, "alpha_per": "step", "mix": "parameters"})
def apfl(log, alpha, alpha_lr, alpha_per, mix):
    """Deng et al., 2020, Algorithm 1: w as by FedAvg, v and its share alpha by the loss of the mixture.

    The share moves by its derivative, for which the official code has a surrogate.
    """

    def mixed(alpha, v, w, a):
        if mix == "outputs":
            return alpha * logits(v, a) + (1 - alpha) * logits(w, a)
        return logits(alpha * v + (1 - alpha) * w, a)

    def of_v(v, alpha, w, a, b):
        return F.cross_entropy(mixed(alpha, v, w, a), b)

    def of_alpha(alpha, v, w, a, b):
        return F.cross_entropy(mixed(alpha, v, w, a), b)

    x, v, shares = log.start, log.everybody(log.start), log.everybody(torch.tensor(alpha, dtype=torch.float64))
    for t, cohort in log.rounds():
        w = dict.fromkeys(cohort, x)
        for k in cohort:
            for index, (a, b) in enumerate(log.batches(t, k)):
                moved = (
                    w[k] - LR * slope(cross_entropy, w[k], a, b),
                    v[k] - LR * slope(of_v, v[k], shares[k], w[k], a, b),
                )
                if index == 0 or alpha_per == "step":
                    shares[k] = (shares[k] - alpha_lr * slope(of_alpha, shares[k], v[k], w[k], a, b)).clamp(0, 1)
                w[k], v[k] = moved
        x = mean(w, log.n)
    outputs = {k: mixed(shares[k], v[k], x, log.split(k, "test")[0]) for k in log.seen}
    return End(x, kept={"personal": v, "alpha": shares}, outputs=outputs)


@replays(
    m.FedGen,
    servers.FeatureGenerator,
    own={"alpha": 0.8, "beta": 0.6, "decay": 0.9, "noise_size": 4, "hidden": 7},
    server={"server_steps": 3, "batch_size": 8, "diversity": 0.5, "lr_decay": 0.8, "optimizer": partial(Adam, lr=0.01)},
)
def fedgen(log, alpha, beta, decay, noise_size, hidden, server_steps, batch_size, diversity, lr_decay, optimizer):
    """Zhu et al., 2021: a generator of features that all classifiers take for their classes teaches the clients.

    The teachers' weights are per sample, which the official code means and misses by a slip of shapes.
    """
    G = nn.Sequential(
        nn.Linear(noise_size + CLASSES, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, HIDDEN)
    ).double()
    G.load_state_dict(log.server["generator"])
    adam, generator = optimizer(G.parameters()), torch.Generator()

    def made(noise, c):
        return G(torch.cat([noise, F.one_hot(c, CLASSES)], 1))

    def draw(n):
        noise = torch.rand(2, n, noise_size, dtype=torch.float64)
        return noise, known[torch.randint(len(known), (n,))]

    def loss(w, a, b, t, random):
        noise, c = drawn(random, draw, len(b))
        of_batch, of_others = made(noise[0], b).detach(), made(noise[1], c).detach()
        taught, told = kl(classify(w, of_batch), logits(w, a)), F.cross_entropy(classify(w, of_others), c)
        return cross_entropy(w, a, b) + beta * decay**t * taught + alpha * decay**t * told

    x, known = log.start, None
    for t, cohort in log.rounds():
        y = dict.fromkeys(cohort, x)
        G.eval()
        for k in cohort:
            for a, b, random in log.steps[t, k, "train"]:
                y[k] = sgd(y[k], [(a, b)], *((loss, t, random) if t else ()))
        counts = torch.stack([log.counts[k] for k in cohort])
        held = counts.sum(0).nonzero().flatten()
        known = held if known is None else torch.cat([known, held]).unique()
        share = counts / counts.sum(0).clamp_min(1)
        G.train()
        generator.manual_seed(derive_seed(log.seed, "fedgen", t))
        adam.param_groups[0]["lr"] = optimizer.keywords["lr"] * lr_decay**t
        for _ in range(server_steps):
            c = held[torch.randint(len(held), (batch_size,), generator=generator)]
            noise = torch.rand(batch_size, noise_size, generator=generator, dtype=torch.float64)
            z = made(noise, c)
            each = torch.stack([F.cross_entropy(classify(y[k], z), c, reduction="none") for k in cohort])
            apart = (noise[:, None] - noise).square().mean(2) * (z[:, None] - z).abs().mean(2)
            adam.zero_grad()
            ((each * share[:, c]).mean(1).sum() + diversity * torch.exp(-apart.mean())).backward()
            adam.step()
        x = mean(y, log.n)
    return End(x, server={"generator": vector(G.state_dict())})


@replays(
    m.FedAvg,
    servers.FedDF,
    id="feddf",
    server={"server_steps": 5, "batch_size": 100, "optimizer": partial(Adam, lr=0.01), "ensemble": "logits"},
)
@replays(
    m.FedAvg,
    servers.FedDF,
    id="feddf-probabilities",
    server={"server_steps": 5, "batch_size": 100, "optimizer": partial(Adam, lr=0.01), "ensemble": "probabilities"},
)
def feddf(log, server_steps, batch_size, optimizer, ensemble):
    """Lin et al., 2020: the mean of the models learns from all of them on the server's samples without labels.

    Steps are given; officially they end when a validation set gains nothing.
    """
    x, public = log.start, log.run.data.server_data().x.double()
    for t, cohort in log.rounds():
        y = {k: sgd(x, log.batches(t, k)) for k in cohort}
        z = torch.stack([logits(y[k], public) for k in cohort])
        taught = z.mean(0).softmax(1) if ensemble == "logits" else z.softmax(2).mean(0)
        x = mean(y, log.n).requires_grad_()
        adam = optimizer([x])
        for step in range(server_steps):
            adam.param_groups[0]["lr"] = optimizer.keywords["lr"] * (1 + math.cos(math.pi * step / server_steps)) / 2
            adam.zero_grad()
            F.cross_entropy(logits(x, public), taught).backward()
            adam.step()
        x = x.detach()
    return End(x)


@replays(m.ControlVariates, servers.SCAFFOLD, id="scaffold-1", own={"option": "I"}, server={"server_lr": 0.7})
@replays(m.ControlVariates, servers.SCAFFOLD, id="scaffold-2", own={"option": "II"}, server={"server_lr": 1.0})
def scaffold(log, option, server_lr):
    """Karimireddy et al., 2020, Algorithm 1: steps are corrected by the server's control variate less the own one."""
    x, c, own = log.start, torch.zeros_like(log.start), log.everybody(torch.zeros_like(log.start))
    for t, cohort in log.rounds():
        y, new = dict.fromkeys(cohort, x), {}
        for k in cohort:
            batches = log.batches(t, k)
            for a, b in batches:
                y[k] = y[k] - LR * (slope(cross_entropy, y[k], a, b) + c - own[k])
            if option == "I":
                new[k] = slope(cross_entropy, x, *log.train(k))
            else:
                new[k] = own[k] - c + (x - y[k]) / (len(batches) * LR)
        x = x + server_lr * (mean(y) - x)
        c = c + sum(new[k] - own[k] for k in cohort) / len(log.n)
        own = own | new
    return End(x, kept={"own": own}, server={"control": c})


@replays(m.FedProx, own={"mu": 0.4})
def fedprox(log, mu):
    """Li et al., 2020, equation 2."""

    def near(w, a, b, x):
        return cross_entropy(w, a, b) + mu / 2 * (w - x).square().sum()

    x = log.start
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k), near, x) for k in cohort}, log.n)
    return End(x)


@replays(m.Ditto, own={"personal_lambda": 0.5, "personal_epochs": 2})
def ditto(log, personal_lambda, personal_epochs):
    """Li et al., 2021, Algorithm 1: a personal model v near the global one, which is FedAvg's.

    Each has batches of its own; officially both learn from the same ones, and clients count equally.
    """

    def near(v, a, b, x):
        return cross_entropy(v, a, b) + personal_lambda / 2 * (v - x).square().sum()

    x, v = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        for k in cohort:
            assert len(log.batches(t, k, "personal")) == personal_epochs * len(log.batches(t, k, "global"))
            v[k] = sgd(v[k], log.batches(t, k, "personal"), near, x)
        x = mean({k: sgd(x, log.batches(t, k, "global")) for k in cohort}, log.n)
    return End(x, kept={"personal": v})


@replays(
    m.PFedMe,
    WeightedAverage,
    own={"moreau_lambda": 4.0, "personal_steps": 3, "personal_lr": 0.08},
    server={"server_lr": 0.8, "weighting": "uniform"},
)
def pfedme(log, moreau_lambda, personal_steps, personal_lr, server_lr, weighting):
    """Dinh et al., 2020, Algorithm 1: w goes towards theta, the minimum of a batch's loss near w.

    A batch begins with the last one's theta, as in the official code, whose L2 term in the loss is left out.
    """
    x, theta = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        w = dict.fromkeys(cohort, x)
        for k in cohort:
            theta[k] = x
            for a, b in log.batches(t, k):
                for _ in range(personal_steps):
                    pull = moreau_lambda * (theta[k] - w[k])
                    theta[k] = theta[k] - personal_lr * (slope(cross_entropy, theta[k], a, b) + pull)
                w[k] = w[k] - LR * moreau_lambda * (w[k] - theta[k])
        x = (1 - server_lr) * x + server_lr * mean(w)
    return End(x, kept={"personal": {k: theta[k] for k in log.seen}})


@replays(m.PerFedAvg, id="per_fedavg-fo", own={"alpha": 0.3, "variant": "FO", "delta": 0.1})
@replays(m.PerFedAvg, id="per_fedavg-hf", own={"alpha": 0.3, "variant": "HF", "delta": 0.1})
def per_fedavg(log, alpha, variant, delta):
    """Fallah et al., 2020, Algorithm 1: training is for the model after one step of adaptation.

    A batch is cut into the algorithm's parts; one that is too small for them is learnt from as it is.
    """
    parts, x = 2 if variant == "FO" else 3, log.start
    for t, cohort in log.rounds():
        w = dict.fromkeys(cohort, x)
        for k in cohort:
            for a, b in log.batches(t, k):
                if len(b) < parts:
                    w[k] = sgd(w[k], [(a, b)])
                    continue
                ends = [part * len(b) // parts for part in range(parts + 1)]
                one, two, *three = [(a[i:j], b[i:j]) for i, j in itertools.pairwise(ends)]
                g = slope(cross_entropy, w[k] - alpha * slope(cross_entropy, w[k], *one), *two)
                if three:
                    ahead, behind = (slope(cross_entropy, w[k] + way * g, *three[0]) for way in (delta, -delta))
                    g = g - alpha * (ahead - behind) / (2 * delta)
                w[k] = w[k] - LR * g
        x = mean(w, log.n)
    last = len(log.cohorts)
    adapted = {k: sgd(x, log.batches(last, k, "adapt"), lr=alpha) for k in log.everybody(x)}
    return End(x, outputs={k: logits(w, log.split(k, "test")[0]) for k, w in adapted.items()})


@replays(m.MOON, own={"mu": 1.5, "tau": 0.3})
def moon(log, mu, tau):
    """Li, He and Song, 2021, Algorithm 1: features stay near the received model's and leave the last own one's.

    Officially a client's first model is contrasted with random weights, here with the received ones.
    """

    def contrast(w, a, b, x, last):
        h, near, far = (features(v, a) for v in (w, x, last))
        near, far = (torch.exp(F.cosine_similarity(h, other) / tau) for other in (near, far))
        return cross_entropy(w, a, b) - mu * (near / (near + far)).log().mean()

    x, last = log.start, {}
    for t, cohort in log.rounds():
        y = {k: sgd(x, log.batches(t, k), contrast, x, last.get(k, x)) for k in cohort}
        last = last | y
        x = mean(y, log.n)
    return End(x, kept={"previous": {k: w[BODY] for k, w in last.items()}})


@replays(m.FedRep, own={"head_epochs": 2})
def fedrep(log, head_epochs):
    """Collins et al., 2021, Algorithm 1: first the own classifier on the received features, then these under it."""
    x, heads = log.start[BODY], log.everybody(log.start[HEAD])
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            assert len(log.batches(t, k, "head")) == head_epochs * len(log.batches(t, k, "body"))
            w = sgd(torch.cat([x, heads[k]]), log.batches(t, k, "head"), part=HEAD)
            heads[k] = w[HEAD]
            y[k] = sgd(w, log.batches(t, k, "body"), part=BODY)[BODY]
        x = mean(y, log.n)
    return End(x, kept={"net.classifier": heads})


@replays(m.FedBABU, own={"finetune_epochs": 2})
def fedbabu(log, finetune_epochs):
    """Oh, Kim and Yun, 2022, Algorithm 1: bodies are trained under the initial classifier, and all before use.

    Bodies count by samples, officially equally.
    """
    x, last = log.start, len(log.cohorts)
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k, "body"), part=BODY) for k in cohort}, log.n)
    tuned = {k: sgd(x, log.batches(last, k, "finetune")) for k in log.everybody(x)}
    assert len(log.batches(last, 0, "finetune")) == finetune_epochs * len(log.batches(0, 0, "body"))
    return End(x[BODY], outputs={k: logits(w, log.split(k, "test")[0]) for k, w in tuned.items()})


@replays(m.LGFedAvg)
def lg_fedavg(log):
    """Liang et al., 2020, Algorithm 1: own bodies under an averaged classifier, which counts by samples here."""
    x, bodies = log.start[HEAD], log.everybody(log.start[BODY])
    for t, cohort in log.rounds():
        y = {k: sgd(torch.cat([bodies[k], x]), log.batches(t, k)) for k in cohort}
        bodies = bodies | {k: w[BODY] for k, w in y.items()}
        x = mean({k: w[HEAD] for k, w in y.items()}, log.n)
    return End(x, kept={"net.features": bodies})


@replays(m.FedRoD, own={"gamma": 0.8})
def fedrod(log, gamma):
    """Chen and Chao, 2022: a balanced loss for the generic model, and its errors for the personal head."""

    def balanced(w, a, b, k):
        return F.cross_entropy(logits(w, a) + gamma * log.counts[k].log(), b)

    def together(v, a, b, w):
        return F.cross_entropy(logits(w, a) + classify(v, features(w, a)), b)

    x, own = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        y = dict.fromkeys(cohort, x)
        for k in cohort:
            for batch in log.batches(t, k):
                own[k], y[k] = sgd(own[k], [batch], together, y[k], part=HEAD), sgd(y[k], [batch], balanced, k)
        x = mean(y, log.n)
    outputs = {k: logits(x, a) + classify(own[k], features(x, a)) for k in log.seen for a, _ in [log.split(k, "test")]}
    return End(x, kept={"personal": {k: v[HEAD] for k, v in own.items()}}, outputs=outputs)


@replays(m.FedLoGe, own={"sparsity": 0.4, "norm": 0.7, "scale": 1.7})
def fedloge(log, sparsity, norm, scale):
    """Xiao et al., 2024: features by a fixed classifier, and two heads on them, of which the own one lends its lengths.

    Officially classes without test samples are ruled out of predictions, and the fixed classifier has a random bias.
    """
    frame = log.run.model.frame
    torch.testing.assert_close(frame.norm(dim=0), torch.full((CLASSES,), norm, dtype=torch.float64), rtol=1e-6, atol=0)

    def by_frame(w, a, b):
        return F.cross_entropy(features(w, a) @ frame, b)

    def by_head(w, a, b, body):
        return F.cross_entropy(classify(w, features(body, a)), b)

    def predicted(w, v, a):
        _, _, weight, bias = split(w)
        _, _, own, _ = split(v)
        h = features(w, a)
        if v is log.start:
            return h @ (scale * weight / weight.norm(dim=1, keepdim=True)).T + bias
        return h @ (weight * own.norm(dim=1, keepdim=True)).T + bias + classify(v, h)

    x, own = log.start, log.everybody(log.start)
    for t, cohort in log.rounds():
        y = dict.fromkeys(cohort, x)
        for k in cohort:
            for batch in log.batches(t, k):
                body = sgd(y[k], [batch], by_frame, part=BODY)
                head = sgd(y[k], [batch], by_head, y[k], part=HEAD)
                own[k] = sgd(own[k], [batch], by_head, y[k], part=HEAD)
                y[k] = torch.cat([body[BODY], head[HEAD]])
        x = mean(y, log.n)
    outputs = {k: predicted(x, own[k], log.split(k, "test")[0]) for k in own}
    return End(x, kept={"personal": {k: own[k][HEAD] for k in log.seen}}, outputs=outputs)


@replays(
    m.FedALA,
    own={
        "layers": 1,
        "rand_percent": 100.0,
        "eta": 2.0,
        "threshold": 0.01,
        "num_pre_loss": 3,
        "max_passes": 30,
        "ala_batch_size": 100,
    },
)
def fedala(log, layers, rand_percent, eta, threshold, num_pre_loss, max_passes, ala_batch_size):
    """Zhang et al., 2023, Algorithm 1: a round starts from a mix of the received and the own classifier, by entry.

    The weights W are learnt on all samples at once here, so that their order doesn't count.
    """

    def mixed(W, x, own):
        return torch.cat([x[BODY], own[HEAD] + (x - own)[HEAD] * W])

    def of_weights(W, x, own, a, b):
        return cross_entropy(mixed(W, x, own), a, b)

    def started(k, x):
        if k not in own:
            return x
        losses = []
        for _ in range(max_passes if times[k] == 1 else 1):
            losses.append(float(of_weights(W[k], x, own[k], *log.train(k))))
            W[k] = (W[k] - eta * slope(of_weights, W[k], x, own[k], *log.train(k))).clamp(0, 1)
            if len(losses) > num_pre_loss and statistics.pstdev(losses[-num_pre_loss:]) < threshold:
                break
        return mixed(W[k], x, own[k])

    x, own, times = log.start, {}, log.everybody(0)
    W = log.everybody(torch.ones_like(x[HEAD]))
    for t, cohort in log.rounds():
        y = {k: sgd(started(k, x), log.batches(t, k)) for k in cohort}
        own = own | y
        times = {k: count + (k in y) for k, count in times.items()}
        x = mean(y, log.n)
    kept = {"own": {k: w[HEAD] for k, w in own.items()}, "weights": dict(W)}
    return End(x, kept=kept, outputs={k: logits(started(k, x), log.split(k, "test")[0]) for k in log.everybody(x)})


@replays(m.CloudProx, servers.FedAMP, id="fedamp", own={"mu": 0.4}, server={"alpha": 0.3, "sigma": 2.0, "min_own": 0.1})
@replays(
    m.CloudProx,
    servers.FedAMP,
    id="fedamp-bounded",
    own={"mu": 0.4},
    server={"alpha": 5.0, "sigma": 2.0, "min_own": 0.4},
)
def fedamp(log, mu, alpha, sigma, min_own):
    """Huang et al., 2021, Algorithm 1: models are held near u, a mix of all by how near they are.

    Own weights below a bound are raised to it; the paper asks for an alpha by which they aren't.
    """

    def near(w, a, b, u):
        return cross_entropy(w, a, b) + mu / 2 * (w - u).square().sum()

    w, u = {}, log.everybody(log.start)
    for t, cohort in log.rounds():
        w = w | {k: sgd(w.get(k, log.start), log.batches(t, k), near, u[k]) for k in cohort}
        for k in w:
            xi = {j: alpha / sigma * math.exp(-float((w[k] - w[j]).square().sum()) / sigma) for j in w if j != k}
            scale = min(1.0, (1 - min_own) / sum(xi.values()))
            xi = {j: scale * weight for j, weight in xi.items()}
            u[k] = (1 - sum(xi.values())) * w[k] + sum(weight * w[j] for j, weight in xi.items())
    return End(sent=u, kept={"net": w})


STAR = {0: [1, 2, 3, 4], 1: [2], 3: [4]}


@replays(m.FedAvg, servers.GossipAverage, id="dpsgd-ring", server={"graph": "ring"})
@replays(m.FedAvg, servers.GossipAverage, id="dpsgd-star", local_epochs=2, server={"graph": STAR})
def dpsgd(log, graph):
    """Lian et al., 2017, with the mix after the steps, as in Sun et al., 2023; clients who stay away have no edges."""
    edges = {(k, (k + 1) % 5) for k in range(5)} if graph == "ring" else {(k, j) for k in graph for j in graph[k]}
    edges |= {(j, k) for k, j in edges}
    w = log.everybody(log.start)
    for t, cohort in log.rounds():
        y = {k: sgd(w[k], log.batches(t, k)) for k in cohort}
        hears = {k: [j for j in cohort if (k, j) in edges] for k in cohort}
        share = {(k, j): 1 / (1 + max(len(hears[k]), len(hears[j]))) for k in cohort for j in hears[k]}
        w |= {k: y[k] + sum(share[k, j] * (y[j] - y[k]) for j in hears[k]) for k in cohort}
    return End(sent=w)


@replays(
    m.DisPFL, servers.IntersectionAverage, id="dispfl", own={"density": 0.8, "anneal": 0.6}, server={"graph": STAR}
)
def dispfl(log, density, anneal, graph):
    """Dai et al., 2022; as in the official code, but that clients who stay away don't train either.

    The gradient is of all of a client's samples, which are fewer than a batch of it.
    """
    # 0.8 of 53 entries: both biases whole, and 34.4 shared out to the matrices as 11 to 8, by the sums of their sides
    counts = [(slice(0, 30), 19), (slice(30, 35), 5), (slice(35, 50), 14), (slice(50, 53), 3)]
    edges = {(k, j) for k in graph for j in graph[k]} | {(j, k) for k in graph for j in graph[k]}
    w, mask = log.everybody(log.start), {}
    for t, cohort in log.rounds():
        y, used = {}, {}
        for k in cohort:
            if k not in mask:
                turn = derive_seed(log.seed, "train", t, k)
                generator = torch.Generator().manual_seed(derive_seed(turn, "dispfl masks", k))
                mask[k] = torch.zeros_like(log.start, dtype=torch.bool)
                for part, count in counts:
                    mask[k][part][torch.randperm(part.stop - part.start, generator=generator)[:count]] = True
            used[k] = mask[k].clone()
            y[k] = sgd(w[k] * used[k], log.batches(t, k), part=used[k])
            gradient = slope(cross_entropy, y[k], *log.train(k)).abs()
            for part, count in counts:
                number = math.ceil(anneal / 2 * (1 + math.cos(math.pi * t / 4)) * count)
                own = mask[k][part]
                own[torch.where(own, y[k][part].abs(), math.inf).argsort()[:number]] = False
                own[torch.where(own, -1, gradient[part]).argsort(descending=True)[:number]] = True
        for k in cohort:
            near = [j for j in cohort if j == k or (k, j) in edges]
            w[k] = sum(y[j] for j in near) / sum(used[j].double() for j in near).clamp_min(1)
    return End(sent=w, kept={"mask": mask})


@replays(m.FedFomo, servers.AffinityPool, id="fedfomo", own={"norm": "l2"}, server={"num_models": 2})
@replays(m.FedFomo, servers.AffinityPool, id="fedfomo-l1", own={"norm": "l1"}, server={"num_models": 1})
def fedfomo(log, norm, num_models):
    """Zhang et al., 2021, Algorithm 1: a round starts from the models that lower the own validation loss."""
    w, old, sent = log.everybody(log.start), log.everybody(log.start), {}
    P = {k: log.everybody(0.0) for k in w}
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:
            chosen = sorted(sent.keys() - {k}, key=lambda j, k=k: (-P[k][j], j))[:num_models]
            models = {j: sent[j] for j in chosen} | {k: w[k]}
            before = cross_entropy(old[k], *log.split(k, "val"))
            gains = {}
            for j, model in models.items():
                distance = (model - old[k]).norm(p=1 if norm == "l1" else 2)
                gains[j] = float((before - cross_entropy(model, *log.split(k, "val"))) / (distance + 1e-5))
                P[k][j] += gains[j]
            helpful = {j: gain for j, gain in gains.items() if gain > 0}
            if helpful:
                w[k] = sum(gain / sum(helpful.values()) * models[j] for j, gain in helpful.items())
            old[k] = w[k]
            y[k] = sgd(w[k], log.batches(t, k))
        w, sent = w | y, sent | y
    return End(kept={"net": sent, "old": {k: old[k] for k in sent}})


@replays(m.APPLE, own={"rho_lr": 0.05, "mu": 0.3, "penalty_share": 0.75})
def apple(log, rho_lr, mu, penalty_share):
    """Luo and Wu, 2022: a client's model mixes the cores of all; it learns its own core and the weights rho.

    All cores start from one model; officially each is drawn by itself.
    """

    def of_mix(rho, cores, a, b):
        return cross_entropy(rho @ cores, a, b)

    p = torch.tensor(log.n, dtype=torch.float64) / sum(log.n)
    p = p.float().double()  # it travels in float32
    cores, rho, R = torch.stack([log.start] * len(log.n)), log.everybody(p), penalty_share * len(log.cohorts)
    for t, cohort in log.rounds():
        fade = (1 + math.cos(math.pi * t / R)) / 2 if t < R else 0.0
        new = cores.clone()
        for k in cohort:
            held = cores.clone()
            for a, b in log.batches(t, k):
                g = slope(cross_entropy, rho[k] @ held, a, b)
                moved = rho[k] - rho_lr * (held @ g + fade * mu * (rho[k] - p))
                held[k] -= LR * rho[k][k] * g
                rho[k] = moved
            new[k] = held[k]
        cores = new
    kept = {"net": {k: cores[k] for k in log.seen}, "rho": {k: rho[k] for k in log.seen}}
    return End(kept=kept, outputs={k: logits(rho[k] @ cores, log.split(k, "test")[0]) for k in log.everybody(0)})


def prototypes(log, models, known):
    """Return the mean feature of each class over the clients that have it, by their samples; else the last one."""
    known = dict(known)
    for c in range(CLASSES):
        held = {k: log.counts[k][c] for k in models if log.counts[k][c]}
        if held:
            mass = sum(held.values())
            parts = [(log.train(k), n) for k, n in held.items()]
            means = [features(models[k], a[b == c]).mean(0) for k, ((a, b), _) in zip(held, parts, strict=True)]
            known[c] = sum(n / mass * h for h, (_, n) in zip(means, parts, strict=True))
    return known


@replays(m.FedProto, own={"align_lambda": 2.0})
def fedproto(log, align_lambda):
    """Tan et al., 2022: models stay; features are drawn to the mean feature of their class, and classified by it."""

    def aligned(w, a, b, known):
        h = features(w, a)
        aim = torch.stack([known.get(int(c), own.detach()) for c, own in zip(b, h, strict=True)])
        return F.cross_entropy(classify(w, h), b) + align_lambda * (h - aim).square().mean()

    w, known = log.everybody(log.start), {}
    for t, cohort in log.rounds():
        y = {k: sgd(w[k], log.batches(t, k), aligned, known) for k in cohort}
        w, known = w | y, prototypes(log, y, known)
    g = torch.stack([known[c] for c in range(CLASSES)])
    outputs = {k: -(features(w[k], log.split(k, "test")[0])[:, None] - g).square().sum(2) for k in log.everybody(0)}
    return End(kept={"net": {k: w[k] for k in log.seen}}, server={"means": known}, outputs=outputs)


@replays(m.PACClient, own={"align_lambda": 1.5, "head_epochs": 2, "head_lr": 0.3})
def fedpac(log, align_lambda, head_epochs, head_lr):
    """Xu et al., 2023: features drawn to prototypes, and each client's own combination of all classifiers."""

    def aligned(w, a, b, aims):
        return cross_entropy(w, a, b) + align_lambda * (features(w, a) - aims[b]).square().mean()

    def statistics_of(k, w):
        (a, b), pi = log.train(k), log.counts[k] / log.n[k]
        h = features(w, a)
        mu = torch.stack([h[b == c].mean(0) if pi[c] else torch.zeros(HIDDEN) for c in range(CLASSES)]).double()
        square = torch.stack([h[b == c].square().sum(1).mean() if pi[c] else pi[c] for c in range(CLASSES)])
        H = pi[:, None] * mu
        return mu, H, (pi @ square - H.square().sum()) / log.n[k]

    def combination(k, H, V):
        """Find the point of the simplex with the least bias and variance, by trying all of its faces."""
        ids = list(H)
        apart = torch.stack([(H[k] - H[j]).flatten() for j in ids])
        P, best = torch.diag(torch.stack([V[j] for j in ids])) + apart @ apart.T, None
        for size in range(1, len(ids) + 1):
            for face in map(list, itertools.combinations(range(len(ids)), size)):
                alpha = torch.zeros(len(ids), dtype=torch.float64)
                inner = torch.linalg.solve(P[face][:, face], torch.ones(size, dtype=torch.float64))
                alpha[face] = inner / inner.sum()
                if (alpha >= 0).all() and (best is None or alpha @ P @ alpha < best @ P @ best):
                    best = alpha
        best = torch.where(best < 1e-3, 0, best)
        return dict(zip(ids, best / best.sum(), strict=True))

    x, heads, known = log.start, log.everybody(log.start[HEAD]), {}
    for t, cohort in log.rounds():
        y, H, V = {}, {}, {}
        for k in cohort:
            w = torch.cat([x[BODY], heads[k]])
            mu, H[k], V[k] = statistics_of(k, w)
            aims = torch.stack([known.get(c, mu[c]) for c in range(CLASSES)])
            assert len(log.batches(t, k, "head")) == head_epochs * len(log.batches(t, k, "body"))
            w = sgd(w, log.batches(t, k, "head"), lr=head_lr, part=HEAD)
            y[k] = sgd(w, log.batches(t, k, "body"), *((aligned, aims) if known else ()), part=BODY)
        x, known = mean(y, log.n), prototypes(log, y, known)
        for k in cohort:
            heads[k] = sum(alpha * y[j][HEAD] for j, alpha in combination(k, H, V).items())
    return End(x, sent={k: torch.cat([x[BODY], head]) for k, head in heads.items()})


@replays(m.FedAvg, servers.CFL, id="cfl", local_epochs=3, server={"eps1": 0.6, "eps2": 0.1, "warmup": 0})
@replays(m.FedAvg, servers.CFL, id="cfl-late", server={"eps1": 0.6, "eps2": 0.1, "warmup": 3})
def cfl(log, eps1, eps2, warmup):
    """Sattler, Mueller and Samek, 2020: clusters that are at rest while their clients aren't are cut in two.

    By complete linkage, as in the official code; a client that stays away is judged by its last update.
    """

    def cut(members, change):
        groups = [[k] for k in members if k in change]

        def distance(pair):
            return max(1 - F.cosine_similarity(change[i], change[j], dim=0) for i in pair[0] for j in pair[1])

        while len(groups) > 2:
            one, other = min(itertools.combinations(groups, 2), key=distance)
            groups = [group for group in groups if group not in (one, other)] + [sorted(one + other)]
        max(sorted(groups), key=len).extend(k for k in members if k not in change)
        return sorted(map(sorted, groups))

    clusters, model, change = [list(range(len(log.n)))], log.everybody(log.start), {}
    for t, cohort in log.rounds():
        y = {k: sgd(model[k], log.batches(t, k)) for k in cohort}
        change |= {k: y[k] - model[k] for k in cohort}
        parts = []
        for members in clusters:
            changes = {k: change[k] for k in members if k in change}
            rests = bool(changes) and mean(changes).norm() < eps1 and max(map(torch.norm, changes.values())) > eps2
            parts += cut(members, changes) if rests and len(changes) > 2 and t >= warmup else [members]
        clusters = parts
        for members in clusters:
            if here := {k: y[k] for k in members if k in y}:
                model |= dict.fromkeys(members, mean(here))
    assert len(clusters) > 1
    return End(sent=model)


@replays(m.IFCA, servers.ClusterModels, id="ifca", local_epochs=3, server={"num_clusters": 2})
def ifca(log, num_clusters):
    """Ghosh et al., 2020, Algorithm 1, model averaging: a client trains the one of several models that fits it best."""

    def chosen(k):
        losses = [cross_entropy(model, *log.train(k)) for model in models]
        return losses.index(min(losses))

    models = [vector(model) for model in log.server["models"]]
    for t, cohort in log.rounds():
        choice = {k: chosen(k) for k in cohort}
        y = {k: sgd(models[j], log.batches(t, k)) for k, j in choice.items()}
        for j in range(num_clusters):
            if own := {k: y[k] for k in cohort if choice[k] == j}:
                models[j] = mean(own, log.n)
    outputs = {k: logits(models[chosen(k)], log.split(k, "test")[0]) for k in log.everybody(0)}
    return End(server={"models": torch.cat(models)}, outputs=outputs)


@replays(m.FedEM, local_epochs=2, own={"num_learners": 3})
def fedem(log, num_learners):
    """Marfoq et al., 2021, Algorithm 1, with the shares of samples looked up by row, as in the official code.

    There, clients outside of a round count in the mean too, and each learner draws batches of its own.
    """

    def step_of(k, pi):
        x, y = log.train(k)
        joint = pi * torch.stack([torch.exp(-F.cross_entropy(logits(w, x), y, reduction="none")) for w in theta], 1)
        q = joint / joint.sum(1, keepdim=True)
        return q, q.mean(0)

    def weighted(w, a, b, rows, q):
        found_at = (a[:, None] == rows).all(2).long().argmax(1)
        return (q[found_at] * F.cross_entropy(logits(w, a), b, reduction="none")).sum() / len(b)

    theta = [log.start, *(found(log.entries, f"learner_{m}") for m in range(1, num_learners))]
    pi = log.everybody(torch.full((num_learners,), 1 / num_learners, dtype=torch.float64))
    for t, cohort in log.rounds():
        y = [{} for _ in theta]
        for k in cohort:
            q, pi[k] = step_of(k, pi[k])
            for own, w, share in zip(y, theta, q.T, strict=True):
                own[k] = sgd(w, log.batches(t, k), weighted, log.train(k)[0], share)
        theta = [mean(models, log.n) for models in y]
    mixed = {k: pi[k] if k in log.seen else step_of(k, pi[k])[1] for k in pi}
    outputs = {}
    for k, shares in mixed.items():
        p = torch.stack([logits(w, log.split(k, "test")[0]).softmax(1) for w in theta])
        outputs[k] = torch.tensordot(shares, p, 1).log()
    sent = log.everybody(torch.cat(theta))
    return End(theta[0], sent=sent, kept={"pi": {k: pi[k] for k in log.seen}}, outputs=outputs)


@replays(m.FedAvg, servers.FedDisco, id="feddisco", server={"a": 0.4, "b": 0.1})
def feddisco(log, a, b):
    """Ye et al., 2023: clients count by samples, less for how far their classes are from balance."""
    x = log.start
    for t, cohort in log.rounds():
        y = {k: sgd(x, log.batches(t, k)) for k in cohort}
        q = {k: log.counts[k] / log.n[k] for k in cohort}
        d = {k: float(torch.xlogy(q[k], q[k] * CLASSES).sum()) for k in cohort}
        n = sum(log.n[k] for k in cohort)
        x = mean(y, {k: max(0.0, log.n[k] / n - a * d[k] / sum(d.values()) + b) for k in cohort})
    return End(x)


@replays(m.FedAvg, servers.LDAWA, id="ldawa", local_epochs=2, server={"warmup": 1})
def ldawa(log, warmup):
    """Rehman et al., 2023: each tensor of a client counts by its cosine with the global one; weights don't sum to 1."""
    x = log.start
    for t, cohort in log.rounds():
        y = {k: sgd(x, log.batches(t, k)) for k in cohort}
        if t < warmup:
            x = mean(y, log.n)
            continue
        tensors = zip(split(x), *(split(y[k]) for k in cohort), strict=True)
        x = torch.cat(
            [
                sum(F.cosine_similarity(own.flatten(), old.flatten(), dim=0) * own.flatten() for own in new) / len(new)
                for old, *new in tensors
            ]
        )
    return End(x)


@replays(
    m.FedAS,
    servers.FisherAverage,
    id="fedas",
    own={"align_epochs": 2, "align_lr": 0.2, "align_batch_size": 6, "fisher_batch_size": 5},
)
def fedas(log, align_epochs, align_lr, align_batch_size, fisher_batch_size):
    """Yang, Huang and Ye, 2024: received bodies are aligned with the own last one, and count by slopes of losses.

    Each aligns a copy of the server's model; the official code aligns the server's own one, client after client, so
    that the order of clients counts.
    """

    def apart(w, a, b, aims):
        squares = (features(w, a) - aims[b]).square().mean(1)
        return sum(squares[b == c].mean() for c in b.unique())

    x, own, heads = log.start[BODY], {}, log.everybody(log.start[HEAD])
    for t, cohort in log.rounds():
        y, F_k = {}, {}
        for k in cohort:
            w, (a, b) = torch.cat([x, heads[k]]), log.train(k)
            if k in own:
                h = features(own[k], a)
                aims = torch.stack([h[b == c].mean(0) for c in range(CLASSES)])
                w = sgd(w, log.batches(t, k, "align"), apart, aims, lr=align_lr, part=BODY)
                assert len(log.batches(t, k, "align")) == align_epochs * math.ceil(len(b) / align_batch_size)
            own[k] = sgd(w, log.batches(t, k))
            y[k], heads[k] = own[k][BODY], own[k][HEAD]
            parts = zip(a.split(fisher_batch_size), b.split(fisher_batch_size), strict=True)
            F_k[k] = sum(slope(cross_entropy, own[k], *part).square().sum() for part in parts)
        x = mean(y, F_k)
    outputs = {k: logits(w, log.split(k, "test")[0]) for k, w in own.items()}
    return End(x, kept={"personal": own, "net.classifier": heads}, outputs=outputs)


@replays(m.FedMD, own={"initial_epochs": 2, "distill_epochs": 3, "distill_batch_size": 100})
def fedmd(log, initial_epochs, distill_epochs, distill_batch_size):
    """Li and Wang, 2019: models stay; each fits the mean logits for public samples, then learns its own ones.

    Officially a model's training begins with the labels of the public samples, and with its own ones until nothing is
    gained, for which a number of passes stands here.
    """

    def error(w, a, consensus):
        return (logits(w, a) - consensus).abs().mean()

    w, public, consensus = {}, log.run.data.server_data().x.double(), None
    for t, cohort in log.rounds():
        for k in cohort:
            passes = 1 if k in w else initial_epochs
            assert len(log.batches(t, k)) == passes * math.ceil(log.n[k] / log.run.data.batch_size)
            w[k] = w.get(k, log.start)
            if consensus is not None:
                w[k] = sgd(w[k], [(public, consensus)] * distill_epochs, error)
            w[k] = sgd(w[k], log.batches(t, k))
        consensus = mean({k: logits(w[k], public) for k in cohort})
    return End(kept={"net": w}, server={"consensus": consensus})


@replays(m.FedLC, id="fedlc-one", own={"tau": 0.8, "absent": "one"})
@replays(m.FedLC, id="fedlc-out", own={"tau": 0.8, "absent": "out"})
def fedlc(log, tau, absent):
    """Zhang et al., 2022: logits are lowered by margins that are wider for a client's rarer classes.

    The softmax is the ordinary one; in the paper its sum leaves the true class out. An absent class counts as one
    sample, or is out of the softmax, as by the formula itself.
    """

    def calibrated(w, a, b, k):
        n = log.counts[k].clamp_min(1) if absent == "one" else log.counts[k]
        return F.cross_entropy(logits(w, a) - tau * n**-0.25, b)

    x = log.start
    for t, cohort in log.rounds():
        x = mean({k: sgd(x, log.batches(t, k), calibrated, k) for k in cohort}, log.n)
    return End(x)


@replays(m.FedDBE, servers.DomainConsensus, id="feddbe", own={"kappa": 5.0, "mu": 0.4})
@replays(m.FedDBE, servers.DomainConsensus, id="feddbe-batch", own={"kappa": 5.0, "mu": 1.0})
def feddbe(log, kappa, mu):
    """Zhang et al., 2023: an own bias of features, whose running mean r is held at everybody's.

    Officially all clients report r before the first round; here a client reports it where it first takes part, without
    bias and regulariser, and the first round's models are thrown away.
    """

    def biased(w, a, b, bias, r, consensus):
        h = features(w, a)
        r = (1 - mu) * r + mu * h.mean(0)
        return F.cross_entropy(classify(w, h + bias), b) + kappa / 2 * (r - consensus).square().mean()

    def of_bias(bias, w, a, b):
        return F.cross_entropy(classify(w, features(w, a) + bias), b)

    zeros, reports = torch.zeros(HIDDEN, dtype=torch.float64), {}
    x, bias = log.start, log.everybody(zeros)
    for t, cohort in log.rounds():
        y, new = dict.fromkeys(cohort, x), {}
        for k in cohort:
            r = zeros
            for a, b in log.batches(t, k):
                reached = (1 - mu) * r + mu * features(y[k], a).mean(0)
                if k in reports:
                    moved = bias[k] - LR * slope(of_bias, bias[k], y[k], a, b)
                    y[k] = sgd(y[k], [(a, b)], biased, bias[k], r, mean(reports, log.n))
                    bias[k] = moved
                else:
                    y[k] = sgd(y[k], [(a, b)])
                r = reached
            if k not in reports:
                new[k] = r
        x, reports = mean(y, log.n) if reports else x, reports | new
    outputs = {k: classify(x, features(x, log.split(k, "test")[0]) + bias[k]) for k in log.everybody(0)}
    return End(x, kept={"bias": bias}, server={"consensus/mean": mean(reports, log.n)}, outputs=outputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("record", "replay", "near"), REPLAYS)
@pytest.mark.by_default(
    but=[
        *("afl-2019", "apfl-paper", "cfl-late", "dpsgd-star", "fedamp-bounded", "fedcac-alone", "feddbe-batch"),
        *("feddf-probabilities", "fedfomo-l1", "fedmgda-free", "fednova-momentum", "fednova-proximal", "fedtgp-wide"),
        *("lg-mix-uniform", "mifa-decay", "mime-adam", "mimelite-adam", "per_fedavg-hf", "scaffold-2"),
    ]
)
def test_a_run_is_what_its_method_s_rule_makes_of_its_batches(record, replay, near):
    log = record()
    came = {k: [t for t, cohort in log.rounds() if k in cohort] for k in log.everybody(0)}
    assert [] in came.values(), "a client never takes part"
    assert any(late - early > 1 for rounds in came.values() for early, late in itertools.pairwise(rounds))
    check(log, replay(log), near)


def check(log, end, tolerance):
    aggregator = log.run.federation.aggregator

    def near(ours, expected):
        torch.testing.assert_close(vector(ours), vector(expected), rtol=tolerance, atol=tolerance)

    if end.model is not None:
        near(found(aggregator.global_model(), "net"), end.model)
    for client, expected in end.sent.items():
        near(found(aggregator.download(client), "weights"), expected)
    for name, expected in end.server.items():
        near(found(aggregator.state, name), expected)
    for name, clients in end.kept.items():
        for client, expected in clients.items():
            near(found(log.run.federation.job(client).state.personal, name), expected)
    for client, expected in end.outputs.items():
        near(log.outputs[client], expected)
