"""What client modules and aggregators promise one another, checked in every round."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor, dtype

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.messages import Message, Row, StateDict, Updates

Shapes: TypeAlias = dict[str, Size]
"""Shapes of weights, by name."""
Types: TypeAlias = dict[str, dtype]
"""Types of weights, by name."""


def sound_updates(updates: Updates, aggregator: Aggregator, method: str, shared: StateDict) -> Updates:
    """The updates that the aggregator can use; others are left out with a warning.

    Args:
        updates: by client id.
        aggregator: the server side.
        method: name of the client module.
        shared: the entries that clients share; ``weights`` are of these, with their shapes and types, and of the same
            ones for all clients, or else for most.

    Raises:
        MisconfigurationException: if no update can be used.
    """
    shapes, types = shapes_of(shared), types_of(shared)
    if not any(fault(update, aggregator, shapes, types) for update in updates.values()):
        return updates
    if "weights" in aggregator.needs:
        names = Counter(frozenset(u["weights"]) for u in updates.values() if isinstance(u, Mapping) and "weights" in u)
        usual = names.most_common(1)[0][0] if names else shapes.keys()
        shapes = {name: shape for name, shape in shapes.items() if name in usual}
    wrong = {client: reason for client in updates if (reason := fault(updates[client], aggregator, shapes, types))}
    if wrong and len(wrong) == len(updates):
        client, reason = next(iter(wrong.items()))
        raise MisconfigurationException(
            f"client {client}: {method}.upload gave {reason}, which {aggregator.name} can't use; let it add to "
            "super().upload(data), or say in `sends` and `offers` what it gives."
        )
    for client, reason in wrong.items():
        rank_zero_warn(f"client {client} is left out of the aggregation: {method}.upload gave {reason}.")
    return {client: update for client, update in updates.items() if client not in wrong}


def fault(update: Any, aggregator: Aggregator, shapes: Shapes, types: Types) -> str:
    """Return what an update lacks or has wrong; empty if nothing."""
    if not isinstance(update, (dict, Mapping)):
        return f"a {type(update).__name__} and no dict of entries"
    if not update.keys() >= aggregator.needs:
        return f"no {' and '.join(sorted(aggregator.needs - update.keys()))}"
    if "weights" in aggregator.needs and (reason := unlike(update["weights"], shapes) or of_type(update, types)):
        return reason
    return miscounted(update, aggregator)


def of_type(update: Mapping[Any, Any], types: Types) -> str:
    """Return which of an update's weights has another type than the entry that clients share; empty if none has."""
    for name, given in types_of(update["weights"]).items():
        if given != types[name]:
            return f"weights whose {name} is of type {given} and not {types[name]}"
    return ""


def miscounted(update: Mapping[Any, Any], aggregator: Aggregator) -> str:
    """Return what is no number of samples in an update; empty if nothing that the aggregator needs."""
    if "num_samples" in aggregator.needs:
        count = update["num_samples"]
        whole = isinstance(count, Tensor) and count.dim() == 0 and not count.is_floating_point()
        if not whole or count < 1:
            return f"num_samples={count} and no tensor of one integer from 1 up"
    if "class_counts" in aggregator.needs:
        counts = update["class_counts"]
        if not isinstance(counts, Tensor) or counts.dim() != 1 or bool((counts < 0).any()):
            return f"class_counts={counts} and no numbers of samples from 0 up, one a class"
    return ""


def types_of(weights: Mapping[str, Tensor]) -> Types:
    """Return the names and types of weights."""
    if type(weights) is Row:
        return weights.stack.types
    return {name: tensor.dtype for name, tensor in weights.items()}


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """The names and shapes of weights."""
    if type(weights) is Row:
        return weights.stack.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


def unlike(weights: Mapping[str, Tensor], shapes: Shapes) -> str:
    """How weights differ from the entries that clients share; empty if in nothing."""
    given = shapes_of(weights)
    if given == shapes:
        return ""
    if differing := sorted(given.keys() ^ shapes.keys()):
        return f"weights {'without' if differing[0] in shapes else 'with'} {differing[0]}"
    name = next(name for name in given if given[name] != shapes[name])
    return f"weights whose {name} has the shape {tuple(given[name])} and not {tuple(shapes[name])}"


def check_entries(payload: Any, client: int, aggregator: Aggregator, needs: frozenset[str], method: str) -> None:
    """Check that a payload has something of what the client module needs, and weights if it needs them.

    Other entries may come in later rounds, such as KT-pFL's targets once clients have answered.

    Args:
        payload: what `Aggregator.download` or `Aggregator.welcome` gave.
        client: the client's id.
        aggregator: the server side.
        needs: what the client module needs.
        method: name of the client module.

    Raises:
        MisconfigurationException: if it hasn't, or is no dict.
    """
    if not isinstance(payload, dict):
        raise MisconfigurationException(
            f"{aggregator.name} gave client {client} a {type(payload).__name__} and no dict of entries; let download "
            "return one for every client."
        )
    if missing := sorted(needs if not payload else (needs - payload.keys()) & {"weights"}):
        raise MisconfigurationException(
            f"{aggregator.name} gave client {client} no {' and '.join(missing)}, which {method} needs; let download "
            "give every client what `sends` names."
        )


def check_payload(payload: Message, client: int, aggregator: Aggregator, shared: StateDict) -> None:
    """Refuses a payload whose ``weights`` aren't the entries that clients share: others would stay the last client's.

    Raises:
        MisconfigurationException: if they aren't.
    """
    if "weights" not in payload:
        return
    weights = payload["weights"]
    # a server may compute in more digits, but not in integers
    rounded = [n for n, kind in types_of(weights).items() if n in shared and not alike(kind, shared[n].dtype)]
    if reason := unlike(weights, shapes_of(shared)) or (rounded and f"weights whose {rounded[0]} is of another type"):
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {reason}; give every entry that upload sends, and no other."
        )


def alike(one: dtype, other: dtype) -> bool:
    """Return whether two types are both of floating numbers, or neither."""
    return one.is_floating_point == other.is_floating_point
