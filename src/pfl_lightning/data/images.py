"""Search for image files, and decoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SPLITS = ("train", "test", "val")
_WANTED = "set it to a folder that holds one folder of images a class, or train/ and test/ with such folders"


def checked_size(size: Any) -> tuple[int, int] | None:
    """Return the height and width of resized images, in pixels; None to keep sizes.

    Args:
        size: the side of a square, (height, width), or None.

    Raises:
        MisconfigurationException: if the size is something else, or below 1.
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
        MisconfigurationException: if the file is no image.
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
        MisconfigurationException: if the file is no image, or has more than 8 bits per pixel and channel.
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
        MisconfigurationException: if the file is no image, is damaged, or claims more pixels than Pillow decodes.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except MisconfigurationException:
        raise
    # Pillow raises OSError, SyntaxError, ValueError and others for damaged files, depending on the format
    except Exception as error:
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(f"{path} cannot be read as an image ({reason}); replace or remove it") from None


def find_images(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """List the classes and the images of a tree.

    A class folder may have subfolders, as in Tiny ImageNet's train folder, which can be given as root.

    Args:
        root: folder of class folders, or of train/ with test/ or val/, which have the same class folders.

    Returns:
        The class names in order, and (file, class index) for each image, ordered by split, then by class, then by path.

    Raises:
        MisconfigurationException: if there is no such folder, no class folder, a split lacks classes, or a class has no
            images.
    """
    if not root.is_dir():
        raise MisconfigurationException(f"data.root='{root}' is no folder; {_WANTED}")
    tops = _tops(root)
    classes = _subfolders(tops[0])
    if not classes:
        raise MisconfigurationException(f"data.root='{root}' has no class folders; {_WANTED}")
    for top in tops[1:]:
        if _subfolders(top) != classes:
            raise MisconfigurationException(
                f"data.root='{root}': {tops[0].name}/ and {top.name}/ have different class folders; "
                "set data.root to the one of them to use"
            )
    files = [(path, k) for top in tops for k, name in enumerate(classes) for path in _images(top / name)]
    _check_none_empty(root, classes, files)
    return classes, files


def _subfolders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _tops(root: Path) -> list[Path]:
    names = _subfolders(root)
    # Only if every folder is a split: vehicle data may have a class called "train", whose siblings are no splits.
    is_split = "train" in names and set(names) <= set(SPLITS) and _subfolders(root / "train")
    return [root / name for name in SPLITS if name in names] if is_split else [root]


def _images(folder: Path) -> list[Path]:
    # sorted, since the order of a directory differs between machines, and with it the partition of one seed
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _check_none_empty(root: Path, classes: list[str], files: list[tuple[Path, int]]) -> None:
    empty = set(range(len(classes))) - {k for _, k in files}
    if empty:
        raise MisconfigurationException(
            f"data.root='{root}': class folder {classes[min(empty)]!r} has no images; "
            f"add some ({', '.join(sorted(SUFFIXES))}) or remove the folder"
        )
