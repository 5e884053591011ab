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
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from pfl_lightning.data import ClientData, FederatedDataModule, Split
from pfl_lightning.data.description import fingerprint
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


ENTRIES: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "sizes": (list,),
    "round": (int,),
    "lr_factor": (float, int, Tensor),
    "seed": (int,),
    "initial": (list,),
    "start": (dict,),
    "aggregator": (dict,),
    "clients": (dict,),
}
"""What every saved federation has, with the types of it."""


def check_same(saved: Any, method: str) -> None:
    """Check that a saved federation is whole, and of the same method.

    Args:
        saved: the checkpoint's entry ``federation``.
        method: the name of this run's method.

    Raises:
        MisconfigurationException: if something is missing in it, or it is of another method.
    """
    entries = saved if isinstance(saved, Mapping) else {}
    if lacking := [name for name, kind in ENTRIES.items() if not isinstance(entries.get(name), kind)]:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint's federation has no {listed(lacking)}; take another checkpoint, such as "
            "best.ckpt or last.ckpt of the run."
        )
    if saved["method"] != method:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint is of {saved['method']} and this run of {method}; "
            "resume with the configuration that it was made with."
        )


def pair_clients(saved: Mapping[str, Any], data: FederatedDataModule, use: str) -> bool:
    """Give clients of a data module the ids that they have in a federation, or refuse data that can't be paired.

    Clients with names are paired by them. An evaluation may have other samples of theirs than the federation was
    trained on, and of some clients alone; when clients join, new are those whose names the federation doesn't know.
    Clients without names have to be the federation's: as many, with as many samples, and for an evaluation with the
    same fingerprint of the partition.

    Args:
        saved: what is known of the federation, as in the checkpoint's entry ``federation``.
        data: set up; its ids change where names ask for it.
        use: ``fit``, ``test`` or ``join``.

    Returns:
        Whether ids have changed.

    Raises:
        MisconfigurationException: if clients can't be paired.
    """
    then, now = saved.get("names", []), data.client_names[: data.num_clients]
    if then and now:
        return pair_names(saved, data, use)
    if bool(then) != bool(now) and "names" in saved:
        one, other = ("names", "none") if then else ("no names", "some")
        raise MisconfigurationException(
            f"{owner(saved)}'s clients have {one} and those of data {other}, so that they can't be paired; take data "
            "whose clients are named as then."
        )
    check_sizes(saved, data)
    # a state that is in no checkpoint has no settings, and those of earlier versions not this one
    new = data.new_clients
    earlier = saved["settings"].get("data.new_clients", 0) if "settings" in saved else new
    if earlier != new:
        raise MisconfigurationException(
            f"{owner(saved)}'s run had data.new_clients={earlier} and this one {new}, of whom some may have taken part "
            "in it; take what it had."
        )
    if use != "fit" and "partition" in saved and saved["partition"] != fingerprint(data):
        raise MisconfigurationException(
            f"{owner(saved)}'s clients hold other samples than those of data, and have no names to be paired by; take "
            "the data, partitioner and data.seed that it was made with, or data that name their clients."
        )
    return False


def pair_names(saved: Mapping[str, Any], data: FederatedDataModule, use: str) -> bool:
    """Do what `pair_clients` does, for clients with names."""
    then, every = saved["names"], data.client_names
    now, drawn = every[: data.num_clients], every[data.num_clients :]
    if use == "fit":
        if then != now:
            at = next((k for k, pair in enumerate(zip(then, now, strict=False)) if pair[0] != pair[1]), None)
            other = f"{len(then)} and {len(now)}" if at is None else f"client {at} is {then[at]!r} and {now[at]!r}"
            raise MisconfigurationException(
                f"{owner(saved)}'s clients are others than those of data ({other}); resume with the data that it was "
                "made with."
            )
        check_sizes(saved, data)
        return False
    if then == now:
        # whoever was drawn as new has another name
        return False
    known = set(then)
    new = [name for name in every if name not in known]
    if use == "test" and (strange := [name for name in new if name not in drawn]):
        raise MisconfigurationException(
            f"{owner(saved)} doesn't know the clients {listed(strange)} of data; leave them out, or let them join by "
            "trainer.join."
        )
    data.arrange(then)
    if use == "test" and data.client_split not in ("given", "time"):
        rank_zero_warn(
            f"data.client_split={data.client_split}: random splits depend on a client's place among those of data, "
            "which was another one in the checkpoint's run, so that samples to test on may have been trained on; give "
            "the splits, by client_split=given or time, where the samples are the same."
        )
    if absent := known.difference(every):
        rank_zero_info(f"data has no samples of {len(absent)} of the checkpoint's {len(then)} clients.")
    if use == "join":
        rank_zero_info(f"new are the {len(new)} clients whose names the checkpoint doesn't know: {listed(new)}.")
    return True


def check_sizes(saved: Mapping[str, Any], data: FederatedDataModule) -> None:
    """Check that clients hold as many samples as in a federation.

    Raises:
        MisconfigurationException: if they don't, or are more or fewer clients.
    """
    sizes = [data.size(client, "train") for client in range(data.num_clients)]
    if len(saved["sizes"]) != len(sizes):
        raise MisconfigurationException(
            f"{owner(saved)} has {len(saved['sizes'])} clients and data.num_clients={len(sizes)}."
        )
    if saved["sizes"] != sizes:
        raise MisconfigurationException(
            f"{owner(saved)}'s clients hold other numbers of samples than those of data; resume with the data, "
            "partitioner and data.seed that it was made with."
        )


def owner(saved: Mapping[str, Any]) -> str:
    """Return the words for a federation that data don't fit: a checkpoint's, or the one that this Trainer has."""
    return "ckpt_path: the checkpoint" if "round" in saved else "this Trainer's federation"


def listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many there are more.

    >>> listed(["a", "b"]), listed(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


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
