"""Image files, in one folder per class."""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DivisionSettings, FederatedDataModule
from pfl_lightning.data.images import checked_size, find_images, image_size, read_image
from pfl_lightning.settings import Unpack

SLOW_FILES = 5000
"""Number of files from which on reading shows a progress bar."""


class ImageFolder(FederatedDataModule):
    """Image classification data from files: ``root/CLASS/*.jpg``, or ``root/{train,test,val}/CLASS/*.jpg`` pooled.

    Classes are numbered in the alphabetical order of their folders. All images are decoded once, into memory.

    Args:
        root: folder of the class folders, or of train/ with test/ or val/ that hold the class folders. The folder is
            read at once, to count the classes.
        size: resize images to this many pixels, a square or (height, width); None keeps images as they are, which then
            must all have one size.
        channels: 3 for RGB, 1 for grey.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if there are no images, or ``size`` is not positive.
    """

    folder = ""
    """Folder of the class folders, relative to ``root``, in data sets with their own layout."""

    def __init__(
        self,
        root: str = "data",
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] = 3,
        **kwargs: Unpack[DivisionSettings],
    ) -> None:
        super().__init__(root=root, **kwargs)
        pixels = checked_size(size)
        if channels not in (1, 3):
            raise MisconfigurationException(f"data.channels={channels} must be 1 (grey) or 3 (RGB)")
        self.classes, self._files = find_images(Path(root, self.folder))
        self.num_classes = len(self.classes)
        self._resize = pixels
        self._shape = (*(pixels or image_size(self._files[0][0])), channels)
        self.input_shape = (channels, *self._shape[:2])

    def load(self) -> tuple[Tensor, Tensor]:
        """Decode all images.

        Raises:
            MisconfigurationException: if a file is no image, or the images differ in size.
        """
        from tqdm import tqdm

        # one array for all from the start: a list of images, stacked at the end, would take twice the memory
        x = np.empty((len(self._files), *self._shape), dtype=np.uint8)
        bar = tqdm(self._files, "decoding images", disable=len(self._files) <= SLOW_FILES)
        for row, (path, _) in enumerate(bar):
            image = read_image(path, self._shape[2], self._resize)
            if image.shape != self._shape:
                raise MisconfigurationException(
                    f"data.size=null: {path} has {image.shape[0]}x{image.shape[1]} pixels, the first image "
                    f"has {self._shape[0]}x{self._shape[1]}; set data.size to resize all images"
                )
            x[row] = image
        y = torch.tensor([label for _, label in self._files])
        self.original_test = self._test_rows()
        return torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), y

    def _test_rows(self) -> Tensor:
        """Return the positions of the images in test/, or else in val/."""
        base = Path(self.root, self.folder)
        tops = [path.relative_to(base).parts[0] for path, _ in self._files]
        # a folder test/ next to other class folders is a class of that name, and no half
        test = next((name for name in ("test", "val") if name in tops and name not in self.classes), None)
        return torch.tensor([row for row, top in enumerate(tops) if top == test], dtype=torch.int64)
