"""Direct preference optimization: the loss against its formula in double precision, its limits, and metrics."""

import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from pfl_lightning.data.trees import shortened
from pfl_lightning.nets.chunked_logits import ChunkedLogits
from pfl_lightning.tasks import Preference

PAIRS, LENGTH, TOKENS = 5, 7, 11


def drawn(seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(PAIRS, 2, LENGTH, TOKENS, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, TOKENS, (PAIRS, 2, LENGTH), generator=generator)
    tokens[:, :, :2] = -100
    tokens[1, 0, 4:] = -100
    reference = -10 * torch.rand(PAIRS, 2, generator=generator, dtype=torch.float64)
    return logits, {"tokens": tokens, "reference": reference}


def by_hand(logits, target, beta):
    """Losses and margins, pair by pair and token by token, without torch's cross-entropy."""
    losses, margins = [], []
    for pair in range(PAIRS):
        gains = []
        for side in range(2):
            total = 0.0
            for place, token in enumerate(target["tokens"][pair, side].tolist()):
                if token >= 0:
                    exponentials = [math.exp(value) for value in logits[pair, side, place].tolist()]
                    total += math.log(exponentials[token] / sum(exponentials))
            gains.append(total - float(target["reference"][pair, side]))
        margins.append(beta * (gains[0] - gains[1]))
        losses.append(math.log(1 + math.exp(-margins[-1])))
    return losses, margins


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_loss_and_metrics_are_the_formulas(beta):
    logits, target = drawn()
    losses, margins = by_hand(logits, target, beta)
    task = Preference(TOKENS, beta)
    task.check(target, "y")
    assert float(task.loss(logits, target)) == pytest.approx(sum(losses) / PAIRS, rel=1e-12)
    assert float(task.loss(logits, target, "sum")) == pytest.approx(sum(losses), rel=1e-12)
    assert task.weight(target) == PAIRS
    metrics = task.configure_metrics()
    # in two batches, as sums
    for part in (slice(0, 2), slice(2, None)):
        metrics.update(logits[part], {name: each[part] for name, each in target.items()})
    values = metrics.compute()
    assert float(values["reward_margin"]) == pytest.approx(sum(margins) / PAIRS, rel=1e-12)
    assert float(values["reward_acc"]) == pytest.approx(sum(margin > 0 for margin in margins) / PAIRS)
    assert 0 < float(values["reward_acc"]) < 1


def test_a_net_that_is_the_reference_has_a_loss_of_log_2_and_pushes_the_answers_apart():
    logits, target = drawn()
    task = Preference(TOKENS)
    target["reference"] = task.log_probabilities(logits, target["tokens"])
    logits.requires_grad_()
    loss = task.loss(logits, target)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    after = task.log_probabilities(logits - gradient, target["tokens"]) - target["reference"]
    assert bool((after[:, 0] > 0).all() and (after[:, 1] < 0).all())


def test_a_small_beta_makes_of_the_loss_log_2_less_half_the_margin():
    logits, target = drawn()
    small = Preference(TOKENS, 1e-6)
    margin = by_hand(logits, target, 1.0)[1]
    expected = -sum(margin) / PAIRS / 2
    assert (float(small.loss(logits, target)) - math.log(2)) / 1e-6 == pytest.approx(expected, rel=1e-4)


def test_chunks_of_logits_have_the_same_loss_and_gradient():
    torch.manual_seed(0)
    _, target = drawn()
    layer, hidden = nn.Linear(3, TOKENS).double(), torch.randn(PAIRS, 2, LENGTH, 3, dtype=torch.float64)
    task = Preference(TOKENS)
    losses = [task.loss(logits, target) for logits in (layer(hidden), ChunkedLogits(layer, hidden, 4))]
    one, other = (torch.autograd.grad(loss, layer.weight)[0] for loss in losses)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_padding_of_both_texts_is_cut_behind_the_longer_one():
    tokens = torch.full((2, 2, 20), -100)
    tokens[0, 1, 8] = 3
    target = {"tokens": tokens, "reference": torch.zeros(2, 2)}
    task = Preference(TOKENS, cut_padding=True)
    assert task.length(target) == 16 and Preference(TOKENS).length(target) is None
    x, y = shortened(tokens, target, task.length(target))
    assert x.shape == y["tokens"].shape == (2, 2, 16) and y["reference"].shape == (2, 2)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"tokens": torch.zeros(3, 4, dtype=torch.int64)}, "[3, 4]"),
        ({"tokens": torch.zeros(PAIRS, 2, 4)}, "float32"),
        ({"reference": torch.zeros(PAIRS)}, "reference"),
        ({"reference": None}, "reference"),
        ({"tokens": torch.full((PAIRS, 2, 4), TOKENS)}, str(TOKENS)),
    ],
)
def test_other_targets_are_refused(changed, named):
    with pytest.raises(MisconfigurationException) as error:
        Preference(TOKENS).check(drawn()[1] | changed, "load()")
    assert named in str(error.value) and "load()" in str(error.value)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_a_beta_out_of_range_is_refused(beta):
    with pytest.raises(MisconfigurationException, match=r"data\.beta="):
        Preference(TOKENS, beta)


def test_several_models_answer_by_the_mean_of_their_probabilities():
    logits, _ = drawn()
    models, shares = torch.stack([logits, logits.flip(-1)]), torch.tensor([0.25, 0.75])
    combined = Preference(TOKENS).combined(models, shares)
    mean = 0.25 * logits.softmax(-1) + 0.75 * logits.flip(-1).softmax(-1)
    torch.testing.assert_close(combined.exp(), mean)


def test_predictions_are_the_likeliest_tokens_and_all_probabilities():
    logits, _ = drawn()
    predictions = Preference(TOKENS).predictions(logits)
    assert predictions["classes"].shape == (PAIRS, 2, LENGTH)
    torch.testing.assert_close(predictions["probabilities"].sum(-1), torch.ones(PAIRS, 2, LENGTH).double())
    picked = predictions["probabilities"].gather(-1, predictions["classes"][..., None])[..., 0]
    assert torch.equal(picked, predictions["probabilities"].amax(-1))
