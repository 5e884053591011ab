"""Free memory of a device."""

import os

import torch


def free_memory(device: torch.device) -> int:
    """Return the number of bytes free for tensors on a device.

    Args:
        device: a GPU or the CPU.
    """
    if device.type == "cuda":
        # torch's allocator keeps freed blocks: the driver counts them as taken, though tensors may use them
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # a cautious 2 GiB on systems that don't report free memory, such as macOS and Windows
    return 2**31
