"""Random views, against torchvision's own operations."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

from pfl_lightning.methods import random_views as augmentation
from pfl_lightning.methods.random_views import Draws, drawn, random_views, views


def pictures(n=12, channels=3, height=32, width=32, seed=0):
    """Pixels from 0 to 1; some are grey or of one colour, which have no hue."""
    images = torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(seed))
    images[0] = images[0, :1]
    images[1] = 0.3
    return images


def without(monkeypatch, *kept):
    """Switches off all random operations but some."""
    for name in {"FLIP", "JITTER", "GRAY"} - set(kept):
        monkeypatch.setattr(augmentation, name, 0.0)
    if "SCALE" not in kept:
        monkeypatch.setattr(augmentation, "SCALE", (1.0, 1.0))
        monkeypatch.setattr(augmentation, "RATIO", (1.0, 1.0))


def still(n, **draws):
    """Draws of views that are the images, but for what is given."""
    boxes = np.tile([0, 0, 32, 32], (n, 1))
    nothing = Draws(boxes, np.zeros(n, bool), np.full((n, 4), -1), np.ones((n, 4)), np.zeros(n, bool))
    return nothing._replace(**draws)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (20, 31)])
@pytest.mark.parametrize("channels", [1, 3])
def test_crops_are_those_of_torchvision(height, width, channels):
    images = pictures(channels=channels, height=height, width=width)
    torch.manual_seed(0)
    boxes = [RandomResizedCrop.get_params(image, [0.2, 1.0], [0.75, 4 / 3]) for image in images]
    flipped = np.arange(len(images)) % 2 == 0
    ours = views(images * 2 - 1, still(len(images), boxes=np.array(boxes), flipped=flipped)) / 2 + 0.5
    for image, box, flip, view in zip(images, boxes, flipped, ours, strict=True):
        expected = TF.resized_crop(image, *box, [height, width], antialias=True)
        torch.testing.assert_close(view, TF.hflip(expected) if flip else expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_as_torchvision_changes_them_in_each_image_s_own_order(channels):
    images = pictures(48, channels)
    torch.manual_seed(0)
    orders = torch.stack([torch.randperm(4) for _ in images])
    factors = torch.rand(len(images), 4) * 0.8 + 0.6
    factors[:, 3] = torch.rand(len(images)) - 0.5
    orders[5] = -1
    grayed = np.arange(len(images)) % 5 == 0
    draws = still(len(images), orders=orders.numpy(), factors=factors.numpy(), grayed=grayed)
    ours = views(images * 2 - 1, draws) / 2 + 0.5
    changes = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for image, order, own, gray, view in zip(images, orders.tolist(), factors.tolist(), grayed, ours, strict=True):
        expected = image
        for number in (number for number in order if number >= 0):
            expected = changes[number](expected, own[number])
        if gray and channels == 3:
            expected = TF.rgb_to_grayscale(expected, 3)
        torch.testing.assert_close(view, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(32, 32), (20, 31), (10, 40), (40, 10)])
def test_crops_are_drawn_as_torchvision_draws_them(shape):
    torch.manual_seed(0)
    image = torch.zeros(1, *shape)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 1.0], [0.75, 4 / 3]) for _ in range(2000)])
    ours = drawn(20_000, *shape).boxes
    values = np.arange(41)
    for column in range(4):
        shares = [(of[:, column, None] <= values).mean(0) for of in (ours, theirs)]
        # Kolmogorov and Smirnov: one of a thousand such samples would differ by more
        assert np.abs(shares[0] - shares[1]).max() < 1.95 * (1 / 20_000 + 1 / 2000) ** 0.5
    # height and width belong together, as do a place and what is left for it
    for pair in ((2, 3), (0, 2), (1, 3)):
        assert np.corrcoef(ours[:, pair].T)[0, 1] == pytest.approx(np.corrcoef(theirs[:, pair].T)[0, 1], abs=0.06)


def test_orders_and_factors_are_drawn_alike():
    torch.manual_seed(0)
    draws = drawn(24_000, 32, 32)
    changed = draws.orders[:, 0] >= 0
    assert changed.mean() == pytest.approx(0.8, abs=0.01)
    assert draws.flipped.mean() == pytest.approx(0.5, abs=0.01) and draws.grayed.mean() == pytest.approx(0.2, abs=0.01)
    orders, counts = np.unique(draws.orders[changed], axis=0, return_counts=True)
    assert len(orders) == 24 and counts.min() > 700 and counts.max() < 900
    for factor, (low, high) in zip(draws.factors.T, [(0.6, 1.4)] * 3 + [(-0.1, 0.1)], strict=True):
        assert np.quantile(factor, (0, 0.25, 0.5, 0.75, 1)) == pytest.approx(np.linspace(low, high, 5), abs=0.01)
    together = np.column_stack(
        [draws.factors, draws.flipped, draws.grayed, changed, draws.orders[:, 0], draws.boxes[:, 0]]
    )
    assert np.abs(np.corrcoef(together[changed][:, [0, 1, 2, 3, 4, 5, 7, 8]].T) - np.eye(8)).max() < 0.03


class Launches(TorchDispatchMode):
    """Counts what is computed on the device ``meta``, and what is copied there."""

    computed = copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_meta and not func.is_view:
            inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
            if all(tensor.is_meta for tensor in inputs):
                self.computed += 1
            else:
                self.copied += 1
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_views_takes_few_launches_and_one_copy(dtype):
    with Launches() as launches:
        random_views(torch.empty(128, 3, 32, 32, dtype=dtype, device="meta"))
    assert launches.copied == 1
    assert 40 < launches.computed <= 80


def test_without_draws_a_view_is_the_image(monkeypatch):
    without(monkeypatch)
    x = pictures() * 2 - 1
    torch.testing.assert_close(random_views(x), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kept", ["SCALE", "FLIP", "JITTER", "GRAY"])
def test_each_operation_is_drawn_image_by_image(monkeypatch, kept):
    without(monkeypatch, kept)
    x = (pictures()[2:3] * 2 - 1).expand(400, -1, -1, -1)
    torch.manual_seed(0)
    views = random_views(x)
    changed = (views - x).abs().amax((1, 2, 3)) > 1e-4
    assert float(changed.float().mean()) == pytest.approx(
        getattr(augmentation, kept) if kept != "SCALE" else 1, abs=0.06
    )
    if kept == "FLIP":
        torch.testing.assert_close(views[changed], x[changed].flip(3), rtol=0, atol=1e-5)
    elif kept == "GRAY":
        assert torch.equal(views[changed, 0], views[changed, 1]) and torch.equal(views[changed, 1], views[changed, 2])
    else:
        first = views[changed][0]
        assert ((views[changed][1:] - first).abs().amax((1, 2, 3)) > 1e-4).all()


def test_crops_keep_at_least_a_fifth(monkeypatch):
    without(monkeypatch, "SCALE")
    across = torch.linspace(-1, 1, 32).expand(300, 1, 32, 32)
    torch.manual_seed(0)
    views = random_views(across)
    widths = (views.amax((1, 2, 3)) - views.amin((1, 2, 3))) / 2
    # ratios reach from 3/4 to 4/3
    assert (0.2 * 3 / 4) ** 0.5 - 0.05 < float(widths.min()) < 0.5
    assert float(widths.max()) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (3, 3, 32, 32), (2, 1, 28, 28)])
def test_views_are_like_the_images(dtype, shape):
    x = (pictures(max(2, shape[0]), *shape[1:])[: shape[0]] * 2 - 1).to(dtype)
    before = x.clone()
    views = random_views(x)
    assert views.shape == x.shape and views.dtype == dtype
    assert views.isfinite().all() and float(views.abs().max()) <= 1 + 1e-2
    assert torch.equal(x, before)


def test_views_are_a_function_of_the_global_random_state():
    x = pictures() * 2 - 1
    views = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        views.append(random_views(x))
    assert torch.equal(views[0], views[1])
    assert not torch.isclose(views[0], views[2]).flatten(1).all(1)[2:].any()


def test_half_precision_rounds_the_view_and_not_where_it_lies():
    x = (pictures() * 2 - 1).bfloat16()
    torch.manual_seed(1)
    views = random_views(x)
    torch.manual_seed(1)
    assert torch.equal(views, random_views(x.float()).bfloat16())
