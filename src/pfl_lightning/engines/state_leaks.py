"""Detect client data in plain attributes of a client module, which would leak to the next client."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import common_parameters
from pfl_lightning.contract.attributes import Attributes
from pfl_lightning.internals.of_lightning import KEPT_ARGUMENTS
from pfl_lightning.internals.of_torch import version

ENGINES_OWN = {
    *vars(LightningModule()),
    *KEPT_ARGUMENTS,
    *(
        "_made_with",
        "_architecture",
        "_given_modes",
        "_logged",
        "client_id",
        "learning_rate",
        "phase",
        "relied_on",
        "round",
        "steps_done",
    ),
    *("training_follows", "evaluation_follows"),
}
"""Attributes of client modules that Lightning, constructors or engines set, and so may change."""

CLOSELY = 2
"""Number of first rounds in which each hook of each client is watched; later rounds are watched as a whole."""


class Leaks:
    """Stop a run if the client module stores a client's data in a plain attribute.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._attributes = attributes_of(module)
        self._common = common_parameters(module)
        self._rounds = 0

    @contextmanager
    def of_a_round(self) -> Iterator[None]:
        """Watch a round: each hook in the first rounds, later only the round as a whole."""
        self._rounds += 1
        if self._rounds <= CLOSELY:
            # Hooks are watched one by one in these rounds; see `of`.
            yield
            return
        with self._watched("local work"):
            yield

    def of(self, hook: str) -> AbstractContextManager[None]:
        """Watch a hook of one client, in the first rounds."""
        return self._watched(hook) if self._rounds <= CLOSELY else nullcontext()

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Compare attributes and frozen parameters before and after this context."""
        before, frozen = self._attributes.look(), self._versions()
        yield
        now = self._attributes.look()
        method = type(self.module).__name__
        # The version counter of a tensor rises with each change in place; reading it costs less than comparing values.
        if moved := [name for name, count in self._versions().items() if count != frozen[name]]:
            raise MisconfigurationException(
                f"{method}: {what} changes {moved[0]}, which the net has frozen (requires_grad=False) and all clients "
                "share; make it trainable in the net, or a buffer."
            )
        caches = {f"{method}.{name}" for name in self.module.caches}
        if name := self._attributes.changed(before, now, caches):
            attribute = name.removeprefix(f"{method}.")
            raise MisconfigurationException(
                f"{method}: {what} changes the attribute {attribute}, which would leak to the next client and be lost "
                f"with the process; keep it in a buffer (register_buffer), with persistent=False if each round makes "
                f"it anew; in that case, and under engine=vectorised if no step reads it, {attribute!r} may also go "
                f"into {method}.caches."
            )

    def _versions(self) -> dict[str, int]:
        """Return the number of in-place changes of each common parameter."""
        return {name: version(parameter) for name, parameter in self._common.items()}


def attributes_of(module: ClientModule) -> Attributes:
    """Return a client module's attributes, and those of submodules, apart from parameters and buffers.

    Args:
        module: the client module.
    """
    # torch's own layers store no client data in attributes.
    owners = {
        f"{type(module).__name__}.{path}".rstrip("."): m
        for path, m in module.named_modules()
        if not type(m).__module__.startswith("torch.")
    }

    def is_entry(tensor: Tensor) -> bool:
        # An attribute may refer to a parameter or buffer, which may change.
        return any(entry is tensor for entry in chain(module.parameters(), module.buffers()))

    return Attributes(owners, ENGINES_OWN, is_entry)
