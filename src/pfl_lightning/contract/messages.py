"""Check the updates and payloads of every round."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor, dtype

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.messages import Message, Row, StateDict, Updates

Kinds: TypeAlias = dict[str, tuple[Size, dtype]]
"""Shape and type of tensors, by name."""


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
    kinds = kinds_of(shared)
    wrong = {client: reason for client, update in updates.items() if (reason := fault(update, aggregator, kinds))}
    if wrong and "weights" in aggregator.needs:
        # a method may send a part of the shared entries; the majority tells which part, so that one wrong client can't
        names = Counter(frozenset(u["weights"]) for u in updates.values() if isinstance(u, Mapping) and "weights" in u)
        usual = names.most_common(1)[0][0] if names else kinds.keys()
        part = {name: kind for name, kind in kinds.items() if name in usual}
        wrong = {client: reason for client, update in updates.items() if (reason := fault(update, aggregator, part))}
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


def fault(update: Any, aggregator: Aggregator, kinds: Kinds) -> str:
    """Return a description of an update's fault; empty without one.

    Args:
        update: the update.
        aggregator: the aggregator, which names the entries that it needs.
        kinds: shapes and types of the weights, by name.
    """
    needs = aggregator.needs
    if not isinstance(update, (dict, Mapping)):
        return f"a {type(update).__name__} and no dict of entries"
    if not update.keys() >= needs:
        return f"no {' and '.join(sorted(needs - update.keys()))}"
    if "weights" in needs and (given := kinds_of(update["weights"])) != kinds:
        return difference(given, kinds)
    if "num_samples" in needs:
        count = update["num_samples"]
        # not negative and not 0 either: both would pass into weights of a mean without a sound
        whole = isinstance(count, Tensor) and count.dim() == 0 and not count.is_floating_point()
        if not whole or count < 1:
            return f"num_samples={count} and no tensor of one integer from 1 up"
    if "class_counts" in needs:
        counts = update["class_counts"]
        if not isinstance(counts, Tensor) or counts.dim() != 1 or bool((counts < 0).any()):
            return f"class_counts={counts} and no numbers of samples from 0 up, one a class"
    return ""


def kinds_of(weights: Mapping[str, Tensor]) -> Kinds:
    """Return shapes and types of weights, by name, without a copy from the device.

    Args:
        weights: a state dict, or a row of a stack.
    """
    if type(weights) is Row:
        return weights.stack.kinds
    return {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}


def difference(given: Kinds, kinds: Kinds) -> str:
    """Return a description of the first difference between weights and the shared entries.

    Args:
        given: shapes and types of the weights, by name.
        kinds: those of the shared entries.
    """
    if differing := sorted(given.keys() ^ kinds.keys()):
        return f"weights {'without' if differing[0] in kinds else 'with'} {differing[0]}"
    name = next(name for name in given if given[name] != kinds[name])
    (shape, kind), (own_shape, own_kind) = given[name], kinds[name]
    if shape != own_shape:
        return f"weights whose {name} has the shape {tuple(shape)} and not {tuple(own_shape)}"
    return f"weights whose {name} is of type {kind} and not {own_kind}"


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
    given, kinds = kinds_of(payload["weights"]), kinds_of(shared)
    if given == kinds:
        return
    # a server may send more digits than clients have, such as float64, but no integers for floats
    rounded: Kinds = {}
    for name, (shape, kind) in given.items():
        own = kinds[name][1] if name in kinds else kind
        rounded[name] = shape, own if own.is_floating_point == kind.is_floating_point else kind
    if rounded != kinds:
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {difference(rounded, kinds)}; give every entry that upload "
            "sends, and no other."
        )
