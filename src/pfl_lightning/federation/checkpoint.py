"""Check the types in checkpoints, pair a checkpoint's clients with the data's, and rebuild clients' jobs."""

import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from typing import Any, cast, get_args

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from pfl_lightning.data import ClientData, FederatedDataModule, Split
from pfl_lightning.data.client_names import compared, two_spellings
from pfl_lightning.data.description import fingerprint
from pfl_lightning.engines import ClientState, Job
from pfl_lightning.messages import CPU, Message, Others, Row, tensors, tree_map
from pfl_lightning.seeds import derive_seed
from pfl_lightning.transfers import moved

VALUES = {
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, Row),
}
"""Types, apart from containers, that ``torch.load`` reads back with ``weights_only=True``."""
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
"""Replacements to advise, by type, for types that users keep and ``torch.load`` refuses."""


def storable(record: Any, name: str, settings: bool = False) -> Any:
    """Return a record in types readable from a checkpoint: the record itself, or a copy without NumPy scalars.

    ``torch.save`` writes any type, but ``torch.load`` with ``weights_only=True`` refuses most. Unchecked, the error
    would come when a run is resumed, after all its rounds are lost.

    >>> storable({"mean": np.float64(0.5)}, "Server.state")
    {'mean': 0.5}

    Args:
        record: tensors, plain values, and dicts and lists of such.
        name: the record's name in an error.
        settings: whether to convert paths to texts, as in the settings of a net or a data module.

    Raises:
        MisconfigurationException: if the record contains another type.
    """
    if is_storable(record):
        return record
    kind = type(record)
    if isinstance(record, np.generic):
        # Scalars such as longdouble return themselves from item(), and would recurse forever.
        return storable(record.item(), name) if kind is not type(record.item()) else refuse(record, name)
    if kind is Others:
        return storable(dict(record), name)
    if settings and isinstance(record, os.PathLike):
        return os.fspath(record)
    if kind in DICTS:
        pairs = ((storable(k, name, settings), storable(v, f"{name}[{k!r}]", settings)) for k, v in record.items())
        return kind(dict(pairs))
    if kind in SEQUENCES:
        return kind([storable(value, f"{name}[{index}]", settings) for index, value in enumerate(record)])
    return refuse(record, name)


def is_storable(record: Any) -> bool:
    """Return True if all types in a record can be read back from a checkpoint."""
    kind = type(record)
    if kind in VALUES:
        return True
    if kind not in DICTS:
        return kind in SEQUENCES and (VALUES.issuperset(map(type, record)) or all(map(is_storable, record)))
    # A round looks at every client's state, most of which is empty; nearly all keys are texts, which need no call each.
    return not record or (
        (VALUES.issuperset(map(type, record)) or all(map(is_storable, record)))
        and (VALUES.issuperset(map(type, record.values())) or all(map(is_storable, record.values())))
    )


def refuse(record: Any, name: str) -> Any:
    """Raise the error for a value of a type unreadable from checkpoints.

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
    "names": (list,),
    "sizes": (list,),
    "partition": (str,),
    "rows": (Tensor, type(None)),
    "settings": (dict,),
    "round": (int,),
    "lr_factor": (float, int, Tensor),
    "seed": (int,),
    "initial": (list,),
    "start": (dict,),
    "common": (dict,),
    "aggregator": (dict,),
    "cohort": (dict,),
    "stages": (dict,),
    "clients": (dict,),
    "after": (dict,),
    "payloads": (list,),
    "newcomer": (dict,),
}
"""Entries that every saved federation has, with their types."""


def check_same(saved: Any, method: str) -> None:
    """Refuse a saved federation with missing entries or of another method.

    Args:
        saved: the checkpoint's entry ``federation``.
        method: the name of this run's method.

    Raises:
        MisconfigurationException: if an entry is missing, or the method is another one.
    """
    entries = saved if isinstance(saved, Mapping) else {}
    # a file of another version has other entries, and is refused before one of them is missed
    if lacking := [name for name, kind in ENTRIES.items() if not isinstance(entries.get(name, ...), kind)]:
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
    """Give the data module's clients the ids of a federation's clients, or refuse the data.

    Named clients are paired by name. For an evaluation the data may hold other samples, and only some of the clients.
    When clients join, the new ones are those with names unknown to the federation. Unnamed clients must be the
    federation's own: the same number of clients and of samples each, and for an evaluation the same training rows.

    Args:
        saved: the federation's record, as in the checkpoint's entry ``federation``.
        data: the data module, set up; its ids change if names require it.
        use: ``fit``, ``test`` or ``join``.

    Returns:
        Whether ids have changed.

    Raises:
        MisconfigurationException: if clients can't be paired.
    """
    then, now = saved["names"], data.client_names[: data.num_clients]
    if then and now:
        return pair_names(saved, data, use)
    if bool(then) != bool(now):
        one, other = ("names", "none") if then else ("no names", "some")
        raise MisconfigurationException(
            f"{subject(saved)}'s clients have {one} and the data's clients have {other}, so clients can't be paired; "
            "take data with the same client names."
        )
    # clients without names are told apart by their samples alone
    check_sizes(saved, data)
    new, earlier = data.new_clients, saved["settings"]["data.new_clients"]
    if earlier != new:
        raise MisconfigurationException(
            f"{subject(saved)}'s run had data.new_clients={earlier} and this one has {new}, so new clients may have "
            "been trained on; take the same number."
        )
    rows = other_rows(saved, data)
    is_other = rows is not None and bool(rows[:, 0].any())
    # a run that goes on compares rows later: other settings explain other rows, and are told first
    if use != "fit" and (is_other or saved["partition"] != fingerprint(data)):
        raise MisconfigurationException(
            f"{subject(saved)}'s clients hold other samples than the data's clients, and no names pair them; take the "
            "same data, partitioner and data.seed, or data with client names."
        )
    return False


def pair_names(saved: Mapping[str, Any], data: FederatedDataModule, use: str) -> bool:
    """Pair named clients, as `pair_clients` describes."""
    then, every = saved["names"], data.client_names
    now, drawn = every[: data.num_clients], every[data.num_clients :]
    if use == "fit":
        if then != now:
            at = next((k for k, pair in enumerate(zip(then, now, strict=False)) if pair[0] != pair[1]), None)
            other = f"{len(then)} and {len(now)}" if at is None else f"client {at} is {then[at]!r} and {now[at]!r}"
            raise MisconfigurationException(
                f"{subject(saved)}'s clients are not the data's clients ({other}); resume with the data of that run."
            )
        check_sizes(saved, data)
        return False
    if then == now:
        # Same clients in the same order; clients drawn as new by data.new_clients have names of their own at the end.
        return False
    old = set(then)
    spelled = {compared(name): name for name in then}
    for name in every:
        # 'bremen' beside Bremen would be a new client, tested on the rows that Bremen trained on
        if name not in old and compared(name) in spelled:
            raise two_spellings(f"{subject(saved)} and data", spelled[compared(name)], name)
    new = [name for name in every if name not in old]
    if use == "test" and (strange := [name for name in new if name not in drawn]):
        raise MisconfigurationException(
            f"{subject(saved)} doesn't know the clients {listed(strange)} of data; leave them out, or let them join by "
            "trainer.join."
        )
    data.arrange(then)
    if use == "join":
        rank_zero_info(f"new clients, whose names the checkpoint doesn't know: {listed(new)}.")
    elif absent := old.difference(every):
        rank_zero_info(f"data has no samples of {len(absent)} of the checkpoint's {len(then)} clients.")
    return True


def other_rows(saved: Mapping[str, Any], data: FederatedDataModule, in_order: bool = False) -> Tensor | None:
    """Return whether each split of a client holds other rows than in a federation, bool ``[clients, 3]``.

    Clients without rows here hold no other ones.

    Args:
        saved: the federation's record.
        data: the data module, set up, with the federation's clients.
        in_order: whether the same rows in another order count as other ones.

    Returns:
        For each client train, val and test; None where the samples are at sites.
    """
    then: Tensor | None = saved["rows"]
    with data.at_round(1):
        now = data.split_digests()
    if then is None or now is None or len(then) != len(now):
        return None
    # inputs in files aren't read, and there targets and places tell
    kind = int(in_order) if then[..., 0].any() and now[..., 0].any() else 2
    return (then[..., kind] != now[..., kind]) & now.any(2).any(1, keepdim=True)


def check_rows(saved: Mapping[str, Any], data: FederatedDataModule) -> None:
    """Refuse to train on with other rows than a federation's, or with the same rows in another order or other splits.

    Raises:
        MisconfigurationException: if a split of a client holds other rows.
    """
    other = other_rows(saved, data, in_order=True)
    if other is None or not other.any():
        return
    clients = other.any(1).nonzero().flatten().tolist()
    split = get_args(Split)[int(other[clients[0]].int().argmax())]
    is_moved = not cast(Tensor, other_rows(saved, data)).any()
    raise MisconfigurationException(
        f"{subject(saved)}'s clients hold {'the same rows in another order' if is_moved else 'other rows'} than the "
        f"data's clients ({len(clients)} of {len(other)}, first the {split} rows of client "
        f"{data.client_label(clients[0])}); resume with the same data, partitioner and data.seed."
    )


def warn_of_rows(saved: Mapping[str, Any], data: FederatedDataModule, split: Split, clients: Sequence[int]) -> None:
    """Warn of clients whose rows to evaluate on are others than in a federation, which may have trained on them.

    Args:
        saved: the federation's record.
        data: the data module, set up, with the federation's clients.
        split: the split to evaluate on.
        clients: the clients to evaluate.
    """
    other = other_rows(saved, data)
    if other is None:
        return
    place = get_args(Split).index(split)
    known = [client for client in clients if client < len(other) and data.size(client, split)]
    if changed := [client for client in known if other[client, place]]:
        rank_zero_warn(
            f"{subject(saved)}: {split} rows of {len(changed)} of {len(known)} clients, first of client "
            f"{data.client_label(changed[0])}, are others than in the run, and may be rows that were trained on; take "
            "the data of the run, its data.seed and the order of its rows, or name splits by data.client_split=given."
        )


def check_sizes(saved: Mapping[str, Any], data: FederatedDataModule) -> None:
    """Refuse clients with more or fewer samples than in a federation.

    Raises:
        MisconfigurationException: if the number of clients or a client's number of samples differs.
    """
    sizes = [data.size(client, "train") for client in range(data.num_clients)]
    if len(saved["sizes"]) != len(sizes):
        raise MisconfigurationException(
            f"{subject(saved)} has {len(saved['sizes'])} clients and data.num_clients={len(sizes)}."
        )
    # at sites 0 is also a client whose site hasn't told yet
    pairs = [pair for pair in zip(saved["sizes"], sizes, strict=True) if all(pair) or not data.at_sites]
    if any(then != now for then, now in pairs):
        raise MisconfigurationException(
            f"{subject(saved)}'s clients hold other numbers of samples than the data's clients; resume with the same "
            "data, partitioner and data.seed."
        )


def subject(saved: Mapping[str, Any]) -> str:
    """Return an error's subject: the checkpoint, or this Trainer's federation."""
    return "ckpt_path: the checkpoint" if "round" in saved else "this Trainer's federation"


def listed(names: Sequence[str]) -> str:
    """Return up to five names, and the number of further ones.

    >>> listed(["a", "b"]), listed(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def saved_states(clients: Mapping[int, ClientState]) -> dict[int, Any]:
    """Return clients' states for a checkpoint, on the CPU and without empty parts.

    Args:
        clients: the states by client id.
    """
    states = {
        client: {name: part for name, part in vars(state).items() if part} for client, state in sorted(clients.items())
    }
    # All tensors of a device are moved together, in few copies, instead of one copy per tensor and client.
    arrived = iter(moved(list(tensors(states)), CPU))
    return cast(dict[int, Any], tree_map(lambda _: next(arrived), states))


def saved_job(
    saved: Mapping[str, Any],
    client: int,
    architecture: int,
    payload: Message,
    data: ClientData,
    splits: tuple[Split, ...],
) -> Job:
    """Return a client's job in the round after a checkpoint.

    Args:
        saved: the checkpoint's entry ``federation``.
        client: the client's id.
        architecture: the index of the client's architecture.
        payload: the client's payload, of `payloads_of`.
        data: the client's data.
        splits: the splits to evaluate on.
    """
    seed = derive_seed(saved["seed"], "train", saved["round"], client)
    state = saved_state(saved, client, architecture)
    return Job(client, saved["round"], state, payload, data, seed, saved["lr_factor"], splits)


def saved_state(saved: Mapping[str, Any], client: int, architecture: int) -> ClientState:
    """Return a client's state in a checkpoint; arguments as for `saved_job`."""
    return ClientState(**saved["clients"].get(client, {"personal": saved["initial"][architecture]}))
