"""Write clients' adapters as folders that ``peft`` loads."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.parse import quote

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from pfl_lightning.client.joined_clients import joined_models
from pfl_lightning.client.module import ClientModule, payloads_of, saved_client
from pfl_lightning.data.files import read_checkpoint
from pfl_lightning.messages import digest

GLOBAL = "global"
"""Name of the folder with the global model's adapters."""
DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
"""Names of Windows' devices, which no folder there can have."""
PLAIN = ("true", "false", "gaussian", "orthogonal", "eva", "mica")
"""Starts of adapters, ``init_lora_weights`` of peft, which leave the frozen weights as they are."""
REPEATED = ("pissa", "olora")
"""Starts that change the frozen weights as the rank tells, so that peft repeats it where it loads a folder."""


def folder_name(client: int | str) -> str:
    """Return the name of a client's folder.

    >>> [folder_name(client) for client in (3, "Alice B.", "a/b", "global", "..", "Aux")]
    ['3', 'Alice B.', 'a%2Fb', 'global_', '.._', 'Aux_']

    Args:
        client: the client's name, or its id where clients have no names.
    """
    name = quote(str(client), safe=" @+,=()'!")
    return f"{name}_" if name == GLOBAL or not name.strip(". ") or DEVICE.match(name) else name


def save_adapters(client: ClientModule, folder: Path | str) -> None:
    """Write the adapters of a client module as it is now, for ``peft.PeftModel.from_pretrained(base, folder)``.

    The outputs are then those of the module, in single precision up to rounding: a method that computes with more than
    its net's adapters says by `ClientModule.adapter_state` what the folder holds, or that no folder could hold it. What
    the net trains beside its ``PeftModel`` is in no folder, of which a warning tells.

    Args:
        client: the client module, whose net has its ``PeftModel`` as ``adapted``, such as `CausalLM`.
        folder: the folder, made if missing.

    Raises:
        MisconfigurationException: if the net has no adapters, or no folder of adapters is the module's model.
    """
    adapted, state = exported(client)
    configs = dict(adapted.peft_config)
    try:
        # in their places for the moment: a second PeftModel would be a second base
        adapted.peft_config.update({name: fitted(adapted, name, state) for name in configs})
        adapted.save_pretrained(str(folder), save_embedding_layers=False, state_dict=state)
    finally:
        adapted.peft_config.update(configs)


def save_all(models: Iterable[tuple[Path, ClientModule, int]]) -> list[Path]:
    """Write a folder for each model, and return the folders; equal models are computed once.

    Args:
        models: folders with their client modules and the index of its net in ``architectures``; each is done with
            before the next is asked for.
    """
    written: dict[tuple[int, str], Path] = {}
    folders = []
    for folder, client, architecture in models:
        tensors = chain(client.named_parameters(), client.named_buffers())
        own = digest([tensor for name, tensor in tensors if name not in client.common_names])
        if (first := written.setdefault((architecture, own), folder)) is folder:
            save_adapters(client, folder)
        else:
            copytree(first, folder, dirs_exist_ok=True)
        folders.append(folder)
    return folders


def exported(client: ClientModule) -> tuple[Any, dict[str, Any]]:
    """Return the ``PeftModel`` of a client module's net, and its ``state_dict`` as a folder has it.

    Arguments and errors are those of `save_adapters`.
    """
    net, method = client.net, type(client)
    adapted: Any = getattr(net, "adapted", None)
    if not hasattr(adapted, "save_pretrained"):
        raise MisconfigurationException(
            f"model.net={type(net).__name__} has no adapters to write; take CausalLM with its setting lora, or a net "
            "whose attribute adapted is its PeftModel."
        )
    # a hook is of the outputs of its own class and of those above
    knows = next(kind for kind in method.__mro__ if vars(kind).keys() & {"forward", "adapter_state"})
    if "adapter_state" not in vars(knows):
        raise MisconfigurationException(
            f"model={method.__name__} computes its outputs by a forward of {knows.__name__}, and no adapter_state says "
            "which adapters give the same; leave folders of adapters out and take load_from_checkpoint(client=...), or "
            "override adapter_state."
        )
    for config in adapted.peft_config.values():
        start = getattr(config, "init_lora_weights", True)
        # a hook may change ranks, and the frozen weights would be changed by another rank
        if str(start).lower() not in (PLAIN + REPEATED if knows is ClientModule else PLAIN):
            raise MisconfigurationException(
                f"model.net.lora: init_lora_weights={start!r} changes the frozen weights, which peft can't repeat "
                f"where it loads a folder of model={method.__name__}; leave it out."
            )
    places = {id(parameter): name for name, parameter in net.named_parameters()}
    inside = {name: places.get(id(p), "") for name, p in adapted.named_parameters(remove_duplicate=False)}
    if left := {name for name, p in net.named_parameters() if p.requires_grad} - set(inside.values()):
        rank_zero_warn(
            f"model.net={type(net).__name__} trains {min(left)}, which is no part of net.adapted and in no folder of "
            "adapters; load_from_checkpoint has the whole model."
        )
    entries = client.adapter_state()
    return adapted, adapted.state_dict() | {n: entries[own].detach() for n, own in inside.items() if own in entries}


def fitted(adapted: Any, adapter: str, state: Mapping[str, Any]) -> Any:
    """Return an adapter's configuration, for factors that may have other ranks than the net's, with sets in order.

    Args:
        adapted: the ``PeftModel``.
        adapter: the adapter's name.
        state: the ``state_dict`` to be written.
    """
    config = adapted.peft_config[adapter]
    ranks, scales, changed = dict[str, int](), dict[str, float](), False
    for name, tensor in state.items():
        layer, _, rest = name.replace(".lora_embedding_A.", ".lora_A.").partition(".lora_A.")
        if rest.split(".")[0] == adapter:
            place = layer.removeprefix("base_model.model.")
            ranks[place], scales[place] = len(tensor), adapted.get_submodule(layer).scaling[adapter]
            changed |= len(tensor) != adapted.get_submodule(layer).r[adapter]
    made = copy(config)
    # a set has another order in a copy and in each process, and equal adapters are equal files
    vars(made).update({name: sorted(value) for name, value in vars(made).items() if isinstance(value, set)})
    if not changed:
        return made
    # alpha over the rank is the scale
    alphas = {place: scales[place] * rank for place, rank in ranks.items()}
    made.r, made.lora_alpha = max(ranks.values()), max(alphas.values())
    # the start is overwritten, and some have conditions on the rank
    made.use_rslora, made.init_lora_weights = False, True
    made.rank_pattern, made.alpha_pattern = pattern(ranks), pattern(alphas)
    return made


def pattern(values: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each layer in the way of peft, or nothing where all are equal.

    Args:
        values: values by path of the layer.
    """
    # peft takes the first path that ends alike
    ordered = dict(sorted(values.items(), key=lambda item: -len(item[0])))
    return ordered if len(set(values.values())) > 1 else {}


def export_adapters(
    checkpoint: Path | str, folder: Path | str, method: type[ClientModule] = ClientModule, **kwargs: Any
) -> list[Path]:
    """Write the adapters in a federation's checkpoint: a folder for each client by name, and ``global``.

    Each client's model is that of ``load_from_checkpoint(checkpoint, client=NAME)``, written as by `save_adapters`. A
    checkpoint of a site of a deployment has one client, and no global model.

    Args:
        checkpoint: the checkpoint.
        folder: parent of the folders.
        method: class of the client module, of a run from Python.
        **kwargs: further arguments of ``load_from_checkpoint``; a run from Python needs ``net=``.

    Returns:
        The folders.

    Raises:
        MisconfigurationException: if there is no such checkpoint, its net has no adapters or can't be built, or no
            folder of adapters is a client's model.
    """
    if not Path(checkpoint).is_file():
        raise MisconfigurationException(f"checkpoint={str(checkpoint)!r} is no file; give a .ckpt of a run.")
    # once: a language model takes long to load
    model = method.load_from_checkpoint(checkpoint, **kwargs)
    saved = read_checkpoint(checkpoint)["federation"]
    names: Sequence[int | str] = saved.get("names") or range(len(payloads_of(saved)))
    # at a site by its name, or else its id, both of which are there
    at_site = saved.get("own")
    if at_site:
        names = [next(iter(at_site))]

    def models() -> Iterator[tuple[Path, ClientModule, int]]:
        if not at_site:
            yield Path(folder, GLOBAL), model, 0
        modules = model.architectures()
        for client in [*names, *(name for name in joined_models(checkpoint, saved) if name not in map(str, names))]:
            own = saved_client(checkpoint, saved, client, model.architecture_of, model.device)
            modules[own.architecture].become_saved(own)
            yield Path(folder, folder_name(client)), modules[own.architecture], own.architecture

    return save_all(models())
