"""Survival against direct sums over samples and pairs."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from federations import fit
from pfl_lightning.data import Samples
from pfl_lightning.engines.evaluation import evaluate, evaluate_padded, metrics_of
from pfl_lightning.methods import FedAvg
from pfl_lightning.privacy.dp_sgd import check_example_level
from pfl_lightning.tasks import Survival, survival
from pfl_lightning.tasks.plain import made, plain
from tasks_and_data import OfKind, client_of, drawn, kinds, labels

TASKS = [Survival(), Survival(bins=(4, 9, 14))]


def patients(n, seed=0):
    """Log risks, and targets with ties."""
    times = labels(n, classes=20, seed=seed).float() + 1
    return drawn(n, 1, seed=seed), torch.stack([times, (labels(n, classes=3, seed=seed + 5) > 0).float()], 1)


def test_cox_s_loss_is_the_sum_over_those_at_risk(monkeypatch):
    monkeypatch.setattr(survival, "ROWS", 7)
    s, y = patients(40)
    terms = [
        torch.stack([s[j, 0].exp() for j in range(40) if y[j, 0] >= y[i, 0]]).sum().log() - s[i, 0]
        for i in range(40)
        if y[i, 1]
    ]
    assert float(Survival().loss(s, y)) == pytest.approx(float(sum(terms)) / 40, rel=1e-5)
    assert float(Survival().loss(s, y, "sum")) == pytest.approx(float(sum(terms)), rel=1e-5)
    # the order of samples, of which some share a time, and a shift of all risks change nothing
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert float(Survival().loss(s[order] + 3, y[order])) == pytest.approx(float(Survival().loss(s, y)), rel=1e-4)


def test_without_ties_it_is_flamby_s_loss():
    s, y = patients(8)
    y[:, 0] = torch.tensor([5.0, 1, 8, 2, 7, 3, 4, 6])
    falling = y[:, 0].argsort(descending=True)
    risks, events = s[falling, 0], y[falling, 1]
    terms = [events[i] * (risks[: i + 1].logsumexp(0) - risks[i]) for i in range(8)]
    assert float(Survival().loss(s, y)) == pytest.approx(float(sum(terms)) / 8, rel=1e-5)


@pytest.mark.parametrize("task", TASKS, ids=str)
@pytest.mark.parametrize("kind", ["no event", "one sample", "large outputs", "equal times"])
def test_gradients_are_finite(task, kind):
    _, y = patients(6)
    outputs = drawn(6, task.outputs)
    if kind == "no event":
        y[:, 1] = 0
    elif kind == "one sample":
        y, outputs = y[:1], outputs[:1]
    elif kind == "equal times":
        y[:, 0] = 9
    else:
        outputs = outputs * 500
    outputs.requires_grad_()
    loss = task.loss(outputs, y)
    loss.backward()
    assert loss.isfinite() and outputs.grad.isfinite().all()
    if task.bins is None and kind in ("no event", "one sample"):
        assert not loss and not outputs.grad.any()


def test_discrete_time_by_hand():
    task = Survival(bins=[1, 2, 4])
    logits = drawn(6, 3)
    h = logits.sigmoid()
    y = torch.tensor([[0.5, 1], [2.0, 1], [3.0, 0], [4.0, 0], [9.0, 1], [2.0, 0]])
    # the bins of which hazards, or survivals 1 - h, a sample's probability is the product
    came = [[0], [1], [], [], [], []]
    stayed = [[], [0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1]]
    probabilities = [
        math.prod([float(h[i, k]) for k in came[i]] + [1 - float(h[i, k]) for k in stayed[i]]) for i in range(6)
    ]
    assert float(task.loss(logits, y, "sum")) == pytest.approx(-sum(map(math.log, probabilities)), rel=1e-5)
    left = (1 - h.double()).cumprod(1)
    assert task.risk(logits).tolist() == pytest.approx((-(left * torch.tensor([1, 1, 2])).sum(1)).tolist())
    assert task.outputs == 3 and made(plain(task)) == task


def test_an_event_at_the_time_0_lies_in_the_first_bin():
    logits = drawn(2, 3).requires_grad_()
    task = Survival(bins=[1, 2, 4])
    loss = task.loss(logits, torch.tensor([[0.0, 1], [0.0, 0]]), "sum")
    loss.backward()
    # a sample censored at once has survived no bin
    assert loss.item() == pytest.approx(-math.log(logits[0, 0].sigmoid().item()))
    assert logits.grad[0, 0] < 0 and not logits.grad[0, 1:].any() and not logits.grad[1].any()


@pytest.mark.parametrize(
    ("task", "batch_size", "events", "named"),
    [
        (Survival(), 1, True, r"data.batch_size=1 .*Cox.* 64 .*task.bins"),
        (Survival(), 8, False, r"task=Survival\(\).*no training sample .* event"),
        (Survival(bins=(1, 3)), 1, True, None),
        (Survival(bins=(1, 3)), 8, False, None),
        (Survival(), 2, True, None),
    ],
)
def test_training_in_which_every_loss_is_0_is_refused_before_the_first_round(task, batch_size, events, named):
    kind = replace(kinds()["Survival"], task=task)
    data = OfKind(kind, seed=2)
    data.batch_size = batch_size
    if not events:
        data.setup()
        rows = torch.cat([own["train"] for own in data.division.clients])
        kind.y[rows, 1] = 0
    if named is None:
        assert fit(client_of(kind, FedAvg), data, max_rounds=1).rows
        return
    with pytest.raises(MisconfigurationException, match=named):
        fit(client_of(kind, FedAvg), data, max_rounds=1)


def index_of_pairs(risk, y):
    """The concordance index by all pairs, as lifelines defines it for predicted times of -risk."""
    right, pairs = 0.0, 0
    for i in range(len(y)):
        for j in range(len(y)):
            (t, event), (other, its) = y[i].tolist(), y[j].tolist()
            if event and (t < other or (t == other and not its)):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right / pairs if pairs else math.nan


@pytest.mark.parametrize("seed", [0, 1])
def test_concordance_is_of_all_pairs(monkeypatch, seed):
    monkeypatch.setattr(survival, "ROWS", 7)
    s, y = patients(40, seed)
    s = s.round(decimals=1)
    metric = Survival().configure_metrics()
    for rows in (slice(11), slice(11, None)):
        metric.update(s[rows], y[rows])
    assert float(metric.compute()["c_index"]) == pytest.approx(index_of_pairs(s[:, 0], y), abs=1e-12)


def test_concordance_at_its_ends_and_undefined():
    s, y = patients(30)
    metric = Survival().configure_metrics()
    metric.update(torch.zeros(30, 1), y)
    assert float(metric.compute()["c_index"]) == 0.5
    rising = torch.stack([torch.arange(30.0), torch.ones(30)], 1)
    for sign in (1, -1):
        metric = Survival().configure_metrics()
        metric.update(sign * rising[:, :1], rising)
        assert float(metric.compute()["c_index"]) == (sign < 0)
    censored = torch.stack([torch.arange(30.0), torch.zeros(30)], 1)
    for target in (censored, rising[:1]):
        metric = Survival().configure_metrics()
        metric.update(s[: len(target)], target)
        assert math.isnan(metric.compute()["c_index"])


def test_the_loss_of_an_evaluation_is_of_all_samples_at_once(monkeypatch):
    kind = kinds()["Survival"]
    client = client_of(kind, FedAvg)
    monkeypatch.setattr("pfl_lightning.data.samples.CHUNK", 16)
    monkeypatch.setattr("pfl_lightning.engines.evaluation.CHUNK", 16)
    alone = evaluate(client, Samples(kind.x, kind.y), metrics_of(client), nullcontext)
    outputs = client(kind.x).detach()
    columns = evaluate_padded(outputs[None], [kind.y], metrics_of(client), kind.task)
    stacked = {name: value for name, (value,) in columns.items()}
    assert alone == pytest.approx(stacked, rel=1e-5)
    assert alone["loss"] == pytest.approx(float(kind.task.loss(outputs, kind.y)), rel=1e-5)


@pytest.mark.parametrize("bins", [(), (3, 2), (0, 2), (1, math.inf), (1, math.nan)])
def test_bins_that_do_not_rise_are_refused(bins):
    with pytest.raises(MisconfigurationException, match=r"task\.bins="):
        Survival(bins=bins)


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (torch.zeros(4), "two floating numbers"),
        (torch.ones(4, 2, dtype=torch.int64), "two floating numbers"),
        (torch.tensor([[-1.0, 1]]), "1 times"),
        (torch.tensor([[math.nan, 1]]), "1 times"),
        (torch.tensor([[1.0, 300], [0, 200]]), "2 events that are neither 0 nor 1"),
    ],
)
def test_targets_without_times_and_events_are_refused(target, named):
    with pytest.raises(MisconfigurationException, match=named):
        Survival().check(target, "load()")


def test_private_steps_need_a_loss_of_each_sample():
    client = client_of(kinds()["Survival"], FedAvg)
    with pytest.raises(MisconfigurationException, match=r"task Survival.*discrete|bins"):
        check_example_level(client, client.configure_aggregator())


def test_the_gradient_of_an_event_far_above_all_others_at_risk_is_no_rounding():
    scores = torch.tensor([[40.3], [25.1], [3.7]], requires_grad=True)
    target = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
    Survival().loss(scores, target, "sum").backward()
    others = torch.exp(torch.tensor([25.1, 3.7], dtype=torch.float64) - 40.3)
    expected = torch.cat([-others.sum()[None], others])[:, None] / (1 + others.sum())
    assert scores.grad is not None and scores.grad.dtype == torch.float32
    assert torch.allclose(scores.grad.double(), expected, rtol=1e-5, atol=0)
