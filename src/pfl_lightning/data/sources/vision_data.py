"""Map-style data sets, such as TorchVision's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pfl_lightning.data.checks import NO_RANDOM, READ, SAMPLES, differs
from pfl_lightning.data.datamodule import DataSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, resident, targets_of
from pfl_lightning.data.trees import as_tensor
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Task

HOLDERS = ("transform", "transforms", "dataset", "datasets")
"""Attributes in which data sets and transforms keep others."""


class VisionData(OwnedData):
    """A map-style data set, such as TorchVision's: ``dataset[i]`` is an image, or a tensor, and a target.

    Up to 1 GiB is read into memory; larger data are decoded one client at a time, on each access. Clients train and are
    tested on the same readings, so a data set with random transforms is refused.

    Args:
        dataset: the data set; its transforms bring all inputs to one shape, and draw nothing.
        task: the prediction task.
        client: client of each sample: names, or a function from the position to a name; None under another partitioner
            than `Natural`.
        targets: targets of all samples; None takes ``dataset.targets`` or ``labels``, or reads every sample without
            them.
        **kwargs: settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: if the data set isn't map-style, or samples differ from one reading to the next.
    """

    def __init__(
        self,
        dataset: Dataset,  # type: ignore[type-arg]
        task: Task,
        client: Callable[[int], Any] | Sequence[Any] | None = None,
        targets: Any = None,
        **kwargs: Unpack[DataSettings],
    ) -> None:
        super().__init__(task, **kwargs)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
            raise MisconfigurationException(
                f"data.dataset={type(dataset).__name__} has no samples by position; give a map-style data set"
            )
        if isinstance(dataset, (list, tuple)):
            first = dataset[0] if isinstance(dataset[0], (list, tuple)) else dataset[:1]
            if any(isinstance(part, Dataset) for part in first):
                raise MisconfigurationException(
                    f"data.dataset={type(dataset).__name__} of Datasets: VisionData divides one Dataset; give those "
                    "of each client to ClientDatasets"
                )
        self._dataset, self._owner, self._targets = dataset, client, targets
        self._leaf = Decoded(dataset)
        # spread over the whole data set: the first samples are often of one class
        self._looked_at = np.unique(np.linspace(0, len(dataset) - 1, SAMPLES).astype(np.int64))
        if (random := random_transform(dataset)) or differs(
            lambda: self._leaf[self._looked_at], READ // len(self._looked_at)
        ):
            raise MisconfigurationException(
                f"data.dataset={type(dataset).__name__} gives other samples at each reading"
                + (f", by its transform {random}" if random else "")
                + f"; {NO_RANDOM}"
            )
        self.input_shape = tuple(self._leaf[np.arange(1)].shape[1:])

    def load(self) -> Loaded:
        """Read targets, and small inputs."""
        count = len(self._dataset)
        y = self._targets if self._targets is not None else self._known_targets()
        if y is None:
            y = [self._dataset[position][1] for position in range(count)]
        owners = [self._owner(position) for position in range(count)] if callable(self._owner) else self._owner
        # all inputs have the shape of the first: `Decoded` refuses others
        num_bytes = count * self._leaf[np.arange(1)].nbytes
        return Loaded(resident(self._leaf, num_bytes), targets_of(as_tensor(y, "data.targets")), owners)

    def _known_targets(self) -> Any:
        """Return the data set's list of targets; None if samples have other targets, as after a target transform."""
        for name in ("targets", "labels"):
            known: Any = getattr(self._dataset, name, None)
            try:
                same = [bool(self._dataset[int(row)][1] == known[int(row)]) for row in self._looked_at]
                if all(same) and len(known) == len(self._dataset):
                    return known
            # no list, a shorter one, or targets that are no single numbers
            except (TypeError, LookupError, ValueError, RuntimeError):
                continue
        return None


def random_transform(dataset: Any) -> str:
    """Return the name of the first transform that is random by its class; an empty text without one.

    A random transform may leave most images unchanged, so that a few repeated readings wouldn't show the randomness.

    >>> from torchvision.datasets import FakeData
    >>> from torchvision.transforms import Compose, RandomHorizontalFlip, Resize
    >>> random_transform(FakeData(transform=Compose([Resize(8), RandomHorizontalFlip(0.1)])))
    'RandomHorizontalFlip'
    >>> random_transform(FakeData(transform=Compose([Resize(8), RandomHorizontalFlip(1.0)])))
    ''

    Args:
        dataset: the data set, which may wrap other data sets.
    """
    waiting, seen = [dataset], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if callable(part) and not isinstance(part, type):
            name, probability = type(part).__name__, getattr(part, "p", None)
            # a transform with p=0 or p=1 draws nothing, whatever its name; without p, TorchVision's names tell
            if isinstance(probability, (int, float)):
                is_random = 0 < probability < 1
            else:
                is_random = name.startswith("Random")
            if is_random:
                return name
        # through Subset, ConcatDataset and Compose, down to single transforms
        waiting += [getattr(part, name, None) for name in HOLDERS]
        if part is not dataset and isinstance(part, (list, tuple, torch.nn.Sequential)):
            waiting += part
    return ""


class Decoded:
    """Inputs of a map-style data set, read on access.

    Args:
        dataset: the data set.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, positions: NDArray[np.int64]) -> Tensor:
        found = [pixels(self.dataset[int(position)][0]) for position in positions]
        if len({each.shape for each in found}) > 1:
            shapes = sorted({tuple(each.shape) for each in found})
            raise MisconfigurationException(
                f"data.dataset: inputs have shapes {shapes[0]} and {shapes[1]}; give the data set a transform that "
                "makes them one, such as Resize((32, 32))"
            )
        return torch.stack(found)


def pixels(image: Any) -> Tensor:
    """Return an image as a tensor, uint8 [C, H, W]; return a tensor unchanged.

    Args:
        image: a Pillow image, an array, or a tensor.
    """
    if isinstance(image, Tensor):
        return image
    array = np.array(image)
    # an array has the layout that its user chose; only Pillow's height, width, channels is known to need a change
    if array.dtype != np.uint8 or isinstance(image, np.ndarray):
        return torch.from_numpy(array)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1).contiguous()
