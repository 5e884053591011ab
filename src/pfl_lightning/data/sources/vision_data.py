"""Map-style data sets, such as TorchVision's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from pfl_lightning.data.checks import NO_RANDOM, SAMPLES, differs
from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.sources.base import OwnedData, resident, targets_of
from pfl_lightning.data.trees import as_tensor
from pfl_lightning.tasks import Task

HOLDERS = ("transform", "transforms", "dataset", "datasets")
"""Attributes in which data sets and transforms keep others."""


class VisionData(OwnedData):
    """A map-style data set, such as one of TorchVision: ``dataset[i]`` is an image, or a tensor, and its target.

    Up to 1 GiB is read into memory; more is decoded a client at a time, whenever it is asked for. Clients train and are
    tested on the same readings, so that a data set whose transforms are random is refused.

    Args:
        dataset: The data set; its transforms make all inputs of one shape, and draw nothing.
        task: What is predicted.
        client: Who holds each sample: names, or a function of its position that gives one; None under another
            partitioner than `Natural`.
        targets: Targets of all samples; None takes ``dataset.targets`` or ``labels``, or else reads every sample.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: It is no such data set, or its samples differ from one reading to the next.
    """

    def __init__(
        self,
        dataset: Dataset,  # type: ignore[type-arg]
        task: Task,
        client: Callable[[int], Any] | Sequence[Any] | None = None,
        targets: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(task, **kwargs)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
            raise MisconfigurationException(
                f"data.dataset={type(dataset).__name__} has no samples by position; give a map-style data set"
            )
        self._dataset, self._owner, self._targets = dataset, client, targets
        self._leaf = Decoded(dataset)
        self._looked_at = np.unique(np.linspace(0, len(dataset) - 1, SAMPLES).astype(np.int64))
        if (random := random_transform(dataset)) or differs(lambda: self._leaf[self._looked_at]):
            raise MisconfigurationException(
                f"data.dataset={type(dataset).__name__} gives other samples at each reading"
                + (f", by its transform {random}" if random else "")
                + f"; {NO_RANDOM}"
            )
        self.input_shape = tuple(self._leaf[np.arange(1)].shape[1:])

    def load(self) -> Loaded:
        """Read targets, and inputs if they are small."""
        count = len(self._dataset)
        y = self._targets if self._targets is not None else self._known_targets()
        if y is None:
            y = [self._dataset[position][1] for position in range(count)]
        owners = [self._owner(position) for position in range(count)] if callable(self._owner) else self._owner
        num_bytes = count * self._leaf[np.arange(1)].nbytes
        return Loaded(resident(self._leaf, num_bytes), targets_of(as_tensor(y, "data.targets")), owners)

    def _known_targets(self) -> Any:
        """Return the data set's list of targets, or None where its samples have others, as by a target transform."""
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
    """Return the name of a transform of a data set that is random by its class; empty where there is none.

    Such a transform may leave most images as they are, so that reading some of them twice wouldn't tell.

    >>> from torchvision.datasets import FakeData
    >>> from torchvision.transforms import Compose, RandomHorizontalFlip, Resize
    >>> random_transform(FakeData(transform=Compose([Resize(8), RandomHorizontalFlip(0.1)])))
    'RandomHorizontalFlip'
    >>> random_transform(FakeData(transform=Compose([Resize(8), RandomHorizontalFlip(1.0)])))
    ''

    Args:
        dataset: The data set, which may have others in it.
    """
    waiting, seen = [dataset], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if callable(part) and not isinstance(part, type):
            name, probability = type(part).__name__, getattr(part, "p", None)
            if isinstance(probability, (int, float)):
                is_random = 0 < probability < 1
            else:
                is_random = name.startswith("Random")
            if is_random:
                return name
        waiting += [getattr(part, name, None) for name in HOLDERS]
        if part is not dataset and isinstance(part, (list, tuple, torch.nn.Sequential)):
            waiting += part
    return ""


class Decoded:
    """Inputs of a map-style data set, read when they are asked for.

    Args:
        dataset: The data set.
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
    """An image as a tensor, uint8 [C, H, W]; a tensor as it is.

    Args:
        image: A Pillow image, an array, or a tensor.
    """
    if isinstance(image, Tensor):
        return image
    array = np.array(image)
    if array.dtype != np.uint8 or isinstance(image, np.ndarray):
        return torch.from_numpy(array)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1).contiguous()
