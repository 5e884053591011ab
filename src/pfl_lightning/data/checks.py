"""Checks of settings, pools, partitions and rows to predict; errors name the setting, its value, and a remedy."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from pfl_lightning.data.batches import LastBatch
from pfl_lightning.data.input_drift import InputDrift
from pfl_lightning.data.samples import Loaded
from pfl_lightning.data.trees import Tree, cell, first_not_finite, leaves_of, mapped, read, with_leaves
from pfl_lightning.messages import tensors
from pfl_lightning.seeds import derive_seed
from pfl_lightning.tasks import NextToken, Task

Drawn = TypeVar("Drawn")

ClientSplit = Literal["random", "stratified", "time", "given"]
"""Ways to split a client's samples: at random, with the client's label mix in each split, by time, or as the data say.
"""

ClientTest = Literal["own", "original"]
"""Samples to test a client on: a split of the client's own samples, or samples of the original test half."""

MAPPED = 2**30
"""Size in bytes up to which a memory map is checked on loading; a larger map is checked as it is read."""

SAMPLES = 16
"""Number of samples, or of Datasets, that are looked at to detect randomness."""
READ = 256
"""Number of readings of all of these together."""
NO_RANDOM = (
    "clients train and are tested on the same inputs, so take random transforms out, and draw them in the client "
    "module's training_step"
)
"""Advice to users of random transforms."""


def is_share(value: Any) -> bool:
    """Return whether a value is a number between 0 and 1."""
    return isinstance(value, Real) and 0 < float(value) < 1


def is_number_or_share(value: Any) -> bool:
    """Return whether a value is a number of clients from 0 up, or a share of clients between 0 and 1."""
    if isinstance(value, Integral):
        # bool is an Integral in Python: new_clients=True would mean one new client
        return int(value) >= 0 and not isinstance(value, bool)
    return is_share(value)


def are_names(value: Any) -> bool:
    """Return whether a value is a list of different names, at least one."""
    known = isinstance(value, (list, tuple)) and all(isinstance(name, str | int) for name in value)
    return known and len(value) == len(set(map(str, value))) > 0


def is_later_round(value: Any) -> bool:
    """Return whether a value is the number of a round after the first."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 2


def number_of_folds(val_fraction: float) -> int:
    """Return the number of folds of a client's samples outside test, each about this share of them.

    >>> number_of_folds(0.2), number_of_folds(0.3), number_of_folds(0.0)
    (5, 3, 0)

    Args:
        val_fraction: share of val in the samples outside test, in [0, 1).
    """
    return round(1 / val_fraction) if val_fraction else 0


# Checked in this order. Types come first (`check_settings`), so a condition may compare numbers. Sentences are format
# strings over all settings, so a literal brace is doubled.
CONDITIONS: list[tuple[Callable[[Any], bool], str]] = [
    (lambda s: isinstance(s.root, (str, os.PathLike)), "root={root!r} must be a folder"),
    (lambda s: s.num_clients is None or s.num_clients >= 1, "num_clients={num_clients} must be at least 1"),
    (
        lambda s: is_number_or_share(s.new_clients) or are_names(s.new_clients),
        "new_clients={new_clients!r} must be a number of clients from 0 up, or a share of them between 0 and 1, or a "
        "list of their names",
    ),
    (
        lambda s: callable(s.partitioner) and not isinstance(s.partitioner, type),
        "partitioner={partitioner!r} must be a partitioner, such as Dirichlet(alpha=0.1)",
    ),
    (
        lambda s: s.num_clients is not None or getattr(s.partitioner, "by_owner", False),
        "num_clients=null takes all clients that there are, which partitioner {partitioner.__class__.__name__} doesn't "
        "know; give a number, or take Natural",
    ),
    (lambda s: s.batch_size >= 1, "batch_size={batch_size} must be at least 1"),
    (
        lambda s: s.last_batch in get_args(LastBatch),
        f"last_batch={{last_batch!r}} must be one of {', '.join(get_args(LastBatch))}",
    ),
    (lambda s: 0 <= s.test_fraction < 1, "test_fraction={test_fraction} must be at least 0 and below 1"),
    (lambda s: 0 <= s.val_fraction < 1, "val_fraction={val_fraction} must be at least 0 and below 1"),
    (
        lambda s: s.val_fold is None or s.val_fraction > 0,
        "val_fold={val_fold} needs folds: set data.val_fraction too, such as 0.2 for five folds",
    ),
    (
        lambda s: s.val_fold is None or number_of_folds(s.val_fraction) > 1,
        "val_fold={val_fold} needs two folds or more: data.val_fraction={val_fraction} must be 0.5 or less",
    ),
    (
        lambda s: s.val_fold is None or 0 <= s.val_fold < number_of_folds(s.val_fraction),
        "val_fold={val_fold} must be at least 0 and below the number of folds, 1 / data.val_fraction={val_fraction}",
    ),
    (
        lambda s: s.max_samples is None or s.max_samples >= (s.num_clients or 1),
        "max_samples={max_samples} must be at least num_clients={num_clients}",
    ),
    (
        lambda s: s.client_split is None or s.client_split in get_args(ClientSplit),
        f"client_split={{client_split!r}} must be one of {', '.join(get_args(ClientSplit))}, or null",
    ),
    (
        lambda s: s.client_test in get_args(ClientTest),
        f"client_test={{client_test!r}} must be one of {', '.join(get_args(ClientTest))}",
    ),
    (
        lambda s: s.central_test in (None, "original") or is_share(s.central_test),
        "central_test={central_test} must be between 0 and 1, or original, or null",
    ),
    (lambda s: 0 <= s.server_fraction < 1, "server_fraction={server_fraction} must be at least 0 and below 1"),
    (
        lambda s: s.server_fraction <= 0 or s.central_test is not None,
        "server_fraction={server_fraction} is a share of the central test set: set data.central_test too",
    ),
    (
        lambda s: s.server_fraction <= 0 or s.public is None,
        "server_fraction={server_fraction} and data.public={public.__class__.__name__} both give the server samples; "
        "take one",
    ),
    (lambda s: s.public_samples >= 1, "public_samples={public_samples} must be at least 1"),
    (
        lambda s: s.drift is None or (isinstance(s.drift, Mapping) and all(map(is_later_round, s.drift))),
        "drift={drift!r} must name rounds from 2 on, each with a partitioner, such as {{20: Dirichlet(alpha=1.0)}}",
    ),
    (
        lambda s: all(callable(each) and not isinstance(each, type) for each in (s.drift or {}).values()),
        "drift={drift!r} must have a partitioner for each round, such as Dirichlet(alpha=1.0)",
    ),
    (
        lambda s: not any(getattr(each, "by_owner", False) for each in (s.drift or {}).values()),
        "drift={drift!r} divides by the owners of samples, which don't change; take IID or Dirichlet",
    ),
    (
        lambda s: (
            s.input_drift is None
            or (
                isinstance(s.input_drift, (list, tuple)) and all(isinstance(each, InputDrift) for each in s.input_drift)
            )
        ),
        "input_drift={input_drift!r} must be a list of InputDrift, such as [InputDrift(start=20, shift=0.5)]",
    ),
    (lambda s: 0 <= s.seed < 2**32, "seed={seed} must be from 0 to 2**32 - 1"),
]
"""Conditions on the settings of a data module, whatever the data, each with the sentence for a violation."""


def check_integers(owner: str, **settings: object) -> None:
    """Check that settings are integers.

    Args:
        owner: prefix of the settings' names in the message, such as ``data.``.
        **settings: the values, by name.

    Raises:
        MisconfigurationException: if a value is no integer.
    """
    _check_type(Integral, "an integer", owner, settings)


def check_numbers(owner: str, **settings: object) -> None:
    """Check that settings are numbers; see `check_integers`."""
    _check_type(Real, "a number", owner, settings)


def _check_type(kind: type, words: str, owner: str, settings: dict[str, object]) -> None:
    for name, value in settings.items():
        # bool counts as an integer in Python; here it is a slip, such as batch_size=True
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MisconfigurationException(f"{owner}{name}={value!r} must be {words}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the settings of a data module, as far as possible without the data.

    Args:
        settings: the values, by the names of `FederatedDataModule`'s arguments.

    Raises:
        MisconfigurationException: if a value is of a wrong type or out of range.
    """
    check_integers("data.", **{name: settings[name] for name in ("batch_size", "public_samples", "seed")})
    fractions = ("test_fraction", "val_fraction", "server_fraction")
    check_numbers("data.", **{name: settings[name] for name in fractions})
    optional = ("num_clients", "max_samples", "val_fold")
    check_integers("data.", **{name: settings[name] for name in optional if settings[name] is not None})
    for is_right, sentence in CONDITIONS:
        if not is_right(SimpleNamespace(**settings)):
            raise MisconfigurationException(f"data.{sentence.format(**settings)}")


def existing(root: str, folder: str, name: str, origin: str) -> Path:
    """Return the path of a data set's file.

    Args:
        root: the setting ``data.root``.
        folder: the folder below it.
        name: the file's name.
        origin: where the file is published.

    Raises:
        MisconfigurationException: if there is no such file.
    """
    path = Path(root, folder, name)
    if not path.is_file():
        raise MisconfigurationException(
            f"data.root={root!r}: there is no {path}; put the files of {origin} into {path.parent}, or set data.root "
            f"to the folder that {folder} is in"
        )
    return path


def check_pool(loaded: Loaded, task: Task, owner: str) -> None:
    """Check a loaded pool: one target for each input, and only numbers within a net's range.

    Memory maps above `MAPPED` bytes, and inputs of readers, are checked as they are read, by
    `pfl_lightning.data.trees.take`.

    Args:
        loaded: the pool, with inputs of shape [N, ...] and targets of shape [N, ...], or trees of such tensors.
        task: the prediction task.
        owner: the data module's class, for the message.

    Raises:
        MisconfigurationException: if the pool is empty, inputs and targets do not fit, or a number is NaN or infinite.
    """
    rows = [len(leaf) for tree in (loaded.x, loaded.y) for leaf in leaves_of(tree)]
    if not rows or min(rows) != max(rows) or max(rows) == 0:
        found = ", ".join(map(str, dict.fromkeys(rows))) or "no"
        raise MisconfigurationException(
            f"load() returned tensors of {found} rows; return at least one input and one target for each"
        )
    for x in leaves_of(loaded.x):
        if 0 in (shape := getattr(x, "shape", (1,))):
            raise MisconfigurationException(
                f"{owner}: x has the shape {list(shape)}; give at least one number a sample"
            )
    check_finite(loaded, loaded.x, "x", owner)
    # a task may use NaN for a missing target
    if not task.allows_nan:
        check_finite(loaded, loaded.y, "y", owner)
    task.check(loaded.y, "load()")
    if isinstance(task, NextToken):
        check_shift(loaded, task, owner)


def check_shift(loaded: Loaded, task: NextToken, owner: str) -> None:
    """Refuse targets that are the inputs themselves, which a net learns to copy with a perplexity of 1.

    Args:
        loaded: the pool, with targets ``[N, T]``.
        task: the prediction task.
        owner: the data module's class, for the message.

    Raises:
        MisconfigurationException: if nine of ten counted targets equal the input in their position.
    """
    counted = loaded.y != task.ignore_index
    for x in leaves_of(loaded.x):
        if isinstance(x, Tensor) and not x.is_floating_point() and x.shape == loaded.y.shape:
            equal = ((x == loaded.y) & counted).sum()
            # one token for the whole text is its own next one, and right
            if equal >= 0.9 * counted.sum() > 0 and bool((x != x[:1, :1]).any()):
                raise MisconfigurationException(
                    f"{owner}: {float(equal / counted.sum()):.0%} of the targets equal the token in their own "
                    "position, which a net would learn to copy; give targets shifted by one: inputs tokens[:, :-1], "
                    "targets tokens[:, 1:]"
                )


def check_finite(loaded: Loaded, tree: Tree, name: str, owner: str) -> None:
    """Check that inputs or targets have no NaN, no infinity, and no number beyond single precision.

    Args:
        loaded: the pool.
        tree: the pool's inputs or targets.
        name: ``x`` or ``y``, for the message.
        owner: the data module's class, for the message.

    Raises:
        MisconfigurationException: if there is such a number; the message names row, column and client.
    """
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            check_finite(loaded, part, f"{name}[{key!r}]", owner)
    elif type(tree) in (list, tuple):
        for index, part in enumerate(tree):
            check_finite(loaded, part, f"{name}[{index}]", owner)
    elif isinstance(tree, Tensor) or (isinstance(tree, np.ndarray) and tree.nbytes <= MAPPED):
        if (place := first_not_finite(tree)) is None:
            return
        # The row in the pool helps whoever has the whole table; a client's rows count from 1 within its own file or
        # folder.
        row, whose = place[0], ""
        holders = np.asarray(loaded.client)
        if holders.shape == (len(loaded),):
            whose = f" (number {int((holders[: row + 1] == holders[row]).sum())} of client {holders[row]})"
        raise MisconfigurationException(
            f"{owner}: {cell(name, tree[place].item(), place)}{whose}; correct this sample, or leave it out"
        )


def differs(draw: Callable[[], Tree], readings: int, place: int = 0) -> bool:
    """Return whether a function returns other tensors from one call to the next; random states stay as they are.

    Each call finds generators of its own seed, which depends on ``place`` and on the call's number: what is read at
    several places is drawn anew at each. Where each of n items is another one in a share p of its readings, none of
    them shows it with the probability (1 - p)^(n readings): for the `READ` readings of all items together 2e-12 for
    p = 0.1, 2e-6 for 0.05, 0.6 % for 0.02 and 8 % for 0.01.

    Args:
        draw: returns a tree of tensors.
        readings: number of calls, 2 or more; none follows the first one with another result.
        place: number of the place that is read.
    """

    def drawn(reading: int) -> list[Tensor]:
        # nan_to_num copies, since `draw` may change and return the same tensors; and it makes NaN comparable
        seed = derive_seed("differs", place, reading) % 2**32
        return [tensor.nan_to_num() for tensor in tensors(seeded(draw, seed))]

    with isolate_rng():
        first = drawn(0)
        return any(not all(map(torch.equal, first, drawn(reading))) for reading in range(1, readings))


def seeded(draw: Callable[[], Drawn], seed: int) -> Drawn:
    """Call a function with random generators of their own; the states of torch's, NumPy's and Python's stay.

    Args:
        draw: the function.
        seed: seed of the three generators, 0 to 2**32 - 1.
    """
    with isolate_rng(include_cuda=False):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        return draw()


def check_strata(strata: Tensor | None, count: int, task: Task, partitioner: object = None) -> tuple[Tensor, int]:
    """Check the group of each sample; return the groups and their number. Without groups, all samples form one.

    Args:
        strata: the data module's groups, or None.
        count: number of samples.
        task: the prediction task.
        partitioner: the partitioner of the samples; None for samples that nobody divides.

    Raises:
        MisconfigurationException: if the partitioner needs groups and there are none, or the groups are no int64
            numbers from 0 up.
    """
    if strata is None:
        if partitioner is not None and getattr(partitioner, "by_class", True):
            raise MisconfigurationException(
                f"data.partitioner={type(partitioner).__name__} tells samples apart by their class, and task {task} "
                "has none; take IID or Natural, or let the data module's strata give a group for each sample"
            )
        return torch.zeros(count, dtype=torch.int64), 1
    is_tensor = isinstance(strata, Tensor)
    if not is_tensor or strata.shape != (count,) or strata.dtype != torch.int64 or strata.min() < 0:
        what = f"{strata.dtype} of shape {list(strata.shape)}" if is_tensor else f"a {type(strata).__name__}"
        raise MisconfigurationException(
            f"strata() gave {what}; return an int64 number from 0 up for each of {count} samples"
        )
    return strata, task.outputs if task.has_classes else int(strata.max()) + 1


def rows_of_test_half(positions: Tensor, count: int, owner: str) -> Tensor:
    """Return whether each sample of a pool belongs to the original test half, bool [count].

    Args:
        positions: positions of the test half, as the data module has them.
        count: number of samples.
        owner: the data module's class, for the message.

    Raises:
        MisconfigurationException: if the positions are no positions in the pool.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 1 or positions.dtype != torch.int64:
        what = type(positions).__name__
        if isinstance(positions, Tensor):
            what = f"{positions.dtype} of shape {list(positions.shape)}"
        raise MisconfigurationException(f"{owner}.original_test is {what}; give int64 positions of shape [n]")
    if len(positions) and (positions.min() < 0 or positions.max() >= count):
        raise MisconfigurationException(
            f"{owner}.original_test has positions from {int(positions.min())} to {int(positions.max())}; give "
            f"positions from 0 to {count - 1}"
        )
    return torch.zeros(count, dtype=torch.bool).index_fill(0, positions, True)


def check_enough(max_samples: int, count: int) -> None:
    """Check that a subset can have a sample of each group.

    Args:
        max_samples: size of the subset.
        count: number of groups.

    Raises:
        MisconfigurationException: if the subset is smaller.
    """
    if max_samples < count:
        raise MisconfigurationException(
            f"data.max_samples={max_samples} must be at least the {count} classes of the data"
        )


def warn_of_one_class(name: str, y: Tensor) -> None:
    """Warn if all samples of a pool are of one class.

    Args:
        name: the data module's class.
        y: labels of the pool, shape [N].
    """
    # no error: a small subset, or a site's own samples, may be of one class
    if len(y) > 1 and bool((y == y[0]).all()):
        rank_zero_warn(
            f"{name}: all {len(y)} samples are of class {int(y[0])}, so that every method has an accuracy of 1."
        )


def check_halves(name: str, has_half: bool, client_test: str, central_test: float | str | None) -> None:
    """Check that the data set has an original test half if the settings ask for one.

    Args:
        name: the data module's class.
        has_half: whether the data set has such a half.
        client_test: ``original`` or another value.
        central_test: ``original`` or another value.

    Raises:
        MisconfigurationException: if the data set has no such half.
    """
    instead = {
        "client_test": (client_test, "take own"),
        "central_test": (central_test, "take a share of the pool, such as 0.1"),
    }
    for setting, (value, other) in instead.items():
        if value == "original" and not has_half:
            raise MisconfigurationException(
                f"data.{setting}=original: {name} has no test half of its own here; {other}"
            )


def check_partition(
    parts: Sequence[Tensor], partitioner: Callable[..., list[Tensor]], num_clients: int, num_samples: int, least: int
) -> None:
    """Check a partitioner's result: distinct samples for every client; report the number of samples left out.

    Args:
        parts: the partitioner's result: for each client, int64 positions, shape [n], in [0, num_samples), all distinct.
        partitioner: the partitioner.
        num_clients: number of clients M.
        num_samples: number of samples to divide.
        least: number of samples that a client needs.

    Raises:
        MisconfigurationException: if the parts are anything else.
    """
    # a partitioner may be a plain function of the user's, and every mistake in one is caught here
    name = getattr(partitioner, "__name__", type(partitioner).__name__)
    if not isinstance(parts, (list, tuple)) or len(parts) != num_clients:
        what = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"a {type(parts).__name__}"
        raise MisconfigurationException(
            f"{name} returned {what} for data.num_clients={num_clients}; return a list of one tensor of positions for "
            "each client"
        )
    for client, rows in enumerate(parts):
        # an empty tensor may have any type (torch.tensor([]) is float); too few samples is the clearer message for it
        # not `len(rows)`, which takes longer than all other checks
        count = rows.shape[0] if isinstance(rows, Tensor) and rows.dim() == 1 else None
        if count is None or (count and rows.dtype != torch.int64):
            what = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise MisconfigurationException(
                f"{name} gave client {client} positions as {what}; give each client an int64 tensor of shape [n]"
            )
        if count < least:
            limits = [limit for limit in ("min_size", "min_samples") if hasattr(partitioner, limit)]
            more = f"{limits[0]}={least}" if limits else f"give each at least {least}"
            raise MisconfigurationException(
                f"{name} left client {client} with {count} of {num_samples} samples, too few for {least} non-empty "
                f"parts; use fewer clients or more samples, or {more}"
            )
    taken = torch.cat(list(parts))
    if taken.min() < 0 or taken.max() >= num_samples:
        raise MisconfigurationException(
            f"{name} gave positions from {int(taken.min())} to {int(taken.max())} for {num_samples} samples; give "
            f"positions from 0 to {num_samples - 1}"
        )
    # positions in two parts would let one client train on another's test samples
    owners = torch.bincount(taken, minlength=num_samples)
    if owners.max() > 1:
        sample = int(owners.argmax())
        holders = [client for client, rows in enumerate(parts) if (rows == sample).any()]
        who = f"clients {holders[0]} and {holders[1]}" if len(holders) > 1 else f"client {holders[0]} twice"
        raise MisconfigurationException(
            f"{name} gave sample {sample} to {who}, which could be trained and tested on it; give each sample once"
        )
    if left := num_samples - len(taken):
        rank_zero_info(f"{name} leaves {left} of {num_samples} samples to no client.")


def checked_rows(rows: Any, like: Tree) -> Tree:
    """Return rows as tensors in the form of training inputs, without a copy where the type is the same.

    >>> checked_rows([[1, 2]], torch.empty(0, 2))
    tensor([[1., 2.]])

    Args:
        rows: a tensor or an array ``[n, ...]``, a tree of these, or a map-style Dataset.
        like: a tree of empty tensors with the right shape and type.

    Raises:
        MisconfigurationException: if the rows have another form, no row, or numbers that aren't finite.
    """
    if isinstance(rows, (DataLoader, IterableDataset)):
        raise MisconfigurationException(
            f"data={type(rows).__name__} doesn't tell its rows by number; give tensors or a map-style Dataset"
        )
    if isinstance(rows, Dataset):
        rows = items_of(rows)
    return rows_like(mapped(with_leaves(rows, "data"), lambda leaf: read(leaf, slice(None))), like, "data")


def items_of(dataset: Any) -> Tree:
    """Return the inputs of a map-style Dataset; targets that items have beside them are left out.

    Args:
        dataset: the Dataset.
    """
    if not len(dataset):
        raise MisconfigurationException(f"data={type(dataset).__name__} has no items to predict for; give at least one")
    items = (dataset[index] for index in range(len(dataset)))
    return default_collate([item[0] if isinstance(item, (tuple, list)) else item for item in items])


def rows_like(rows: Tree, like: Tree, name: str) -> Tree:
    """Return a tree of rows in the types of another tree; see `checked_rows`.

    Args:
        rows: a tree of tensors.
        like: a tree of empty tensors.
        name: name of the tree for messages.
    """
    if isinstance(like, Mapping):
        if not isinstance(rows, Mapping) or not rows.keys() >= like.keys():
            raise MisconfigurationException(f"{name} must be a dict with {', '.join(map(repr, like))}, as in training")
        tree: Tree = {key: rows_like(rows[key], part, f"{name}[{key!r}]") for key, part in like.items()}
        return same_length(tree, name)
    if type(like) in (tuple, list):
        if type(rows) not in (tuple, list) or len(rows) != len(like):
            raise MisconfigurationException(f"{name} must be a {type(like).__name__} of {len(like)} parts")
        parts = (rows_like(part, other, f"{name}[{k}]") for k, (part, other) in enumerate(zip(rows, like, strict=True)))
        return same_length(type(like)(parts), name)
    if not isinstance(rows, Tensor):
        raise MisconfigurationException(
            f"{name} is a {type(rows).__name__}; give a tensor of shape {shown_shape(like)}, as in training"
        )
    if rows.shape[1:] != like.shape[1:] or not rows.dim() or not len(rows):
        raise MisconfigurationException(
            f"{name} has the shape {list(rows.shape)}, and the inputs in training {shown_shape(like)}; give such rows"
        )
    if (place := first_not_finite(rows)) is not None:
        raise MisconfigurationException(f"{cell(name, rows[place].item(), place)}; correct this row, or leave it out")
    return rows_in_type(rows, like.dtype, name)


def rows_in_type(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return rows in the type of the inputs in training.

    Args:
        rows: the rows.
        dtype: the type in training.
        name: name of the rows for the message.

    Raises:
        MisconfigurationException: if the type can't hold the rows.
    """
    if rows.dtype == dtype:
        return rows
    # bytes are the type of images, which `transform` scales, and floats stay as they are: the net was trained on one
    # of the two scales
    if torch.uint8 in (rows.dtype, dtype) and (rows.is_floating_point() or dtype.is_floating_point):
        raise MisconfigurationException(
            f"{name} is of the type {rows.dtype}, and the inputs in training of {dtype}, where images have another "
            f"scale; give {dtype} as in training"
        )
    whole = not (rows.is_floating_point() or rows.is_complex())
    if dtype.is_floating_point and not rows.is_complex():
        return rows.to(dtype)
    if whole and dtype != torch.uint8 and not dtype.is_floating_point:
        return rows.to(dtype)
    raise MisconfigurationException(f"{name} is of the type {rows.dtype}, and the inputs in training of {dtype}")


def same_length(tree: Tree, name: str) -> Tree:
    """Return a tree whose tensors have the same number of rows.

    Raises:
        MisconfigurationException: if the numbers differ.
    """
    if len(counts := {len(leaf) for leaf in tensors(tree)}) > 1:
        raise MisconfigurationException(f"{name} has parts of {sorted(counts)} rows; give each the same number")
    return tree


def shown_shape(like: Tensor) -> str:
    """Return the shape of inputs for messages.

    >>> shown_shape(torch.empty(0, 3, 8))
    '[n, 3, 8]'
    """
    return f"[{', '.join(['n', *map(str, like.shape[1:])])}]"
