"""Sort a client module's entries into shared (travelling), personal (staying), and common (frozen, for all clients)."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from pfl_lightning.client.module import ClientModule
from pfl_lightning.messages import StateDict, detached


def shared_entries(client: ClientModule, entries: Mapping[str, Tensor]) -> StateDict:
    """Return the entries which travel between client and server.

    Args:
        client: the client module.
        entries: entries of its ``state_dict``, by name.
    """
    return {name: t for name, t in entries.items() if client.is_shared(name) and name not in client.common_names}


def personal_entries(client: ClientModule, entries: Mapping[str, Tensor]) -> StateDict:
    """Return the entries which stay with the client between rounds; arguments as for `shared_entries`.

    An entry may be both shared and personal.
    """
    # a method's own `is_shared` and `is_personal` may forget common entries, so both functions take them out
    return {name: t for name, t in entries.items() if client.is_personal(name) and name not in client.common_names}


def common_parameters(client: ClientModule) -> dict[str, nn.Parameter]:
    """Return the parameters frozen for all clients, each tied parameter under its first name only.

    Args:
        client: the client module.
    """
    rely_on(client, "net")
    return {name: parameter for name, parameter in client.named_parameters() if name in client.common_names}


def trained_parameters(client: ClientModule, path: str) -> dict[str, nn.Parameter]:
    """Return a part's parameters without the common ones, by name within the part.

    A parameter that the current phase leaves still is in the dict too.

    Args:
        client: the client module.
        path: the part's name in the client module, such as ``net.classifier``.
    """
    rely_on(client, path)
    part = client.get_submodule(path)
    return {name: p for name, p in part.named_parameters() if f"{path}.{name}" not in client.common_names}


def rely_on(client: ClientModule, path: str) -> None:
    """Remember a part of the net whose frozen parameters a method has built upon, such as by a copy or a vector.

    `ClientModule.settle_common` then refuses a change of ``requires_grad`` in that part.

    Args:
        client: the client module.
        path: the part's name in the client module.
    """
    if not client.settled:
        client.relied_on.add(f"{path}.")


def whole_model(client: ClientModule, common: bool = True, without: Collection[str] = ()) -> StateDict:
    """Return copies of all entries on the CPU.

    Args:
        client: the client module.
        common: whether common entries are among them.
        without: names of entries to leave out.

    Returns:
        The entries, by name. A common tensor with several names is copied once, and is the same tensor under each name.
    """
    copies: StateDict = {}
    once: dict[int, Tensor] = {}
    for name, tensor in client.state_dict().items():
        if name in without:
            continue
        if name not in client.common_names:
            copies[name] = detached(tensor)
            continue
        if not common:
            continue
        # `add_copy` gives a common tensor further names, under which it isn't copied and saved again
        if tensor.data_ptr() not in once:
            once[tensor.data_ptr()] = detached(tensor)
        copies[name] = once[tensor.data_ptr()]
    return copies
