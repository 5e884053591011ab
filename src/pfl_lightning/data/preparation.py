"""Preparation of a pool: check the loaded samples, choose the subset, divide and split; a server's samples."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal, Protocol

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from torch import Tensor

from pfl_lightning.data.checks import (
    ClientSplit,
    ClientTest,
    check_enough,
    check_halves,
    check_pool,
    check_strata,
    rows_of_test_half,
    warn_of_one_class,
)
from pfl_lightning.data.client_names import check_kinds, client_id, owners_of
from pfl_lightning.data.columns import check_splits, check_times, column_of, numbered
from pfl_lightning.data.division import Division, Pool, divide
from pfl_lightning.data.identity import keys_of, may_coincide, warn_of_shared_rows, warn_of_spread_groups
from pfl_lightning.data.partitioners import Partitioner
from pfl_lightning.data.samples import Loaded, Samples
from pfl_lightning.data.splits import cut_of, stratified_rows
from pfl_lightning.data.trees import Tree, mapped, narrowed, read, take, with_leaves
from pfl_lightning.internals.garbage import uncollected
from pfl_lightning.tasks import Task


class Asked(Protocol):
    """The settings of a `FederatedDataModule` that decide the division of a pool."""

    num_clients: int
    partitioner: Partitioner
    client_split: ClientSplit | None
    test_fraction: float
    val_fraction: float
    val_fold: int | None
    max_samples: int | None
    client_test: ClientTest
    central_test: float | Literal["original"] | None
    server_fraction: float
    seed: int
    new_clients: int | float | list[str]
    original_test: Tensor

    @property
    def task(self) -> Task:
        """The prediction task."""

    def strata(self, y: Tree) -> Tensor | None:
        """Return the group of each sample."""

    def row_contents(self, loaded: Loaded) -> Tree:
        """Return what tells rows apart."""


def as_loaded(loaded: Loaded | tuple[Tree, Tree]) -> Loaded:
    """Return the result of ``load()`` as `Loaded`, with targets and all in-memory inputs as tensors.

    Args:
        loaded: the result of ``load()``.

    Raises:
        MisconfigurationException: if the result is neither a pair nor a `Loaded`.
    """
    if not isinstance(loaded, Loaded):
        if not isinstance(loaded, (tuple, list)) or len(loaded) != 2:
            raise MisconfigurationException(
                f"load() returned a {type(loaded).__name__}; return inputs and targets, or Loaded(x, y, client=...)"
            )
        loaded = Loaded(*loaded)
    x = with_leaves(loaded.x, "x of load()")
    # targets are read at once, even from files: strata, class counts and splits need all of them
    y = mapped(with_leaves(loaded.y, "y of load()"), lambda leaf: read(leaf, slice(None)))
    return Loaded(x, y, loaded.client, loaded.split, loaded.time, loaded.group)


@uncollected()
def prepared(data: Asked, loaded: Loaded) -> Pool:
    """Check a pool, cut it to ``max_samples``, and divide and split the remaining samples.

    Args:
        data: the settings.
        loaded: the samples, as loaded.

    Raises:
        MisconfigurationException: if the samples are wrong, or cannot be divided as asked.
    """
    name, task, count = type(data).__name__, data.task, len(loaded)
    check_pool(loaded, task, name)
    check_kinds(loaded.client)
    owners = _column("client", loaded.client, count, needed=getattr(data.partitioner, "by_owner", False))
    given = _column("split", loaded.split, count, needed=data.client_split in (None, "given"))
    times = _column("time", loaded.time, count, needed=data.client_split == "time")
    grouped = _column("group", loaded.group, count, needed=True)
    if given is not None:
        check_splits(given)
    if times is not None:
        check_times(times)
    raw_strata = data.strata(loaded.y)
    strata, groups = check_strata(raw_strata, count, task, data.partitioner)
    samples = Samples(loaded.x, loaded.y)
    owned = None if owners is None else owners_of(owners)
    # before `preprocess`, whose fitted values may differ where the rows are the same
    contents = data.row_contents(loaded)
    keys = keys_of(contents, loaded.y, None if owned is None else owned[1])
    is_test = rows_of_test_half(data.original_test, count, name)
    if data.max_samples is not None:
        check_enough(data.max_samples, groups)
        # before the division, so that a subset is a smaller data set with the same rules for all that follows
        kept = stratified_rows(strata, data.max_samples, groups, data.seed)
        samples = Samples(narrowed(samples.x, kept), take(samples.y, kept))
        # all columns follow the subset; a column left behind would pair samples with other samples' clients
        strata, is_test, keys = strata[kept], is_test[kept], keys.take(kept)
        owners, given, times, grouped = (
            None if column is None else column[kept.numpy()] for column in (owners, given, times, grouped)
        )
        # anew, as an owner may have none of the rows that are left
        owned = None if owners is None else owners_of(owners)
    if task.has_classes:
        warn_of_one_class(name, samples.y)
    check_halves(name, bool(is_test.any()), data.client_test, data.central_test)
    if getattr(data.partitioner, "by_owner", False) and owners is None:
        raise MisconfigurationException(
            f"data.partitioner={type(data.partitioner).__name__}: {name} names no client for its samples; return "
            "Loaded(x, y, client=...) from load(), or take IID"
        )
    kind = data.client_split or ("random" if given is None else "given")
    if kind == "given" and data.client_test == "original":
        raise MisconfigurationException(
            "data.client_test=original: data.client_split=given names the test samples already; take own"
        )
    groups_of_rows = None if grouped is None else numbered(grouped)[1]
    if groups_of_rows is not None:
        check_groups(data, kind)
    # under client_test=original, clients cut no test samples off their own; `divide` draws them from the test half
    test_fraction = data.test_fraction if data.client_test == "own" else 0.0
    division = divide(
        strata,
        is_test,
        data.partitioner,
        cut=cut_of(
            kind,
            None if raw_strata is None else strata,
            given,
            None if times is None else numbered(times)[1],
            groups_of_rows,
            test_fraction,
            data.val_fraction,
            data.val_fold,
            data.seed,
        ),
        owners=owned,
        # the partitioner divides among members and new clients alike, so that new ones are no different clients
        num_clients=data.num_clients + how_many(data.new_clients, data.num_clients) if data.num_clients else None,
        num_classes=groups,
        is_given=kind == "given",
        test_fraction=data.test_fraction,
        val_fraction=data.val_fraction,
        client_test=data.client_test,
        central_test=data.central_test,
        server_fraction=data.server_fraction,
        seed=data.seed,
    )
    if kind == "given" and given is not None:
        division = replace(division, named=frozenset(np.unique(given).tolist()))
    newcomers = how_many(data.new_clients, data.num_clients or None, len(division.clients))
    given_names = data.new_clients if isinstance(data.new_clients, Sequence) else None
    named = None if given_names is None else positions_of(given_names, division.names, name)
    division = newcomers_last(division, newcomers, data.seed, named)
    if groups_of_rows is not None:
        warn_of_spread_groups(groups_of_rows, division, name)
    if keys.contents is not None:
        warn_of_shared_rows(keys.contents, division, lambda: may_coincide(contents, count), name)
    return Pool(samples, division, strata, keys)


def check_groups(data: Asked, kind: ClientSplit) -> None:
    """Refuse settings that would tell the samples of a group apart.

    Args:
        data: the settings.
        kind: the way to split a client's samples.

    Raises:
        MisconfigurationException: with the setting.
    """
    wrong = {
        f"client_split={kind}, which takes samples singly; take random or given": kind in ("stratified", "time"),
        f"partitioner={type(data.partitioner).__name__}, which deals samples out singly; take Natural": not getattr(
            data.partitioner, "by_owner", False
        ),
        "client_test=original, which tests on samples of all clients; take own": data.client_test == "original",
        f"central_test={data.central_test}, which takes samples singly; leave it out": data.central_test is not None,
    }
    if reasons := [reason for reason, holds in wrong.items() if holds]:
        raise MisconfigurationException(
            f"data.group keeps a group's samples on one side of the splits, beside data.{reasons[0]}"
        )


def _column(name: str, values: Any, count: int, needed: bool) -> NDArray[Any] | None:
    """Return a column as an array if the settings need the column; of other columns, check only the length."""
    if values is None:
        return None
    # an unused column may have missing values, which mustn't stop a run
    if needed or not hasattr(values, "__len__"):
        return column_of(name, values, count)
    if len(values) != count:
        column_of(name, np.zeros(len(values)), count)
    return None


def how_many(new_clients: float | Sequence[str], num_clients: int | None, total: int = 0) -> int:
    """Return the number of new clients.

    >>> how_many(3, 9), how_many(0.25, 9), how_many(0.01, 9), how_many(0, 9), how_many(0.25, None, total=12)
    (3, 3, 1, 0, 3)

    Args:
        new_clients: number of new clients, or their share of all clients in (0, 1), which means at least one client,
            or their names.
        num_clients: number of the federation's clients M; None if all existing clients take part or are new.
        total: number of all clients, if M is None.

    Raises:
        MisconfigurationException: if no client is left for the federation.
    """
    if isinstance(new_clients, Sequence):
        count = len(new_clients)
    elif isinstance(new_clients, Integral):
        count = int(new_clients)
    elif num_clients is None:
        count = max(1, round(total * new_clients))
    else:
        # the share is of all clients together: M are (1 - share) of them
        count = max(1, round(num_clients * new_clients / (1 - new_clients)))
    if num_clients is None and count >= max(total, 1):
        raise MisconfigurationException(
            f"data.new_clients={new_clients} leaves none of {total} clients for the federation; take fewer"
        )
    return count


def positions_of(new_clients: Sequence[str], names: list[str], owner: str) -> list[int]:
    """Return the positions of new clients that are given by name.

    Args:
        new_clients: names of the new clients.
        names: names of all clients; empty if clients have no names.
        owner: the data module's class, for the message.

    Raises:
        MisconfigurationException: if there is no such client.
    """
    if not names:
        raise MisconfigurationException(
            f"data.new_clients={new_clients} names clients, and the clients of {owner} have no names; give a number of "
            "clients or a share such as 0.2"
        )
    return [client_id(str(name), names, len(names), "data.new_clients") for name in new_clients]


def newcomers_last(division: Division, count: int, seed: int, named: Sequence[int] | None = None) -> Division:
    """Put the new clients of a division last, drawn or named; the order of the remaining clients stays.

    Args:
        division: the division among the federation's and the new clients.
        count: number of new clients; 0 changes nothing.
        seed: seed of the draw, 0 or more.
        named: positions of the new clients; None draws them.
    """
    if not count:
        return division
    total = len(division.clients)
    # a stream of its own: splits draw from (seed, 1 + client, ...) and (seed, 0, small number)
    drawn = np.random.default_rng((seed, 0, 0, 1)).permutation(total)[:count].tolist() if named is None else named
    order = [*sorted(set(range(total)) - set(drawn)), *sorted(drawn)]
    clients = [division.clients[part] for part in order]
    names = [division.names[part] for part in order] if division.names else []
    return replace(division, clients=clients, names=names, newcomers=count)


class PublicData(Protocol):
    """The data set of public samples: a `FederatedDataModule` of which only the pool is used."""

    input_shape: tuple[int, ...]
    original_test: Tensor

    @property
    def task(self) -> Task:
        """The prediction task."""

    @property
    def needs_all_clients(self) -> str:
        """Return why the data set's rows alone would make other inputs than the clients', and the remedy.

        The text is empty where they would make the same.
        """

    def prepare_data(self) -> None:
        """Fetch missing files."""

    def load(self) -> Loaded | tuple[Tree, Tree]:
        """Read the whole pool."""

    def strata(self, y: Tree) -> Tensor | None:
        """Return the group of each sample."""

    def preprocess(self, samples: Samples, division: Division) -> Samples:
        """Fit preprocessing on training rows, and apply the result to all rows."""


def public_samples(public: PublicData, count: int, seed: int, owner: str, input_shape: tuple[int, ...]) -> Samples:
    """Load another data set and choose the server's samples, before the data set's ``transform``.

    Args:
        public: the data set.
        count: number of samples, chosen outside the original test half, class proportions kept.
        seed: seed of the choice, 0 or more.
        owner: name of the data module whose clients hold other samples.
        input_shape: shape of the clients' inputs.

    Raises:
        MisconfigurationException: if the data set has inputs of another shape, or too few samples.
    """
    name = type(public).__name__
    if tuple(public.input_shape) != tuple(input_shape):
        raise MisconfigurationException(
            f"data.public={name} has inputs of shape {tuple(public.input_shape)} and {owner} of {tuple(input_shape)}; "
            "take a data set whose inputs have the same shape"
        )
    try:
        public.prepare_data()
        loaded = as_loaded(public.load())
    except MisconfigurationException as error:
        # a data set names its own settings in errors; the user must change the public data set's, not the clients'
        raise MisconfigurationException(str(error).replace("data.root", "data.public.root")) from error
    # before the choice, so that wrong numbers outside the chosen samples are refused too, whatever the seed
    check_pool(loaded, public.task, name)
    rows = (~rows_of_test_half(public.original_test, len(loaded), name)).nonzero().flatten()
    # the default of 3000 is more than small data sets have; a silent cut would change the method's cost
    if count > len(rows):
        raise MisconfigurationException(
            f"data.public_samples={count} must be at most the {len(rows)} samples that {name} has outside its original "
            "test half"
        )
    strata, groups = check_strata(public.strata(loaded.y), len(loaded), public.task)
    rows = rows[stratified_rows(strata[rows], count, groups, seed, draw=3)]
    samples = Samples(loaded.x, loaded.y).take(rows)
    # the server learns from all of them, as a client does from its training rows
    none = torch.empty(0, dtype=torch.int64)
    return public.preprocess(samples, Division([{"train": torch.arange(count)}], none, none, []))
