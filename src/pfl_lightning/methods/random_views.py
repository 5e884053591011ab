"""Random views of a batch of images, drawn on the device where the images are.

The draws are those of torchvision, one set an image, while its transforms draw one set a call. What is done to pixels
is done to the whole batch at once: image by image it takes several times as long on a CPU, and on a GPU longer than the
training of a small net.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
"""Share of the area that a crop keeps, and its ratio of width to height."""
FLIP = 0.5
"""Probability of a horizontal flip."""
JITTER = 0.8
"""Probability of changed colours."""
BRIGHTNESS = CONTRAST = SATURATION = (0.6, 1.4)
HUE = (-0.1, 0.1)
"""Ranges of the changes; hue in turns of the colour circle."""
GRAY = 0.2
"""Probability that the colours are lost."""


def random_views(x: Tensor) -> Tensor:
    """One random view of each image: crop and resize, flip, jitter of colours, grey levels.

    Its distribution is that of torchvision's ``RandomResizedCrop``, ``RandomHorizontalFlip``, ``ColorJitter`` and
    ``RandomGrayscale`` with the settings of supervised contrastive learning (Khosla et al., 2020,
    https://arxiv.org/abs/2004.11362), drawn from the global random state. Grey images keep their hue and saturation.

    Args:
        x: images ``[n, C, H, W]`` with C of 1 or 3 and pixels in [-1, 1], as data modules give them.

    Returns:
        As many images of the same shape, range and type.
    """
    from torchvision.transforms import ColorJitter, RandomResizedCrop

    # pixels in [0, 1], and no coordinates in half precision
    images = x.to(torch.promote_types(x.dtype, torch.float32)) / 2 + 0.5
    boxes = torch.tensor([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for image in images])
    images = cropped(images, boxes, torch.rand(len(images)) < FLIP)
    draws = [ColorJitter.get_params(BRIGHTNESS, CONTRAST, SATURATION, HUE) for _ in images]
    orders = torch.stack([order for order, *_ in draws])
    factors = torch.tensor([changes for _, *changes in draws])
    # no operation has the number -1
    orders[torch.rand(len(images)) >= JITTER] = -1
    images = jittered(images, orders, factors)
    grayed = (torch.rand(len(images)) < GRAY).to(x.device)[:, None, None, None]
    return (torch.where(grayed, gray(images), images) * 2 - 1).to(x.dtype)


def cropped(images: Tensor, boxes: Tensor, flipped: Tensor) -> Tensor:
    """Boxes of images, bilinearly resized to the images' size.

    Args:
        images: ``[n, C, H, W]``.
        boxes: top, left, height and width of each box ``[n, 4]``, in pixels.
        flipped: which of them to flip horizontally ``[n]``.
    """
    height, width = images.shape[-2:]
    top, left, box_height, box_width = boxes.to(images)[:, :, None].unbind(1)
    rows = positions(top, box_height, height)
    columns = positions(left, box_width, width)
    columns = torch.where(flipped.to(columns.device)[:, None], columns.flip(1), columns)
    grid = torch.stack([columns[:, None].expand(-1, height, -1), rows[:, :, None].expand(-1, -1, width)], -1)
    return F.grid_sample(images, grid, align_corners=False)


def positions(start: Tensor, length: Tensor, size: int) -> Tensor:
    """Where along an axis the pixels of the resized stretches lie, as `F.grid_sample` counts: from -1 to 1.

    Args:
        start: first pixel of each stretch ``[n, 1]``.
        length: its pixels ``[n, 1]``.
        size: pixels of the axis, and of what the stretch is resized to.
    """
    centres = torch.arange(size, device=start.device, dtype=start.dtype) + 0.5
    # what lies beyond the stretch counts as its last pixel
    at = (start + centres * length / size).clamp(start + 0.5, start + length - 0.5)
    return 2 * at / size - 1


def jittered(images: Tensor, orders: Tensor, factors: Tensor) -> Tensor:
    """Images with changed brightness, contrast, saturation and hue.

    Args:
        images: ``[n, C, H, W]`` with pixels in [0, 1].
        orders: order of the four changes, numbered as above, of each image ``[n, 4]``.
        factors: how much of each ``[n, 4]``; of the hue the shift, in turns.
    """
    images, factors = images.clone(), factors.to(images)[:, :, None, None, None]
    for numbers in orders.T:
        for number, change in enumerate((brightened, contrasted, saturated, recoloured)):
            rows = (numbers == number).nonzero().flatten().to(images.device)
            images[rows] = change(images[rows], factors[rows, number])
    return images


def blend(images: Tensor, others: Tensor, factor: Tensor) -> Tensor:
    """``factor`` of images and the rest of others."""
    return (others + factor * (images - others)).clamp(0, 1)


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with black."""
    return blend(images, torch.zeros_like(images), factor)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with their mean grey level."""
    return blend(images, gray(images).mean((1, 2, 3), keepdim=True), factor)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with their grey levels."""
    return blend(images, gray(images), factor)


def gray(images: Tensor) -> Tensor:
    """Grey levels, by the luminance of colours."""
    from torchvision.transforms.functional import rgb_to_grayscale

    return rgb_to_grayscale(images, 3) if images.shape[1] == 3 else images


def recoloured(images: Tensor, shift: Tensor) -> Tensor:
    """With hues turned; by way of HSV, where a channel is V - V S min(k, 4 - k, 1), k = 5, 3, 1 + 6 H modulo 6."""
    if images.shape[1] == 1:
        return images
    value, chroma = images.amax(1), images.amax(1) - images.amin(1)
    red, green, blue = images.unbind(1)
    unit = torch.where(chroma > 0, chroma, 1)
    hue = torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit)
    hue = torch.where(value == red, (green - blue) / unit, hue)[:, None]
    k = (torch.tensor([5, 3, 1], device=hue.device)[:, None, None] + hue + 6 * shift) % 6
    return value[:, None] - chroma[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)
