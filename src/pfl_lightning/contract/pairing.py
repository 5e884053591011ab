"""Check before the first round if client module, aggregator, net and data fit together."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import personal_entries, shared_entries
from pfl_lightning.data import FederatedDataModule, Samples
from pfl_lightning.messages import StateDict
from pfl_lightning.nets.lightning_net import LightningNet
from pfl_lightning.nets.modes import kept_modes
from pfl_lightning.selection import Selection
from pfl_lightning.server import Aggregator
from pfl_lightning.server.adapters import pairs
from pfl_lightning.settings import kept_arguments, parameters_of
from pfl_lightning.tasks.base import number_of_classes
from pfl_lightning.tasks.own_loss import OwnLoss


def check_finite(client: ClientModule, aggregator: Aggregator) -> None:
    """Refuse NaN and infinite settings, except defaults.

    Args:
        client: the client module.
        aggregator: the aggregator.

    Raises:
        MisconfigurationException: if a setting isn't finite.
    """
    for name, value in (*numbers("model", client), *numbers("aggregator", aggregator)):
        if not math.isfinite(value):
            raise MisconfigurationException(f"{name}={value} must be finite.")


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield floating numbers among settings by dotted name, also inside lists, dicts, ``partial`` and nested objects.

    >>> list(numbers("model.optimizer", partial(dict, lr=0.1, betas=[0.5, 0.9])))
    [('model.optimizer.lr', 0.1), ('model.optimizer.betas.0', 0.5), ('model.optimizer.betas.1', 0.9)]

    Args:
        name: dotted name of the setting.
        value: the setting's value.
    """
    if isinstance(value, float):
        yield name, value
        return
    if isinstance(value, ClientModule | Aggregator):
        value = given(value)
    elif isinstance(value, partial):
        value = value.keywords
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from numbers(f"{name}.{key}", part)


def given(made: ClientModule | Aggregator) -> dict[str, Any]:
    """Return the settings of a client module or aggregator, without floats at their defaults.

    Some defaults are infinite, such as a bound that is off.

    Args:
        made: the client module or aggregator.
    """
    defaults = {name: parameter.default for name, parameter in parameters_of(made).items()}
    kept = kept_arguments(made).items()
    return {name: value for name, value in kept if not (isinstance(value, float) and value == defaults.get(name))}


def check_pair(client: ClientModule, aggregator: Aggregator) -> None:
    """Refuse a client and an aggregator if one needs an entry which the other doesn't send.

    Args:
        client: the client module.
        aggregator: the aggregator.

    Raises:
        MisconfigurationException: if an entry is missing.
    """
    names = type(client).__name__, aggregator.name
    # once for the way up, once for the way down
    for needed, sent, (one, other) in (
        (aggregator.needs, client.sends | client.offers, names[::-1]),
        (client.needs, aggregator.sends, names),
    ):
        if missing := sorted(needed - sent):
            raise MisconfigurationException(
                f"{one} needs {' and '.join(missing)}, which {other} does not send; choose another aggregator for "
                f"model {names[0]}, or leave it out to take {client.configure_aggregator().name}."
            )


def check_tells(client: ClientModule, selection: Selection) -> None:
    """Refuse a selection based on reports missing from the client module's ``tells``.

    Args:
        client: the client module.
        selection: the rule that chooses each round's clients.

    Raises:
        MisconfigurationException: if a report is missing from the client module's ``tells``.
    """
    if missing := sorted(selection.asks - client.tells):
        raise MisconfigurationException(
            f"trainer.cohort={type(selection).__name__} asks clients for {' and '.join(missing)}, which "
            f"{type(client).__name__} doesn't tell; add to its `tells`, or take Uniform."
        )


def check_tied(client: ClientModule) -> None:
    """Refuse a tied tensor with a shared and a personal name: a download would overwrite the client's own.

    Args:
        client: the client module.

    Raises:
        MisconfigurationException: if there is such a tensor.
    """
    entries = client.state_dict()
    # empty tensors all have the address 0, and are no tie
    shared = {t.data_ptr(): name for name, t in shared_entries(client, entries).items() if t.numel()}
    for name, tensor in personal_entries(client, entries).items():
        other = shared.get(tensor.data_ptr())
        if other is not None and not client.is_shared(name):
            raise MisconfigurationException(
                f"model.net={type(client.net).__name__} has one tensor for {other}, which {type(client).__name__} "
                f"shares, and {name}, which stays with each client; give a net that doesn't tie the two, or take a "
                "method that shares all of it, such as FedAvg."
            )


def check_split(client: ClientModule) -> None:
    """Check a partly personal method for trainable parameters in both parts of the model, personal and shared.

    Frozen parameters are common to all clients and count for neither. A warning says so where nothing is shared and
    clients train alone, as in comparisons on a net that a method can't cut.

    Args:
        client: the client module.

    Raises:
        MisconfigurationException: if the whole personal part is frozen.
    """
    common, name, net = client.common_names, type(client).__name__, type(client.net).__name__
    entries = client.state_dict()
    parameters = dict(client.named_parameters(remove_duplicate=False))
    # emptied for a moment: `is_shared` and `is_personal` else exclude frozen entries, and here the method's rule counts
    client.common_names = frozenset()
    try:
        shared = {entry for entry in parameters if client.is_shared(entry)}
        personal = {entry for entry, t in entries.items() if t.is_floating_point() and client.is_personal(entry)}
        # entries that FedAvg would keep as well, such as running statistics with buffers='local', don't make a method
        # personal
        usual = {entry for entry in personal if entry.startswith("net.") and not ClientModule.is_shared(client, entry)}
    finally:
        client.common_names = common
    kept = personal - usual
    if own := {entry for entry in kept if entry.startswith("net.")}:
        # untrained copies of the net, which a method keeps to remember a model, are no personal part
        kept = own | {entry for entry in kept if entry not in parameters or parameters[entry].requires_grad}
    if kept and kept <= common:
        raise MisconfigurationException(
            f"model.net={net}: all that {name} keeps with each client, such as {min(kept)}, is frozen "
            "(requires_grad=False), so that nothing would be personal; leave some of it trainable, or take FedAvg."
        )
    if "weights" in client.sends and not shared - common:
        reason = "frozen (requires_grad=False)" if shared else "not there"
        rank_zero_warn(
            f"model.net={net}: all parameters that {name} would share are {reason}, so that each client trains alone."
        )


def check_common(modules: Sequence[ClientModule], shared: Sequence[StateDict], narrow: bool) -> None:
    """Refuse different networks with different shared entries, by name or shape.

    Args:
        modules: the client modules, one a network.
        shared: the shared entries of each.
        narrow: whether entries may be smaller than those of the first network.

    Raises:
        MisconfigurationException: if they differ.
    """
    first = {name: tensor.shape for name, tensor in shared[0].items()}
    for module, entries in zip(modules, shared, strict=True):
        own = {name: tensor.shape for name, tensor in entries.items()}
        if narrow and own.keys() == first.keys():
            fits = (len(own[n]) == len(s) and all(map(int.__le__, own[n], s)) for n, s in first.items())
            if all(fits):
                continue
        if different := [name for name in {**first, **own} if first.get(name) != own.get(name)]:
            raise MisconfigurationException(
                f"model.net: {type(modules[0].net).__name__} and {type(module.net).__name__} differ in {different[0]}, "
                f"which {type(module).__name__} shares; give one network, or take a method that shares only what all "
                "have alike, such as FedClassAvg."
            )


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


def check_own_training(module: ClientModule, samples: Samples) -> None:
    """Refuse a method with a need of more than a LightningModule's loss and weights.

    Args:
        module: the client module, whose net is the LightningModule; it stays as it is.
        samples: some samples to try a step of each phase on.

    Raises:
        MisconfigurationException: if the method needs features, outputs or an output layer that isn't known.
    """
    net, method = cast(LightningNet, module.net), type(module).__name__
    needs = next((need for need in ("vector features", "body") if need in module.requires), None)
    if needs == "vector features":
        net.features(samples.x).refuse("features as vectors")
    if net.classifier.layer is None and (name := cut_at(module)):
        raise MisconfigurationException(
            f"model {method} treats the output layer apart, and of {net.features.name} nothing says which layer it is, "
            f"as its forward can't be tried on model.input_shape={tuple(module.input_shape)}; name "
            f"the layer `classifier`, set example_input_array, or take a method of the whole model, such as FedAvg "
            f"({name} would be treated as all others)."
        )
    # a copy, as the module's own code may count its steps
    trial = copy.deepcopy(module).eval()
    for phase in trial.local_phases():
        if phase.data is not None:
            continue
        # as engines do; elsewhere values are logged to a Trainer
        vars(trial).update(phase=phase, _logged={})
        try:
            with isolate_rng(), torch.enable_grad():
                trial.training_step((samples.x, samples.y), 0)
        except (MisconfigurationException, torch.cuda.OutOfMemoryError):
            raise
        # the first client's training raises it again, with client and round
        except Exception:
            return


def cut_at(module: ClientModule) -> str | None:
    """Return the first parameter whose treatment would differ in an output layer; None without one.

    Args:
        module: the client module, whose net has an unknown output layer.
    """
    phases = [*module.local_phases(), *module.joining_phases(), *module.evaluation_phases()]
    rules = [module.is_shared, module.is_personal, *(phase.trains for phase in phases)]
    for name, _ in module.named_parameters():
        other = name.replace("net.features.", "net.classifier.", 1)
        if other != name and any(rule(name) != rule(other) for rule in rules):
            return name
    return None


def two_samples(module: ClientModule, data: FederatedDataModule) -> Samples:
    """Return training samples of the first client that has some, for a trial on the client module's device.

    Args:
        module: the client module.
        data: the data module, set up, with clients of its own.
    """
    # not `module.device`: during setup, Lightning already reports the device to which the module will move
    where = next(module.parameters()).device
    every = range(data.num_clients)
    if not any(data.size(client, "train") for client in every):
        # clients of a federation whose data aren't here, such as beside those of a late client, have no samples
        every = data.newcomers
    client = next((client for client in every if data.size(client, "train")), 0)
    return data.part(client, "train").take(slice(2)).to(where, cast(torch.dtype, module.dtype))


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
    samples = two_samples(module, data)
    if isinstance(module.net, LightningNet):
        check_own_training(module, samples)
        if isinstance(module.task, OwnLoss):
            return
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
        built, given = tuple(module.input_shape), tuple(data.input_shape)
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
