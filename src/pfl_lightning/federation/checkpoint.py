"""A federation's checkpoints: the types in them, whose federation they are of, and the next jobs of its clients."""

import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.data import ClientData, Split
from pfl_lightning.engines import ClientState, Job
from pfl_lightning.messages import CPU, Row, tensors, tree_map
from pfl_lightning.seeds import derive_seed
from pfl_lightning.transfers import moved

VALUES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, Row),
}
"""Types that ``torch.load`` reads back by ``weights_only=True``, without the containers."""
DICTS = {dict, OrderedDict, Counter}
SEQUENCES = {list, tuple, set}
INSTEAD: dict[type, str] = {
    np.ndarray: "a tensor, as of torch.from_numpy",
    deque: "a list",
    defaultdict: "a dict",
    frozenset: "a list",
    tuple: "a plain tuple",
    Enum: "its value",
    date: "a text, as of isoformat",
    timedelta: "a number of seconds",
    os.PathLike: "a text",
}
"""Advice by type, for those that users keep and ``torch.load`` refuses."""


def storable(record: Any, name: str, settings: bool = False) -> Any:
    """Return a record that can be read back from a checkpoint: itself, or a copy without NumPy's numbers.

    ``torch.save`` writes any type, and ``torch.load`` by ``weights_only=True`` refuses most of them: the error would
    come when a run is resumed, and all its rounds would be lost.

    >>> storable({"mean": np.float64(0.5)}, "Server.state")
    {'mean': 0.5}

    Args:
        record: tensors, plain values, and dicts and lists of them.
        name: the record's name in an error.
        settings: whether paths are taken as texts, as in the settings of a net or a data module.

    Raises:
        MisconfigurationException: if another type is in it.
    """
    if is_storable(record):
        return record
    kind = type(record)
    if isinstance(record, np.generic):
        return storable(record.item(), name) if kind is not type(record.item()) else refuse(record, name)
    if settings and isinstance(record, os.PathLike):
        return os.fspath(record)
    if kind in DICTS:
        pairs = ((storable(k, name, settings), storable(v, f"{name}[{k!r}]", settings)) for k, v in record.items())
        return kind(dict(pairs))
    if kind in SEQUENCES:
        return kind([storable(value, f"{name}[{index}]", settings) for index, value in enumerate(record)])
    return refuse(record, name)


def is_storable(record: Any) -> bool:
    """Return whether all of a record is of types that can be read back from a checkpoint."""
    kind = type(record)
    if kind in VALUES:
        return True
    if kind in DICTS:
        return all(map(is_storable, record)) and all(map(is_storable, record.values()))
    return kind in SEQUENCES and all(map(is_storable, record))


def refuse(record: Any, name: str) -> Any:
    """Raise that a value can't be read back from a checkpoint.

    Raises:
        MisconfigurationException: always.
    """
    advice = next((INSTEAD[kind] for kind in INSTEAD if isinstance(record, kind)), "numbers, texts or tensors")
    raise MisconfigurationException(
        f"{name} is of the type {type(record).__name__}, which can't be read back from a checkpoint; keep {advice} in "
        "its place."
    )


def check_same(saved: Mapping[str, Any], method: str, sizes: Sequence[int], new_clients: float) -> None:
    """Checks that a saved federation is of the same method and the same clients.

    Args:
        saved: the checkpoint's entry ``federation``.
        method: the name of this run's method.
        sizes: training samples of this run's clients.
        new_clients: this run's setting.

    Raises:
        MisconfigurationException: if it is of another method, number of clients or partition.
    """
    if saved["method"] != method:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint is of {saved['method']} and this run of {method}; "
            "resume with the configuration that it was made with."
        )
    if len(saved["sizes"]) != len(sizes):
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint has {len(saved['sizes'])} clients and data.num_clients={len(sizes)}."
        )
    if saved["sizes"] != sizes:
        raise MisconfigurationException(
            "ckpt_path: the checkpoint's clients hold other numbers of samples than those of data; "
            "resume with the data, partitioner and data.seed that it was made with."
        )
    # a state that is in no checkpoint has no settings, and those of earlier versions not this one
    then = saved["settings"].get("data.new_clients", 0) if "settings" in saved else new_clients
    if then != new_clients:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint's run had data.new_clients={then} and this one {new_clients}, of whom some may "
            "have taken part in it; take what it had."
        )


def saved_states(clients: Mapping[int, ClientState]) -> dict[int, Any]:
    """Clients' states as a checkpoint has them: on the CPU, where those of a device come in few copies.

    Args:
        clients: the states by client id.
    """
    states = {client: vars(state) for client, state in sorted(clients.items())}
    arrived = iter(moved(list(tensors(states)), CPU))
    return cast(dict[int, Any], tree_map(lambda _: next(arrived), states))


def saved_job(
    saved: Mapping[str, Any], client: int, architecture: int, data: ClientData, splits: tuple[Split, ...]
) -> Job:
    """A client's job in the round after a checkpoint.

    Args:
        saved: the checkpoint's entry ``federation``.
        client: its id.
        architecture: which architecture it has.
        data: its data.
        splits: the splits to evaluate on.
    """
    own = saved["clients"].get(client, {"personal": saved["initial"][architecture]})
    seed = derive_seed(saved["seed"], "train", saved["round"], client)
    payload = saved["payloads"][client]
    return Job(client, saved["round"], ClientState(**own), payload, data, seed, saved["lr_factor"], splits)
