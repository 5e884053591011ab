"""Where what stays with clients is between rounds."""

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data.memory import free_memory
from pfl_lightning.messages import num_bytes

ROOM = 0.25
"""The share of what is free on a GPU that clients may take there without being told to."""


def stay_on_device(where: str, modules: Sequence[ClientModule], clients: int, ranks: int) -> bool:
    """Whether clients are left on the device where they train.

    Args:
        where: the setting; ``auto`` says in one line what it takes and why.
        modules: the client modules, on their device.
        clients: how many clients there are.
        ranks: how many devices train them; with several a client is on another one in each round.
    """
    device = modules[0].device
    if where != "auto" or device.type == "cpu" or ranks > 1:
        return where == "device"
    need, free = clients * max(map(bytes_of, modules)), free_memory(device)
    stays = need <= ROOM * free
    rank_zero_info(
        f"trainer.client_states='auto' keeps clients {f'on {device.type}' if stays else 'in memory'}: there they take "
        f"{need / 2**30:.2f} GiB, and on {device.type} {free / 2**30:.2f} GiB are free."
    )
    return stays


def bytes_of(module: ClientModule) -> int:
    """What stays with a client, at most: its personal entries, and two tensors a parameter where optimizers live on."""
    optimizers = 2 * num_bytes(list(module.parameters())) if module.optimizer_lifetime == "run" else 0
    return num_bytes(personal_entries(module, module.state_dict())) + optimizers
