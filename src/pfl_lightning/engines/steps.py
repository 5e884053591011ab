"""Call a client module's ``training_step`` and ``adjust_gradients``, and check the results."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import Batch, ClientModule
from pfl_lightning.messages import StateDict


def adjusted_gradients(module: ClientModule, gradients: StateDict) -> StateDict:
    """Return the gradients of a step after `ClientModule.adjust_gradients`.

    Args:
        module: the client module.
        gradients: the gradients by parameter name.

    Raises:
        MisconfigurationException: if names or shapes of the returned gradients differ from the given ones.
    """
    adjusted = module.adjust_gradients(gradients)
    if {name: g.shape for name, g in adjusted.items()} != {name: g.shape for name, g in gradients.items()}:
        raise MisconfigurationException(
            f"{type(module).__name__}.adjust_gradients must return gradients of the names and shapes that it was given."
        )
    return adjusted


def step_values(module: ClientModule, batch: Batch, index: int) -> dict[str, Tensor]:
    """Return the values returned and logged by ``training_step``.

    Args:
        module: the client module.
        batch: inputs and targets.
        index: the number of the batch in the epoch.

    Raises:
        MisconfigurationException: if no ``loss`` is returned, or if a value is no scalar tensor.
    """
    logged: dict[str, Tensor] = {}
    # Written to __dict__, as nn.Module.__setattr__ searches parameters and buffers first, at every step.
    table = vars(module)
    table["_logged"] = logged
    try:
        returned: Any = module.training_step(batch, index)
    finally:
        table["_logged"] = None
    values = {"loss": returned} if isinstance(returned, Tensor) else returned
    method = type(module).__name__
    if not isinstance(values, Mapping) or "loss" not in values:
        raise MisconfigurationException(
            f"{method}.training_step returned {type(returned).__name__} without a loss; return the loss, or a dict of "
            "scalar tensors with 'loss' among them."
        )
    values = {**logged, **values}
    if "loss_squared" in module.requested:
        # Computed on request only, as it costs an operation in every step.
        values["loss_squared"] = values["loss"].detach().square()
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise MisconfigurationException(
                f"{method}.training_step: {name} is {what}; return a dict of scalar tensors."
            )
    return values


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error's message, without the full stop, in at most 200 characters."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")[:200]
