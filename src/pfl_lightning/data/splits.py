"""Seeded choices of samples from the pool, and ways to split one client's samples into train, val and test."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import ClientSplit, number_of_folds
from pfl_lightning.data.samples import Split

MASK, STEP = 2**128 - 1, 0x2360ED051FC65DA44385DF649FCCF645
"""PCG64 computes modulo 2 ** 128, and multiplies by this number in each step."""


def stratified_rows(labels: Tensor, size: int, num_classes: int, seed: int, draw: int = 0) -> Tensor:
    """Choose samples of a pool and keep the class proportions.

    Class k gets floor(size * n_k / N) samples; the rest goes, one each, to the largest fractional parts.

    Args:
        labels: labels of the pool, shape [N], in [0, num_classes).
        size: number of samples to choose; N or more chooses all.
        num_classes: number of classes K.
        seed: seed of the choice, 0 or more.
        draw: number of the choice; different numbers make independent choices from one seed.

    Returns:
        The chosen positions, ascending, shape [min(size, N)], int64.
    """
    if size >= len(labels):
        return torch.arange(len(labels))
    y = labels.numpy()
    take = in_proportion(np.bincount(y, minlength=num_classes), size)
    # Streams here are (seed, 0) and (seed, 0, draw); below, (seed, 1 + client) and (seed, 1 + client, 1). No two draws
    # share one, so that changing one setting leaves the other draws as they are.
    rng = np.random.default_rng((seed, 0, draw) if draw else (seed, 0))
    chosen = [rng.permutation(np.flatnonzero(y == k))[: take[k]] for k in range(num_classes)]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))


def in_proportion(counts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Share a number out in proportion to counts; the largest fractional parts get the remainder of rounding down.

    Args:
        counts: number of samples of each class, shape [K], not all 0.
        size: the number to share out.
    """
    quota = counts * (size / counts.sum())
    take: NDArray[np.int64] = np.floor(quota).astype(np.int64)
    # stable: of equal fractional parts the lower class goes first, on every platform
    take[np.argsort(take - quota, kind="stable")[: size - take.sum()]] += 1
    return take


def hold_out(
    labels: Tensor, is_test: Tensor, central_test: float | str, server_fraction: float, num_classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Choose the central test set, and the server's samples from the same set.

    Args:
        labels: labels of the pool, shape [N], in [0, num_classes).
        is_test: whether each sample belongs to the original test half, bool [N].
        central_test: ``original`` for the test half, or a share of the pool in (0, 1), class proportions kept.
        server_fraction: share of these samples, in [0, 1), that the server holds, class proportions kept.
        num_classes: number of classes K.
        seed: seed of the choices, 0 or more.

    Returns:
        Positions of the central test set and of the server's samples, ascending.

    Raises:
        MisconfigurationException: if a share above 0 is less than one sample, or leaves none.
    """
    if central_test == "original":
        central = is_test.nonzero().flatten()
    else:
        size = _size("central_test", float(central_test), len(labels))
        central = stratified_rows(labels, size, num_classes, seed, draw=1)
    size = _size("server_fraction", server_fraction, len(central)) if server_fraction else 0
    server = stratified_rows(labels[central], size, num_classes, seed, draw=2)
    is_server = torch.zeros(len(central), dtype=torch.bool).index_fill(0, server, True)
    return central[~is_server], central[is_server]


def _size(setting: str, share: float, whole: int) -> int:
    size = round(share * whole)
    if 0 < size < whole:
        return size
    raise MisconfigurationException(
        f"data.{setting}={share} of {whole} samples is {size}, which leaves none on one side; take another share, or "
        "more samples"
    )


def split_clients(
    shares: Sequence[Tensor], test_fraction: float, val_fraction: float, seed: int
) -> list[dict[Split, Tensor]]:
    """Shuffle the samples of each client and cut them into train, val and test.

    n_test = ceil(test_fraction * n) as in scikit-learn's ``train_test_split`` (PFLlib uses 0.25), then n_val =
    round(val_fraction * (n - n_test)), at least 1. The split is not stratified, as in PFLlib: a test split may hold
    classes that the train split lacks. Train gets at least one sample, and so does each split whose fraction is not 0.

    Args:
        shares: pool positions of each client's samples, shape [n], by client id; at least one for train and one for
            each split whose fraction is not 0. Clients are shuffled independently of each other.
        test_fraction: share of test in all samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
        seed: seed of the shuffle, 0 or more.
    """
    counts = [rows.shape[0] for rows in shares]
    order = np.empty(sum(counts), dtype=np.int64)
    sizes: list[int] = []
    # most clients have one of few sizes
    sizes_of = {count: part_sizes(count, test_fraction, val_fraction) for count in set(counts)}
    start = 0
    for count, generator in zip(counts, generators(seed, 1, len(counts)), strict=True):
        order[start : start + count] = generator.permutation(count)
        start += count
        num_test, num_val = sizes_of[count]
        sizes += (num_test, num_val, count - num_test - num_val)
    ends = np.cumsum(counts)
    order += np.repeat(ends - counts, counts)
    # one look-up for all clients: with 100,000 of them, a look-up each takes longer than the shuffles
    parts = torch.split(torch.cat([*shares])[torch.from_numpy(order)], sizes)
    return [
        {"test": test, "val": val, "train": train}
        for test, val, train in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def split_client(
    rows: Tensor, client: int, test_fraction: float, val_fraction: float, seed: int
) -> dict[Split, Tensor]:
    """Shuffle the samples of one client and cut them into train, val and test, as `split_clients` does.

    Args:
        rows: pool positions of the client's samples, shape [n].
        client: client id.
        test_fraction: see `split_clients`.
        val_fraction: see `split_clients`.
        seed: see `split_clients`.
    """
    num_test, num_val = part_sizes(len(rows), test_fraction, val_fraction)
    mixed = shuffled(rows, client, seed)
    return {
        "test": mixed[:num_test],
        "val": mixed[num_test : num_test + num_val],
        "train": mixed[num_test + num_val :],
    }


def part_sizes(count: int, test_fraction: float, val_fraction: float) -> tuple[int, int]:
    """Return the numbers of a client's test and val samples, see `split_clients`.

    >>> part_sizes(20, 0.25, 0.1), part_sizes(3, 0.25, 0.1)
    ((5, 2), (1, 1))

    Args:
        count: number of the client's samples.
        test_fraction: share of test in all samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
    """
    wants_val = val_fraction > 0
    # the bounds leave one sample for train, and one for val if val is asked for
    num_test = min(math.ceil(test_fraction * count), count - 1 - wants_val)
    rest = count - num_test
    return num_test, min(max(round(val_fraction * rest), 1), rest - 1) if wants_val else 0


def shuffled(rows: Tensor, client: int, seed: int) -> Tensor:
    """Return the samples of one client in the order in which they are split.

    Args:
        rows: pool positions, shape [n].
        client: client id.
        seed: seed of the shuffle, 0 or more.
    """
    return rows[torch.from_numpy(np.random.default_rng((seed, 1 + client)).permutation(len(rows)))]


def generators(seed: int, first: int, count: int) -> Iterator[np.random.Generator]:
    """Yield ``np.random.default_rng((seed, k))`` for ``count`` numbers k from ``first`` up, with the same bits.

    To make a generator takes NumPy some 50 microseconds, nearly all of a small client's set-up. Here the states of all
    are computed as columns, and one generator passes through them: each is valid until the next.
    Source: NumPy's ``SeedSequence`` and ``PCG64``, whose streams NEP 19 fixes for all versions; O'Neill, 2014, for the
    step of the generator.

    Args:
        seed: 0 or more.
        first: the first k, 0 or more.
        count: number of generators.
    """
    if first + count > 2**32:
        yield from (np.random.default_rng((seed, first + index)) for index in range(count))
        return
    seed = int(seed)  # NumPy's integers have no bit length in older versions
    words = [np.uint32(seed >> shift & 0xFFFFFFFF) for shift in range(0, max(seed.bit_length(), 1), 32)]
    entropy = [np.full(count, word) for word in words] + [np.arange(first, first + count).astype(np.uint32)]
    entropy += [np.zeros(count, dtype=np.uint32)] * (4 - len(entropy))
    factor = 0x43B0D7E5

    def hashed(values: NDArray[np.uint32], multiplier: int) -> NDArray[np.uint32]:
        nonlocal factor
        values = values ^ np.uint32(factor)
        factor = factor * multiplier & 0xFFFFFFFF
        values = values * np.uint32(factor)
        return values ^ (values >> np.uint32(16))

    def mixed(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> NDArray[np.uint32]:
        result: NDArray[np.uint32] = one * np.uint32(0xCA01F9DD) - other * np.uint32(0x4973F715)
        result ^= result >> np.uint32(16)
        return result

    pool = [hashed(values, 0x931E8875) for values in entropy[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source], 0x931E8875))
    for further in entropy[4:]:
        pool = [mixed(values, hashed(further, 0x931E8875)) for values in pool]
    factor = 0x8B51F9DD
    state = [hashed(pool[index % 4], 0x58F38DED).astype(np.uint64) for index in range(8)]
    high_state, low_state, high_stream, low_stream = (
        (state[index] | state[index + 1] << np.uint64(32)).tolist() for index in range(0, 8, 2)
    )
    bits = np.random.PCG64(0)
    generator, known = np.random.Generator(bits), bits.state
    for index in range(count):
        increment = ((high_stream[index] << 64 | low_stream[index]) << 1 | 1) & MASK
        start = (increment + (high_state[index] << 64 | low_state[index])) * STEP + increment & MASK
        known["state"] = {"state": start, "inc": increment}
        bits.state = known
        yield generator


def draw_alike(labels: Tensor, classes: list[Tensor], size: int, client: int, seed: int) -> Tensor:
    """Draw samples with the class mix of one client.

    Class k gets floor(size * n_k / n) samples; the rest goes, one each, to the largest fractional parts. No sample is
    drawn twice before all samples of its class are drawn once.

    Args:
        labels: labels of the client's samples, shape [n].
        classes: for each class, the positions to draw from.
        size: number of samples to draw.
        client: client id; clients draw independently of each other, so two clients may draw the same sample.
        seed: seed of the draw, 0 or more.

    Returns:
        The drawn positions, shape [size], int64.

    Raises:
        MisconfigurationException: if a class of the mix has no sample to draw.
    """
    take = in_proportion(np.bincount(labels.numpy(), minlength=len(classes)), size)
    for k in np.flatnonzero(take):
        if not len(classes[k]):
            raise MisconfigurationException(
                f"data.client_test=original: the original test half has no sample of class {k}, on which client "
                f"{client} is to be tested; use a larger data.max_samples, or own"
            )
    rng = np.random.default_rng((seed, 1 + client, 1))
    # np.resize begins again at the first sample if a class runs out
    drawn = [np.resize(rng.permutation(classes[k]), take[k]) for k in np.flatnonzero(take)]
    return torch.from_numpy(np.concatenate(drawn))


Parts: TypeAlias = dict[Split, Tensor]
Cut: TypeAlias = Callable[[Sequence[Tensor]], list[Parts]]
"""Splits the pool positions of each client, given the positions by client id."""


def cut_of(
    kind: ClientSplit,
    strata: Tensor | None,
    given: NDArray[Any] | None,
    times: Tensor | None,
    groups: Tensor | None,
    test_fraction: float,
    val_fraction: float,
    val_fold: int | None,
    seed: int,
) -> Cut:
    """Return the function that splits all clients' samples.

    Args:
        kind: the way to split, see `FederatedDataModule`.
        strata: group of each sample of the pool, shape [N], for ``stratified``.
        given: split of each sample of the pool, for ``given``.
        times: a number for each sample's time, shape [N], for ``time``.
        groups: number of each sample's group, shape [N], whose samples stay together under ``random`` and ``given``;
            None for none.
        test_fraction: share of test in a client's samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
        val_fold: number of the fold that validates; None for the first ``val_fraction`` of a client's samples.
        seed: seed of the draws, 0 or more.

    Raises:
        MisconfigurationException: if the data set lacks the column that ``kind`` needs, or has no folds.
    """
    lacking = {
        "stratified": (strata, "samples have no class, nor another group by the data module's strata", "random"),
        "time": (times, "load() gives no times of the samples", "random, or return Loaded(x, y, time=...)"),
        "given": (given, "load() gives no splits of the samples", "random, or return Loaded(x, y, split=...)"),
    }
    # refused before the first client is split, with the remedy for each kind
    if kind in lacking and lacking[kind][0] is None:
        raise MisconfigurationException(f"data.client_split={kind}: {lacking[kind][1]}; take {lacking[kind][2]}")
    if val_fold is not None:
        names_val = kind == "given" and bool((cast(NDArray[Any], given).astype(str) == "val").any())
        if kind == "time" or names_val:
            why = "load() names the val samples" if names_val else "data.client_split=time validates on later samples"
            raise MisconfigurationException(f"data.val_fold={val_fold}: {why}, which have no folds; leave it out")
        whole = cut_of(kind, strata, given, times, groups, test_fraction, val_fraction, None, seed)
        folds, mix = number_of_folds(val_fraction), strata if kind == "stratified" else None
        return lambda shares: fold_of(whole(shares), val_fold, folds, mix, groups)
    if kind == "stratified":
        mix = cast(Tensor, strata)
        return lambda shares: [
            stratified_split(rows, client, mix, test_fraction, val_fraction, seed) for client, rows in enumerate(shares)
        ]
    if kind == "time":
        return lambda shares: [time_split(rows, cast(Tensor, times), test_fraction, val_fraction) for rows in shares]
    if kind == "given":
        named = cast(NDArray[Any], given).astype(str)
        # a data set that names val samples anywhere means them: no client gets drawn ones beside
        share = 0.0 if bool((named == "val").any()) else val_fraction
        return lambda shares: [
            given_split(rows, client, named, share, seed, groups) for client, rows in enumerate(shares)
        ]
    if groups is not None:
        return lambda shares: [
            grouped_split(rows, client, groups, test_fraction, val_fraction, seed) for client, rows in enumerate(shares)
        ]
    return lambda shares: split_clients(shares, test_fraction, val_fraction, seed)


def fold_of(
    clients: Sequence[Parts], fold: int, folds: int, strata: Tensor | None = None, groups: Tensor | None = None
) -> list[Parts]:
    """Validate on another fold of each client's samples outside test, so that each of them validates in one fold.

    Samples go to the folds in turn, at each client from another fold on: of clients with less samples than folds, each
    validates in some of the folds, and in no fold all of them lack samples. A client's only sample always trains.

    Args:
        clients: pool positions of each client, by split.
        fold: number of the fold, in [0, folds).
        folds: number of folds, at least 2.
        strata: group of each sample of the pool, shape [N], whose mix each fold keeps; None keeps none.
        groups: number of each sample's group, shape [N], whose samples go to one fold; None for samples by themselves.

    Raises:
        MisconfigurationException: if no client has a sample in the fold.
    """
    cuts: list[Parts] = []
    for client, parts in enumerate(clients):
        # val first: with it, the order in which the client's samples were shuffled
        rows = torch.cat([parts["val"], parts["train"]])
        if strata is not None:
            rows = rows[strata[rows].argsort(stable=True)]
        places = torch.arange(len(rows)) if groups is None else in_order(groups[rows])
        is_val = (places + client) % folds == fold
        if len(places) and bool((places == places[0]).all()):
            is_val[:] = False
        cuts.append({**parts, "val": rows[is_val], "train": rows[~is_val]})
    if not any(len(parts["val"]) for parts in cuts):
        raise MisconfigurationException(
            f"data.val_fold={fold}: none of the {len(cuts)} clients has a sample in this one of {folds} folds; take a "
            "larger data.val_fraction"
        )
    return cuts


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


def grouped_split(
    rows: Tensor, client: int, groups: Tensor, test_fraction: float, val_fraction: float, seed: int
) -> Parts:
    """Split at random, and keep the samples of each group in one split.

    Groups are taken in random order if they bring a split nearer to the size of `split_clients`; a split whose fraction
    is not 0 gets the smallest group if none does.

    Args:
        rows: pool positions of the client's samples.
        client: client id.
        groups: number of each sample's group, shape [N].
        test_fraction: share of test in all samples, in [0, 1).
        val_fraction: share of val in the samples outside test, in [0, 1).
        seed: seed of the shuffle, 0 or more.

    Raises:
        MisconfigurationException: if the client has less groups than splits.
    """
    mixed = shuffled(rows, client, seed)
    places = in_order(groups[mixed])
    sizes = places.bincount()
    wanted: dict[Split, int] = dict(
        zip(("test", "val"), part_sizes(len(rows), test_fraction, val_fraction), strict=True)
    )
    wanted = {split: size for split, size in wanted.items() if size > 0}
    if len(sizes) <= len(wanted):
        raise MisconfigurationException(
            f"data.group: client {client} has samples of {len(sizes)} groups, too few for train, "
            f"{' and '.join(wanted)}; leave the client out, or set test_fraction or val_fraction to 0"
        )
    left = list(range(len(sizes)))
    parts: Parts = {}
    for number, (split, size) in enumerate(wanted.items()):
        taken: list[int] = []
        held = 0
        for group in list(left):
            # each later split, and train, needs a group
            if len(left) <= len(wanted) - number:
                break
            if held + int(sizes[group]) / 2 <= size:
                taken.append(group)
                left.remove(group)
                held += int(sizes[group])
        if not taken:
            taken = [min(left, key=lambda group: int(sizes[group]))]
            left.remove(taken[0])
        parts[split] = mixed[torch.isin(places, torch.tensor(taken))]
    nothing = rows[:0]
    return {
        "test": parts.get("test", nothing),
        "val": parts.get("val", nothing),
        "train": mixed[torch.isin(places, torch.tensor(left))],
    }


def in_order(groups: Tensor) -> Tensor:
    """Return the number of each sample's group, counted from 0 in the order of first samples.

    >>> in_order(torch.tensor([7, 3, 7, 9]))
    tensor([0, 1, 0, 2])

    Args:
        groups: group of each sample, shape [n].
    """
    _, first, places = np.unique(groups.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[places])


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


def given_split(
    rows: Tensor, client: int, named: NDArray[Any], val_fraction: float, seed: int, groups: Tensor | None = None
) -> Parts:
    """Split as the data set says; draw val from train if ``val_fraction`` isn't 0.

    Args:
        rows: pool positions of the client's samples.
        client: client id.
        named: split of each sample of the pool, shape [N].
        val_fraction: share of val in the training samples, in [0, 1).
        seed: seed of the draw, 0 or more.
        groups: number of each sample's group, shape [N]; None for none.

    Raises:
        MisconfigurationException: if the data set names several splits for a group's samples.
    """
    of_rows = named[rows.numpy()]
    parts: Parts = {split: rows[torch.from_numpy(of_rows == split)] for split in get_args(Split)}
    if groups is not None:
        for one, other in combinations(parts, 2):
            if spread := np.intersect1d(groups[parts[one]], groups[parts[other]]).size:
                raise MisconfigurationException(
                    f"data.group: {spread} groups of client {client} have both {one} and {other} samples by the data's "
                    "own splits; correct these, or take client_split=random"
                )
        if val_fraction > 0 and len(parts["train"]):
            parts |= {**grouped_split(parts["train"], client, groups, 0.0, val_fraction, seed), "test": parts["test"]}
        return parts
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
