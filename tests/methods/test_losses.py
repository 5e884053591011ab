"""Terms of local objectives."""

import math

import pytest
import torch

from pfl_lightning.methods.losses import proximal, supervised_contrastive

OFFICIAL = {"tau": 100.0, "base_tau": 0.07, "normalize": False}


def features(n=8, d=5, seed=0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow(f, y, tau, base_tau):
    """The formula, anchor by anchor."""
    n, total = len(y), torch.zeros((), dtype=f.dtype)
    for i in range(n):
        others = [a for a in range(n) if a != i]
        positives = [p for p in others if y[p] == y[i]]
        for p in positives:
            share = (f[i] @ f[p] / tau).exp() / sum((f[i] @ f[a] / tau).exp() for a in others)
            total = total - tau / base_tau * share.log() / len(positives)
    return total / n


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 0, 0, 1, 2], [0, 1, 2, 3] * 2, [0] * 8, list(range(8))])
@pytest.mark.parametrize(("tau", "base_tau"), [(100.0, 0.07), (0.5, 0.5), (1.0, 2.0)])
def test_contrast_is_its_formula_and_so_is_its_gradient(labels, tau, base_tau):
    f, y = features().requires_grad_(), torch.tensor(labels)
    ours, reference = supervised_contrastive(f, y, tau, base_tau, False), slow(f, y, tau, base_tau)
    torch.testing.assert_close(ours, reference)
    if len(set(labels)) < 8:
        torch.testing.assert_close(torch.autograd.grad(ours, f), torch.autograd.grad(reference, f))
    else:
        # one view of each class: nobody has a positive
        assert ours.item() == 0 and not torch.autograd.grad(ours, f)[0].any()


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [0, 0, 1, 1], [2] * 4])
def test_equal_features_give_a_loss_that_no_label_enters(labels):
    f = torch.full((8, 3), 0.5)
    loss = supervised_contrastive(f, torch.tensor(labels).repeat(2), **OFFICIAL)
    assert float(loss) == pytest.approx(100 / 0.07 * math.log(7), rel=1e-6)


def test_with_unit_vectors_it_is_of_the_size_of_cross_entropy_at_the_start():
    loss = supervised_contrastive(features(128, 512), torch.arange(64).repeat(2))
    assert 0 < float(loss) < 2 * math.log(127)


def test_at_the_start_of_a_batch_of_64_it_is_what_the_official_code_shows():
    loss = supervised_contrastive(torch.zeros(128, 4), torch.arange(64).repeat(2), **OFFICIAL)
    assert float(loss) == pytest.approx(6920, abs=1)


def test_two_views_of_one_sample_give_nothing_to_contrast():
    f = features(2).requires_grad_()
    loss = supervised_contrastive(f, torch.tensor([1, 1]))
    assert loss.item() == 0 and not torch.autograd.grad(loss, f)[0].any()


def test_one_view_of_one_sample_is_no_nan():
    f = features(1).requires_grad_()
    loss = supervised_contrastive(f, torch.tensor([1]))
    assert loss.item() == 0 and not torch.autograd.grad(loss, f)[0].any()


def test_large_features_are_finite_and_so_is_their_gradient():
    f = (1e4 * features(16, 512)).float().requires_grad_()
    loss = supervised_contrastive(f, torch.arange(8).repeat(2), **OFFICIAL)
    assert loss.isfinite() and loss > 0
    assert torch.autograd.grad(loss, f)[0].isfinite().all()


def test_the_order_of_views_and_of_samples_changes_nothing():
    f, y = features(), torch.tensor([0, 0, 1, 2]).repeat(2)
    loss = supervised_contrastive(f, y)
    torch.testing.assert_close(supervised_contrastive(torch.cat([f[4:], f[:4]]), y), loss)
    order = torch.tensor([2, 0, 3, 1])
    both = torch.cat([order, order + 4])
    torch.testing.assert_close(supervised_contrastive(f[both], y[both]), loss)


def test_it_falls_when_a_class_draws_together():
    y = torch.tensor([0, 1, 0, 1])
    apart = torch.eye(4)
    together = torch.eye(4)[y]
    assert supervised_contrastive(together, y, tau=0.5) < supervised_contrastive(apart, y, tau=0.5)


def test_normalised_features_have_no_length():
    f, y = features(), torch.tensor([0, 0, 1, 2]).repeat(2)
    unit = f / f.norm(dim=1, keepdim=True)
    lengths = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    expected = supervised_contrastive(unit, y, normalize=False)
    torch.testing.assert_close(supervised_contrastive(lengths * f, y), expected)
    assert not torch.isclose(supervised_contrastive(lengths * f, y, normalize=False), expected)
    zeros = torch.zeros(4, 3, requires_grad=True)
    loss = supervised_contrastive(zeros, torch.tensor([0, 1, 0, 1]))
    assert torch.autograd.grad(loss, zeros)[0].isfinite().all()


def test_half_precision_is_left_for_the_inner_products():
    f, y = 300 * features(8, 64).half(), torch.tensor([0, 0, 1, 2]).repeat(2)
    expected = supervised_contrastive(f.float(), y, **OFFICIAL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(supervised_contrastive(f, y, **OFFICIAL), expected)
    assert expected.isfinite() and expected.dtype == torch.float32


def test_proximal_is_half_the_squared_distance_and_spares_the_anchors():
    w, anchor = torch.tensor([3.0, 0.0], requires_grad=True), torch.tensor([1.0, 1.0], requires_grad=True)
    proximal([w], [anchor]).backward()
    assert w.grad.tolist() == [2.0, -1.0] and anchor.grad is None
