"""Tiny ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data.image_folder import ImageFolder


class TinyImageNet(ImageFolder):
    """100,000 colour images, 3x64x64, 200 classes, in ``root/tiny-imagenet-200/train/CLASS/images``.

    Only the train folder is used, as in PFLlib and the papers after it: the labels of the original test images are
    not public. The decoded images take 1.2 GB of memory.

    Args:
        root: Folder that tiny-imagenet-200 is in.
        **kwargs: Settings of :class:`ImageFolder`; ``download`` has no effect.

    Raises:
        MisconfigurationException: There is no such folder, or it has no images.

    Source: Y. Le and X. Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N, 2015.
    """

    folder = "tiny-imagenet-200/train"

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        if not (folder := Path(root, self.folder)).is_dir():
            raise MisconfigurationException(
                f"data.root={root!r}: there is no folder {folder}; unpack tiny-imagenet-200.zip in {root}, or set "
                "data.root to the folder that tiny-imagenet-200 is in"
            )
        super().__init__(root=root, **kwargs)
