"""Data in LEAF's JSON files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.data.datamodule import DivisionSettings
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.sources.base import OwnedData, single, targets_of
from pfl_lightning.data.sources.columns import check_finite_column
from pfl_lightning.data.words import letter_numbers
from pfl_lightning.settings import Unpack
from pfl_lightning.tasks import Task

HALVES = ("train", "test")


class LeafData(OwnedData):
    """The users of LEAF's JSON files, in ``root/train/*.json`` and ``root/test/*.json``, or in ``root/*.json``.

    A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``. With two
    folders, users keep their two halves: ``client_split`` is ``given``, and ``val_fraction`` of the training samples is
    held out.

    Args:
        root: folder of the files; one file is read at once, for the shape.
        task: the prediction task.
        input_shape: shape of an input for the net, such as [1, 28, 28]; None keeps the files' shape.
        letters: alphabet of inputs that are texts of one length, as in Shakespeare: a letter becomes its position in
            the alphabet, and any other letter 0; targets likewise.
        **kwargs: settings of `FederatedDataModule`; ``download`` has no effect.

    Raises:
        MisconfigurationException: if there are no such files.

    Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018.
    """

    def __init__(
        self,
        root: str,
        task: Task,
        input_shape: tuple[int, ...] | None = None,
        letters: str | None = None,
        **kwargs: Unpack[DivisionSettings],
    ) -> None:
        super().__init__(task, root=root, **kwargs)
        self.letters = letters
        self._files = leaf_files(Path(root))
        if input_shape is None:
            _, x, _ = next(users_of(self._files[0][1]))
            input_shape = tuple(self._numbers(x[:1], "x").shape[1:])
        self.input_shape = tuple(input_shape)

    def load(self) -> Loaded:
        """Read all files."""
        x, y, client, split = [], [], [], []
        for half, path in self._files:
            for user, inputs, targets in users_of(path):
                x.append(self._numbers(inputs, "x").reshape(len(inputs), *self.input_shape))
                y.append(targets_of(self._numbers(targets, "y")))
                for name, values in (("x", x[-1]), ("y", y[-1])):
                    check_finite_column(values, f"{name} of user {user!r} in {path}")
                # a user of both halves is one client: the names are equal
                client += [user] * len(inputs)
                split += [half] * len(inputs)
        return Loaded(torch.cat(x), torch.cat(y), client, split if self._files[0][0] else None)

    def _numbers(self, values: list[Any], name: str) -> Tensor:
        if values and isinstance(values[0], str):
            if self.letters is None:
                raise MisconfigurationException(
                    f"data.letters=null: {name} in {self._files[0][1]} are texts; give the alphabet of the texts"
                )
            found = letter_numbers(values, self.letters)
            # a target is one letter, given as a text of length 1
            return found if name == "x" else found[:, 0]
        try:
            return single(torch.from_numpy(np.asarray(values)))
        except (TypeError, ValueError):
            raise MisconfigurationException(
                f"{name} in {self._files[0][1].parent} are not numbers of one shape for all samples; correct the files"
            ) from None


def leaf_files(root: Path) -> list[tuple[str, Path]]:
    """Return the half, or an empty text, and the path of each file.

    Args:
        root: folder of the files, or of train/ and test/ that hold the files.

    Raises:
        MisconfigurationException: if there is no file, or none in train/.
    """
    files = [(half, path) for half in HALVES for path in sorted(Path(root, half).glob("*.json"))]
    # with test files alone, every client would lack training samples, with a less clear message
    if {half for half, _ in files} == {"test"}:
        raise MisconfigurationException(f"data.root={str(root)!r} has files in test/ and none in train/; add them")
    if files := files or [("", path) for path in sorted(root.glob("*.json"))]:
        return files
    raise MisconfigurationException(
        f"data.root={str(root)!r} has no LEAF files; put *.json into it, or into train/ and test/ in it"
    )


def users_of(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield name, inputs and targets of each user in a file.

    Args:
        path: the file.

    Raises:
        MisconfigurationException: if the file has another structure.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        held = content["user_data"]
        named = [(str(user), held[user]["x"], held[user]["y"]) for user in content["users"]]
        counts = content.get("num_samples", [len(x) for _, x, _ in named])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MisconfigurationException(
            f"{path} is no LEAF file ({type(error).__name__}: {error}); a LEAF file has users, num_samples and "
            "user_data with x and y of each user"
        ) from None
    for (user, x, y), count in zip(named, counts, strict=True):
        if not len(x) == len(y) == count:
            raise MisconfigurationException(
                f"{path}: user {user} has {len(x)} x and {len(y)} y where num_samples says {count}; correct the file"
            )
        # a user without samples has no shape to check and makes no client
        if count:
            yield user, x, y
