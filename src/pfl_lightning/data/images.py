"""Decoding of image files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray


def checked_size(size: Any) -> tuple[int, int] | None:
    """Return the height and width of resized images, in pixels; None to keep sizes.

    Args:
        size: the side of a square, (height, width), or None.

    Raises:
        MisconfigurationException: the size is something else, or below 1.
    """
    pixels = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(pixels, (tuple, list)) and len(pixels) == 2
    if pixels is None or (is_pair and all(isinstance(side, int) and side >= 1 for side in pixels)):
        return None if pixels is None else (pixels[0], pixels[1])
    raise MisconfigurationException(f"data.size={size!r} must be at least 1 pixel, or (height, width) of at least 1")


def image_size(path: Path) -> tuple[int, int]:
    """Read the height and width of an image, in pixels, without decoding the image.

    Args:
        path: the image file.

    Raises:
        MisconfigurationException: the file is no image.
    """
    with opened_image(path) as image:
        return image.height, image.width


def read_image(path: Path, channels: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Decode an image.

    Args:
        path: the image file.
        channels: 3 for RGB, 1 for grey.
        size: height and width to resize to (bilinear), in pixels, or None.

    Returns:
        Pixels, shape [height, width, channels], 0 to 255.

    Raises:
        MisconfigurationException: the file is no image, or has more than 8 bits per pixel and channel.
    """
    from PIL import Image

    with opened_image(path) as file:
        if file.mode[0] in "IF":
            # Pillow's conversion would clip all values above 255, without a warning
            raise MisconfigurationException(
                f"{path} has pixels of more than 8 bits (mode {file.mode}); convert it, or give its pixels "
                "to TensorData"
            )
        image = file.convert("RGB" if channels == 3 else "L")
    if size is not None:
        # Pillow takes width before height
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image.height, image.width, channels)


@contextmanager
def opened_image(path: Path) -> Iterator[Any]:
    """Open an image file as a context; turn any failure, also in the context, into a refusal of one sentence.

    Args:
        path: the image file.

    Raises:
        MisconfigurationException: the file is no image, is damaged, or claims more pixels than Pillow decodes.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except MisconfigurationException:
        raise
    # of damaged files Pillow raises OSError, SyntaxError, ValueError and others, by their format
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"{path} cannot be read as an image ({reason}); replace or remove it") from None
