"""Copies of a client's net with separate weights and common frozen parameters."""

import copy

from torch import nn

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import common_parameters


def add_copy(client: ClientModule, name: str, part: nn.Module) -> None:
    """Add a copy of a part of the net to a client module; common parameters are the same tensors in both.

    Args:
        client: the client module.
        name: the copy's name in the client module.
        part: the part.
    """
    made, common = separate(client, part)
    client.add_module(name, made)
    client.common_names |= {f"{name}.{own}" for own in common}


def separate(client: ClientModule, part: nn.Module) -> tuple[nn.Module, set[str]]:
    """Return a copy of a part of the net, and the names in it of common parameters, which are the same tensors.

    Args:
        client: the client module.
        part: the part.
    """
    common = {id(parameter): parameter for parameter in common_parameters(client).values()}
    # with common parameters in its memo, deepcopy takes them as copied already
    made = copy.deepcopy(part, dict(common))
    return made, {name for name, p in made.named_parameters(remove_duplicate=False) if id(p) in common}


def copy_net(client: ClientModule, name: str) -> None:
    """Copy the net's current weights into a copy made by `add_copy`, except common parameters.

    Args:
        client: the client module.
        name: the copy's name in the client module.
    """
    entries = {own: t for own, t in client.net.state_dict().items() if f"net.{own}" not in client.common_names}
    client.get_submodule(name).load_state_dict(entries, strict=False)
