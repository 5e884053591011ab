"""Copies of a client's net that have their own weights, and share what is frozen."""

import copy

from torch import nn

from pfl_lightning.client import ClientModule
from pfl_lightning.client.common import common_parameters


def add_copy(client: ClientModule, name: str, part: nn.Module) -> None:
    """Gives a client module a copy of a part of its net as a submodule; common parameters are the same tensors in both.

    Args:
        client: the client module.
        name: the copy's name in it.
        part: the part.
    """
    common = {id(parameter): parameter for parameter in common_parameters(client).values()}
    made = copy.deepcopy(part, dict(common))
    client.add_module(name, made)
    again = {f"{name}.{own}" for own, p in made.named_parameters(remove_duplicate=False) if id(p) in common}
    client.common_names |= again


def copy_net(client: ClientModule, name: str) -> None:
    """Copies the net as it stands into a copy of it, but for what is common.

    Args:
        client: the client module.
        name: the copy's name in it.
    """
    entries = {own: t for own, t in client.net.state_dict().items() if f"net.{own}" not in client.common_names}
    client.get_submodule(name).load_state_dict(entries, strict=False)
