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

from pfl_lightning.data.loaded import Loaded
from pfl_lightning.data.sources.base import OwnedData, resident, targets_of
from pfl_lightning.data.trees import as_tensor
from pfl_lightning.tasks import Task


class VisionData(OwnedData):
    """A map-style data set, such as one of TorchVision: ``dataset[i]`` is an image, or a tensor, and its target.

    Up to 1 GiB is read into memory; more is decoded a client at a time, whenever it is asked for.

    Args:
        dataset: The data set; its transforms make all inputs of one shape.
        task: What is predicted.
        client: Who holds each sample: names, or a function of its position that gives one; None under another
            partitioner than `Natural`.
        targets: Targets of all samples; None takes ``dataset.targets`` or ``labels``, or else reads every sample.
        **kwargs: Settings of `FederatedDataModule`; ``root`` and ``download`` have no effect.

    Raises:
        MisconfigurationException: It is no such data set.
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
        self.input_shape = tuple(self._leaf[np.arange(1)].shape[1:])

    def load(self) -> Loaded:
        """Read targets, and inputs if they are small."""
        count = len(self._dataset)
        known = (getattr(self._dataset, name, None) for name in ("targets", "labels"))
        y = next((each for each in (self._targets, *known) if each is not None), None)
        if y is None:
            y = [self._dataset[position][1] for position in range(count)]
        owners = [self._owner(position) for position in range(count)] if callable(self._owner) else self._owner
        num_bytes = count * self._leaf[np.arange(1)].nbytes
        return Loaded(resident(self._leaf, num_bytes), targets_of(as_tensor(y, "data.targets")), owners)


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
