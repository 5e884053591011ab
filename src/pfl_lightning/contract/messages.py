"""What client modules and aggregators promise one another, checked in every round."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.messages import Message, Row, StateDict, Updates

Shapes: TypeAlias = dict[str, Size]
"""Shapes of weights, by name."""


def sound_updates(updates: Updates, aggregator: Aggregator, method: str, shared: StateDict) -> Updates:
    """The updates that the aggregator can use; others are left out with a warning.

    Args:
        updates: by client id.
        aggregator: the server side.
        method: name of the client module.
        shared: the entries that clients share; ``weights`` are of these, with their shapes, and of the same ones for
            all clients, or else for most.

    Raises:
        MisconfigurationException: if no update can be used.
    """
    shapes = shapes_of(shared)
    if not any(fault(update, aggregator, shapes) for update in updates.values()):
        return updates
    if "weights" in aggregator.needs:
        names = Counter(frozenset(u["weights"]) for u in updates.values() if isinstance(u, Mapping) and "weights" in u)
        usual = names.most_common(1)[0][0] if names else shapes.keys()
        shapes = {name: shape for name, shape in shapes.items() if name in usual}
    wrong = {client: reason for client in updates if (reason := fault(updates[client], aggregator, shapes))}
    if wrong and len(wrong) == len(updates):
        client, reason = next(iter(wrong.items()))
        raise MisconfigurationException(
            f"client {client}: {method}.upload gave {reason}, which {aggregator.name} needs; let it add to "
            "super().upload(data), or say in `sends` and `offers` what it gives."
        )
    for client, reason in wrong.items():
        rank_zero_warn(f"client {client} is left out of the aggregation: {method}.upload gave {reason}.")
    return {client: update for client, update in updates.items() if client not in wrong}


def fault(update: Any, aggregator: Aggregator, shapes: Shapes) -> str:
    """What an update lacks; empty if nothing."""
    if not isinstance(update, (dict, Mapping)):
        return f"a {type(update).__name__} and no dict of entries"
    if not update.keys() >= aggregator.needs:
        return f"no {' and '.join(sorted(aggregator.needs - update.keys()))}"
    return unlike(update["weights"], shapes) if "weights" in aggregator.needs else ""


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


def check_payload(payload: Message, client: int, aggregator: Aggregator, shared: StateDict) -> None:
    """Refuses a payload whose ``weights`` aren't the entries that clients share: others would stay the last client's.

    Raises:
        MisconfigurationException: if they aren't.
    """
    if "weights" in payload and (reason := unlike(payload["weights"], shapes_of(shared))):
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {reason}; give every entry that upload sends, and no other."
        )
