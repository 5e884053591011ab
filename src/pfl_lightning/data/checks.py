"""Refusals of settings, data and partitions that cannot work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from pfl_lightning.data.batches import LastBatch

ClientTest = Literal["own", "original"]
"""What clients are tested on: a part of their own samples, or samples of the original test half."""


def check_integers(owner: str, **settings: object) -> None:
    """Check that settings are integers.

    Args:
        owner: What stands before their names in the message.
        **settings: Their values.

    Raises:
        MisconfigurationException: One is something else.
    """
    _check_type(Integral, "an integer", owner, settings)


def check_numbers(owner: str, **settings: object) -> None:
    """Check that settings are numbers; see :func:`check_integers`."""
    _check_type(Real, "a number", owner, settings)


def _check_type(kind: type, words: str, owner: str, settings: dict[str, object]) -> None:
    for name, value in settings.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MisconfigurationException(f"{owner}{name}={value!r} must be {words}")


def check_settings(
    root: str,
    num_clients: int,
    partitioner: Callable[..., list[Tensor]],
    batch_size: int,
    last_batch: str,
    test_fraction: float,
    val_fraction: float,
    max_samples: int | None,
    client_test: str,
    central_test: float | str | None,
    server_fraction: float,
    public: str | None,
    public_samples: int,
    seed: int,
) -> None:
    """Check the settings of a data module that are wrong whatever the data.

    Args:
        root: Folder of the data.
        num_clients: Number of clients, at least 1.
        partitioner: Divides the pool.
        batch_size: Samples a batch, at least 1.
        last_batch: A value of ``LastBatch``.
        test_fraction: Share of test, in [0, 1).
        val_fraction: Share of val, in [0, 1).
        max_samples: Samples to use, at least one a client, or None.
        client_test: A value of ``ClientTest``.
        central_test: Share of the central test set, in (0, 1), or ``original``, or None.
        server_fraction: Share of it that the server holds, in [0, 1), 0 without one.
        public: Name of the data set of which the server holds samples, or None.
        public_samples: How many of them, at least 1.
        seed: Seed of the partition, 0 to 2**32 - 1.

    Raises:
        MisconfigurationException: A value is of a wrong type or out of range.
    """
    check_integers("data.", num_clients=num_clients, batch_size=batch_size, public_samples=public_samples, seed=seed)
    check_numbers("data.", test_fraction=test_fraction, val_fraction=val_fraction, server_fraction=server_fraction)
    if max_samples is not None:
        check_integers("data.", max_samples=max_samples)
    is_share = isinstance(central_test, Real) and 0 < central_test < 1
    wrong = [
        (not isinstance(root, (str, os.PathLike)), f"root={root!r} must be a folder"),
        (num_clients < 1, f"num_clients={num_clients} must be at least 1"),
        (
            isinstance(partitioner, type) or not callable(partitioner),
            f"partitioner={partitioner!r} must be a partitioner, such as Dirichlet(alpha=0.1)",
        ),
        (batch_size < 1, f"batch_size={batch_size} must be at least 1"),
        (
            last_batch not in get_args(LastBatch),
            f"last_batch={last_batch!r} must be one of {', '.join(get_args(LastBatch))}",
        ),
        (not 0 <= test_fraction < 1, f"test_fraction={test_fraction} must be at least 0 and below 1"),
        (not 0 <= val_fraction < 1, f"val_fraction={val_fraction} must be at least 0 and below 1"),
        (
            max_samples is not None and max_samples < num_clients,
            f"max_samples={max_samples} must be at least num_clients={num_clients}",
        ),
        (
            client_test not in get_args(ClientTest),
            f"client_test={client_test!r} must be one of {', '.join(get_args(ClientTest))}",
        ),
        (
            central_test not in (None, "original") and not is_share,
            f"central_test={central_test} must be between 0 and 1, or original, or null",
        ),
        (not 0 <= server_fraction < 1, f"server_fraction={server_fraction} must be at least 0 and below 1"),
        (
            server_fraction > 0 and central_test is None,
            f"server_fraction={server_fraction} is a share of the central test set: set data.central_test too",
        ),
        (
            server_fraction > 0 and public is not None,
            f"server_fraction={server_fraction} and data.public={public} both give the server samples; take one",
        ),
        (public_samples < 1, f"public_samples={public_samples} must be at least 1"),
        (not 0 <= seed < 2**32, f"seed={seed} must be from 0 to 2**32 - 1"),
    ]
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise MisconfigurationException(f"data.{sentence}")


def check_labels(x: Tensor, y: Tensor, num_classes: int) -> None:
    """Check that a loaded pool has one label in range for each input.

    Args:
        x: Inputs, shape [N, ...].
        y: Labels, shape [N].
        num_classes: Number of classes K.

    Raises:
        MisconfigurationException: The pool is empty, or inputs and labels do not fit.
    """
    if len(x) == 0 or y.shape != x.shape[:1] or y.dtype != torch.int64:
        raise MisconfigurationException(
            f"load() returned {len(x)} inputs and {y.dtype} labels of shape {list(y.shape)}; "
            "return at least one input and one int64 label for each"
        )
    if y.min() < 0 or y.max() >= num_classes:
        raise MisconfigurationException(
            f"load() returned labels from {int(y.min())} to {int(y.max())}; "
            f"num_classes={num_classes} allows 0 to {num_classes - 1}"
        )


def check_halves(name: str, has_half: bool, client_test: str, central_test: float | str | None) -> None:
    """Check that a data set has the original test half that its settings ask for.

    Args:
        name: The data module's class.
        has_half: Whether it has one.
        client_test: ``original`` or another value.
        central_test: ``original`` or another value.

    Raises:
        MisconfigurationException: It has none.
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
    """Check that a partitioner gave every client samples of its own, and say how many it left out.

    Args:
        parts: What it returned: for each client, int64 positions, shape [n], in [0, num_samples), all of them distinct.
        partitioner: Who returned it.
        num_clients: Number of clients M.
        num_samples: Number of samples that were to be divided.
        least: Number of samples that a client needs.

    Raises:
        MisconfigurationException: The parts are anything else.
    """
    name = getattr(partitioner, "__name__", type(partitioner).__name__)
    if not isinstance(parts, (list, tuple)) or len(parts) != num_clients:
        what = f"{len(parts)} parts" if isinstance(parts, (list, tuple)) else f"a {type(parts).__name__}"
        raise MisconfigurationException(
            f"{name} returned {what} for data.num_clients={num_clients}; return a list of one tensor of positions for "
            "each client"
        )
    for client, rows in enumerate(parts):
        if not isinstance(rows, Tensor) or rows.dim() != 1 or (len(rows) and rows.dtype != torch.int64):
            what = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise MisconfigurationException(
                f"{name} gave client {client} positions as {what}; give each client an int64 tensor of shape [n]"
            )
        if len(rows) < least:
            more = f"min_size={least}" if hasattr(partitioner, "min_size") else f"give each at least {least}"
            raise MisconfigurationException(
                f"{name} left client {client} with {len(rows)} of {num_samples} samples, too few for {least} non-empty "
                f"parts; use fewer clients or more samples, or {more}"
            )
    taken = torch.cat(list(parts))
    if taken.min() < 0 or taken.max() >= num_samples:
        raise MisconfigurationException(
            f"{name} gave positions from {int(taken.min())} to {int(taken.max())} for {num_samples} samples; give "
            f"positions from 0 to {num_samples - 1}"
        )
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
