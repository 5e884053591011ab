"""Data in one folder per client."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray

from pfl_lightning.data.datamodule import DivisionSettings
from pfl_lightning.data.files import read_array
from pfl_lightning.data.images import SUFFIXES, checked_size, image_size, read_image
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, resident, targets_of
from pfl_lightning.data.sources.tensor_data import opened
from pfl_lightning.data.trees import as_tensor, read, with_leaves
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Classification, Task

WANTED = (
    "give a folder with a folder a client, each with folders of images by class, with x and y as .npy or .pt, or with "
    "folders x and y of a .npy a sample"
)


class FolderData(OwnedData):
    """One folder per client: ``root/CLIENT/CLASS/*.png``, or ``root/CLIENT/x.npy`` and ``y.npy`` (or ``.pt``).

    Large samples, such as volumes with their masks, may have a file each: ``root/CLIENT/x/NAME.npy`` with an input, and
    ``root/CLIENT/y/NAME.npy`` with its target.

    Up to 1 GiB is read into memory; larger data are read one client at a time, on each access.

    Args:
        root: folder of the clients' folders, read at once.
        task: the prediction task; None, for images, predicts the class.
        size: resize images to this many pixels, a square or (height, width); None keeps images as they are.
        channels: 3 for RGB, 1 for grey images.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if there are no clients' folders, or a folder holds something else.
    """

    def __init__(
        self,
        root: str,
        task: Task | None = None,
        size: int | tuple[int, int] | None = None,
        channels: Literal[1, 3] = 3,
        **kwargs: Unpack[DivisionSettings],
    ) -> None:
        pixels = checked_size(size)
        folders = client_folders(Path(root))
        # before super().__init__: with task=None, the task follows from the classes that the folders have
        self._arrays = [arrays_of(folder) for folder in folders]
        self._images: list[tuple[Path, str, str]] = []
        if not any(self._arrays):
            self._images = [found for folder in folders for found in images_of(folder)]
        # a folder of images among folders of arrays is a mistake: two kinds of inputs fit no net
        elif not all(self._arrays):
            raise MisconfigurationException(
                f"{folders[self._arrays.index(None)]} has no x and y in .npy or .pt files as others have; {WANTED}"
            )
        self.classes = sorted({name for _, _, name in self._images})
        # class numbers and quantities look alike in y.npy, so no task is guessed
        if task is None and not self._images:
            raise MisconfigurationException(
                "data.task=null: y files may hold classes or quantities; give a task, such as Regression"
            )
        super().__init__(Classification(len(self.classes)) if task is None else task, root=root, **kwargs)
        self._names = [folder.name for folder in folders]
        if self._images:
            self._reader = ImageFiles([path for path, _, _ in self._images], channels, pixels)
            self.input_shape = self._reader.shape
        else:
            self._files = ArrayFiles([pair[0] for pair in self._arrays if pair])
            self.input_shape = tuple(self._files.parts[0].shape[1:])

    def load(self) -> Loaded:
        """Read small data, and return the client of each sample."""
        if self._images:
            # class numbers over all clients: a client may lack classes, and its folders alone would number them anew
            numbers = {name: k for k, name in enumerate(self.classes)}
            y = torch.tensor([numbers[name] for _, _, name in self._images])
            return Loaded(resident(self._reader, self._reader.num_bytes), y, [name for _, name, _ in self._images])
        pairs = [pair for pair in self._arrays if pair]
        y = torch.cat([targets_of(target) for _, target in pairs])
        owners = [name for name, (x, _) in zip(self._names, pairs, strict=True) for _ in range(len(x))]
        return Loaded(resident(self._files, self._files.num_bytes), y, owners)


def client_folders(root: Path) -> list[Path]:
    """Return the folders of the clients, by name.

    Args:
        root: folder of the clients' folders.

    Raises:
        MisconfigurationException: if there is no folder.
    """
    found = sorted(p for p in root.iterdir() if p.is_dir() and p.name[0] != ".") if root.is_dir() else []
    if not found:
        raise MisconfigurationException(f"data.root={str(root)!r} has no clients' folders; {WANTED}")
    return found


def arrays_of(folder: Path) -> tuple[Any, Any] | None:
    """Return the inputs and targets of a client, memory-mapped or in a file each; None without such files.

    Args:
        folder: the client's folder.

    Raises:
        MisconfigurationException: if a file holds no array, or inputs and targets differ in number or names.
    """
    if (folder / "x").is_dir() and (folder / "y").is_dir():
        inputs, targets = ({path.name: path for path in (folder / name).glob("[!.]*.npy")} for name in ("x", "y"))
        if lone := sorted(inputs.keys() ^ targets.keys()):
            has, lacks = ("x", "y") if lone[0] in inputs else ("y", "x")
            raise MisconfigurationException(
                f"{folder} has {has}/{lone[0]} and no {lacks}/{lone[0]}; give both, or none"
            )
        # a class may be named x: its folder has images
        if inputs:
            names = sorted(inputs)
            return SampleFiles([inputs[name] for name in names]), SampleFiles([targets[name] for name in names])
    for suffix in (".npy", ".pt"):
        paths = [folder / f"{name}{suffix}" for name in ("x", "y")]
        if all(path.is_file() for path in paths):
            x, y = (with_leaves(opened("root", path), str(path)) for path in paths)
            # a .pt file may hold a dict or a list, whose rows no client could share
            for path, leaf in zip(paths, (x, y), strict=True):
                if not hasattr(leaf, "shape"):
                    raise MisconfigurationException(f"{path} holds a {type(leaf).__name__}; give one array or tensor")
            if len(x) != len(y):
                raise MisconfigurationException(f"{folder} has {len(x)} x and {len(y)} y; give a y for each x")
            return x, y
    return None


def images_of(folder: Path) -> list[tuple[Path, str, str]]:
    """Return path, client and class of each image of a client.

    Args:
        folder: the client's folder.

    Raises:
        MisconfigurationException: if there is no image.
    """
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    if not files:
        raise MisconfigurationException(f"{folder} has neither images nor arrays; {WANTED}")
    return [(path, folder.name, path.parent.name) for path in files]


class ImageFiles:
    """Images in files, decoded on access.

    Args:
        paths: paths of all images.
        channels: 3 for RGB, 1 for grey.
        size: height and width to resize to, or None.
    """

    def __init__(self, paths: list[Path], channels: int, size: tuple[int, int] | None) -> None:
        self.paths, self.channels, self.size = paths, channels, size
        # the first image stands for all, since opening every file would be slow; others are compared as they are
        # decoded
        self.shape = (channels, *(size or image_size(paths[0])))
        self.num_bytes = len(paths) * int(np.prod(self.shape))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        found = np.empty((len(positions), *self.shape), dtype=np.uint8)
        for row, position in enumerate(positions):
            image = read_image(self.paths[position], self.channels, self.size).transpose(2, 0, 1)
            if image.shape != self.shape:
                raise MisconfigurationException(
                    f"data.size=null: {self.paths[position]} has {image.shape[1]}x{image.shape[2]} pixels, the first "
                    f"image has {self.shape[1]}x{self.shape[2]}; set data.size to resize all images"
                )
            found[row] = image
        return found


class SampleFiles:
    """Arrays in a file each as the rows of one array, read on access.

    Args:
        paths: the ``.npy`` files.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        # the first file stands for all, since opening every file would be slow; others are compared as they are read
        first = self._array(0)
        self.shape, self.dtype = (len(paths), *first.shape), first.dtype
        self.nbytes = len(paths) * first.nbytes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, positions: NDArray[np.int64]) -> torch.Tensor:
        found = [self._array(position) for position in positions]
        for position, array in zip(positions, found, strict=True):
            if array.shape != self.shape[1:]:
                raise MisconfigurationException(
                    f"{self.paths[position]} has an array of shape {list(array.shape)}, and {self.paths[0]} of "
                    f"{list(self.shape[1:])}; crop or resize all to one shape, or cut patches"
                )
        return torch.stack([as_tensor(np.array(array)) for array in found])

    def _array(self, position: int) -> Any:
        return read_array(self.paths[position], str(self.paths[position]))


class ArrayFiles:
    """Arrays in several files as one array, whose rows are read on access.

    Args:
        parts: mapped arrays or tensors, shape [n, ...] each.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.num_bytes = sum(part.nbytes for part in parts)
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise MisconfigurationException(
                f"x of the clients' folders are of shapes {', '.join(map(str, sorted(shapes)))}; give all one shape"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, positions: NDArray[np.int64]) -> torch.Tensor:
        # `read` gives ascending positions, so the rows of one file are together, and results stay in order
        file = np.searchsorted(self.ends, positions, side="right")
        found = []
        for part in np.unique(file):
            begin = self.ends[part] - len(self.parts[part])
            found.append(read(self.parts[part], torch.from_numpy(positions[file == part] - begin)))
        return torch.cat(found)
