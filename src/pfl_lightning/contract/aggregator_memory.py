"""Find memory of an aggregator outside ``state``, which checkpoints would lose."""

from collections.abc import Iterable, Iterator
from itertools import chain

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.aggregators import Aggregator, AggregatorList
from pfl_lightning.contract.attributes import Attributes


class Remembered:
    """Ends a run whose aggregator keeps memory outside ``state``, as a checkpoint would lose such memory.

    Args:
        aggregator: the aggregator, after `Aggregator.setup`.
        modules: the client modules; an aggregator may refer to their parameters, which engines change.
    """

    def __init__(self, aggregator: Aggregator, modules: Iterable[nn.Module]) -> None:
        self._aggregators = list(parts_of(aggregator))
        self._modules = list(modules)
        # each part of a list by itself, so that an error names the part
        self._attributes = [Attributes({a.name: a}, {"state", *a.caches}, self._is_entry) for a in self._aggregators]
        self._looks = [attributes.look() for attributes in self._attributes]

    def _is_entry(self, tensor: Tensor) -> bool:
        # engines train in the module, so its parameters change without the aggregator's doing
        entries = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in self._modules)
        return any(entry is tensor for entry in entries)

    def check(self, hook: str) -> None:
        """Compare the aggregator's attributes with those of the last call.

        Args:
            hook: the hooks that the federation has called since then, for the error.

        Raises:
            MisconfigurationException: if an attribute changed.
        """
        # compared by version numbers, not by copies: a look costs no memory of the size of the state
        looks = [attributes.look() for attributes in self._attributes]
        of_each = zip(self._aggregators, self._attributes, self._looks, looks, strict=True)
        for aggregator, attributes, before, now in of_each:
            if name := attributes.changed(before, now):
                attribute = name.removeprefix(f"{aggregator.name}.")
                raise MisconfigurationException(
                    f"{aggregator.name}: {hook} changes the attribute {attribute}, which no checkpoint would have; "
                    f"keep what a server remembers in self.state, or name it in {type(aggregator).__name__}.caches if "
                    "it is made from state alone."
                )
        self._looks = looks


def parts_of(aggregator: Aggregator) -> Iterator[Aggregator]:
    """Yield an aggregator, or the parts of an `AggregatorList`, at any depth.

    Args:
        aggregator: the aggregator.
    """
    if isinstance(aggregator, AggregatorList):
        for part in aggregator.aggregators:
            yield from parts_of(part)
    else:
        yield aggregator
