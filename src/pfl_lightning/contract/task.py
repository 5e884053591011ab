"""Check client module, aggregator and data for one task, and the net for the data's samples."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.aggregators import Aggregator
from pfl_lightning.aggregators.adapters import pairs
from pfl_lightning.client import ClientModule
from pfl_lightning.data import FederatedDataModule
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.tasks.base import number_of_classes


def check_requirements(client: ClientModule, aggregator: Aggregator) -> None:
    """Refuse an aggregator with work by class where samples have no classes.

    Args:
        client: the client module.
        aggregator: the aggregator.

    Raises:
        MisconfigurationException: if samples have no classes, and the aggregator needs them.
    """
    if "classes" in aggregator.requires or "class_counts" in aggregator.needs:
        number_of_classes(client.task, f"aggregator {aggregator.name}")


def check_task(module: ClientModule, data: FederatedDataModule) -> None:
    """Refuse a client module made for other data, by task and by a trial of the net on two samples.

    Args:
        module: the client module, in any mode, which stays as it is.
        data: the data module, set up.

    Raises:
        MisconfigurationException: if the tasks differ, the net lacks adapters or a body that the method is about, or
            its outputs aren't those that task and method need.
    """
    if module.task != data.task:
        raise MisconfigurationException(
            f"model.task={module.task}, and {type(data).__name__} has {data.task}; make the client module with "
            "task=data.task."
        )
    name = type(module.net).__name__
    if "adapters" in module.requires and not pairs(module.state_dict()):
        raise MisconfigurationException(
            f"model {type(module).__name__} is about low-rank adapters, and model.net={name} has none (no lora_A and "
            "lora_B); take the net Adapted, or a model of peft, or a method for any net, such as FedAvg."
        )
    if "body" in module.requires and not any(parameter.requires_grad for parameter in module.net.features.parameters()):
        raise MisconfigurationException(
            f"model.net={name} has no parameter to train below its classifier (net.features), and model "
            f"{type(module).__name__} trains these alone; take a net with a body, such as CNN or MLP with hidden=[64], "
            "or a method that trains the classifier too, such as FedAvg."
        )
    if data.at_sites:
        # the server of a deployment has no samples; each site checks for itself
        return
    # not `module.device`: during setup, Lightning already reports the device to which the module will move
    where = next(module.parameters()).device
    samples = data.part(0, "train").take(slice(2)).to(where, module.dtype)  # type: ignore[arg-type]
    # a trial finds a wrong shape now, with both shapes in the error, rather than in the first round of some client
    try:
        with kept_modes(module), isolate_rng(), torch.no_grad():
            module.eval()
            outputs = module(samples.x)
            features = module.net.features(samples.x) if "vector features" in module.requires else None
    # both say what to do already, and neither is about the samples
    except (MisconfigurationException, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        built, given = tuple(module.hparams.get("input_shape", ())), tuple(data.input_shape)
        if isinstance(error, RuntimeError) and built != given:
            raise MisconfigurationException(
                f"model.input_shape={built}, and samples of {type(data).__name__} are {given}, which {name} can't "
                "take; make the client module with input_shape=data.input_shape."
            ) from error
        if not type(module.net).__module__.startswith("pfl_lightning.nets."):
            # a user's own net may have an error of its own
            raise
        x = samples.x
        kind = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        reason = " ".join(str(error).split())[:100]
        raise MisconfigurationException(
            f"model.net={name} can't take the samples of {type(data).__name__}, which are {kind} ({reason}); give "
            "images as floats or uint8 [n, channels, height, width], quantities as floats [n, features], and texts as "
            "int64 [n, positions], or take another net."
        ) from error
    module.task.check_outputs(outputs, samples.y, name)
    if "vector features" in module.requires and not (isinstance(features, Tensor) and features.dim() == 2):
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise MisconfigurationException(
            f"model {type(module).__name__} compares features as vectors [samples, size], and the features of {name} "
            f"are {shape}; let net.features end in a mean over positions, or take a method without, such as FedPer."
        )
