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


class Leaks(Attributes):
    """The plain attributes of a client module and its submodules, which must not keep one client's data for the next.

    Args:
        module: the client module.
    """

    def __init__(self, module: ClientModule) -> None:
        self.module = module
        self.method = type(module).__name__
        # torch's own layers store no client data in attributes.
        owners = {
            f"{self.method}.{path}".rstrip("."): m
            for path, m in module.named_modules()
            if not type(m).__module__.startswith("torch.")
        }
        # A net may hold a wrapper of its own layers, such as a PeftModel, and under vmap these have other tensors.
        super().__init__(owners, ENGINES_OWN, self._is_entry, set(module.modules()))
        self._common = common_parameters(module)
        self._caches = {f"{self.method}.{path}" for path in module.caches}
        self._rounds = 0

    def _is_entry(self, tensor: Tensor) -> bool:
        """Return True for parameters and buffers, to which an attribute may refer, and which may change."""
        return any(entry is tensor for entry in chain(self.module.parameters(), self.module.buffers()))

    @contextmanager
    def of(self, hook: str, whole_round: bool = False) -> Iterator[None]:
        """Compare attributes and frozen parameters before and after this context, and stop the run if one has changed.

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
        before, versions = self.look(), list(map(version, self._common.values()))
        yield
        now, method = self.look(), self.method
        if list(map(version, self._common.values())) != versions:
            counts = zip(self._common.items(), versions, strict=True)
            moved = next(name for (name, parameter), count in counts if version(parameter) != count)
            raise MisconfigurationException(
                f"{method}: {hook} changes {moved}, which the net has frozen (requires_grad=False) and all clients "
                "share; make it trainable in the net, or a buffer."
            )
        if name := self.changed(before, now, self._caches):
            attribute = name.removeprefix(f"{method}.")
            raise MisconfigurationException(
                f"{method}: {hook} changes the attribute {attribute}, which would leak to the next client and be lost "
                f"with the process; keep it in a buffer (register_buffer), with persistent=False if each round makes "
                f"it anew; in that case, and under engine=vectorised if no step reads it, {attribute!r} may also go "
                f"into {method}.caches."
            )
