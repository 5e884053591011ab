"""Noise a client's update before it leaves the client, and refuse what would leave without noise."""

from collections.abc import Callable, Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import shared_entries
from pfl_lightning.contract.guarantee import BOUNDED, unfit
from pfl_lightning.engines import Job, Outcome
from pfl_lightning.messages import StateDict, is_finite
from pfl_lightning.server import Aggregator
from pfl_lightning.server.aggregator_list import parts_of


@torch.no_grad()
def noised(outcome: Outcome, job: Job, module: ClientModule, noise: Callable[[Tensor], Tensor]) -> Outcome:
    """Return a client's outcome with noised weights, and without metrics of its training.

    Training that diverged gives a noised change of zero, and leaves the client's state as it was: who diverged tells of
    samples.

    Args:
        outcome: the outcome of the client's training.
        job: the client's job, with the received weights.
        module: the client module of the client's architecture.
        noise: returns a noised change ``[d]``, in float64.

    Raises:
        MisconfigurationException: if the update has an entry that would leave the client without noise.
    """
    if outcome.refused:
        return outcome
    update, received = outcome.update, job.payload["weights"]
    first = first_names(module, update["weights"])
    bare = [*(update.keys() - BOUNDED), *(update["weights"].keys() - (first.keys() & received.keys()))]
    if bare:
        raise MisconfigurationException(
            f"trainer.local_privacy: model={type(module).__name__} sends {min(bare)}, to which no noise is added; take "
            "a method that sends parameters alone, such as FedAvg."
        )
    names = list(dict.fromkeys(first.values()))
    start = torch.cat([flat(received[name]) for name in names])
    change = torch.cat([flat(update["weights"][name]) for name in names]) - start
    state = outcome.state
    if not (outcome.finite and is_finite({"change": change})):
        change, state = torch.zeros_like(change), job.state
    sizes = [received[name].numel() for name in names]
    moved = start + noise(change)
    parts = dict(zip(names, torch.split(moved, sizes), strict=True))
    weights = {
        name: parts[first[name]].view(tensor.shape).to(tensor.dtype) for name, tensor in update["weights"].items()
    }
    # judged by noised numbers alone
    return outcome._replace(update={**update, "weights": weights}, state=state, metrics={}, finite=is_finite(weights))


def first_names(module: ClientModule, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each parameter in an update, by every name of it; tied ones have several.

    Args:
        module: the client module.
        weights: the update's weights.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in named if name in weights and p.is_floating_point()}


def check_shared(module: ClientModule) -> None:
    """Refuse clients that share entries other than parameters.

    Args:
        module: the client module.

    Raises:
        MisconfigurationException: if they do, or share nothing.
    """
    shared: StateDict = shared_entries(module, module.state_dict())
    if buffers := sorted(shared.keys() - first_names(module, shared).keys()):
        raise MisconfigurationException(
            f"model.buffers={module.buffers_policy!r}: clients share {buffers[0]}, statistics to which "
            "trainer.local_privacy adds no noise; take model.buffers=local, or a net without BatchNorm."
        )


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector in float64, on the CPU."""
    return tensor.detach().to("cpu", torch.float64).reshape(-1)


def check_local(client: ClientModule, aggregator: Aggregator) -> None:
    """Refuse settings against ``trainer.local_privacy``: samples may count through noised weights alone.

    Args:
        client: the client module.
        aggregator: the aggregator.

    Raises:
        MisconfigurationException: if a setting would break it.
    """
    setting, name = "trainer.local_privacy", type(client).__name__
    parts = list(parts_of(aggregator))
    if reason := unfit(client):
        raise MisconfigurationException(
            f"model={name} {reason}; leave {setting} out, or take a model that it fits, such as FedAvg, FedPer or "
            "Ditto."
        )
    # `offers` are sent on demand, and aren't in `sends`
    if further := sorted(aggregator.needs - BOUNDED):
        raise MisconfigurationException(
            f"{setting} noises weights alone, and aggregator={aggregator.name} asks for {' and '.join(further)}; take "
            "an aggregator of weights, such as WeightedAverage."
        )
    if "weights" not in aggregator.sends:
        raise MisconfigurationException(
            f"{setting} noises the change of received weights, and aggregator={aggregator.name} sends none; take one "
            "that does, such as WeightedAverage."
        )
    # never inherited: a class of its own may look at more than updates
    for part in parts:
        if not part.example_level:
            raise MisconfigurationException(
                f"{setting}: {type(part).__name__} doesn't set example_level = True in its own class, which claims "
                "that it learns of samples by weights alone; take an aggregator that does, such as WeightedAverage."
            )
        if part.meets_newcomers:
            raise MisconfigurationException(
                f"{setting}: {type(part).__name__} asks each new client for an update without noise; take another "
                "aggregator, such as WeightedAverage."
            )
