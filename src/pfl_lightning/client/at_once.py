"""Marks of hooks for many clients in one call."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from pfl_lightning.client.module import ClientModule
from pfl_lightning.internals.of_torch import is_wrapped, unwrapped

Hook = TypeVar("Hook", bound=Callable[..., Any])


def at_once(hook: Hook) -> Hook:
    """Let engine ``vectorised`` run a `ClientModule.on_download` or `ClientModule.upload` once for many clients.

    The hook then runs once under ``torch.func.vmap``, where each entry, payload and update is one client's, and on a
    GPU launches no more kernels for many clients than for one. Like a training step, it makes no decision by the value
    of a tensor (``torch.where`` does), draws no random numbers, and reads neither ``client_id`` nor samples; of the
    data it may read ``class_counts``, ``size("train")``, ``marked_chunks(...)``, ``drawn(...)``, and ``classes`` for
    keys of its update. `anyone` tells whether a flag is true for any of the clients. Hooks without the mark run client
    by client, with the same results.

    The mark is of this definition alone: a subclass's override needs its own.

    Args:
        hook: the method, in the body of its class.
    """
    # on the function: an override is another one, and has to be marked by its own author
    vars(hook)["at_once"] = True
    return hook


def anyone(flag: Tensor) -> bool:
    """Return whether a flag is true, for any of the clients under `at_once`; on a GPU, waits for the value.

    Args:
        flag: a boolean scalar.
    """
    while is_wrapped(flag):
        flag = unwrapped(flag)
    return bool(flag.any())


def runs_at_once(module: ClientModule, hook: str) -> bool:
    """Return whether every definition of a hook among a client module's classes has the mark.

    Args:
        module: the client module.
        hook: name of the hook.
    """
    own = [vars(each)[hook] for each in type(module).__mro__ if hook in vars(each) and each is not ClientModule]
    return hook not in vars(module) and all(getattr(each, "at_once", False) for each in own)
