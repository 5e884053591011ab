"""Ways to split one client's samples into train, val and test."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import ClientSplit
from pfl_lightning.data.samples import Split
from pfl_lightning.data.splits import in_proportion, part_sizes, shuffled, split_client, split_clients

Parts: TypeAlias = dict[Split, Tensor]
Cut: TypeAlias = Callable[[Sequence[Tensor]], list[Parts]]
"""Splits the pool positions of each client, given the positions by client id."""


def cut_of(
    kind: ClientSplit,
    strata: Tensor | None,
    given: NDArray[Any] | None,
    times: Tensor | None,
    test_fraction: float,
    val_fraction: float,
    seed: int,
) -> Cut:
    """Return the function that splits all clients' samples.

    Args:
        kind: the way to split, see `FederatedDataModule`.
        strata: group of each sample of the pool, shape [N], for ``stratified``.
        given: split of each sample of the pool, for ``given``.
        times: a number for each sample's time, shape [N], for ``time``.
        test_fraction: share of test in a client's samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
        seed: seed of the draws, 0 or more.

    Raises:
        MisconfigurationException: if the data set lacks the column that ``kind`` needs.
    """
    lacking = {
        "stratified": (strata, "samples have no class, nor another group by the data module's strata", "random"),
        "time": (times, "load() gives no times of the samples", "random, or return Loaded(x, y, time=...)"),
        "given": (given, "load() gives no splits of the samples", "random, or return Loaded(x, y, split=...)"),
    }
    # refused before the first client is split, with the remedy for each kind
    if kind in lacking and lacking[kind][0] is None:
        raise MisconfigurationException(f"data.client_split={kind}: {lacking[kind][1]}; take {lacking[kind][2]}")
    if kind == "stratified":
        groups = cast(Tensor, strata)
        return lambda shares: [
            stratified_split(rows, client, groups, test_fraction, val_fraction, seed)
            for client, rows in enumerate(shares)
        ]
    if kind == "time":
        return lambda shares: [time_split(rows, cast(Tensor, times), test_fraction, val_fraction) for rows in shares]
    if kind == "given":
        named = cast(NDArray[Any], given).astype(str)
        # a data set that names val samples anywhere means them: no client gets drawn ones beside
        share = 0.0 if bool((named == "val").any()) else val_fraction
        return lambda shares: [given_split(rows, client, named, share, seed) for client, rows in enumerate(shares)]
    return lambda shares: split_clients(shares, test_fraction, val_fraction, seed)


def stratified_split(
    rows: Tensor, client: int, strata: Tensor, test_fraction: float, val_fraction: float, seed: int
) -> Parts:
    """Split at random; each split has the client's mix of groups as far as numbers allow.

    Args:
        rows: pool positions of the client's samples; the splits have the sizes of `split_clients`.
        client: client id.
        strata: group of each sample of the pool, shape [N], in [0, K).
        test_fraction: share of test in all samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
        seed: seed of the shuffle, 0 or more.
    """
    num_test, num_val = part_sizes(len(rows), test_fraction, val_fraction)
    test, rest = _drawn(shuffled(rows, client, seed), strata, num_test)
    val, train = _drawn(rest, strata, num_val)
    return {"test": test, "val": val, "train": train}


def _drawn(rows: Tensor, strata: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the first samples of each group, in proportion to the groups, and the remaining samples."""
    # renumbered, so that groups absent from this client take no part in the rounding
    groups = np.unique(strata[rows].numpy(), return_inverse=True)[1]
    take = in_proportion(np.bincount(groups), size)
    chosen = np.zeros(len(rows), dtype=bool)
    for group, number in enumerate(take):
        chosen[np.flatnonzero(groups == group)[:number]] = True
    return rows[torch.from_numpy(chosen)], rows[torch.from_numpy(~chosen)]


def time_split(rows: Tensor, times: Tensor, test_fraction: float, val_fraction: float) -> Parts:
    """Train on the oldest samples, validate on later ones, and test on the newest.

    Samples of equal times are ordered by pool position.

    Args:
        rows: pool positions of the client's samples; the splits have the sizes of `split_clients`.
        times: a number for each sample's time, shape [N].
        test_fraction: share of test in all samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
    """
    num_test, num_val = part_sizes(len(rows), test_fraction, val_fraction)
    # partitioners shuffle: sorted first, equal times don't depend on the partitioner's draw
    rows = rows.sort().values
    ordered = rows[times[rows].argsort(stable=True)]
    sizes = [len(rows) - num_val - num_test, num_val, num_test]
    return dict(zip(get_args(Split), torch.split(ordered, sizes), strict=True))


def given_split(rows: Tensor, client: int, named: NDArray[Any], val_fraction: float, seed: int) -> Parts:
    """Split as the data set says; draw val from train if ``val_fraction`` isn't 0.

    Args:
        rows: pool positions of the client's samples.
        client: client id.
        named: split of each sample of the pool, shape [N].
        val_fraction: share of val in the training samples, in [0, 1).
        seed: seed of the draw, 0 or more.
    """
    of_rows = named[rows.numpy()]
    parts: Parts = {split: rows[torch.from_numpy(of_rows == split)] for split in get_args(Split)}
    if val_fraction > 0 and len(parts["train"]):
        parts |= {**split_client(parts["train"], client, 0.0, val_fraction, seed), "test": parts["test"]}
    return parts


def check_parts(clients: list[Parts], names: list[str], val_fraction: float) -> None:
    """Refuse clients without training samples; warn of clients without samples of a split that others have.

    Args:
        clients: pool positions of each client, by split.
        names: names of the clients, or an empty list.
        val_fraction: share of val in the training samples, in [0, 1).

    Raises:
        MisconfigurationException: if a client has no training samples, or no client has validation samples though
            ``val_fraction`` asks for some.
    """
    for split in get_args(Split):
        lacking = [client for client, parts in enumerate(clients) if not len(parts[split])]
        everyone = len(lacking) == len(clients)
        # a split that no client has is fine (no test at all), except for val if `val_fraction` asks for some
        if not lacking or (everyone and split != "train" and not (split == "val" and val_fraction > 0)):
            continue
        first = lacking[0]
        some = f"{len(lacking)} of {len(clients)} clients without {split} samples, first client {first}" + (
            f" ({names[first]})" if names else ""
        )
        if split == "train" or everyone:
            raise MisconfigurationException(
                f"data.client_split=given leaves {some}; give each some, leave these clients out, or take random"
            )
        # a small hospital may train without a test set of its own; its absence from figures must be seen
        rank_zero_warn(f"data.client_split=given leaves {some}; {split} figures are of the other clients")
