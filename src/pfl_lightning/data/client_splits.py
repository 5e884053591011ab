"""Ways to make train, val and test of one client's samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import ClientSplit
from pfl_lightning.data.samples import Split
from pfl_lightning.data.splits import in_proportion, part_sizes, shuffled, split_client

Parts: TypeAlias = dict[Split, Tensor]
Cut: TypeAlias = Callable[[Tensor, int], Parts]
"""Splits the pool positions of a client, given its id."""


def cut_of(
    kind: ClientSplit,
    strata: Tensor | None,
    given: NDArray[Any] | None,
    times: Tensor | None,
    test_fraction: float,
    val_fraction: float,
    seed: int,
) -> Cut:
    """What splits each client's samples.

    Args:
        kind: How.
        strata: Group of each sample of the pool, shape [N], for ``stratified``.
        given: Split of each sample of the pool, for ``given``.
        times: A number of each sample's time, shape [N], for ``time``.
        test_fraction: Share of test in a client's samples, in [0, 1).
        val_fraction: Share of val in what test leaves, in [0, 1).
        seed: Seed of what is drawn, 0 or more.

    Raises:
        MisconfigurationException: The data set doesn't say what is asked for.
    """
    lacking = {
        "stratified": (strata, "samples have no class, nor another group by the data module's strata", "random"),
        "time": (times, "load() gives no times of the samples", "random, or return Loaded(x, y, time=...)"),
        "given": (given, "load() gives no splits of the samples", "random, or return Loaded(x, y, split=...)"),
    }
    if kind in lacking and lacking[kind][0] is None:
        raise MisconfigurationException(f"data.client_split={kind}: {lacking[kind][1]}; take {lacking[kind][2]}")
    if kind == "stratified":
        return lambda rows, client: stratified_split(
            rows, client, cast(Tensor, strata), test_fraction, val_fraction, seed
        )
    if kind == "time":
        return lambda rows, client: time_split(rows, cast(Tensor, times), test_fraction, val_fraction)
    if kind == "given":
        named = cast(NDArray[Any], given).astype(str)
        share = 0.0 if bool((named == "val").any()) else val_fraction
        return lambda rows, client: given_split(rows, client, named, share, seed)
    return lambda rows, client: split_client(rows, client, test_fraction, val_fraction, seed)


def stratified_split(
    rows: Tensor, client: int, strata: Tensor, test_fraction: float, val_fraction: float, seed: int
) -> Parts:
    """Split at random, with the client's mix of groups in each split as far as numbers allow.

    Args:
        rows: Pool positions of the client's samples, as for `split_client`, whose sizes the splits have.
        client: Which client.
        strata: Group of each sample of the pool, shape [N], in [0, K).
        test_fraction: Share of test in all samples, in [0, 1).
        val_fraction: Share of val in what test leaves, in [0, 1).
        seed: Seed of the shuffle, 0 or more.
    """
    num_test, num_val = part_sizes(len(rows), test_fraction, val_fraction)
    test, rest = _drawn(shuffled(rows, client, seed), strata, num_test)
    val, train = _drawn(rest, strata, num_val)
    return {"test": test, "val": val, "train": train}


def _drawn(rows: Tensor, strata: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first of each group, in proportion, and the others."""
    groups = np.unique(strata[rows].numpy(), return_inverse=True)[1]
    take = in_proportion(np.bincount(groups), size)
    chosen = np.zeros(len(rows), dtype=bool)
    for group, number in enumerate(take):
        chosen[np.flatnonzero(groups == group)[:number]] = True
    return rows[torch.from_numpy(chosen)], rows[torch.from_numpy(~chosen)]


def time_split(rows: Tensor, times: Tensor, test_fraction: float, val_fraction: float) -> Parts:
    """Train on the oldest samples, validate on later ones, and test on the newest; of one time, by position.

    Args:
        rows: Pool positions of the client's samples, as for `split_client`, whose sizes the splits have.
        times: A number of each sample's time, shape [N].
        test_fraction: Share of test in all samples, in [0, 1).
        val_fraction: Share of val in what test leaves, in [0, 1).
    """
    num_test, num_val = part_sizes(len(rows), test_fraction, val_fraction)
    rows = rows.sort().values
    ordered = rows[times[rows].argsort(stable=True)]
    sizes = [len(rows) - num_val - num_test, num_val, num_test]
    return dict(zip(get_args(Split), torch.split(ordered, sizes), strict=True))


def given_split(rows: Tensor, client: int, named: NDArray[Any], val_fraction: float, seed: int) -> Parts:
    """Split as the data set says; val is drawn from train if ``val_fraction`` isn't 0.

    Args:
        rows: Pool positions of the client's samples.
        client: Which client.
        named: Split of each sample of the pool, shape [N].
        val_fraction: Share of val in the training samples, in [0, 1).
        seed: Seed of the draw, 0 or more.
    """
    of_rows = named[rows.numpy()]
    parts: Parts = {split: rows[torch.from_numpy(of_rows == split)] for split in get_args(Split)}
    if val_fraction > 0 and len(parts["train"]):
        parts |= {**split_client(parts["train"], client, 0.0, val_fraction, seed), "test": parts["test"]}
    return parts


def check_parts(clients: list[Parts], names: list[str], val_fraction: float) -> None:
    """Check that clients whose split the data set gives can be trained, and tested if others are.

    Args:
        clients: Pool positions of each client, by split.
        names: Names of the clients, or none.
        val_fraction: Share of val in the training samples, in [0, 1).

    Raises:
        MisconfigurationException: One has no sample in a split that others have, or none to train on.
    """
    for split in get_args(Split):
        sizes = [len(parts[split]) for parts in clients]
        lacking = [client for client, size in enumerate(sizes) if not size]
        if not lacking or not (split == "train" or any(sizes) or (split == "val" and val_fraction > 0)):
            continue
        first = lacking[0]
        who = f"client {first}" + (f" ({names[first]})" if names else "")
        raise MisconfigurationException(
            f"data.client_split=given leaves {len(lacking)} of {len(clients)} clients without {split} samples, first "
            f"{who}; give each some, leave these clients out, or take random"
        )
