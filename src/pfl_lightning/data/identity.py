"""The identity of rows: a key of each row's contents, digests of clients' splits, and rows that are held twice."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.client_names import client_label
from pfl_lightning.data.division import Division
from pfl_lightning.data.samples import Split
from pfl_lightning.data.trees import Tree, leaves_of, rows_in

Keys = NDArray[np.uint64]
"""A number for each row, shape [N]: equal for equal rows, and with near certainty another one for others."""

BYTES = 2**22
"""Bytes of rows per step, which stay in a processor's cache."""
FEW = 1000
"""Rows that tell how many different values a column has."""
RARE = 100
"""Possible rows per row from which on two equal rows are no coincidence."""


def mixed(values: Keys) -> Keys:
    """Return numbers whose bits depend on all bits of the given ones.

    Source: the finaliser of SplitMix64, Steele et al., 2014.

    Args:
        values: the numbers.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys_of_tensor(rows: Tensor) -> Keys:
    """Return the key of each row of a tensor, by its bytes.

    Words of 32 bits are multiplied with random odd numbers of 64 bits and added up, in one pass over the memory.

    Args:
        rows: the rows, shape [N, ...].
    """
    count = len(rows)
    keys = np.zeros(count, dtype=np.uint64)
    width = rows[:1].numel() * rows.element_size()
    if not width:
        return keys
    # of one seed, so that a checkpoint's keys are those of every later process
    factors = np.random.PCG64(0).random_raw(-(-width // 4)) | np.uint64(1)
    # some rows at once: all of them in 64 bits would take twice the memory of the pool
    step = max(1, BYTES // width)
    for start in range(0, count, step):
        block = rows[start : start + step].detach().cpu().contiguous().reshape(-1, width // rows.element_size())
        data = block.view(torch.uint8).numpy()
        # words have four bytes, and the padding of a row adds nothing to its sum
        if width % 4:
            data = np.pad(data, ((0, 0), (0, -width % 4)))
        keys[start : start + step] = data.view(np.uint32).astype(np.uint64) @ factors
    return mixed(keys)


def keys_of_texts(texts: Sequence[str]) -> Tensor:
    """Return a number for each text, int64, equal in each process.

    Args:
        texts: the texts.
    """
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64) if texts else torch.empty(0, dtype=torch.int64)


class RowKeys(NamedTuple):
    """Keys of the rows of a pool.

    Args:
        contents: a key of each row's contents; None where inputs stay in files, which aren't read for it.
        targets: a key of each row's targets and its place among its owner's rows.
    """

    contents: Keys | None
    targets: Keys

    def take(self, rows: Tensor) -> "RowKeys":
        """Return the keys of some rows.

        Args:
            rows: positions of the rows.
        """
        places = rows.numpy()
        return RowKeys(None if self.contents is None else self.contents[places], self.targets[places])


def keys_of(contents: Tree, targets: Tree, owners: Tensor | None) -> RowKeys:
    """Return the keys of a pool's rows.

    Args:
        contents: a tree of tensors, or of leaves that return rows for ``leaf[positions]``.
        targets: a tree of tensors.
        owners: number of each row's owner, int64 [N]; None counts places in the whole pool.
    """
    # inputs that stay in files would have to be read as a whole
    is_whole = all(isinstance(leaf, Tensor) for leaf in leaves_of(contents))
    own = keys_of_tree(targets)
    return RowKeys(keys_of_tree(contents) if is_whole else None, mixed(own + places_of(owners, len(own))))


def keys_of_tree(tree: Tree) -> Keys:
    """Return the key of each row of a tree of tensors.

    Args:
        tree: the tree, not empty.
    """
    keys: Keys = np.zeros(rows_in(tree), dtype=np.uint64)
    for place, leaf in enumerate(leaves_of(tree), 1):
        # with the leaf's place, so that inputs and targets of the same numbers don't change places unseen
        keys = mixed(keys + keys_of_tensor(leaf) + np.uint64(place))
    return keys


def places_of(owners: Tensor | None, count: int) -> Keys:
    """Return the place of each row among its owner's rows, from 0.

    >>> places_of(torch.tensor([0, 1, 0, 0]), 4).tolist()
    [0, 0, 1, 2]

    Args:
        owners: number of each row's owner, [N]; None is one owner.
        count: number of rows N.
    """
    places = np.arange(count, dtype=np.uint64)
    if owners is None:
        return places
    # stable, so that the rows of an owner keep their order
    order = np.argsort(owners.numpy(), kind="stable")
    sizes = np.bincount(owners.numpy())
    starts = np.cumsum(sizes) - sizes
    result = np.empty(count, dtype=np.uint64)
    result[order] = places - starts[owners.numpy()[order]].astype(np.uint64)
    return result


def digests(keys: RowKeys, division: Division, count: int) -> Tensor:
    """Return digests of clients' splits, int64 ``[clients, 3, 3]``.

    Of the three of each split, the first is of the contents of its rows in any order, the second of the contents in
    their order, and the third of targets and places in the rows' order. Without keys of contents, the first two are 0.

    Args:
        keys: keys of the rows of the pool.
        division: who holds which rows.
        count: number of clients, the first ones of the division.
    """
    totals = np.zeros((count, len(get_args(Split)), 3), dtype=np.uint64)
    for place, split in enumerate(get_args(Split)):
        rows, owners = held_in(division, [split], count)
        sizes = np.array(division.sizes[split][:count])
        ends = np.cumsum(sizes)
        # a number for each place in a client's split makes the sum of its keys depend on their order
        steps = (np.arange(len(rows)) - (ends - sizes)[owners] + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        columns = {2: mixed(keys.targets[rows] + steps)}
        if keys.contents is not None:
            columns |= {0: keys.contents[rows], 1: mixed(keys.contents[rows] + steps)}
        for kind, values in columns.items():
            # differences of running sums, which wrap around at 2 ** 64 as sums of each client would
            sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(values, dtype=np.uint64)])
            totals[:, place, kind] = sums[ends] - sums[ends - sizes]
    return torch.from_numpy(totals.view(np.int64))


def held_in(division: Division, splits: Sequence[Split], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pool positions of clients' rows in some splits, and each one's client.

    Args:
        division: who holds which rows.
        splits: names of splits; the rows of one follow those of another.
        count: number of clients, the first ones of the division.
    """
    held = [division.held_by(range(count), split) for split in splits]
    owners = [np.repeat(np.arange(count), sizes) for _, sizes in held]
    return np.concatenate([rows.numpy() for rows, _ in held]), np.concatenate(owners)


def warn_of_shared_rows(keys: Keys, division: Division, may_coincide: Callable[[], bool], name: str) -> None:
    """Warn of test and validation rows that their client also trains on, and of rows that several clients hold.

    Args:
        keys: the key of each row of the pool.
        division: who holds which rows.
        may_coincide: returns whether equal rows are to be expected by chance.
        name: name of the data, for the messages.
    """
    count = len(division.clients)
    rows, owners = held_in(division, ["train"], count)
    # NumPy's `isin` takes ten times as long for numbers of 64 bits
    train = np.sort(mixed(keys[rows] + owners.astype(np.uint64)))
    lines: list[str] = []
    splits: list[Split] = ["test", "val"]
    for split in splits:
        rows, owners = held_in(division, [split], count)
        # keys of a row and its client together, which one search compares for all clients
        twice = among(mixed(keys[rows] + owners.astype(np.uint64)), train)
        if twice.any():
            # one line, as what spoils the test set mostly spoils the validation set too
            lines.append(described_reuse(split, owners[twice], division))
            break
    if line := described_sharing(keys, division, count):
        lines.append(line)
    if lines and not may_coincide():
        for line in lines:
            rank_zero_warn(f"{name}: {line}")


def among(values: Keys, known: Keys) -> NDArray[np.bool_]:
    """Return whether each value is among known ones.

    >>> among(np.array([2, 5], dtype=np.uint64), np.array([1, 2], dtype=np.uint64)).tolist()
    [True, False]

    Args:
        values: the values.
        known: the known values, ascending.
    """
    if not len(known):
        return np.zeros(len(values), dtype=np.bool_)
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    found: NDArray[np.bool_] = known[places] == values
    return found


def warn_of_spread_groups(groups: Tensor, division: Division, name: str) -> None:
    """Warn of groups with rows at several clients, of which one may train on rows that another is tested on.

    Args:
        groups: number of each row's group, int64 [N].
        division: who holds which rows.
        name: name of the data, for the message.
    """
    rows, owners = held_in(division, get_args(Split), len(division.clients))
    held = torch.stack([groups[torch.from_numpy(rows)], torch.from_numpy(owners)])
    pairs = torch.unique(held, dim=1)[0]
    distinct, holders = pairs.unique_consecutive(return_counts=True)
    if several := int((holders > 1).sum()):
        rank_zero_warn(
            f"{name}: {several} of {len(distinct)} values of data.group have rows at several clients, of which one may "
            "train on rows that another is tested on."
        )


def described_reuse(split: Split, owners: NDArray[np.int64], division: Division) -> str:
    """Return the words for test or validation rows that are also training rows.

    Args:
        split: the split.
        owners: the client of each such row.
        division: who holds which rows.
    """
    shared, sizes = np.bincount(owners, minlength=len(division.clients)), np.array(division.sizes[split])
    client = int((shared / np.maximum(sizes, 1)).argmax())
    kind = "validation" if split == "val" else "test"
    line = (
        f"{shared[client]} of {sizes[client]} {kind} rows of client {client_label(client, division.names)} are also in "
        "its training rows"
    )
    if several := int((shared > 0).sum()) - 1:
        line += f", as are {shared.sum() - shared[client]} of {several} more"
    return (
        f"{line}, so that {kind} figures are too good; keep equal rows on one side, as data.group of tables does, or "
        "leave them out."
    )


def described_sharing(keys: Keys, division: Division, count: int) -> str:
    """Return the words for rows that several clients hold; an empty text without such rows.

    Rows at one position of the pool are one row, which some settings let several clients be tested on.

    Args:
        keys: the key of each row of the pool.
        division: who holds which rows.
        count: number of clients.
    """
    rows, owners = held_in(division, get_args(Split), count)
    # samples that several clients share by a setting are held at one position, and no duplicates
    holders = np.full(len(keys), -1)
    # the first holder of several comes last
    holders[rows[::-1]] = owners[::-1]
    rows = np.flatnonzero(holders >= 0)
    ordered = np.sort(keys[rows])
    # nearly always, and a sort without positions is much faster
    if not (ordered[1:] == ordered[:-1]).any():
        return ""
    order = np.argsort(keys[rows], kind="stable")
    own, of_key = holders[rows][order], keys[rows][order]
    same = of_key[1:] == of_key[:-1]
    between = same & (own[1:] != own[:-1])
    if not between.any():
        return ""
    place = int(between.argmax())
    one, other = sorted((int(own[place]), int(own[place + 1])))
    groups = np.concatenate([[0], np.cumsum(~same)])
    shared = int(np.isin(groups, groups[1:][between]).sum())
    return (
        f"{shared} of {len(rows)} rows of clients are also at another client, such as clients "
        f"{client_label(one, division.names)} and {client_label(other, division.names)}; one may train on rows that "
        "another is tested on."
    )


def may_coincide(contents: Tree, count: int) -> bool:
    """Return whether equal rows are to be expected by chance, as where rows are a few answers of yes or no.

    Columns count as independent: the number of possible rows is the product of the columns' numbers of values, and
    unlimited where a column has mostly numbers with more than three decimals.

    Args:
        contents: a tree of tensors.
        count: number of rows.
    """
    # evenly over all rows, as neighbours in a file are often alike
    looked_at = torch.from_numpy(np.unique(np.linspace(0, count - 1, min(FEW, count)).astype(np.int64)))
    possible = 1
    for leaf in leaves_of(contents):
        for column in leaf[looked_at].reshape(len(looked_at), -1).T:
            if column.is_floating_point():
                thousandths = 1000 * column.double()
                if 2 * ((thousandths - thousandths.round()).abs() > 1e-3).sum() > len(column):
                    return False
            possible *= len(column.unique())
            if possible >= RARE * count:
                return False
    return True
