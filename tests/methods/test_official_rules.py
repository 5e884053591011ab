"""Each method once more, by hand: what its paper or its official code does, on the batches that a run's clients saw.

A replay is a function below a `@replays` that names the method and its settings. It is plain arithmetic on weights in
float64: five clients of unequal size, each without one of the three classes, of whom three take part in a round. Models
are flat vectors of one net's weights, w; in a round the server sends x and client k ends with y[k].
"""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD

from federations import CLASSES, FEATURES, HIDDEN, Blobs, fit, make_client, plain, points
from pfl_lightning import methods as m
from pfl_lightning.callbacks import FederatedCallback
from pfl_lightning.data import Partitioner

LR = 0.1
CLIENTS = (24, 14, 38, 29, 19)
"""Samples of each client, a quarter of which it is tested on."""


class Lacking(Partitioner):
    """Client k has no sample of class k modulo their number, and more of the later one of the two others."""

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
    """Matrix and bias of the body, and of the classifier."""
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


# What local training is made of


def slope(loss, w, *given):
    """The gradient of a loss(w, *given) in w."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(loss(w, *given), w)[0]


def sgd(w, batches, loss=cross_entropy, lr=LR, part=slice(None)):
    """Plain gradient descent of all weights or, if a part is given, of these alone."""
    for x, y in batches:
        step = torch.zeros_like(w)
        step[part] = lr * slope(loss, w, x, y)[part]
        w = w - step
    return w


def mean(models, n=None):
    """The mean of models by client id, by their samples n or, without these, plainly."""
    weights = torch.tensor([1.0 if n is None else n[k] for k in models], dtype=torch.float64)
    return torch.stack([weight * model for weight, model in zip(weights / weights.sum(), models.values())]).sum(0)


def kl(teacher, student):
    """Mean over rows of KL(softmax(teacher) || softmax(student)); the teacher is a constant."""
    p = teacher.detach().softmax(1)
    return (p * (p.log() - student.log_softmax(1))).sum(1).mean()


# The run, and what is to be replayed of it


class Recorder(FederatedCallback):
    """Keeps cohorts, and what the server knew before the first round."""

    def __init__(self):
        self.cohorts, self.server = [], {}

    def on_round_start(self, trainer, federation, cohort):
        if not self.cohorts:
            self.server = copy.deepcopy(federation.aggregator.state)
        self.cohorts.append(cohort)


class Log:
    """A run's facts, from which a replay starts.

    Attributes:
        cohorts: ids of the clients of each round.
        start: the initial weights.
        entries: the client module's initial ``state_dict``.
        server: the aggregator's state before the first round.
        n: training samples of each client.
        counts: the same by class.
    """

    def __init__(self, run, recorder, entries, steps):
        self.run, self.steps = run, steps
        self.cohorts, self.server, self.entries = recorder.cohorts, recorder.server, entries
        self.start = found(entries, "net")
        clients = range(run.data.num_clients)
        self.n = [run.data.size(k, "train") for k in clients]
        self.counts = [torch.bincount(self.train(k)[1], minlength=CLASSES) for k in clients]

    def rounds(self):
        return enumerate(self.cohorts)

    def batches(self, round, client, phase="train"):
        """What the client's training steps saw in a phase of its local work."""
        return [(x, y) for x, y, _ in self.steps[round, client, phase]]

    def split(self, client, name):
        part = self.run.data.part(client, name)
        return part.x.double(), part.y

    def train(self, client):
        return self.split(client, "train")


@dataclass
class End:
    """Where a replay ends, for comparison.

    Args:
        model: the global model.
        sent: what each client would receive next, by its id.
        kept: what stays with clients: by the name of the entries, or what these begin with, by client id.
        server: parts of the aggregator's state by name, those within others by names with dots.
        outputs: of some clients' models for their test samples, by client id.
    """

    model: torch.Tensor | None = None
    sent: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    server: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)


def found(record, path):
    """What is at a path into nested records, as a vector: an entry, or all whose names begin with it and a dot."""
    for name in path.split("/"):
        within = {own: value for own, value in record.items() if str(own).startswith(f"{name}.")}
        record = next((value for own, value in record.items() if str(own) == name), within)
    return vector(record)


def vector(record):
    if isinstance(record, dict):
        return torch.cat([vector(value) for value in record.values()])
    return torch.as_tensor(record, dtype=torch.float64).flatten()


REPLAYS = []


def replays(client, aggregator=None, id=None, local_epochs=1, own=None, server=None, net=plain, **settings):
    """Registers a replay of a method.

    Args:
        client: the client module's class.
        aggregator: the aggregator's class; None takes the client's own.
        id: the test's name; None takes the replay's.
        local_epochs: of the run.
        own: settings of the client module, which the replay takes by the same names.
        server: settings of the aggregator, likewise.
        net: what builds the net.
        **settings: of the client module, which the replay knows anyway.
    """

    def register(replay):
        run = partial(recorded, client, aggregator, local_epochs, own or {}, server or {}, {"net": net, **settings})
        REPLAYS.append(pytest.param(run, partial(replay, **(own or {}), **(server or {})), id=id or replay.__name__))
        return replay

    return register


def recorded(client, aggregator, local_epochs, own, server, settings):
    """A run of four rounds, logged."""
    steps = defaultdict(list)

    class Logged(client):
        def training_step(self, batch, batch_idx):
            steps[self.round, self.client_id, self.phase.name].append((*batch, torch.get_rng_state()))
            return super().training_step(batch, batch_idx)

    model = make_client(Logged, **{"optimizer": partial(SGD, lr=LR), **own, **settings})
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
    )
    return Log(run, recorder, entries, steps)


# The replays


@replays(m.FedAvg, m.FedAvgM, server={"server_lr": 0.7, "beta": 0.6, "nesterov": False})
@replays(m.FedAvg, m.FedAvgM, id="fedavgm-nesterov", server={"server_lr": 0.7, "beta": 0.6, "nesterov": True})
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


@replays(m.FedAvg, m.FedAdagrad, server={"server_lr": 0.05, "beta1": 0.3, "tau": 0.01})
def fedadagrad(log, **settings):
    return adaptive(log, lambda v, square: v + square, **settings)


@replays(m.FedAvg, m.FedAdam, server={"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01})
def fedadam(log, beta2, **settings):
    return adaptive(log, lambda v, square: beta2 * v + (1 - beta2) * square, **settings)


@replays(m.FedAvg, m.FedYogi, server={"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01})
def fedyogi(log, beta2, **settings):
    return adaptive(log, lambda v, square: v - (1 - beta2) * square * torch.sign(v - square), **settings)


MOMENTUM = {"optimizer": partial(SGD, lr=LR, momentum=0.6)}


@replays(m.FedNova, id="fednova-momentum", local_epochs=2, own={"mu": 0.0, **MOMENTUM})
@replays(
    m.FedNova,
    m.NormalizedAverage,
    id="fednova-proximal",
    own={"mu": 0.3},
    server={"effective": "steps", "beta": 0.5, "server_lr": 0.8},
)
def fednova(log, mu, optimizer=None, effective="norm", beta=0.0, server_lr=1.0):
    """Wang et al., 2020: the change of each client over the 1-norm of how its gradients count in it."""
    rho = optimizer.keywords["momentum"] if optimizer else 0.0
    x, moved = log.start, 0
    total, p = 0, 0
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
    """Acar et al., 2021, as its official code has it: h[k] sums what client k has moved, so that g_k = -alpha_k h[k]."""
    clients = range(len(log.n))
    share = [n * len(log.n) / sum(log.n) if weighting == "samples" else 1 for n in log.n]
    x, h = log.start, {k: torch.zeros_like(log.start) for k in clients}
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:

            def regularised(w, a, b, x=x, k=k):
                return cross_entropy(w, a, b) + alpha / share[k] * (h[k] @ w + (w - x).square().sum() / 2)

            y[k] = sgd(x, log.batches(t, k), regularised)
            h[k] = h[k] + y[k] - x
        model = mean(y)
        x = model + mean(h)
    kept = {k: -alpha / share[k] * h[k] for k in set().union(*log.cohorts)}
    return End(model, sent=dict.fromkeys(clients, x), kept={"gradient": kept})


@replays(m.QFedAvg, m.FairAverage, server={"q": 0.7})
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


@replays(m.FedNTD, local_epochs=2, own={"beta": 0.7, "temperature": 2.0})
def fedntd(log, beta, temperature):
    """Lee et al., 2022: the received model teaches what it says of the classes that a sample is not of."""
    x = log.start
    for t, cohort in log.rounds():

        def loss(w, a, b, x=x):
            others = ~F.one_hot(b, CLASSES).bool()
            teacher, student = (logits(v, a)[others].view(len(b), -1) / temperature for v in (x, w))
            return cross_entropy(w, a, b) + beta * temperature**2 * kl(teacher, student)

        x = mean({k: sgd(x, log.batches(t, k), loss) for k in cohort}, log.n)
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


@replays(m.FML, own={"alpha": 0.6, "beta": 0.3})
def fml(log, alpha, beta):
    """Shen et al., 2020: own model v and meme w learn from each other; the memes' plain mean travels."""
    x, v = log.start, {k: log.start for k in range(len(log.n))}
    for t, cohort in log.rounds():
        w = dict.fromkeys(cohort, x)
        for k in cohort:

            def mutual(own, other, share, a, b):
                return share * cross_entropy(own, a, b) + (1 - share) * kl(logits(other, a), logits(own, a))

            for a, b in log.batches(t, k):
                steps = slope(mutual, w[k], v[k], beta, a, b), slope(mutual, v[k], w[k], alpha, a, b)
                w[k], v[k] = w[k] - LR * steps[0], v[k] - LR * steps[1]
        x = mean(w)
    return End(x, kept={"personal": {k: v[k] for k in set().union(*log.cohorts)}})


@replays(m.FedPHP, own={"weight": 0.3, "temperature": 4.0, "momentum": 0.9, "participation": 0.6})
def fedphp(log, weight, temperature, momentum, participation):
    """Li et al., 2021: the history s teaches the received model, and takes in what comes of it.

    Officially the first history is a net with weights of its own; here the received model stands for it.
    """
    x, s, times = log.start, {}, dict.fromkeys(range(len(log.n)), 0)
    for t, cohort in log.rounds():
        y = {}
        for k in cohort:

            def loss(w, a, b, teacher=s.get(k, x)):
                p = (logits(teacher, a) / temperature).softmax(1).detach()
                taught = -(p * logits(w, a).log_softmax(1)).sum(1).mean()
                return (1 - weight) * cross_entropy(w, a, b) + weight * taught

            y[k] = sgd(x, log.batches(t, k), loss)
            mu = momentum * min(times[k] / (participation * len(log.cohorts)), 1)
            s[k] = mu * s[k] + (1 - mu) * y[k] if times[k] else y[k]
            times[k] += 1
        x = mean(y, log.n)
    return End(x, kept={"history": s})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("record", "replay"), REPLAYS)
def test_replay(record, replay):
    log = record()
    end = replay(log)
    federation = log.run.federation
    aggregator, module = federation.aggregator, log.run.model

    def near(ours, expected):
        torch.testing.assert_close(ours, expected.double(), rtol=1e-8, atol=1e-8)

    if end.model is not None:
        near(found(aggregator.global_model(), "net"), end.model)
    for client, expected in end.sent.items():
        near(found(aggregator.download(client), "weights"), expected)
    for name, expected in end.server.items():
        near(found(aggregator.state, name), expected)
    for name, clients in end.kept.items():
        for client, expected in clients.items():
            near(found(federation.clients[client].personal, name), expected)
    for client, expected in end.outputs.items():
        job = federation.job(client)
        module.receive(job.state.personal, job.payload, job.data.to("cpu", torch.float64))
        near(module.eval()(log.split(client, "test")[0]), expected)
