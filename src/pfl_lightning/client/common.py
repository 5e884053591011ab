"""Entries of a client module that travel, that stay, and that are common: frozen, and there once for all clients."""

from collections.abc import Mapping

from torch import Tensor, nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.messages import StateDict, detached


def shared_entries(client: ClientModule, entries: Mapping[str, Tensor]) -> StateDict:
    """Those that travel.

    Args:
        client: the client module.
        entries: of its ``state_dict``.
    """
    return {name: t for name, t in entries.items() if client.is_shared(name) and name not in client.common_names}


def personal_entries(client: ClientModule, entries: Mapping[str, Tensor]) -> StateDict:
    """Those that stay with their client between rounds; see `shared_entries`."""
    return {name: t for name, t in entries.items() if client.is_personal(name) and name not in client.common_names}


def common_parameters(client: ClientModule) -> dict[str, nn.Parameter]:
    """Return the parameters that are common, by the first name of each."""
    rely_on(client, "net")
    return {name: parameter for name, parameter in client.named_parameters() if name in client.common_names}


def trained_parameters(client: ClientModule, path: str) -> dict[str, nn.Parameter]:
    """The parameters of a part that aren't common, by their names in it, whether a phase trains them now or not.

    Args:
        client: the client module.
        path: the part's name in it, such as ``net.classifier``.
    """
    rely_on(client, path)
    part = client.get_submodule(path)
    return {name: p for name, p in part.named_parameters() if f"{path}.{name}" not in client.common_names}


def rely_on(client: ClientModule, path: str) -> None:
    """Note that something is made by what is common in a part: until the federation is set up, that may not change.

    Args:
        client: the client module.
        path: the part's name in it.
    """
    if not client.settled:
        client.relied_on.add(f"{path}.")


def whole_model(client: ClientModule) -> StateDict:
    """Copies of all entries on the CPU; what is common is one tensor under all of its names."""
    copies: StateDict = {}
    once: dict[int, Tensor] = {}
    for name, tensor in client.state_dict().items():
        if name not in client.common_names:
            copies[name] = detached(tensor)
            continue
        if tensor.data_ptr() not in once:
            once[tensor.data_ptr()] = detached(tensor)
        copies[name] = once[tensor.data_ptr()]
    return copies
