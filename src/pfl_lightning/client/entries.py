"""Write into a client module's ``state_dict``, and read clients from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from pfl_lightning.messages import Message, StateDict


def frozen_names(module: nn.Module, path: str) -> frozenset[str]:
    """Return the full names of a part's parameters with ``requires_grad=False``.

    Args:
        module: the whole module.
        path: the part's name in it.
    """
    # a tied parameter counts under each of its names, as it does in the `state_dict`
    parameters = module.get_submodule(path).named_parameters(remove_duplicate=False)
    return frozenset(f"{path}.{name}" for name, parameter in parameters if not parameter.requires_grad)


def copy_entries(entries: Mapping[str, Tensor], own: StateDict, client: str) -> None:
    """Copy tensors into the entries of the same names.

    Args:
        entries: the tensors from the server, by name.
        own: the client module's ``state_dict``; changed in place.
        client: name of the client and its class, for the error.

    Raises:
        MisconfigurationException: if an entry doesn't exist or has another shape.
    """
    for name, tensor in entries.items():
        # checked here, since `copy_` would broadcast a smaller tensor in silence
        if name not in own or own[name].shape != tensor.shape:
            is_there = f"of shape {tuple(own[name].shape)}" if name in own else f"not in {sorted(own)}"
            raise MisconfigurationException(
                f"{client}.on_download: the server sent {name!r} of shape {tuple(tensor.shape)}, which is {is_there} "
                "in the client's state_dict; let the aggregator send what upload gave it, by the same names."
            )
        own[name].copy_(tensor)


@dataclass(frozen=True)
class SavedClient:
    """One client's part of a federation's checkpoint.

    Args:
        architecture: index of its network in the client module's ``architectures``.
        common: the common entries of its architecture, where they differ from the global model's.
        personal: its personal entries.
        payload: the payload that it would receive in the next round.
    """

    architecture: int
    common: StateDict
    personal: StateDict
    payload: Message


def net_of_python(path: str | Path) -> str:
    """Return the name of a checkpoint's network, if the checkpoint can't rebuild the network; else an empty string.

    A run from Python may take any function as its ``net``, and no function is saved.

    Args:
        path: a checkpoint.
    """
    saved = torch.load(path, map_location="cpu", weights_only=True)
    # a checkpoint of plain Lightning, or a net from the command line, whose configuration is in `hyper_parameters`
    if "federation" not in saved or "net" in saved.get("hyper_parameters", {}):
        return ""
    net: str = saved["federation"].get("settings", {}).get("model.net", "a network of its own")
    return net.split("(")[0]


def saved_client(
    path: str | Path, client: int, architecture_of: Callable[[int, int], int], device: torch.device
) -> SavedClient:
    """Read one client from a federation's checkpoint.

    Args:
        path: the checkpoint.
        client: the client's id.
        architecture_of: gives the index of a client's architecture from its id and the number of clients.
        device: the device to put tensors on.

    Raises:
        MisconfigurationException: if the federation has no such client, or its personal entries are kept at a site.
    """
    saved = torch.load(path, map_location=device, weights_only=True)["federation"]
    payloads = saved["payloads"]
    if client not in payloads:
        raise MisconfigurationException(f"client={client} is not in {path}: it has clients 0 to {len(payloads) - 1}.")
    architecture = architecture_of(client, len(payloads))
    own = saved["clients"].get(client, {})
    # in a deployment personal entries never leave their site, and the server saves a name for them only
    if own.get("kept") is not None:
        raise MisconfigurationException(
            f"client={client}: its personal entries are at its site and not in {path}; export its model there."
        )
    # a client that has never trained still has the initial personal entries
    personal = own.get("personal", saved["initial"][architecture])
    common = saved.get("common", {}).get(architecture, {})
    return SavedClient(architecture, common, personal, payloads[client])
