"""Decide if clients' states stay on the training device between rounds."""

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info

from pfl_lightning.client.common import personal_entries
from pfl_lightning.client.module import ClientModule
from pfl_lightning.data.memory import free_memory
from pfl_lightning.messages import num_bytes

ROOM = 0.25
"""The largest share of free GPU memory that ``client_states="auto"`` gives to client states."""


def stay_on_device(where: str, modules: Sequence[ClientModule], clients: int, ranks: int) -> bool:
    """Return True if clients' states stay on the device where clients train.

    Args:
        where: the setting ``trainer.client_states``; for ``auto`` a line reports the choice and the reason.
        modules: the client modules, on their device.
        clients: the number of clients.
        ranks: the number of devices that train clients; with several, a client moves between devices from round to
            round.
    """
    device = modules[0].device
    if where != "auto" or device.type == "cpu" or ranks > 1:
        return where == "device"
    # With several architectures the largest counts for all clients.
    need, free = clients * max(map(bytes_of, modules)), free_memory(device)
    stays = need <= ROOM * free
    rank_zero_info(
        f"trainer.client_states='auto' keeps clients {f'on {device.type}' if stays else 'in memory'}: there they take "
        f"{need / 2**30:.2f} GiB, and on {device.type} {free / 2**30:.2f} GiB are free."
    )
    return stays


def bytes_of(module: ClientModule) -> int:
    """Return an upper bound of a client's state in bytes.

    The bound is the personal entries, plus two tensors per parameter (as Adam keeps) if optimizers last the whole run.
    """
    optimizers = 2 * num_bytes(list(module.parameters())) if module.optimizer_lifetime == "run" else 0
    return num_bytes(personal_entries(module, module.state_dict())) + optimizers
