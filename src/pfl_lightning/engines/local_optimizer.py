"""Make a client's optimizer for a phase of local training."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from pfl_lightning.client.module import ClientModule
from pfl_lightning.client.optimizers import check_own_parameters
from pfl_lightning.client.phases import Phase
from pfl_lightning.engines.base import Job
from pfl_lightning.messages import tree_map


def local_optimizer(module: ClientModule, phase: Phase, job: Job, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the phase's optimizer, with the client's saved state if any, at the round's learning rate.

    Args:
        module: the client module; its ``learning_rate`` becomes the phase's.
        phase: the phase.
        job: the client's work in this round.
        parameters: the parameters that the phase trains.

    Raises:
        MisconfigurationException: if the phase trains no parameter, or the optimizer has other parameters.
    """
    if not parameters:
        raise MisconfigurationException(
            f"model.net={type(module.net).__name__}: all parameters that {type(module).__name__} trains in its phase "
            f"{phase.name!r} are frozen (requires_grad=False); leave some trainable, or take a method that trains the "
            "whole net, such as FedAvg."
        )
    optimizer = module.local_optimizer(phase, parameters)
    check_own_parameters(optimizer, parameters, f"{type(module).__name__}.local_optimizer({phase.name!r})")
    factor = job.lr_factor if phase.scheduled else 1.0
    # Read before loading the state, which holds the learning rate of an earlier round.
    rates = [group["lr"] * factor for group in optimizer.param_groups]
    if phase.name in job.state.optimizers:
        # A copy, since load_state_dict keeps the given tensors and steps change them in place.
        optimizer.load_state_dict(tree_map(Tensor.clone, job.state.optimizers[phase.name]))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    module.learning_rate = rates[0]
    return optimizer
