"""The Tiny ImageNet data set."""

from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DivisionSettings
from pfl_lightning.data.image_folder import ImageFolder
from pfl_lightning.settings import Unpack


class ImageSettings(DivisionSettings, total=False):
    """Settings of `ImageFolder` but for ``root``."""

    size: int | tuple[int, int] | None
    channels: Literal[1, 3]


class TinyImageNet(ImageFolder):
    """100,000 colour images, 3x64x64, 200 classes, in ``root/tiny-imagenet-200/train/CLASS/images``.

    Only the train folder is used, as in PFLlib and later papers, unless ``central_test`` or ``client_test`` is
    ``original``: then the 10,000 images of the val folder are the original test half, since the labels of the test
    folder are not public. The decoded images take 1.2 GB of memory.

    Args:
        root: folder that contains tiny-imagenet-200.
        **kwargs: settings of `ImageFolder`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if there is no such folder or no image, or val/ is needed and differs from the
            original archive.

    Source: Y. Le and X. Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N, 2015.
    """

    folder = "tiny-imagenet-200/train"
    labels = "tiny-imagenet-200/val/val_annotations.txt"
    """File with the class of each image in val/images, relative to ``root``."""

    def __init__(self, root: str = "data", **kwargs: Unpack[ImageSettings]) -> None:
        # before ImageFolder looks, whose message would name a folder of class folders and not the archive
        if not (folder := Path(str(root), self.folder)).is_dir():
            raise MisconfigurationException(
                f"data.root={root!r}: there is no folder {folder}; unpack tiny-imagenet-200.zip in {root}, or set "
                "data.root to the folder that tiny-imagenet-200 is in"
            )
        super().__init__(root=root, **kwargs)
        self._train_size = len(self._files)
        if "original" in (self.client_test, self.central_test):
            # val/ has no class folders; its images come last, which `_test_rows` relies on
            self._files += self._labelled(Path(root, self.labels))

    def _labelled(self, path: Path) -> list[tuple[Path, int]]:
        """Return file and class of each image in a table of images and classes."""
        numbers = {name: k for k, name in enumerate(self.classes)}
        try:
            rows = [line.split("\t")[:2] for line in path.read_text(encoding="utf-8").splitlines()]
            return [(path.parent / "images" / image, numbers[name]) for image, name in rows]
        except (OSError, ValueError, KeyError) as error:
            raise MisconfigurationException(
                f"data.root={self.root!r}: {path} cannot be read as a table of images and their classes ({error!r}); "
                "unpack tiny-imagenet-200.zip again, whose val/ is the original test half"
            ) from None

    def _test_rows(self) -> Tensor:
        return torch.arange(self._train_size, len(self._files))
