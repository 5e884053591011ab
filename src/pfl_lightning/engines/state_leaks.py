"""Detect client data in plain attributes of a client module, which would leak to the next client."""

from collections.abc import Iterator
from contextlib import contextmanager
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
"""Number of first rounds in which each hook of each client is compared; later rounds are compared as a whole."""


class Leaks:
    """Stop a run if the client module stores a client's data in a plain attribute.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self._attributes = attributes_of(module)
        self._common = common_parameters(module)
        self._caches = {f"{type(module).__name__}.{name}" for name in module.caches}
        self._rounds = 0

    @contextmanager
    def of(self, hook: str, whole_round: bool = False) -> Iterator[None]:
        """Compare attributes and frozen parameters before and after this context.

        In the first rounds each hook of each client is compared, and later only each round as a whole.

        Args:
            hook: the hook's name, for the error.
            whole_round: whether the context is a round, and not one client's hook.
        """
        self._rounds += whole_round
        if whole_round == (self._rounds <= CLOSELY):
            yield
            return
        # The version counter of a tensor rises with each change in place; reading it costs less than comparing values.
        before, versions = self._attributes.look(), list(map(version, self._common.values()))
        yield
        now, method = self._attributes.look(), type(self.module).__name__
        if list(map(version, self._common.values())) != versions:
            counts = zip(self._common.items(), versions, strict=True)
            moved = next(name for (name, parameter), count in counts if version(parameter) != count)
            raise MisconfigurationException(
                f"{method}: {hook} changes {moved}, which the net has frozen (requires_grad=False) and all clients "
                "share; make it trainable in the net, or a buffer."
            )
        if name := self._attributes.changed(before, now, self._caches):
            attribute = name.removeprefix(f"{method}.")
            raise MisconfigurationException(
                f"{method}: {hook} changes the attribute {attribute}, which would leak to the next client and be lost "
                f"with the process; keep it in a buffer (register_buffer), with persistent=False if each round makes "
                f"it anew; in that case, and under engine=vectorised if no step reads it, {attribute!r} may also go "
                f"into {method}.caches."
            )


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
