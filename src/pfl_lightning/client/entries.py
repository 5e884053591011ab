"""Entries of a client module's ``state_dict``: what is copied into them, and those that a checkpoint holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.messages import Message, StateDict


def frozen_names(module: nn.Module, path: str) -> frozenset[str]:
    """Names of the parameters of a part that require no gradient, as entries of the whole.

    Args:
        module: the whole.
        path: the part's name in it.
    """
    parameters = module.get_submodule(path).named_parameters(remove_duplicate=False)
    return frozenset(f"{path}.{name}" for name, parameter in parameters if not parameter.requires_grad)


def copy_entries(entries: Mapping[str, Tensor], own: StateDict, client: str) -> None:
    """Copies named tensors into the entries of the same names.

    Args:
        entries: what the server sent.
        own: a client module's ``state_dict``.
        client: which client of which client module, for the message.

    Raises:
        MisconfigurationException: if there is no such entry, or one of another shape.
    """
    for name, tensor in entries.items():
        if name not in own or own[name].shape != tensor.shape:
            is_there = f"of shape {tuple(own[name].shape)}" if name in own else f"not in {sorted(own)}"
            raise MisconfigurationException(
                f"{client}.on_download: the server sent {name!r} of shape {tuple(tensor.shape)}, which is {is_there} "
                "in the client's state_dict; let the aggregator send what upload gave it, by the same names."
            )
        own[name].copy_(tensor)


@dataclass(frozen=True)
class SavedClient:
    """What a federation's checkpoint holds of a client.

    Args:
        architecture: which of the client module's ``architectures`` it has.
        common: the common entries of its architecture, where they aren't the global model's.
        personal: its personal entries.
        payload: what the next round would send it.
    """

    architecture: int
    common: StateDict
    personal: StateDict
    payload: Message


def net_of_python(path: str | Path) -> str:
    """Return the name of the net in a federation's checkpoint that doesn't hold what builds it; empty if it does.

    Args:
        path: the checkpoint.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if "federation" not in saved or "net" in saved.get("hyper_parameters", {}):
        return ""
    net: str = saved["federation"].get("settings", {}).get("model.net", "a network of its own")
    return net.split("(")[0]


def saved_client(
    path: str | Path, client: int, architecture_of: Callable[[int, int], int], device: torch.device
) -> SavedClient:
    """Reads a client out of a federation's checkpoint.

    Args:
        path: the checkpoint.
        client: its id.
        architecture_of: which architecture a client has, by its id and the number of clients.
        device: where the tensors shall be.

    Raises:
        MisconfigurationException: if there is no such client.
    """
    saved = torch.load(path, map_location=device, weights_only=True)["federation"]
    payloads = saved["payloads"]
    if client not in payloads:
        raise MisconfigurationException(f"client={client} is not in {path}: it has clients 0 to {len(payloads) - 1}.")
    architecture = architecture_of(client, len(payloads))
    own = saved["clients"].get(client, {})
    if own.get("kept") is not None:
        raise MisconfigurationException(
            f"client={client}: what stays with it is at its site, and not in {path}; export its model there."
        )
    personal = own.get("personal", saved["initial"][architecture])
    common = saved.get("common", {}).get(architecture, {})
    return SavedClient(architecture, common, personal, payloads[client])
