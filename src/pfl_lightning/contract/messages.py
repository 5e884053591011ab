"""Check the updates and payloads of every round."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor, dtype

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.messages import Message, Row, StateDict, Updates

Shapes: TypeAlias = dict[str, Size]
"""Shapes of tensors, by name."""
Types: TypeAlias = dict[str, dtype]
"""Types of tensors, by name."""


def sound_updates(
    updates: Updates, aggregator: Aggregator, method: str, shared: StateDict, label: Callable[[int], str] = str
) -> Updates:
    """Return the updates fit for the aggregator; leave out all others with a warning.

    Args:
        updates: updates by client id.
        aggregator: the aggregator.
        method: name of the client module, for errors.
        shared: the entries that clients share. An update's ``weights`` have these names, shapes and types, or, as in
            methods that send a part of them, the names of the majority of updates.
        label: returns a client's id and name for messages.

    Raises:
        MisconfigurationException: if no update can be used.
    """
    shapes, types = shapes_of(shared), types_of(shared)
    if not any(fault(update, aggregator, shapes, types) for update in updates.values()):
        return updates
    if "weights" in aggregator.needs:
        # a method may send a part of the shared entries; the majority tells which part, so that one wrong client can't
        names = Counter(frozenset(u["weights"]) for u in updates.values() if isinstance(u, Mapping) and "weights" in u)
        usual = names.most_common(1)[0][0] if names else shapes.keys()
        shapes = {name: shape for name, shape in shapes.items() if name in usual}
    wrong = {client: reason for client in updates if (reason := fault(updates[client], aggregator, shapes, types))}
    # all wrong is a mistake in the method's code, and one wrong that of a client
    if wrong and len(wrong) == len(updates):
        client, reason = next(iter(wrong.items()))
        raise MisconfigurationException(
            f"client {label(client)}: {method}.upload gave {reason}, which {aggregator.name} can't use; let it add to "
            "super().upload(data), or say in `sends` and `offers` what it gives."
        )
    for client, reason in wrong.items():
        rank_zero_warn(f"client {label(client)} is left out of the aggregation: {method}.upload gave {reason}.")
    return {client: update for client, update in updates.items() if client not in wrong}


def fault(update: Any, aggregator: Aggregator, shapes: Shapes, types: Types) -> str:
    """Return a description of an update's fault; empty without one.

    Args:
        update: the update.
        aggregator: the aggregator, which names the entries that it needs.
        shapes: shapes of the weights, by name.
        types: types of the weights, by name.
    """
    if not isinstance(update, (dict, Mapping)):
        return f"a {type(update).__name__} and no dict of entries"
    if not update.keys() >= aggregator.needs:
        return f"no {' and '.join(sorted(aggregator.needs - update.keys()))}"
    if "weights" in aggregator.needs and (reason := unlike(update["weights"], shapes) or of_type(update, types)):
        return reason
    return miscounted(update, aggregator)


def of_type(update: Mapping[Any, Any], types: Types) -> str:
    """Return a description of a weight with the wrong type; empty without one.

    Args:
        update: the update, with ``weights``.
        types: types of the weights, by name.
    """
    for name, given in types_of(update["weights"]).items():
        if given != types[name]:
            return f"weights whose {name} is of type {given} and not {types[name]}"
    return ""


def miscounted(update: Mapping[Any, Any], aggregator: Aggregator) -> str:
    """Return a description of a wrong number of samples; empty without one.

    Args:
        update: the update.
        aggregator: the aggregator.
    """
    if "num_samples" in aggregator.needs:
        count = update["num_samples"]
        # not negative and not 0 either: both would pass into weights of a mean without a sound
        whole = isinstance(count, Tensor) and count.dim() == 0 and not count.is_floating_point()
        if not whole or count < 1:
            return f"num_samples={count} and no tensor of one integer from 1 up"
    if "class_counts" in aggregator.needs:
        counts = update["class_counts"]
        if not isinstance(counts, Tensor) or counts.dim() != 1 or bool((counts < 0).any()):
            return f"class_counts={counts} and no numbers of samples from 0 up, one a class"
    return ""


def types_of(weights: Mapping[str, Tensor]) -> Types:
    """Return types of weights, by name, without a copy from the device.

    Args:
        weights: a state dict, or a row of a stack.
    """
    if type(weights) is Row:
        return weights.stack.types
    return {name: tensor.dtype for name, tensor in weights.items()}


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """Return shapes of weights, by name, without a copy from the device.

    Args:
        weights: a state dict, or a row of a stack.
    """
    if type(weights) is Row:
        return weights.stack.shapes
    return {name: tensor.shape for name, tensor in weights.items()}


def unlike(weights: Mapping[str, Tensor], shapes: Shapes) -> str:
    """Return a description of the first difference between weights and the shared entries; empty without one.

    Args:
        weights: the weights.
        shapes: shapes of the shared entries, by name.
    """
    given = shapes_of(weights)
    if given == shapes:
        return ""
    if differing := sorted(given.keys() ^ shapes.keys()):
        return f"weights {'without' if differing[0] in shapes else 'with'} {differing[0]}"
    name = next(name for name in given if given[name] != shapes[name])
    return f"weights whose {name} has the shape {tuple(given[name])} and not {tuple(shapes[name])}"


def check_entries(payload: Any, client: int, aggregator: Aggregator, needs: frozenset[str], method: str) -> None:
    """Check a payload for an entry of the client module's needs, and for weights if the module needs weights.

    Further entries may come in later rounds, such as KT-pFL's targets once clients have answered.

    Args:
        payload: the result of `Aggregator.download` or `Aggregator.welcome`.
        client: the client's id.
        aggregator: the aggregator.
        needs: entries that the client module needs.
        method: name of the client module, for errors.

    Raises:
        MisconfigurationException: if an entry is missing, or the payload is no dict.
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
    """Refuse a payload with other ``weights`` than the shared entries.

    An entry without a new value would keep that of the last client trained in the module.

    Args:
        payload: the payload.
        client: the client's id.
        aggregator: the aggregator.
        shared: the entries that clients share.

    Raises:
        MisconfigurationException: if names, shapes or kinds of types differ.
    """
    if "weights" not in payload:
        return
    weights = payload["weights"]
    # a server may send more digits than clients have, such as float64, but no integers for floats
    rounded = [n for n, kind in types_of(weights).items() if n in shared and not alike(kind, shared[n].dtype)]
    if reason := unlike(weights, shapes_of(shared)) or (rounded and f"weights whose {rounded[0]} is of another type"):
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {reason}; give every entry that upload sends, and no other."
        )


def alike(one: dtype, other: dtype) -> bool:
    """Return True if both types are floating, or neither is."""
    return one.is_floating_point == other.is_floating_point
