"""Random views of images for contrastive learning: draws on the CPU, pixels on the images' device.

The distribution is that of torchvision's transforms, which draw one set of numbers a call, while this module draws one
an image. All draws are made at once and travel to the device in one copy. Pixel operations run on many images at once:
image by image they take several times as long on a CPU, and on a GPU longer than the training of a small net.
"""

from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
"""Share of the area that a crop keeps, and its ratio of width to height."""
ATTEMPTS = 10
"""Boxes drawn for a crop; the first one inside the image counts."""
FLIP = 0.5
"""Probability of a horizontal flip."""
JITTER = 0.8
"""Probability of a colour jitter."""
BRIGHTNESS = CONTRAST = SATURATION = (0.6, 1.4)
HUE = (-0.1, 0.1)
"""Ranges of the colour factors; hue in turns of the colour circle."""
GRAY = 0.2
"""Probability of a grey image."""
LUMINANCE = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in a grey level."""
CONTRAST_CHANGE, HUE_CHANGE = 1, 3
"""Numbers of two of the colour changes, which are brightness (0), contrast, saturation (2) and hue."""
TINY = 1e-12

Array: TypeAlias = NDArray[Any]


class Draws(NamedTuple):
    """Random numbers of n views.

    Args:
        boxes: top, left, height and width of the crops ``[n, 4]``, in pixels.
        flipped: whether to flip each view ``[n]``.
        orders: the changes of brightness (0), contrast (1), saturation (2) and hue (3) of each view in their order
            ``[n, 4]``; -1 without changes.
        factors: factors of brightness, contrast and saturation, and the hue's turns ``[n, 4]``.
        grayed: whether to make each view grey ``[n]``.
    """

    boxes: Array
    flipped: Array
    orders: Array
    factors: Array
    grayed: Array


def random_views(x: Tensor) -> Tensor:
    """Return one random view of each image: crop and resize, flip, colour jitter, grey levels.

    The distribution is that of torchvision's ``RandomResizedCrop``, ``RandomHorizontalFlip``, ``ColorJitter`` and
    ``RandomGrayscale`` with the settings of supervised contrastive learning (Khosla et al., 2020,
    https://arxiv.org/abs/2004.11362), with numbers from the CPU's global random state. Grey images keep their hue and
    saturation.

    Args:
        x: images ``[n, C, H, W]`` with C of 1 or 3 and pixels in [-1, 1], as data modules give them.

    Returns:
        Images of the same number, shape, range and type.
    """
    return views(x, drawn(len(x), *x.shape[2:]))


# On the CPU


def drawn(n: int, height: int, width: int) -> Draws:
    """Return the random numbers of n views.

    Args:
        n: number of views.
        height: height of the images, in pixels.
        width: width of the images, in pixels.
    """
    # 13 numbers a view: 2 places, 4 factors, 4 for an order, and flip, jitter and grey; then the shapes of the attempts
    uniform = torch.rand(n, 2 * ATTEMPTS + 13, dtype=torch.float64).numpy()
    places, factors, order, (flip, jitter, gray), shapes = np.split(uniform.T, [2, 6, 10, 13])
    low, high = np.array([BRIGHTNESS, CONTRAST, SATURATION, HUE]).T
    return Draws(
        boxes=crops(shapes.T.reshape(n, ATTEMPTS, 2), places.T, np.array([height, width])),
        flipped=flip < FLIP,
        # the order that sorts four uniform numbers is a uniform permutation
        orders=np.where(jitter[:, None] < JITTER, order.argsort(0).T, -1),
        factors=low + factors.T * (high - low),
        grayed=gray < GRAY,
    )


def crops(shapes: Array, places: Array, size: Array) -> Array:
    """Return crop boxes as torchvision's ``RandomResizedCrop`` draws them, from numbers in [0, 1).

    Args:
        shapes: numbers for area and ratio of each attempt ``[n, attempts, 2]``.
        places: numbers for the boxes' places ``[n, 2]``.
        size: height and width of the images ``[2]``.

    Returns:
        Top, left, height and width ``[n, 4]``.
    """
    area = size.prod() * (SCALE[0] + shapes[..., 0] * (SCALE[1] - SCALE[0]))
    low, high = np.log(RATIO)
    ratio = np.exp(low + shapes[..., 1] * (high - low))
    attempts = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], -1)))
    fits = ((attempts > 0) & (attempts <= size)).all(-1)
    boxes = attempts[np.arange(len(fits)), fits.argmax(1)]
    # rounded down, all places from 0 to the remaining size are equally likely
    corners = np.floor(places * (size - boxes + 1))
    # if no attempt fits: the largest box of a ratio within the range, in the middle
    largest = np.minimum(size, np.rint([size[1] / RATIO[0], size[0] * RATIO[1]]))
    found = fits.any(1)[:, None]
    return np.where(found, np.concatenate([corners, boxes], 1), np.concatenate([(size - largest) // 2, largest]))


def views(x: Tensor, draws: Draws) -> Tensor:
    """Return the views of images, given random numbers.

    A hue change is costly, so each image's changes before and after its hue change run in three steps each. The images
    are sorted by the hue's place in their order of changes, so that the images of a step are neighbours and no gather
    is needed.

    Args:
        x: images as for `random_views`.
        draws: random numbers of as many views.
    """
    hue = draws.orders == HUE_CHANGE
    turns = np.where(hue.any(1), hue.argmax(1), -1)
    order = np.argsort(-turns, kind="stable")
    orders, factors = draws.orders[order], draws.factors[order]
    # first[k]: number of images whose hue change has place k or later; in the sorted order they are the first
    first = [int((turns >= k).sum()) for k in range(4)]
    luminance = np.array(LUMINANCE if x.shape[1] == 3 else (1.0,))

    def changes(k: int) -> list[Any]:
        """Return the arguments of `blend` for each image's change number k."""
        change = orders[:, k]
        factor = factors[np.arange(len(change)), change]
        return [*(share * (change > 0) for share in luminance), change == CONTRAST_CHANGE, 1 - factor]

    blocks = [
        [order, order.argsort()],
        stretch(draws.boxes[:, 0], draws.boxes[:, 2], x.shape[2]),
        stretch(draws.boxes[:, 1], draws.boxes[:, 3], x.shape[3], draws.flipped),
        *map(changes, range(4)),
        # hue, centre, sign and offset of red, green and blue: the channel is sign |hue - centre| + offset, clamped to
        # [0, 1],
        # for a hue of 0 to 6; and the turn
        [0, 2, 4, 3, 2, 4, 1, -1, -1, -1, 2, 2, 6 * factors[:, HUE_CHANGE]],
        [*luminance, draws.grayed[order]],
    ]
    # float32 or better: half precision can't hold the coordinates
    images = x.to(torch.promote_types(x.dtype, torch.float32))
    places, vertical, horizontal, *blends, turning, graying = sent(blocks, images)
    there, back = places.flatten(1).long()
    images = cropped(images, vertical, horizontal).transpose(0, 1).index_select(1, there).add_(1).mul_(0.5)
    for k in range(3):
        blend(images[:, : first[k + 1]], blends[k][:, : first[k + 1]])
    if x.shape[1] == 3:
        recolour(images[:, : first[0]], turning[:, : first[0]])
    for k in range(1, 4):
        blend(images[:, first[k] : first[0]], blends[k][:, first[k] : first[0]])
    images.lerp_(grey(images, graying[:-1]), graying[-1])
    return images.mul_(2).sub_(1).transpose(0, 1).index_select(0, back).to(x.dtype)


def stretch(start: Array, length: Array, size: int, flipped: Any = False) -> list[Array]:
    """Return the places of resized stretches along an axis, in the coordinates of `F.grid_sample`, from -1 to 1.

    Args:
        start: first pixel of each stretch.
        length: number of pixels of each stretch.
        size: number of pixels of the axis, before and after.
        flipped: whether the last pixel comes first.

    Returns:
        The place of the axis's beginning, the distance between pixels, and the least and the largest place.
    """
    begin, step = 2 * start / size - 1, 2 * length / size**2
    # places beyond the stretch take its outermost pixel
    low, high = begin + 1 / size, begin + (2 * length - 1) / size
    return [np.where(flipped, begin + size * step, begin), np.where(flipped, -step, step), low, high]


def sent(blocks: list[list[Any]], like: Tensor) -> tuple[Tensor, ...]:
    """Return numbers as tensors like the images, sent to the device in one copy.

    Args:
        blocks: lists of numbers, each one for all images or ``[n]``.
        like: the n images.

    Returns:
        A tensor ``[numbers, n, 1, 1]`` for each block.
    """
    lengths = list(map(len, blocks))
    table = np.empty((sum(lengths), len(like)))
    for row, numbers in zip(table, chain.from_iterable(blocks), strict=True):
        row[:] = numbers
    return torch.from_numpy(table).to(like.dtype).to(like.device)[:, :, None, None].split_with_sizes(lengths)


# On the device


def cropped(images: Tensor, vertical: Tensor, horizontal: Tensor) -> Tensor:
    """Return stretches of images, bilinearly resized to the images' size.

    Args:
        images: ``[n, C, H, W]``.
        vertical: the result of `stretch` for heights ``[n, 4, 1, 1]``.
        horizontal: the same for widths.
    """
    height, width = images.shape[-2:]
    rows = positions(vertical, height)[:, :, None].expand(-1, -1, width)
    columns = positions(horizontal, width)[:, None].expand(-1, height, -1)
    return F.grid_sample(images, torch.stack([columns, rows], -1), align_corners=False)


def positions(stretches: Tensor, size: int) -> Tensor:
    """Return the pixels' places along an axis ``[n, size]``.

    Args:
        stretches: the result of `stretch` ``[n, 4, 1, 1]``.
        size: number of pixels.
    """
    begin, step, low, high = stretches.flatten(2)
    centres = torch.arange(0.5, size, device=step.device, dtype=step.dtype)
    return torch.addcmul(begin, step, centres).clamp_(low, high)


def grey(images: Tensor, shares: Tensor) -> Tensor:
    """Return grey levels ``[m, H, W]`` of images.

    Args:
        images: ``[C, m, H, W]``.
        shares: weights of the channels ``[C, m, 1, 1]``.
    """
    return (images * shares).sum(0)


def blend(images: Tensor, numbers: Tensor) -> None:
    """Change brightness, contrast or saturation: move images towards black, mean grey level or grey levels.

    Args:
        images: pixels in [0, 1] ``[C, m, H, W]``, changed in place.
        numbers: channel weights of the target, whether the target is a mean, and the distance, 1 minus the factor
            ``[C + 2, m, 1, 1]``.
    """
    *_, is_mean, distance = numbers
    level = grey(images, numbers[:-2])
    level.lerp_(level.mean((1, 2), keepdim=True), is_mean)
    images.lerp_(level, distance).clamp_(0, 1)


def recolour(images: Tensor, numbers: Tensor) -> None:
    """Turn hues by way of HSV, with hue from 0 to 6.

    Args:
        images: pixels in [0, 1] ``[3, m, H, W]``, changed in place.
        numbers: hue, centre, sign and offset of the channels, and the turn ``[13, m, 1, 1]``.
    """
    own, centre, sign, offset, (turn,) = numbers.split_with_sizes([3, 3, 3, 3, 1])
    red, green, blue = images
    value, least = images.amax(0), images.amin(0)
    chroma = value - least
    # a pixel's hue for each channel as the largest one; `where` picks the right of the three
    hues = torch.stack([green - blue, blue - red, red - green]).div_(chroma.clamp_min(TINY)).add_(own)
    hue = torch.where(value == red, hues[0], torch.where(value == green, hues[1], hues[2])).add_(turn).remainder_(6)
    height = torch.sub(hue, centre, out=hues).abs_().mul_(sign).add_(offset).clamp_(0, 1)
    torch.add(height.mul_(chroma), least, out=images)
