"""The parts of local training that engines share: the trained parameters, the optimizer, and the step itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client import Batch, ClientModule, Phase
from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.optimizers import check_own_parameters
from pfl_lightning.engines.base import Job, LocalWork
from pfl_lightning.messages import StateDict, tree_map
from pfl_lightning.tasks import Task


@dataclass(frozen=True)
class Layout:
    """A client module's trainable parameters and personal entries.

    Finding these takes as long as a training step of a small net, so it is done once per round and not per client.

    Args:
        parameters: the trainable parameters, by name.
        personal: names of the entries that stay with a client between rounds.
    """

    parameters: dict[str, nn.Parameter]
    personal: list[str]

    @classmethod
    def of(cls, module: ClientModule) -> "Layout":
        """Return the current layout of a client module."""
        return cls(
            # Parameters frozen by the method itself are left out, so that they stay frozen when a phase ends.
            parameters={name: p for name, p in module.named_parameters() if p.requires_grad},
            personal=list(personal_entries(module, module.state_dict())),
        )

    def trained(self, phase: Phase) -> dict[str, nn.Parameter]:
        """Return the parameters trained by a phase, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if phase.trains(name)}

    @contextmanager
    def training(self, phase: Phase) -> Iterator[dict[str, nn.Parameter]]:
        """Yield the parameters trained by a phase, by name; all others are frozen inside this context."""
        trained = self.trained(phase)
        frozen = self.parameters.keys() - trained
        # Without requires_grad, autograd skips the frozen parameters' part of the backward pass.
        for name in frozen:
            self.parameters[name].requires_grad_(False)
        try:
            yield trained
        finally:
            for name in frozen:
                self.parameters[name].requires_grad_(True)


def local_optimizer(
    module: ClientModule, phase: Phase, job: Job, parameters: list[nn.Parameter], work: LocalWork
) -> Optimizer:
    """Return the phase's optimizer, with the client's saved state if any, at the round's learning rate.

    Args:
        module: the client module; its ``learning_rate`` becomes the phase's.
        phase: the phase.
        job: the client's work in this round.
        parameters: the parameters that the phase trains.
        work: the settings of local training, with the client's own factor of the learning rate.

    Raises:
        MisconfigurationException: if the phase trains no parameter, or the optimizer has other parameters.
    """
    if not parameters:
        trains = f"{type(module).__name__} trains in its phase {phase.name!r}"
        # a linear net has no body, which is no matter of freezing
        if any(phase.trains(name) for name, _ in module.named_parameters()):
            reason = f"all parameters that {trains} are frozen (requires_grad=False); leave some trainable"
        else:
            reason = f"it has no parameter of those that {trains}; take a net with such layers"
        raise MisconfigurationException(
            f"model.net={type(module.net).__name__}: {reason}, or take a method that trains the whole net, such as "
            "FedAvg."
        )
    optimizer = module.local_optimizer(phase, parameters)
    check_own_parameters(optimizer, parameters, f"{type(module).__name__}.local_optimizer({phase.name!r})")
    factor = work.share(job.client)[1] * (job.lr_factor if phase.scheduled else 1.0)
    # Read before loading the state, which holds the learning rate of an earlier round.
    rates = [group["lr"] * factor for group in optimizer.param_groups]
    if phase.name in job.state.optimizers:
        # A copy, since load_state_dict keeps the given tensors and steps change them in place.
        optimizer.load_state_dict(tree_map(Tensor.clone, job.state.optimizers[phase.name]))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    module.learning_rate = rates[0]
    return optimizer


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
    table["_logged"], table["_batch_idx"] = logged, index
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


def weighs_batches(task: Task) -> bool:
    """Return whether batches of a step count by the errors that a task counts in each, as tokens of texts.

    Args:
        task: the task.
    """
    return type(task).weight is not Task.weight


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
