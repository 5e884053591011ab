"""What client modules and aggregators promise one another, checked in every round."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeAlias

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Size, Tensor, nn

from pfl_lightning.aggregators import Aggregator, Together
from pfl_lightning.attributes import Attributes
from pfl_lightning.exchange import Record, StateDict, Updates

Shapes: TypeAlias = dict[str, Size]
"""Shapes of weights, by name."""


class Remembered:
    """Ends a run whose aggregator remembers something outside its ``state``, which no checkpoint has.

    Args:
        aggregator: the server side, set up.
        modules: the client modules, whose parameters an aggregator may refer to.
    """

    def __init__(self, aggregator: Aggregator, modules: Iterable[nn.Module]) -> None:
        self._aggregators = list(parts_of(aggregator))
        self._modules = list(modules)
        self._attributes = [Attributes({a.name: a}, {"state", *a.caches}, self._is_entry) for a in self._aggregators]
        self._looks = [attributes.look() for attributes in self._attributes]

    def _is_entry(self, tensor: Tensor) -> bool:
        entries = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in self._modules)
        return any(entry is tensor for entry in entries)

    @contextmanager
    def aggregation(self) -> Iterator[None]:
        """Looks before, for what `download` has changed since the last one, and after."""
        self._compare("download or global_model")
        yield
        self._compare("aggregate")

    def _compare(self, hook: str) -> None:
        looks = [attributes.look() for attributes in self._attributes]
        for aggregator, attributes, *both in zip(self._aggregators, self._attributes, self._looks, looks, strict=True):
            if name := attributes.changed(*both):
                attribute = name.removeprefix(f"{aggregator.name}.")
                raise MisconfigurationException(
                    f"{aggregator.name}: {hook} changes the attribute {attribute}, which no checkpoint would have; "
                    f"keep what a server remembers in self.state, or name it in {type(aggregator).__name__}.caches if "
                    "it is made from state alone."
                )
        self._looks = looks


def parts_of(aggregator: Aggregator) -> Iterator[Aggregator]:
    """The aggregator, or those that it runs together."""
    if isinstance(aggregator, Together):
        for part in aggregator.aggregators:
            yield from parts_of(part)
    else:
        yield aggregator


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
    if not isinstance(update, Mapping):
        return f"a {type(update).__name__} and no dict of entries"
    if missing := sorted(aggregator.needs - update.keys()):
        return f"no {' and '.join(missing)}"
    return unlike(update["weights"], shapes) if "weights" in aggregator.needs else ""


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """The names and shapes of weights."""
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


def check_payload(payload: Record, client: int, aggregator: Aggregator, shared: StateDict) -> None:
    """Refuses a payload whose ``weights`` aren't the entries that clients share: others would stay the last client's.

    Raises:
        MisconfigurationException: if they aren't.
    """
    if "weights" in payload and (reason := unlike(payload["weights"], shapes_of(shared))):
        raise MisconfigurationException(
            f"{aggregator.name}.download({client}) gave {reason}; give every entry that upload sends, and no other."
        )
