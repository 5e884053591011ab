"""Reading of single image files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray


def image_size(path: Path) -> tuple[int, int]:
    """Read the height and width of an image, in pixels, without decoding it.

    Args:
        path: The image file.

    Raises:
        MisconfigurationException: The file is no image.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.height, image.width
    except OSError as error:
        raise _unreadable(path, error) from None


def read_image(path: Path, channels: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Decode an image.

    Args:
        path: The image file.
        channels: 3 for RGB, 1 for grey.
        size: Height and width to resize to (bilinear), in pixels, or None.

    Returns:
        Pixels, shape [height, width, channels], 0 to 255.

    Raises:
        MisconfigurationException: The file is no image.
    """
    from PIL import Image

    try:
        with Image.open(path) as file:
            image = file.convert("RGB" if channels == 3 else "L")
    except OSError as error:
        raise _unreadable(path, error) from None
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image.height, image.width, channels)


def _unreadable(path: Path, error: OSError) -> MisconfigurationException:
    return MisconfigurationException(f"{path} cannot be read as an image ({error}); replace or remove it")
