"""Write clients' adapters as folders that ``peft`` loads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.client.joined_clients import joined_models
from pfl_lightning.client.module import ClientModule, saved_client

GLOBAL = "global"
"""Name of the folder with the global model's adapters."""


def folder_name(client: int | str) -> str:
    """Return the name of a client's folder.

    >>> [folder_name(client) for client in (3, "Alice B.", "a/b", "global", "..")]
    ['3', 'Alice B.', 'a%2Fb', 'global_', '.._']

    Args:
        client: the client's name, or its id where clients have no names.
    """
    name = quote(str(client), safe=" @+,=()'!")
    return f"{name}_" if name == GLOBAL or not name.strip(". ") else name


def save_adapters(client: ClientModule, folder: Path | str) -> None:
    """Write the adapters of a client module as they are now, for ``peft.PeftModel.from_pretrained(base, folder)``.

    Args:
        client: the client module, whose net has its ``PeftModel`` as ``adapted``, such as `CausalLM`.
        folder: the folder, made if missing.

    Raises:
        MisconfigurationException: if the net has no adapters.
    """
    adapted_of(client).save_pretrained(str(folder), save_embedding_layers=False)


def adapted_of(client: ClientModule) -> Any:
    """Return the ``PeftModel`` of a client module's net; arguments and errors are those of `save_adapters`."""
    adapted = getattr(client.net, "adapted", None)
    if not hasattr(adapted, "save_pretrained"):
        raise MisconfigurationException(
            f"model.net={type(client.net).__name__} has no adapters to write; take CausalLM with its setting lora, or "
            "a net whose attribute adapted is its PeftModel."
        )
    return adapted


def export_adapters(
    checkpoint: Path | str, folder: Path | str, method: type[ClientModule] = ClientModule, **kwargs: Any
) -> list[Path]:
    """Write the adapters in a federation's checkpoint: a folder for each client by name, and ``global``.

    Each client's model is that of ``load_from_checkpoint(checkpoint, client=NAME)``. A checkpoint of a site of a
    deployment has one client, and no global model.

    Args:
        checkpoint: the checkpoint.
        folder: parent of the folders.
        method: class of the client module, of a run from Python.
        **kwargs: further arguments of ``load_from_checkpoint``; a run from Python needs ``net=``.

    Returns:
        The folders.

    Raises:
        MisconfigurationException: if there is no such checkpoint, its net has no adapters, or can't be built.
    """
    if not Path(checkpoint).is_file():
        raise MisconfigurationException(f"checkpoint={str(checkpoint)!r} is no file; give a .ckpt of a run.")
    # once: a language model takes long to load
    model = method.load_from_checkpoint(checkpoint, **kwargs)
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["federation"]
    written: list[Path] = []
    names: Sequence[int | str] = saved.get("names") or range(len(saved["payloads"]))
    # at a site by its name, or else its id, both of which are there
    if at_site := saved.get("own"):
        names = [next(iter(at_site))]
    else:
        written.append(Path(folder, GLOBAL))
        save_adapters(model, written[0])
    modules = model.architectures()
    for client in [*names, *(name for name in joined_models(checkpoint, saved) if name not in map(str, names))]:
        own = saved_client(checkpoint, saved, client, model.architecture_of, model.device)
        modules[own.architecture].become_saved(own)
        written.append(Path(folder, folder_name(client)))
        save_adapters(modules[own.architecture], written[-1])
    return written
