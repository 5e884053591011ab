"""Random views, against torchvision's own operations."""

import pytest
import torch
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

from pfl_lightning.methods import random_views as augmentation
from pfl_lightning.methods.random_views import cropped, jittered, random_views


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


@pytest.mark.parametrize(("height", "width"), [(32, 32), (8, 8), (20, 31)])
@pytest.mark.parametrize("channels", [1, 3])
def test_crops_are_those_of_torchvision(height, width, channels):
    images = pictures(channels=channels, height=height, width=width)
    torch.manual_seed(0)
    boxes = [RandomResizedCrop.get_params(image, [0.2, 1.0], [0.75, 4 / 3]) for image in images]
    flipped = torch.arange(len(images)) % 2 == 0
    ours = cropped(images, torch.tensor(boxes), flipped)
    for image, box, flip, view in zip(images, boxes, flipped, ours, strict=True):
        expected = TF.resized_crop(image, *box, [height, width], antialias=True)
        torch.testing.assert_close(view, TF.hflip(expected) if flip else expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_as_torchvision_changes_them_in_each_image_s_own_order(channels):
    images = pictures(24, channels)
    torch.manual_seed(0)
    orders = torch.stack([torch.randperm(4) for _ in images])
    factors = torch.rand(len(images), 4) * 0.8 + 0.6
    factors[:, 3] = torch.rand(len(images)) - 0.5
    orders[5] = -1
    ours = jittered(images, orders, factors)
    changes = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue]
    for image, order, own, view in zip(images, orders.tolist(), factors.tolist(), ours, strict=True):
        expected = image
        for number in (number for number in order if number >= 0):
            expected = changes[number](expected, own[number])
        torch.testing.assert_close(view, expected, rtol=0, atol=1e-5)


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
