"""Search for images in a tree of class folders."""

from __future__ import annotations

from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SPLITS = ("train", "test", "val")


def find_images(root: Path) -> tuple[list[str], list[tuple[Path, int]]]:
    """List the classes and the images of a tree.

    A class folder may have subfolders, as in Tiny ImageNet's train folder, which can be given as root.

    Args:
        root: folder of class folders, or of train/ with test/ or val/, which have the same class folders.

    Returns:
        The class names in order, and (file, class index) for each image, ordered by split, then by class, then by path.

    Raises:
        MisconfigurationException: there is no such folder, no class folder, a split lacks classes, or a class has no
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


_WANTED = "set it to a folder that holds one folder of images a class, or train/ and test/ with such folders"


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
